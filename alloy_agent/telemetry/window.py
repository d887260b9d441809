"""Quantiles over a true sliding window, in bounded memory and with a bounded error.

A window cuts its span into slices and the signal's range into 256 equal bins. An open slice keeps
the bin of each sample, one byte a sample; a closed one keeps the bins that occur and how often. A
slice that has slid out of the span is taken off the total. What is closed of a minute is added to
the quarter hour, so a sample is counted once.

Rules that stay true in here:

* A sample is counted once: one whose source time is not newer than the last is a repetition.
* A quantile is off by at most half a bin, 0.2 % of the range, and the span by at most one slice.
* Under 80 % coverage there is no quantile: the reader gets None, never a guess.
* A window holds at most 65,535 samples in one bin: a quarter hour at 72 Hz; samples come ten times
  a second.
* Time is an argument, in seconds of the node's boot clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from alloy_agent.model import Value

BINS: Final = 256
SLICES: Final = 12
COVERAGE_MIN: Final = 0.8
MINUTE_S: Final = 60.0
QUARTER_S: Final = 900.0
NEVER: Final = float("-inf")
NOTHING: Final = bytes(2 * BINS)


class Quantiles(Value, frozen=True, kw_only=True):
    """What a window says: None where fewer samples came than `COVERAGE_MIN` of those expected."""

    span_s: float
    p05: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    count: int
    coverage_ratio: float


class Slice:
    """The samples of one stretch of time: `number` slices of this length after boot."""

    __slots__ = ("bins", "number", "packed")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bins = bytearray()  # one for each sample; empty once the slice is closed
        self.packed: array[int] | None = None  # bin, count, bin, count, ...

    def close(self) -> None:
        """Keep counts in the place of samples, where that is less."""
        counts = Counter(self.bins)
        if self.packed is None and len(counts) * 4 < len(self.bins):
            self.packed = array("H", [edge for pair in counts.items() for edge in pair])
            self.bins = bytearray()

    def counts(self) -> Sequence[tuple[int, int]]:
        """Return each bin that occurs, and how often."""
        if self.packed is None:
            return tuple(Counter(self.bins).items())
        return tuple(zip(self.packed[::2], self.packed[1::2], strict=True))


class Window:
    """One signal over one span. Values beyond `low` and `high` count at the edge."""

    __slots__ = (
        "_last_s",
        "_scale",
        "_slices",
        "_total",
        "high",
        "low",
        "samples",
        "slice_s",
        "span_s",
    )

    def __init__(self, span_s: float, low: float = 0.0, high: float = 1.0) -> None:
        self.span_s = span_s
        self.low, self.high = low, high
        self.slice_s = span_s / SLICES
        self.samples = 0
        self._scale = BINS / (high - low)
        self._total = array("H", NOTHING)
        self._slices: deque[Slice] = deque()
        self._last_s = NEVER

    def add(self, value: float, source_time_s: float) -> bool:
        """Count a value; return whether it was one that had not been counted yet."""
        return self.add_all((value,), (source_time_s,)) == 1

    def add_all(
        self,
        values: Sequence[float],
        times_s: Sequence[float],
        limit: float = 1.0,
        *,
        rising: bool = False,
    ) -> int:
        """Count values of these source times, oldest first; return how many were new.

        Args:
            values: As they were read; none is NaN.
            times_s: Of each value.
            limit: What a value is divided by before it is counted.
            rising: Each time is known to be newer than the one before.
        """
        if not values:
            return 0
        if times_s[0] <= self._last_s or not (rising or _rises(times_s)):
            values, times_s = _new(values, times_s, self._last_s)
            if not values:
                return 0
        self._last_s = times_s[-1]
        bins = self._binned(values, limit)
        first, last = int(times_s[0] // self.slice_s), int(times_s[-1] // self.slice_s)
        if first == last:
            self._slice(first).bins += bins
        else:
            for bin_, time_s in zip(bins, times_s, strict=True):
                self._slice(int(time_s // self.slice_s)).bins.append(bin_)
        total = self._total
        for bin_ in bins:
            total[bin_] += 1
        self.samples += len(bins)
        return len(bins)

    def _binned(self, values: Sequence[float], limit: float) -> bytes:
        """Return the bin of each value."""
        low, scale, top = self.low * limit, self._scale / limit, BINS - 1
        least, most = min(values), max(values)
        if least == most:
            bin_ = int((least - low) * scale)
            return bytes((min(top, max(0, bin_)),)) * len(values)
        if least >= low and (most - low) * scale < BINS:
            return bytes([int((value - low) * scale) for value in values])
        return bytes([min(top, max(0, int((value - low) * scale))) for value in values])

    def merge(self, from_: Slice, time_s: float) -> None:
        """Add a closed slice of another window of the same range, as of `time_s`."""
        slice_, total = self._slice(int(time_s // self.slice_s)), self._total
        for bin_, count in from_.counts():
            total[bin_] += count
            self.samples += count
            slice_.bins += bytes((bin_,)) * count

    def _slice(self, number: int) -> Slice:
        slices = self._slices
        if not slices or slices[-1].number < number:
            if slices:
                slices[-1].close()
            slices.append(Slice(number))
        return slices[-1]

    def slide(self, now_s: float) -> None:
        """Take off what has left the span."""
        first = int((now_s - self.span_s) // self.slice_s) + 1
        slices, total = self._slices, self._total
        while slices and slices[0].number < first:
            for bin_, count in slices.popleft().counts():
                total[bin_] -= count
                self.samples -= count

    def closed_before(self, now_s: float, after: int) -> tuple[Slice, ...]:
        """Return the slices behind number `after` that no sample can enter any more."""
        open_ = int(now_s // self.slice_s)
        if not self._slices or self._slices[0].number >= open_:
            return ()
        return tuple(s for s in self._slices if after < s.number < open_)

    def quantiles(self, now_s: float, period_s: float) -> Quantiles:
        """Return the quantiles as of now.

        Args:
            now_s: The boot clock.
            period_s: Time between two samples of the source, as measured.
        """
        self.slide(now_s)
        # The span covered is all whole slices and what the present one has had so far.
        begun_s = (int((now_s - self.span_s) // self.slice_s) + 1) * self.slice_s
        expected = max(1.0, (now_s - begun_s) / period_s)
        coverage = min(1.0, self.samples / expected)
        known = coverage >= COVERAGE_MIN and self.samples > 0
        sums = list(accumulate(self._total)) if known else []
        p05, p50, p95, p99 = (self._at(sums, q) if known else None for q in (0.05, 0.5, 0.95, 0.99))
        return Quantiles(
            span_s=self.span_s,
            p05=p05,
            p50=p50,
            p95=p95,
            p99=p99,
            count=self.samples,
            coverage_ratio=round(coverage, 4),
        )

    def _at(self, sums: list[int], ratio: float) -> float:
        """Return the middle of the bin that holds the sample of this rank."""
        rank = max(1, -int(-ratio * self.samples // 1))
        return self.low + (bisect_left(sums, rank) + 0.5) / self._scale


class Windows:
    """One signal over the last minute and the last quarter of an hour."""

    __slots__ = ("_merged", "minute", "period_s", "quarter")

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        self.minute = Window(MINUTE_S, low, high)
        self.quarter = Window(QUARTER_S, low, high)
        self.period_s = 0.0
        self._merged = -1

    def add(self, value: float, source_time_s: float) -> bool:
        """Count a value; return whether it was new."""
        return self.minute.add(value, source_time_s)

    def settle(self, now_s: float) -> None:
        """Move what is closed of the minute into the quarter hour; at least twice a minute."""
        for slice_ in self.minute.closed_before(now_s, self._merged):
            self._merged = slice_.number
            self.quarter.merge(slice_, slice_.number * self.minute.slice_s)
        self.minute.slide(now_s)
        self.quarter.slide(now_s)


def _rises(times_s: Sequence[float]) -> bool:
    """Whether each time is newer than the one before."""
    return all(map(float.__lt__, times_s, times_s[1:]))


def _new(
    values: Sequence[float], times_s: Sequence[float], last_s: float
) -> tuple[list[float], list[float]]:
    """Return what is newer than `last_s` and than all before it."""
    some_values, some_times = [], []
    for value, time_s in zip(values, times_s, strict=True):
        if time_s > last_s:
            last_s = time_s
            some_values.append(value)
            some_times.append(time_s)
    return some_values, some_times
