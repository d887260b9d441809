"""What a user would install instead, over the same calls and in the same run.

* A plain exporter: reads everything at each scrape into the gauges of `prometheus_client`, over the
  stub library of `benchmarks.sampler`.
* nvitop's exporter, where it is installed, over the stand-in for NVML of `tests/fakes/nvml`, beside
  the agent's own worker over that same stand-in. The stand-in answers in Python and is most of the
  cost on both sides, so the ratio says how much a reading costs beside its calls.

The age of a value at its reader is half of the time between two scrapes, and what a scrape takes.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import result
from benchmarks.sampler import DEVICES, PARTITIONS

if TYPE_CHECKING:
    from benchmarks.report import Result

SCRAPE_S: Final = 15.0
NODE: Final = "8xH100-SXM5-80GB"
RATE_HZ: Final = 10.0
GAUGES: Final = ("active", "memory", "bandwidth", "rate", "margin", "power", "throttle", "energy")
SCRIPT: Final = (
    "import sys; from benchmarks import exporters; exporters.scrape_nvitop(sys.argv[1:])"
)


class Exporter:
    """A plain exporter: reads all at a scrape, sets gauges, renders."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self._registry = CollectorRegistry()
        self._call = ctypes.CDLL(None).clock_gettime
        self._clock, self._out = ctypes.c_int(7), (ctypes.c_long * 2)()
        labels = ("gpu", "piece")
        self._gauges = [
            Gauge(f"plain_{name}", "One.", labels, registry=self._registry) for name in GAUGES
        ]

    def scrape(self) -> bytes:
        """Return a page, read now."""
        from prometheus_client import generate_latest

        where = ctypes.byref(self._out)
        for device in range(DEVICES):
            for piece in range(PARTITIONS):
                self._call(self._clock, where)
                for gauge in self._gauges[:4]:
                    gauge.labels(str(device), str(piece)).set(self._out[1] * 1e-9)
            for gauge in self._gauges[4:]:
                self._call(self._clock, where)
                gauge.labels(str(device), "").set(self._out[1] * 1e-9)
        return generate_latest(self._registry)


def beside(per_sample_ms: float, age_ms: float, quick: bool) -> list[Result]:
    """Return what others cost and how old their values are, beside the agent.

    Args:
        per_sample_ms: CPU of the whole agent for one sample of 8 x 8.
        age_ms: Mean age of a value at the brain.
        quick: Fewer scrapes.
    """
    plain_ms = _plain_ms(20 if quick else 100)
    note = f"plain exporter {plain_ms:.2f} ms, whole agent {per_sample_ms:.2f} ms"
    what = "CPU of a plain exporter over the agent's, per sample of 8 x 8"
    rows = [result(what, [plain_ms / per_sample_ms], "times", ">=", 1.0, note=note)]
    rows += _nvitop(10 if quick else 100)
    theirs_ms = SCRAPE_S * 1e3 / 2 + plain_ms
    note = f"mean age {age_ms:.1f} ms over the stream, {theirs_ms:.0f} ms at a 15 s scrape"
    what = "age of a value at its reader, an exporter over the agent at 10 Hz"
    rows.append(result(what, [theirs_ms / age_ms], "times", ">=", 100.0, note=note))
    return rows


def _plain_ms(rounds: int) -> float:
    """Return the CPU milliseconds for one sample of everything by the plain exporter."""
    exporter = Exporter()
    exporter.scrape()
    begun_s = time.process_time()
    for _ in range(rounds):
        exporter.scrape()
    return (time.process_time() - begun_s) * 1e3 / rounds


def _nvitop(rounds: int) -> list[Result]:
    """Return nvitop's cost of a scrape over the agent's of a sample, where nvitop is installed."""
    if importlib.util.find_spec("nvitop_exporter") is None:
        sys.stderr.write("nvitop-exporter is not installed: its row is left out\n")
        return []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder, str(rounds)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(f"nvitop-exporter does not run here: {done.stderr[-2000:]}\n")
            return []
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = _ours(Path(folder), rounds / RATE_HZ)
    note = (
        f"nvitop {theirs['ms']:.2f} ms for {theirs['series']} series, "
        f"worker {ours['ms']:.2f} ms for {ours['series']} signals; {NODE}, stand-in library"
    )
    what = "CPU of nvitop's exporter over the worker's, per sample of 8 devices"
    return [result(what, [theirs["ms"] / ours["ms"]], "times", ">=", 1.0, note=note)]


def scrape_nvitop(arguments: list[str]) -> None:
    """Print the CPU milliseconds of a scrape by nvitop's exporter over the stand-in library."""
    folder, rounds = Path(arguments[0]), int(arguments[1])
    import pynvml

    from tests.fakes.nvml import open_library

    library = open_library({"specs": [NODE], "state_dir": str(folder)})
    pynvml.nvmlLib = library
    pynvml._LoadNvmlLibrary = lambda: None  # noqa: SLF001 - the stand-in is loaded already
    nvitop = importlib.import_module("nvitop")
    exporters = importlib.import_module("nvitop_exporter")
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    exporter = exporters.PrometheusExporter(nvitop.Device.all(), registry=registry, interval=1.0)

    def scrape() -> bytes:
        exporter.update_host()
        for device in exporter.devices:
            exporter.update_device(device)
        return generate_latest(registry)

    page = scrape()
    begun_s = time.process_time()
    for _ in range(rounds):
        page = scrape()
    spent_ms = (time.process_time() - begun_s) * 1e3 / rounds
    series = sum(1 for line in page.decode().splitlines() if not line.startswith("#"))
    print(json.dumps({"ms": spent_ms, "series": series}))


def _ours(folder: Path, seconds: float) -> dict[str, Any]:
    """Return the CPU milliseconds of one sample by the agent's worker over the same library."""
    from alloy_agent.backends import BackendSpec
    from alloy_agent.worker import Worker, WorkerSettings
    from benchmarks.sampler import cpu_s

    options: dict[str, Any] = {
        "library": "tests.fakes.nvml:open_library",
        "library_options": {"specs": [NODE], "state_dir": str(folder), "root": str(folder)},
        "root": str(folder),
    }
    worker = Worker(
        BackendSpec(name="nvidia", options=options),
        WorkerSettings(rate_hz=RATE_HZ, cpu_share_max=1.0),
    )
    worker.start()
    try:
        worker.discover()
        pid = worker.state().pid
        if pid is None:
            raise RuntimeError(worker.state().reason)
        while not worker.sampler().ticks:
            time.sleep(0.05)
        time.sleep(1.0)
        begun_s, ticks = cpu_s(pid), worker.sampler().ticks
        time.sleep(max(seconds, 2.0))
        spent_s, ticks = cpu_s(pid) - begun_s, worker.sampler().ticks - ticks
        return {"ms": spent_s * 1e3 / max(1, ticks), "series": len(worker.signals())}
    finally:
        worker.stop()
