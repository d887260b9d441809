"""The JSON documents of the agent: what commands print and what the local socket carries.

One document type per command, made by pure functions from the nouns of `model`. The command line
prints its tables from these and from nothing else, so that what a person sees and what a program
reads never differ.

Rules that stay true in here:

* Every document carries `schema`, "alloy.<name>/v1"; fields are added, never renamed or removed.
* A document is complete: it names the node, the boot and the snapshot that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from alloy_agent.daemon.starts import Start
from alloy_agent.model import (
    Access,
    ApplyReport,
    AuditResult,
    Device,
    DeviceFault,
    DeviceId,
    Diagnosis,
    Interrupt,
    Json,
    Occupant,
    Owner,
    Partition,
    PartitionId,
    PartitionReport,
    Plan,
    PlanCost,
    PlannedStep,
    Scope,
    Snapshot,
    Step,
    TenantId,
    Tier,
    Value,
    Verdict,
    WorkerState,
)
from alloy_agent.planner import describe
from alloy_agent.planner.geometry import made_by_mode

# --- devices -------------------------------------------------------------------------------------


class PartitionEntry(Value, frozen=True, kw_only=True):
    """One partition as `devices --json` lists it.

    `tier` is what evidence proves now, None where nothing was audited; `share` is how the piece is
    held; `made_by` is "alloy", "others", "mode" where the device's own mode makes it, or "unknown"
    where the books are closed to this user, and `generation` is 0; `group` are the devices that
    one tenant was meant to get together.
    """

    id: PartitionId
    profile: str
    tier: Tier | None
    tier_reason: str
    tenant: TenantId | None
    generation: int
    share: str
    start: int
    size: int
    units: tuple[int, ...]
    uuid: str | None
    memory_bytes: int | None
    compute_units: int | None
    managed: bool
    made_by: str
    simulated: bool
    device_nodes: tuple[str, ...]
    group: tuple[DeviceId, ...] = ()
    occupants: tuple[Occupant, ...] = ()  # pods, containers, jobs or units
    environment: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    unset: tuple[str, ...] = ()


class DevicesDocument(Value, frozen=True, kw_only=True):
    """`devices --json`. An entry of `devices` is a `model.Device` with its `partitions`."""

    schema: str = "alloy.devices/v1"
    node: str
    boot_id: str
    sequence: int
    age_s: float
    taken_wall_s: float
    devices: tuple[dict[str, Json], ...]
    owners: tuple[Owner, ...] = ()
    workers: tuple[WorkerState, ...] = ()
    faults: tuple[DeviceFault, ...] = ()
    notes: tuple[str, ...] = ()


class DeviceView(Value, frozen=True, kw_only=True):
    """One device with its partitions, decoded for printing."""

    device: Device
    partitions: tuple[PartitionEntry, ...]


def partition_entry(
    partition: Partition, device: Device, tier: Tier | None, reason: str
) -> PartitionEntry:
    """Return the listing of one partition."""
    return PartitionEntry(
        id=partition.id,
        profile=partition.profile,
        tier=tier,
        tier_reason=reason,
        tenant=partition.tenant,
        generation=partition.generation,
        share=str(partition.share),
        start=partition.placement.start,
        size=partition.placement.size,
        units=partition.units,
        uuid=partition.uuid,
        memory_bytes=partition.memory_bytes,
        compute_units=partition.compute_units,
        managed=partition.managed,
        made_by=_maker(partition, device),
        simulated=device.simulated,
        device_nodes=partition.access.device_nodes,
        group=partition.group,
        occupants=partition.occupants,
        environment=partition.access.environment,
        unset=partition.access.unset,
    )


def _maker(partition: Partition, device: Device) -> str:
    if made_by_mode(partition, device):
        return "mode"
    if not partition.generation:
        return "unknown"
    return "alloy" if partition.managed else "others"


def devices_document(
    node: str,
    snapshot: Snapshot,
    now_s: float,
    reports: Sequence[PartitionReport] = (),
    notes: Sequence[str] = (),
) -> DevicesDocument:
    """Return the devices of a snapshot, each with its partitions and their audited tiers."""
    tiers = {report.partition.id: (report.tier, report.reason) for report in reports}
    entries: list[dict[str, Json]] = []
    for device in snapshot.devices:
        partitions = [
            partition_entry(p, device, *tiers.get(p.id, (None, "not audited")))
            for p in snapshot.partitions
            if p.device == device.id
        ]
        entry = msgspec.to_builtins(device)
        entry["partitions"] = msgspec.to_builtins(partitions)
        entries.append(entry)
    return DevicesDocument(
        node=node,
        boot_id=snapshot.boot_id,
        sequence=snapshot.sequence,
        age_s=round(max(0.0, now_s - snapshot.taken_at_s), 6),
        taken_wall_s=snapshot.taken_wall_s,
        devices=tuple(entries),
        owners=snapshot.owners,
        workers=snapshot.workers,
        faults=snapshot.faults,
        notes=tuple(notes),
    )


def device_views(document: DevicesDocument) -> tuple[DeviceView, ...]:
    """Return the entries of a devices document as typed values, in its order."""
    views = []
    for entry in document.devices:
        fields = dict(entry)
        partitions = msgspec.convert(fields.pop("partitions"), tuple[PartitionEntry, ...])
        views.append(DeviceView(device=msgspec.convert(fields, Device), partitions=partitions))
    return tuple(views)


# --- plan and apply ------------------------------------------------------------------------------


class StepEntry(Value, frozen=True, kw_only=True):
    """One planned step: its kind, its device, one readable line, whom it interrupts, its undo."""

    number: int
    kind: str
    device: str
    text: str
    interrupts: tuple[Interrupt, ...]
    reversible: bool
    step: Step


class PlanDocument(Value, frozen=True, kw_only=True):
    """`plan --json`. `expected` pins every partition of the devices that the steps touch."""

    schema: str = "alloy.plan/v1"
    node: str
    boot_id: str
    layout: str
    layout_digest: str
    observed_sequence: int
    steps: tuple[StepEntry, ...]
    kept: tuple[PartitionId, ...]
    cost: PlanCost
    notes: tuple[str, ...]
    expected: dict[PartitionId, int]


class ApplyDocument(Value, frozen=True, kw_only=True):
    """`apply --json`: what became of every step; `reached`: the node is now as wanted."""

    schema: str = "alloy.apply/v1"
    node: str
    layout: str
    reached: bool
    report: ApplyReport
    notes: tuple[str, ...] = ()


REACHED = ("applied", "unchanged", "pending")


def apply_document(node: str, report: ApplyReport, notes: Sequence[str] = ()) -> ApplyDocument:
    """Return what became of a plan as a document."""
    return ApplyDocument(
        node=node,
        layout=report.layout,
        reached=report.outcome in REACHED,
        report=report,
        notes=tuple(notes),
    )


def span(start: int, size: int) -> str:
    """Return "3" or "3-5": the slices of a placement."""
    return str(start) if size == 1 else f"{start}-{start + size - 1}"


def size_text(memory_bytes: int | None) -> str:
    """Return a size in binary units with at most one decimal, or "-" where there is none."""
    if memory_bytes is None:
        return "-"
    value = float(memory_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return "-"


def step_kind(step: Step) -> str:
    """Return the tag of a step, as it stands on the wire."""
    return str(step.__struct_config__.tag)


def step_entry(planned: PlannedStep) -> StepEntry:
    """Return the listing of one planned step."""
    return StepEntry(
        number=planned.number,
        kind=step_kind(planned.step),
        device=planned.step.device,
        text=describe(planned.step),
        interrupts=planned.interrupts,
        reversible=planned.undo is not None,
        step=planned.step,
    )


def plan_document(node: str, plan: Plan, snapshot: Snapshot) -> PlanDocument:
    """Return a plan as a document."""
    touched = {planned.step.device for planned in plan.steps}
    expected = {p.id: p.generation for p in snapshot.partitions if p.device in touched}
    return PlanDocument(
        node=node,
        boot_id=plan.boot_id,
        layout=plan.layout.name,
        layout_digest=plan.layout.digest,
        observed_sequence=plan.observed_sequence,
        steps=tuple(step_entry(step) for step in plan.steps),
        kept=plan.kept,
        cost=plan.cost,
        notes=plan.notes,
        expected=expected,
    )


def interrupted(steps: Sequence[StepEntry]) -> tuple[Interrupt, ...]:
    """Return everyone whom the steps disturb, once each, in step order."""
    return tuple(dict.fromkeys(i for step in steps for i in step.interrupts))


def disruptive(steps: Sequence[StepEntry]) -> tuple[StepEntry, ...]:
    """Return the steps that reach further than their own device: a hive or the node."""
    wide = (Scope.HIVE, Scope.NODE)
    return tuple(s for s in steps if any(i.scope in wide for i in s.interrupts))


# --- audit, exec, doctor -------------------------------------------------------------------------


def verdicts_of(result: AuditResult) -> dict[tuple[str, str], str]:
    """Return the verdict of each check on each subject, and the tier of each partition."""
    judgements = list(result.node_judgements)
    found: dict[tuple[str, str], str] = {}
    for report in result.partitions:
        judgements.extend(report.judgements)
        found["TIER", report.partition.id] = report.tier
    found.update({(j.check, j.subject): j.verdict for j in judgements})
    return found


class AccessDocument(Value, frozen=True, kw_only=True):
    """How to be inside of one partition; what `exec` acts on.

    `fence` is the devices cgroup that was made for its tenants ("": none); `notes` say what is not
    fenced, and whose job it is.
    """

    schema: str = "alloy.access/v1"
    node: str
    partition: PartitionId
    generation: int
    tenant: TenantId
    access: Access
    fence: str = ""
    notes: tuple[str, ...] = ()


class DoctorDocument(Value, frozen=True, kw_only=True):
    """`doctor --json`: every diagnosis with the room or backend that made it."""

    schema: str = "alloy.doctor/v1"
    node: str
    ok: bool
    diagnoses: tuple[Diagnosis, ...]


def doctor_document(node: str, diagnoses: Sequence[Diagnosis]) -> DoctorDocument:
    """Return all diagnoses; `ok` while none that is required has failed."""
    ok = all(d.ok or not d.required for d in diagnoses)
    return DoctorDocument(node=node, ok=ok, diagnoses=tuple(diagnoses))


# --- status -----------------------------------------------------------------------------------


class StatusDocument(Value, frozen=True, kw_only=True):
    """How the daemon is doing. `degraded` says why it changes nothing; empty while it may."""

    schema: str = "alloy.status/v1"
    node: str
    version: str
    pid: int
    boot_id: str
    uptime_s: float
    state_dir: str
    fake: tuple[str, ...]
    socket: str
    metrics: str
    snapshot_sequence: int | None
    snapshot_age_s: float | None
    verdict: Verdict | None
    audit_age_s: float | None
    layout: str | None
    kept: str
    degraded: str
    workers: tuple[WorkerState, ...]
    overruns: dict[str, int]
    starts: tuple[Start, ...] = ()  # how earlier runs ended; this one is the last
