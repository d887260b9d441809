"""The table of the rate-control evaluation: arms by traces, with each target beside its figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from alloy_agent.silicon.accelerator.workloads import T1, T2, T3, T4, T5, T6, T7, T8, TRACES
from benchmarks.rate_cells import OURS, OURS_5, OURS_T, TGS, Cell, Table, spread
from benchmarks.report import Result, result

UNITS: Final = {"settle_s": "s"}
COLUMNS: Final = {
    "production": "production",
    "worst": "worst windows",
    "p50": "p50",
    "p99": "p99",
    "lent": "lent",
    "leftover": "of leftover",
    "settle_s": "settles",
}


class Target(NamedTuple):
    """One promised figure of a cell."""

    trace: str
    arm: str
    what: str
    sense: Literal["<=", ">="]
    promise: float


def targets() -> Iterator[Target]:
    """Yield what is promised of each trace. Source: docs/rate-control.md, "Targets"."""
    for trace in (T1, T2, T4, *T5, T8):
        yield Target(trace.name, OURS, "production", ">=", 0.98)
        yield Target(trace.name, OURS, "worst", ">=", 0.96)
    yield Target(T6[0].name, OURS, "production", ">=", 0.975)
    yield Target(T6[0].name, OURS, "p99", "<=", 1.20)
    for trace in (T6[1], T7):
        yield Target(trace.name, OURS, "production", ">=", 0.98)
    for trace in (T1, T2, T3, T4, T6[1]):
        yield Target(trace.name, OURS, "p50", "<=", 1.07)
        yield Target(trace.name, OURS, "p99", "<=", 1.10)
    for trace, share in ((T1, 0.85), (T2, 0.5), (T3, 0.5), (T4, 0.6)):
        yield Target(trace.name, OURS, "leftover", ">=", share)
        yield Target(trace.name, OURS_5, "leftover", ">=", 0.85)
    yield Target(T2.name, OURS_T, "leftover", ">=", 0.9)
    for trace in (T1, T2, T3, T4):
        yield Target(trace.name, OURS, "settle_s", "<=", 3.0)


def promises(table: Table) -> list[Result]:
    """Return the figures beside their targets, and those against the published law."""
    rows = [
        result(
            f"{t.trace}, {t.arm}: {t.what}",
            [getattr(cell, t.what) for cell in table[t.trace, t.arm]],
            UNITS.get(t.what, "ratio"),
            t.sense,
            t.promise,
        )
        for t in targets()
        if (t.trace, t.arm) in table
    ]
    for trace, times in ((T1, 2.5), (T3, 10.0)):
        pairs = _beside_tgs(table, trace.name)
        if pairs:
            ratios = [ours.lent / theirs.lent for ours, theirs in pairs]
            rows.append(result(f"{trace.name}: lent, ours over TGS", ratios, "ratio", ">=", times))
    gains = [ours.production - theirs.production for ours, theirs in _beside_tgs(table, T1.name)]
    if gains:
        what = f"{T1.name}: production, ours less TGS"
        rows.append(result(what, gains, "ratio", ">=", 0.0))
    return rows


def _beside_tgs(table: Table, trace: str) -> list[tuple[Cell, Cell]]:
    ours, theirs = table.get((trace, OURS), []), table.get((trace, TGS), [])
    return list(zip(ours, theirs, strict=True)) if theirs else []


def figures(table: Table) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return all medians and ranges by trace, arm and figure."""
    document: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (trace, arm), found in table.items():
        for what in (*COLUMNS, "oracle"):
            middle, low, high = (round(value, 4) for value in spread(found, what))
            entry = {"median": middle, "min": low, "max": high}
            document.setdefault(trace, {}).setdefault(arm, {})[what] = entry
    return document


def markdown(table: Table) -> str:
    """Return the table for people: one part for each trace."""
    wanted = {(t.trace, t.arm, t.what): t for t in targets()}
    lines = ["| trace | arm | " + " | ".join(COLUMNS.values()) + " |", "|" + " --- |" * 9]
    order = {trace.name: n for n, trace in enumerate(TRACES)}
    for (trace, arm), found in sorted(table.items(), key=lambda item: order[item[0][0]]):
        parts = [_shown(found, what, wanted.get((trace, arm, what))) for what in COLUMNS]
        lines.append(f"| {trace} | {arm} | " + " | ".join(parts) + " |")
        if arm == next(reversed([a for t, a in table if t == trace])):
            lines.append(f"| {trace} | oracle | 100 % | | | | | {_range(found, 'oracle')} | |")
    return "\n".join(lines)


def _shown(found: Sequence[Cell], what: str, target: Target | None) -> str:
    text = _range(found, what)
    if target is None:
        return text
    middle = spread(found, what)[0]
    kept = middle <= target.promise if target.sense == "<=" else middle >= target.promise
    sign = "≤" if target.sense == "<=" else "≥"
    text = f"{text}, target {sign} {_number(target.promise, what)}"
    return text if kept else f"**missed:** {text}"


def _range(found: Sequence[Cell], what: str) -> str:
    middle, low, high = (_number(value, what) for value in spread(found, what))
    return middle if low == high else f"{middle} ({low} to {high})"


def _number(value: float, what: str) -> str:
    if what in {"p50", "p99"}:
        return f"{value:.2f}"
    return f"{value:.1f} s" if what == "settle_s" else f"{100 * value:.1f} %"
