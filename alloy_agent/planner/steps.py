"""Steps in words, what each interrupts, and how each is undone.

An undo that removes a piece names it by its location, with an empty `incarnation`: the piece does
not exist yet when the plan is made, so whoever undoes fills in what was read back after it was
created.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    DeviceId,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Plan,
    Scope,
    SetMode,
    Share,
    Step,
)

_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_WIDE: Final = (Scope.DEVICE, Scope.HIVE, Scope.NODE)


def describe(step: Step) -> str:
    """Return one step as a clause for people, in the imperative."""
    match step:
        case SetMode():
            return f"switch {step.kind} of {step.device} from {step.current} to {step.wanted}"
        case Destroy():
            piece = step.partition
            tenant = f" (tenant {piece.tenant})" if piece.tenant else ""
            return f"destroy {piece.profile}@{piece.placement.start} on {step.device}{tenant}"
        case Create():
            start = step.spec.placement.start if step.spec.placement else "?"
            memory = step.spec.memory_bytes
            cap = f" with {format_bytes(memory)}" if memory is not None else ""
            group = f" in a group of {len(step.spec.group)}" if step.spec.group else ""
            mask = _mask(step.spec)
            return f"create {step.spec.profile}@{start} on {step.device}{cap}{group}{mask}"
        case Configure():
            return _describe_change(step)


def _mask(spec: PartitionSpec) -> str:
    if spec.cu_mask is None:
        return ""
    each, slots = spec.cu_mask
    if spec.share is Share.PRODUCTION:
        return f" with a CU mask that leaves {each * slots} of each XCD"
    return f" with a CU mask of {each} of each XCD"


def _describe_change(step: Configure) -> str:
    piece, before, after = step.partition, step.partition.memory_bytes, step.memory_bytes
    cap = f"change the memory cap of {piece.id} from {_cap(before)} to {_cap(after)}"
    if not piece.altered:
        return cap
    repair = f"put {piece.id} right, which {piece.altered}"
    return repair if before == after else f"{repair}; {cap}"


def disruptive(plan: Plan) -> tuple[str, ...]:
    """Return in words the steps that need consent: those that reach beyond the layout's own pieces.

    These are the ones that interrupt a whole hive or node (driver reloads), whoever uses it.
    """
    lines = []
    for planned in plan.steps:
        wide = [i for i in planned.interrupts if i.scope in (Scope.HIVE, Scope.NODE)]
        if wide:
            whom = ", ".join(f"{i.scope} {i.subject} ({i.why})" for i in wide)
            lines.append(f"step {planned.number}: {describe(planned.step)} interrupts {whom}")
    return tuple(lines)


def undo_of(step: Step) -> Step | None:
    """Return the step that takes this one back, or None."""
    match step:
        case SetMode():
            return SetMode(
                device=step.device, kind=step.kind, current=step.wanted, wanted=step.current
            )
        case Destroy():
            return Create(device=step.device, spec=spec_of(step.partition))
        case Create():
            return Destroy(device=step.device, partition=partition_of(step.spec))
        case Configure():
            after = step.partition.memory_bytes
            living = replace(step.partition, memory_bytes=step.memory_bytes, altered="")
            return Configure(device=step.device, partition=living, memory_bytes=after)


def spec_of(partition: Partition) -> PartitionSpec:
    """Return the spec that would make a living piece again, in its place."""
    return PartitionSpec(
        device=partition.device,
        profile=partition.profile,
        size=partition.placement.size,
        placement=partition.placement,
        memory_bytes=partition.memory_bytes,
        share=partition.share,
        ordinal=partition.ordinal,
        cu_mask=partition.cu_mask,
        group=partition.group,
    )


def partition_of(spec: PartitionSpec) -> Partition:
    """Return the piece that a placed spec makes, as far as it is known beforehand."""
    place = spec.placement or Placement(start=0, size=spec.size)
    return Partition(
        id=partition_id(spec.device, spec.profile, place.start),
        device=spec.device,
        profile=spec.profile,
        placement=place,
        incarnation="",
        memory_bytes=spec.memory_bytes,
        share=spec.share,
        ordinal=spec.ordinal,
        cu_mask=spec.cu_mask,
        group=spec.group,
    )


def partition_id(device: DeviceId, profile: str, start: int) -> PartitionId:
    """Return the id of the piece of that profile at that start: its location."""
    return PartitionId(f"{device}/{profile}@{start}")


def core_profile(size: int) -> str:
    """Return the profile name of a run of cores: "4c"."""
    return f"{size}c"


def shared_profile(share: Share, ordinal: int) -> str:
    """Return the profile name of a share of a whole device: "production-0", "opportunistic-1"."""
    return f"{share}-{ordinal}"


def format_bytes(count: int) -> str:
    """Return a byte count the way a file would write it: in the largest unit that is exact."""
    for unit, scale in _UNITS:
        if count >= scale and count % scale == 0:
            return f"{count // scale}{unit}"
    return f"{count / (1 << 30):.2f}GiB" if count >= 10 << 20 else f"{count}B"


def _cap(memory_bytes: int | None) -> str:
    return "none" if memory_bytes is None else format_bytes(memory_bytes)
