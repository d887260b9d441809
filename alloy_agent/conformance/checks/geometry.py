"""PART-*, OWN-01: what exists is what was meant, and nobody else manages it."""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ANY_IN_FORCE,
    ENFORCED,
    Case,
    Check,
    Need,
    Outcome,
    failed,
    named,
    passed,
    size,
)
from alloy_agent.conformance.checks.shapes import OwnerFact
from alloy_agent.model import (
    Condition,
    Device,
    DeviceLayout,
    ModeKind,
    Partition,
    PartitionSpec,
    Scheme,
    Verdict,
)
from alloy_agent.planner.geometry import made_by_mode


def _always(_partition: Partition, _device: Device) -> bool:
    return True


def _silicon(_partition: Partition, device: Device) -> bool:
    return not device.simulated


def describe(spec: PartitionSpec) -> str:
    """Return one wanted piece in words."""
    place = f"@{spec.placement.start}+{spec.placement.size}" if spec.placement else ""
    memory = f", {size(spec.memory_bytes)}" if spec.memory_bytes is not None else ""
    return f"{spec.profile}{place}{memory} ({spec.share.value})"


def fits(spec: PartitionSpec, partition: Partition) -> bool:
    """Whether a partition is a wanted piece. What the layout leaves open fits anything."""
    return (
        spec.device == partition.device
        and spec.profile == partition.profile
        and (spec.placement is None or spec.placement == partition.placement)
        and (spec.memory_bytes is None or spec.memory_bytes == partition.memory_bytes)
        and spec.share == partition.share
    )


def missing_pieces(
    wanted: tuple[PartitionSpec, ...], partitions: tuple[Partition, ...]
) -> tuple[PartitionSpec, ...]:
    """Return the wanted pieces that no partition is; each partition is one piece at most."""
    left = list(partitions)
    absent = []
    for spec in sorted(wanted, key=lambda s: s.placement is None):
        match = next((p for p in left if fits(spec, p)), None)
        if match is None:
            absent.append(spec)
        else:
            left.remove(match)
    return tuple(absent)


def surplus(
    wanted: tuple[PartitionSpec, ...], partitions: tuple[Partition, ...]
) -> tuple[Partition, ...]:
    """Return the partitions that are no wanted piece; each piece covers one partition at most."""
    left = list(wanted)
    extra = []
    for partition in partitions:
        match = next(
            (s for s in sorted(left, key=lambda s: s.placement is None) if fits(s, partition)), None
        )
        if match is None:
            extra.append(partition)
        else:
            left.remove(match)
    return tuple(extra)


def _nothing_meant(case: Case) -> str:
    layout = case.intent.of_device(case.device.id)
    if layout is None or layout.partitions is None:
        return "nobody told this agent what this device shall look like"
    return ""


def _not_given(case: Case) -> str:
    given = any(g.partition == case.partition.id for g in case.intent.grants)
    return "" if given else "no tenant was given this partition"


def _intended(case: Case) -> Outcome:
    layout = case.intent.of_device(case.device.id)
    wanted = layout.partitions or () if layout else ()
    observed = _as_observed(case.partition)
    if case.device.condition is not Condition.OK:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            expected=named([describe(s) for s in wanted]),
            reason=f"the device is {case.device.condition.value}: {case.device.condition_reason}",
        )
    if layout is not None and not wanted and _as_the_modes_make(case, layout):
        cut = case.device.scheme is Scheme.MODES
        meant = "pieces as the mode makes them" if cut else "the whole device, uncut"
        return passed(meant, observed)
    present = tuple(p for p in case.snapshot.partitions if p.device == case.device.id)
    extra = {p.id for p in surplus(wanted, present)}
    expected = named([describe(s) for s in wanted])
    if case.partition.id in extra:
        return failed(expected, observed, "this piece is not in the layout")
    return passed(expected, observed)


def _as_the_modes_make(case: Case, layout: DeviceLayout) -> bool:
    """Whether the piece is there because of modes that the layout leaves as they are or asks for.

    A device whose MIG mode is off is a piece by itself: that one is meant unless MIG is asked for.
    How pieces of an AMD device follow its modes is what CPX-01 judges.
    """
    on = layout.modes.get(ModeKind.MIG, "off") != "off"
    return made_by_mode(case.partition, case.device) and not on


def _as_observed(partition: Partition) -> str:
    place = partition.placement
    memory = f", {size(partition.memory_bytes)}" if partition.memory_bytes is not None else ""
    return f"{partition.profile}@{place.start}+{place.size}{memory} ({partition.share.value})"


def _same_incarnation(case: Case) -> Outcome:
    grants = [g for g in case.intent.grants if g.partition == case.partition.id]
    current = case.partition.generation
    stale = [
        f"{g.tenant} was given generation {g.generation}" for g in grants if g.generation != current
    ]
    expected = f"grants name generation {current}"
    return failed(expected, named(stale)) if stale else passed(expected, f"generation {current}")


def _one_tenant(case: Case) -> Outcome:
    tenants = sorted(
        {
            g.tenant
            for g in case.intent.grants
            if g.partition == case.partition.id and g.generation == case.partition.generation
        }
    )
    if len(tenants) > 1:
        return failed("one tenant at most", named(tenants))
    return passed("one tenant at most", named(tenants))


def _given_or_foreign(case: Case) -> str:
    if not case.partition.managed:
        return "made by others, who do not tell this agent its tenant"
    return "" if _not_given(case) else "a tenant was given this partition"


def _unused(case: Case) -> Outcome:
    pids = case.get("partition.pids", tuple[int, ...])
    if pids:
        return failed("no process", named([f"process {pid}" for pid in pids]))
    return passed("no process", "none")


def _owned_once(case: Case) -> Outcome:
    owners = case.get("host.owners", tuple[OwnerFact, ...])
    concerned = [o for o in owners if not o.vendors or case.device.vendor in o.vendors]
    rivals = [f"{o.name} ({o.evidence})" for o in concerned if o.rival]
    notes = [f"{o.name}: {o.note}" for o in concerned if not o.rival]
    ours = case.partition.managed or case.intent.of_device(case.device.id) is not None
    if rivals and ours:
        return failed("no other manager of this device", named(rivals))
    if rivals:
        return passed("one manager", named(rivals), "made by others; this agent only looks")
    return passed("no other manager of this device", named(notes))


CHECKS: tuple[Check, ...] = (
    Check(
        proves=False,
        id="PART-01",
        claim="The partition is one that the desired layout asks for.",
        applies=_always,
        judge=_intended,
        exempt=_nothing_meant,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        proves=False,
        id="PART-02",
        claim="Tenants were given this incarnation of the partition, not an earlier one.",
        applies=_always,
        judge=_same_incarnation,
        exempt=_not_given,
        method="store: bindings and leases; snapshot: generation",
        required_for=ANY_IN_FORCE,
    ),
    Check(
        proves=False,
        id="PART-03",
        claim="At most one tenant holds the partition.",
        applies=_always,
        judge=_one_tenant,
        method="store: bindings and leases",
        required_for=ENFORCED,
    ),
    Check(
        proves=False,
        id="PART-04",
        claim="Nobody works in a partition that no tenant was given.",
        applies=_always,
        exempt=_given_or_foreign,
        needs=(Need(name="partition.pids", shape=tuple[int, ...]),),
        judge=_unused,
        required_for=(),
    ),
    Check(
        proves=False,
        id="OWN-01",
        claim="No other program cuts or hands out this device.",
        applies=_silicon,
        needs=(Need(name="host.owners", shape=tuple[OwnerFact, ...], of="node"),),
        judge=_owned_once,
        required_for=ENFORCED,
    ),
)
