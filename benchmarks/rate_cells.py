"""One arm on one trace with one seed: what production kept, what was lent, how soon it settled."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from alloy_agent.conformance.rate import RateLimits, Slo
from alloy_agent.silicon.accelerator.engine import SWITCH_S
from alloy_agent.silicon.accelerator.simulation import Control, Ledger, Outcome, Simulation
from alloy_agent.silicon.accelerator.workloads import Trace
from benchmarks.rate_arms import BangBang, GateOnly, Ours, RateOnly, Solo, Static, Tgs, Uncontrolled
from benchmarks.report import quantile

WINDOW_S: Final = 2.0
OURS: Final = "ours, budget 2 %"
OURS_5: Final = "ours, budget 5 %"
OURS_T: Final = "ours, throughput"
TGS: Final = "TGS"
GATE: Final = "gate only"
ARMS: Final[dict[str, Callable[[], Control]]] = {
    "none": Uncontrolled,
    "static 50 %": lambda: Static(0.5),
    "freezer": BangBang,
    TGS: Tgs,
    "TGS, intervals / 10": lambda: Tgs(10.0),
    "rate only (PI)": RateOnly,
    GATE: GateOnly,
    OURS: Ours,
    OURS_5: lambda: Ours(RateLimits(budget_ratio=0.05)),
    OURS_T: lambda: Ours(RateLimits(slo=Slo.THROUGHPUT)),
}
Table = dict[tuple[str, str], list["Cell"]]


@dataclass(frozen=True)
class Cell:
    """One arm on one trace with one seed, against the solo run of that seed."""

    production: float  # ratios of solo
    worst: float  # 5th percentile of 2 s windows
    p50: float
    p99: float
    lent: float  # of the device
    leftover: float  # of what solo leaves
    oracle: float  # the most that fits into solo's pauses, of what solo leaves
    settle_s: float


def run(trace: Trace, control: Control, seed: int) -> Outcome:
    """Return one run."""
    simulation = Simulation(trace, control, seed)
    if type(control) is not Solo:
        simulation.add_neighbour()
    return simulation.run()


def measure_cell(trace: Trace, control: Control, seed: int, solo: Outcome) -> Cell:
    """Return the figures of the second half of a run, and how long it took to settle."""
    seen = run(trace, control, seed)
    begin_s = trace.lasts_s / 2
    took_s = trace.lasts_s - begin_s
    alone_s, work_s = solo.work.between(begin_s), seen.work.between(begin_s)
    lent_s = seen.lent.between(begin_s)
    idle_s = took_s - alone_s
    bursts = solo.work.since(begin_s)
    alone = sorted(solo.latency_s.entries(begin_s))
    mine = sorted(seen.latency_s.entries(begin_s))
    return Cell(
        production=work_s / alone_s,
        worst=_worst_window(trace, seen, solo, begin_s),
        p50=quantile(mine, 0.5) / quantile(alone, 0.5),
        p99=quantile(mine, 0.99) / quantile(alone, 0.99),
        lent=lent_s / took_s,
        leftover=lent_s / idle_s,
        oracle=max(0.0, idle_s - 2.0 * SWITCH_S * bursts) / idle_s,
        settle_s=settle(trace, seen, solo),
    )


def settle(trace: Trace, seen: Outcome, solo: Outcome) -> float:
    """Return the longest time from the start or a step until both sides are where they end up."""
    worst_s = 0.0
    marks = [0.0, *(s for s in trace.steps_s() if s < trace.lasts_s), trace.lasts_s]
    for begin_s, end_s in itertools.pairwise(marks):
        final = seen.lent.between(end_s - 8.0, end_s) / 8.0
        now_s = begin_s
        while now_s + 3.0 < end_s and not _settled(seen, solo, now_s, final):
            now_s += 0.5
        worst_s = max(worst_s, now_s - begin_s)
    return worst_s


def _settled(seen: Outcome, solo: Outcome, now_s: float, final: float) -> bool:
    lent = seen.lent.between(now_s, now_s + 3.0) / 3.0
    work, alone = (o.work.between(now_s, now_s + 3.0) for o in (seen, solo))
    return lent >= 0.8 * final and work >= 0.95 * alone


def _windows(samples: Ledger, begin_s: float, end_s: float) -> list[float]:
    count = int((end_s - begin_s) / WINDOW_S)
    edges = [begin_s + n * WINDOW_S for n in range(count + 1)]
    return [samples.between(*edge) for edge in itertools.pairwise(edges)]


def _worst_window(trace: Trace, seen: Outcome, solo: Outcome, begin_s: float) -> float:
    mine, alone = (_windows(o.work, begin_s, trace.lasts_s) for o in (seen, solo))
    if trace.pause_s:  # a run that is slower pauses elsewhere: compare busy windows with the usual
        usual = quantile(alone, 0.5)
        # full windows: both neighbours have work too
        full = [
            m
            for before, m, after in zip(mine, mine[1:], mine[2:], strict=False)
            if min(before, m, after) > 0.5 * usual
        ]
        return quantile(full, 0.05) / usual if full else math.nan
    return quantile([m / a for m, a in zip(mine, alone, strict=True) if a > 0.0], 0.05)


def cells(
    traces: Sequence[Trace], arms: Sequence[str], seeds: Sequence[int], processes: int = 1
) -> Table:
    """Return the cells by trace and arm; solo is run once for each trace and seed."""
    jobs = [(trace, tuple(arms), seed) for trace in traces for seed in seeds]
    if processes > 1:
        # a fresh process for each: nothing of one run is left when the next begins
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            rows = pool.map(_row, jobs, chunksize=1)
    else:
        rows = [_row(job) for job in jobs]
    table: Table = {}
    for (trace, _, _), row in zip(jobs, rows, strict=True):
        for arm, cell in row.items():
            table.setdefault((trace.name, arm), []).append(cell)
    return table


def _row(job: tuple[Trace, tuple[str, ...], int]) -> dict[str, Cell]:
    trace, arms, seed = job
    solo = run(trace, Solo(), seed)
    return {arm: measure_cell(trace, ARMS[arm](), seed, solo) for arm in arms}


def spread(found: Sequence[Cell], what: str) -> tuple[float, float, float]:
    """Return median, smallest and largest of one figure."""
    values = [getattr(cell, what) for cell in found]
    return quantile(values, 0.5), min(values), max(values)
