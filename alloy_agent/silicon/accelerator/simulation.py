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
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
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
    overlap_s: float  # for how long neighbours had something outstanding within it


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
    neighbour_busy_s: float = 0.0  # how long neighbours had something outstanding, until the last
    kernels_in_burst: int = 0
    signature: int = 0
    agent_gone_s: float = math.inf  # since when nobody ticks
    bursts: list[SeenBurst] = field(default_factory=list)  # not yet fetched by the controller


class Control(Protocol):
    """Whoever lets the neighbours launch."""

    depth: int  # launches that a neighbour may have queued
    batch: int  # kernels that are one launch of the simulation; more than 1 where each would pass
    period_s: float  # of `tick`; 0 for none

    def admit(self, view: View, now_s: float, kernel_s: float, held_s: float) -> float:
        """Return `now_s` to let one launch pass, or when to ask again (infinity: on an event).

        `held_s` is the device time that this neighbour has outstanding already.
        """
        ...

    def tick(self, view: View, now_s: float) -> None:
        """Look at the pages and decide."""
        ...


class Ledger:
    """Amounts in order of time, of which any span can be summed at once."""

    def __init__(self) -> None:
        self._at = array("d")
        self._sums = array("d", [0.0])

    def add(self, now_s: float, amount: float) -> None:
        """Enter an amount, no earlier than the one before it."""
        self._at.append(now_s)
        self._sums.append(self._sums[-1] + amount)

    def between(self, begin_s: float, end_s: float = math.inf) -> float:
        """Return the sum of what was entered from `begin_s` until before `end_s`."""
        first, last = bisect_left(self._at, begin_s), bisect_left(self._at, end_s)
        return self._sums[last] - self._sums[first]

    def since(self, begin_s: float) -> int:
        """Return how many entries there are from a time on."""
        return len(self._at) - bisect_left(self._at, begin_s)

    def entries(self, begin_s: float) -> Iterator[float]:
        """Yield the amounts from a time on."""
        for n in range(bisect_left(self._at, begin_s), len(self._at)):
            yield self._sums[n + 1] - self._sums[n]


class Outcome:
    """What a run came to."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s
        self.work = Ledger()  # device time that production's bursts take alone, as they end
        self.latency_s = Ledger()  # from arrival to completion, as they end
        self.lent = Ledger()  # device time of neighbours' kernels, as they end


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
        self._deaths = Random(-seed)  # noqa: S311
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._neighbours: dict[str, Neighbour] = {}
        self._production = Production(self)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call back at a time."""
        heapq.heappush(self._events, (time_s, next(self._count), action))

    def add_neighbour(self, kernel_s: float | None = None) -> Neighbour:
        """Add an opportunistic tenant that always has work."""
        kernel_s = self.trace.neighbour_kernel_s if kernel_s is None else kernel_s
        kernel_s *= self.control.batch
        neighbour = Neighbour(self, f"neighbour-{len(self._neighbours)}", kernel_s)
        self._neighbours[neighbour.name] = neighbour
        return neighbour

    def run(self) -> Outcome:
        """Return what came of it."""
        self._production.start(self._random)
        for neighbour in self._neighbours.values():
            self.at(0.0, neighbour.ask)
        if self.control.period_s > 0.0:
            self.at(self.control.period_s, self._tick)
        self._agent_lives()
        end_s = self.trace.lasts_s
        events, engine = self._events, self.engine
        while self.now_s < end_s:
            done = engine.run_until(min(events[0][0], end_s) if events else end_s)
            self.now_s = engine.now_s
            for work in done:
                self._completed(work)
            while events and events[0][0] <= self.now_s:
                heapq.heappop(events)[2]()
        return self.outcome

    def launch(self, work: Work) -> None:
        """Put work on the device."""
        self.engine.submit(work, self.now_s)

    def neighbour_busy_s(self) -> float:
        """Return for how long neighbours have had something outstanding, ever."""
        view = self.view
        running_s = self.now_s - view.neighbour_active_s if view.neighbour_outstanding else 0.0
        return view.neighbour_busy_s + running_s

    def neighbours_active(self, more: int) -> None:
        """Note that neighbours have more, or less, outstanding."""
        view = self.view
        if view.neighbour_outstanding:
            view.neighbour_busy_s += self.now_s - view.neighbour_active_s
        view.neighbour_outstanding += more
        view.neighbour_active_s = self.now_s

    def wake(self) -> None:
        """Let every neighbour ask again."""
        for neighbour in self._neighbours.values():
            neighbour.ask()

    def _tick(self) -> None:
        if self.view.agent_gone_s == math.inf:
            self.control.tick(self.view, self.now_s)
            self.view.bursts.clear()
            self.wake()
        self.at(self.now_s + self.control.period_s, self._tick)

    def _agent_lives(self) -> None:
        self.view.agent_gone_s = math.inf
        if self.trace.agent_dies_every_s < math.inf:
            lives_s = self._deaths.expovariate(1.0 / self.trace.agent_dies_every_s)
            self.at(self.now_s + lives_s, self._agent_dies)

    def _agent_dies(self) -> None:
        self.view.agent_gone_s = self.now_s
        self.at(self.now_s + self.trace.agent_back_s, self._agent_lives)

    def _completed(self, work: Work) -> None:
        if work.context == PRODUCTION:
            self._production.completed(work)
        else:
            self._neighbours[work.context].completed()


class Production:
    """The tenant that was promised its solo speed."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._random = Random()  # noqa: S311
        self._waiting: deque[tuple[float, float]] = deque()  # arrival, expected
        self._input_s = 0.0
        self._contended = False
        self._overlap_from_s = 0.0

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
            self._overlap_from_s = sim.neighbour_busy_s()
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
        arrived_s, expected_s = self._waiting.popleft()
        sim.outcome.work.add(sim.now_s, expected_s)
        sim.outcome.latency_s.add(sim.now_s, sim.now_s - arrived_s)
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
                    overlap_s=sim.neighbour_busy_s() - self._overlap_from_s,
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
            sim.neighbours_active(1)
            sim.launch(Work(self.name, self._kernel_s))

    def completed(self) -> None:
        """Account for one kernel."""
        sim = self._sim
        self._outstanding -= 1
        self._held_s = max(0.0, self._held_s - self._kernel_s) if self._outstanding else 0.0
        sim.neighbours_active(-1)
        sim.outcome.lent.add(sim.now_s, self._kernel_s)
        self.ask()

    def _later(self, when_s: float) -> None:
        if when_s >= self._asks_at_s:  # it asks before that anyway
            return
        self._asks_at_s = when_s
        self._sim.at(when_s, self._asked)

    def _asked(self) -> None:
        if self._sim.now_s >= self._asks_at_s:  # else an earlier question took its place
            self._asks_at_s = math.inf
            self.ask()
