"""What the live view shows: one document, small enough to be asked for ten times a second.

Rates and histories are the viewer's to make; this holds the present alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from alloy_agent.daemon.shareviews import TopShare, top_shares
from alloy_agent.host import clock
from alloy_agent.model import AuditResult, Occupant, Quality, Signal, Snapshot, Value, Verdict
from alloy_agent.telemetry import signals as readings

if TYPE_CHECKING:
    from alloy_agent.conformance.keeper.messages import ShareView
    from alloy_agent.daemon.telemetry import Telemetry
    from alloy_agent.telemetry.gates import Gate


class TopPartition(Value, frozen=True, kw_only=True):
    """One partition: who has it, how busy it is, and whether its gates are open."""

    id: str
    generation: int
    device: str
    profile: str
    tenant: str = ""
    occupants: tuple[Occupant, ...] = ()
    share: str = ""
    tier: str = ""
    gate: str = "unknown"
    gate_name: str = ""
    reason: str = ""
    active_ratio: float | None = None
    bandwidth_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_bytes: int | None = None
    headroom_ratio: float | None = None
    scarcest: str = ""
    absent: tuple[str, ...] = ()  # resources that nobody measures: headroom is without them
    age_s: float | None = None


class TopDevice(Value, frozen=True, kw_only=True):
    """One device."""

    id: str
    index: int
    model: str
    condition: str
    health: str
    gate: str = "unknown"
    gate_name: str = ""
    reason: str = ""
    power_w: float | None = None
    margin_c: float | None = None
    memory_used_bytes: float | None = None
    memory_bytes: int | None = None
    faults: tuple[str, ...] = ()


class TopDocument(Value, frozen=True, kw_only=True):
    """The node of this moment."""

    schema: str = "alloy.top/v1"
    node: str
    taken_at_s: float
    snapshot_age_s: float | None
    devices: tuple[TopDevice, ...] = ()
    partitions: tuple[TopPartition, ...] = ()
    verdict: str = ""
    findings: tuple[str, ...] = ()
    drains: tuple[str, ...] = ()
    samplers: dict[str, str] = msgspec.field(default_factory=dict)
    shares: tuple[TopShare, ...] = ()


Latest = Mapping[tuple[str, str], Signal]


def top_document(  # noqa: PLR0913, PLR0917 - one for each part of what is shown
    node: str,
    snapshot: Snapshot | None,
    audit: AuditResult | None,
    telemetry: Telemetry | None,
    measured: Sequence[Signal],
    shares: Sequence[ShareView] = (),
) -> TopDocument:
    """Return the document of now."""
    now_s = clock.boottime_s()
    if snapshot is None:
        return TopDocument(
            node=node, taken_at_s=now_s, snapshot_age_s=None, shares=top_shares(shares)
        )
    latest = {(signal.spec.subject, signal.spec.name): signal for signal in measured}
    gates = {} if telemetry is None else telemetry.deciding()
    return TopDocument(
        node=node,
        taken_at_s=now_s,
        snapshot_age_s=round(max(0.0, now_s - snapshot.taken_at_s), 3),
        devices=_devices(snapshot, latest, gates, telemetry),
        partitions=_partitions(snapshot, latest, gates, telemetry, audit),
        verdict="" if audit is None else audit.verdict,
        findings=_findings(audit),
        drains=()
        if telemetry is None
        else tuple(f"{d.subject or 'node'}: {d.reason}" for d in telemetry.drains),
        samplers={} if telemetry is None else telemetry.sampler_words(),
        shares=top_shares(shares),
    )


def _value(latest: Latest, subject: str, name: str) -> float | None:
    signal = latest.get((subject, name))
    return signal.value if signal is not None and signal.quality is Quality.VALUE else None


def _gate(gates: Mapping[str, Gate], subject: str) -> dict[str, str]:
    gate = gates.get(subject)
    if gate is None:
        return {}
    return {"gate": gate.state, "gate_name": gate.gate, "reason": gate.reason}


def _devices(
    snapshot: Snapshot, latest: Latest, gates: Mapping[str, Gate], telemetry: Telemetry | None
) -> tuple[TopDevice, ...]:
    known = {} if telemetry is None else telemetry.health
    found = []
    for device in snapshot.devices:
        health = known.get(device.id)
        found.append(
            TopDevice(
                id=device.id,
                index=device.index,
                model=device.model,
                condition=device.condition,
                health="unknown" if health is None else health.level,
                power_w=_value(latest, device.id, "alloy_device_power_watts"),
                margin_c=_value(latest, device.id, "alloy_device_temperature_headroom_celsius"),
                memory_used_bytes=_value(latest, device.id, "alloy_device_memory_used_bytes"),
                memory_bytes=device.memory_bytes,
                faults=() if health is None else tuple(f.code for f in health.faults),
                **_gate(gates, device.id),
            )
        )
    return tuple(found)


def _partitions(
    snapshot: Snapshot,
    latest: Latest,
    gates: Mapping[str, Gate],
    telemetry: Telemetry | None,
    audit: AuditResult | None,
) -> tuple[TopPartition, ...]:
    now_s = clock.boottime_s()
    tiers = {r.partition.id: str(r.tier) for r in audit.partitions} if audit is not None else {}
    rooms = {} if telemetry is None else telemetry.headrooms
    found = []
    for piece in snapshot.partitions:
        room = rooms.get((str(piece.id), piece.generation))
        active = latest.get((piece.id, "alloy_partition_compute_active_ratio"))
        found.append(
            TopPartition(
                id=piece.id,
                generation=piece.generation,
                device=piece.device,
                profile=piece.profile,
                tenant=piece.tenant or "",
                occupants=piece.occupants,
                share=piece.share,
                tier=tiers.get(piece.id, ""),
                active_ratio=_value(latest, piece.id, "alloy_partition_compute_active_ratio"),
                bandwidth_ratio=_value(
                    latest, piece.id, "alloy_partition_memory_bandwidth_active_ratio"
                ),
                memory_used_bytes=_value(latest, piece.id, "alloy_partition_memory_used_bytes"),
                memory_bytes=piece.memory_bytes,
                headroom_ratio=None if room is None else room.least,
                scarcest="" if room is None else room.scarcest,
                absent=() if room is None else room.absent,
                age_s=None if active is None else round(readings.age_s(active, now_s), 3),
                **_gate(gates, piece.id),
            )
        )
    return tuple(found)


def _findings(audit: AuditResult | None) -> tuple[str, ...]:
    """Return what the newest audit holds against the node, at most twenty."""
    if audit is None:
        return ()
    judged = [(j, "") for j in audit.node_judgements]
    for report in audit.partitions:
        whose = ", ".join(map(str, report.partition.occupants))
        judged.extend((j, f" ({whose})" if whose else "") for j in report.judgements)
    bad = [(j, whose) for j, whose in judged if j.verdict is Verdict.FAIL]
    return tuple(f"{j.check} {j.subject}{whose}: {j.observed}" for j, whose in bad[:20])
