"""The threads on which a worker calls its backend, and the gates that keep calls from overlapping.

Each device has one gate and one lane. Whoever calls the backend for a device holds its gate
meanwhile, so at most one thread can be stuck in a device. A lane is a thread that works off the
device's calls in order.

Rules that stay true in here:

* A call is never begun after its deadline: nobody waits for it, and a late change of hardware is
  the worst surprise.
* A device whose call has outlived its deadline is stalled: further calls are refused at once, not
  queued.
* When the call returns at last, the device is well again; the other side drops the late result.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from alloy_agent.errors import DeviceStalledError
from alloy_agent.worker.board import CELLS, DOING, DOING_CODES

if TYPE_CHECKING:
    from collections.abc import Callable

    from alloy_agent.worker.board import Board

QUEUE_MAX: Final = 32
LOG = logging.getLogger(__name__)


class Gate:
    """Lets one thread at a time into a device, and shows on the board who is inside."""

    def __init__(self, board: Board, cell: int, name: str) -> None:
        if cell >= CELLS:
            raise DeviceStalledError(f"{name}: a worker has room for {CELLS} devices only")
        board.name_cell(cell, name)
        self._words = board.words
        self._word = board.cell_word(cell)
        self._lock = threading.Lock()
        self.deadline_ns = 0

    def enter(
        self, doing: int, deadline_ns: int, wait_s: float = 0.0, now_ns: int | None = None
    ) -> bool:
        """Return whether the device is ours now, waiting up to `wait_s` for it.

        Args:
            doing: What for.
            deadline_ns: When it should be done.
            wait_s: How long to wait.
            now_ns: The time, from a caller that does not wait and has just read it.
        """
        if not (self._lock.acquire(timeout=wait_s) if wait_s > 0 else self._lock.acquire(False)):
            return False
        word, words = self._word, self._words
        self.deadline_ns = deadline_ns
        words[word + 1] = time.monotonic_ns() if now_ns is None else now_ns
        words[word + 2] = threading.get_ident()
        words[word] = doing
        return True

    def leave(self) -> None:
        """Let the next one in."""
        self._words[self._word] = 0
        self._lock.release()

    def relabel(self, doing: int, deadline_ns: int) -> None:
        """Go on to another call without leaving."""
        word, words = self._word, self._words
        self.deadline_ns = deadline_ns
        words[word + 1] = time.monotonic_ns()
        words[word] = doing

    def since_ns(self) -> int:
        """Return since when the call inside has been running; 0 when nobody is inside."""
        return int(self._words[self._word + 1]) if self._words[self._word] else 0

    def stalled(self, now_ns: int) -> str:
        """Return what runs past its deadline and for how long; empty when nothing does."""
        doing = int(self._words[self._word])
        if not doing or now_ns <= self.deadline_ns:
            return ""
        since_ns = int(self._words[self._word + 1])
        return f"{DOING[doing]} has not returned for {(now_ns - since_ns) / 1e9:.2f} s"


class Job:
    """One call to make, and what to do with its result or its failure."""

    __slots__ = ("deadline_ns", "doing", "done", "failed", "run")

    def __init__(
        self,
        doing: str,
        deadline_ns: int,
        run: Callable[[], object],
        done: Callable[[object], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.doing = doing
        self.deadline_ns = deadline_ns
        self.run = run
        self.done = done
        self.failed = failed


class Lane:
    """A thread that works off the calls of one device (or one kind of device-less call)."""

    def __init__(self, name: str, gate: Gate, after: Callable[[], None] | None = None) -> None:
        self.name = name
        self.gate = gate
        self._after = after
        self._jobs: queue.Queue[Job] = queue.Queue(QUEUE_MAX)
        self._started = False

    def submit(self, job: Job) -> None:
        """Queue one job, or fail it at once when the device is stalled or the queue is full."""
        stalled = self.gate.stalled(time.monotonic_ns())
        if stalled:
            job.failed(DeviceStalledError(f"{self.name}: {stalled}"))
            return
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self.name[-15:], daemon=True).start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            job.failed(DeviceStalledError(f"{self.name}: {QUEUE_MAX} calls are waiting already"))

    def _work(self) -> None:
        while True:
            self._do(self._jobs.get())

    def _do(self, job: Job) -> None:
        wait_s = (job.deadline_ns - time.monotonic_ns()) / 1e9
        if wait_s <= 0 or not self.gate.enter(DOING_CODES[job.doing], job.deadline_ns, wait_s):
            job.failed(DeviceStalledError(f"{self.name}: {job.doing} found no turn in time"))
            return
        try:
            result = job.run()
        except Exception as exc:  # noqa: BLE001 - it crosses to the caller, whatever it is
            job.failed(exc)
        else:
            job.done(result)
        try:
            if self._after is not None:
                self._after()
        except Exception:
            LOG.exception("lane_after_failed", extra={"device": self.name})
        finally:
            self.gate.leave()
