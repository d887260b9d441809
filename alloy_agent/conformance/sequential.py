"""Whether production keeps its solo speed: a test that stays valid however often one looks.

Each window of one second gives a slowdown x against clean bursts of the last minutes. Evidence
against "the mean slowdown is within the promise" is a product of bets, restarted whenever it falls
below one (an e-CUSUM). Its alarm at 1/alpha has a mean time between false alarms of at least
1/alpha windows, so looking at every window costs nothing. The mean slowdown is reported with a
confidence sequence, which holds at all times together.

Rules that stay true in here:

* Three answers: conform, violated, undecided with its reason. Undecided is never turned into
  conform, and a window that is not comparable (power, heat, clocks) is counted but not judged.
* Conform needs demand: where the neighbours asked for nothing, nothing was proved.

Sources: Ramdas et al., arXiv 2210.01948 (e-processes); Robbins' normal mixture (confidence
sequence); Wang and Ramdas, e-BH (false discovery rate under any dependence).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from alloy_agent.model import Value


class Answer(StrEnum):
    """What the audit of a share says."""

    CONFORM = "conform"
    VIOLATED = "violated"
    UNDECIDED = "undecided"


class AuditLimits(Value, frozen=True, kw_only=True):
    """What is promised and how sure one has to be."""

    slo_ratio: float = 0.02  # the mean slowdown that was promised
    null_ratio: float = 0.01  # what a conforming share has on average
    tuned_ratio: float = 0.04  # the slowdown that is found soonest
    alarm: float = 3e6  # one false alarm in so many windows, or fewer
    alpha: float = 0.01  # of the confidence sequence
    fewest_windows: int = 20
    fewest_clean: int = 8
    sigma_min: float = 0.002
    span: int = 3600  # windows after which the confidence sequence begins anew


class Window(Value, frozen=True, kw_only=True):
    """One second: the slowdown of production, and what makes it count."""

    slowdown_ratio: float | None  # None: no burst could be judged
    bursts: int = 0
    demand: bool = True  # neighbours wanted more than they were let through, or worked
    comparable: bool = True
    why: str = ""  # why it is not


class AuditState(Value, frozen=True, kw_only=True):
    """What the audit of one share remembers."""

    log_e: float = 0.0
    highest_log_e: float = 0.0
    windows: int = 0  # judged since the confidence sequence began
    total: float = 0.0
    alarms: int = 0
    alarmed: bool = False
    calm: int = 0  # judged windows since the evidence last stood above one half of the alarm
    clean: tuple[float, ...] = ()  # slowdowns of windows without any neighbour: the noise
    skipped: int = 0
    idle: int = 0  # judged windows without demand
    why: str = ""


class Finding(Value, frozen=True, kw_only=True):
    """The answer with its figures."""

    answer: Answer
    reason: str
    windows: int
    mean_ratio: float | None = None
    lower_ratio: float | None = None
    upper_ratio: float | None = None
    e_value: float = 0.0
    sigma: float | None = None
    skipped: int = 0


def bet(sigma: float, limits: AuditLimits) -> float:
    """Return the stake: best against the tuned slowdown, bounded for the sake of heavy tails."""
    return min((limits.tuned_ratio - limits.null_ratio) / sigma**2, 0.75 / sigma)


def evidence(log_e: float, slowdown: float, sigma: float, limits: AuditLimits) -> float:
    """Return the logarithm of the evidence after one more window, at least 0."""
    stake = bet(sigma, limits)
    return max(0.0, log_e + stake * (slowdown - limits.null_ratio) - 0.5 * (stake * sigma) ** 2)


def sigma_of(state: AuditState, limits: AuditLimits) -> float | None:
    """Return the spread of clean windows, a little more than was seen; None while unknown."""
    clean = state.clean
    if len(clean) < limits.fewest_clean:
        return None
    mean = sum(clean) / len(clean)
    spread = math.sqrt(sum((x - mean) ** 2 for x in clean) / (len(clean) - 1))
    return max(limits.sigma_min, spread * (1.0 + 1.0 / math.sqrt(2.0 * len(clean))))


def calibrate(state: AuditState, slowdowns: tuple[float, ...]) -> AuditState:
    """Return the state with more clean windows to tell noise by."""
    return msgspec.structs.replace(state, clean=(*state.clean, *slowdowns)[-64:])


def watch(state: AuditState, window: Window, limits: AuditLimits) -> AuditState:
    """Return the state after one more window."""
    sigma = sigma_of(state, limits)
    if window.slowdown_ratio is None or not window.comparable or sigma is None:
        why = window.why or ("no clean windows yet" if sigma is None else "no burst to judge")
        return msgspec.structs.replace(state, skipped=state.skipped + 1, why=why)
    # what slows clean bursts of these minutes as well (a busy host) is not the neighbours' doing
    slowdown = window.slowdown_ratio - max(0.0, sum(state.clean) / len(state.clean))
    log_e = evidence(state.log_e, slowdown, sigma, limits)
    alarmed = log_e >= math.log(limits.alarm)
    anew = state.windows >= limits.span
    calm = state.calm + 1 if log_e < 0.5 * math.log(limits.alarm) else 0
    return msgspec.structs.replace(
        state,
        log_e=min(log_e, math.log(limits.alarm) + 20.0),
        highest_log_e=max(state.highest_log_e, log_e),
        windows=1 if anew else state.windows + 1,
        total=slowdown + (0.0 if anew else state.total),
        alarms=state.alarms + (alarmed and not state.alarmed),
        alarmed=alarmed or (state.alarmed and calm < limits.fewest_windows),
        calm=calm,
        idle=(0 if anew else state.idle) + (not window.demand),
        why="",
    )


def judge_share(state: AuditState, limits: AuditLimits) -> Finding:
    """Return the answer that the windows so far allow."""
    sigma = sigma_of(state, limits)
    if sigma is None or state.windows == 0:
        return _finding(state, Answer.UNDECIDED, state.why or "nothing was measured yet", sigma)
    mean = state.total / state.windows
    radius = radius_of(state.windows, sigma, limits.alpha)
    if state.alarmed:
        answer, reason = Answer.VIOLATED, "production has been slower than promised"
    elif mean - radius > limits.slo_ratio:
        answer, reason = Answer.VIOLATED, "the mean slowdown is above the promise"
    elif state.idle > state.windows // 2:
        answer, reason = Answer.UNDECIDED, "no demand above the cap"
    elif state.windows < limits.fewest_windows:
        answer, reason = Answer.UNDECIDED, "too few windows"
    elif mean + radius <= limits.slo_ratio:
        answer, reason = Answer.CONFORM, ""
    else:
        answer, reason = Answer.UNDECIDED, "the confidence sequence still straddles the promise"
    found = _finding(state, answer, reason, sigma)
    return msgspec.structs.replace(
        found, mean_ratio=mean, lower_ratio=mean - radius, upper_ratio=mean + radius
    )


def radius_of(windows: int, sigma: float, alpha: float, best_at: int = 300) -> float:
    """Return the half width of the confidence sequence after so many windows."""
    rho = 1.0 / best_at
    grown = windows * rho + 1.0
    return sigma * math.sqrt(
        2.0 * grown / (windows**2 * rho) * math.log(math.sqrt(grown) / (0.5 * alpha))
    )


def discoveries(e_values: Mapping[str, float], alpha: float) -> frozenset[str]:
    """Return the tenants whose violation stands with a false discovery rate of alpha (e-BH)."""
    ranked = sorted(e_values.items(), key=lambda item: -item[1])
    count = max(
        (k for k, (_, e) in enumerate(ranked, 1) if e * k >= len(ranked) / alpha), default=0
    )
    return frozenset(name for name, _ in ranked[:count])


def _finding(state: AuditState, answer: Answer, reason: str, sigma: float | None) -> Finding:
    return Finding(
        answer=answer,
        reason=reason,
        windows=state.windows,
        e_value=math.exp(state.log_e),
        sigma=sigma,
        skipped=state.skipped,
    )
