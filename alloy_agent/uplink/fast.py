"""One sample of the node as a Fast message, filled from columns without an object for a signal.

A plan is made once for each geometry: it knows for every column of the message which reading goes
into which row. A sample then gathers, scales and adds whole columns.

Rules that stay true in here:

* What has no value travels as its quality, never as a zero that could be taken for one.
* Ages are of the oldest value of a row; what has no value has no age.
* No number, however absurd, breaks a sample: what does not fit its field stops at the field's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter, or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from alloy_agent.model import Value
from alloy_agent.proto import agent_pb2 as pb

if TYPE_CHECKING:
    from alloy_agent.model import PartitionId

MIB: Final = 1024 * 1024
INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
UINT32_MAX: Final = 2**32 - 1
VALUE, NOT_SUPPORTED, NOT_PERMITTED, STALE = range(4)  # as on the wire
NAN: Final = math.nan


class Column(Value, frozen=True, kw_only=True):
    """Where a signal goes: field, factor from the signal's unit, and whether to round up."""

    field: str
    factor: float
    up: bool = False
    low: int = 0
    high: int = UINT32_MAX


PARTITION_COLUMNS: Final = {  # in the order of the quality bits
    "alloy_partition_compute_active_ratio": Column(field="compute_active_e4", factor=1e4),
    "alloy_partition_memory_used_bytes": Column(field="memory_used_mib", factor=1 / MIB, up=True),
    "alloy_partition_memory_bandwidth_active_ratio": Column(
        field="memory_bandwidth_active_e4", factor=1e4
    ),
    "alloy_partition_headroom_p95_ratio": Column(field="headroom_p95_e4", factor=1e4),
    "alloy_partition_link_active_ratio": Column(field="link_active_e4", factor=1e4),
    "alloy_partition_throttle_bits": Column(field="throttle", factor=1.0),
    "alloy_partition_errors": Column(field="errors", factor=1.0),
    "alloy_partition_rate_ratio": Column(field="rate_e3", factor=1e3),
}
DEVICE_COLUMNS: Final = {
    "alloy_device_temperature_headroom_celsius": Column(
        field="temperature_headroom_dk", factor=10.0, low=INT32_MIN, high=INT32_MAX
    ),
    "alloy_device_power_watts": Column(field="power_w", factor=1.0),
    "alloy_device_throttle_bits": Column(field="throttle", factor=1.0),
    "alloy_device_errors": Column(field="errors", factor=1.0),
    "alloy_device_memory_used_bytes": Column(field="memory_used_mib", factor=1 / MIB, up=True),
}


class GateRow(Value, frozen=True, kw_only=True):
    """The gates of one partition or device together: open, closed, or unknown (None), and why."""

    open: bool | None
    gate: str = ""
    reason: str = ""


class Readings(NamedTuple):
    """What was read, in columns. The places are those that a plan was made for."""

    values: Sequence[float]  # NaN: none
    times_s: Sequence[float]  # of each value, on the boot clock
    codes: bytes  # quality of each, as on the wire; what is no number there is NOT_SUPPORTED


Gather = Callable[[Sequence[Any]], Sequence[Any]]


class _Place(NamedTuple):
    """A column of a block, and where its rows are read."""

    column: Column
    shift: int  # of its quality bits
    gather: Gather


class _Other(NamedTuple):
    """A signal that has no column of its own."""

    name: str
    subjects: tuple[str, ...]
    gather: Gather


class FastPlan:
    """Fills samples of one geometry.

    Args:
        signals: Subject and name of each reading, by its place.
        partitions: Rows, in the order of the PartitionState of that revision.
        devices: Rows, in the order of the Inventory of that revision.
    """

    def __init__(
        self,
        signals: Sequence[tuple[str, str]],
        partitions: Sequence[PartitionId],
        devices: Sequence[str],
    ) -> None:
        self._count = len(signals)
        by_name: dict[str, dict[str, int]] = {}
        for place, (subject, name) in enumerate(signals):
            by_name.setdefault(name, {})[subject] = place
        self._rows = (tuple(map(str, partitions)), tuple(devices))
        self._places = tuple(
            self._placed(rows, columns, by_name)
            for rows, columns in zip(self._rows, (PARTITION_COLUMNS, DEVICE_COLUMNS), strict=True)
        )
        self._others = tuple(
            _Other(name, tuple(sorted(found)), _gather([found[key] for key in sorted(found)]))
            for name, found in sorted(by_name.items())
            if name not in PARTITION_COLUMNS and name not in DEVICE_COLUMNS
        )
        self._judged: Mapping[str, GateRow] | None = None
        self._gates: tuple[list[Any], ...] = ([], [])
        self._reasons: list[pb.GateReason] = []

    def _placed(
        self,
        rows: Sequence[str],
        columns: Mapping[str, Column],
        by_name: Mapping[str, Mapping[str, int]],
    ) -> tuple[_Place, ...]:
        """Return the columns that anybody has; a row without a reading takes the one behind all."""
        return tuple(
            _Place(column, 2 * number, _gather([found.get(row, self._count) for row in rows]))
            for number, (name, column) in enumerate(columns.items())
            if (found := by_name.get(name))
        )

    def message(
        self,
        readings: Readings,
        gates: Mapping[str, GateRow],
        now_s: float,
        revisions: tuple[int, int],
        sample: int,
    ) -> pb.Fast:
        """Return one sample of the node.

        Args:
            readings: What was read.
            gates: By partition or device id; absent is unknown. The same object is the same gates.
            now_s: The boot clock, for ages.
            revisions: Of PartitionState and Inventory.
            sample: Number of the sample; grows.
        """
        message = pb.Fast(
            partitions_revision=revisions[0], inventory_revision=revisions[1], sample=sample
        )
        # Behind all readings stands the one of a row that has none.
        whole = Readings(
            [*readings.values, NAN],
            [*readings.times_s, now_s],
            readings.codes + bytes((NOT_SUPPORTED,)),
        )
        self._turn_to(gates)
        blocks: tuple[Any, ...] = (message.partitions, message.devices)
        for block, rows, places, states in zip(
            blocks,
            self._rows,
            self._places,
            self._gates,
            strict=True,
        ):
            _fill(block, len(rows), places, whole, now_s)
            block.gate.extend(states)
        message.reasons.extend(self._reasons)
        for other in self._others:
            _add_other(message, other, whole, now_s)
        return message

    def _turn_to(self, gates: Mapping[str, GateRow]) -> None:
        """Work out what is said of gates, where they are others than those of the last sample."""
        if gates is self._judged:
            return
        self._judged = gates
        states: tuple[list[Any], ...] = ([], [])
        self._reasons = []
        for number, rows in enumerate(self._rows):
            if not any(subject in gates for subject in rows):
                continue
            for row, subject in enumerate(rows):
                one = gates.get(subject, UNJUDGED)
                states[number].append(STATES[one.open])
                if one.open is not True:
                    reason = pb.GateReason(
                        device=bool(number), row=row, gate=one.gate, reason=one.reason
                    )
                    self._reasons.append(reason)
        self._gates = states


UNJUDGED: Final = GateRow(open=None, reason="not judged yet")
STATES: Final = {True: pb.GATE_OPEN, False: pb.GATE_CLOSED, None: pb.GATE_UNKNOWN}


def _gather(places: Sequence[int]) -> Gather:
    """Return what takes the items at these places out of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: [items[place] for place in places]


def _fill(
    block: Any, rows: int, places: Iterable[_Place], readings: Readings, now_s: float
) -> None:
    """Put every column into a block, then the ages and qualities of its rows."""
    oldest_s: Iterable[float] = [now_s] * rows
    quality: Iterable[int] = [0] * rows
    any_missing = False
    for column, shift, gather in places:
        values, times_s = gather(readings.values), gather(readings.times_s)
        codes = gather(readings.codes)
        if any(codes) or not math.isfinite(sum(values)):
            any_missing = True
            numbers, states, times_s = _one_by_one(column, values, codes, times_s, now_s)
            quality = list(map(or_, quality, [state << shift for state in states]))
        else:
            numbers = _scaled(column, values)
        getattr(block, column.field).extend(numbers)
        oldest_s = list(map(min, oldest_s, times_s))
    if rows:
        block.age_ms.extend(ages_ms(oldest_s, now_s))
    if any_missing and any(quality):
        block.quality.extend(quality)


def _scaled(column: Column, values: Sequence[float]) -> list[int]:
    """Return finite values as the numbers of a column."""
    factor, low, high = column.factor, column.low, column.high
    if values and not (low <= min(values) * factor and max(values) * factor <= high):
        values = [min(high / factor, max(low / factor, value)) for value in values]
    if column.up:
        return [math.ceil(value * factor) for value in values]
    return [round(value * factor) for value in values]


def _one_by_one(
    column: Column,
    values: Sequence[float],
    codes: Sequence[int],
    times_s: Sequence[float],
    now_s: float,
) -> tuple[list[int], list[int], list[float]]:
    """Return numbers, qualities and times of a column in which something is missing."""
    numbers, states, found_s = [], [], []
    for value, code, time_s in zip(values, codes, times_s, strict=True):
        state = code if code < 4 else NOT_SUPPORTED
        if math.isfinite(value):
            numbers += _scaled(column, (value,))
        else:
            numbers.append(0)
            state = NOT_PERMITTED if state == NOT_PERMITTED else NOT_SUPPORTED
        states.append(state)
        found_s.append(time_s if state in {VALUE, STALE} else now_s)
    return numbers, states, found_s


def ages_ms(times_s: Iterable[float], now_s: float) -> list[int]:
    """Return how old times are, in whole milliseconds; 0 where one is ahead."""
    return [min(UINT32_MAX, max(0, round((now_s - time_s) * 1e3))) for time_s in times_s]


def _add_other(message: pb.Fast, other: _Other, readings: Readings, now_s: float) -> None:
    """Add a column for a signal that has none of its own yet."""
    values, codes = other.gather(readings.values), other.gather(readings.codes)
    missing = [not math.isfinite(value) for value in values]
    message.others.add(
        signal=other.name,
        subjects=other.subjects,
        values=[0.0 if gone else value for gone, value in zip(missing, values, strict=True)],
        age_ms=ages_ms(other.gather(readings.times_s), now_s),
        quality=[
            code if code < 4 and not (gone and code != NOT_PERMITTED) else NOT_SUPPORTED
            for gone, code in zip(missing, codes, strict=True)
        ],
    )
