"""The planner against exhaustive search on small boards: never worse, never illegal."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import Destroy, Layout, PartitionId, Snapshot
from alloy_agent.planner import difference, plan
from tests.planner.world import (
    Oracle,
    Placed,
    cpu,
    fewest_destroyed_runs,
    gpu,
    layout,
    piece,
    pieces,
    replay,
    runs,
    snapshot,
    wanted,
)

BOARDS = ("A100-SXM4-40GB", "H100-SXM5-80GB")


@functools.cache
def oracle_of(board: str) -> Oracle:
    return Oracle(gpu(board))


@functools.cache
def goal_of(board: str, after: tuple[str, ...]) -> Layout:
    return layout(wanted(gpu(board), *after))


@functools.lru_cache(maxsize=4)
def seen_of(board: str, before: tuple[Placed, ...]) -> Snapshot:
    device = gpu(board)
    return snapshot((device,), pieces(device, before))


def check_pair(board: str, before: tuple[Placed, ...], after: tuple[str, ...]) -> None:
    """Plan one transition, do it step by step, and compare its cost with the oracle's."""
    seen, goal = seen_of(board, before), goal_of(board, after)
    made = plan(goal, seen)
    fewest = oracle_of(board).fewest_destroyed(before, after)
    assert fewest is not None
    kept = len(before) - fewest
    assert made.cost.destroyed == fewest
    assert made.cost.steps == fewest + len(after) - kept == len(made.steps)
    assert len(made.kept) == kept
    left = replay(made, seen)
    assert tuple(sorted(part.profile for part in left.partitions.values())) == after
    assert difference(goal, snapshot(seen.devices, left.partitions.values())) == ()


def pairs(board: str) -> Iterable[tuple[tuple[Placed, ...], tuple[str, ...]]]:
    oracle = oracle_of(board)
    return ((before, after) for before in oracle.layouts for after in oracle.by_multiset)


@pytest.mark.parametrize("board", BOARDS)
def test_sampled_transitions_cost_what_exhaustive_search_finds(board: str) -> None:
    """A fixed sample of all pairs of layouts costs exactly the least, and every state is legal."""
    chosen = random.Random(20).sample(list(pairs(board)), 2500)  # noqa: S311
    for before, after in chosen:
        check_pair(board, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("board", BOARDS)
def test_every_transition_costs_what_exhaustive_search_finds(board: str) -> None:
    """Every legal pair of layouts of a board costs exactly the least, every state is legal."""
    checked = 0
    for before, after in pairs(board):
        check_pair(board, before, after)
        checked += 1
    assert checked == 2319 * 128


@pytest.mark.parametrize("board", BOARDS)
def test_a_leased_piece_is_never_destroyed(board: str) -> None:
    """With leases the plan keeps them all at the least cost, or is refused when there is no way."""
    oracle = oracle_of(board)
    device = gpu(board)
    dice = random.Random(11)  # noqa: S311
    choices = list(pairs(board))
    refused = granted = 0
    while refused + granted < 1500:
        before, after = dice.choice(choices)
        leased = tuple(item for item in before if dice.random() < 0.4)
        held = frozenset(PartitionId(f"{device.id}/{name}@{start}") for name, start in leased)
        seen = snapshot((device,), pieces(device, before))
        fewest = oracle.fewest_destroyed(before, after, leased)
        if fewest is None:
            with pytest.raises(PlanImpossibleError, match="held by a lease"):
                plan(layout(wanted(device, *after)), seen, held)
            refused += 1
            continue
        made = plan(layout(wanted(device, *after)), seen, held)
        assert made.cost.destroyed == fewest
        assert held <= set(made.kept)
        assert not {s.step.partition.id for s in made.steps if isinstance(s.step, Destroy)} & held
        replay(made, seen)
        granted += 1
    assert refused > 100
    assert granted > 100


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int], frozenset[int]]:
    """A row of cores, living runs on it, wanted runs that fit by their sum, and leased ones."""
    slices = draw(st.integers(1, 9))
    before: list[tuple[int, int]] = []
    position = 0
    while position < slices:
        position += draw(st.integers(0, 2))
        size = draw(st.integers(1, 4))
        if position + size > slices:
            break
        before.append((position, size))
        position += size
    sizes: list[int] = []
    while (room := slices - sum(sizes)) > 0 and draw(st.booleans()):
        sizes.append(draw(st.integers(1, room)))
    leased = draw(st.sets(st.integers(0, max(0, len(before) - 1)))) if before else set()
    return slices, before, sizes, frozenset(leased)


@given(rows())
def test_runs_of_cores_cost_what_exhaustive_search_finds(
    row: tuple[int, list[tuple[int, int]], list[int], frozenset[int]],
) -> None:
    """On a row of cores too, the plan destroys the fewest, around leased runs or not at all."""
    slices, before, sizes, leased = row
    device = cpu(cores=slices)
    alive = [piece(device, f"{size}c", start, size) for start, size in before]
    seen = snapshot((device,), alive)
    held = frozenset(alive[index].id for index in leased)
    fewest = fewest_destroyed_runs(slices, before, sizes, leased)
    goal = layout(runs(device, *sizes))
    if fewest is None:
        with pytest.raises(PlanImpossibleError):
            plan(goal, seen, held)
        return
    made = plan(goal, seen, held)
    assert made.cost.destroyed == fewest
    assert held <= set(made.kept)
    left = replay(made, seen)
    assert sorted(part.placement.size for part in left.partitions.values()) == sorted(sizes)


@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4))), max_size=4),
    st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4))), max_size=4),
)
def test_a_changed_cap_never_costs_a_piece(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    """Runs whose memory alone differs are kept, and no more caps change than must."""
    device = cpu(cores=12, memory_gib=64)
    start, alive = 0, []
    for size, memory in before:
        alive.append(piece(device, f"{size}c", start, size, memory << 30))
        start += size
    seen = snapshot((device,), alive)
    goal = layout(runs(device, *(s for s, _ in after), memory=[m << 30 for _, m in after]))
    made = plan(goal, seen)
    left = replay(made, seen)
    shown = sorted((p.placement.size, p.memory_bytes) for p in left.partitions.values())
    assert shown == sorted((size, memory << 30) for size, memory in after)
    fewest = fewest_destroyed_runs(12, [(p.placement.start, p.placement.size) for p in alive],
                                   [size for size, _ in after], frozenset())  # fmt: skip
    assert made.cost.destroyed == fewest
