"""How long a plan for 8 devices with 7 slices each takes, and whether a cheaper one exists."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from alloy_agent.model import (
    Device,
    DeviceId,
    DeviceLayout,
    Layout,
    Mode,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Profile,
    Scheme,
    Snapshot,
    SourceRef,
    Vendor,
)
from alloy_agent.planner import partition_id, plan
from alloy_agent.silicon.boards import NVIDIA_BOARDS
from benchmarks.report import Result, main, quantile, result

BOARD: Final = "H100-SXM5-80GB"
PROMISE_MS: Final = 20.0
Placed = tuple[str, int]

# Transitions that make the search work: many kinds, many arrangements, pieces in the way.
TRANSITIONS: Final[tuple[tuple[tuple[Placed, ...], tuple[str, ...]], ...]] = (
    (tuple(("1g.10gb", n) for n in range(7)), ("1g.10gb", "1g.10gb", "1g.10gb+me", "2g.20gb")),
    (tuple(("1g.10gb", n) for n in range(7)), ("1g.20gb", "1g.10gb", "1g.10gb", "1g.10gb+me")),
    (tuple(("1g.10gb", n) for n in range(7)), ("3g.40gb", "3g.40gb")),
    (
        (("1g.10gb", 1), ("1g.10gb", 3), ("1g.10gb", 5)),
        ("2g.20gb", "1g.20gb", "1g.10gb", "1g.10gb"),
    ),
    ((("3g.40gb", 0), ("3g.40gb", 4)), ("1g.10gb",) * 7),
    ((("4g.40gb", 0), ("2g.20gb", 4), ("1g.10gb", 6)), ("4g.40gb", *("1g.10gb",) * 3)),
    ((("7g.80gb", 0),), ("1g.10gb+me", "1g.10gb", "1g.10gb", "1g.20gb", "2g.20gb")),
    (tuple(("1g.20gb", n) for n in (0, 2, 4, 6)), ("1g.10gb+me", *("1g.10gb",) * 6)),
)


def device(index: int) -> Device:
    """Return one simulated board."""
    board = next(board for board in NVIDIA_BOARDS if board.name == BOARD)
    return Device(
        id=DeviceId(f"GPU-{index}"),
        vendor=Vendor.NVIDIA,
        model=BOARD,
        backend="fake",
        scheme=Scheme.INSTANCES,
        slices=board.memory_slices,
        slice_name="memory slice",
        index=index,
        profiles=tuple(
            Profile(
                name=shape.name,
                size=shape.size,
                starts=shape.starts,
                max_count=shape.max_count,
                compute_units=shape.sms,
            )
            for shape in board.profiles
        ),
        modes=(Mode(kind=ModeKind.MIG, current="on", available=("off", "on")),),
    )


def pieces(board: Device, placed: tuple[Placed, ...]) -> tuple[Partition, ...]:
    """Return the living pieces of one board."""
    sizes = {profile.name: profile.size for profile in board.profiles}
    return tuple(
        Partition(
            id=partition_id(board.id, name, start),
            device=board.id,
            profile=name,
            placement=Placement(start=start, size=sizes[name]),
            incarnation="1",
            managed=True,
        )
        for name, start in placed
    )


def wish(board: Device, names: tuple[str, ...]) -> DeviceLayout:
    """Return what one board shall be."""
    sizes = {profile.name: profile.size for profile in board.profiles}
    return DeviceLayout(
        device=board.id,
        modes={ModeKind.MIG: "on"},
        partitions=tuple(
            PartitionSpec(device=board.id, profile=name, size=sizes[name]) for name in names
        ),
        source=SourceRef(file="benchmark", line=1),
    )


def node(before: list[tuple[Placed, ...]], after: list[tuple[str, ...]]) -> tuple[Layout, Snapshot]:
    """Return the wish and the state of a node with one board for each entry."""
    boards = [device(index) for index in range(len(before))]
    alive = [p for board, placed in zip(boards, before, strict=True) for p in pieces(board, placed)]
    wishes = tuple(wish(board, names) for board, names in zip(boards, after, strict=True))
    seen = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=tuple(boards),
        partitions=tuple(alive),
    )
    return Layout(name="benchmark", devices=wishes), seen


def timed(rounds: int) -> list[list[float]]:
    """Return milliseconds by case: each transition on all boards, and all transitions mixed."""
    cases = [node([before] * 8, [after] * 8) for before, after in TRANSITIONS]
    cases.append(node([b for b, _ in TRANSITIONS], [a for _, a in TRANSITIONS]))
    samples: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for (goal, seen), mine in zip(cases, samples, strict=True):
            begin = time.perf_counter()
            plan(goal, seen)
            mine.append((time.perf_counter() - begin) * 1e3)
    return samples


def all_layouts(board: Device) -> Iterator[tuple[Placed, ...]]:
    """Yield every legal set of placed pieces of one board."""
    open_: list[tuple[int, tuple[Placed, ...]]] = [(0, ())]
    while open_:
        position, placed = open_.pop()
        if position >= board.slices:
            yield placed
            continue
        open_.append((position + 1, placed))
        counts = Counter(name for name, _ in placed)
        for profile in board.profiles:
            fits = position in profile.starts and position + profile.size <= board.slices
            if fits and counts[profile.name] < profile.max_count:
                open_.append((position + profile.size, (*placed, (profile.name, position))))


def worse_than_exhaustive(stride: int) -> tuple[int, int]:
    """Return how many transitions of one board cost more than need be, and of how many."""
    board = device(0)
    layouts = list(all_layouts(board))
    places: dict[tuple[str, ...], list[frozenset[Placed]]] = {}
    for placed in layouts:
        places.setdefault(tuple(sorted(name for name, _ in placed)), []).append(frozenset(placed))
    worse = checked = 0
    for before, after in itertools.islice(itertools.product(layouts, places), 0, None, stride):
        goal, seen = node([before], [after])
        have = frozenset(before)
        kept = max(len(have & target) for target in places[after])
        least = (len(before) - kept, len(before) + len(after) - 2 * kept)
        cost = plan(goal, seen).cost
        worse += (cost.destroyed, cost.steps) > least
        checked += 1
    return worse, checked


def measure(quick: bool) -> list[Result]:
    """Return the time of worst-case plans, and the comparison with exhaustive search."""
    timed(1)
    by_case = timed(20 if quick else 200)
    samples = [sample for case in by_case for sample in case]
    worse, checked = worse_than_exhaustive(97 if quick else 7)
    return [
        result(
            "plan for 8 devices x 7 slices, median of the slowest transition",
            samples,
            "ms",
            "<=",
            PROMISE_MS,
            figure=max(quantile(case, 0.5) for case in by_case),
        ),
        Result(
            what="transitions of one board that cost more than exhaustive search finds",
            figure=worse,
            unit="transitions",
            sense="<=",
            promise=0,
            samples=checked,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("planner", measure))
