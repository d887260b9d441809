"""Why a wish cannot be met, and what could be instead. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from alloy_brain import gates
from alloy_brain.facts import Choice, Demand, Inputs, Kind

if TYPE_CHECKING:
    from alloy_brain.placement import Candidate

MAX_POSSIBLE = 8


def refuse(inputs: Inputs, candidates: Sequence[Sequence[Candidate]]) -> Choice:
    """Return the refusal of a wish that has no choice: for ever, or for now."""
    kinds = Counter(_kinds(inputs))
    if not kinds:
        nodes = len(inputs.nodes)
        known = f"{nodes} nodes are known" if nodes else "no node is known yet"
        return Choice(
            refusal="exhausted",
            message=f"there is no partition to place on: {known}",
            possible=("cut partitions with 'alloy-agent apply', then ask again",),
        )
    for number, demand in enumerate(inputs.wish.demands):
        never = _never(inputs, demand, kinds)
        if never:
            possible = _alternatives(inputs, demand, kinds)
            return Choice(
                refusal="invalid", message=f"demand {number + 1}: {never}", possible=possible
            )
    for number, demand in enumerate(inputs.wish.demands):
        free = sum(len(candidate.pieces) for candidate in candidates[number])
        if free < demand.count:
            return _not_now(inputs, number, free)
    return Choice(
        refusal="exhausted",
        message="the pieces that are free do not fit together as a gang where it was asked for",
        possible=("ask with locality any", "ask for fewer pieces"),
    )


def _kinds(inputs: Inputs) -> Iterable[Kind]:
    for node in inputs.nodes:
        for row in node.rows:
            for _ in range(len(row.free) + len(row.taken)):
                yield row.kind


def _never(inputs: Inputs, demand: Demand, kinds: Counter[Kind]) -> str:
    """Return why no state of the fleet as it is cut could meet a demand; empty when one could."""
    fitting = {kind: count for kind, count in kinds.items() if not gates.fits(demand, kind)}
    if not fitting:
        reasons = Counter(gates.fits(demand, kind) for kind in kinds)
        return f"no partition of the fleet fits: {reasons.most_common(1)[0][0]}"
    floor = inputs.wish.tier_floor
    reach = [kind for kind in fitting if gates.tier_allows(floor, kind.tier_best or kind.tier)]
    if floor and not reach:
        best = min(kind.tier_best or kind.tier or len(gates.TIERS) - 1 for kind in fitting)
        return (
            f"tier {gates.word(gates.TIERS, floor)}: no node can prove it; "
            f"the best is {gates.word(gates.TIERS, best)}"
        )
    total = sum(fitting.values())
    if demand.count > total:
        return f"{demand.count} pieces: the whole fleet has {total} that fit"
    return ""


def _not_now(inputs: Inputs, number: int, free: int) -> Choice:
    """Return the refusal of a demand that is met at another time, with what stands in the way."""
    demand = inputs.wish.demands[number]
    hindrances: Counter[str] = Counter()
    for node in inputs.nodes:
        shared = gates.node_gates(inputs.wish, inputs.policy, node)
        for row in node.rows:
            if gates.fits(demand, row.kind):
                continue
            own = gates.row_gates(inputs.wish, demand, node, row)
            shut = next((g for g in (*shared, *own) if g.state != gates.OPEN), None)
            if shut is not None:
                count = len(row.free) + len(row.taken)
                hindrances[f"{shut.gate} {shut.state}: {shut.reason}"] += count
    found = [f"{count} pieces: {why}" for why, count in hindrances.most_common(MAX_POSSIBLE)]
    possible = [f"ask for {free} instead of {demand.count}"] if free else []
    if inputs.wish.tier_floor and any(why.startswith("tier") for why in hindrances):
        possible.append("lower the tier floor")
    possible.append("ask again when a lease ends or a gate opens")
    return Choice(
        refusal="exhausted",
        message=f"demand {number + 1}: {free} of {demand.count} pieces are free"
        + (f" ({'; '.join(found[:3])})" if found else ""),
        possible=tuple(possible),
    )


def _alternatives(inputs: Inputs, demand: Demand, kinds: Counter[Kind]) -> tuple[str, ...]:
    """Return kinds that exist, those that lack least first."""

    def distance(kind: Kind) -> tuple[bool, int, str]:
        wrong_vendor = bool(demand.vendor) and demand.vendor != kind.vendor
        lack = max(0, demand.memory_bytes - (kind.memory_bytes or 0))
        return wrong_vendor, lack, kind.profile

    lines: dict[str, int] = {}
    for kind in sorted(kinds, key=distance):
        tier = gates.word(gates.TIERS, kind.tier)
        memory = f" {kind.memory_bytes / 2**30:.1f} GiB" if kind.memory_bytes else ""
        line = f"{kind.profile} of {kind.model}{memory}, tier {tier}"
        lines[line] = lines.get(line, 0) + kinds[kind]
    del inputs
    return tuple(f"{count} x {line}" for line, count in list(lines.items())[:MAX_POSSIBLE])
