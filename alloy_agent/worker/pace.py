"""Pure decisions about the sampling rate: what is asked for, bursts, and the self-budget."""

from __future__ import annotations

from typing import Final

from alloy_agent.errors import ConfigError
from alloy_agent.model import Value

RATE_MIN_HZ: Final = 1.0
RATE_MAX_HZ: Final = 100.0
BURST_MAX_S: Final = 600.0
LOWERED_MIN_HZ: Final = 1.0
CALM_ROUNDS: Final = 3  # rounds under budget before the rate is raised again
CALM_SHARE: Final = 0.8  # of the budget that the raised rate may be expected to cost


class PaceState(Value, frozen=True, kw_only=True):
    """The rate that is asked for, a burst with its end, and by how much the budget divides both."""

    rate_hz: float
    burst_hz: float = 0.0
    burst_until_s: float = 0.0
    divisor: int = 1
    calm: int = 0


def checked_rate(rate_hz: float) -> float:
    """Return `rate_hz` if it may be asked for.

    Raises:
        ConfigError: It is not a number from 1 to 100.
    """
    if not RATE_MIN_HZ <= rate_hz <= RATE_MAX_HZ:
        raise ConfigError(
            f"sampling rate {rate_hz:g} Hz is out of range",
            cure=f"choose {RATE_MIN_HZ:g} to {RATE_MAX_HZ:g} Hz",
        )
    return rate_hz


def ask(state: PaceState, rate_hz: float, burst_s: float | None, now_s: float) -> PaceState:
    """Return the state after a request: a new rate for good, or a burst of at most 600 s.

    A request starts with the full rate; the budget lowers it again if it must.

    Raises:
        ConfigError: The rate or the length is out of range.
    """
    rate_hz = checked_rate(rate_hz)
    if burst_s is None:
        return PaceState(rate_hz=rate_hz)
    if not 0.0 < burst_s <= BURST_MAX_S:
        raise ConfigError(
            f"a burst of {burst_s:g} s is out of range", cure=f"choose up to {BURST_MAX_S:g} s"
        )
    return PaceState(rate_hz=state.rate_hz, burst_hz=rate_hz, burst_until_s=now_s + burst_s)


def wanted_hz(state: PaceState, now_s: float) -> float:
    """Return the rate that is asked for now."""
    return state.burst_hz if now_s < state.burst_until_s else state.rate_hz


def rate_hz(state: PaceState, now_s: float) -> float:
    """Return the rate to sample at now, after the budget."""
    return max(wanted_hz(state, now_s) / state.divisor, LOWERED_MIN_HZ)


def budget(state: PaceState, cpu_share: float, cpu_share_max: float, now_s: float) -> PaceState:
    """Return the state after one budget round in which sampling took `cpu_share` of a core.

    Over budget the rate is halved at once. It is doubled again after three rounds in which twice
    the cost would stay under 80 % of the budget.
    """
    divisor, calm = state.divisor, 0
    if cpu_share > cpu_share_max:
        if rate_hz(state, now_s) > LOWERED_MIN_HZ:
            divisor *= 2
    elif divisor > 1 and cpu_share * 2.0 < cpu_share_max * CALM_SHARE:
        calm = state.calm + 1
        if calm >= CALM_ROUNDS:
            divisor, calm = divisor // 2, 0
    return PaceState(
        rate_hz=state.rate_hz,
        burst_hz=state.burst_hz,
        burst_until_s=state.burst_until_s,
        divisor=divisor,
        calm=calm,
    )
