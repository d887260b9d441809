"""What a device offers to the scheduler: every piece it could make, and what each one takes. Pure.

Theory of operation. A pool is one physical accelerator. Its counters are one for each slice (a MIG
memory slice, an XCD, a core), one for the compute slices of MIG, and one for each profile that may
exist less often than it has places. A piece consumes the counters of the slices it lies on. So the
scheduler, which only adds up, can never pick two pieces that overlap, and nothing else keeps it
from a piece that the device could make.

Rules that stay true in here:

* For every sequence of allocations: the counters permit it exactly when the device can make it.
* The whole device and its pieces exclude each other, as do shares and pieces that are alone. With
  shares a slice counts `1 + shares`: who is alone takes all of it, a share takes one.
* Devices cut by modes offer the pieces of the mode that holds, since no claim switches a card.
* The order is that in which first fit wastes least: what blocks fewest of the larger places first.
* A row of cores that is too long for the counters is counted in granules of several cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from alloy_agent.kubernetes.names import distinct, label
from alloy_agent.model import (
    Device,
    ModeKind,
    Partition,
    Placement,
    Profile,
    Scheme,
    Share,
    Value,
)
from alloy_agent.planner.steps import shared_profile

SLICES_PER_SET: Final = 24  # of 32 counters of a set; the rest is for limits of profiles
SETS_MAX: Final = 2  # that one device may consume from
ALL_RUNS_MAX: Final = 10  # rows of cores up to this long offer every run
WHOLE: Final = "whole"
_COMPUTE: Final = re.compile(r"(\d+)g\.", re.ASCII)


class Offer(Value, frozen=True, kw_only=True):
    """One piece that a device could make. `name` is its name in the pool."""

    name: str
    profile: str
    placement: Placement
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0
    memory_bytes: int | None = None
    compute_units: int | None = None
    consumes: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  # by counter set


class Pool(Value, frozen=True, kw_only=True):
    """Everything one device offers, and the counters that keep it honest."""

    device: Device
    counters: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    offers: tuple[Offer, ...] = ()


def pool_of(
    device: Device,
    pieces: Iterable[Partition] = (),
    blocked: Iterable[Placement] = (),
    shares: int = 0,
) -> Pool:
    """Return what a device offers.

    Args:
        device: As its backend sees it.
        pieces: Those that exist; they matter where the driver makes them by a mode.
        blocked: Places that cannot be given out: everything that touches them is left out.
        shares: How many opportunistic shares there may be beside a production one; 0: none.
    """
    here = tuple(pieces)
    away = tuple(blocked)
    scale = 1 + shares if shares else 1
    shapes = [*_alone(device, here), *(_shares(device, shares) if shares else ())]
    shapes = [shape for shape in shapes if not any(shape.placement.overlaps(b) for b in away)]
    names = distinct(_name(shape) for shape in shapes)
    limits = _limits(device)
    offers = [
        Offer(
            name=names[_name(shape)],
            profile=shape.profile,
            placement=shape.placement,
            share=shape.share,
            ordinal=shape.ordinal,
            memory_bytes=shape.memory_bytes,
            compute_units=shape.compute_units,
            consumes=_consumes(device, shape, limits, scale),
        )
        for shape in _ordered(shapes)
    ]
    return Pool(device=device, counters=_counters(device, limits, shares), offers=tuple(offers))


def permitted(pool: Pool, chosen: Sequence[Offer]) -> bool:
    """Return whether the scheduler, adding up, would allocate all these together."""
    used: dict[tuple[str, str], int] = {}
    for offer in chosen:
        for group, counters in offer.consumes.items():
            for counter, number in counters.items():
                used[group, counter] = used.get((group, counter), 0) + number
    return len({offer.name for offer in chosen}) == len(chosen) and all(
        number <= pool.counters[group][counter] for (group, counter), number in used.items()
    )


# --- shapes --------------------------------------------------------------------------------------


class _Shape(Value, frozen=True, kw_only=True):
    profile: str
    placement: Placement
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0
    memory_bytes: int | None = None
    compute_units: int | None = None


def _name(shape: _Shape) -> str:
    if shape.share is not Share.EXCLUSIVE or shape.profile == WHOLE:
        return shape.profile
    return f"{shape.profile}-{shape.placement.start}-{shape.placement.size}"


def _alone(device: Device, here: tuple[Partition, ...]) -> Iterator[_Shape]:
    """Yield the pieces of a device that nobody shares."""
    match device.scheme:
        case Scheme.WHOLE:
            yield _whole(device)
        case Scheme.INSTANCES:
            yield _whole(device)
            for profile in device.profiles:
                for start in profile.starts:
                    yield _piece(profile, start)
        case Scheme.MODES:
            yield from (_living(p) for p in here if p.share is Share.EXCLUSIVE)
        case Scheme.CORES:
            yield from _runs(device)


def _whole(device: Device) -> _Shape:
    return _Shape(
        profile=WHOLE,
        placement=Placement(start=0, size=device.slices),
        memory_bytes=device.memory_bytes,
        compute_units=device.compute_units,
    )


def _piece(profile: Profile, start: int) -> _Shape:
    return _Shape(
        profile=profile.name,
        placement=Placement(start=start, size=profile.size),
        memory_bytes=profile.memory_bytes,
        compute_units=profile.compute_units,
    )


def _living(piece: Partition) -> _Shape:
    return _Shape(
        profile=piece.profile,
        placement=piece.placement,
        memory_bytes=piece.memory_bytes,
        compute_units=piece.compute_units,
    )


def _runs(device: Device) -> Iterator[_Shape]:
    """Yield runs of cores: all of a short row, buddies (halves of halves) of a long one."""
    grain = granule(device)
    by_size = {profile.size: profile for profile in device.profiles}
    for size, start in _run_places(device.slices, grain):
        if device.legal_sizes and size not in device.legal_sizes:
            continue
        profile = by_size.get(size)
        if by_size and (profile is None or start not in profile.starts):
            continue
        share = None if device.memory_bytes is None else device.memory_bytes * size // device.slices
        yield _Shape(
            profile=f"{size}c" if profile is None else profile.name,
            placement=Placement(start=start, size=size),
            memory_bytes=share if profile is None else profile.memory_bytes,
            compute_units=size if profile is None else profile.compute_units,
        )


def _run_places(slices: int, grain: int) -> Iterator[tuple[int, int]]:
    if slices <= ALL_RUNS_MAX:
        for size in range(1, slices + 1):
            yield from ((size, start) for start in range(slices - size + 1))
        return
    size = grain
    while size < slices:
        yield from ((size, start) for start in range(0, slices - size + 1, size))
        size *= 2
    yield slices, 0


def granule(device: Device) -> int:
    """Return how many slices of a device one counter stands for."""
    return -(-device.slices // (SLICES_PER_SET * SETS_MAX))


def _shares(device: Device, shares: int) -> Iterator[_Shape]:
    """Yield the shares of a whole device: one for production, the others opportunistic."""
    if device.scheme not in (Scheme.INSTANCES, Scheme.WHOLE, Scheme.MODES):
        return
    everything = Placement(start=0, size=device.slices)
    yield _Shape(
        profile=shared_profile(Share.PRODUCTION, 0), placement=everything, share=Share.PRODUCTION
    )
    for number in range(shares):
        yield _Shape(
            profile=shared_profile(Share.OPPORTUNISTIC, number),
            placement=everything,
            share=Share.OPPORTUNISTIC,
            ordinal=number,
        )


def _ordered(shapes: list[_Shape]) -> list[_Shape]:
    """Return shapes in the order in which first fit wastes least.

    Within a size, the one that overlaps the fewest larger places comes first, then the one that
    starts last: the low places, which the largest profiles need, are kept for them.
    """

    def harm(shape: _Shape) -> int:
        return sum(
            other.placement.size
            for other in shapes
            if other.placement.size > shape.placement.size
            and other.placement.overlaps(shape.placement)
        )

    return sorted(
        shapes,
        key=lambda s: (
            s.share is not Share.EXCLUSIVE,
            s.profile == WHOLE,
            s.placement.size,
            s.profile,
            harm(s),
            -s.placement.start,
            s.ordinal,
        ),
    )


# --- counters ------------------------------------------------------------------------------------


def counter_name(device: Device, number: int) -> str:
    """Return the counter of one granule of slices."""
    return f"{label(device.slice_name)}-{number}"


def _set_of(number: int) -> str:
    return f"slices-{number // SLICES_PER_SET}"


def _limits(device: Device) -> dict[str, int]:
    """Return how often each profile may exist, where its places alone would allow more."""
    if device.scheme is not Scheme.INSTANCES:
        return {}
    return {
        profile.name: profile.max_count
        for profile in device.profiles
        if profile.max_count < _disjoint(profile)
    }


def _disjoint(profile: Profile) -> int:
    """Return how many places of a profile fit beside each other."""
    count, free = 0, -1
    for start in sorted(profile.starts):
        if start >= free:
            count, free = count + 1, start + profile.size
    return count


def _compute_of(profile: str) -> int:
    match = _COMPUTE.match(profile)
    return int(match[1]) if match else 0


def _compute_total(device: Device) -> int:
    if device.scheme is not Scheme.INSTANCES:
        return 0
    return max((_compute_of(profile.name) for profile in device.profiles), default=0)


def _counters(device: Device, limits: dict[str, int], shares: int) -> dict[str, dict[str, int]]:
    """Return all counters of a device by set; none where only one piece can ever be given out."""
    if device.scheme is Scheme.WHOLE and not shares:
        return {}
    scale = 1 + shares if shares else 1
    grain = granule(device)
    sets: dict[str, dict[str, int]] = {}
    for number in range(-(-device.slices // grain)):
        sets.setdefault(_set_of(number), {})[counter_name(device, number)] = scale
    first = sets[_set_of(0)]
    total = _compute_total(device)
    if total:
        first["compute-slices"] = total
    for name, number in limits.items():
        first[f"limit-{label(name)}"] = number
    return sets


def _consumes(
    device: Device, shape: _Shape, limits: dict[str, int], scale: int
) -> dict[str, dict[str, int]]:
    """Return what one piece takes of each counter."""
    if device.scheme is Scheme.WHOLE and scale == 1:
        return {}
    grain = granule(device)
    alone = shape.share is Share.EXCLUSIVE
    sets: dict[str, dict[str, int]] = {}
    last = (shape.placement.stop - 1) // grain
    for number in range(shape.placement.start // grain, last + 1):
        taken = scale if alone else 1
        sets.setdefault(_set_of(number), {})[counter_name(device, number)] = taken
    first = sets.setdefault(_set_of(0), {})
    total = _compute_total(device)
    if total and alone:
        compute = total if shape.profile == WHOLE else _compute_of(shape.profile)
        if compute:
            first["compute-slices"] = compute
    if shape.profile in limits:
        first[f"limit-{label(shape.profile)}"] = 1
    return {name: counters for name, counters in sets.items() if counters}


def mode_for(device: Device, offer: Offer) -> str | None:
    """Return what MIG must be for an offer: "on", "off", or None where there is no such switch."""
    if device.scheme is not Scheme.INSTANCES or not any(
        mode.kind is ModeKind.MIG for mode in device.modes
    ):
        return None
    alone = offer.share is Share.EXCLUSIVE and offer.profile != WHOLE
    return "on" if alone else "off"
