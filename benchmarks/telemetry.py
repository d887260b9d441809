"""What telemetry costs and how fresh it is: 8 devices x 8 partitions, from library to brain.

A worker over a stub library whose calls cross into C (`benchmarks.sampler`), the daemon's judging
of its samples once a second, one scrape every 15 s, and the daemon's own stream to a real brain in
a process of its own. A sample's time is that from the last device's frame to the brain's reading of
it; an event's begins in the library. Beside it what a user would install instead, over the same
calls (`benchmarks.exporters`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from alloy_agent.model import (
    Device,
    DeviceEvent,
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
from benchmarks.sampler import DEVICES, LATE_BUSY_MS, PARTITIONS, StubLibrary, cpu_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from alloy_agent.backends.base import SignalSink
    from alloy_agent.daemon.pushing import PushLoop
    from alloy_agent.daemon.telemetry import Telemetry
    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.uplink.client import Uplink
    from alloy_agent.worker import Worker
    from benchmarks.report import Result

CPU_PROMISES: Final = {10: 1.0, 50: 2.0, 100: 3.0}
SCRAPE_S: Final = 15.0
BRAIN_IDLE_MS: Final = 3.0
BRAIN_BUSY_MS: Final = 20.0
PUSH_HZ: Final = 10.0  # for freshness
DEFAULT_PUSH_HZ: Final = 1.0  # brain.rate_hz, for cost
COOL_C: Final = 40.0
EVENTS_EVERY_S: Final = 0.1
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

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Sample as the stub does; no device is hot."""
        super().sample(device, sink)
        sink.put(PARTITIONS * len(PIECE_SIGNALS), COOL_C)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return one fault of a code that did not come before, so that each is told at once."""
        self._events = getattr(self, "_events", 0) + 1
        return tuple(
            msgspec.structs.replace(event, code=f"bench:{self._events}")
            for event in super().wait_events(timeout_s)
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
    """A whole agent over one worker, as the daemon joins it: judging, page, stream to a brain.

    What is not in it: the observer, the auditor and the local socket, which do not depend on the
    sampling rate.
    """

    def __init__(self, rate_hz: float, address: str, folder: str, **options: Any) -> None:
        from alloy_agent.backends import BackendSpec
        from alloy_agent.daemon.feed import Feed
        from alloy_agent.daemon.loops import Loop
        from alloy_agent.daemon.telemetry import Hooks, Telemetry
        from alloy_agent.daemon.telemetry.samples import Samples
        from alloy_agent.store import Store
        from alloy_agent.worker import Worker, WorkerSettings

        self.sent: dict[str, float] = {}  # samples by number: when the newest frame was written
        self.happened: dict[str, float] = {}  # events by code
        self.feed = Feed(lambda: ())
        self.worker: Worker = Worker(
            BackendSpec(name="stub", options=options),
            WorkerSettings(rate_hz=rate_hz, cpu_share_max=1.0),
            factory=f"{Path(__file__).resolve()}:open_library",
            on_event=self._hear,
        )
        hooks = Hooks(
            health=self.feed.health_changed,
            gates=lambda: None,
            usage=lambda _row: None,
            drains=lambda *_: None,
        )
        self.telemetry: Telemetry = Telemetry((self.worker,), hooks)
        self.worker.start()
        self.worker.discover()
        self._samples = Samples(self.telemetry)
        self.feed.judge_by(self._sample, self.telemetry.draining)
        self.feed.saw(node(time.clock_gettime(time.CLOCK_BOOTTIME)))
        self._snapshot = node(time.clock_gettime(time.CLOCK_BOOTTIME))
        self._page = self._make_page()
        self._store = Store.open(Path(folder) / f"agent-{rate_hz:g}-{len(options)}")
        self._uplink = self._new_uplink(address)
        self._push = self._new_push(DEFAULT_PUSH_HZ)
        self._scrape_s = time.monotonic() + SCRAPE_S / 2
        self._judging = Loop("judge", 1.0, self._judge, lambda _defect: None)

    def _new_uplink(self, address: str) -> Uplink:
        from alloy_agent.config import BrainSettings
        from alloy_agent.uplink.client import Uplink
        from alloy_agent.uplink.outbox import Outbox
        from benchmarks import brain_fleet

        outbox = Outbox(self._store, "node-00000", "boot-0", 100_000)
        settings = BrainSettings(address=address, rate_hz=100.0, reconnect_min_s=0.05)
        uplink = Uplink(
            settings,
            outbox,
            lambda: brain_fleet.hello(0),
            self.feed.state,
            lambda _command, _emit: None,
        )
        self.feed.forward(outbox.add, uplink.offer)
        return uplink

    def _new_push(self, push_hz: float) -> PushLoop:
        from alloy_agent.daemon.pushing import PushLoop

        return PushLoop((self.worker,), 1.0 / push_hz, self._offer, lambda _defect: None)

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
        """Begin, and wait for the brain."""
        self._uplink.start()
        while not self._uplink.state().connected:
            time.sleep(0.01)
        self._judging.start()
        self._push.start()

    def push_at(self, push_hz: float) -> None:
        """Send so many samples a second from now on."""
        self._push.stop()
        self._push.join(5)
        self._push = self._new_push(push_hz)
        self._push.start()

    def stop(self) -> None:
        """End."""
        for loop in (self._push, self._judging):
            loop.stop()
            loop.join(5)
        self._uplink.stop()
        self.worker.stop()
        self._store.close()

    def _hear(self, event: DeviceEvent) -> None:
        self.happened[event.code] = event.time_s
        self.telemetry.event(event)

    def _judge(self) -> None:
        seen_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._snapshot = msgspec.structs.replace(self._snapshot, taken_at_s=seen_s)
        self.telemetry.tick(self._snapshot, {})
        if time.monotonic() >= self._scrape_s:
            self._scrape_s += SCRAPE_S
            self._page.render()

    def _offer(self) -> None:
        message = self.feed.sample()
        if message is not None:
            self._uplink.offer(message)

    def _sample(self, snapshot: Snapshot, revision: int, number: int) -> pb.Fast:
        page = self.worker.page(DeviceId(f"stub{DEVICES - 1}"))  # the last one of a tick
        block = None if page is None else page.newest()
        if block is not None:
            self.sent[str(number)] = block.newest().written_at_s
        return self._samples.message(snapshot, revision, number)


class Brain:
    """A real brain in a process of its own, which notes when what arrived."""

    def __init__(self, folder: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.uplink", "--brain", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = str(self._line()["address"])

    def _line(self) -> dict[str, Any]:
        line = self._child.stdout.readline() if self._child.stdout is not None else ""
        if not line:
            raise RuntimeError("the brain ended")
        told: dict[str, Any] = json.loads(line)
        return told

    def heard(self) -> dict[str, dict[str, float]]:
        """Return when each sample and event arrived; ends the brain."""
        if self._child.stdin is not None:
            self._child.stdin.write("tell\n")
            self._child.stdin.flush()
        told = self._line()
        self._child.wait(10)
        return told


SPIN: Final = """import os
os.setpriority(os.PRIO_PROCESS, 0, 0)  # whoever starts it goes first, as the daemon does
while True: pass
"""


class Phase(NamedTuple):
    """What one while of an agent cost, and which samples and events are of it."""

    worker: float  # percent of a core
    control: float
    samples: dict[str, float]
    events: dict[str, float]


def _measured(agent: Agent, seconds: float) -> Phase:
    """Return CPU of worker and control, and what was sent, over a while."""
    pid = agent.worker.state().pid
    if pid is None:
        raise RuntimeError(agent.worker.state().reason)
    time.sleep(min(1.5, seconds / 2))
    samples, events = set(agent.sent), set(agent.happened)
    worker_s, own_s, begun_s = cpu_s(pid), time.process_time(), time.monotonic()
    time.sleep(seconds)
    wall_s = time.monotonic() - begun_s
    own = (time.process_time() - own_s) / wall_s * 100
    worker = (cpu_s(pid) - worker_s) / wall_s * 100
    return Phase(
        worker,
        own,
        {key: at for key, at in tuple(agent.sent.items()) if key not in samples},
        {key: at for key, at in tuple(agent.happened.items()) if key not in events},
    )


def _delays_ms(sent: dict[str, float], heard: dict[str, float]) -> list[float]:
    """Return how long what was sent took; a newer sample may replace one on its way."""
    found = [(heard[key] - at_s) * 1e3 for key, at_s in sent.items() if key in heard]
    if len(found) < 0.9 * len(sent):
        raise RuntimeError(f"{len(found)} of {len(sent)} arrived")
    return found


def _delay_row(what: str, found: list[float], promise: float, note: str = "") -> Result:
    from benchmarks.report import quantile, result

    note = f"median {quantile(found, 0.5):.2f} ms{note}"
    return result(what, found, "ms", "<=", promise, figure=quantile(found, 0.99), note=note)


def _late_row(what: str, counts: tuple[int, ...], promise: float) -> Result:
    from alloy_agent.worker.board import quantile_s
    from benchmarks.report import result

    late_ms = (quantile_s(counts, 0.99) or 0.0) * 1e3
    return result(what, [late_ms], "ms", "<=", promise, note=f"{sum(counts)} ticks")


@contextmanager
def _every_core_busy() -> Iterator[None]:
    """Keep a process that never sleeps on every core."""
    cores = len(os.sched_getaffinity(0))
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(cores)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _since(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def _at_rate(rate_hz: int, promise: float, seconds: float) -> tuple[list[Result], Phase]:
    """Return the figures at one sampling rate, and what sampling alone cost."""
    from benchmarks.report import result

    with tempfile.TemporaryDirectory() as folder:
        brain = Brain(folder)
        agent = Agent(float(rate_hz), brain.address, folder)
        agent.start()
        usual = _measured(agent, seconds)
        agent.push_at(PUSH_HZ)
        idle = _measured(agent, seconds)
        busy = None
        if rate_hz == 100:
            before = agent.worker.lateness()
            with _every_core_busy():
                busy = _measured(agent, seconds)
            late = _since(before, agent.worker.lateness())
        agent.stop()
        heard = brain.heard()["samples"]
    note = (
        f"worker {usual.worker:.2f} %, control {usual.control:.2f} %"
        f" ({DEFAULT_PUSH_HZ:g} sample to the brain a second)"
    )
    whole = usual.worker + usual.control
    what = f"CPU of a core at {rate_hz} Hz, brain connected"
    rows = [result(what, [whole], "%", "<=", promise, note=note)]
    delays = _delays_ms(idle.samples, heard)
    rows.append(_delay_row(f"sample to brain p99 at {rate_hz} Hz", delays, BRAIN_IDLE_MS))
    if busy is not None:
        what = "sample to brain p99 at 100 Hz, every core busy"
        rows.append(_delay_row(what, _delays_ms(busy.samples, heard), BRAIN_BUSY_MS))
        rows.append(_late_row("lateness p99 at 100 Hz, every core busy", late, LATE_BUSY_MS))
    return rows, usual


def _events(seconds: float) -> list[Result]:
    """Return how long an event takes from the library to the brain: folded, kept on disk, sent."""
    with tempfile.TemporaryDirectory() as folder:
        brain = Brain(folder)
        agent = Agent(10.0, brain.address, folder, events_every_s=EVENTS_EVERY_S)
        agent.start()
        idle = _measured(agent, seconds)
        with _every_core_busy():
            busy = _measured(agent, seconds)
        time.sleep(1.0)
        agent.stop()
        heard = brain.heard()["events"]
    what = "event to brain p99"
    return [
        _delay_row(what, _delays_ms(idle.events, heard), BRAIN_IDLE_MS),
        _delay_row(f"{what}, every core busy", _delays_ms(busy.events, heard), BRAIN_BUSY_MS),
    ]


def measure(quick: bool) -> list[Result]:
    """Return the figures of telemetry."""
    from alloy_agent.host import priority

    priority.take_turns()  # as the daemon does
    priority.go_first()
    seconds = 2.0 if quick else 20.0
    rows: list[Result] = []
    usual: Phase | None = None
    for rate_hz, promise in CPU_PROMISES.items():
        found, phase = _at_rate(rate_hz, promise, seconds)
        rows += found
        usual = usual or phase
    rows += _events(seconds)
    if usual is not None:
        from benchmarks.exporters import beside

        per_sample_ms = (usual.worker + usual.control) / 100 / 10 * 1e3
        rows += beside(per_sample_ms, 1e3 / PUSH_HZ / 2 + BRAIN_IDLE_MS, quick)
    return rows


if __name__ == "__main__":
    from benchmarks.report import main

    sys.exit(main("telemetry", measure))
