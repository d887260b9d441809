"""Quantiles over a true sliding window, in bounded memory and with a bounded error.

A window cuts its span into slices and the signal's range into 256 equal bins. A slice of the minute
keeps the bin of each sample, one byte a sample, and these are counted when somebody asks. What is
closed of a minute is added to the quarter hour, so a sample is counted once; a slice of the quarter
hour keeps the bins that occur and how often, and what has slid out of the span is taken off the
total.

Rules that stay true in here:

* A sample is counted once: one whose source time is not newer than the last is a repetition.
* A quantile is off by at most half a bin, 0.2 % of the range, and the span by at most one slice.
* Under 80 % coverage there is no quantile: the reader gets None, never a guess.
* A quarter hour holds at most 65,535 samples in one bin, that is 72 a second; they come ten times
  a second.
* Time is an argument, in seconds of the node's boot clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
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
EVERY_BIN: Final = bytes(range(BINS))


class Quantiles(Value, frozen=True, kw_only=True):
    """What a window says: None where fewer samples came than `COVERAGE_MIN` of those expected."""

    span_s: float
    p05: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    count: int
    coverage_ratio: float


class _Span:
    """What windows of any kind know: their range, their slices' length, how many samples."""

    __slots__ = ("_scale", "high", "low", "samples", "slice_s", "span_s")

    def __init__(self, span_s: float, low: float, high: float) -> None:
        self.span_s = span_s
        self.low, self.high = low, high
        self.slice_s = span_s / SLICES
        self.samples = 0
        self._scale = BINS / (high - low)

    def first_slice(self, now_s: float) -> int:
        """Return the number of the first slice that is within the span."""
        return int((now_s - self.span_s) // self.slice_s) + 1

    def coverage(self, now_s: float, period_s: float) -> float:
        """Return samples counted over samples expected, at most 1, once the window has slid."""
        # The span covered is all whole slices and what the present one has had so far.
        expected = max(1.0, (now_s - self.first_slice(now_s) * self.slice_s) / period_s)
        return min(1.0, self.samples / expected)

    def middle(self, bin_: int) -> float:
        """Return the middle of a bin."""
        return self.low + (bin_ + 0.5) / self._scale

    def rank(self, ratio: float) -> int:
        """Return which sample in order, from 1, `ratio` of all do not exceed."""
        return max(1, -int(-ratio * self.samples // 1))

    def told(self, coverage: float, at: Callable[[int], int]) -> Quantiles:
        """Return quantiles; `at` gives the bin of a rank, and is asked where that is known."""
        known = coverage >= COVERAGE_MIN and self.samples > 0
        p05, p50, p95, p99 = (
            self.middle(at(self.rank(ratio))) if known else None
            for ratio in (0.05, 0.5, 0.95, 0.99)
        )
        return Quantiles(
            span_s=self.span_s,
            p05=p05,
            p50=p50,
            p95=p95,
            p99=p99,
            count=self.samples,
            coverage_ratio=round(coverage, 4),
        )


class Slice:
    """The bins of the samples of one stretch of time, the `number`th of its length after boot."""

    __slots__ = ("bins", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bins = bytearray()


class Window(_Span):
    """One signal over one short span. Values beyond `low` and `high` count at the edge."""

    __slots__ = ("_guess", "_last_s", "_slices")

    def __init__(self, span_s: float, low: float = 0.0, high: float = 1.0) -> None:
        super().__init__(span_s, low, high)
        self._slices: deque[Slice] = deque()
        self._last_s = NEVER
        self._guess = 0

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
        last, begun = int(times_s[-1] // self.slice_s), 0
        while (number := int(times_s[begun] // self.slice_s)) != last:
            end = bisect_left(times_s, (number + 1) * self.slice_s, begun)
            self._slice(number).bins += bins[begun:end]
            begun = end
        self._slice(last).bins += bins[begun:]
        self.samples += len(bins)
        return len(bins)

    def _binned(self, values: Sequence[float], limit: float) -> bytes:
        """Return the bin of each value."""
        low, scale, top = self.low * limit, self._scale / limit, BINS - 1
        least, most = min(values), max(values)
        if least == most:
            bin_ = int((least - low) * scale)
            return bytes((min(top, max(0, bin_)),)) * len(values)
        if not low and least >= 0.0 and most * scale < BINS:
            return bytes(map(int, map(scale.__mul__, values)))
        return bytes([min(top, max(0, int((value - low) * scale))) for value in values])

    def _slice(self, number: int) -> Slice:
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(Slice(number))
        return self._slices[-1]

    def slide(self, now_s: float) -> None:
        """Take off what has left the span."""
        first, slices = self.first_slice(now_s), self._slices
        while slices and slices[0].number < first:
            self.samples -= len(slices.popleft().bins)

    def closed_before(self, now_s: float, after: int) -> tuple[Slice, ...]:
        """Return the slices behind number `after` that no sample can enter any more."""
        open_ = int(now_s // self.slice_s)
        found = []
        for slice_ in reversed(self._slices):
            if slice_.number <= after:
                break
            if slice_.number < open_:
                found.append(slice_)
        return tuple(reversed(found))

    def _at(self, bins: bytes, rank: int) -> int:
        """Return the bin of a rank: the first up to which, itself with it, so many samples are.

        Where it was the last time is looked first, since it hardly ever moves.
        """
        most, guess = len(bins) - rank, self._guess
        low, high = 0, BINS - 1
        if len(bins.translate(None, EVERY_BIN[: guess + 1])) <= most:
            high = guess
            if not guess or len(bins.translate(None, EVERY_BIN[:guess])) > most:
                return guess
        else:
            low = guess + 1
        while low < high:
            middle = (low + high) // 2
            if len(bins.translate(None, EVERY_BIN[: middle + 1])) <= most:
                high = middle
            else:
                low = middle + 1
        self._guess = low
        return low

    def quantiles(self, now_s: float, period_s: float) -> Quantiles:
        """Return the quantiles as of now.

        Args:
            now_s: The boot clock.
            period_s: Time between two samples of the source, as measured.
        """
        self.slide(now_s)
        bins = b"".join([slice_.bins for slice_ in self._slices])
        return self.told(self.coverage(now_s, period_s), lambda rank: self._at(bins, rank))

    def level(self, now_s: float, period_s: float, ratio: float) -> float | None:
        """Return one quantile; None where it is not known."""
        self.slide(now_s)
        if not self.samples or self.coverage(now_s, period_s) < COVERAGE_MIN:
            return None
        bins = b"".join([slice_.bins for slice_ in self._slices])
        return self.middle(self._at(bins, self.rank(ratio)))


class Tally(_Span):
    """One signal over one long span, made of the slices of a short one."""

    __slots__ = ("_open", "_packed", "_total")

    def __init__(self, span_s: float, low: float = 0.0, high: float = 1.0) -> None:
        super().__init__(span_s, low, high)
        self._total = array("H", NOTHING)
        self._open: tuple[int, dict[int, int]] = (-1, {})
        self._packed: deque[tuple[int, array[int]]] = deque()  # bin, count, bin, count, ...

    def merge(self, bins: bytes | bytearray, time_s: float) -> None:
        """Add the bins of a closed slice of a window of the same range, as of `time_s`."""
        number = int(time_s // self.slice_s)
        if number > self._open[0]:
            if self._open[1]:
                pairs = [edge for pair in self._open[1].items() for edge in pair]
                self._packed.append((self._open[0], array("H", pairs)))
            self._open = (number, {})
        total, open_ = self._total, self._open[1]
        for bin_, count in Counter(bins).items():
            total[bin_] += count
            open_[bin_] = open_.get(bin_, 0) + count
        self.samples += len(bins)

    def slide(self, now_s: float) -> None:
        """Take off what has left the span."""
        first, packed, total = self.first_slice(now_s), self._packed, self._total
        while packed and packed[0][0] < first:
            _, pairs = packed.popleft()
            for bin_, count in zip(pairs[::2], pairs[1::2], strict=True):
                total[bin_] -= count
                self.samples -= count
        if self._open[1] and self._open[0] < first:  # nothing has come for the whole span
            self._total, self.samples, self._open = array("H", NOTHING), 0, (-1, {})

    def quantiles(self, now_s: float, period_s: float) -> Quantiles:
        """Return the quantiles as of now; see `Window.quantiles`."""
        self.slide(now_s)
        sums = list(accumulate(self._total))
        return self.told(self.coverage(now_s, period_s), lambda rank: bisect_left(sums, rank))


class Windows:
    """One signal over the last minute and the last quarter of an hour."""

    __slots__ = ("_merged", "minute", "period_s", "quarter")

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        self.minute = Window(MINUTE_S, low, high)
        self.quarter = Tally(QUARTER_S, low, high)
        self.period_s = 0.0
        self._merged = -1

    def add(self, value: float, source_time_s: float) -> bool:
        """Count a value; return whether it was new."""
        return self.minute.add(value, source_time_s)

    def settle(self, now_s: float) -> None:
        """Move what is closed of the minute into the quarter hour; at least twice a minute."""
        for slice_ in self.minute.closed_before(now_s, self._merged):
            self._merged = slice_.number
            self.quarter.merge(slice_.bins, slice_.number * self.minute.slice_s)
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
