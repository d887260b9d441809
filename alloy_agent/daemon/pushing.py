"""When the brain is sent a sample: right behind the tick that made it.

Theory of operation. The loop tells each worker from when on it wants to hear of a tick
(`Worker.tell_tick`) and sleeps. The first tick at or after that wakes it through an event
descriptor, so a sample leaves while it is fresh, nobody polls, and ticks that nobody waits for wake
nobody. Where a worker does not tick, the loop wakes by itself and sends what there is.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from alloy_agent.daemon.loops import Loop

if TYPE_CHECKING:
    from alloy_agent.worker import Worker

GRACE_S: Final = 0.002  # that the ticks of several workers may be apart
NO_TICK_S: Final = 0.05  # behind the tick that was due


class PushLoop(Loop):
    """Ticks behind the ticks of the samplers, at most every `period_s`.

    Args:
        workers: Whose ticks.
        period_s: Least time between two ticks of the loop.
        tick: What is done.
        on_defect: Told of a broken invariant.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        period_s: float,
        tick: Callable[[], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        super().__init__("telemetry", period_s, tick, on_defect)
        self._workers = workers
        self._poll = select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_fd)
        self._poll.register(self._wake_fd, select.POLLIN)
        for worker in workers:
            self._poll.register(worker.tick_fd, select.POLLIN)

    def wake(self) -> None:
        """Tick as soon as possible."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ask for the end; the tick in hand ends first."""
        self._stop.set()
        self.wake()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.is_set():
            self._await(due_s)
            if self._stop.is_set() or not self._once():
                return
            due_s = time.monotonic() + self.period_s

    def _await(self, due_s: float) -> None:
        """Return behind the first tick of each worker that comes when one is due."""
        ticking = [worker for worker in self._workers if worker.pages()]
        period_s = max((worker.period_s() for worker in ticking), default=0.0)
        from_ns = int((due_s - period_s / 2) * 1e9)  # nearer to when it is due than the one before
        for worker in ticking:
            worker.tell_tick(max(1, from_ns))
        awaited = {worker.tick_fd for worker in ticking}
        until_s = due_s + (period_s * 1.5 + NO_TICK_S if ticking else 0.0)
        while (left_s := until_s - time.monotonic()) > 0:
            told = {fd for fd, _ in self._poll.poll(left_s * 1000)}
            for fd in told:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            if self._wake_fd in told:
                return
            if told and not awaited - told:
                return
            if told:
                awaited -= told
                until_s = min(until_s, time.monotonic() + GRACE_S)
