"""How fast production stays, and how much of the rest is lent: every arm on every trace.

Simulated clock. With `--table` the whole table is printed as Markdown instead of the document.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from alloy_agent.conformance.rate import RateLimits, Slo
from alloy_agent.conformance.sequential import AuditLimits, evidence
from alloy_agent.silicon.accelerator.engine import SWITCH_S
from alloy_agent.silicon.accelerator.simulation import Control, Outcome, Simulation
from alloy_agent.silicon.accelerator.workloads import T1, T2, T3, T4, T5, T6, TRACES, Trace
from benchmarks.rate_arms import BangBang, GateOnly, Ours, RateOnly, Solo, Static, Tgs, Uncontrolled
from benchmarks.report import Result, main, quantile, result

SEEDS: Final = (1, 2, 3, 4, 5)
WINDOW_S: Final = 2.0
OURS: Final = "ours, budget 2 %"
OURS_5: Final = "ours, budget 5 %"
OURS_T: Final = "ours, throughput"
TGS: Final = "TGS"
ARMS: Final[dict[str, Callable[[], Control]]] = {
    "none": Uncontrolled,
    "static 50 %": lambda: Static(0.5),
    "freezer": BangBang,
    TGS: Tgs,
    "TGS, intervals / 10": lambda: Tgs(10.0),
    "rate only (PI)": RateOnly,
    "gate only": GateOnly,
    OURS: Ours,
    OURS_5: lambda: Ours(RateLimits(budget_ratio=0.05)),
    OURS_T: lambda: Ours(RateLimits(slo=Slo.THROUGHPUT)),
}
QUICK_ARMS: Final = (TGS, OURS, OURS_5)


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
    alone_s, work_s = _sum(solo.work, begin_s), _sum(seen.work, begin_s)
    lent_s = _sum(seen.lent, begin_s)
    idle_s = took_s - alone_s
    bursts = sum(at >= begin_s for at, _ in solo.work)
    alone = [took for at, took, _ in solo.latency_s if at >= begin_s]
    mine = [took for at, took, _ in seen.latency_s if at >= begin_s]
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
        final = _between(seen.lent, end_s - 8.0, end_s) / 8.0
        now_s = begin_s
        while now_s + 3.0 < end_s and not _settled(seen, solo, now_s, final):
            now_s += 0.5
        worst_s = max(worst_s, now_s - begin_s)
    return worst_s


def _settled(seen: Outcome, solo: Outcome, now_s: float, final: float) -> bool:
    lent = _between(seen.lent, now_s, now_s + 3.0) / 3.0
    work, alone = (_between(o.work, now_s, now_s + 3.0) for o in (seen, solo))
    return lent >= 0.8 * final and work >= 0.95 * alone


def _sum(samples: Sequence[tuple[float, float]], begin_s: float) -> float:
    return sum(value for at, value in samples if at >= begin_s)


def _between(samples: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    return sum(value for at, value in samples if begin_s <= at < end_s)


def _windows(samples: Sequence[tuple[float, float]], count: int) -> list[float]:
    sums = [0.0] * count
    for at, value in samples:
        if at < count * WINDOW_S:
            sums[int(at / WINDOW_S)] += value
    return sums


def _worst_window(trace: Trace, seen: Outcome, solo: Outcome, begin_s: float) -> float:
    count = int(trace.lasts_s / WINDOW_S)
    first = int(begin_s / WINDOW_S)
    mine, alone = _windows(seen.work, count)[first:], _windows(solo.work, count)[first:]
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
    traces: Sequence[Trace], arms: Sequence[str], seeds: Sequence[int]
) -> dict[tuple[str, str], list[Cell]]:
    """Return the cells by trace and arm."""
    table: dict[tuple[str, str], list[Cell]] = {}
    for trace in traces:
        for seed in seeds:
            solo = run(trace, Solo(), seed)
            for arm in arms:
                cell = measure_cell(trace, ARMS[arm](), seed, solo)
                table.setdefault((trace.name, arm), []).append(cell)
    return table


def medians(found: Sequence[Cell], what: str) -> tuple[float, float, float]:
    """Return median, smallest and largest of one figure."""
    values = [getattr(cell, what) for cell in found]
    return quantile(values, 0.5), min(values), max(values)


def markdown(table: dict[tuple[str, str], list[Cell]]) -> str:
    """Return the table for people."""
    head = "| trace | arm | production | worst windows | p50 | p99 | lent | of leftover | settles |"
    lines = [head, "|" + " --- |" * 9]
    for (trace, arm), found in table.items():
        parts = []
        for what in ("production", "worst", "p50", "p99", "lent", "leftover", "settle_s"):
            middle, low, high = medians(found, what)
            if what in {"p50", "p99"}:
                parts.append(f"{middle:.2f}")
            elif what == "settle_s":
                parts.append(f"{middle:.1f} s")
            elif what == "worst":
                parts.append(f"{100 * middle:.1f} %")
            else:
                parts.append(f"{100 * middle:.1f} % ({100 * low:.1f}..{100 * high:.1f})")
        lines.append(f"| {trace} | {arm} | " + " | ".join(parts) + " |")
    for trace in dict.fromkeys(name for name, _ in table):
        middle, low, high = medians(table[trace, next(a for t, a in table if t == trace)], "oracle")
        lines.append(
            f"| {trace} | oracle | 100.0 % | | | | |"
            f" {100 * middle:.1f} % ({100 * low:.1f}..{100 * high:.1f}) | |"
        )
    return "\n".join(lines)


def promises(table: dict[tuple[str, str], list[Cell]]) -> list[Result]:
    """Return the figures beside their targets."""
    rows: list[Result] = []

    def row(trace: str, arm: str, what: str, sense: str, promise: float) -> None:
        found = table.get((trace, arm))
        if not found:
            return
        values = [getattr(cell, what) for cell in found]
        unit = "s" if what == "settle_s" else "ratio"
        low = "<=" if sense == "<=" else ">="
        rows.append(
            result(f"{trace}, {arm}: {what}", values, unit, low, promise)  # type: ignore[arg-type]
        )

    for trace in (T1, T2, T4, *T5):
        row(trace.name, OURS, "production", ">=", 0.98)
        row(trace.name, OURS, "worst", ">=", 0.96)
    row(T6[0].name, OURS, "production", ">=", 0.975)
    row(T6[0].name, OURS, "p99", "<=", 1.20)
    for trace in (T1, T2, T3, T4, T6[1]):
        row(trace.name, OURS, "p50", "<=", 1.07)
        row(trace.name, OURS, "p99", "<=", 1.10)
    for trace, share in ((T1, 0.85), (T2, 0.5), (T3, 0.5), (T4, 0.6)):
        row(trace.name, OURS, "leftover", ">=", share)
        row(trace.name, OURS_5, "leftover", ">=", 0.85)
    row(T2.name, OURS_T, "leftover", ">=", 0.9)
    for trace in (T1, T4):
        row(trace.name, OURS, "settle_s", "<=", 3.0)
    for trace, times in ((T1, 2.5), (T3, 10.0)):
        ours, theirs = table.get((trace.name, OURS)), table.get((trace.name, TGS))
        if ours and theirs:
            ratios = [a.lent / b.lent for a, b in zip(ours, theirs, strict=True)]
            rows.append(result(f"{trace.name}: lent, ours over TGS", ratios, "ratio", ">=", times))
            gain = [a.production - b.production for a, b in zip(ours, theirs, strict=True)]
            if trace is T1:
                what = f"{trace.name}: production, ours less TGS"
                rows.append(result(what, gain, "ratio", ">=", 0.0))
    return rows


def detection(quick: bool) -> list[Result]:
    """Return how soon slowdowns are found, and false alarms in clean windows."""
    limits, noise = AuditLimits(), random.Random(7)  # noqa: S311 - noise, no secret
    alarm = math.log(limits.alarm)

    def delays(mean: float, sigma: float, count: int) -> list[float]:
        found = []
        for _ in range(count):
            log_e, windows = 0.0, 0
            while log_e < alarm and windows < 10_000:
                log_e = evidence(log_e, noise.gauss(mean, sigma), sigma, limits)
                windows += 1
            found.append(float(windows))
        return found

    clean = 100_000 if quick else 1_000_000
    alarms = 0
    for sigma in (0.01, 0.08):
        log_e = 0.0
        for _ in range(clean // 2):
            log_e = evidence(log_e, noise.gauss(limits.null_ratio, sigma), sigma, limits)
            if log_e >= alarm:
                alarms, log_e = alarms + 1, 0.0
    rounds = 100 if quick else 400
    return [
        result("5 % slowdown of training found in", delays(0.05, 0.01, rounds), "s", "<=", 10.0),
        result("10 % slowdown of bursty inference", delays(0.10, 0.08, rounds), "s", "<=", 60.0),
        result(f"false alarms in {clean} clean windows", [float(alarms)], "alarms", "<=", 0.0),
    ]


def traces_for(quick: bool) -> tuple[Trace, ...]:
    """Return the traces, as long as there is time for."""
    if quick:
        # the published law needs more than a minute to settle
        return (*(msgspec.structs.replace(t, lasts_s=300.0) for t in (T1, T3)), T2, T4)
    longer = {t.name: 300.0 for t in TRACES if t not in {T4} and not t.pause_s}
    return tuple(msgspec.structs.replace(t, lasts_s=longer.get(t.name, t.lasts_s)) for t in TRACES)


def measure(quick: bool) -> list[Result]:
    """Return all results."""
    arms = QUICK_ARMS if quick else tuple(ARMS)
    seeds = SEEDS[:1] if quick else SEEDS
    return [*promises(cells(traces_for(quick), arms, seeds)), *detection(quick)]


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(markdown(cells(traces_for(False), tuple(ARMS), SEEDS)))
        sys.exit(0)
    sys.exit(main("rate_control", measure))
