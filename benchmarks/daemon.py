"""What the daemon itself takes: `alloy-agent run` over simulated GPUs, a brain and a scraper.

Everything runs that runs on a node: observer, auditor, layout, leases, telemetry, metrics, uplink.
The simulated library answers in Python inside the worker, which a vendor's does not, and the
auditor hears of every process that begins or ends on the machine: on a busy one that is a cost of
the machine's, told in the note.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.report import Result, main, result
from benchmarks.sampler import cpu_s, pss_mb

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE: Final = "8xH100-SXM5-80GB"
SLICES: Final = 7
CPU_PERCENT: Final = 1.0
CONTROL_MB: Final = 48.0
WORKER_MB: Final = 24.0
PATIENCE_S: Final = 120.0
LAYOUT: Final = f"""version: v1
layouts:
  all:
    - match: {{vendor: nvidia}}
      mig: [{", ".join(["1g.10gb"] * SLICES)}]
"""
CONFIG: Final = """state_dir: {folder}/state
socket_path: {folder}/agent.sock
fake: ["{node}"]
backends: {{cpu: "off", amd: "off", neuron: "off", nvidia: "off"}}
metrics: {{address: "127.0.0.1:0"}}
layout: {{file: {folder}/layout.yaml, name: all}}
brain: {{address: "unix:{folder}/brain.sock"}}
log: {{format: json}}
"""


class Took(NamedTuple):
    """What one process took over a while."""

    cpu_percent: float
    wakes_per_s: float
    pss_mb: float


def measure(quick: bool) -> list[Result]:
    """Return CPU and memory of the control process and its worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "layout.yaml").write_text(LAYOUT)
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder, node=NODE))
        listen = ["--listen", f"unix:{folder}/brain.sock", "--ledger", f"{folder}/brain.db"]
        brain = _started("alloy_brain", "serve", *listen, log=folder / "brain.log")
        agent = _started(
            "alloy_agent", "--config", str(folder / "config.yaml"), "run", log=folder / "agent.log"
        )
        try:
            return _rows(agent, folder / "agent.log", 8.0 if quick else 60.0)
        finally:
            for process in (agent, brain):
                process.send_signal(signal.SIGTERM)
                process.wait(20)


def _started(module: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ALLOY_")}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _rows(agent: subprocess.Popen[bytes], log: Path, seconds: float) -> list[Result]:
    pages = _until_cut(agent, log)
    time.sleep(5.0)  # audits that follow the change
    worker = _child(agent.pid)
    before = [(cpu_s(pid), _wakes(pid)) for pid in (agent.pid, worker)]
    forked, begun_s = _forked(), time.monotonic()
    time.sleep(seconds / 2)
    with urllib.request.urlopen(pages, timeout=PATIENCE_S) as page:  # noqa: S310 - our own page
        page.read()
    time.sleep(seconds / 2)
    wall_s = time.monotonic() - begun_s
    control, sampler = (
        Took((cpu_s(pid) - spent_s) / wall_s * 100, (_wakes(pid) - wakes) / wall_s, pss_mb(pid))
        for pid, (spent_s, wakes) in zip((agent.pid, worker), before, strict=True)
    )
    note = (
        f"control {control.cpu_percent:.2f} %, {control.wakes_per_s:.0f} wake-ups a second; "
        f"worker {sampler.cpu_percent:.2f} %, {sampler.wakes_per_s:.0f} wake-ups a second; "
        f"{(_forked() - forked) / wall_s:.0f} processes a second began on the machine"
    )
    what = f"CPU of a core, the daemon over 8 simulated devices x {SLICES} at 10 Hz"
    total = control.cpu_percent + sampler.cpu_percent
    return [
        result(what, [total], "%", "<=", CPU_PERCENT, note=note),
        result("memory of the control process (PSS)", [control.pss_mb], "MB", "<=", CONTROL_MB),
        result("memory of the worker (PSS)", [sampler.pss_mb], "MB", "<=", WORKER_MB),
    ]


def _until_cut(agent: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the layout is applied and the brain is there; return where the page is."""
    pages, applied, connected = "", False, False
    until_s = time.monotonic() + PATIENCE_S
    while not (pages and applied and connected):
        if agent.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the daemon did not settle: {log.read_text()[-2000:]}")
        time.sleep(0.1)
        for line in _lines(log):
            event = line.get("event")
            if event == "serving" and line.get("what") == "http":
                pages = next(one for one in line["addresses"] if one.endswith("/metrics"))
            applied |= event == "run_ended" and line.get("status") == "applied"
            connected |= event == "brain_connected"
    return pages


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    for text in log.read_text().splitlines():
        if text.startswith("{") and text.endswith("}"):
            yield json.loads(text)


def _wakes(pid: int) -> int:
    """Return how often threads of a process have waited for something so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def _child(pid: int) -> int:
    """Return the process that a thread of this one has started: its worker."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            return int(child)
    raise RuntimeError("the daemon has no worker")


def _forked() -> int:
    """Return how many processes have begun on the machine since it was started."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("processes "):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main("daemon", measure))
