"""A shared device on a simulated clock: production, neighbours and whoever controls them.

Nothing here depends on the host: a trace, a seed and a controller give the same figures anywhere.
The controller is the `Control` it is handed; the simulation knows no policy.

Rules that stay true in here:

* A burst of production is what its own page would show: busy from the first outstanding launch to
  the last completion. It is *contended* unless no neighbour had anything outstanding since the
  end of the burst before it.
* Requests of an open-loop production are measured from arrival to completion.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from alloy_agent.silicon.accelerator.engine import Engine, Work
from alloy_agent.silicon.accelerator.workloads import Kind, Trace, jittered

PRODUCTION = "production"


@dataclass(frozen=True)
class SeenBurst:
    """One busy period of production as its page shows it."""

    started_s: float
    ended_s: float
    idle_since_s: float  # end of the burst before it
    kernels: int
    signature: int
    contended: bool


@dataclass
class View:
    """What the pages of a shared device show at this moment."""

    outstanding: int = 0  # launches of production
    busy_since_s: float = 0.0
    idle_since_s: float = 0.0
    bursts_done: int = 0
    kernels: int = 0  # of production, ever launched
    neighbour_active_s: float = -1.0  # last time any neighbour had something outstanding
    neighbour_outstanding: int = 0
    kernels_in_burst: int = 0
    signature: int = 0
    bursts: list[SeenBurst] = field(default_factory=list)  # not yet fetched by the controller


class Control(Protocol):
    """Whoever lets the neighbours launch."""

    depth: int  # launches that a neighbour may have queued
    period_s: float  # of `tick`; 0 for none

    def admit(self, view: View, now_s: float, kernel_s: float, held_s: float) -> float:
        """Return `now_s` to let one launch pass, or when to ask again (infinity: on an event).

        `held_s` is the device time that this neighbour has outstanding already.
        """
        ...

    def tick(self, view: View, now_s: float) -> None:
        """Look at the pages and decide."""
        ...


@dataclass
class Outcome:
    """What a run came to."""

    lasts_s: float
    work: list[tuple[float, float]] = field(default_factory=list)  # (time, solo device time done)
    latency_s: list[tuple[float, float, float]] = field(default_factory=list)  # end, took, expected
    lent: list[tuple[float, float]] = field(default_factory=list)  # (time, device time)
    bursts: int = 0


class Simulation:
    """One run of a trace under a control."""

    def __init__(
        self, trace: Trace, control: Control, seed: int, engine: Engine | None = None
    ) -> None:
        self.trace = trace
        self.control = control
        self.engine = engine or Engine()
        self.view = View()
        self.now_s = 0.0
        self.outcome = Outcome(trace.lasts_s)
        self._random = Random(seed)  # noqa: S311 - a workload, no secret
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._neighbours: list[Neighbour] = []
        self._production = Production(self)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call back at a time."""
        heapq.heappush(self._events, (time_s, next(self._count), action))

    def add_neighbour(self, kernel_s: float | None = None) -> Neighbour:
        """Add an opportunistic tenant that always has work."""
        kernel_s = self.trace.neighbour_kernel_s if kernel_s is None else kernel_s
        neighbour = Neighbour(self, f"neighbour-{len(self._neighbours)}", kernel_s)
        self._neighbours.append(neighbour)
        return neighbour

    def run(self) -> Outcome:
        """Return what came of it."""
        self._production.start(self._random)
        for neighbour in self._neighbours:
            self.at(0.0, neighbour.ask)
        if self.control.period_s > 0.0:
            self.at(self.control.period_s, self._tick)
        end_s = self.trace.lasts_s
        while self.now_s < end_s:
            due_s = self._events[0][0] if self._events else math.inf
            self.now_s = min(due_s, self.engine.next_s(), end_s)
            for work in self.engine.advance(self.now_s):
                self._completed(work)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
        return self.outcome

    def launch(self, work: Work) -> None:
        """Put work on the device."""
        self.engine.submit(work, self.now_s)

    def wake(self) -> None:
        """Let every neighbour ask again."""
        for neighbour in self._neighbours:
            neighbour.ask()

    def _tick(self) -> None:
        self.control.tick(self.view, self.now_s)
        self.view.bursts.clear()
        self.at(self.now_s + self.control.period_s, self._tick)
        self.wake()

    def _completed(self, work: Work) -> None:
        if work.context == PRODUCTION:
            self._production.completed(work)
        else:
            next(n for n in self._neighbours if n.name == work.context).completed(work)


class Production:
    """The tenant that was promised its solo speed."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._random = Random()  # noqa: S311
        self._waiting: list[tuple[float, float]] = []  # arrival, expected, in order of submission
        self._input_s = 0.0
        self._contended = False

    def start(self, random: Random) -> None:
        """Begin; the same seed gives the same work, whatever the control does."""
        self._random = random
        if self._sim.trace.kind is Kind.POISSON:
            self._arrival()
        else:
            self._input_s = self._sim.trace.phases[0].gap_s
            self._sim.at(0.0, self._burst)

    def _arrival(self) -> None:
        phase = self._sim.trace.phase_at(self._sim.now_s)
        wait_s = self._random.expovariate(1.0 / phase.gap_s)
        self._sim.at(self._sim.now_s + wait_s, self._arrive)

    def _arrive(self) -> None:
        self._burst()
        self._arrival()

    def _burst(self) -> None:
        sim, view = self._sim, self._sim.view
        paused_until_s = sim.trace.pause_at(sim.now_s)
        if paused_until_s > sim.now_s:
            sim.at(paused_until_s, self._burst)
            return
        phase = sim.trace.phase_at(sim.now_s)
        # three per cent is the spread of a whole burst
        duration_s = jittered(self._random, phase.burst_s, sim.trace.jitter_ratio)
        if view.outstanding == 0:
            view.busy_since_s = sim.now_s
            self._contended = (
                view.neighbour_outstanding > 0 or view.neighbour_active_s > view.idle_since_s
            )
            view.kernels_in_burst, view.signature = 0, 0
        view.outstanding += phase.kernels
        view.kernels += phase.kernels
        view.kernels_in_burst += phase.kernels
        view.signature |= 1 << (phase.ident % 64)
        self._waiting.append((sim.now_s, duration_s))
        sim.launch(Work(PRODUCTION, duration_s, phase.kernels, phase.ident))

    def completed(self, work: Work) -> None:
        """Account for a burst and plan the next one."""
        sim, view = self._sim, self._sim.view
        arrived_s, expected_s = self._waiting.pop(0)
        sim.outcome.work.append((sim.now_s, expected_s))
        sim.outcome.latency_s.append((sim.now_s, sim.now_s - arrived_s, expected_s))
        sim.outcome.bursts += 1
        view.outstanding -= work.kernels
        if view.outstanding == 0:
            view.bursts.append(
                SeenBurst(
                    started_s=view.busy_since_s,
                    ended_s=sim.now_s,
                    idle_since_s=view.idle_since_s,
                    kernels=view.kernels_in_burst,
                    signature=view.signature,
                    contended=self._contended or view.neighbour_active_s > view.busy_since_s,
                )
            )
            view.idle_since_s = sim.now_s
            view.bursts_done += 1
            sim.wake()
        self._next()

    def _next(self) -> None:
        sim = self._sim
        phase = sim.trace.phase_at(sim.now_s)
        if sim.trace.kind is Kind.CLOSED:
            pause_s = jittered(self._random, phase.gap_s, sim.trace.jitter_ratio)
            sim.at(sim.now_s + pause_s, self._burst)
        elif sim.trace.kind is Kind.INPUT:
            # the item in the buffer was ready at `_input_s`; taking it lets the next one be made
            taken_s = max(sim.now_s, self._input_s)
            sim.at(taken_s, self._burst)
            made_s = self._input_s + jittered(self._random, phase.gap_s, sim.trace.jitter_ratio)
            self._input_s = max(made_s, taken_s)


class Neighbour:
    """An opportunistic tenant that is always hungry."""

    def __init__(self, simulation: Simulation, name: str, kernel_s: float) -> None:
        self.name = name
        self.launched = 0
        self._sim = simulation
        self._kernel_s = kernel_s
        self._outstanding = 0
        self._held_s = 0.0
        self._asks_at_s = math.inf

    def ask(self) -> None:
        """Launch all that is let through; ask again when told to."""
        sim = self._sim
        while self._outstanding < sim.control.depth:
            when_s = sim.control.admit(sim.view, sim.now_s, self._kernel_s, self._held_s)
            if when_s > sim.now_s:
                self._later(when_s)
                return
            self._outstanding += 1
            self.launched += 1
            self._held_s += self._kernel_s
            sim.view.neighbour_outstanding += 1
            sim.view.neighbour_active_s = sim.now_s
            sim.launch(Work(self.name, self._kernel_s))

    def completed(self, _work: Work) -> None:
        """Account for one kernel."""
        sim = self._sim
        self._outstanding -= 1
        self._held_s = max(0.0, self._held_s - self._kernel_s) if self._outstanding else 0.0
        sim.view.neighbour_outstanding -= 1
        sim.view.neighbour_active_s = sim.now_s
        sim.outcome.lent.append((sim.now_s, self._kernel_s))
        self.ask()

    def _later(self, when_s: float) -> None:
        if when_s == math.inf or self._sim.now_s < self._asks_at_s <= when_s:
            return
        self._asks_at_s = when_s
        self._sim.at(when_s, self._asked)

    def _asked(self) -> None:
        self._asks_at_s = math.inf
        self.ask()
