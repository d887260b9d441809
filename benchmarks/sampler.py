"""What sampling costs and how late it comes: 8 devices x 8 partitions, in one worker process.

The library behind it is a stub whose calls cross into C through ctypes, as a vendor's would: 12
calls for each device and tick (one for each partition, four for the device), 288 signals in all.
Real ioctl times are not in it. CPU is what the kernel charged all threads of the worker, and
beside it this process, which supervises the worker and reads every signal once a second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.model import (
    Capabilities,
    Device,
    DeviceEvent,
    DeviceId,
    Diagnosis,
    Fact,
    Observation,
    Scheme,
    Scope,
    SignalSpec,
    Vendor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alloy_agent.backends.base import SignalSink
    from alloy_agent.model import Step
    from alloy_agent.worker import Worker
    from benchmarks.report import Result

DEVICES: Final = 8
PARTITIONS: Final = 8
PARTITION_SIGNALS: Final = ("compute_active_ratio", "memory_used_bytes", "memory_ratio", "clock_hz")
DEVICE_SIGNALS: Final = ("temperature_celsius", "power_watts", "throttle_seconds", "energy_joules")
CPU_PROMISES: Final = {10: 1.0, 50: 2.0, 100: 3.0}  # percent of a core, for the whole agent
MEMORY_PROMISE_MB: Final = 24.0
LATE_IDLE_MS: Final = 0.4
LATE_BUSY_MS: Final = 1.0
EVENT_MS: Final = 3.0
START_MS: Final = 120.0


class StubLibrary:
    """A backend over a library whose every call is one cheap call into C."""

    name = "stub"

    def __init__(self, options: dict[str, Any]) -> None:
        self._events_every_s = float(options.get("events_every_s", 0.0))
        self._call = ctypes.CDLL(None).clock_gettime
        self._clock = ctypes.c_int(7)
        self._out = (ctypes.c_long * 2)()
        self._where = ctypes.byref(self._out)
        self._values = array("d", [0.0]) * (PARTITIONS * len(PARTITION_SIGNALS) + 4)

    def capabilities(self) -> Capabilities:
        """Return a fixed answer."""
        return Capabilities(backend=self.name, vendors=(Vendor.NVIDIA,))

    def discover(self) -> tuple[DeviceId, ...]:
        """Return eight devices."""
        return tuple(DeviceId(f"stub{n}") for n in range(DEVICES))

    def observe(self, device: DeviceId) -> Observation:
        """Return a device without pieces."""
        return Observation(
            device=Device(
                id=device,
                vendor=Vendor.NVIDIA,
                model="stub",
                backend=self.name,
                scheme=Scheme.INSTANCES,
                slices=PARTITIONS,
                slice_name="slice",
            )
        )

    def apply(self, step: Step) -> None:
        """Change nothing."""

    def quiesce(self, device: DeviceId) -> None:
        """Hold nothing."""

    def resume(self, device: DeviceId) -> None:
        """Hold nothing."""

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return four signals for each of eight partitions, and four of the device."""
        pieces = tuple(
            SignalSpec(
                name=f"alloy_partition_{name}",
                subject=f"{device}/1g@{piece}",
                scope=Scope.PARTITION,
                unit="",
            )
            for piece in range(PARTITIONS)
            for name in PARTITION_SIGNALS
        )
        whole = tuple(
            SignalSpec(name=f"alloy_device_{name}", subject=device, scope=Scope.DEVICE, unit="")
            for name in DEVICE_SIGNALS
        )
        return pieces + whole

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Call into C once for each partition and four times for the device."""
        call, clock, where, out = self._call, self._clock, self._where, self._out
        values = self._values
        for slot in range(0, PARTITIONS * 4, 4):
            call(clock, where)
            value = out[1] * 1e-9
            values[slot] = values[slot + 1] = values[slot + 2] = values[slot + 3] = value
        for slot in range(PARTITIONS * 4, PARTITIONS * 4 + 4):
            call(clock, where)
            values[slot] = out[1] * 1e-9
        sink.put_many(0, values)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Wait, and return one event with the time it happened if any are wanted."""
        if not self._events_every_s:
            time.sleep(timeout_s)
            return ()
        time.sleep(self._events_every_s)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return (DeviceEvent(device=DeviceId("stub0"), kind="fault", time_s=now_s),)

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return nothing."""
        return ()

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return nothing."""
        return ()

    def close(self) -> None:
        """Hold nothing."""


def open_stub(options: dict[str, Any]) -> StubLibrary:
    """Return the stub, for a worker."""
    return StubLibrary(options)


def _worker(rate_hz: float, **options: Any) -> Worker:
    from alloy_agent.backends import BackendSpec
    from alloy_agent.worker import Worker, WorkerSettings

    settings = WorkerSettings(rate_hz=rate_hz, cpu_share_max=1.0)
    on_event = options.pop("on_event", None)
    worker = Worker(
        BackendSpec(name="stub", options=options),
        settings,
        on_event=on_event,
        factory=f"{Path(__file__).resolve()}:open_stub",
    )
    worker.start()
    return worker


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def pss_mb(pid: int) -> float:
    """Return a process's proportional share of memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError("no Pss in smaps_rollup")


class _Run:
    """CPU and lateness of a worker over one while."""

    def __init__(self, worker: Worker, seconds: float) -> None:
        from alloy_agent.worker.board import quantile_s

        pid = worker.state().pid
        if pid is None:
            raise RuntimeError(worker.state().reason)
        before, missed = worker.lateness(), worker.sampler().missed_ticks
        worker_s, own_s, began_s = cpu_s(pid), time.process_time(), time.monotonic()
        while time.monotonic() - began_s < seconds:
            time.sleep(1.0)
            worker.signals()
        wall_s = time.monotonic() - began_s
        self.worker_percent = (cpu_s(pid) - worker_s) / wall_s * 100
        self.own_percent = (time.process_time() - own_s) / wall_s * 100
        counts = tuple(b - a for a, b in zip(before, worker.lateness(), strict=True))
        self.ticks = sum(counts)
        self.missed = worker.sampler().missed_ticks - missed
        self.late_ms = (quantile_s(counts, 0.99) or 0.0) * 1000
        self.policy = worker.sampler().policy


def _spin() -> None:
    while True:
        pass


def _first_answers(count: int) -> list[float]:
    """Return the milliseconds from `start` to the first answer, for several workers in turn."""
    out = []
    for _ in range(count):
        began_s = time.monotonic()
        worker = _worker(10.0)
        worker.discover()
        out.append((time.monotonic() - began_s) * 1000)
        worker.stop()
    return out


def _event_delays(seconds: float) -> list[float]:
    """Return the milliseconds from an event in the library to a listener in this process."""
    delays: list[float] = []

    def hear(event: DeviceEvent) -> None:
        delays.append((time.clock_gettime(time.CLOCK_BOOTTIME) - event.time_s) * 1000)

    worker = _worker(10.0, events_every_s=0.01, on_event=hear)
    worker.discover()
    time.sleep(seconds)
    worker.stop()
    return delays


def measure(quick: bool) -> list[Result]:
    """Return the figures of the sampler."""
    from benchmarks.report import quantile, result

    seconds = 4.0 if quick else 20.0
    starts = _first_answers(5)
    rows = [result("worker start to first answer", starts, "ms", "<=", START_MS)]
    for rate_hz, promise in CPU_PROMISES.items():
        worker = _worker(float(rate_hz))
        worker.discover()
        time.sleep(2.0)
        run = _Run(worker, seconds)
        note = f"worker {run.worker_percent:.2f} %, supervision {run.own_percent:.2f} %"
        total = run.worker_percent + run.own_percent
        rows.append(
            result(f"CPU of a core at {rate_hz} Hz", [total], "%", "<=", promise, note=note)
        )
        note = f"{run.ticks} ticks, {run.missed} missed, {run.policy}"
        rows.append(
            result(
                f"lateness p99 at {rate_hz} Hz", [run.late_ms], "ms", "<=", LATE_IDLE_MS, note=note
            )
        )
        pid = worker.state().pid
        if rate_hz == 100 and pid is not None:
            rows.append(result("worker PSS", [pss_mb(pid)], "MB", "<=", MEMORY_PROMISE_MB))
            rows.append(_busy(worker, seconds))
        worker.stop()
    delays = _event_delays(seconds)
    p99 = quantile(delays, 0.99)
    note = f"median {statistics.median(delays):.2f} ms"
    what = "event to the control process p99"
    rows.append(result(what, delays, "ms", "<=", EVENT_MS, figure=p99, note=note))
    return rows


def _busy(worker: Worker, seconds: float) -> Result:
    """Return the lateness while every core has a process that never sleeps."""
    from benchmarks.report import result

    cores = len(os.sched_getaffinity(0))
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(cores)]
    for spinner in spinners:
        spinner.start()
    try:
        run = _Run(worker, seconds)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()
    note = f"{cores} cores busy, {run.ticks} ticks, {run.missed} missed, {run.policy}"
    what = "lateness p99 at 100 Hz, every core busy"
    return result(what, [run.late_ms], "ms", "<=", LATE_BUSY_MS, note=note)


if __name__ == "__main__":
    from benchmarks.report import main

    sys.exit(main("sampler", measure))
