"""Fast signals of NUMA nodes and partitions: descriptors stay open, a sample is one `pread` each.

Ratios are differences of the kernel's counters between two samples; the first sample after a change
of columns, which has nothing to compare with, is absent (`STALE`). A sensor that the host does
not have is `NOT_SUPPORTED` for good, as is a cap that is not set; a cgroup that has gone `STALE`.

Source: proc_stat(5); cgroup-v2.rst (`cpu.stat`, PSI files); v1 `cpuacct.usage` (ns); powercap and
hwmon ABI documents of Linux 6.18.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.cpu.topology import Node
from alloy_agent.host.cgroups import CgroupTopology
from alloy_agent.host.cpulist import parse_cpu_list
from alloy_agent.host.processes import read_bytes
from alloy_agent.model import DeviceId, Partition, Quality, Scope, SignalSpec

READ_BYTES = 262_144  # /proc/stat of a host with 2,000 CPUs
SPAN_MIN_S = 0.001  # below this a difference of counters says nothing
SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})

Parse = Callable[[bytes], float]


class Column(NamedTuple):
    """One column: where it is read and how its bytes become a number.

    `rate` is what one second of the counter's growth is divided by: the number of CPUs for a busy
    ratio. 0: the number itself is the value. `wrap`: the counter wraps at that many units.
    """

    spec: SignalSpec
    path: str | None
    parse: Parse
    rate: float = 0.0
    wrap: float = 0.0


class _Cell:
    """What one column has open and what it read last."""

    __slots__ = ("before", "before_s", "column", "fd", "last", "missing", "total")

    def __init__(self, column: Column) -> None:
        self.column = column
        self.fd = -1
        self.missing = column.path is None
        self.before = math.nan
        self.before_s = 0.0
        self.last = math.nan
        self.total = 0.0


class SignalReader:
    """Columns and open descriptors of every device."""

    def __init__(self, proc_root: str, sys_root: str) -> None:
        self._proc, self._sys = proc_root, sys_root
        self._cells: dict[DeviceId, tuple[_Cell, ...]] = {}
        self._values: dict[DeviceId, array[float]] = {}

    def specs(
        self,
        device: DeviceId,
        node: Node,
        topology: CgroupTopology,
        partitions: Sequence[Partition],
    ) -> tuple[SignalSpec, ...]:
        """Return the columns of a device from now on; what was open for the old ones is closed."""
        self.release(device)
        columns = self._device_columns(device, node)
        for partition in partitions:
            columns += [c for c in _partition_columns(partition, topology) if c.path is not None]
        self._cells[device] = tuple(_Cell(column) for column in columns)
        self._values[device] = array("d", [0.0]) * len(columns)
        return tuple(column.spec for column in columns)

    def sample(self, device: DeviceId, sink: SignalSink) -> bool:
        """Read every column of a device once; return whether it has any."""
        cells = self._cells.get(device, ())
        if not cells:
            return False
        values, silent = self._values[device], []
        for slot, cell in enumerate(cells):
            values[slot], quality = _read(cell)
            if quality is not Quality.VALUE:
                silent.append((slot, quality))
        sink.put_many(0, values)
        for slot, quality in silent:
            sink.put(slot, values[slot], quality)
        return True

    def release(self, device: DeviceId) -> None:
        """Close a device's descriptors; its columns stay and open again when sampled."""
        for cell in self._cells.get(device, ()):
            if cell.fd >= 0:
                os.close(cell.fd)
                cell.fd = -1

    def close(self) -> None:
        """Close everything."""
        for device in self._cells:
            self.release(device)
        self._cells.clear()

    def open_count(self, device: DeviceId) -> int:
        """Return how many descriptors are open on a device."""
        return sum(cell.fd >= 0 for cell in self._cells.get(device, ()))

    def _device_columns(self, device: DeviceId, node: Node) -> list[Column]:
        spec = _Specs(device, Scope.DEVICE)
        meminfo = f"{self._sys}/devices/system/node/node{node.number}/meminfo"
        if not Path(meminfo).exists():
            meminfo = f"{self._proc}/meminfo"
        energy, wrap = self._energy(node)
        return [
            Column(
                spec("alloy_device_compute_active_ratio", "ratio", f"{self._proc}/stat"),
                f"{self._proc}/stat",
                _busy_seconds(node.cpus),
                rate=float(len(node.cpus)),
            ),
            Column(spec("alloy_device_memory_used_bytes", "bytes", meminfo), meminfo, _memory_used),
            Column(
                spec("alloy_device_temperature_celsius", "celsius", "hwmon"),
                self._temperature(node),
                lambda raw: int(raw) / 1e3,
            ),
            Column(
                spec("alloy_device_energy_joules_total", "joules", "RAPL", counter=True),
                energy,
                lambda raw: int(raw) / 1e6,
                wrap=wrap,
            ),
            Column(
                spec("alloy_device_power_watts", "watts", "RAPL"),
                energy,
                lambda raw: int(raw) / 1e6,
                rate=1.0,
                wrap=wrap,
            ),
        ]

    def _temperature(self, node: Node) -> str | None:
        """Return the node's sensor, where the host has one for each node and so no doubt whose."""
        found = [
            str(folder / "temp1_input")
            for folder in sorted(Path(f"{self._sys}/class/hwmon").glob("hwmon*"))
            if read_bytes(f"{folder}/name").strip().decode("ascii", "replace") in SENSORS
            and (folder / "temp1_input").exists()
        ]
        return found[node.number] if len(found) == self._node_count() else None

    def _energy(self, node: Node) -> tuple[str | None, float]:
        folder = Path(f"{self._sys}/class/powercap/intel-rapl:{node.number}")
        packages = [
            p
            for p in Path(f"{self._sys}/class/powercap").glob("intel-rapl:*")
            if p.name.count(":") == 1
        ]
        if len(packages) != self._node_count() or not (folder / "energy_uj").exists():
            return None, 0.0
        span = read_bytes(f"{folder}/max_energy_range_uj").strip()
        return str(folder / "energy_uj"), int(span) / 1e6 if span.isdigit() else 0.0

    def _node_count(self) -> int:
        return max(1, len(list(Path(f"{self._sys}/devices/system/node").glob("node[0-9]*"))))


class _Specs:
    """Makes the specs of one subject."""

    def __init__(self, subject: str, scope: Scope) -> None:
        self._subject, self._scope = subject, scope

    def __call__(self, name: str, unit: str, source: str, *, counter: bool = False) -> SignalSpec:
        return SignalSpec(
            name=name,
            subject=self._subject,
            scope=self._scope,
            unit=unit,
            counter=counter,
            source=source,
        )


def _partition_columns(partition: Partition, topology: CgroupTopology) -> list[Column]:
    spec = _Specs(partition.id, Scope.PARTITION)
    path = partition.locator.get("cgroup", "")
    cpus = float(max(1, len(parse_cpu_list(partition.access.environment["ALLOY_CPUS"]))))
    usage, seconds = _usage(topology, path)
    memory = topology.of("memory")
    used = limit = None
    if memory is not None:
        v2 = memory.version == 2
        used = f"{memory.folder(path)}/{'memory.current' if v2 else 'memory.usage_in_bytes'}"
        limit = f"{memory.folder(path)}/{'memory.max' if v2 else 'memory.limit_in_bytes'}"
    tree = topology.unified
    cpu_psi = f"{tree.folder(path)}/cpu.pressure" if tree else None
    memory_psi = f"{tree.folder(path)}/memory.pressure" if tree else None
    return [
        Column(
            spec("alloy_partition_compute_active_ratio", "ratio", usage or ""),
            usage,
            seconds,
            rate=cpus,
        ),
        Column(
            spec("alloy_partition_cpu_seconds_total", "seconds", usage or "", counter=True),
            usage,
            seconds,
        ),
        Column(spec("alloy_partition_memory_used_bytes", "bytes", used or ""), used, float),
        Column(spec("alloy_partition_memory_limit_bytes", "bytes", limit or ""), limit, _limit),
        Column(
            spec("alloy_partition_cpu_pressure_ratio", "ratio", cpu_psi or ""),
            cpu_psi,
            _psi_seconds,
            rate=1.0,
        ),
        Column(
            spec("alloy_partition_memory_pressure_ratio", "ratio", memory_psi or ""),
            memory_psi,
            _psi_seconds,
            rate=1.0,
        ),
    ]


def _usage(topology: CgroupTopology, path: str) -> tuple[str | None, Parse]:
    if topology.unified is not None:
        return f"{topology.unified.folder(path)}/cpu.stat", _usage_v2
    accounting = topology.of("cpuacct")
    if accounting is not None:
        return f"{accounting.folder(path)}/cpuacct.usage", lambda raw: int(raw) / 1e9
    return None, float


def _read(cell: _Cell) -> tuple[float, Quality]:
    """Return a column's value of now, or why there is none."""
    if cell.missing:
        return math.nan, Quality.NOT_SUPPORTED
    try:
        if cell.fd < 0:
            cell.fd = os.open(cell.column.path or "", os.O_RDONLY | os.O_CLOEXEC)
        number = cell.column.parse(os.pread(cell.fd, READ_BYTES, 0))
    except FileNotFoundError:
        return math.nan, Quality.STALE
    except PermissionError:
        return math.nan, Quality.NOT_PERMITTED
    except (OSError, ValueError, IndexError):
        _forget(cell)
        return cell.last, Quality.STALE
    if math.isnan(number):
        return number, Quality.NOT_SUPPORTED
    return (
        _counted(cell, number) if cell.column.rate or cell.column.wrap else (number, Quality.VALUE)
    )


def _counted(cell: _Cell, number: float) -> tuple[float, Quality]:
    """Return a rate, or a counter freed of wraps, from a counter's number of now."""
    now_s = time.monotonic()
    grown, span_s = number - cell.before, now_s - cell.before_s
    if grown < 0:  # wrapped, or reset: what was lost is not made up
        grown = grown + cell.column.wrap if cell.column.wrap else math.nan
    if cell.column.rate and span_s < SPAN_MIN_S:
        return cell.last, Quality.STALE
    cell.before, cell.before_s = number, now_s
    if not cell.column.rate:
        if math.isnan(grown):
            grown = 0.0 if cell.total else number
        cell.total += grown
        return cell.total, Quality.VALUE
    if math.isnan(grown):
        return math.nan, Quality.STALE
    cell.last = max(0.0, grown / span_s / cell.column.rate)
    if cell.column.spec.unit == "ratio":
        cell.last = min(1.0, cell.last)
    return cell.last, Quality.VALUE


def _forget(cell: _Cell) -> None:
    if cell.fd >= 0:
        with contextlib.suppress(OSError):
            os.close(cell.fd)
        cell.fd = -1


def _busy_seconds(cpus: Sequence[int]) -> Parse:
    """Return a parser of `/proc/stat` to the busy seconds of some CPUs.

    Busy is user, nice, system, irq, softirq and steal; guest time is part of user already.
    """
    wanted = {b"cpu%d" % cpu for cpu in cpus}
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def parse(raw: bytes) -> float:
        ticks = 0
        for line in raw.split(b"\nintr", 1)[0].split(b"\n"):
            fields = line.split()
            if fields and fields[0] in wanted:
                ticks += sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8))
        return ticks * tick_s

    return parse


def _memory_used(raw: bytes) -> float:
    values: dict[bytes, int] = {}
    for line in raw.split(b"\n"):
        key, colon, rest = line.partition(b":")
        if colon and rest.split():
            values[key.split()[-1]] = int(rest.split()[0]) * 1024
    cache = values.get(b"FilePages", values.get(b"Cached", 0))
    return float(max(0, values[b"MemTotal"] - values[b"MemFree"] - cache)) if values else math.nan


def _usage_v2(raw: bytes) -> float:
    start = raw.index(b"usage_usec ") + 11
    return int(raw[start : raw.index(b"\n", start)]) / 1e6


def _psi_seconds(raw: bytes) -> float:
    start = raw.index(b"total=") + 6  # the "some" line comes first
    return int(raw[start:].split(maxsplit=1)[0]) / 1e6


def _limit(raw: bytes) -> float:
    text = raw.strip()
    return math.nan if text == b"max" or int(text) >= 1 << 62 else float(text)
