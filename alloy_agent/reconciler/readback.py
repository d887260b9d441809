"""Whether a device now is what a step promised. Pure.

A step is judged only by comparing what the devices in its reach showed right before it with what
they show now, never by what a call returned. What was made and what is gone is told by incarnation,
so a piece that somebody made anew in the same place is not taken for the old one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from alloy_agent.errors import BackendError
from alloy_agent.model import (
    HALF_MADE,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceId,
    Mode,
    ModeKind,
    Observation,
    Partition,
    PartitionSpec,
    Scope,
    SetMode,
    Share,
    Step,
)
from alloy_agent.planner.geometry import made_by_mode, same_memory, same_shape
from alloy_agent.planner.steps import describe, spec_of
from alloy_agent.store.records import Before, Entry, PieceRef

if TYPE_CHECKING:
    from collections.abc import Iterable


class Outcome(StrEnum):
    """What a read-back says about a step."""

    DONE = "done"
    PENDING = "pending"  # the device has taken the wish and waits for a reset or reload
    UNTOUCHED = "untouched"  # everything is as before the step
    PARTLY = "partly"  # something changed, but not what was promised


class ReadBack(NamedTuple):
    """The judgement of a step, what it made and removed, and why it is not done."""

    outcome: Outcome
    made: tuple[PieceRef, ...] = ()
    gone: tuple[PieceRef, ...] = ()
    why: str = ""


def ref(piece: Partition) -> PieceRef:
    """Return which incarnation of which piece this is."""
    return PieceRef(partition=piece.id, incarnation=piece.incarnation)


def reach(step: Step, devices: Iterable[Device]) -> tuple[DeviceId, ...]:
    """Return the devices that a step touches: for a wide mode those of its hive or backend."""
    all_devices = tuple(devices)
    own = next((d for d in all_devices if d.id == step.device), None)
    if own is None or not isinstance(step, SetMode):
        return (step.device,)
    mode = mode_of(own, step.kind)
    scope = Scope.DEVICE if mode is None else mode.scope
    if scope is Scope.HIVE and own.hive is not None:
        return tuple(d.id for d in all_devices if d.hive == own.hive and d.backend == own.backend)
    if scope is Scope.NODE:
        return tuple(d.id for d in all_devices if d.backend == own.backend)
    return (own.id,)


def mode_of(device: Device, kind: ModeKind) -> Mode | None:
    """Return one switch of a device."""
    return next((mode for mode in device.modes if mode.kind is kind), None)


def before_of(observations: Iterable[Observation]) -> Before:
    """Return what a later read-back is compared with."""
    seen = tuple(observations)
    return Before(
        pieces=tuple(sorted(ref(piece) for o in seen for piece in o.partitions)),
        by_mode=tuple(
            sorted(ref(p) for o in seen for p in o.partitions if made_by_mode(p, o.device))
        ),
        modes=tuple(
            sorted(
                (o.device.id, mode.kind, mode.pending or mode.current)
                for o in seen
                for mode in o.device.modes
            )
        ),
        caps=tuple(
            sorted((piece.id, piece.memory_bytes or 0) for o in seen for piece in o.partitions)
        ),
        half=tuple(
            sorted({(f.device, f.reason) for o in seen for f in o.faults if f.kind == HALF_MADE})
        ),
    )


def judge(step: Step, before: Before, now: tuple[Observation, ...]) -> ReadBack:
    """Return whether the step's promise holds now."""
    after = before_of(now)
    old, new = set(before.pieces), set(after.pieces)
    if not isinstance(step, SetMode):  # shares take the place of the whole, and give it back
        old, new = old - set(before.by_mode), new - set(after.by_mode)
    made, gone = new - old, old - new
    if half := set(after.half) - set(before.half):
        why = "; ".join(f"{reason} of {device} is half-made" for device, reason in sorted(half))
        return ReadBack(Outcome.PARTLY, (), _sorted(gone), why)
    match step:
        case Destroy() if not step.partition.incarnation and set(before.half) <= set(after.half):
            # Aimed at a half-made piece, which shows no identity: done when one less is there.
            return ReadBack(Outcome.UNTOUCHED, (), (), f"{step.partition.id} is still half-made")
        case Create():
            return _created(step, now, made, gone, untouched=after == before)
        case Destroy():
            return _destroyed(step, old, new, untouched=after == before)
        case Configure():
            return _configured(step, now, gone)
        case SetMode():
            return _switched(step, now, made, gone, untouched=after == before)


def at(spec: PartitionSpec, piece: Partition, device: Device) -> bool:
    """Return whether a piece sits where a spec asks for one, in the shape it asks for."""
    return piece.placement == spec.placement and same_shape(piece, spec, device)


def way_back(undo: Step | None, entry: Entry, now: tuple[Observation, ...]) -> Step | None:
    """Return the step that takes a journalled one back; None: there is nothing to take back.

    Args:
        undo: As planned; a removal is aimed anew at the piece that lives now.
        entry: The step with what it made and removed.
        now: The devices in its reach.

    Raises:
        BackendError: The step has had its effect and cannot be undone.
    """
    if not _has_effect(entry, now):
        return None
    if isinstance(entry.step, Create):
        living = {ref(piece): piece for o in now for piece in o.partitions}
        mine = [living[piece] for piece in entry.made if piece in living]
        if mine:
            return Destroy(device=entry.step.device, partition=mine[0])
    if undo is None:
        raise BackendError(f"{describe(entry.step)} cannot be undone")
    return undo


def _has_effect(entry: Entry, now: tuple[Observation, ...]) -> bool:
    """Return whether anything of a step is left on its device."""
    step, after = entry.step, before_of(now)
    match step:
        case Create():
            # Half-made: no piece is seen, and yet something is there.
            hidden = bool(set(after.half) - set(entry.before.half)) and not _occupied(
                step.spec, now
            )
            return hidden or bool(set(entry.made) & set(after.pieces))
        case Destroy():
            spec = spec_of(step.partition)
            return ref(step.partition) not in after.pieces and not _occupied(spec, now)
        case Configure():
            old = dict(entry.before.caps).get(step.partition.id)
            return dict(after.caps).get(step.partition.id) != old
        case SetMode():
            key = (step.device, step.kind)
            modes = [
                tuple(m for m in state.modes if m[:2] == key) for state in (entry.before, after)
            ]
            return modes[0] != modes[1]


def _occupied(spec: PartitionSpec, now: tuple[Observation, ...]) -> bool:
    """Return whether a piece that excludes `spec` has its place."""
    return spec.placement is not None and any(
        piece.placement.overlaps(spec.placement)
        and (
            Share.EXCLUSIVE in (piece.share, spec.share)
            or (piece.share, piece.ordinal) == (spec.share, spec.ordinal)
        )
        for o in now
        if o.device.id == spec.device
        for piece in o.partitions
        if not made_by_mode(piece, o.device)
    )


def _created(
    step: Create,
    now: tuple[Observation, ...],
    made: set[PieceRef],
    gone: set[PieceRef],
    *,
    untouched: bool,
) -> ReadBack:
    here = [
        (piece, o.device)
        for o in now
        for piece in o.partitions
        if o.device.id == step.device and ref(piece) in made and at(step.spec, piece, o.device)
    ]
    mine = tuple(sorted(ref(piece) for piece, _ in here))
    good = [p for p, device in here if same_memory(p, step.spec.memory_bytes, device)]
    if gone:
        return ReadBack(Outcome.PARTLY, mine, _sorted(gone), f"{_names(gone)} vanished meanwhile")
    if len(here) == 1 and good:
        return ReadBack(Outcome.DONE, mine)
    if here:
        found = " and ".join(f"{p.profile} with {p.memory_bytes} bytes" for p, _ in here)
        return ReadBack(Outcome.PARTLY, mine, (), f"the device shows {found} there instead")
    why = f"no {step.spec.profile} is there"
    return ReadBack(Outcome.UNTOUCHED if untouched else Outcome.PARTLY, (), (), why)


def _destroyed(
    step: Destroy, old: set[PieceRef], new: set[PieceRef], *, untouched: bool
) -> ReadBack:
    target = ref(step.partition)
    gone = old - new
    others = gone - {target}
    if others:
        return ReadBack(Outcome.PARTLY, (), _sorted(gone), f"{_names(others)} vanished as well")
    if target in new:
        outcome = Outcome.UNTOUCHED if untouched else Outcome.PARTLY
        return ReadBack(outcome, (), _sorted(gone), f"{target.partition} is still there")
    return ReadBack(Outcome.DONE, (), (target,))


def _configured(step: Configure, now: tuple[Observation, ...], gone: set[PieceRef]) -> ReadBack:
    target = ref(step.partition)
    found = next(((p, o.device) for o in now for p in o.partitions if ref(p) == target), None)
    if found is None:
        return ReadBack(Outcome.PARTLY, (), _sorted(gone), f"{target.partition} is gone")
    if gone:
        return ReadBack(Outcome.PARTLY, (), _sorted(gone), f"{_names(gone)} vanished meanwhile")
    piece, device = found
    capped = same_memory(piece, step.memory_bytes, device)
    if capped and not piece.altered:
        return ReadBack(Outcome.DONE)
    why = f"its memory cap is {piece.memory_bytes} bytes, not {step.memory_bytes}"
    if capped:
        why = f"it {piece.altered}"
    same = same_memory(piece, step.partition.memory_bytes, device)
    same = same and piece.altered == step.partition.altered
    return ReadBack(Outcome.UNTOUCHED if same else Outcome.PARTLY, (), (), why)


def _switched(
    step: SetMode,
    now: tuple[Observation, ...],
    made: set[PieceRef],
    gone: set[PieceRef],
    *,
    untouched: bool,
) -> ReadBack:
    device = next((o.device for o in now if o.device.id == step.device), None)
    mode = None if device is None else mode_of(device, step.kind)
    if mode is None:
        return ReadBack(Outcome.PARTLY, (), (), f"the device no longer shows its {step.kind} mode")
    changed = (_sorted(made), _sorted(gone))
    if mode.current == step.wanted and mode.pending in (None, step.wanted):
        return ReadBack(Outcome.DONE, *changed)
    if mode.pending == step.wanted:
        why = f"{step.kind} is {mode.current} until a {mode.change}, then {mode.pending}"
        return ReadBack(Outcome.PENDING, *changed, why.replace("_", " "))
    why = f"{step.kind} is {mode.current}, not {step.wanted}"
    return ReadBack(Outcome.UNTOUCHED if untouched else Outcome.PARTLY, *changed, why)


def _sorted(pieces: Iterable[PieceRef]) -> tuple[PieceRef, ...]:
    return tuple(sorted(pieces))


def _names(pieces: Iterable[PieceRef]) -> str:
    return ", ".join(piece.partition for piece in sorted(pieces))
