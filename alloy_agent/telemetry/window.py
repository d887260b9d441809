"""Quantiles over a true sliding window, in bounded memory and with a bounded error.

A window cuts its span into slices and each slice into 256 equal bins of the signal's range. Adding
a value counts it in its slice; a slice that has slid out of the span is taken off the total. What
is closed of a minute is added to the quarter hour, so a sample is counted once.

Rules that stay true in here:

* A sample is counted once: one whose source time is not newer than the last is a repetition.
* A quantile is off by at most half a bin, 0.2 % of the range, and the span by at most one slice.
* Under 80 % coverage there is no quantile: the reader gets None, never a guess.
* A slice holds at most 65,535 samples of one bin: 75 s at 870 Hz, far above any sampling rate.
* Time is an argument, in seconds of the node's boot clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import Final

from alloy_agent.model import Value

BINS: Final = 256
SLICES: Final = 12
COVERAGE_MIN: Final = 0.8
MINUTE_S: Final = 60.0
QUARTER_S: Final = 900.0
NEVER: Final = float("-inf")


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
    """The counts of one stretch of time."""

    __slots__ = ("counts", "number", "samples")

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts = array("H", bytes(2 * BINS))
        self.samples = 0


class Window:
    """One signal over one span. Values beyond `low` and `high` count at the edge."""

    def __init__(self, span_s: float, low: float = 0.0, high: float = 1.0) -> None:
        self.span_s = span_s
        self.low, self.high = low, high
        self.slice_s = span_s / SLICES
        self.samples = 0
        self._scale = BINS / (high - low)
        self._total = array("I", bytes(4 * BINS))
        self._slices: deque[Slice] = deque()
        self._last_s = NEVER

    def add(self, value: float, source_time_s: float) -> bool:
        """Count a value; return whether it was one that had not been counted yet."""
        if source_time_s <= self._last_s:
            return False
        self._last_s = source_time_s
        bin_ = min(BINS - 1, max(0, int((value - self.low) * self._scale)))
        slice_ = self._slice(source_time_s)
        slice_.counts[bin_] += 1
        slice_.samples += 1
        self._total[bin_] += 1
        self.samples += 1
        return True

    def add_all(self, samples: Sequence[tuple[float, float]], limit: float = 1.0) -> None:
        """Count samples, each as (source time, value), as ratios of `limit`; oldest first."""
        last_s, total = self._last_s, self._total
        low, scale, top = self.low, self._scale, BINS - 1
        slice_: Slice | None = None
        number, new = -1, 0
        for time_s, value in samples:
            if time_s <= last_s:
                continue
            last_s = time_s
            if slice_ is None or time_s // self.slice_s != number:
                slice_ = self._slice(time_s)
                number = slice_.number
            bin_ = int((value / limit - low) * scale)
            bin_ = top if bin_ > top else max(bin_, 0)
            slice_.counts[bin_] += 1
            slice_.samples += 1
            total[bin_] += 1
            new += 1
        self._last_s = last_s
        self.samples += new

    def merge(self, counts: array[int], samples: int, time_s: float) -> None:
        """Add the counts of another window of the same range, as of `time_s`."""
        slice_ = self._slice(time_s)
        slice_.counts = array("H", map(add, slice_.counts, counts))
        slice_.samples += samples
        self._total = array("I", map(add, self._total, counts))
        self.samples += samples

    def _slice(self, time_s: float) -> Slice:
        number = int(time_s // self.slice_s)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(Slice(number))
        return self._slices[-1]

    def slide(self, now_s: float) -> None:
        """Take off what has left the span."""
        first = int((now_s - self.span_s) // self.slice_s) + 1
        while self._slices and self._slices[0].number < first:
            old = self._slices.popleft()
            self._total = array("I", map(sub, self._total, old.counts))
            self.samples -= old.samples

    def closed_before(self, now_s: float, after: int) -> tuple[Slice, ...]:
        """Return the slices behind number `after` that no sample can enter any more."""
        open_ = int(now_s // self.slice_s)
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
            self.quarter.merge(slice_.counts, slice_.samples, slice_.number * self.minute.slice_s)
        self.minute.slide(now_s)
        self.quarter.slide(now_s)
