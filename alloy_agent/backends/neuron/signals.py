"""The columns of a Neuron device and its runs, and how each is read.

Fast ones come from sysfs at each sample; those that only the monitor tells renew at its period,
and power once a minute. A counter that fell was cleared or belongs to a driver that was loaded
again: the sum goes on from there and never falls.

Source: aws-neuron-driver 2.24.7: `total` of memory is what is in use now, `present` the last
change; `pe_cntrs` are cycle counts per row group of the tensor engine. Execution counters of
`stats/status` are folded in only when a process ends before driver 2.30.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.neuron.board import Board
from alloy_agent.backends.neuron.doctor import version_key
from alloy_agent.backends.neuron.facts import core_memory
from alloy_agent.backends.neuron.monitor import Monitor, Report
from alloy_agent.backends.neuron.tree import DeviceTree, read_attribute, whole_number
from alloy_agent.model import Device, Partition, Quality, Scope, Share, SignalSpec, Value

# How often each kind is read, however fast the sampler is: a file of sysfs costs 10 us, and a
# large instance has thousands of them.
ACTIVITY_PERIOD_S: Final = 0.2
MEMORY_PERIOD_S: Final = 1.0
SLOW_PERIOD_S: Final = 5.0
POWER_PERIOD_S: Final = 60.0
LIVE_STATUS: Final = (2, 30)  # from this driver on, execution counters move while a process runs
CATEGORIES: Final = ("tensors", "constants", "model_code", "runtime_memory", "collectives")
HARDWARE_ERRORS: Final = (
    "hw_error",
    "hw_collectives_error",
    "hw_hbm_ue_error",
    "hw_nc_ue_error",
    "hw_dma_abort_error",
)
FAILURES: Final = (
    "failure",
    "timeout",
    "exec_bad_input",
    "infer_bad_input",
    "execute_completed_with_error",
    "infer_completed_with_err",
    "execute_failed_to_queue",
    "infer_failed_to_queue",
)


class Reading(Value, frozen=True, kw_only=True):
    """One value with when its source had it (boot clock), or why there is none."""

    value: float | None = None
    source_s: float | None = None
    quality: Quality = Quality.NOT_SUPPORTED


ABSENT: Final = Reading()
Reader = Callable[[], Reading]


class Column:
    """One slot: its specification, its reader, and whose grant it stands or falls with."""

    def __init__(self, spec: SignalSpec, reader: Reader, incarnation: str = "") -> None:
        self.spec, self.reader, self.incarnation = spec, reader, incarnation


class Sampler:
    """The slots of one device as last announced."""

    def __init__(self, found: Sequence[Column], tree: DeviceTree) -> None:
        self._columns = tuple(found)
        self._tree = tree
        self._last = array("d", [0.0]) * len(found)
        self._times_s = array("d", [math.nan]) * len(found)
        self._kept = [ABSENT] * len(found)
        self._due_s = [0.0] * len(found)
        self.specs = tuple(column.spec for column in found)

    def present(self) -> bool:
        """Whether the driver still shows the device."""
        return self._tree.present()

    def fill(self, alive: set[str], sink: SignalSink) -> None:
        """Put every slot; those of a run that is no longer granted are stale.

        Args:
            alive: Incarnations of the grants of the moment.
            sink: Where values go.
        """
        last, times_s = self._last, self._times_s
        now_s, silent = time.clock_gettime(time.CLOCK_BOOTTIME), []
        for slot, column in enumerate(self._columns):
            if column.incarnation and column.incarnation not in alive:
                silent.append((slot, Quality.STALE))
                continue
            if now_s >= self._due_s[slot]:
                self._due_s[slot] = now_s + (column.spec.refresh_period_s or 0.0)
                found = column.reader()
                if found.source_s is None:
                    found = msgspec.structs.replace(found, source_s=now_s)
                self._kept[slot] = found
            found = self._kept[slot]
            if found.value is None:
                silent.append((slot, found.quality))
            else:
                last[slot] = found.value
                times_s[slot] = math.nan if found.source_s is None else found.source_s
        sink.put_many(0, last, source_time_s=times_s)
        for slot, quality in silent:
            sink.put(slot, last[slot], quality)


class Epochs:
    """A counter that only grows, over one that others may clear."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self._last: int | None = None
        self._base = 0

    def __call__(self) -> Reading:
        """Return the sum over all epochs."""
        value = self._read()
        if value is None:
            return ABSENT
        if self._last is not None and value < self._last:
            self._base += self._last
        self._last = value
        return Reading(value=float(self._base + value), quality=Quality.VALUE)


class TensorActivity:
    """Busy ratio of some cores' tensor engines, from cycle counters, between two samples."""

    def __init__(self, tree: DeviceTree, cores: Sequence[int]) -> None:
        self._paths = [f"{tree.core_folder(c)}/stats/tensor_engine/pe_cntrs" for c in cores]
        self._before: list[tuple[int, int] | None] = [None] * len(self._paths)
        self._ratio: float | None = None

    def __call__(self) -> float | None:
        """Return the mean over the cores since the last call; None: the driver does not tell."""
        ratios = []
        for number, path in enumerate(self._paths):
            now = parse_cycles(read_attribute(path).text)
            before, self._before[number] = self._before[number], now
            if now is None or before is None:
                continue
            busy, idle = now[0] - before[0], now[1] - before[1]
            if busy < 0 or idle < 0:
                continue  # a new epoch
            if busy + idle > 0:
                ratios.append(busy / (busy + idle))
        if all(entry is None for entry in self._before):
            self._ratio = None
        elif ratios:
            self._ratio = sum(ratios) / len(ratios)
        return self._ratio


def parse_cycles(text: str | None) -> tuple[int, int] | None:
    """Return busy and idle cycles over all row groups; None if the text is no such table."""
    if not text:
        return None
    header, *rows = text.splitlines()
    names = header.split(",")
    if "idle" not in names or "mm_active" not in names:
        return None
    busy = idle = 0
    for row in rows:
        fields = row.split(",")
        values = [whole_number(field) for field in fields]
        if len(values) != len(names) or None in values:
            return None
        table = dict(zip(names, values, strict=True))
        busy += (table["mm_active"] or 0) + (table.get("wl_active") or 0)
        idle += table["idle"] or 0
    return busy, idle


def parse_power(text: str | None, wall_minus_boot_s: float) -> Reading:
    """Return the mean power of the last minute as a ratio of the maximum, with its own time."""
    fields = (text or "").split(",")
    if len(fields) != 5 or fields[0] != "POWER_STATUS_VALID":
        return ABSENT
    try:
        moment_s, mean = float(fields[1]), float(fields[4])
    except ValueError:
        return ABSENT
    if not 0.0 <= mean <= 1000.0 or not 0.0 < moment_s < 1e11:
        return ABSENT
    return Reading(
        value=min(1.0, mean / 100.0),
        source_s=moment_s - wall_minus_boot_s,
        quality=Quality.VALUE,
    )


def columns(
    board: Board,
    tree: DeviceTree,
    device: Device,
    partitions: Sequence[Partition],
    monitor: Monitor,
) -> list[Column]:
    """Return the slots of a device and of its granted runs, in a stable order."""
    found = _device_columns(board, tree)
    for partition in partitions:
        found += _partition_columns(board, tree, device, partition, monitor)
    return found


# --- the device --------------------------------------------------------------------------------


def _device_columns(board: Board, tree: DeviceTree) -> list[Column]:
    def spec(name: str, unit: str, source: str, period_s: float | None, **more: bool) -> SignalSpec:
        return SignalSpec(
            name=name,
            subject=board.id,
            scope=Scope.DEVICE,
            unit=unit,
            source=source,
            refresh_period_s=period_s,
            counter=more.get("counter", False),
        )

    def ecc(*names: str) -> Epochs:
        return Epochs(lambda: _sum([tree.number_of(name) for name in names]))

    cores = range(board.cores)
    memory = "sysfs device_mem/total"
    host = "sysfs host_mem/*/total"
    hardware = "sysfs stats/hardware"
    silent = (
        ("alloy_device_power_watts", "watts", False),
        ("alloy_device_energy_joules_total", "joules", True),
        ("alloy_device_temperature_headroom_celsius", "celsius", False),
        ("alloy_device_throttle_seconds_total", "seconds", True),
    )
    found = [
        Column(
            spec("alloy_device_memory_used_bytes", "bytes", memory, MEMORY_PERIOD_S),
            lambda: _value(_sum([core_memory(tree, c, board.memory_bytes) for c in cores])),
        ),
        Column(
            spec("alloy_device_host_memory_used_bytes", "bytes", host, SLOW_PERIOD_S),
            lambda: _value(_host_memory(tree)),
        ),
        Column(
            spec("alloy_device_power_utilization_ratio", "ratio", "sysfs power", POWER_PERIOD_S),
            lambda: parse_power(tree.read("power").text, _wall_minus_boot_s()),
        ),
        Column(
            spec(
                "alloy_device_ecc_corrected_total",
                "errors",
                hardware,
                MEMORY_PERIOD_S,
                counter=True,
            ),
            ecc("sram_ecc_corrected", "mem_ecc_corrected"),
        ),
        Column(
            spec(
                "alloy_device_ecc_uncorrected_total",
                "errors",
                hardware,
                MEMORY_PERIOD_S,
                counter=True,
            ),
            ecc("sram_ecc_uncorrected", "mem_ecc_uncorrected"),
        ),
        Column(
            spec(
                "alloy_device_ecc_repairable_total",
                "errors",
                hardware,
                MEMORY_PERIOD_S,
                counter=True,
            ),
            ecc("mem_ecc_repairable_uncorrected"),
        ),
    ]
    # Neuron tells a percentage of its power once a minute: no watts, no heat, no throttling.
    found += [
        Column(spec(name, unit, "not told by the driver", None, counter=counter), lambda: ABSENT)
        for name, unit, counter in silent
    ]
    return found


def _host_memory(tree: DeviceTree) -> int | None:
    import os

    folder = f"{tree.folder}/stats/memory_usage/host_mem"
    try:
        categories = os.listdir(folder)  # noqa: PTH208 - at each sample
    except OSError:
        return None
    values = [whole_number(read_attribute(f"{folder}/{c}/total").text) for c in categories]
    return _sum([value for value in values if value is not None] or [None])


# --- a run of cores ----------------------------------------------------------------------------


def _partition_columns(
    board: Board, tree: DeviceTree, device: Device, partition: Partition, monitor: Monitor
) -> list[Column]:
    cores = partition.units or tuple(range(board.cores))
    alone = partition.share is Share.EXCLUSIVE
    tensor = TensorActivity(tree, cores)
    logical = _global_cores(board, device, partition)
    status_s = None if version_key(device.driver or "") >= LIVE_STATUS else monitor.period_s

    def column(  # noqa: PLR0913 - the columns of a table
        name: str,
        unit: str,
        source: str,
        period_s: float | None,
        reader: Reader,
        *,
        counter: bool = False,
    ) -> Column:
        spec = SignalSpec(
            name=name,
            subject=partition.id,
            scope=Scope.PARTITION,
            unit=unit,
            counter=counter,
            source=source,
            refresh_period_s=period_s,
        )
        return Column(spec, reader if alone else (lambda: ABSENT), partition.incarnation)

    def busy() -> Reading:
        ratio = tensor()
        if ratio is not None:
            return Reading(value=ratio, quality=Quality.VALUE)
        return _from_report(monitor, lambda report: _busy(report, logical))

    def memory(category: str) -> Reader:
        return lambda: _value(_sum([_category(tree, core, category) for core in cores]))

    def status(names: tuple[str, ...]) -> Epochs:
        return Epochs(lambda: _status(tree, cores, names))

    usage = "sysfs device_mem/total"
    told = "neuron-monitor"
    period_s = monitor.period_s
    executions = "sysfs stats/status" + ("" if status_s is None else ", when a process ends")
    return [
        column(
            "alloy_partition_compute_active_ratio",
            "ratio",
            "sysfs pe_cntrs",
            ACTIVITY_PERIOD_S,
            busy,
        ),
        column(
            "alloy_partition_memory_used_bytes",
            "bytes",
            usage,
            MEMORY_PERIOD_S,
            lambda: _value(_sum([core_memory(tree, c, board.memory_bytes) for c in cores])),
        ),
        column(
            "alloy_partition_memory_bandwidth_active_ratio",
            "ratio",
            "not told by the driver",
            None,
            lambda: ABSENT,
        ),
        *(
            column(
                f"alloy_partition_memory_{name}_bytes", "bytes", usage, SLOW_PERIOD_S, memory(name)
            )
            for name in CATEGORIES
        ),
        column(
            "alloy_partition_executions_total",
            "executions",
            executions,
            SLOW_PERIOD_S,
            status(("success",)),
            counter=True,
        ),
        column(
            "alloy_partition_execution_failures_total",
            "executions",
            executions,
            SLOW_PERIOD_S,
            status(FAILURES),
            counter=True,
        ),
        column(
            "alloy_partition_hardware_errors_total",
            "errors",
            executions,
            SLOW_PERIOD_S,
            status(HARDWARE_ERRORS),
            counter=True,
        ),
        column(
            "alloy_partition_latency_p50_seconds",
            "seconds",
            told,
            period_s,
            lambda: _from_report(monitor, lambda r: _latency(r, logical, 0)),
        ),
        column(
            "alloy_partition_latency_p99_seconds",
            "seconds",
            told,
            period_s,
            lambda: _from_report(monitor, lambda r: _latency(r, logical, 1)),
        ),
    ]


def _global_cores(board: Board, device: Device, partition: Partition) -> frozenset[int]:
    first = board.number * device.slices + partition.placement.start
    return frozenset(range(first, first + partition.placement.size))


def _category(tree: DeviceTree, core: int, name: str) -> int | None:
    path = f"{tree.core_folder(core)}/stats/memory_usage/device_mem/{name}/total"
    return whole_number(read_attribute(path).text)


def _status(tree: DeviceTree, cores: Sequence[int], names: tuple[str, ...]) -> int | None:
    """Return a sum over cores and names; a name that this driver lacks adds nothing."""
    values = [
        whole_number(read_attribute(f"{tree.core_folder(core)}/stats/status/{name}/total").text)
        for core in cores
        for name in names
    ]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _from_report(monitor: Monitor, pick: Callable[[Report], float | None]) -> Reading:
    report = monitor.latest()
    value = None if report is None else pick(report)
    if report is None or value is None:
        return ABSENT
    return Reading(value=value, source_s=report.read_at_s, quality=Quality.VALUE)


def _busy(report: Report, cores: frozenset[int]) -> float | None:
    """Return the mean busy ratio of the cores; None while no runtime is on any of them."""
    told = {
        core: busy
        for runtime in report.runtimes
        for core, busy in runtime.cores.items()
        if core in cores
    }
    return sum(told.values()) / len(cores) if told else None


def _latency(report: Report, cores: frozenset[int], which: int) -> float | None:
    """Return a percentile of the runtimes on the cores; of several, the worst."""
    found = [
        value
        for runtime in report.runtimes
        if cores & set(runtime.cores)
        and (value := (runtime.latency_p50_s, runtime.latency_p99_s)[which]) is not None
    ]
    return max(found, default=None)


def _value(value: int | None) -> Reading:
    return ABSENT if value is None else Reading(value=float(value), quality=Quality.VALUE)


def _sum(values: Sequence[int | None]) -> int | None:
    """Return a sum; None if any part is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _wall_minus_boot_s() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
