"""The one JSON document that every benchmark prints, and its exit code.

A benchmark module is a function that returns results, handed to `main`:

    def measure(quick: bool) -> list[Result]: ...

    if __name__ == "__main__":
        sys.exit(main("planner", measure))
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

SCHEMA: Final = "alloy.benchmark/v1"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure beside its promise. `range` is the smallest and largest sample, None for one."""

    what: str
    figure: float
    unit: str
    sense: Literal["<=", ">="]
    promise: float
    samples: int
    range: tuple[float, float] | None = None
    note: str = ""

    @property
    def kept(self) -> bool:
        """Whether the figure keeps the promise; a figure that is no number does not."""
        return self.figure <= self.promise if self.sense == "<=" else self.figure >= self.promise


def result(  # noqa: PLR0913 - a row has as many columns
    what: str,
    samples: Sequence[float],
    unit: str,
    sense: Literal["<=", ">="],
    promise: float,
    *,
    figure: float | None = None,
    note: str = "",
) -> Result:
    """Return the result of samples: their median, unless a figure is given."""
    if not samples:
        raise ValueError(f"{what}: no samples")
    middle = quantile(samples, 0.5)
    return Result(
        what=what,
        figure=middle if figure is None else figure,
        unit=unit,
        sense=sense,
        promise=promise,
        samples=len(samples),
        range=(min(samples), max(samples)),
        note=note,
    )


def quantile(samples: Sequence[float], ratio: float) -> float:
    """Return the smallest sample that at least `ratio` (0 to 1) of all samples do not exceed."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * ratio // 1)  # ceiling
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory, kernel, Python, load."""
    model = platform.processor() or platform.machine()
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def document(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return the document of a benchmark."""
    return {
        "schema": SCHEMA,
        "benchmark": name,
        "machine": machine(),
        "results": [_row(item) for item in results],
    }


def _row(item: Result) -> dict[str, Any]:
    row: dict[str, Any] = {
        "what": item.what,
        "figure": _rounded(item.figure),
        "unit": item.unit,
        "sense": item.sense,
        "promise": item.promise,
        "kept": item.kept,
        "samples": item.samples,
        "range": [_rounded(edge) for edge in item.range] if item.range is not None else None,
    }
    if item.note:
        row["note"] = item.note
    return row


def _rounded(value: float) -> float:
    """Return a value with four significant digits, without losing a whole number."""
    return value if float(value).is_integer() else float(f"{value:.4g}")


def main(
    name: str,
    measure: Callable[[bool], Sequence[Result]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark, print its document; return 0 when every promise is kept, else 1."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=f"Measure {name}."
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, within 45 s")
    options = parser.parse_args(arguments)
    results = measure(options.quick)
    json.dump(document(name, results), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
    return 0 if results and all(item.kept for item in results) else 1
