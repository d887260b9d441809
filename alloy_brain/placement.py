"""The decision: which pieces a request gets, as a pure function of `Inputs`.

Order of what counts: gates (all open, or out), then headroom by its minimum (the scarcest resource
decides, compared in bands), then fragmentation (least growth), then cost, then names, so that the
same inputs always give the same choice. Search is over rows of equal pieces, never over pieces, so
a fleet of 56,000 pieces costs as much as its 8,000 devices.

Source: fragmentation after Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): what is free
and of no use to a class counts as a fragment, weighted by how often that class is asked for.
"""

from __future__ import annotations

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

    rank: tuple[int, float, float]  # band of headroom, growth of fragments, cost
    at: tuple[int, int]  # of the node, and of the row in it
    node: str
    device: str
    pieces: tuple[Piece, ...]


Rank = tuple[int, float, float]
Ranked = dict[Rank, list[tuple[int, int]]]


def choose(inputs: Inputs) -> Choice:
    """Return the pieces for a wish, or why there are none and what would be possible."""
    from alloy_brain.possible import refuse

    total = sum(demand.count for demand in inputs.wish.demands)
    anywhere = inputs.wish.locality in (0, ANY)
    # No demand can need more than `total` pieces, so what is ranked behind those does not matter.
    enough = total if anywhere else None
    ranked = survey(inputs, enough)
    candidates = [_best(inputs, one, enough) for one in ranked]
    picked = None
    if all(candidates):
        for group in _groups(inputs, candidates):
            picked = _assign(inputs, group)
            if picked is not None:
                break
    if picked is None:
        return refuse(inputs, [_best(inputs, one, None) for one in survey(inputs, None)])
    return Choice(picked=picked)


def survey(inputs: Inputs, enough: int | None) -> list[Ranked]:
    """Return, for each demand, the rows whose gates are all open, by rank.

    One pass over every row of the fleet: what it does for each is all that a decision costs. Of a
    single demand, rows in a worse band than one that has `enough` pieces are left out.
    """
    wish, policy = inputs.wish, inputs.policy
    found: list[Ranked] = [{} for _ in wish.demands]
    matching: dict[int, tuple[int, ...]] = {}
    scorer = Scorer(inputs)
    band_of, merits_of = scorer.band, scorer.merits
    limit = enough if len(wish.demands) == 1 else None
    cut = UNMEASURED_BAND
    having: dict[int, int] = {}
    for index, node in enumerate(inputs.nodes):
        if not gates.node_open(wish, policy, node):
            continue
        for number, (row, load) in enumerate(zip(node.rows, node.loads, strict=True)):
            band = band_of(load)
            if band > cut or not row.free or row.draining or row.health != gates.OPEN:
                continue
            kind = id(row.kind)
            wanted = matching.get(kind)
            if wanted is None:
                wanted = matching[kind] = _wanted_by(inputs, row.kind)
            free = _not_avoided(inputs, node, row) if wish.avoid else row.free
            if not wanted or not free:
                continue
            rank = (band, *merits_of(index, row))
            for demand in wanted:
                found[demand].setdefault(rank, []).append((index, number))
            if limit is not None:
                having[band] = having.get(band, 0) + len(free)
                cut = band if having[band] >= limit else cut
    return found


def _best(inputs: Inputs, ranked: Ranked, pieces: int | None) -> list[Candidate]:
    """Return candidates, best first, until they have so many pieces; None: all of them.

    Within a rank they stand as the nodes do, by name.
    """
    found: list[Candidate] = []
    for rank in sorted(ranked):
        for index, number in ranked[rank]:
            node = inputs.nodes[index]
            row = node.rows[number]
            free = _not_avoided(inputs, node, row)
            found.append(Candidate(rank, (index, number), node.node, row.device, free))
            if pieces is not None:
                pieces -= len(free)
                if pieces <= 0:
                    return found
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

    Kinds are told apart by `id`, since most are shared: hashing each of 8,000 would cost more than
    all the rest. `Inputs` keeps them alive meanwhile.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._parts: dict[tuple[int, int], tuple[float, float]] = {}
        self._per_band = 1.0 / inputs.policy.band_ratio
        total = sum(weight for _, weight in inputs.mix) or 1.0
        self._mix = [(demand, weight / total) for demand, weight in inputs.mix]

    def rank(self, index: int, row: Row, load: Load) -> Rank:
        """Return what a row of a node is ranked by."""
        return (self.band(load), *self.merits(index, row))

    def band(self, load: Load) -> int:
        """Return the band of a headroom, 0 for the most."""
        ratio = load.headroom_ratio
        if ratio is None:
            return UNMEASURED_BAND
        return int((1.0 - ratio) * self._per_band + 1e-9)

    def merits(self, index: int, row: Row) -> tuple[float, float]:
        """Return by how much fragmentation grows if a piece of a row is taken, and its cost."""
        key = (row.shape, id(row.kind))
        part = self._parts.get(key)
        if part is None:
            rows = self._inputs.nodes[index].rows
            shape = [(r.kind, len(r.free)) for r in rows if r.device == row.device and r.free]
            part = self._parts[key] = (
                growth(shape, row.kind, self._mix),
                cost_of(row.kind, self._inputs.policy),
            )
        return part


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
    complete.sort(
        key=lambda group: max((found[0].rank, found[0].at) for found in group)
    )  # its worst is what counts
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
