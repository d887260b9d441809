"""A sample leaves behind the tick that made it, and leaves all the same where nothing ticks."""

from __future__ import annotations

import os
import threading
import time

import pytest

from alloy_agent.daemon.pushing import PushLoop
from alloy_agent.errors import InvariantError

WAIT_S = 30.0


class Ticker:
    """A worker whose ticks a test makes."""

    def __init__(self, *, samples: bool = True) -> None:
        self.tick_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.samples = samples
        self.asked = threading.Semaphore(0)
        self.due_ns = 0

    def pages(self) -> dict[str, object]:
        """Return a page, if it samples."""
        return {"d": object()} if self.samples else {}

    def period_s(self) -> float:
        """Return a period that no test waits for."""
        return 3600.0

    def tell_tick(self, due_ns: int) -> None:
        """Note that a tick is waited for."""
        self.due_ns = due_ns
        self.asked.release()

    def tick(self) -> None:
        """Tick once somebody waits for it."""
        assert self.asked.acquire(timeout=WAIT_S)
        os.eventfd_write(self.tick_fd, 1)


class Pushes:
    """Counts what a loop does."""

    def __init__(self) -> None:
        self.count = threading.Semaphore(0)
        self.defects: list[BaseException] = []
        self.fails_with: BaseException | None = None

    def __call__(self) -> None:
        self.count.release()
        if self.fails_with is not None:
            raise self.fails_with

    def one(self) -> bool:
        """Wait for a push."""
        return self.count.acquire(timeout=WAIT_S)

    def none(self) -> bool:
        """Whether there is no push that was not waited for."""
        return not self.count.acquire(blocking=False)


@pytest.fixture
def pushes() -> Pushes:
    return Pushes()


def running(pushes: Pushes, *workers: Ticker, period_s: float = 0.01) -> PushLoop:
    loop = PushLoop(workers, period_s, pushes, pushes.defects.append)  # type: ignore[arg-type]
    loop.start()
    return loop


def ended(loop: PushLoop) -> bool:
    loop.stop()
    return loop.join(WAIT_S)


def test_each_tick_that_is_due_is_pushed_once(pushes: Pushes) -> None:
    """No push before the tick, one behind it, and none before the next."""
    worker = Ticker()
    loop = running(pushes, worker)
    for _ in range(3):
        assert worker.asked.acquire(timeout=WAIT_S)
        assert pushes.none()
        os.eventfd_write(worker.tick_fd, 1)
        assert pushes.one()
    assert pushes.none()
    assert ended(loop)


def test_the_next_tick_is_asked_for_a_period_later(pushes: Pushes) -> None:
    """The tick that is waited for is the one nearest to the period's end."""
    worker = Ticker()
    worker.period_s = lambda: 0.1  # type: ignore[method-assign]
    loop = running(pushes, worker, period_s=600.0)
    worker.tick()
    assert pushes.one()
    pushed_ns = time.monotonic_ns()
    assert worker.asked.acquire(timeout=WAIT_S)
    assert 590e9 < worker.due_ns - pushed_ns < 600e9
    assert ended(loop)


@pytest.mark.parametrize("samples", [True, False])
def test_without_ticks_it_pushes_all_the_same(pushes: Pushes, samples: bool) -> None:
    """A worker that is down, or samples nothing, does not silence the node."""
    worker = Ticker(samples=samples)
    worker.period_s = lambda: 0.01  # type: ignore[method-assign]
    loop = running(pushes, worker)
    assert pushes.one()
    assert pushes.one()
    assert ended(loop)


def test_the_ticks_of_several_workers_are_one_push(pushes: Pushes) -> None:
    """Workers on one grid are waited for together."""
    workers = Ticker(), Ticker()
    for worker in workers:
        os.eventfd_write(worker.tick_fd, 1)
    loop = running(pushes, *workers)
    assert pushes.one()
    for worker in workers:  # the loop waits for the next ticks
        assert worker.asked.acquire(timeout=WAIT_S)
        assert worker.asked.acquire(timeout=WAIT_S)
    assert pushes.none()
    assert ended(loop)


def test_a_wake_pushes_at_once_and_a_stop_ends_it(pushes: Pushes) -> None:
    """Neither waits for a tick."""
    loop = running(pushes, Ticker(), period_s=600.0)
    loop.wake()
    assert pushes.one()
    assert ended(loop)
    assert pushes.none()


def test_a_broken_invariant_is_told_and_ends_it(pushes: Pushes) -> None:
    """A defect is no weather: the loop ends, and whoever started it knows."""
    worker = Ticker()
    pushes.fails_with = InvariantError("broken")
    loop = running(pushes, worker)
    worker.tick()
    assert pushes.one()
    assert loop.join(WAIT_S)
    assert pushes.defects == [pushes.fails_with]


def test_another_failure_is_counted_and_the_loop_goes_on(pushes: Pushes) -> None:
    """What one push meets does not end those behind it."""
    worker = Ticker()
    pushes.fails_with = OSError("full")
    loop = running(pushes, worker)
    worker.tick()
    assert pushes.one()
    pushes.fails_with = None
    worker.tick()
    assert pushes.one()
    assert loop.failures == 1
    assert ended(loop)
