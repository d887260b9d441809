"""The fast signals of one GPU: one batch of field values, memory, and GPM where there is any.

A tick makes one call for the counters (`nvmlDeviceGetFieldValues`: per-field error and time
stamp), joined once a second by the error counters, and at most `calls_max` calls in all: each is an
ioctl, and the driver serialises them. What is due beyond that waits for the next ticks: partitions
take turns, none twice before each had one, and the last value is put again with its own source
time. GPM needs 100 ms between two samples; with seven instances, eight calls a tick and ten ticks a
second a turn comes every 0.4 s, with 32 calls every 0.1 s. What the period really is, is measured
where the values are read and published with them.

Handles: GPM buffers and MIG device handles are held between ticks, and only here; `release` lets go
of them. A MIG handle may come to mean a successor, and a driver need not announce that. So what was
read through one is believed only when its UUID was asked for at most `CHECK_S` before; a turn asks
once for all that it reads.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from typing import Any, Final

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.nvidia.gpu import Gpu, field_number
from alloy_agent.backends.nvidia.library import (
    ABSENT,
    GONE,
    LOST,
    NO_PERMISSION,
    NvmlCallError,
)
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Partition, Quality, Scope, SignalSpec

MEMORY_V2: Final = 0x02000028  # nvml.h: nvmlMemory_v2
GPM_SM_UTIL: Final = 2  # nvml.h: NVML_GPM_METRIC_*
GPM_DRAM_BW_UTIL: Final = 10
# Source: nvml.h, nvmlGpmMetricsGet: samples are at least 100 ms apart.
GPM_PERIOD_S: Final = 0.1
MEMORY_PERIOD_S: Final = 0.5
COUNTER_PERIOD_S: Final = 0.02
SLOW_PERIOD_S: Final = 1.0
CHECK_S: Final = 0.1
CALLS_MAX: Final = 8  # of one tick on one GPU, unless the settings say otherwise
GPM_CALLS: Final = 3  # of one turn: UUID, sample, metrics
MEMORY_CALLS: Final = 2
FIELD_TIME_MAX_S: Final = 3600.0  # a time stamp farther off than this is not believed

ENERGY: Final = 83
POWER: Final = 186
POWER_LIMIT: Final = 190  # in force now, as somebody may have set it; nvml.h: CURRENT_LIMIT
THROTTLES: Final = (74, 76, 269, 270, 271)  # nanoseconds each, nvml.h
ECC_CORRECTED: Final = 3
ECC_UNCORRECTED: Final = 4
ECC_CORRECTED_AGGREGATE: Final = 5
ECC_UNCORRECTED_AGGREGATE: Final = 6
PCIE_REPLAY: Final = 94
RECOVERY: Final = 230
NVLINK_SENT: Final = 138  # KiB of data
NVLINK_RECEIVED: Final = 139
NVLINK_ERRORS: Final = (38, 45, 52, 59)  # CRC of flits and of data, replays, recoveries
ALL_LINKS: Final = 0xFFFFFFFF  # as a field's scope
KIB: Final = 1024
# Pairs of field and scope: to the binding a bare number is an exception caught for each field.
FAST: Final = tuple((field, 0) for field in (ENERGY, POWER, *THROTTLES))
SLOW: Final = (
    *(
        (field, 0)
        for field in (
            ECC_CORRECTED,
            ECC_UNCORRECTED,
            ECC_CORRECTED_AGGREGATE,
            ECC_UNCORRECTED_AGGREGATE,
            PCIE_REPLAY,
            RECOVERY,
            POWER_LIMIT,
            *NVLINK_ERRORS,
        )
    ),
    (NVLINK_SENT, ALL_LINKS),
    (NVLINK_RECEIVED, ALL_LINKS),
)

# name, unit, counter, period
_DEVICE: Final = (
    ("alloy_device_memory_used_bytes", "bytes", False, MEMORY_PERIOD_S),
    ("alloy_device_power_watts", "watts", False, COUNTER_PERIOD_S),
    ("alloy_device_energy_joules_total", "joules", True, COUNTER_PERIOD_S),
    ("alloy_device_temperature_headroom_celsius", "celsius", False, SLOW_PERIOD_S),
    ("alloy_device_throttle_seconds_total", "seconds", True, COUNTER_PERIOD_S),
    ("alloy_device_ecc_corrected_total", "errors", True, SLOW_PERIOD_S),
    ("alloy_device_ecc_uncorrected_total", "errors", True, SLOW_PERIOD_S),
    ("alloy_device_pcie_replays_total", "replays", True, SLOW_PERIOD_S),
    ("alloy_device_recovery_action", "action", False, SLOW_PERIOD_S),
    ("alloy_device_power_limit_watts", "watts", False, SLOW_PERIOD_S),
    ("alloy_device_nvlink_sent_bytes_total", "bytes", True, SLOW_PERIOD_S),
    ("alloy_device_nvlink_received_bytes_total", "bytes", True, SLOW_PERIOD_S),
    ("alloy_device_nvlink_errors_total", "errors", True, SLOW_PERIOD_S),
)
_PARTITION: Final = (
    ("alloy_partition_compute_active_ratio", "ratio", False, GPM_PERIOD_S),
    ("alloy_partition_memory_used_bytes", "bytes", False, MEMORY_PERIOD_S),
    ("alloy_partition_memory_bandwidth_active_ratio", "ratio", False, GPM_PERIOD_S),
)
_MEMORY, _POWER, _ENERGY, _HEADROOM, _THROTTLE, _ECC_C, _ECC_U, _REPLAY, _ACTION, _CAP = range(10)
_SENT, _RECEIVED, _LINK_ERRORS = range(10, 13)
_ACTIVE, _USED, _BANDWIDTH = range(3)


def specs_of(
    gpu: Gpu, partitions: tuple[Partition, ...], calls_max: int = CALLS_MAX
) -> tuple[SignalSpec, ...]:
    """Return the columns of a GPU and its partitions; periods are those at ten ticks a second."""
    rows = [(str(gpu.id), Scope.DEVICE, row) for row in _DEVICE]
    each = max(1, (calls_max - 1) // GPM_CALLS)  # turns that a tick has calls for
    turn_s = GPM_PERIOD_S * max(1, math.ceil(len(partitions) / each))
    for partition in partitions:
        rows += [
            (str(partition.id), Scope.PARTITION, (*row[:3], max(row[3], turn_s)))
            for row in _PARTITION
        ]
    return tuple(
        SignalSpec(
            name=name,
            subject=subject,
            scope=scope,
            unit=unit,
            counter=counter,
            source=_source(name),
            refresh_period_s=period_s,
        )
        for subject, scope, (name, unit, counter, period_s) in rows
    )


def _source(name: str) -> str:
    if name.endswith("active_ratio"):
        return "nvml gpm"
    if "memory_used" in name:
        return "nvml memory info"
    return "nvml margin temperature" if "headroom" in name else "nvml field values"


class _Columns:
    """The last readings of all slots, as the sink takes them."""

    def __init__(self, count: int) -> None:
        self.values = array("d", [0.0]) * count
        self.times_s = array("d", [math.nan]) * count
        self.silent = dict.fromkeys(range(count), Quality.NOT_SUPPORTED)

    def put(self, sink: SignalSink) -> None:
        """Put every slot."""
        sink.put_many(0, self.values, source_time_s=self.times_s)
        for slot, quality in self.silent.items():
            sink.put(slot, self.values[slot], quality)


class _Cell:
    """The last reading of one slot."""

    __slots__ = ("_columns", "_slot")

    def __init__(self, columns: _Columns, slot: int) -> None:
        self._columns, self._slot = columns, slot

    def set(self, value: float | None, now_s: float) -> None:
        """Store a value, or that the source does not tell it."""
        columns, slot = self._columns, self._slot
        if value is None:
            columns.silent[slot] = Quality.NOT_SUPPORTED
            return
        columns.values[slot], columns.times_s[slot] = value, now_s
        columns.silent.pop(slot, None)

    def lose(self, quality: Quality) -> None:
        """Store that there is no value now."""
        self._columns.silent[self._slot] = quality


class _Seat:
    """One partition's slots and what is held to read them."""

    def __init__(self, partition: Partition, cells: list[_Cell]) -> None:
        self.partition = partition
        self.cells = cells
        self.uuids = frozenset(partition.incarnation.split("+"))
        self.instance = int(partition.locator["gi"]) if "gi" in partition.locator else None
        self.mig: Any = None
        self.older: Any = None
        self.newer: Any = None
        self.newer_s = 0.0
        self.checked_s = 0.0  # when the handle was last seen to mean this instance
        self.gone = False


class _Turn:
    """When the memory of a partition, or of the GPU, is to be read next."""

    def __init__(self, seat: _Seat | None) -> None:
        self.seat = seat
        self.due_s = 0.0

    def absent(self) -> bool:
        """Whether there is nothing to read of its own."""
        return self.seat is not None and (self.seat.gone or self.seat.mig is None)


class Sampler:
    """Fills the slots of one GPU. Used by one thread at a time."""

    def __init__(
        self,
        gpu: Gpu,
        partitions: tuple[Partition, ...],
        calls_max: int = CALLS_MAX,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        """Announce the columns; nothing is opened before `fill`.

        Args:
            gpu: Whose slots these are.
            partitions: Its partitions, in the order of their slots.
            calls_max: The most vendor calls of one tick.
            clock: Boot time in seconds.
        """
        self._gpu, self._calls_max, self._clock = gpu, calls_max, clock
        self.specs = specs_of(gpu, partitions, calls_max)
        self._columns = _Columns(len(self.specs))
        cells = [_Cell(self._columns, slot) for slot in range(len(self.specs))]
        device, width = len(_DEVICE), len(_PARTITION)
        self._device = cells[:device]
        self._seats = [
            _Seat(partition, cells[device + n * width : device + (n + 1) * width])
            for n, partition in enumerate(partitions)
        ]
        self._turns = [_Turn(None), *map(_Turn, self._seats)]
        self._turn = 0  # whose memory is asked for next
        self._gpm_turn = 0
        self._slow_due_s = 0.0
        self._getters = 0  # calls that an old driver needs beside the batch
        self._memory_version: int | None = MEMORY_V2
        self._bound = False
        self._metrics: Any = None
        self._clock_shift_s = time.time() - clock()
        self._headroom: Callable[[], float | None] | None = None

    def fill(self, sink: SignalSink) -> None:
        """Read what is due and put every slot.

        Raises:
            NvmlCallError: The GPU has gone.
        """
        now_s = self._clock()
        first = not self._bound
        if first:
            self._bind()
        left = self._calls_max - 1 - self._getters
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + SLOW_PERIOD_S
            self._clock_shift_s = time.time() - self._clock()
            self._fields(FAST + SLOW, now_s)
            self._device[_HEADROOM].set(self._read_headroom(), now_s)
            left -= 2
        else:
            self._fields(FAST, now_s)
        if first:  # nothing was read yet: what has no turn now would seem not to be supported
            for _ in self._turns:
                self._memory_turn(now_s, left)
        left = self._memory_turn(now_s, left, late_s=MEMORY_PERIOD_S)
        if self._gpu.identity().gpm:
            left = self._activity_turns(now_s, left)
        while left >= MEMORY_CALLS and (rest := self._memory_turn(now_s, left)) < left:
            left = rest
        self._columns.put(sink)

    def _memory_turn(self, now_s: float, left: int, late_s: float = 0.0) -> int:
        """Read the used bytes of the next one that is due; return how many calls are left.

        With `late_s` an instance is due only so much later: its turn of activity reads its memory
        with one call less.
        """
        for _ in self._turns:
            turn = self._turns[self._turn]
            self._turn = (self._turn + 1) % len(self._turns)
            due_s = turn.due_s if turn.seat is None else turn.due_s + late_s
            if now_s >= due_s and not turn.absent():
                turn.due_s = now_s + MEMORY_PERIOD_S
                return left - self._memory(turn.seat, now_s)
        return left

    def _activity_turns(self, now_s: float, left: int) -> int:
        """Compare activity of as many partitions as there are calls for; return what is left."""
        for _ in self._seats:
            if left < GPM_CALLS:
                break
            number = self._gpm_turn
            seat, turn = self._seats[number], self._turns[number + 1]
            self._gpm_turn = (number + 1) % len(self._seats)
            if not self._activity(seat, now_s):
                continue
            left -= GPM_CALLS
            if left and now_s >= turn.due_s and not turn.absent():
                turn.due_s = now_s + MEMORY_PERIOD_S
                self._memory(seat, now_s)  # just checked, so one call
                left -= 1
        return left

    # --- handles ---

    def _bind(self) -> None:
        pieces = {}
        if any(seat.instance is not None for seat in self._seats):
            pieces = {piece.incarnation: piece for piece in self._gpu.pieces() if piece.compute}
        for seat in self._seats:
            if seat.instance is None:
                continue
            piece = pieces.get(seat.partition.incarnation)
            if piece is None:
                self._gone(seat)
            else:
                seat.mig = self._gpu.mig_handle(piece)
        if self._gpu.identity().gpm:
            for seat in self._seats:
                if not seat.gone:
                    seat.older = self._gpu.nvml.maybe("nvmlGpmSampleAlloc")
                    seat.newer = self._gpu.nvml.maybe("nvmlGpmSampleAlloc")
        self._bound = True

    def handles(self) -> int:
        """Return how many vendor handles are held."""
        return sum(
            held is not None for seat in self._seats for held in (seat.mig, seat.older, seat.newer)
        )

    def release(self) -> None:
        """Let go of every handle."""
        for seat in self._seats:
            self._let_go(seat)
        self._bound = False
        self._slow_due_s = 0.0
        for turn in self._turns:
            turn.due_s = 0.0

    def _let_go(self, seat: _Seat) -> None:
        seat.mig = None
        for sample in (seat.older, seat.newer):
            if sample is not None:
                try:
                    self._gpu.nvml.call("nvmlGpmSampleFree", sample)
                except NvmlCallError:
                    continue  # the library was shut down: nothing is left to free
        seat.older = seat.newer = None
        seat.newer_s = 0.0

    def _gone(self, seat: _Seat) -> None:
        seat.gone = True
        self._let_go(seat)
        for cell in seat.cells:
            cell.lose(Quality.STALE)

    # --- readings ---

    def _fields(self, fields: tuple[tuple[int, int], ...], now_s: float) -> None:
        values = self._gpu.maybe("nvmlDeviceGetFieldValues", fields)
        found: dict[int, float] = {}
        source_s = now_s
        for value in values or ():
            if value.nvmlReturn != 0:
                continue
            number = field_number(value)
            if number is not None:
                found[int(value.fieldId)] = number
                source_s = self._source_time(int(value.timestamp), now_s)
        self._fast(found, source_s)
        if fields is not FAST:
            self._slow(found, source_s)

    def _source_time(self, stamp_us: int, now_s: float) -> float:
        """Return a field's time stamp (wall, microseconds) on the boot clock."""
        source_s = stamp_us / 1e6 - self._clock_shift_s
        return source_s if abs(now_s - source_s) < FIELD_TIME_MAX_S else now_s

    def _fast(self, found: dict[int, float], source_s: float) -> None:
        energy_mj, power_mw = found.get(ENERGY), found.get(POWER)
        if energy_mj is None:
            energy_mj = self._gpu.maybe("nvmlDeviceGetTotalEnergyConsumption")
        if power_mw is None:
            power_mw = self._gpu.maybe("nvmlDeviceGetPowerUsage")
        self._getters = (ENERGY not in found) + (POWER not in found)
        throttles = [found[field] for field in THROTTLES if field in found]
        cells = self._device
        cells[_ENERGY].set(None if energy_mj is None else energy_mj / 1e3, source_s)
        cells[_POWER].set(None if power_mw is None else power_mw / 1e3, source_s)
        cells[_THROTTLE].set(sum(throttles) / 1e9 if throttles else None, source_s)

    def _slow(self, found: dict[int, float], source_s: float) -> None:
        cells = self._device
        corrected = found.get(ECC_CORRECTED, found.get(ECC_CORRECTED_AGGREGATE))
        uncorrected = found.get(ECC_UNCORRECTED, found.get(ECC_UNCORRECTED_AGGREGATE))
        cells[_ECC_C].set(corrected, source_s)
        cells[_ECC_U].set(uncorrected, source_s)
        cells[_REPLAY].set(found.get(PCIE_REPLAY), source_s)
        cells[_ACTION].set(found.get(RECOVERY), source_s)
        limit_mw = found.get(POWER_LIMIT)
        cells[_CAP].set(limit_mw / 1e3 if limit_mw else None, source_s)
        for slot, field in ((_SENT, NVLINK_SENT), (_RECEIVED, NVLINK_RECEIVED)):
            cells[slot].set(found[field] * KIB if field in found else None, source_s)
        errors = [found[field] for field in NVLINK_ERRORS if field in found]
        cells[_LINK_ERRORS].set(sum(errors) if errors else None, source_s)

    def _read_headroom(self) -> float | None:
        if self._headroom is None:
            self._headroom = self._margin
        value = self._headroom()
        if value is None and self._headroom == self._margin:
            self._headroom = self._below_threshold
            value = self._headroom()
        return value

    def _margin(self) -> float | None:
        margin = self._gpu.maybe("nvmlDeviceGetMarginTemperature")
        return None if margin is None else float(margin)

    def _below_threshold(self) -> float | None:
        """Return the distance to the slow-down temperature, as older drivers tell it."""
        temperature = self._gpu.maybe("nvmlDeviceGetTemperature", 0)
        limit = self._gpu.maybe("nvmlDeviceGetTemperatureThreshold", 1)
        if temperature is None or limit is None or temperature > 255:
            return None
        return float(limit) - float(temperature)

    def _memory(self, seat: _Seat | None, now_s: float) -> int:
        """Read used bytes of the GPU (no seat) or of an instance; return how many calls it took."""
        if seat is not None:
            self._memory_of(seat, now_s)
            return MEMORY_CALLS
        used = self._used(None)
        self._device[_MEMORY].set(used, now_s)
        for whole in self._seats:
            if whole.instance is None and not whole.gone:
                whole.cells[_USED].set(used, now_s)
        return 1

    def _memory_of(self, seat: _Seat, now_s: float) -> None:
        try:
            if not self._still_there(seat, now_s):
                return
            seat.cells[_USED].set(self._used(seat.mig), now_s)
        except NvmlCallError as failure:
            if failure.code in LOST:
                raise
            if failure.code in GONE:
                self._gone(seat)
            else:
                seat.cells[_USED].lose(_quality(failure))

    def _still_there(self, seat: _Seat, now_s: float) -> bool:
        """Whether the handle still means this instance, and not one made after it."""
        if now_s - seat.checked_s < CHECK_S:
            return True
        uuid = self._gpu.nvml.call("nvmlDeviceGetUUID", seat.mig)
        if uuid in seat.uuids:
            seat.checked_s = now_s
            return True
        self._gone(seat)
        return False

    def _used(self, handle: Any) -> float | None:
        """Return used bytes; without what the driver keeps for itself where it tells that apart."""
        nvml = self._gpu.nvml
        target = self._gpu.handle() if handle is None else handle
        memory = None
        if self._memory_version is not None:
            memory = nvml.maybe("nvmlDeviceGetMemoryInfo", target, version=self._memory_version)
            if memory is None:
                self._memory_version = None  # an old driver: not asked again
        if memory is None:
            memory = nvml.maybe("nvmlDeviceGetMemoryInfo", target)
        return None if memory is None else float(memory.used)

    def _activity(self, seat: _Seat, now_s: float) -> bool:
        """Take a GPM sample if the last one is old enough, and compare the two; whether it was."""
        if seat.gone or seat.older is None or seat.newer is None:
            return False
        if now_s - seat.newer_s < GPM_PERIOD_S:
            return False
        self._take_activity(seat, now_s)
        return True

    def _take_activity(self, seat: _Seat, now_s: float) -> None:
        try:
            if seat.mig is not None and not self._still_there(seat, now_s):
                return
            sample = seat.older
            if seat.instance is None:
                self._gpu.call("nvmlGpmSampleGet", sample)
            else:
                self._gpu.call("nvmlGpmMigSampleGet", seat.instance, sample)
            seat.older, seat.newer = seat.newer, sample
            before_s, seat.newer_s = seat.newer_s, now_s
            if before_s:
                self._compare(seat, now_s)
        except NvmlCallError as failure:
            if failure.code in LOST:
                raise
            if failure.code in GONE:
                self._gone(seat)
                return
            for slot in (_ACTIVE, _BANDWIDTH):
                seat.cells[slot].lose(_quality(failure))

    def _compare(self, seat: _Seat, now_s: float) -> None:
        module = self._gpu.nvml.module
        request = self._metrics
        if request is None:
            request = self._metrics = module.c_nvmlGpmMetricsGet_t()
        request.version = module.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = 2
        request.sample1, request.sample2 = seat.older, seat.newer
        request.metrics[0].metricId = GPM_SM_UTIL
        request.metrics[1].metricId = GPM_DRAM_BW_UTIL
        self._gpu.nvml.call("nvmlGpmMetricsGet", request)
        for position, slot in ((0, _ACTIVE), (1, _BANDWIDTH)):
            metric = request.metrics[position]
            value = float(metric.value) / 100 if metric.nvmlReturn == 0 else None
            if value is not None and not value >= 0:  # NaN too
                value = None
            seat.cells[slot].set(None if value is None else min(1.0, value), now_s)


def _quality(failure: NvmlCallError) -> Quality:
    if failure.code == NO_PERMISSION:
        return Quality.NOT_PERMITTED
    return Quality.NOT_SUPPORTED if failure.code in ABSENT else Quality.STALE


def used_bytes(gpu: Gpu) -> int | None:
    """Return what processes use of a GPU; None where the driver cannot tell it from its reserve."""
    memory = gpu.maybe("nvmlDeviceGetMemoryInfo", version=MEMORY_V2)
    return None if memory is None else int(memory.used)
