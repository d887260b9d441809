"""The nouns on the wire: pure functions from `model` values to messages and from commands back.

Rules that stay true in here:

* Times leave as ages on the node's boot clock; nothing in here reads a clock.
* What is None stays absent; a reading without a value travels as its quality, never as a zero that
  could be taken for one.
* A command that makes no sense raises `ConfigError` naming the field; the caller answers with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

from alloy_agent import leases
from alloy_agent.errors import ConfigError
from alloy_agent.model import (
    Capabilities,
    Condition,
    Device,
    Finding,
    Lease,
    LeasedPiece,
    LeaseId,
    LeaseState,
    Link,
    Mode,
    Owner,
    Partition,
    PartitionId,
    Profile,
    Snapshot,
    TenantId,
    Tier,
    Value,
)
from alloy_agent.proto import agent_pb2 as pb

SCHEMA_VERSION: Final = 1
UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1


def enum_number(kind: str, value: StrEnum | None) -> Any:
    """Return the wire's number of an enum value; VENDOR_AMD for ("Vendor", Vendor.AMD)."""
    if value is None:
        return 0
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind)
    enum: Any = getattr(pb, kind)
    return enum.Value(f"{prefix.strip('_').upper()}_{value.name}")


def age_ms(time_s: float, now_s: float) -> int:
    """Return how old a time of the boot clock is, in whole milliseconds; 0 when it is ahead."""
    return min(UINT32_MAX, max(0, round((now_s - time_s) * 1e3)))


# --- hello, inventory and state -------------------------------------------------------------------


def hello(  # noqa: PLR0913 - one argument for each part of the message
    *,
    node: str,
    cluster: str,
    boot_id: str,
    agent_version: str,
    capabilities: Iterable[Capabilities],
    ledger: leases.Ledger,
    now_s: float,
    labels: Mapping[str, str] | None = None,
) -> pb.Hello:
    """Return who this node is; the uplink adds where its outbox stands."""
    return pb.Hello(
        node=node,
        cluster=cluster,
        boot_id=boot_id,
        agent_version=agent_version,
        capabilities=[capability(one) for one in capabilities],
        brain_epoch=ledger.brain_epoch,
        highest_token=ledger.highest_token,
        leases=[lease(one, now_s) for one in ledger.leases],
        labels=labels or {},
    )


def capability(one: Capabilities) -> pb.Capability:
    """Return what a backend can do."""
    return pb.Capability(
        backend=one.backend,
        vendors=[enum_number("Vendor", vendor) for vendor in one.vendors],
        library=one.library,
        library_version=one.library_version,
        can_partition=one.can_partition,
        can_share=one.can_share,
        has_events=one.has_events,
        notes=one.notes,
    )


def _profile(one: Profile) -> pb.Profile:
    return pb.Profile(
        name=one.name,
        size=one.size,
        starts=one.starts,
        max_count=one.max_count,
        memory_bytes=one.memory_bytes,
        compute_units=one.compute_units,
        attributes=one.attributes,
        vendor_ref=one.vendor_ref,
    )


def _mode(one: Mode) -> pb.Mode:
    return pb.Mode(
        kind=enum_number("ModeKind", one.kind),
        current=one.current,
        pending=one.pending,
        available=one.available,
        change=enum_number("ModeChange", one.change),
        scope=enum_number("Scope", one.scope),
    )


def _link(one: Link) -> pb.Link:
    return pb.Link(
        peer=one.peer,
        kind=one.kind,
        bandwidth_bytes_per_s=one.bandwidth_bytes_per_s,
        hops=one.hops,
    )


def _owner(one: Owner) -> pb.Owner:
    vendors = [enum_number("Vendor", vendor) for vendor in one.vendors]
    return pb.Owner(name=one.name, evidence=one.evidence, vendors=vendors)


def device(one: Device, *, draining: bool = False) -> pb.Device:
    """Return a device with all that a placement may depend on."""
    limits = [
        pb.TierLimit(way=limit.way, tier=enum_number("Tier", limit.tier), reason=limit.reason)
        for limit in one.tier_limits
    ]
    return pb.Device(
        id=one.id,
        vendor=enum_number("Vendor", one.vendor),
        model=one.model,
        backend=one.backend,
        scheme=enum_number("Scheme", one.scheme),
        slices=one.slices,
        slice_name=one.slice_name,
        index=one.index,
        simulated=one.simulated,
        condition=enum_number("Condition", one.condition),
        condition_reason=one.condition_reason,
        bus=one.bus,
        serial=one.serial,
        numa_node=one.numa_node,
        hive=one.hive,
        driver=one.driver,
        memory_bytes=one.memory_bytes,
        compute_units=one.compute_units,
        units=one.units,
        reserved_units=one.reserved_units,
        profiles=[_profile(profile) for profile in one.profiles],
        modes=[_mode(mode) for mode in one.modes],
        links=[_link(link) for link in one.links],
        tier_limits=limits,
        legal_sizes=one.legal_sizes,
        pci_id=one.pci_id,
        fault_note=one.fault_note,
        draining=draining,
    )


def inventory(
    snapshot: Snapshot, revision: int, *, draining: frozenset[str] = frozenset()
) -> pb.Inventory:
    """Return the devices of a node and who else manages them."""
    return pb.Inventory(
        revision=revision,
        devices=[device(one, draining=one.id in draining) for one in snapshot.devices],
        owners=[_owner(one) for one in snapshot.owners],
        boot_id=snapshot.boot_id,
    )


class Standing(Value, frozen=True, kw_only=True):
    """What other rooms know of a partition: its proved tier, its lease, whether it is drained."""

    tier: Tier | None = None
    tier_reason: str = ""
    lease: LeaseId | None = None
    evidence_sequence: int = 0
    draining: bool = False


def partition(one: Partition, standing: Standing) -> pb.Partition:
    """Return a partition as it is now."""
    return pb.Partition(
        id=one.id,
        device=one.device,
        profile=one.profile,
        start=one.placement.start,
        size=one.placement.size,
        incarnation=one.incarnation,
        generation=one.generation,
        uuid=one.uuid,
        memory_bytes=one.memory_bytes,
        compute_units=one.compute_units,
        share=enum_number("Share", one.share),
        ordinal=one.ordinal,
        managed=one.managed,
        tenant=one.tenant,
        tier=enum_number("Tier", standing.tier),
        tier_reason=standing.tier_reason,
        lease=standing.lease,
        units=one.units,
        evidence_sequence=standing.evidence_sequence,
        draining=standing.draining,
    )


def partition_state(
    snapshot: Snapshot,
    revision: int,
    now_s: float,
    standings: Mapping[PartitionId, Standing],
) -> pb.PartitionState:
    """Return all partitions of a node; rows of `fast` follow their order."""
    nothing = Standing()
    return pb.PartitionState(
        revision=revision,
        snapshot_sequence=snapshot.sequence,
        age_ms=age_ms(snapshot.taken_at_s, now_s),
        partitions=[partition(one, standings.get(one.id, nothing)) for one in snapshot.partitions],
    )


# --- events ---------------------------------------------------------------------------------------


def finding(one: Finding, now_s: float, evidence: tuple[int, str] = (0, "")) -> pb.Finding:
    """Return a changed verdict, with sequence and hash of its evidence record."""
    return pb.Finding(
        check=one.check,
        subject=one.subject,
        before=enum_number("Verdict", one.before),
        after=enum_number("Verdict", one.after),
        tier_before=enum_number("Tier", one.tier_before),
        tier_after=enum_number("Tier", one.tier_after),
        expected=one.expected,
        observed=one.observed,
        age_ms=age_ms(one.time_s, now_s),
        wall_s=one.time_wall_s,
        evidence_sequence=evidence[0],
        evidence_hash=evidence[1],
    )


def device_health(one: Device, before: Condition, now_s: float, since_s: float) -> pb.Health:
    """Return that a device answers differently from before."""
    states = {Condition.OK: pb.HEALTH_STATE_OK, Condition.STALLED: pb.HEALTH_STATE_UNKNOWN}
    return pb.Health(
        device=one.id,
        state=states.get(one.condition, pb.HEALTH_STATE_FAILED),
        before=states.get(before, pb.HEALTH_STATE_FAILED),
        cause=one.condition_reason or one.condition.value,
        code=f"condition:{one.condition.value}",
        source=one.backend,
        age_ms=age_ms(since_s, now_s),
        count=1,
        scope=pb.SCOPE_DEVICE,
    )


def slow(revision: int, quantiles: Iterable[tuple[str, str, Any]]) -> pb.Slow:
    """Return quantiles in columns.

    Args:
        revision: Of the PartitionState.
        quantiles: Signal, subject and `telemetry.window.Quantiles` of each window.
    """
    message = pb.Slow(partitions_revision=revision)
    columns: dict[tuple[str, int], pb.Quantiles] = {}
    for name, subject, found in quantiles:
        span_s = round(found.span_s)
        if found.p95 is None:
            continue  # not covered well enough: no number stands for that
        column = columns.get((name, span_s))
        if column is None:
            column = message.quantiles.add(signal=name, window_s=span_s)
            columns[name, span_s] = column
        column.subjects.append(subject)
        column.p50.append(found.p50)
        column.p95.append(found.p95)
        column.p99.append(found.p99)
        column.count.append(min(UINT32_MAX, found.count))
        column.coverage_e4.append(round(found.coverage_ratio * 1e4))
    return message


_LEVELS: Final = {
    "ok": pb.HEALTH_STATE_OK,
    "degraded": pb.HEALTH_STATE_DEGRADED,
    "failed": pb.HEALTH_STATE_FAILED,
    "unknown": pb.HEALTH_STATE_UNKNOWN,
    "quarantined": pb.HEALTH_STATE_QUARANTINED,
}


def health_change(change: Any, now_s: float, *, shadow: bool = False) -> pb.Health:
    """Return a change of a device's health, or one more event counted on it.

    In shadow mode the state on the wire stays what it was before, and the cause says what it would
    be.
    """
    cause = f"shadow: {change.after}: {change.cause}" if shadow else change.cause
    return pb.Health(
        device=change.device,
        state=_LEVELS[change.before if shadow else change.after],
        before=_LEVELS[change.before],
        cause=cause,
        code=change.code,
        source="telemetry",
        age_ms=age_ms(change.time_s, now_s),
        count=change.count,
        scope=enum_number("Scope", change.scope),
        action=change.action,
        session=change.session,
        wall_s=change.wall_s,
    )


def usage(row: Any) -> pb.Usage:
    """Return a closed row of usage."""
    return pb.Usage(
        partition=pb.PartitionRef(id=row.partition, generation=row.generation),
        tenant=row.tenant,
        lease=row.lease,
        start_wall_s=row.start_wall_s,
        allocated_s=row.allocated_ns / 1e9,
        active_s=row.active_ns / 1e9,
        idle_s=row.idle_ns / 1e9,
        unobserved_s=row.unobserved_ns / 1e9,
        energy_j=row.energy_j,
        method=row.method,
        final=row.final,
    )


def lease(one: Lease, now_s: float) -> pb.Lease:
    """Return a lease, its end as time that is left."""
    left_ms = 0 if one.expires_at_s is None else max(0, round((one.expires_at_s - now_s) * 1e3))
    return pb.Lease(
        id=one.id,
        tenant=one.tenant,
        partitions=[_ref(piece) for piece in one.pieces],
        token=one.token,
        state=enum_number("LeaseState", one.state),
        boot_id=one.boot_id,
        expires_in_ms=left_ms,
        has_end=one.expires_at_s is not None,
        epoch=one.epoch,
        age_ms=age_ms(one.granted_at_s, now_s),
    )


def lease_change(change: leases.Change, now_s: float, command_id: str = "") -> pb.LeaseChange:
    """Return that a lease moved to another state."""
    moved = lease(change.lease, now_s)
    moved.state = _lease_state(change.after)
    return pb.LeaseChange(
        lease=moved,
        before=_lease_state(change.before),
        cause=change.cause,
        command_id=command_id,
    )


def _lease_state(state: LeaseState | None) -> pb.LeaseState.ValueType:
    number: pb.LeaseState.ValueType = enum_number("LeaseState", state) or pb.LEASE_STATE_FREE
    return number


def _ref(piece: LeasedPiece) -> pb.PartitionRef:
    return pb.PartitionRef(id=piece.partition, generation=piece.generation)


# --- lease commands -------------------------------------------------------------------------------

LEASE_COMMANDS: Final = frozenset({"reserve", "commit", "renew", "release"})


def lease_command(message: pb.BrainMessage) -> leases.Command:
    """Return the lease command of a message.

    Raises:
        ConfigError: It is another kind of message, or a field is out of range.
    """
    kind = message.WhichOneof("body")
    epoch = message.epoch
    if kind == "reserve":
        return _reserve(message.reserve, epoch)
    if kind == "commit":
        wish = message.commit
        ttl_s = wish.ttl_ms / 1e3 if wish.ttl_ms else None
        return leases.Commit(lease=LeaseId(wish.lease), token=wish.token, ttl_s=ttl_s, epoch=epoch)
    if kind == "renew":
        renew = message.renew
        return leases.Renew(
            lease=LeaseId(renew.lease), token=renew.token, ttl_s=renew.ttl_ms / 1e3, epoch=epoch
        )
    if kind == "release":
        return leases.Release(
            lease=LeaseId(message.release.lease),
            token=message.release.token or None,
            tenant=TenantId(message.release.tenant) or None,
            epoch=epoch,
        )
    raise ConfigError(f"command {kind}: it is not about leases")


def _reserve(wish: pb.Reserve, epoch: int) -> leases.Reserve:
    """Return a reservation; its ids are checked by `leases`, its number of pieces here."""
    if len(wish.partitions) > leases.MAX_PIECES:
        raise ConfigError(f"lease {wish.lease[:64]!r}: more than {leases.MAX_PIECES} partitions")
    return leases.Reserve(
        lease=LeaseId(wish.lease),
        tenant=TenantId(wish.tenant),
        pieces=tuple(
            LeasedPiece(partition=PartitionId(ref.id), generation=ref.generation)
            for ref in wish.partitions
        ),
        ttl_s=wish.ttl_ms / 1e3,
        epoch=epoch,
    )


_REFUSED_AS: Final = {
    leases.Refusal.STALE_GENERATION: "StaleTokenError",
    leases.Refusal.STALE_TOKEN: "StaleTokenError",
    leases.Refusal.STALE_EPOCH: "StaleTokenError",
    leases.Refusal.EXPIRED: "LeaseExpiredError",
    leases.Refusal.OTHER_BOOT: "LeaseExpiredError",
    leases.Refusal.INVALID: "ConfigError",
}


def lease_reply(command_id: str, lease_id: str, reply: leases.Reply, now_s: float) -> pb.Reply:
    """Return the answer to a lease command."""
    message = pb.Reply(command_id=command_id, lease=lease_id, status=pb.STATUS_OK)
    message.generations.extend(_ref(piece) for piece in reply.generations)
    message.lease_state = _lease_state(reply.lease.state if reply.lease else None)
    message.token = reply.token
    if reply.lease is not None and reply.lease.expires_at_s is not None:
        message.expires_in_ms = max(0, round((reply.lease.expires_at_s - now_s) * 1e3))
    if reply.refusal is not None:
        message.status = pb.STATUS_REFUSED
        message.refusal = enum_number("Refusal", reply.refusal)
        message.error.kind = _REFUSED_AS.get(reply.refusal, "LeaseRefusedError")
        message.error.message = reply.reason
        message.error.cure = reply.cure
    return message
