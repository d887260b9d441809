"""The same promise by the wall clock: real processes, the real gate, an emulated device.

Phases without and with the neighbour alternate in one run, so that whatever else the host does
falls on both alike; every figure is a ratio of neighbouring phases. Production is T1: 20 kernels of
1 ms, then 5 ms of its own work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.device import SharedDevice
from alloy_agent.conformance.gate.pages import StatePage
from benchmarks.rate_cost import DIES_WITH_US, NEIGHBOUR, PRODUCTION
from benchmarks.report import Result, main, result

PHASE_S: Final = 3.0
BETWEEN_S: Final = 0.3  # what was queued before drains
HOST_NOISE: Final = 0.015  # Source: docs/rate-control.md, "Targets"


class Bench:
    """One emulated device with a production tenant and a neighbour."""

    def __init__(self, folder: Path) -> None:
        device = folder / "device"
        module = "alloy_agent.silicon.accelerator.server"
        self.shared = SharedDevice("emulated", folder / "share")
        ours, theirs = self.shared.add("p", "production"), self.shared.add("n", "opportunistic")
        self.ours, self.theirs = (
            StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)
        )
        paths = {
            "ALLOY_EMU_LIBRARY": str(library(folder, emulated=True)),
            "ALLOY_EMU_SOCKET": str(device),
            "LD_PRELOAD": str(library(folder)),
        }
        self.started = [_start([sys.executable, "-m", module, str(device)], {})]
        if self.started[0].stdout is not None:
            self.started[0].stdout.readline()
        for program, mine in ((PRODUCTION, ours), (NEIGHBOUR, theirs)):
            self.started.append(_start([sys.executable, "-c", program], {**mine, **paths}))

    def phase(self, held: str) -> tuple[float, float]:
        """Return production's bursts, and the neighbour's device time, for each second."""
        self.shared.held = held
        time.sleep(BETWEEN_S)
        begun_s, bursts, lent_s = time.monotonic(), _bursts(self.ours), _device_s(self.theirs)
        time.sleep(PHASE_S)
        took_s = time.monotonic() - begun_s
        return (
            (_bursts(self.ours) - bursts) / took_s,
            (_device_s(self.theirs) - lent_s) / took_s,
        )

    def end(self) -> None:
        """End everything that was started."""
        for process in self.started:
            process.kill()
            process.communicate()


def _bursts(page: StatePage) -> int:
    return sum(slot.bursts for slot in page.slots() or ())


def _device_s(page: StatePage) -> float:
    return sum(slot.device_s for slot in page.slots() or ())


def _start(argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*DIES_WITH_US, *argv], env={**os.environ, **environment}, stdout=subprocess.PIPE
    )


def measure(quick: bool) -> list[Result]:
    """Return all results."""
    kept, lent = [], []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        stop = threading.Event()
        loop = threading.Thread(target=bench.shared.run, args=(stop,))
        loop.start()
        time.sleep(3.0)  # until the controller has learned and opened
        before, _ = bench.phase("for comparison")
        for _ in range(3 if quick else 20):
            beside, given = bench.phase("")
            after, _ = bench.phase("for comparison")
            alone = (before + after) / 2.0
            kept.append(beside / alone)
            lent.append(given / max(1e-3, 1.0 - 0.02 * alone))  # a burst is 20 ms of the device
            before = after
        status = bench.shared.status()
        stop.set()
        loop.join()
        bench.end()
    loss = "unknown" if status.loss_ratio is None else f"{100 * status.loss_ratio:.2f} %"
    note = f"controller's own loss {loss}, {status.overruns} of {status.ticks} ticks late"
    return [
        result("production beside a neighbour", kept, "ratio", ">=", 0.98 - HOST_NOISE, note=note),
        result("lent, of the leftover", lent, "ratio", ">=", 0.85 - HOST_NOISE),
    ]


if __name__ == "__main__":
    sys.exit(main("rate_wall", measure))
