"""The traces of the evaluation as data: what production and its neighbour do, with fixed seeds.

Source of the numbers: the evaluation protocol of the rate control (docs/rate-control.md).
"""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random

from alloy_agent.model import Value

FOREVER_S = math.inf


class Kind(StrEnum):
    """What makes production begin its next burst."""

    CLOSED = "closed"  # its own last burst, after a pause
    INPUT = "input"  # an input pipeline with one item prefetched
    POISSON = "poisson"  # requests from outside


class Phase(Value, frozen=True, kw_only=True):
    """Bursts of `kernels` launches; `gap_s` is the pause, or the period of the input pipeline."""

    kernels: int
    kernel_s: float
    gap_s: float
    lasts_s: float = FOREVER_S
    ident: int = 1  # names the kernels: another phase, other kernels

    @property
    def burst_s(self) -> float:
        """How long a burst takes on an idle device."""
        return self.kernels * self.kernel_s


class Trace(Value, frozen=True, kw_only=True):
    """What runs on one shared device."""

    name: str
    kind: Kind
    phases: tuple[Phase, ...]
    jitter_ratio: float = 0.03
    pause_s: float = 0.0  # a checkpoint, every `pause_every_s`
    pause_every_s: float = 150.0
    neighbour_kernel_s: float = 0.001
    agent_dies_every_s: float = FOREVER_S  # on average: it is killed at random moments
    agent_back_s: float = 2.0  # after which its successor begins, knowing nothing
    lasts_s: float = 60.0

    def phase_at(self, now_s: float) -> Phase:
        """Return what production does at a time since its start."""
        begin_s = 0.0
        for phase in self.phases:
            begin_s += phase.lasts_s
            if now_s < begin_s:
                return phase
        return self.phases[-1]

    def steps_s(self) -> tuple[float, ...]:
        """Return when phases begin, the first one left out."""
        ends: list[float] = []
        for phase in self.phases[:-1]:
            ends.append(phase.lasts_s + (ends[-1] if ends else 0.0))
        return tuple(ends)

    def pause_at(self, now_s: float) -> float:
        """Return when the pause that holds at this time ends, or 0 if none does."""
        if self.pause_s <= 0.0:
            return 0.0
        # the first pause comes after a third of the cycle, when every controller has settled
        since_s = (now_s - self.pause_every_s * 2 / 3) % self.pause_every_s
        if now_s < self.pause_every_s * 2 / 3 or since_s >= self.pause_s:
            return 0.0
        return now_s - since_s + self.pause_s


def jittered(random: Random, value_s: float, ratio: float) -> float:
    """Return the value with a normal error, cut off at three deviations."""
    error = max(-3.0, min(3.0, random.gauss(0.0, 1.0)))
    return value_s * (1.0 + ratio * error)


STEADY = Phase(kernels=20, kernel_s=0.001, gap_s=0.005)
PAUSES_S = (5.0, 10.0, 15.0, 20.0, 30.0, 60.0)

T1 = Trace(name="T1 steady training", kind=Kind.CLOSED, phases=(STEADY,))
T2 = Trace(
    name="T2 input bound",
    kind=Kind.INPUT,
    phases=(Phase(kernels=10, kernel_s=0.001, gap_s=0.025),),
)
T3 = Trace(
    name="T3 inference",
    kind=Kind.POISSON,
    phases=(Phase(kernels=10, kernel_s=0.001, gap_s=1 / 30),),
)
T4 = Trace(
    name="T4 phases",
    kind=Kind.CLOSED,
    phases=(
        Phase(kernels=20, kernel_s=0.001, gap_s=0.005, lasts_s=20.0, ident=1),
        Phase(kernels=20, kernel_s=0.0005, gap_s=0.015, lasts_s=20.0, ident=2),
        Phase(kernels=30, kernel_s=0.001, gap_s=0.003, lasts_s=20.0, ident=3),
    ),
)
T5 = tuple(
    Trace(
        name=f"T5 pause {pause_s:g} s",
        kind=Kind.CLOSED,
        phases=(STEADY,),
        pause_s=pause_s,
        lasts_s=300.0,
    )
    for pause_s in PAUSES_S
)
T6 = (
    Trace(name="T6 neighbour 4 ms", kind=Kind.CLOSED, phases=(STEADY,), neighbour_kernel_s=0.004),
    Trace(
        name="T6 neighbour 0.25 ms", kind=Kind.CLOSED, phases=(STEADY,), neighbour_kernel_s=0.00025
    ),
)
# a graph of twenty kernels is one launch of twenty milliseconds
T7 = Trace(name="T7 neighbour graphs", kind=Kind.CLOSED, phases=(STEADY,), neighbour_kernel_s=0.02)
T8 = Trace(name="T8 agent killed", kind=Kind.CLOSED, phases=(STEADY,), agent_dies_every_s=20.0)
TRACES = (T1, T2, T3, T4, *T5, *T6, T7, T8)
