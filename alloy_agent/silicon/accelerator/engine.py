"""How an emulated accelerator executes work: time goes in, completions come out.

The engine has no clock. Whoever drives it says what time it is, so one and the same engine runs
the simulated clock of the benchmark and the wall clock of the device process.

Rules that stay true in here:

* Contexts have queues of their own, first in, first out; nothing is ever executed twice.
* A context that becomes ready while another one executes waits for that one's time slice, or for
  the end of its kernel, as the mode says; nobody looks into the future.
* Device time is accounted to the context that had it; a switch is accounted to nobody.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum

QUANTUM_S = 0.002
SWITCH_S = 50e-6
INTERFERENCE = 1.3
TINY_S = 1e-12  # below this, what is left of a kernel is rounding


class Mode(StrEnum):
    """How several contexts share the device."""

    ROUND_ROBIN = "round_robin"  # time slices with a switch cost
    RUN_TO_COMPLETION = "run_to_completion"  # in order of submission, kernel by kernel
    TWO_SLOTS = "two_slots"  # two at once, each slower by the interference factor


class Work:
    """One submission: `kernels` launches that take `duration_s` together when alone."""

    __slots__ = ("context", "duration_s", "ended_s", "ident", "kernels", "left_s", "submitted_s")

    def __init__(self, context: str, duration_s: float, kernels: int = 1, ident: int = 0) -> None:
        self.context = context
        self.duration_s = duration_s
        self.kernels = kernels
        self.ident = ident
        self.left_s = duration_s
        self.submitted_s = 0.0
        self.ended_s = 0.0


class Engine:
    """An accelerator at one moment; `advance` moves it to a later one."""

    def __init__(
        self,
        mode: Mode = Mode.ROUND_ROBIN,
        quantum_s: float = QUANTUM_S,
        switch_s: float = SWITCH_S,
        interference: float = INTERFERENCE,
        now_s: float = 0.0,
    ) -> None:
        self.mode = mode
        self.quantum_s = quantum_s
        self.switch_s = switch_s
        self.interference = interference
        self.now_s = now_s
        self.queues: dict[str, deque[Work]] = {}
        self.busy_s: dict[str, float] = {}
        self.resident: str | None = None  # whose state the device holds
        self._slice_left_s = 0.0
        self._switch_left_s = 0.0
        self._ready = 0  # contexts that have work
        self._done: list[Work] = []

    def submit(self, work: Work, now_s: float) -> None:
        """Queue work; `advance(now_s)` has been called before."""
        work.submitted_s = now_s
        queue = self.queues.get(work.context)
        if queue is None:
            queue = self.queues[work.context] = deque()
            self.busy_s.setdefault(work.context, 0.0)
        self._ready += not queue
        queue.append(work)

    def drop(self, context: str) -> int:
        """Forget a context and what it queued; return how much work was lost."""
        lost = len(self.queues.pop(context, ()))
        self._ready -= lost > 0
        if self.resident == context:
            self.resident, self._switch_left_s = None, 0.0
        return lost

    def advance(self, now_s: float) -> list[Work]:
        """Execute until `now_s` and return what was completed, in order."""
        done: list[Work] = []
        while self.now_s < now_s:
            done += self.run_until(now_s)
        return done

    def run_until(self, limit_s: float) -> list[Work]:
        """Execute until something completes, at the latest until `limit_s`; return what did."""
        self._done = []
        while self.now_s < limit_s and not self._done:
            step_s = self._next_step_s()
            if step_s >= limit_s - self.now_s:
                if step_s < math.inf:
                    self._execute(limit_s - self.now_s)
                self.now_s = limit_s
                break
            self._execute(step_s)
        return self._done

    def next_s(self) -> float:
        """Return when something will happen if nobody submits; infinity when idle."""
        return self.now_s + self._next_step_s()

    def _next_step_s(self) -> float:
        if not self._ready:
            return math.inf
        if self.mode is Mode.TWO_SLOTS:
            factor = self.interference if self._ready > 1 else 1.0
            return min(self.queues[c][0].left_s for c in self._slots()) * factor
        queue = self.queues.get(self.resident or "")
        if not queue or self._ready > 1:
            queue = self._choose(queue)
        if self._switch_left_s > 0.0:
            return self._switch_left_s
        left_s = queue[0].left_s
        if self._ready > 1 and self.mode is Mode.ROUND_ROBIN and self._slice_left_s < left_s:
            return self._slice_left_s
        return left_s

    def _slots(self) -> list[str]:
        """Return the two contexts that execute at once."""
        return [context for context, queue in self.queues.items() if queue][:2]

    def _choose(self, current: deque[Work] | None) -> deque[Work]:
        """Make the context whose turn it is resident, and return its queue."""
        if self.mode is Mode.RUN_TO_COMPLETION:
            if current and current[0].left_s < current[0].duration_s:
                return current
            ready = [context for context, queue in self.queues.items() if queue]
            chosen = min(ready, key=lambda c: self.queues[c][0].submitted_s)
        elif current and self._slice_left_s > TINY_S:
            return current
        else:
            chosen = self._next_in_turn()
        self._slice_left_s = self.quantum_s
        if chosen != self.resident:
            self.resident = chosen
            self._switch_left_s = self.switch_s
        return self.queues[chosen]

    def _next_in_turn(self) -> str:
        order = list(self.queues)
        begin = order.index(self.resident) + 1 if self.resident in self.queues else 0
        return next(c for c in (*order[begin:], *order[:begin]) if self.queues[c])

    def _execute(self, step_s: float) -> None:
        self.now_s += step_s
        if self.mode is Mode.TWO_SLOTS:
            factor = self.interference if self._ready > 1 else 1.0
            for context in self._slots():
                self._consume(context, step_s / factor, step_s)
            return
        if self._switch_left_s > 0.0:
            left_s = self._switch_left_s - step_s
            self._switch_left_s = left_s if left_s > TINY_S else 0.0
            return
        self._slice_left_s -= step_s
        if self._slice_left_s <= TINY_S and self._ready == 1:  # nobody waits: another slice
            self._slice_left_s += self.quantum_s * (1 + (-self._slice_left_s) // self.quantum_s)
        self._consume(self.resident or "", step_s, step_s)

    def _consume(self, context: str, progress_s: float, held_s: float) -> None:
        queue = self.queues[context]
        head = queue[0]
        head.left_s -= progress_s
        self.busy_s[context] += held_s
        if head.left_s <= TINY_S:
            head.ended_s = self.now_s
            self._done.append(queue.popleft())
            self._ready -= not queue
