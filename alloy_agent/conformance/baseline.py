"""What production takes when it is alone, and how long it pauses: learned from clean bursts.

The solo time of a burst is learned from *clean* bursts only: no opportunistic work was outstanding
from the end of the burst before it until its own end. It is kept per kernel of a signature (the
set of kernels that a burst is made of), so that merged bursts are judged like single ones.

Rules that stay true in here:

* A contended burst changes no solo time, whatever its length. Pauses and slowdowns of any length
  therefore cannot lower what production is entitled to.
* Old samples are forgotten only when two successive groups of clean bursts say the same new time.
* A burst of which nothing is known has no expected time; it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from alloy_agent.model import Value

KEPT_SAMPLES = 99  # the error of their median is what the budget is kept by
KEPT_SIGNATURES = 16
KEPT_GAPS = 64
GROUP = 3  # clean bursts whose median is compared with what is known
SHIFT_RATIO = 0.08  # Source: docs/rate-control.md, "phase changes"
FEWEST_GAPS = 12
SPREAD_RATIO = 0.5  # gaps that differ by more than this cannot be predicted


class Burst(Value, frozen=True, kw_only=True):
    """One busy period of production. Times are on the node's boot clock."""

    started_s: float
    ended_s: float
    idle_since_s: float  # when the burst before it ended
    kernels: int
    signature: int
    contended: bool
    overlap_s: float | None = None  # neighbours' outstanding time within it; None: unknown

    @property
    def busy_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.started_s

    @property
    def gap_s(self) -> float:
        """How long production was idle before it."""
        return self.started_s - self.idle_since_s

    @property
    def cycle_s(self) -> float:
        """Its pause and its work together."""
        return self.ended_s - self.idle_since_s


class SoloTime(Value, frozen=True, kw_only=True):
    """Clean samples of one signature: seconds a kernel, and seconds a whole cycle."""

    signature: int
    kernel_s: tuple[float, ...] = ()
    cycle_s: tuple[float, ...] = ()
    group: tuple[float, ...] = ()  # clean samples not yet compared
    shifted: tuple[float, ...] = ()  # a group that said something else
    forgotten: int = 0  # phase changes


class Baseline(Value, frozen=True, kw_only=True):
    """Everything that is known of one production tenant; the latest signature comes last."""

    solos: tuple[SoloTime, ...] = ()
    gaps_s: tuple[float, ...] = ()
    gaps_of: int = 0  # signature after which these gaps were seen
    clean: int = 0  # clean bursts, ever


def median(values: Sequence[float]) -> float:
    """Return the middle value (the lower one of two)."""
    return sorted(values)[(len(values) - 1) // 2]


def quantile(values: Sequence[float], ratio: float) -> float:
    """Return the value that `ratio` (0 to 1) of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(ratio * len(values)))]


def learn(baseline: Baseline, bursts: Iterable[Burst]) -> Baseline:
    """Return the baseline after more bursts; contended ones teach gaps only."""
    for burst in bursts:
        baseline = _learn_gap(baseline, burst)
        if not burst.contended and burst.kernels > 0 and burst.busy_s > 0.0:
            baseline = _learn_clean(baseline, burst)
    return baseline


def solo_of(baseline: Baseline, signature: int) -> SoloTime | None:
    """Return what is known of a signature, or None."""
    return next((solo for solo in baseline.solos if solo.signature == signature), None)


def expected_busy_s(baseline: Baseline, burst: Burst) -> float | None:
    """Return how long the burst takes alone, or None where that was never seen."""
    solo = solo_of(baseline, burst.signature)
    return median(solo.kernel_s) * burst.kernels if solo else None


def expected_cycle_s(baseline: Baseline, burst: Burst) -> float | None:
    """Return how long pause and burst take alone; None where that was never seen, or varies.

    Requests that come when they like have no period: the median of theirs is far from the mean.
    """
    solo = solo_of(baseline, burst.signature)
    return median(solo.cycle_s) if solo and _alike(solo.cycle_s) else None


def known(baseline: Baseline, signature: int) -> int:
    """Return how many clean samples of a signature there are."""
    solo = solo_of(baseline, signature)
    return len(solo.kernel_s) if solo else 0


def quiet_s(baseline: Baseline) -> tuple[float, float] | None:
    """Return the span of ages at which a pause of production ends, or None if nobody can say."""
    gaps = baseline.gaps_s
    if len(gaps) < FEWEST_GAPS:
        return None
    return (quantile(gaps, 0.05), quantile(gaps, 0.95)) if _alike(gaps) else None


def _alike(values: Sequence[float]) -> bool:
    """Whether nine out of ten differ so little that the next one can be predicted."""
    early, late = quantile(values, 0.05), quantile(values, 0.95)
    return early > 0.0 and late - early <= SPREAD_RATIO * early


def _learn_gap(baseline: Baseline, burst: Burst) -> Baseline:
    gaps = baseline.gaps_s if baseline.gaps_of == burst.signature else ()
    return msgspec.structs.replace(
        baseline, gaps_s=(*gaps, burst.gap_s)[-KEPT_GAPS:], gaps_of=burst.signature
    )


def _learn_clean(baseline: Baseline, burst: Burst) -> Baseline:
    solo = solo_of(baseline, burst.signature) or SoloTime(signature=burst.signature)
    others = tuple(s for s in baseline.solos if s.signature != burst.signature)
    solos = (*others, _sampled(solo, burst))[-KEPT_SIGNATURES:]
    return msgspec.structs.replace(baseline, solos=solos, clean=baseline.clean + 1)


def _sampled(solo: SoloTime, burst: Burst) -> SoloTime:
    sample_s = burst.busy_s / burst.kernels
    kernels = (*solo.kernel_s, sample_s)[-KEPT_SAMPLES:]
    cycles = (*solo.cycle_s, burst.cycle_s)[-KEPT_SAMPLES:]
    group = (*solo.group, sample_s)
    if len(group) < GROUP:
        return msgspec.structs.replace(solo, kernel_s=kernels, cycle_s=cycles, group=group)
    usual_s = median(solo.kernel_s or group)
    if abs(median(group) / usual_s - 1.0) <= SHIFT_RATIO:
        return msgspec.structs.replace(solo, kernel_s=kernels, cycle_s=cycles, group=(), shifted=())
    if not _same_way(solo.shifted, group, usual_s):
        return msgspec.structs.replace(
            solo, kernel_s=kernels, cycle_s=cycles, group=(), shifted=group
        )
    return SoloTime(
        signature=solo.signature,
        kernel_s=(*solo.shifted, *group),
        cycle_s=cycles[-2 * GROUP :],
        forgotten=solo.forgotten + 1,
    )


def _same_way(earlier: tuple[float, ...], group: tuple[float, ...], usual_s: float) -> bool:
    """Whether two groups moved in one direction."""
    return bool(earlier) and (median(earlier) > usual_s) == (median(group) > usual_s)
