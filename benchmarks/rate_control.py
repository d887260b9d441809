"""How fast production stays, and how much of the rest is lent: every arm on every trace.

Simulated clock: the figures depend on the seeds alone. `--table` prints the whole table as Markdown
instead of the document; `--save` keeps all figures under `benchmarks/results` as well.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.conformance.sequential import AuditLimits, evidence
from alloy_agent.silicon.accelerator.workloads import T1, T2, T3, T4, T6, T7, T8, TRACES, Trace
from benchmarks.rate_cells import ARMS, GATE, OURS, OURS_5, TGS, Table, cells
from benchmarks.rate_table import figures, markdown, promises
from benchmarks.report import Result, document, main, result

SEEDS: Final = (1, 2, 3, 4, 5)
QUICK_ARMS: Final = (TGS, OURS, OURS_5)
MISFORTUNE_ARMS: Final = ("none", TGS, GATE, OURS)
_MISFORTUNES: Final = frozenset({T7.name, T8.name})
PROCESSES: Final = 2
NOISE_SEED: Final = 7
RESULTS: Final = Path(__file__).with_name("results")


def detection(quick: bool) -> list[Result]:
    """Return how soon slowdowns are found, and false alarms in clean windows."""
    limits, noise = AuditLimits(), random.Random(NOISE_SEED)  # noqa: S311 - noise, no secret
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
    lasts_s = {T1: 300.0, T2: 300.0, T3: 300.0, T6[0]: 180.0, T6[1]: 180.0, T7: 180.0, T8: 300.0}
    return tuple(msgspec.structs.replace(t, lasts_s=lasts_s.get(t, t.lasts_s)) for t in TRACES)


def whole_table() -> Table:
    """Return every arm on every trace; of the misfortunes T7 and T8 those that they tell apart."""
    traces = traces_for(False)
    table = cells([t for t in traces if t.name not in _MISFORTUNES], tuple(ARMS), SEEDS, PROCESSES)
    unlucky = [t for t in traces if t.name in _MISFORTUNES]
    return {**table, **cells(unlucky, MISFORTUNE_ARMS, SEEDS, PROCESSES)}


def measure(quick: bool) -> list[Result]:
    """Return all results."""
    table = cells(traces_for(True), QUICK_ARMS, SEEDS[:1]) if quick else whole_table()
    return [*promises(table), *detection(quick)]


def save(table: Table) -> None:
    """Write the document with all figures."""
    results = [*promises(table), *detection(False)]
    whole = {**document("rate_control", results), "seeds": SEEDS, "table": figures(table)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rate_control.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if {"--table", "--save"} & set(sys.argv):
        begun_s = time.monotonic()
        made = whole_table()
        if "--save" in sys.argv:
            save(made)
        print(markdown(made))
        print(f"{time.monotonic() - begun_s:.0f} s", file=sys.stderr)
        sys.exit(0)
    sys.exit(main("rate_control", measure))
