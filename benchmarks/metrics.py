"""What a scrape costs: a page of 8 devices x 8 partitions, 2,560 series and more.

The page is made of the collectors that the daemon has, over values that are already in memory. The
same series through `prometheus_client`, as a plain exporter would render them, stand beside it.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from alloy_agent.model import (
    Device,
    DeviceId,
    Partition,
    PartitionId,
    Placement,
    Quality,
    Scheme,
    Scope,
    Signal,
    SignalSpec,
    Snapshot,
    Vendor,
)

if TYPE_CHECKING:
    from alloy_agent.telemetry.metrics import MetricsPage
    from benchmarks.report import Result

DEVICES: Final = 8
PARTITIONS: Final = 8
SERIES: Final = 2560
RENDER_MS: Final = 2.0
STORM_MS: Final = 2.0
PIECE_SIGNALS: Final = (
    "compute_active_ratio", "memory_used_bytes", "memory_bandwidth_active_ratio",
    "memory_limit_bytes", "link_active_ratio", "throttle_bits", "rate_ratio",
    "cpu_seconds_total",
)  # fmt: skip
DEVICE_SIGNALS: Final = (
    "power_watts", "energy_joules_total", "temperature_headroom_celsius", "memory_used_bytes",
)  # fmt: skip


def snapshot() -> Snapshot:
    """Return a node of 8 devices and 64 partitions."""
    devices = tuple(
        Device(
            id=DeviceId(f"GPU-{n:08x}-0000-4000-8000-{n:012x}"),
            vendor=Vendor.NVIDIA,
            model="H100-SXM5-80GB",
            backend="stub",
            scheme=Scheme.INSTANCES,
            slices=8,
            slice_name="memory slice",
            index=n,
            memory_bytes=80 << 30,
        )
        for n in range(DEVICES)
    )
    pieces = tuple(
        Partition(
            id=PartitionId(f"{device.id}/1g.10gb@{start}"),
            device=device.id,
            profile="1g.10gb",
            placement=Placement(start=start, size=1),
            incarnation="i",
            generation=1,
            memory_bytes=10 << 30,
        )
        for device in devices
        for start in range(PARTITIONS)
    )
    return Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=1.0,
        taken_wall_s=1.0,
        devices=devices,
        partitions=pieces,
    )


def signals(node: Snapshot, now_s: float) -> tuple[Signal, ...]:
    """Return one value of every signal."""
    rows = [
        (f"alloy_device_{name}", device.id, Scope.DEVICE)
        for device in node.devices
        for name in DEVICE_SIGNALS
    ]
    rows += [
        (f"alloy_partition_{name}", piece.id, Scope.PARTITION)  # type: ignore[misc]
        for piece in node.partitions
        for name in PIECE_SIGNALS
    ]
    return tuple(
        Signal(
            spec=SignalSpec(
                name=name,
                subject=subject,
                scope=scope,
                unit="",
                counter=name.endswith("_total"),
                refresh_period_s=0.1,
            ),
            quality=Quality.VALUE,
            value=(number * 37 % 1000) / 1000,
            read_time_s=now_s - 0.05,
        )
        for number, (name, subject, scope) in enumerate(rows)
    )


def page() -> MetricsPage:
    """Return the page of a node with everything on it."""
    from alloy_agent.telemetry import gates, metrics
    from alloy_agent.telemetry.health import DeviceHealth

    node, now_s = snapshot(), 2.0
    values = signals(node, now_s)
    generations = {str(piece.id): piece.generation for piece in node.partitions}
    names = ("health", "drain", "topology", "freshness")
    opinion = gates.Opinion(state=gates.GateState.OPEN)
    table = {
        str(subject): gates.judge({}, dict.fromkeys(names, opinion), 0.0)
        for subject in (*(d.id for d in node.devices), *(p.id for p in node.partitions))
    }
    health = {str(d.id): DeviceHealth(device=d.id, counts={"xid:31": 3}) for d in node.devices}
    made = metrics.MetricsPage()
    made.add("node", lambda: metrics.snapshot_families(node, now_s))
    made.add("signals", lambda: metrics.signal_families(values, now_s, generations))
    made.add("gates", lambda: metrics.gate_families(table))
    made.add("health", lambda: metrics.health_families(health, "1", 0, now_s))
    return made


def _plain_ms(rounds: int) -> list[float]:
    """Return the milliseconds for as many series through prometheus_client, set and rendered."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    gauges = [
        Gauge(f"plain_{n}", "One.", ("gpu", "uuid", "profile"), registry=registry)
        for n in range(SERIES // (DEVICES * PARTITIONS))
    ]
    out = []
    for _ in range(rounds):
        begun_s = time.thread_time()
        for gauge in gauges:
            for device in range(DEVICES):
                for piece in range(PARTITIONS):
                    gauge.labels(str(device), f"GPU-{device:032x}", f"1g.10gb@{piece}").set(0.5)
        generate_latest(registry)
        out.append((time.thread_time() - begun_s) * 1e3)
    return out


def _storm(made: MetricsPage, scrapers: int, seconds: float) -> list[float]:
    """Return the milliseconds of CPU per page while many threads ask for it without a pause."""
    from alloy_agent.telemetry.metrics import REUSE_S

    made._reuse_s = REUSE_S  # noqa: SLF001 - as the daemon builds it
    stop = threading.Event()
    asked = [0] * scrapers

    def ask(number: int) -> None:
        while not stop.is_set():
            made.render()
            asked[number] += 1
            time.sleep(0.001)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(scrapers)]
    begun_s = time.process_time()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return [(time.process_time() - begun_s) * 1e3 / max(1, sum(asked))]


def measure(quick: bool) -> list[Result]:
    """Return the figures of a scrape."""
    from benchmarks.report import quantile, result

    made = page()
    body = made.render()
    series = sum(1 for line in body.decode().splitlines() if not line.startswith("#"))
    rounds = 60 if quick else 400
    times = []
    for _ in range(rounds):
        begun_s = time.thread_time()  # what it costs; others on the machine are not ours
        made.render()
        times.append((time.thread_time() - begun_s) * 1e3)
    plain = _plain_ms(5 if quick else 20)
    scale = SERIES / series
    scaled = [time_ms * scale for time_ms in times]
    ratio = quantile(plain, 0.5) / quantile(scaled, 0.5)
    note = f"{series} series, {len(body)} bytes, whole page {quantile(times, 0.5):.2f} ms"
    rows = [
        result("series on the page", [float(series)], "series", ">=", float(SERIES)),
        result(f"page of {SERIES} series", scaled, "ms", "<=", RENDER_MS, note=note),
        result(
            "times faster than prometheus_client's own set and render",
            [ratio],
            "times",
            ">=",
            3.0,
            note=f"prometheus_client {quantile(plain, 0.5):.1f} ms for {SERIES} series",
        ),
    ]
    storm = _storm(made, 20, 2.0 if quick else 5.0)
    rows.append(result("CPU per answer, 20 scrapers without pause", storm, "ms", "<=", STORM_MS))
    return rows


if __name__ == "__main__":
    from benchmarks.report import main

    sys.exit(main("metrics", measure))
