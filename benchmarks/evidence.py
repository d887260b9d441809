"""How fast an evidence chain verifies, and what writing it costs.

Writes a real chain (several files, a signed head every 256 records, the fields filled as the
auditor fills them) and verifies it from its files with the public key.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from alloy_agent.conformance.evidence import Entry, EvidenceLog, verify
from alloy_agent.conformance.evidence.keys import PUBLIC_FILE

PROMISED_RECORDS_PER_S = 50_000.0  # design: evidence verification
BATCH = 500


def main() -> int:
    """Print the figures; 0 if the promise is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer records and repetitions")
    quick = parser.parse_args().quick
    records, repetitions = (50_000, 5) if quick else (400_000, 7)
    with tempfile.TemporaryDirectory(prefix="alloy-evidence-") as name:
        state = Path(name)
        written = _write(state, records)
        verified = _verify(state, repetitions)
    results = [
        _result("evidence records verified", verified, PROMISED_RECORDS_PER_S),
        _result("evidence records written, durable, 500 a batch", [written], None),
    ]
    document = {
        "schema": "alloy.benchmark/v1",
        "benchmark": "evidence",
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "results": results,
    }
    print(json.dumps(document, indent=2))
    return 0 if all(result["kept"] for result in results) else 1


def _write(state: Path, records: int) -> float:
    """Return records written per second."""
    batch = [
        Entry(
            kind="judgement",
            subject=f"cpu:numa0/4c@{4 * (number % 8)}",
            check=f"CPU-0{number % 4 + 1}",
            verdict="pass",
            expected="4-7,68-71",
            observed="4-7,68-71",
            method="/sys/fs/cgroup/cpuset/alloy/4c@4/cpuset.effective_cpus",
            resolution="one CPU, read at 1 Hz",
            tenant=f"tenant-{number % 8}",
            lease=f"lease-{number % 8}",
        )
        for number in range(BATCH)
    ]
    with EvidenceLog.open(
        state, boot_id="0" * 36, agent_version="0", config_digest="0" * 64, rotate_bytes=16 << 20
    ) as log:
        started = time.perf_counter()
        for _ in range(records // BATCH):
            log.append(batch)
        return records / (time.perf_counter() - started)


def _verify(state: Path, repetitions: int) -> list[float]:
    """Return records verified per second, once per repetition."""
    pem = (state / "keys" / PUBLIC_FILE).read_bytes()
    rates = []
    for _ in range(repetitions):
        started = time.perf_counter()
        report = verify(state / "evidence", pem)
        rates.append(report.records / (time.perf_counter() - started))
        if not report.ok or report.signed_up_to != report.last_sequence:
            sys.exit(f"the chain just written does not verify: {report.problems[:3]}")
    return rates


def _result(what: str, rates: list[float], promise: float | None) -> dict[str, object]:
    figure = statistics.median(rates)
    return {
        "what": what,
        "figure": round(figure),
        "unit": "records/s",
        "sense": ">=",
        "promise": promise,
        "kept": promise is None or figure >= promise,
        "samples": len(rates),
        "range": [round(min(rates)), round(max(rates))],
    }


if __name__ == "__main__":
    sys.exit(main())
