"""What the command line costs: a whole audit from the shell, its import, and the daemon's memory.

    python -m benchmarks.audit_cli [--quick]

Everything is measured from outside, as a shell sees it: processes are started anew each time, with
byte code cached as an installed package has it. The node is eight simulated GPUs, cut into four
partitions each. Memory is the proportional set size that the kernel reports for a daemon and its
workers after they have served.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Result, main, result

ROOT = Path(__file__).resolve().parents[1]
FAKE = "8xH100-SXM5-80GB"
LAYOUT = ROOT / "examples" / "h100.yaml"
IMPORT_S, AUDIT_S, STOP_S = 0.150, 0.5, 2.0
CONTROL_MB, WORKER_MB = 48.0, 24.0
DEADLINE_S = 60.0


class Bench:
    """One node in a scratch directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = ("ALLOY_", "PYTHONDONTWRITEBYTECODE")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(ignored)},
            "PYTHONPYCACHEPREFIX": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "ALLOY_METRICS_ADDRESS": "127.0.0.1:0",
            "ALLOY_CPU_CGROUP_ROOT": f"alloy-bench-{os.getpid()}",
        }

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of one command."""
        given = ["--fake", FAKE, "--state-dir", str(self.folder / "state")]
        return [sys.executable, "-m", "alloy_agent", *given, *arguments]

    def timed(self, argv: list[str], codes: tuple[int, ...]) -> float:
        """Return how long a process takes from start to end, in seconds."""
        begun = time.perf_counter()
        done = subprocess.run(
            argv,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_S,
            check=False,
        )
        took = time.perf_counter() - begun
        if done.returncode not in codes:
            raise RuntimeError(f"{argv[3:]} exited {done.returncode}: {done.stderr.decode()}")
        return took


def imports(bench: Bench, runs: int) -> list[float]:
    """Return samples of importing the command line, measured inside of fresh interpreters."""
    code = (
        "import time; t = time.perf_counter(); import alloy_agent.cli; "
        "print(time.perf_counter() - t)"
    )
    samples = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=bench.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        samples.append(float(done.stdout))
    return samples[1:]  # the first one compiles


@contextlib.contextmanager
def daemon(bench: Bench) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Give a ready daemon and the address of its pages."""
    log = bench.folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            bench.command("--log-format", "json", "run"),
            env=bench.environment,
            stdout=stream,
            stderr=stream,
        )
    try:
        until_s = time.monotonic() + DEADLINE_S
        while b'"ready"' not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        found = re.search(r"http://[^/\"]+", log.read_text())
        assert found is not None  # noqa: S101 - logged before it was ready
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process, in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def daemon_figures(bench: Bench, runs: int, settle_s: float) -> list[Result]:
    """Return memory after serving, and how long stopping takes."""
    control: list[float] = []
    workers: list[float] = []
    stops: list[float] = []
    with daemon(bench):
        pass  # the first one compiles
    for _ in range(runs):
        with daemon(bench) as (process, url):
            for _ in range(5):
                with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:  # noqa: S310
                    page.read()
            bench.timed(bench.command("devices", "--json"), (0,))
            time.sleep(settle_s)
            control.append(pss_mb(process.pid))
            workers += [pss_mb(child) for child in children(process.pid)]
            begun = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
            stops.append(time.perf_counter() - begun)
    return [
        result("memory of the control process (PSS)", control, "MB", "<=", CONTROL_MB),
        result("memory of a worker (PSS)", workers, "MB", "<=", WORKER_MB, figure=max(workers)),
        result("SIGTERM to the end of the daemon", stops, "s", "<=", STOP_S, figure=max(stops)),
    ]


def measure(quick: bool) -> list[Result]:
    """Return all figures of the command line and the daemon's size."""
    with tempfile.TemporaryDirectory(prefix="alloy-bench-") as folder:
        bench = Bench(Path(folder))
        apply = bench.command("apply", str(LAYOUT), "--layout", "inference", "--yes")
        bench.timed(apply, (0,))
        audit = bench.command("audit", "--json")
        bench.timed(audit, (0, 1, 3))
        audits = [bench.timed(audit, (0, 1, 3)) for _ in range(9 if quick else 41)]
        found = imports(bench, 9 if quick else 31)
        output = subprocess.run(
            audit, env=bench.environment, capture_output=True, timeout=DEADLINE_S, check=False
        )
        partitions = len(json.loads(output.stdout)["partitions"])
        return [
            result(
                "audit --json of a simulated 8-GPU node, from the shell",
                audits,
                "s",
                "<=",
                AUDIT_S,
                note=f"{partitions} partitions; median",
            ),
            result("import of the command line", found, "s", "<=", IMPORT_S),
            *daemon_figures(bench, 1 if quick else 3, 3.0 if quick else 10.0),
        ]


if __name__ == "__main__":
    sys.exit(main("audit_cli", measure))
