"""The decision: which pieces a request gets, as a pure function of `Inputs`.

Order of what counts: gates (all open, or out), then headroom by its minimum (the scarcest resource
decides, compared in bands), then fragmentation (least growth), then cost, then names, so that the
same inputs always give the same choice. Search is over rows of equal pieces, never over pieces, so
a fleet of 56,000 pieces costs as much as its 8,000 devices.

Source: fragmentation after Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): what is free
and of no use to a class counts as a fragment, weighted by how often that class is asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from alloy_brain import gates
from alloy_brain.facts import (
    Choice,
    Demand,
    Inputs,
    Kind,
    Load,
    NodeFacts,
    Picked,
    Piece,
    Policy,
    Row,
)

ANY, ONE_NODE, ONE_DEVICE, ONE_HIVE = 1, 2, 3, 4  # enum Locality
UNMEASURED_BAND = 1_000_000  # behind every measured one


class Candidate(NamedTuple):
    """A row that passed every gate for one demand, with what it is ranked by; least is best."""

    band: int
    fragments: float
    cost: float
    node: str
    device: str
    profile: str
    at: tuple[int, int]  # of the node, and of the row in it
    pieces: tuple[Piece, ...]


def choose(inputs: Inputs) -> Choice:
    """Return the pieces for a wish, or why there are none and what would be possible."""
    from alloy_brain.possible import refuse

    candidates = survey(inputs)
    picked = None
    if all(candidates):
        for group in _groups(inputs, candidates):
            picked = _assign(inputs, group)
            if picked is not None:
                break
    if picked is None:
        return refuse(inputs, candidates)
    return Choice(picked=picked)


def survey(inputs: Inputs) -> list[list[Candidate]]:
    """Return, for each demand, the candidates whose gates are all open, best first."""
    wish, policy = inputs.wish, inputs.policy
    found: list[list[Candidate]] = [[] for _ in wish.demands]
    matching: dict[int, tuple[int, ...]] = {}
    scorer = Scorer(inputs)
    for index, node in enumerate(inputs.nodes):
        if any(gate.state != gates.OPEN for gate in gates.node_gates(wish, policy, node)):
            continue
        for number, row in enumerate(node.rows):
            if not row.free or row.health != gates.OPEN or row.draining:
                continue
            wanted = matching.get(id(row.kind))
            if wanted is None:
                wanted = matching[id(row.kind)] = _wanted_by(inputs, row.kind)
            if not wanted:
                continue
            pieces = _not_avoided(inputs, node, row)
            if not pieces:
                continue
            candidate = scorer.candidate(index, number, pieces)
            for demand in wanted:
                found[demand].append(candidate)
    for candidates in found:
        candidates.sort()
    return found


def _wanted_by(inputs: Inputs, kind: Kind) -> tuple[int, ...]:
    """Return which demands a kind satisfies at the tier that is asked for."""
    if not gates.tier_allows(inputs.wish.tier_floor, kind.tier):
        return ()
    demands = enumerate(inputs.wish.demands)
    return tuple(number for number, demand in demands if not gates.fits(demand, kind))


def _not_avoided(inputs: Inputs, node: NodeFacts, row: Row) -> tuple[Piece, ...]:
    avoid = inputs.wish.avoid
    if not avoid:
        return row.free
    return tuple(piece for piece in row.free if gates.key(node, piece.id) not in avoid)


class Scorer:
    """Ranks rows; remembers what equal devices have in common.

    Kinds are told apart by `id` first, since most are shared: hashing each of 8,000 would cost more
    than all the rest. `Inputs` keeps them alive meanwhile.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._numbers: dict[int, int] = {}  # id of a kind -> its number
        self._kinds: dict[Kind, int] = {}
        self._costs: list[float] = []
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._fragments: dict[tuple[tuple[int, ...], int], float] = {}
        total = sum(weight for _, weight in inputs.mix) or 1.0
        self._mix = [(demand, weight / total) for demand, weight in inputs.mix]

    def number(self, kind: Kind) -> int:
        """Return the number of a kind, the same for equal ones."""
        number = self._numbers.get(id(kind))
        if number is None:
            number = self._kinds.setdefault(kind, len(self._kinds))
            self._numbers[id(kind)] = number
            if number == len(self._costs):
                self._costs.append(cost_of(kind, self._inputs.policy))
        return number

    def candidate(self, index: int, number: int, pieces: tuple[Piece, ...]) -> Candidate:
        """Return the candidate that a row is."""
        node = self._inputs.nodes[index]
        row = node.rows[number]
        kind = self.number(row.kind)
        return Candidate(
            band_of(node.loads[number], self._inputs.policy),
            self._growth(index, row, kind) if self._mix else 0.0,
            self._costs[kind],
            node.node,
            row.device,
            row.kind.profile,
            (index, number),
            pieces,
        )

    def _growth(self, index: int, row: Row, kind: int) -> float:
        """Return by how many slices fragmentation grows when one piece of a row is taken."""
        shapes = self._shapes.get(index)
        if shapes is None:
            shapes = self._shapes[index] = self._shapes_of(self._inputs.nodes[index])
        key = (shapes[row.device], kind) if row.device in shapes else ((), kind)
        known = self._fragments.get(key)
        if known is None:
            names = list(self._kinds)
            shape = [(names[n], count) for n, count in zip(key[0][::2], key[0][1::2], strict=True)]
            known = self._fragments[key] = growth(shape, row.kind, self._mix)
        return known

    def _shapes_of(self, node: NodeFacts) -> dict[str, tuple[int, ...]]:
        """Return what is free on each device of a node: number of a kind, count, and so on."""
        shapes: dict[str, tuple[int, ...]] = {}
        for row in node.rows:
            if row.free:
                part = (self.number(row.kind), len(row.free))
                shapes[row.device] = shapes.get(row.device, ()) + part
        return shapes


def growth(
    shape: Sequence[tuple[Kind, int]], taken: Kind, mix: Iterable[tuple[Demand, float]]
) -> float:
    """Return the growth of a device's expected fragments, in shares of the device."""
    after = [(kind, count - (kind == taken)) for kind, count in shape]
    grown = sum(
        weight * (_fragments(after, demand) - _fragments(shape, demand)) for demand, weight in mix
    )
    return round(grown, 6)


def _fragments(shape: Iterable[tuple[Kind, int]], demand: Demand) -> float:
    """Return which share of a device is free and of no use to one demand."""
    return sum(
        count * kind.size / max(1, kind.slices)
        for kind, count in shape
        if count and gates.fits(demand, kind)
    )


def band_of(load: Load, policy: Policy) -> int:
    """Return the band of a headroom, 0 for the most."""
    if load.headroom_ratio is None:
        return UNMEASURED_BAND
    return math.floor((1.0 - load.headroom_ratio) / policy.band_ratio + 1e-9)


def cost_of(kind: Kind, policy: Policy) -> float:
    """Return what a piece costs: its share of the device's price, or its share alone."""
    share = kind.size / max(1, kind.slices)
    for pattern, price in sorted(policy.prices_per_h.items()):
        if fnmatchcase(kind.model.lower(), pattern.lower()):
            return round(share * price, 6)
    return round(share, 6)


# --- gangs ----------------------------------------------------------------------------------------


def _groups(inputs: Inputs, candidates: list[list[Candidate]]) -> Iterable[list[list[Candidate]]]:
    """Yield sets of candidates that keep the locality together, the most promising first."""
    locality = inputs.wish.locality
    if locality in (0, ANY):
        yield candidates
        return
    grouped: dict[tuple[str, str], list[list[Candidate]]] = defaultdict(
        lambda: [[] for _ in candidates]
    )
    for demand, found in enumerate(candidates):
        for candidate in found:
            grouped[_place(inputs, candidate)][demand].append(candidate)
    complete = [group for group in grouped.values() if all(group)]
    complete.sort(key=lambda group: max(found[0] for found in group))  # its worst is what counts
    yield from complete


def _place(inputs: Inputs, candidate: Candidate) -> tuple[str, str]:
    """Return what has to be common to the pieces of a gang."""
    if inputs.wish.locality == ONE_NODE:
        return candidate.node, ""
    if inputs.wish.locality == ONE_DEVICE:
        return candidate.node, candidate.device
    index, number = candidate.at
    return candidate.node, inputs.nodes[index].rows[number].hive or candidate.device


def _assign(inputs: Inputs, candidates: list[list[Candidate]]) -> tuple[Picked, ...] | None:
    """Return one piece for each unit of each demand, or None when they do not fit together.

    Greedy from the demand with the fewest candidates; where that runs dry, pieces given earlier
    move to another row of theirs (augmenting paths), so that None means that there is no way.
    """
    left = {c.at: len(c.pieces) for found in candidates for c in found}
    given: dict[tuple[int, int], list[int]] = defaultdict(list)  # demands served by a row
    order = sorted(range(len(candidates)), key=lambda n: (len(candidates[n]), n))
    for demand in order:
        for _ in range(inputs.wish.demands[demand].count):
            if not _give(demand, candidates, left, given):
                return None
    by_row = {c.at: c for found in candidates for c in found}
    picked = []
    for at in sorted(given):
        candidate = by_row[at]
        kind = inputs.nodes[at[0]].rows[at[1]].kind
        for demand, piece in zip(sorted(given[at]), candidate.pieces, strict=False):
            picked.append(
                Picked(
                    demand=demand,
                    node=candidate.node,
                    device=candidate.device,
                    partition=piece.id,
                    generation=piece.generation,
                    tier=kind.tier,
                )
            )
    return tuple(sorted(picked, key=lambda p: (p.demand, p.node, p.partition)))


def _give(
    demand: int,
    candidates: list[list[Candidate]],
    left: dict[tuple[int, int], int],
    given: dict[tuple[int, int], list[int]],
) -> bool:
    """Give one unit of a demand a piece, moving others out of its way where needed."""
    for candidate in candidates[demand]:
        if left[candidate.at]:
            left[candidate.at] -= 1
            given[candidate.at].append(demand)
            return True
    # Breadth first over who could make room: row -> a demand in it -> another row of that demand.
    came: dict[tuple[int, int], tuple[tuple[int, int], int] | None] = {
        candidate.at: None for candidate in candidates[demand]
    }
    queue = list(came)
    for at in queue:
        for other in sorted(set(given[at])):
            for candidate in candidates[other]:
                if candidate.at in came:
                    continue
                came[candidate.at] = (at, other)
                if left[candidate.at]:
                    left[candidate.at] -= 1
                    _shift(candidate.at, demand, came, given)
                    return True
                queue.append(candidate.at)
    return False


def _shift(
    at: tuple[int, int],
    demand: int,
    came: dict[tuple[int, int], tuple[tuple[int, int], int] | None],
    given: dict[tuple[int, int], list[int]],
) -> None:
    """Move the units along a path, and give the room that comes free to a demand."""
    step = came[at]
    while step is not None:
        before, other = step
        given[before].remove(other)
        given[at].append(other)
        at, step = before, came[before]
    given[at].append(demand)
