"""What telemetry costs and how fresh it is: 8 devices x 8 partitions, from library to brain.

A worker over a stub library whose calls cross into C (`benchmarks.sampler`), the daemon's judging
of its samples once a second, one scrape every 15 s, and a real gRPC stream on loopback that takes
one sample of the node in columns for every push. Beside it, over the same calls, what a plain
exporter does: read everything at each scrape and render it with `prometheus_client`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from alloy_agent.model import (
    Device,
    DeviceId,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    Scope,
    SignalSpec,
    Snapshot,
    Vendor,
)
from benchmarks.sampler import DEVICES, PARTITIONS, StubLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alloy_agent.daemon.telemetry import Telemetry
    from alloy_agent.worker import Worker
    from benchmarks.report import Result

CPU_PROMISES: Final = {10: 1.0, 50: 2.0, 100: 3.0}
SCRAPE_S: Final = 15.0
BRAIN_IDLE_MS: Final = 3.0
BRAIN_BUSY_MS: Final = 20.0
CONTROL_MB: Final = 48.0
PUSH_HZ: Final = 10.0  # for freshness
DEFAULT_PUSH_HZ: Final = 1.0  # brain.rate_hz, for cost
PIECE_SIGNALS: Final = (
    "compute_active_ratio", "memory_used_bytes", "memory_bandwidth_active_ratio", "rate_ratio",
)  # fmt: skip
DEVICE_SIGNALS: Final = (
    "temperature_headroom_celsius", "power_watts", "throttle_seconds_total",
    "energy_joules_total",
)  # fmt: skip


class Library(StubLibrary):
    """The stub with the names that windows, gates and metering look for."""

    def observe(self, device: DeviceId) -> Any:
        """Return a device with its eight pieces."""
        seen = super().observe(device)
        whole = msgspec.structs.replace(seen.device, memory_bytes=80 << 30)
        return msgspec.structs.replace(seen, device=whole, partitions=pieces(device))

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return four signals for each piece, and four of the device."""
        rows = [
            (f"alloy_partition_{name}", str(piece.id), Scope.PARTITION)
            for piece in pieces(device)
            for name in PIECE_SIGNALS
        ]
        rows += [(f"alloy_device_{name}", str(device), Scope.DEVICE) for name in DEVICE_SIGNALS]
        return tuple(
            SignalSpec(
                name=name,
                subject=subject,
                scope=scope,
                unit="",
                counter=name.endswith("_total"),
                refresh_period_s=0.1,
            )
            for name, subject, scope in rows
        )


def open_library(options: dict[str, Any]) -> Library:
    """Return the library, for a worker."""
    return Library(options)


def pieces(device: str) -> tuple[Partition, ...]:
    """Return the eight pieces of a device, half of them with a tenant."""
    return tuple(
        Partition(
            id=PartitionId(f"{device}/1g@{n}"),
            device=DeviceId(device),
            profile="1g",
            placement=Placement(start=n, size=1),
            incarnation="i",
            generation=1,
            memory_bytes=10 << 30,
            tenant=None if n % 2 else f"tenant-{n}",  # type: ignore[arg-type]
        )
        for n in range(PARTITIONS)
    )


def node(now_s: float) -> Snapshot:
    """Return the node as an observer would."""
    devices = tuple(
        Device(
            id=DeviceId(f"stub{n}"),
            vendor=Vendor.NVIDIA,
            model="stub",
            backend="stub",
            scheme=Scheme.INSTANCES,
            slices=PARTITIONS,
            slice_name="slice",
            index=n,
            memory_bytes=80 << 30,
        )
        for n in range(DEVICES)
    )
    return Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=now_s,
        taken_wall_s=time.time(),
        devices=devices,
        partitions=tuple(piece for device in devices for piece in pieces(device.id)),
    )


class Agent:
    """The control side of one worker: judging, page and pushes, as the daemon joins them."""

    def __init__(self, rate_hz: float, address: str) -> None:
        from alloy_agent.backends import BackendSpec
        from alloy_agent.daemon.telemetry import Hooks, Telemetry
        from alloy_agent.worker import Worker, WorkerSettings

        self.worker: Worker = Worker(
            BackendSpec(name="stub", options={}),
            WorkerSettings(rate_hz=rate_hz, cpu_share_max=1.0),
            factory=f"{Path(__file__).resolve()}:open_library",
        )
        self.worker.start()
        self.worker.discover()
        hooks = Hooks(*[lambda *_: None] * 4)
        self.telemetry: Telemetry = Telemetry((self.worker,), hooks)
        self._address = address
        self._stop = threading.Event()
        self.push_hz = DEFAULT_PUSH_HZ
        self._page = self._make_page()
        self._node = node(0.0)
        self._threads = [
            threading.Thread(target=self._judge, daemon=True),
            threading.Thread(target=self._push, daemon=True),
        ]

    def _make_page(self) -> Any:
        from alloy_agent.telemetry import metrics
        from alloy_agent.telemetry.signals import all_sane

        page = metrics.MetricsPage()
        now = time.clock_gettime
        generations = {str(p.id): 1 for p in node(0.0).partitions}
        page.add(
            "signals",
            lambda: metrics.signal_families(
                all_sane(self.worker.signals()), now(time.CLOCK_BOOTTIME), generations
            ),
        )
        for name, collect in self.telemetry.collectors():
            page.add(name, collect)
        return page

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        self.worker.stop()

    def _judge(self) -> None:
        scrape_s = time.monotonic() + SCRAPE_S / 2
        while not self._stop.wait(min(1.0, 40 / max(self.worker.sampler().rate_hz, 1.0))):
            self.telemetry.tick(node(time.clock_gettime(time.CLOCK_BOOTTIME)), {})
            if time.monotonic() >= scrape_s:
                scrape_s += SCRAPE_S
                self._page.render()

    def _push(self) -> None:
        import grpc

        def messages() -> Iterator[bytes]:
            seen, number = -1, 0
            while not self._stop.is_set():
                epoch, specs, frames = self.worker.history(DeviceId("stub0"), max(seen, 0))
                del epoch, specs
                if frames and frames[-1].number > seen:
                    seen, number = frames[-1].number, number + 1
                    yield self._sample(number, frames[-1].written_at_s)
                self._stop.wait(self._until_next())

        with grpc.insecure_channel(self._address) as channel:
            call = channel.stream_unary("/bench.Brain/Take", bytes, bytes)
            call(messages())

    def _until_next(self) -> float:
        """Return the time to right behind the next tick of the sampler's common grid."""
        period_s = max(1.0 / max(self.worker.sampler().rate_hz, 1.0), 1.0 / self.push_hz)
        now_s = time.monotonic()
        return period_s - now_s % period_s + 0.0008

    def _sample(self, number: int, written_s: float) -> bytes:
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.telemetry.signals import all_sane
        from alloy_agent.uplink import codec

        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        seen = self._node
        fast = codec.fast(
            all_sane(self.worker.signals()),
            [p.id for p in seen.partitions],
            [d.id for d in seen.devices],
            self.telemetry.gate_rows(),
            now_s,
            (1, 1),
            number,
        )
        message = pb.AgentMessage(fast=fast, sent_boottime_ms=int(written_s * 1e3))
        return msgspec.msgpack.encode((written_s, message.SerializeToString()))


def brain(port: Any, delays: Any, stop: Any) -> None:
    """Take samples and note how old each is once it is decoded; a process of its own."""
    import grpc

    from alloy_agent.proto import agent_pb2 as pb

    def take(messages: Iterator[bytes], context: Any) -> bytes:
        del context
        for body in messages:
            written_s, raw = msgspec.msgpack.decode(body)
            pb.AgentMessage.FromString(raw)
            delays.put((time.clock_gettime(time.CLOCK_BOOTTIME) - written_s) * 1e3)
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.stream_unary_rpc_method_handler(take)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Brain", {"Take": handler}),)
    )
    port.put(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    stop.wait()
    server.stop(0)


def _cpu_s(pid: int) -> float:
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def _drain(delays: Any) -> list[float]:
    found = []
    while not delays.empty():
        found.append(delays.get())
    return found


def _spin() -> None:
    while True:
        pass


class Exporter:
    """A plain exporter over the same calls: reads all at a scrape, sets gauges, renders."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self._registry = CollectorRegistry()
        self._call = ctypes.CDLL(None).clock_gettime
        self._clock, self._out = ctypes.c_int(7), (ctypes.c_long * 2)()
        labels = ("gpu", "piece")
        self._gauges = [
            Gauge(f"plain_{name}", "One.", labels, registry=self._registry)
            for name in (*PIECE_SIGNALS, *DEVICE_SIGNALS)
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


def _plain_ms(rounds: int) -> float:
    """Return the CPU milliseconds for one sample of everything by the plain exporter."""
    exporter = Exporter()
    exporter.scrape()
    begun_s = time.process_time()
    for _ in range(rounds):
        exporter.scrape()
    return (time.process_time() - begun_s) * 1e3 / rounds


def _measured(agent: Agent, delays: Any, seconds: float) -> tuple[float, float, list[float]]:
    """Return CPU percent of worker and control, and delays to the brain, over a while."""
    pid = agent.worker.state().pid
    if pid is None:
        raise RuntimeError(agent.worker.state().reason)
    time.sleep(1.5)
    _drain(delays)
    worker_s, own_s, begun_s = _cpu_s(pid), time.process_time(), time.monotonic()
    time.sleep(seconds)
    wall_s = time.monotonic() - begun_s
    own = (time.process_time() - own_s) / wall_s * 100
    return (_cpu_s(pid) - worker_s) / wall_s * 100, own, _drain(delays)


def measure(quick: bool) -> list[Result]:
    """Return the figures of telemetry."""
    from benchmarks.report import quantile, result

    seconds = 4.0 if quick else 20.0
    spawn = multiprocessing.get_context("spawn")
    port, delays, stop = spawn.Queue(), spawn.Queue(), spawn.Event()
    server = spawn.Process(target=brain, args=(port, delays, stop), daemon=True)
    server.start()
    address = f"127.0.0.1:{port.get()}"
    rows: list[Result] = []
    per_sample_ms = delay_ms = 0.0
    for rate_hz, promise in CPU_PROMISES.items():
        agent = Agent(float(rate_hz), address)
        agent.start()
        worker, own, _ = _measured(agent, delays, seconds)
        agent.push_hz = PUSH_HZ
        heard = _measured(agent, delays, seconds)[2]
        note = f"worker {worker:.2f} %, control {own:.2f} % ({DEFAULT_PUSH_HZ:g} push a second)"
        what = f"CPU of a core at {rate_hz} Hz, brain connected"
        rows.append(result(what, [worker + own], "%", "<=", promise, note=note))
        p99 = quantile(heard, 0.99)
        what = f"sample to brain p99 at {rate_hz} Hz"
        note = f"median {quantile(heard, 0.5):.2f} ms"
        rows.append(result(what, heard, "ms", "<=", BRAIN_IDLE_MS, figure=p99, note=note))
        if rate_hz == 10:
            delay_ms = quantile(heard, 0.5)
            per_sample_ms = (worker + own) / 100 / rate_hz * 1e3
        if rate_hz == 100:
            rows += _busy(agent, delays, seconds)
        agent.stop()
    stop.set()
    server.join(5)
    plain_ms = _plain_ms(20 if quick else 100)
    note = f"plain exporter {plain_ms:.2f} ms, agent {per_sample_ms:.2f} ms, all in"
    what = "CPU of a plain exporter over the agent's, per sample of 8 x 8"
    rows.append(result(what, [plain_ms / per_sample_ms], "times", ">=", 1.0, note=note))
    ours_ms = 1e3 / PUSH_HZ / 2 + delay_ms
    theirs_ms = SCRAPE_S * 1e3 / 2 + plain_ms
    note = f"mean age {ours_ms:.1f} ms over the stream, {theirs_ms:.0f} ms at a 15 s scrape"
    what = "age of a value at its reader, plain exporter over agent at 10 Hz"
    rows.append(result(what, [theirs_ms / ours_ms], "times", ">=", 100.0, note=note))
    return rows


def _busy(agent: Agent, delays: Any, seconds: float) -> list[Result]:
    """Return the delay to the brain while every core has a process that never sleeps."""
    from benchmarks.report import quantile, result

    cores = len(os.sched_getaffinity(0))
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(cores)]
    for spinner in spinners:
        spinner.start()
    try:
        *_, heard = _measured(agent, delays, seconds)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()
    p99 = quantile(heard, 0.99)
    what = "sample to brain p99 at 100 Hz, every core busy"
    return [result(what, heard, "ms", "<=", BRAIN_BUSY_MS, figure=p99, note=f"{cores} cores busy")]


if __name__ == "__main__":
    from benchmarks.report import main

    sys.exit(main("telemetry", measure))
