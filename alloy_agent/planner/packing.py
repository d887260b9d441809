"""Where pieces go on one device: the exact search.

A device is a row of slices. Pieces are wanted by kind (shape, legal starts, number), and pieces
exist. `pack` returns an arrangement of all wanted pieces that keeps the most existing ones, then
needs the fewest changes of memory caps, then leaves the most room. What it does not keep has to be
destroyed, so keeping the most is destroying the fewest.

The search runs over the slices from left to right. What lies to the left of a slice matters only
through the number of pieces of each kind that are still to place, so (slice, numbers) is solved
once and remembered. Pinned (leased) pieces must be kept: no step may skip, replace or overlap them.

Rules that stay true in here: only free choices of starts that the device lists; never two pieces on
one slice; the result does not depend on the order of anything but the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

LEVELS_MAX: Final = 200  # of recursion, three frames each
STATES_MAX: Final = 60_000  # about half a second; a MIG board needs some hundred


class Kind(NamedTuple):
    """One shape of wanted pieces. `starts` None: any; `memory_bytes` where caps can change."""

    size: int
    number: int
    starts: frozenset[int] | None = None
    memory_bytes: int | None = None


class Have(NamedTuple):
    """One existing piece. `kinds` are the indices of the kinds it can stand for."""

    start: int
    size: int
    kinds: tuple[int, ...]
    pinned: bool = False
    memory_bytes: int | None = None


class Put(NamedTuple):
    """One wanted piece in its place; `have` is the index of the existing one kept for it."""

    kind: int
    start: int
    have: int | None


class Packing(NamedTuple):
    """A whole arrangement, from left to right; `proven` unless the search was cut short."""

    puts: tuple[Put, ...]
    kept: int
    changed: int
    proven: bool = True


class TooManyStatesError(Exception):
    """The search would take too long; the caller has a coarser way."""


Room = tuple[int, ...]  # how much room is left; more is better, compared in order
Tail = tuple[int, int]  # what of the part to the right matters to the choice of the rest
_Choice = tuple[Put | None, int, tuple[int, ...], Tail]
_Outcome = tuple[int, int, dict[Tail, _Choice]]  # kept, -changed, ways by tail


def pack(
    slices: int,
    kinds: tuple[Kind, ...],
    haves: tuple[Have, ...],
    room: Callable[[int], Room] | None = None,
) -> Packing | None:
    """Return the best arrangement of all wanted pieces, or None when there is none.

    Args:
        slices: Number of slices of the device.
        kinds: What is wanted.
        haves: What exists, without overlaps.
        room: Value of a set of occupied slices (bit n: slice n), more is better, to choose among
            equals. Without it
            the arrangement with the fewest gaps is chosen, which long rows need.
    """
    search = _Search(slices, kinds, haves, masks=room is not None)
    if len(search.targets) + sum(kind.number for kind in kinds) > LEVELS_MAX:
        return _coarse(slices, kinds, haves)
    try:
        return search.best(room)
    except TooManyStatesError:
        return _coarse(slices, kinds, haves)


class _Search:
    """One search with its memory of solved states."""

    def __init__(
        self, slices: int, kinds: tuple[Kind, ...], haves: tuple[Have, ...], *, masks: bool
    ) -> None:
        self.slices = slices
        self.kinds = kinds
        self.haves = haves
        self.masks = masks
        self.have_at = {have.start: index for index, have in enumerate(haves)}
        self.pinned = sum(_bits(have.start, have.size) for have in haves if have.pinned)
        targets = {have.start for have in haves}
        for kind in kinds:
            if kind.starts is not None:
                targets |= kind.starts
        self.targets = sorted(start for start in targets if start < slices)
        self.solved: dict[tuple[int, tuple[int, ...]], _Outcome | None] = {}

    def best(self, room: Callable[[int], Room] | None) -> Packing | None:
        counts = tuple(kind.number for kind in self.kinds)
        outcome = self._solve(0, counts)
        if outcome is None:
            return None
        kept, unchanged, ways = outcome
        if room is None:
            tail = min(ways)
        else:
            tail = min(ways, key=lambda way: (tuple(-part for part in room(way[0])), way))
        return Packing(self._walk(counts, tail), kept, -unchanged)

    def _walk(self, counts: tuple[int, ...], tail: Tail) -> tuple[Put, ...]:
        puts: list[Put] = []
        position = 0
        while position < self.slices:
            outcome = self._solve(position, counts)
            if outcome is None:  # pragma: no cover - a solved state leads to solved states only
                break
            put, position, counts, tail = outcome[2][tail]
            if put is not None:
                puts.append(put)
        return tuple(puts)

    def _solve(self, position: int, counts: tuple[int, ...]) -> _Outcome | None:
        """Return the best of the slices from `position` on, all ways to it that end differently."""
        if position >= self.slices:
            return None if any(counts) else (0, 0, {(0, 0): (None, position, counts, (0, 0))})
        state = (position, counts)
        if state in self.solved:
            return self.solved[state]
        needed = sum(kind.size * count for kind, count in zip(self.kinds, counts, strict=True))
        outcome: _Outcome | None = None
        if needed <= self.slices - position:
            outcome = self._options(position, counts)
        if len(self.solved) >= STATES_MAX:
            raise TooManyStatesError
        self.solved[state] = outcome
        return outcome

    def _options(self, position: int, counts: tuple[int, ...]) -> _Outcome | None:
        best: list[_Outcome] = []
        index = self.have_at.get(position)
        have = self.haves[index] if index is not None else None
        for number, kind in enumerate(self.kinds):
            if not counts[number]:
                continue
            if have is not None and number in have.kinds:
                self._place(best, position, counts, number, have=index)
            elif (
                (kind.starts is None or position in kind.starts)
                and position + kind.size <= self.slices
                and not self.pinned & _bits(position, kind.size)
            ):
                self._place(best, position, counts, number, have=None)
        self._skip(best, position, counts)
        return best[0] if best else None

    def _place(
        self,
        best: list[_Outcome],
        position: int,
        counts: tuple[int, ...],
        number: int,
        have: int | None,
    ) -> None:
        size = self.kinds[number].size if have is None else self.haves[have].size
        after = (*counts[:number], counts[number] - 1, *counts[number + 1 :])
        rest = self._solve(position + size, after)
        if rest is None:
            return
        changed = (
            have is not None and self.haves[have].memory_bytes != self.kinds[number].memory_bytes
        )
        put = Put(number, position, have)
        bits = _bits(position, size) if self.masks else 0
        ways: dict[Tail, _Choice] = {}
        for tail in rest[2]:
            mine = (tail[0] | bits, 0) if self.masks else (tail[0], 0)
            if mine not in ways or tail < ways[mine][3]:
                ways[mine] = (put, position + size, after, tail)
        _merge(best, (rest[0] + (have is not None), rest[1] - changed, ways), masks=self.masks)

    def _skip(self, best: list[_Outcome], position: int, counts: tuple[int, ...]) -> None:
        """Leave slices free up to the next start that matters, or up to the end."""
        target = next((start for start in self.targets if start > position), self.slices)
        if self.pinned & _bits(position, target - position):
            return
        rest = self._solve(target, counts)
        if rest is None:
            return
        ways: dict[Tail, _Choice] = {}
        for tail in rest[2]:
            mine = tail if self.masks else (tail[0] + (1 - tail[1]), 1)
            if mine not in ways or tail < ways[mine][3]:
                ways[mine] = (None, target, counts, tail)
        _merge(best, (rest[0], rest[1], ways), masks=self.masks)


def _merge(best: list[_Outcome], new: _Outcome, *, masks: bool) -> None:
    """Keep the better of two outcomes, or the ways of both when they are as good."""
    if not best or new[:2] > best[0][:2]:
        best[:] = [new]
    elif new[:2] == best[0][:2]:
        ways = best[0][2]
        for tail, choice in new[2].items():
            ways.setdefault(tail, choice)
    if not masks:  # of the tails that begin alike, only the one with the fewest gaps can win
        ways = best[0][2]
        for first in (0, 1):
            alike = sorted(tail for tail in ways if tail[1] == first)
            for tail in alike[1:]:
                del ways[tail]


def _bits(start: int, size: int) -> int:
    return ((1 << size) - 1) << start


def _coarse(slices: int, kinds: tuple[Kind, ...], haves: tuple[Have, ...]) -> Packing | None:
    """Return a good arrangement of a row too long to search: keep what fits, largest first."""
    for keep_all in (True, False):
        counts = [kind.number for kind in kinds]
        puts: list[Put] = []
        for index, have in sorted(enumerate(haves), key=lambda item: not item[1].pinned):
            fitting = [number for number in have.kinds if counts[number]]
            if not fitting or not (keep_all or have.pinned):
                continue
            same = [n for n in fitting if kinds[n].memory_bytes == have.memory_bytes]
            number = (same or fitting)[0]
            counts[number] -= 1
            puts.append(Put(number, have.start, index))
        occupied = sum(_bits(put.start, kinds[put.kind].size) for put in puts)
        if _fill(slices, kinds, counts, occupied, puts):
            kept = sum(put.have is not None for put in puts)
            changed = sum(
                put.have is not None
                and haves[put.have].memory_bytes != kinds[put.kind].memory_bytes
                for put in puts
            )
            possible = sum(any(kinds[n].number for n in have.kinds) for have in haves)
            puts.sort(key=lambda put: put.start)
            return Packing(tuple(puts), kept, changed, proven=kept == possible)
    return None


def _fill(
    slices: int, kinds: tuple[Kind, ...], counts: list[int], occupied: int, puts: list[Put]
) -> bool:
    """Place what is left, the largest first, each in the first free run; return whether all fit."""
    order = sorted(range(len(kinds)), key=lambda n: (kinds[n].starts is None, -kinds[n].size))
    for number in order:
        kind = kinds[number]
        starts = sorted(kind.starts) if kind.starts is not None else range(slices - kind.size + 1)
        for start in starts:
            if not counts[number]:
                break
            if start + kind.size <= slices and not occupied & _bits(start, kind.size):
                occupied |= _bits(start, kind.size)
                counts[number] -= 1
                puts.append(Put(number, start, None))
    return not any(counts)
