"""What a reading may be believed to be: sentinels, bounds of physics, age, and counters. Pure.

Backends translate their vendor's "no value" where they know it. This is the second net, by unit,
for what slips through: the all-ones words of every width, numbers beyond physics, counters that
wrap, restart, freeze or jump.

Rules that stay true in here:

* A reading that cannot be is absent with a reason; nothing is clamped into a plausible number.
* A counter as told onwards never goes backwards. A growth that cannot be believed is dropped and
  its time counted as unobserved; nothing is ever made up, least of all a power of two.
* Age is `now - source time`, and `now - read time` only where the source has no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from alloy_agent.model import Quality, Signal, SignalSpec, Value

AGE_FLOOR_S: Final = 1.0  # below this age nothing is stale
AGE_PERIODS: Final = 3.0
POWER_MAX_W: Final = 4000.0  # no device of today takes half of it; Source: GB200 board, 1,500 W
FROZEN_PERIODS: Final = 20.0

# What a unit can be, smallest and largest. Names end with their unit.
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "ratio": (0.0, 1.0),
    "bytes": (0.0, float(1 << 50)),
    "watts": (0.0, POWER_MAX_W),
    "celsius": (-100.0, 150.0),
    "joules": (0.0, 1e15),
    "seconds": (0.0, 1e12),
    "hertz": (0.0, 1e11),
    "errors": (0.0, float((1 << 63) - 1)),
}
# All-ones words as they look after conversion to a base unit (mW, uW, mJ, uJ, KiB, MiB).
_WORDS: Final = tuple(float((1 << bits) - 1) for bits in (16, 31, 32, 53, 63, 64))
_SCALES: Final[dict[str, tuple[float, ...]]] = {
    "watts": (1.0, 1e-3, 1e-6),
    "joules": (1.0, 1e-3, 1e-6),
    "bytes": (1.0, 1024.0, 1048576.0),
    "celsius": (1.0, 1e-3),
    "seconds": (1.0, 1e-3, 1e-6, 1e-9),
    "hertz": (1.0, 1e3, 1e6),
    "errors": (1.0,),
}
SENTINELS: Final[dict[str, frozenset[float]]] = {
    unit: frozenset(word * scale for word in _WORDS for scale in scales)
    for unit, scales in _SCALES.items()
}
# Growth per second that a counter cannot exceed.
RATE_MAX: Final[dict[str, float]] = {"joules": POWER_MAX_W}


class Possible(NamedTuple):
    """What numbers of one unit can be."""

    low: float
    high: float
    never: frozenset[float]
    unit: str

    def all_of(self, values: Sequence[float]) -> bool:
        """Whether each of some numbers, at least one, can be a reading."""
        total = sum(values)
        return (
            total - total == 0.0  # finite, so none of them is NaN
            and self.low <= min(values)
            and max(values) <= self.high
            and (not self.never or self.never.isdisjoint(values))
        )


@lru_cache(maxsize=1024)
def _possible(name: str, stated: str) -> Possible:
    """Return what a signal can be; made once for each name."""
    unit = stated if stated in BOUNDS else name.removesuffix("_total").rpartition("_")[2]
    low, high = BOUNDS.get(unit, (-math.inf, math.inf))
    return Possible(low, high, SENTINELS.get(unit, frozenset()), unit)


def possible(spec: SignalSpec) -> Possible:
    """Return what a reading of a signal can be."""
    return _possible(spec.name, spec.unit)


def doubt(spec: SignalSpec, value: float) -> str:
    """Return why a number cannot be a reading of this signal; "" when it can."""
    low, high, never, unit = _possible(spec.name, spec.unit)
    if low <= value <= high and value not in never and value - value == 0.0:
        return ""
    if not math.isfinite(value):
        return "the source gave no finite number"
    if value in never:
        return f"{value:.15g} is the vendor's word for no value"
    return f"{value:.6g} {unit} is beyond physics"


def sane(signal: Signal) -> Signal:
    """Return a signal as it may be told onwards: absent where its number cannot be."""
    if signal.value is None:
        return signal
    reason = doubt(signal.spec, signal.value)
    if not reason:
        return signal
    return msgspec.structs.replace(signal, quality=Quality.NOT_SUPPORTED, value=None, reason=reason)


def all_sane(signals: Iterable[Signal]) -> tuple[Signal, ...]:
    """Return signals as they may be told onwards."""
    return tuple(map(sane, signals))


def age_s(signal: Signal, now_s: float) -> float:
    """Return how old a value is."""
    taken_s = signal.read_time_s if signal.source_time_s is None else signal.source_time_s
    return max(0.0, now_s - taken_s)


def limit_s(spec: SignalSpec) -> float:
    """Return the age from which a value of this signal is stale."""
    return max(AGE_PERIODS * (spec.refresh_period_s or 0.0), AGE_FLOOR_S)


def is_fresh(signal: Signal, now_s: float) -> bool:
    """Whether there is a value and it is young enough to decide on."""
    there = signal.quality is Quality.VALUE and signal.value is not None
    return there and age_s(signal, now_s) <= limit_s(signal.spec)


class Count(Value, frozen=True, kw_only=True):
    """A counter as told onwards.

    `raw` and `at_s` are the last reading that was believed, `total` what is told. `doubted` is a
    reading that a second one must confirm.
    """

    raw: float
    at_s: float
    total: float
    resets: int = 0
    glitches: int = 0
    doubted: float | None = None
    moved_s: float = 0.0  # when it last grew


def begin_count(raw: float, at_s: float, total: float = 0.0, resets: int = 0) -> Count:
    """Return a counter at its first reading; what came before it is not ours."""
    return Count(raw=raw, at_s=at_s, total=total, resets=resets, moved_s=at_s)


def count(
    before: Count, raw: float, at_s: float, rate_max: float = math.inf
) -> tuple[Count, float | None]:
    """Return the counter after a reading, and how much it grew; None where that is not known.

    Args:
        before: As the previous reading left it.
        raw: The reading.
        at_s: Its source time; a repetition of the last one changes nothing.
        rate_max: Growth per second that physics allows.
    """
    if at_s <= before.at_s:
        return before, 0.0
    grown = raw - before.raw
    if 0 <= grown <= rate_max * (at_s - before.at_s):
        return _grown(before, raw, at_s, grown), grown
    if before.doubted is None:  # one reading proves nothing: keep what is believed
        return msgspec.structs.replace(before, doubted=raw), None
    since_doubt = raw - before.doubted
    if 0 <= since_doubt <= rate_max * (at_s - before.at_s):
        restarted = begin_count(raw, at_s, before.total, before.resets + 1)
        return msgspec.structs.replace(restarted, glitches=before.glitches), None
    return msgspec.structs.replace(before, doubted=raw), None


def _grown(before: Count, raw: float, at_s: float, grown: float) -> Count:
    return Count(
        raw=raw,
        at_s=at_s,
        total=before.total + grown,
        resets=before.resets,
        glitches=before.glitches + (before.doubted is not None),
        moved_s=at_s if grown > 0 else before.moved_s,
    )


def is_frozen(counter: Count, now_s: float, period_s: float, *, busy: bool) -> bool:
    """Whether a counter stands still although the device works."""
    return busy and now_s - counter.moved_s > max(FROZEN_PERIODS * period_s, AGE_FLOOR_S)
