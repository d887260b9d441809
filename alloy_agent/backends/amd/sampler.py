"""The fast signals of one device: `gpu_metrics` once a sample, slow files at their own pace.

Device-wide power, temperature and energy are told once, on the device; no partition gets a copy.
A partition's activity comes from its own row of `xcp_stats`; where the revision has none, it is
not supported, and nothing of the whole device stands in for it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.metrics import (
    JOULES_PER_TICK,
    READ_MAX,
    Accumulator,
    Metrics,
    busy_ratio,
    parse,
    power_w,
    temperature_c,
)
from alloy_agent.backends.amd.processes import KfdProcess
from alloy_agent.backends.base import SignalSink
from alloy_agent.errors import BackendError, DeviceLostError
from alloy_agent.model import Partition, Quality, Scope, SignalSpec

FIRMWARE_S: Final = 0.1  # the firmware renews the table; polling faster reads the same again
SLOW_S: Final = 1.0  # memory and error counts: one reader a second
FROZEN_S: Final = 1.0  # both clocks of the table stand still for longer: stale
POWER_MARGIN: Final = 1.5  # energy may not come faster than the cap times this
LIMIT_C: Final = 100.0  # until hwmon says when the device throttles itself

_DEVICE: Final = (
    ("alloy_device_memory_used_bytes", "bytes", False, SLOW_S),
    ("alloy_device_power_watts", "watts", False, FIRMWARE_S),
    ("alloy_device_energy_joules_total", "joules", True, FIRMWARE_S),
    ("alloy_device_temperature_headroom_celsius", "celsius", False, FIRMWARE_S),
    ("alloy_device_throttle_seconds_total", "seconds", True, FIRMWARE_S),
    ("alloy_device_ecc_corrected_total", "errors", True, SLOW_S),
    ("alloy_device_ecc_uncorrected_total", "errors", True, SLOW_S),
    ("alloy_device_power_limit_watts", "watts", False, SLOW_S),
)
_PARTITION: Final = (
    ("alloy_partition_compute_active_ratio", "ratio", False, FIRMWARE_S),
    ("alloy_partition_memory_used_bytes", "bytes", False, SLOW_S),
    ("alloy_partition_memory_bandwidth_active_ratio", "ratio", False, FIRMWARE_S),
)

Readings = dict[str, float | None]


def specs_of(device: str, partitions: Iterable[Partition]) -> tuple[SignalSpec, ...]:
    """Return the columns of a device and its partitions."""
    found = [_spec(row, device, Scope.DEVICE) for row in _DEVICE]
    for partition in partitions:
        found += [_spec(row, partition.id, Scope.PARTITION) for row in _PARTITION]
    return tuple(found)


def _spec(row: tuple[str, str, bool, float], subject: str, scope: Scope) -> SignalSpec:
    name, unit, counter, period_s = row
    return SignalSpec(
        name=name,
        subject=subject,
        scope=scope,
        unit=unit,
        counter=counter,
        source="gpu_metrics" if period_s == FIRMWARE_S else "sysfs",
        refresh_period_s=period_s,
    )


class Sampler:
    """One device's slots. `read` opens its file once and keeps it until `close`."""

    def __init__(self, files: Files, roots: Roots, bus: str, clock: Callable[[], float]) -> None:
        self._files, self._pci, self._clock = files, roots.pci(bus), clock
        self.specs: tuple[SignalSpec, ...] = ()
        self._partitions: tuple[Partition, ...] = ()
        self._handle: int | None = None
        self._lock = threading.Lock()
        self._cap_w = _micro(files, self._pci, "power1_cap")
        limit = _milli(files, self._pci, "temp2_crit")
        self._limit_c = limit if limit is not None else LIMIT_C
        fast = None if self._cap_w is None else self._cap_w * POWER_MARGIN
        self._energy = Accumulator(JOULES_PER_TICK, rate_max=fast)
        self._throttled = Accumulator(1.0, width=32)
        self._cycles = Accumulator(1.0, width=32)
        self._throttle_s = 0.0
        self._stamp: tuple[int | None, int | None] = (None, None)
        self._stamp_s = 0.0
        self._first_s: float | None = None
        self._slow_s = -SLOW_S
        self._slow: Readings = {}
        self._errors: tuple[float | None, float | None] = (None, None)
        self._memory: dict[int, float] = {}
        self._memory_s: float | None = None
        self.refused = 0
        self._row = Row(0)

    def announce(self, device: str, partitions: tuple[Partition, ...]) -> tuple[SignalSpec, ...]:
        """Set the columns to fill from now on."""
        self._partitions = partitions
        self.specs = specs_of(device, partitions)
        self._row = Row(len(self.specs))
        return self.specs

    def users(self, processes: Sequence[KfdProcess]) -> None:
        """Take over how much memory processes have on each node, as read elsewhere."""
        memory: dict[int, float] = {}
        for process in processes:
            for gpu_id, used in process.memory_bytes.items():
                memory[gpu_id] = memory.get(gpu_id, 0.0) + used
        self._memory, self._memory_s = memory, self._clock()

    def wants_users(self) -> bool:
        """Whether the memory of processes was last taken over a while ago."""
        return self._memory_s is None or self._clock() - self._memory_s >= SLOW_S

    def ids_of(self, mode: str) -> frozenset[str]:
        """Return the announced partitions that a device in this compute mode can still have."""
        return frozenset(
            piece.id for piece in self._partitions if not mode or piece.profile == mode
        )

    def errors(self, blocks: dict[str, dict[str, int]]) -> None:
        """Take over the error counts, as read elsewhere: asking RAS may take a while."""
        self._errors = error_totals(blocks)

    def close(self) -> None:
        """Let go of the open file."""
        with self._lock:
            if self._handle is not None:
                self._files.close(self._handle)
                self._handle = None

    @property
    def handles(self) -> int:
        """How many files are open."""
        return int(self._handle is not None)

    def fill(self, live: frozenset[str], sink: SignalSink) -> None:
        """Put every slot; those of partitions that are not live any more are stale.

        Raises:
            DeviceLostError: The device has gone.
        """
        now_s = self._clock()
        metrics = self._read()
        fresh = self._fresh(metrics, now_s)
        device = self._device_values(metrics, now_s) | self._slow_values(now_s)
        row = self._row
        row.clear(now_s)
        slot = 0
        for name, *_ in _DEVICE:
            row.set(slot, device.get(name), fresh=fresh or name in self._slow)
            slot += 1
        for partition in self._partitions:
            values = self._partition_values(partition, metrics)
            gone = partition.id not in live
            for name, *_ in _PARTITION:
                if gone:
                    row.silence(slot, Quality.STALE)
                else:
                    row.set(slot, values.get(name), fresh=fresh)
                slot += 1
        row.put(sink)

    # --- inside ---

    def _read(self) -> Metrics | None:
        with self._lock:
            try:
                if self._handle is None:
                    self._handle = self._files.open(f"{self._pci}/gpu_metrics")
                raw = self._files.again(self._handle, READ_MAX)
            except OSError as error:
                if not self._files.there(self._pci):
                    raise DeviceLostError(
                        f"{self._pci}: {error.strerror}", cure="drain the node and reset the device"
                    ) from error
                return None
        try:
            return parse(raw)
        except BackendError:
            self.refused += 1
            return None

    def _fresh(self, metrics: Metrics | None, now_s: float) -> bool:
        if metrics is None:
            return False
        stamp = metrics.get("system_clock_counter"), metrics.get("firmware_timestamp")
        if stamp != self._stamp or stamp == (None, None):
            self._stamp, self._stamp_s = stamp, now_s
        return now_s - self._stamp_s <= FROZEN_S

    def _device_values(self, metrics: Metrics | None, now_s: float) -> Readings:
        if metrics is None:
            return {}
        hottest = temperature_c(metrics)
        energy = metrics.get("energy_accumulator")
        return {
            "alloy_device_power_watts": power_w(metrics, self._cap_w),
            "alloy_device_energy_joules_total": None
            if energy is None
            else self._energy.add(energy, now_s),
            "alloy_device_temperature_headroom_celsius": None
            if hottest is None
            else self._limit_c - hottest,
            "alloy_device_throttle_seconds_total": self._throttle(metrics, now_s),
        }

    def _throttle(self, metrics: Metrics, now_s: float) -> float | None:
        """Return the seconds held back so far: residency over cycles, times the time passed."""
        cycles = metrics.get("accumulation_counter")
        held = [
            metrics.get(f"{name}_residency_acc")
            for name in ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
        ]
        told = [value for value in held if value is not None]
        if cycles is None or not told:
            return None
        before = self._cycles.total, self._throttled.total
        first = self._first_s is None
        passed_s = now_s - (self._first_s if self._first_s is not None else now_s)
        self._first_s = now_s
        ran = self._cycles.add(cycles, now_s) - before[0]
        slow = self._throttled.add(max(told), now_s) - before[1]
        if not first and ran > 0:
            self._throttle_s += passed_s * min(1.0, slow / ran)
        return self._throttle_s

    def _slow_values(self, now_s: float) -> Readings:
        if now_s - self._slow_s >= SLOW_S:
            self._slow_s = now_s
            corrected, uncorrected = self._errors
            used = self._files.number(f"{self._pci}/mem_info_vram_used")
            self._slow = {
                "alloy_device_memory_used_bytes": None if used is None else float(used),
                "alloy_device_ecc_corrected_total": corrected,
                "alloy_device_ecc_uncorrected_total": uncorrected,
                "alloy_device_power_limit_watts": _micro(self._files, self._pci, "power1_cap"),
            }
        return self._slow

    def _partition_values(self, partition: Partition, metrics: Metrics | None) -> Readings:
        number = partition.locator.get("xcp")
        gpu_id = partition.locator.get("kfd_gpu_id")
        busy = None
        if metrics is not None and number is not None and int(number) < len(metrics.busy_inst):
            busy = busy_ratio(metrics.busy_inst[int(number)])
        used = None
        if gpu_id is not None and self._memory_s is not None:
            used = self._memory.get(int(gpu_id), 0.0)
        return {
            "alloy_partition_compute_active_ratio": busy,
            "alloy_partition_memory_used_bytes": used,
        }


class Row:
    """One sample of all slots, put in one call; what is no fresh value is put after it."""

    def __init__(self, count: int) -> None:
        self._values = array("d", [0.0]) * count
        self._silent: dict[int, Quality] = {}
        self._now_s = 0.0

    def clear(self, now_s: float) -> None:
        """Begin a sample."""
        self._silent.clear()
        self._now_s = now_s

    def set(self, slot: int, value: float | None, *, fresh: bool) -> None:
        """Set a slot's value, or that the source does not tell it."""
        if value is None:
            self.silence(slot, Quality.NOT_SUPPORTED)
            return
        self._values[slot] = value
        if not fresh:
            self._silent[slot] = Quality.STALE

    def silence(self, slot: int, quality: Quality) -> None:
        """Set that a slot has no value now."""
        self._values[slot], self._silent[slot] = 0.0, quality

    def put(self, sink: SignalSink) -> None:
        """Put every slot."""
        sink.put_many(0, self._values, source_time_s=self._now_s)
        for slot, quality in self._silent.items():
            sink.put(slot, self._values[slot], quality)


def error_totals(blocks: dict[str, dict[str, int]]) -> tuple[float | None, float | None]:
    """Return corrected and uncorrected errors of all blocks; None where the driver has no RAS."""
    if not blocks:
        return None, None
    corrected = sum(counts.get("ce", 0) for counts in blocks.values())
    uncorrected = sum(counts.get("ue", 0) for counts in blocks.values())
    return float(corrected), float(uncorrected)


def block_errors(files: Files, pci: str) -> dict[str, dict[str, int]]:
    """Return the error counts of each block: `ce` corrected, `ue` uncorrected, `de` deferred."""
    found: dict[str, dict[str, int]] = {}
    for name in files.listed(f"{pci}/ras"):
        block, end, _ = name.partition("_err_count")
        text = files.text(f"{pci}/ras/{name}") if end else None
        counts = {}
        for line in (text or "").splitlines():
            kind, _, number = line.partition(":")
            if number.strip().isdecimal():
                counts[kind.strip()] = int(number)
        if counts:
            found[block] = counts
    return found


def _hwmon(files: Files, pci: str, name: str) -> int | None:
    """Return a value of the device's sensors; their directory is renumbered by every reload."""
    for entry in files.listed(f"{pci}/hwmon"):
        value = files.number(f"{pci}/hwmon/{entry}/{name}")
        if value is not None:
            return value
    return None


def _micro(files: Files, pci: str, name: str) -> float | None:
    value = _hwmon(files, pci, name)
    return value / 1e6 if value else None


def _milli(files: Files, pci: str, name: str) -> float | None:
    value = _hwmon(files, pci, name)
    return value / 1e3 if value else None
