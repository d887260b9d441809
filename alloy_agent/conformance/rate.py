"""The controller of one shared device: an inner gate and an outer trim, as pure functions.

The inner gate (`admit`) lets an opportunistic launch start only while production has nothing
outstanding, and only if it will be done before production's pause is over, where pauses can be
predicted. It is written down here once; the interposer does the same in C and is held to this
function by a test. The outer trim (`tick`, every 100 ms) moves one number, the *opening*, so that
production's loss stays within its budget: below 1 it is the share of production's idle time that
is lent; above 1 it lets launches reach past the predicted end of a pause.

Rules that stay true in here:

* Time is an argument; state comes in and goes out, one per device.
* Loss is measured against clean bursts only (`baseline`). Without a baseline nothing is judged,
  and the neighbours are held until there is one.
* Work is counted in device time, never in blocks or launches; one step of the opening is at most
  a fifth of itself upwards, whatever the device's size.
* "No data" keeps the last order until it is too old to be safe, and then stops the neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from alloy_agent.conformance.baseline import (
    Baseline,
    Burst,
    expected_busy_s,
    expected_cycle_s,
    known,
    learn,
    median,
    quantile,
    quiet_s,
    solo_of,
)
from alloy_agent.model import Value

SWITCH_S = 50e-6  # device time that a change of context takes; Source: emulated device
KEPT_STRETCHES = 200


class Slo(StrEnum):
    """What production was promised."""

    STRETCH = "stretch"  # mean length of its bursts
    THROUGHPUT = "throughput"  # mean period of its bursts; their length where requests come at will
    P99 = "p99"  # 99th percentile of the length of its bursts


class Stage(StrEnum):
    """What the controller is doing, and hence how the neighbours are held."""

    LEARNING = "learning"  # no baseline for what production does now: neighbours are held
    CONTROLLING = "controlling"
    IDLE = "idle"  # production is silent: all is lent, the gate stays armed
    BLIND = "blind"  # no fresh word of production: neighbours are held, then frozen
    UNMETERED = "unmetered"  # production's ends are not told: a small fixed share, nothing judged


class RateLimits(Value, frozen=True, kw_only=True):
    """Tuning of one device. Source: docs/rate-control.md."""

    slo: Slo = Slo.STRETCH
    budget_ratio: float = 0.02
    opening_min: float = 0.02
    opening_max: float = 3.0  # reaches past a pause by two launches of the longest time allowed
    step_up: float = 0.03
    step_up_ratio: float = 0.2
    step_down: float = 0.02
    retreat_ratio: float = 0.1  # of what reaches past a pause
    backoff_ratio: float = 0.8
    reach_ratio: float = 0.6  # of the budget: above it launches reach no further past a pause
    memory_ratio: float = 0.9  # of the loss, from tick to tick
    outstanding_s: float = 0.001  # device time that neighbours may have outstanding
    idle_after_s: float = 0.5
    hold_every_s: float = 1.5  # while the baseline is young
    hold_known_every_s: float = 4.5
    hold_bursts: int = 3
    young_samples: int = 33
    hold_at_most_s: float = 0.5
    blind_after_s: float = 0.25
    share_max_ratio: float = 1.0  # of the device's time, for all neighbours together
    unmetered_share_ratio: float = 0.05  # the same while production's completions are unknown


class RateSample(Value, frozen=True, kw_only=True):
    """What the pages say at one tick. `heard_s` is when production's page last proved alive."""

    now_s: float
    bursts: tuple[Burst, ...] = ()
    bursts_done: int = 0
    outstanding: bool = False
    alive: bool = True  # the production tenant has a process
    heard_s: float | None = None  # None: no page was readable this time
    comparable: bool = True  # False: power, thermal or clock throttling in this window
    metered: bool = True  # False: production's library does not tell when launches are done


class RateState(Value, frozen=True, kw_only=True):
    """All that one device's controller remembers."""

    stage: Stage = Stage.LEARNING
    opening: float = 1.0
    baseline: Baseline = Baseline()
    wall_s: float = 0.0  # decayed sums: what bursts took, and what they take alone
    solo_s: float = 0.0
    stretches: tuple[float, ...] = ()
    signature: int = 0
    active_s: float = 0.0  # last time production did anything
    heard_s: float = 0.0
    hold_from: int = 0  # neighbours are held while from <= bursts done < to
    hold_to: int = 0
    hold_until_s: float = 0.0
    held_s: float = 0.0  # when the last hold was ordered
    clean_then: int = 0
    seed: int = 1
    freeze: bool = False
    judged: int = 0  # bursts ever judged
    excluded: int = 0  # bursts of windows that are not comparable

    @property
    def loss_ratio(self) -> float | None:
        """Production's loss against solo, or None where nothing was judged."""
        return self.wall_s / self.solo_s - 1.0 if self.solo_s > 0.0 else None


class GateOrder(Value, frozen=True, kw_only=True):
    """What is written to a neighbour's page: everything that its gate needs to decide alone."""

    stopped: bool = False
    duty_ratio: float = 1.0
    quiet_from_s: float = math.inf  # age of a pause at which launches have to be done
    quiet_to_s: float = 0.0  # age from which on the prediction has failed
    hold_from: int = 0
    hold_to: int = 0
    hold_until_s: float = 0.0
    outstanding_s: float = 0.001
    share_max_ratio: float = 1.0


class ProductionView(Value, frozen=True, kw_only=True):
    """What a gate sees of production at one moment."""

    outstanding: bool
    idle_since_s: float
    bursts_done: int


class Bucket(Value, frozen=True, kw_only=True):
    """Device time that a neighbour has in hand. It may owe what its last launch took."""

    tokens_s: float = 0.0
    filled_s: float = 0.0
    capped_s: float = 0.0  # the same for the cap on the share of the device


# --- inner gate ----------------------------------------------------------------------------------


def admit(  # noqa: PLR0913, PLR0917 - one decision with all that it depends on
    order: GateOrder,
    seen: ProductionView,
    bucket: Bucket,
    now_s: float,
    kernel_s: float,
    held_s: float,
) -> float:
    """Return `now_s` if a launch may pass, or when to look again; infinity: at the next event.

    Args:
        order: What the controller says.
        seen: What production is doing.
        bucket: After `refill` to `now_s`.
        now_s: The time, on the clock of the view.
        kernel_s: Device time that the launch will take.
        held_s: Device time that this neighbour has outstanding.
    """
    if order.stopped or seen.outstanding:
        return math.inf
    if order.hold_from <= seen.bursts_done < order.hold_to and now_s < order.hold_until_s:
        return order.hold_until_s
    if held_s > 0.0 and held_s + kernel_s > order.outstanding_s:
        return math.inf
    age_s = now_s - seen.idle_since_s
    ends_s = age_s + held_s + kernel_s + SWITCH_S
    if ends_s > order.quiet_from_s and age_s < order.quiet_to_s:
        return seen.idle_since_s + order.quiet_to_s
    return now_s + _short_of_tokens_s(order, bucket, kernel_s)


def _short_of_tokens_s(order: GateOrder, bucket: Bucket, kernel_s: float) -> float:
    """Return how long to wait for tokens. A long kernel is paid for in advance."""
    price_s = kernel_s if kernel_s > order.outstanding_s else 1e-6
    wait_s = 0.0
    if order.duty_ratio < 1.0 and bucket.tokens_s < price_s:
        wait_s = (price_s - bucket.tokens_s) / order.duty_ratio
    if order.share_max_ratio < 1.0 and bucket.capped_s < price_s:
        wait_s = max(wait_s, (price_s - bucket.capped_s) / order.share_max_ratio)
    return wait_s


def refill(
    order: GateOrder, seen: ProductionView, bucket: Bucket, now_s: float, kernel_s: float
) -> Bucket:
    """Return the bucket at `now_s`: it fills with production's idle time only."""
    depth_s = max(2.0 * order.outstanding_s, kernel_s)
    begin_s = max(bucket.filled_s, seen.idle_since_s)
    idle_s = 0.0 if seen.outstanding else max(0.0, now_s - begin_s)
    passed_s = max(0.0, now_s - bucket.filled_s)
    return Bucket(
        tokens_s=min(depth_s, bucket.tokens_s + idle_s * order.duty_ratio),
        filled_s=max(now_s, bucket.filled_s),
        capped_s=min(depth_s, bucket.capped_s + passed_s * order.share_max_ratio),
    )


def spend(bucket: Bucket, kernel_s: float) -> Bucket:
    """Return the bucket after a launch."""
    return Bucket(
        tokens_s=bucket.tokens_s - kernel_s,
        filled_s=bucket.filled_s,
        capped_s=bucket.capped_s - kernel_s,
    )


# --- outer trim ----------------------------------------------------------------------------------


def tick(state: RateState, sample: RateSample, limits: RateLimits) -> RateState:
    """Return the state after one look at the pages.

    Args:
        state: What the previous tick of this device returned.
        sample: What happened since.
        limits: Tuning.
    """
    state = _heard(state, sample)
    state = _judged(state, sample, limits)
    state = msgspec.structs.replace(state, stage=_stage(state, sample, limits))
    if state.stage is Stage.BLIND:
        frozen = sample.alive and sample.now_s - state.heard_s > limits.blind_after_s
        return msgspec.structs.replace(state, freeze=frozen)
    state = msgspec.structs.replace(state, freeze=False)
    if state.stage is Stage.CONTROLLING and sample.bursts and sample.comparable:
        shared = any(burst.contended for burst in sample.bursts)
        state = msgspec.structs.replace(state, opening=_trimmed(state, limits, shared=shared))
    return _held(state, sample, limits)


def order_of(state: RateState, limits: RateLimits) -> GateOrder:
    """Return what the neighbours' gates have to do until the next tick."""
    cap_s = outstanding_cap_s(state, limits)
    if state.stage in {Stage.BLIND, Stage.LEARNING}:
        return GateOrder(stopped=True, outstanding_s=cap_s, share_max_ratio=limits.share_max_ratio)
    if state.stage is Stage.UNMETERED:
        share_ratio = min(limits.share_max_ratio, limits.unmetered_share_ratio)
        return GateOrder(outstanding_s=cap_s, share_max_ratio=share_ratio)
    span = quiet_s(state.baseline)
    open_ = GateOrder(
        duty_ratio=1.0 if state.stage is Stage.IDLE else min(1.0, state.opening),
        outstanding_s=cap_s,
        share_max_ratio=limits.share_max_ratio,
        hold_from=state.hold_from,
        hold_to=state.hold_to,
        hold_until_s=state.hold_until_s,
    )
    reach_s = (state.opening - 1.0) * (limits.outstanding_s + SWITCH_S)
    if span is None or limits.budget_ratio >= 1.0:
        return open_
    late_s = span[1] + 0.25 * (span[1] - span[0])
    return msgspec.structs.replace(
        open_, quiet_from_s=span[0] + max(0.0, reach_s), quiet_to_s=late_s
    )


def outstanding_cap_s(state: RateState, limits: RateLimits) -> float:
    """Return how much device time neighbours may have outstanding."""
    solo = solo_of(state.baseline, state.signature)
    if solo is None or not solo.cycle_s:
        return limits.outstanding_s
    # a burst of production may be delayed by what is outstanding when it begins
    return min(limits.outstanding_s, max(1e-4, 0.5 * median(solo.cycle_s)))


def shares(order: GateOrder, weights: Mapping[str, float]) -> dict[str, GateOrder]:
    """Return the order of each neighbour that has work, by weight.

    The idle time that is lent, the cap and what may be outstanding are divided; a neighbour that
    has no work takes no part, so that the others get its share.
    """
    total = sum(weights.values())
    if len(weights) < 2 or total <= 0.0:
        return dict.fromkeys(weights, order)
    return {
        name: msgspec.structs.replace(
            order,
            duty_ratio=order.duty_ratio * weight / total,
            outstanding_s=order.outstanding_s * weight / total,
            share_max_ratio=order.share_max_ratio * weight / total,
        )
        for name, weight in weights.items()
    }


def _heard(state: RateState, sample: RateSample) -> RateState:
    heard_s = state.heard_s if sample.heard_s is None else max(state.heard_s, sample.heard_s)
    active = bool(sample.bursts) or sample.outstanding
    return msgspec.structs.replace(
        state,
        heard_s=heard_s,
        active_s=sample.now_s if active else state.active_s,
        signature=sample.bursts[-1].signature if sample.bursts else state.signature,
    )


def _judged(state: RateState, sample: RateSample, limits: RateLimits) -> RateState:
    """Return the state with the loss of these bursts, and with what clean ones taught."""
    if not sample.bursts or not sample.metered:
        return state
    if not sample.comparable:
        return msgspec.structs.replace(state, excluded=state.excluded + len(sample.bursts))
    wall_s, solo_s, stretches = 0.0, 0.0, list(state.stretches)
    for burst in sample.bursts:
        took_s, alone_s = _cost(state.baseline, burst, limits)
        if alone_s is None:
            continue
        wall_s += took_s
        solo_s += alone_s
        stretches.append(took_s / alone_s)
    kept = limits.memory_ratio
    return msgspec.structs.replace(
        state,
        baseline=learn(state.baseline, sample.bursts),
        wall_s=state.wall_s * kept + wall_s,
        solo_s=state.solo_s * kept + solo_s,
        stretches=tuple(stretches[-KEPT_STRETCHES:]),
        judged=state.judged + len(stretches) - len(state.stretches),
    )


def _cost(baseline: Baseline, burst: Burst, limits: RateLimits) -> tuple[float, float | None]:
    """Return what a burst took and what it takes alone, by the promise that was made."""
    cycle_s = expected_cycle_s(baseline, burst) if limits.slo is Slo.THROUGHPUT else None
    if cycle_s is None:
        alone_s = expected_busy_s(baseline, burst)
        return _blamed_s(burst, alone_s), alone_s
    if burst.gap_s > max(2.0 * cycle_s, limits.idle_after_s):
        return burst.cycle_s, None  # it paused by its own will
    return burst.cycle_s, cycle_s


def _blamed_s(burst: Burst, alone_s: float | None) -> float:
    """Return what a burst took, without what neighbours cannot have caused.

    A neighbour delays a burst by no more than its own outstanding time within it; what is beyond
    that is the host's noise. Where the overlap is unknown, all of it is the neighbours' fault.
    """
    if alone_s is None or burst.overlap_s is None:
        return burst.busy_s
    most_s = burst.overlap_s + SWITCH_S if burst.overlap_s > 0.0 else 0.0
    return alone_s + max(0.0, min(burst.busy_s - alone_s, most_s))


def _stage(state: RateState, sample: RateSample, limits: RateLimits) -> Stage:
    if sample.now_s - state.heard_s > limits.blind_after_s and sample.alive:
        return Stage.BLIND
    if not sample.metered and sample.alive:
        return Stage.UNMETERED
    if not sample.outstanding and sample.now_s - state.active_s > limits.idle_after_s:
        return Stage.IDLE
    if known(state.baseline, state.signature) < limits.hold_bursts:
        return Stage.LEARNING
    return Stage.CONTROLLING


def _trimmed(state: RateState, limits: RateLimits, *, shared: bool) -> float:
    """Return the next opening. Bursts beside nobody say nothing for opening further."""
    loss, budget = _loss(state, limits), limits.budget_ratio
    opening = state.opening
    if loss is None:
        return opening
    if loss > 2.0 * budget:
        opening *= limits.backoff_ratio
    elif loss > budget:
        opening -= max(limits.step_down, limits.retreat_ratio * (opening - 1.0))
    elif shared and (opening < 1.0 or loss <= limits.reach_ratio * budget):
        opening += min(limits.step_up, opening * limits.step_up_ratio)
    return max(limits.opening_min, min(limits.opening_max, opening))


def _loss(state: RateState, limits: RateLimits) -> float | None:
    if limits.slo is not Slo.P99:
        return state.loss_ratio
    return quantile(state.stretches, 0.99) - 1.0 if state.stretches else None


def _held(state: RateState, sample: RateSample, limits: RateLimits) -> RateState:
    """Return the state with a hold ordered where clean bursts have become too old.

    The time between holds is drawn at random from a seed on record: bursts under hold and bursts
    beside a neighbour are then exchangeable if the neighbour has no effect.
    """
    if state.stage is not Stage.CONTROLLING:
        return state
    young = known(state.baseline, state.signature) < limits.young_samples
    every_s = limits.hold_every_s if young else limits.hold_known_every_s
    seed = (state.seed * 1103515245 + 12345) % 2147483648
    if sample.now_s - state.held_s < every_s * (0.75 + 0.5 * state.seed / 2147483648):
        return state
    recent = state.baseline.clean - state.clean_then
    state = msgspec.structs.replace(
        state, held_s=sample.now_s, clean_then=state.baseline.clean, seed=seed
    )
    if recent >= limits.hold_bursts and state.hold_to < sample.bursts_done:
        return state  # enough of them came by themselves
    begin = sample.bursts_done + 1
    return msgspec.structs.replace(
        state,
        hold_from=begin,
        hold_to=begin + limits.hold_bursts,
        hold_until_s=sample.now_s + limits.hold_at_most_s,
    )


def contended(
    wanted: Mapping[str, Sequence[str]], busy: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return, for each tenant, the devices on which it has to be held: those it shares and uses."""
    taken = frozenset(busy)
    return {tenant: frozenset(devices) & taken for tenant, devices in wanted.items()}
