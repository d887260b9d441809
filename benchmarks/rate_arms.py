"""The arms of the rate-control evaluation: every way of letting neighbours launch, on one device.

Ours calls the product's own pure functions. The published TGS law is written from its description
(docs/rate-control.md, section "TGS"): launch counts over windows of 5 s, slow start, additive
steps, a baseline that is re-learned while both run. The others are the usual alternatives.
"""

from __future__ import annotations

import math
from typing import Final

from alloy_agent.conformance.baseline import Burst
from alloy_agent.conformance.rate import (
    Bucket,
    GateOrder,
    ProductionView,
    RateLimits,
    RateSample,
    RateState,
    admit,
    order_of,
    refill,
    spend,
    tick,
)
from alloy_agent.silicon.accelerator.simulation import View

BLOCKS_PER_S: Final = 10_000_000.0  # ten thousand blocks a millisecond of device time
LEASE_S: Final = 0.05  # of the product's gate
QUEUE: Final = 64  # launches that a driver takes before it makes the caller wait


class Solo:
    """Nobody but production."""

    depth = QUEUE
    batch = 1
    period_s = 0.0

    def admit(self, _view: View, _now_s: float, _kernel_s: float, _held_s: float) -> float:
        """Let nothing pass."""
        return math.inf

    def tick(self, view: View, now_s: float) -> None:
        """Do nothing."""


class Uncontrolled(Solo):
    """Everything passes; the device slices by time, so that eight kernels are one to it."""

    depth = QUEUE // 8
    batch = 8

    def admit(self, _view: View, now_s: float, _kernel_s: float, _held_s: float) -> float:
        """Let everything pass."""
        return now_s


class Static(Solo):
    """A fixed share of the device, whatever production does."""

    def __init__(self, share_ratio: float, depth: int = QUEUE) -> None:
        self.share_ratio = share_ratio
        self.depth = depth
        self._tokens_s = 0.0
        self._filled_s = 0.0

    def admit(self, _view: View, now_s: float, kernel_s: float, _held_s: float) -> float:
        """Let pass what the bucket has."""
        gained_s = (now_s - self._filled_s) * self.share_ratio
        self._tokens_s = min(0.005, self._tokens_s + gained_s)
        self._filled_s = now_s
        if self._tokens_s > 1e-9:
            self._tokens_s -= kernel_s
            return now_s
        return now_s + max(2e-4, (1e-6 - self._tokens_s) / self.share_ratio)


class RateOnly(Static):
    """A PI loop on the share of the device, fed by the stretch of production; no gate."""

    period_s = 0.1

    def __init__(self, budget_ratio: float = 0.02) -> None:
        super().__init__(0.02, depth=2)
        self._budget_ratio = budget_ratio
        self._state = RateState()
        self._sum = 0.02

    def tick(self, view: View, now_s: float) -> None:
        """Move the share by the error of the loss."""
        self._state = tick(self._state, sample_of(view, now_s), RateLimits())
        loss = self._state.loss_ratio
        if loss is None or not view.bursts:
            return
        error = self._budget_ratio - loss
        self._sum = max(0.02, min(0.95, self._sum + 0.05 * error))
        self.share_ratio = max(0.02, min(0.95, self._sum + 0.3 * error))


class BangBang(Uncontrolled):
    """Freeze when production is seen busy, thaw when it is idle; seen 5 ms late."""

    LATE_S: Final = 0.005

    def __init__(self) -> None:
        self._frozen_until_s = 0.0

    def admit(self, view: View, now_s: float, _kernel_s: float, _held_s: float) -> float:
        """Let pass unless the freezer has acted on what it saw."""
        seen_busy = view.outstanding > 0 and now_s - view.busy_since_s >= self.LATE_S
        still = view.outstanding == 0 and now_s - view.idle_since_s < self.LATE_S
        if seen_busy:
            return math.inf
        if still:
            return view.idle_since_s + self.LATE_S
        return now_s


class Tgs(Solo):
    """The published law on launch counts.

    Args:
        scale: All intervals divided by this; 1 is the published setting.
    """

    BUCKET_S: Final = 0.05
    RETRY_S: Final = 0.01
    FIRST_LIMIT: Final = 20_000.0
    UNLIMITED: Final = float(1 << 32)

    def __init__(self, scale: float = 1.0) -> None:
        self.period_s = 5.0 / scale
        self.limit = 0.0
        self.max_rate = 0.0
        self._counted = 0.0
        self._bucket = -1
        self._used = 0.0
        self._sleeps_until_s = 0.0
        self._profiling = 0
        self._candidates: list[float] = []
        self._recent: list[float] = []
        self._slow_start = True
        self._samples = 0
        self._suffering = 0
        self._begun = False

    def admit(self, _view: View, now_s: float, kernel_s: float, _held_s: float) -> float:
        """Let pass while the bucket's counter is not over the limit; then charge the launch."""
        bucket = int(now_s / self.BUCKET_S)
        if bucket != self._bucket:
            self._bucket, self._used = bucket, 0.0
        if now_s < self._sleeps_until_s:
            return self._sleeps_until_s  # it knows nothing of production's pauses
        if self.limit <= 0.0 or self._used > self.limit:
            self._sleeps_until_s = now_s + self.RETRY_S
            return self._sleeps_until_s
        self._used += kernel_s * BLOCKS_PER_S
        return now_s

    def tick(self, view: View, now_s: float) -> None:
        """Take one sample of production's launch rate and move the limit."""
        rate = (view.kernels - self._counted) * 0.001 * BLOCKS_PER_S
        self._counted = view.kernels
        self._samples += 1
        self._recent = [*self._recent, rate][-5:]
        if not self._begun or self._profiling:
            self._profile(rate)
            return
        if self._paused():
            return
        self._track(rate)
        self._steer(rate)

    def _profile(self, rate: float) -> None:
        """Learn the rate: at least five samples, longer while the estimate moves."""
        self._candidates.append(rate)
        pairs = list(zip(self._candidates, self._candidates[1:], strict=False))[-4:]
        best = max(((a + b) / 2 for a, b in pairs), default=rate)
        steady = self.max_rate > 0.0 and abs(best / self.max_rate - 1.0) <= 0.05
        self.max_rate = best
        enough = len(self._candidates) >= 5 and (steady or len(self._candidates) >= 12)
        if enough:
            self._candidates, self._profiling = [], 0
            if not self._begun:
                self._begun, self.limit = True, self.FIRST_LIMIT
            self._slow_start = True

    def _paused(self) -> bool:
        quiet = sum(rate < 1000.0 for rate in self._recent)
        if self._samples < 15:
            return False
        if quiet >= 3:
            self.limit = max(3.0 * self.limit, self.UNLIMITED)
            return True
        if quiet == 2:
            self.limit, self._slow_start = self.FIRST_LIMIT, True
            return True
        return False

    def _track(self, _rate: float) -> None:
        """Rewrite the baseline where the window moved: contention does it as well as a phase."""
        pairs = list(zip(self._recent, self._recent[1:], strict=False))
        best = max(((a + b) / 2 for a, b in pairs), default=0.0)
        moved = abs(best / self.max_rate - 1.0) if self.max_rate else 0.0
        if moved <= 0.1:
            self.max_rate = max(self.max_rate, best)
        elif moved > 0.2:
            self.max_rate = best
            self._profiling, self._candidates = 1, []

    def _steer(self, rate: float) -> None:
        delta = abs(rate - self.max_rate) / self.max_rate if self.max_rate else 1.0
        self._suffering = self._suffering + 1 if delta >= 0.12 else 0
        if self._suffering >= 20:
            self.max_rate *= 0.8
            self.limit /= 2.0
            self._slow_start, self._suffering = True, 0
        elif self._slow_start:
            self._slow_start = delta <= 0.03
            self.limit = self.limit * 1.5 + 1.0 if delta <= 0.03 else self.limit / 1.5
        elif delta <= 0.03:
            self.limit += max(0.00025 * self.max_rate * 5.0 / self.period_s, 1000.0)
        elif delta >= 0.09:
            self.limit, self._slow_start = self.limit / 10.0, True
        else:
            self.limit -= max(0.08 * self.limit, 1000.0)
        self.limit = max(1.0, self.limit)


class Ours:
    """The product: inner gate and outer trim, as the agent and the interposer run them."""

    depth = QUEUE
    batch = 1
    period_s = 0.1

    def __init__(self, limits: RateLimits | None = None) -> None:
        self.limits = limits or RateLimits()
        self.state = RateState()
        self.order = order_of(self.state, self.limits)
        self.bucket = Bucket()
        self.openings: list[tuple[float, float]] = []
        self._orphaned = False

    def admit(self, view: View, now_s: float, kernel_s: float, held_s: float) -> float:
        """Ask the product's gate."""
        if now_s - view.agent_gone_s > LEASE_S:
            self._orphaned = True
            return math.inf
        seen = ProductionView(
            outstanding=view.outstanding > 0,
            idle_since_s=view.idle_since_s,
            bursts_done=view.bursts_done,
        )
        self.bucket = refill(self.order, seen, self.bucket, now_s, kernel_s)
        when_s = admit(self.order, seen, self.bucket, now_s, kernel_s, held_s)
        if when_s <= now_s:
            self.bucket = spend(self.bucket, kernel_s)
        return when_s

    def tick(self, view: View, now_s: float) -> None:
        """Run the product's tick."""
        if self._orphaned:  # this one is a successor
            self.state, self._orphaned = RateState(heard_s=now_s, held_s=now_s), False
        self.state = tick(self.state, sample_of(view, now_s), self.limits)
        self.order = order_of(self.state, self.limits)
        self.openings.append((now_s, self.state.opening))


class GateOnly(Ours):
    """The inner gate alone: no prediction, no trim, no holds."""

    period_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.order = GateOrder()


def sample_of(view: View, now_s: float) -> RateSample:
    """Return what the agent would read from production's page now."""
    return RateSample(
        now_s=now_s,
        bursts=tuple(
            Burst(
                started_s=b.started_s,
                ended_s=b.ended_s,
                idle_since_s=b.idle_since_s,
                kernels=b.kernels,
                signature=b.signature,
                contended=b.contended,
                overlap_s=b.overlap_s,
            )
            for b in view.bursts
        ),
        bursts_done=view.bursts_done,
        outstanding=view.outstanding > 0,
        heard_s=now_s,
    )
