"""The deadline threads that sample devices into their pages.

One runner thread samples all devices in turn on a common grid of absolute deadlines. A device whose
sample does not return in time keeps that thread, and a new runner takes over the others: a device
that blocks costs its siblings one late tick, once. It stays on a thread of its own until it has
been in time for a minute, so slowness that comes back costs them nothing. A wake-up costs more than
the reads, so a thread for each device from the start would cost as many times the CPU as there are
devices.

Rules that stay true in here:

* A device is sampled inside its gate, never waited for: a tick that finds it in another call is
  made up by that call's thread when it leaves, or counted as skipped.
* The grid is `CLOCK_MONOTONIC` modulo the period, so a late tick never shifts the next one; a tick
  that could not be held is counted as missed.
* Everything that a tick needs is made before it; the garbage collector never runs on its own in a
  worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import threading
import time
from time import CLOCK_BOOTTIME as CLOCK
from time import clock_gettime as boottime_s
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from alloy_agent.worker import pace
from alloy_agent.worker.board import DOING_CODES, POLICIES, Field
from alloy_agent.worker.ring import PageWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from alloy_agent.backends.base import Backend
    from alloy_agent.model import DeviceId, SignalSpec
    from alloy_agent.worker.board import Board
    from alloy_agent.worker.lanes import Gate
    from alloy_agent.worker.wire import Start

LOG = logging.getLogger(__name__)
# Plain numbers: a member of an enumeration is slow to index with.
TICKS, MISSED, SKIPPED = int(Field.TICKS), int(Field.MISSED), int(Field.SKIPPED)
TELL_NS: Final = int(Field.TELL_NS)
SAMPLE: Final = DOING_CODES["sample"]
SPECS: Final = DOING_CODES["signal_specs"]
FIFO_PRIORITY: Final = 2
NICE: Final = -10
RT_SOFT_US: Final = 200_000  # CPU a real-time thread may take without sleeping before it is demoted
RT_HARD_US: Final = 2_000_000  # ... before the kernel kills the worker
ERROR_SKIP_MAX: Final = 64
SPECS_DEADLINE_NS: Final = 2_000_000_000
APART_S: Final = 60.0
BUDGET_ROUND_S: Final = 2.0
PR_SET_TIMERSLACK: Final = 29


class Seat:
    """What the worker keeps for one device."""

    def __init__(self, device: DeviceId, gate: Gate) -> None:
        self.device = device
        self.gate = gate
        self.page: PageWriter | None = None
        self.specs: tuple[SignalSpec, ...] = ()
        self.epoch = 0
        self.quiesced = False
        self.owed = False  # a tick found the device in another call
        self.respec = True  # the specs must be read (again) before the next sample
        self.pieces: object = None  # what the specs were read for
        self.errors = 0
        self.skip = 0  # ticks to leave out after errors


class Runner:
    """One deadline thread and the seats it samples."""

    def __init__(self, sampler: Sampler, seats: tuple[Seat, ...], *, apart: bool) -> None:
        self.sampler = sampler
        self.seats = seats
        self.apart = apart
        self.current: Seat | None = None
        self.alive = True
        self.ident = 0
        self.native_id = 0
        self.in_time_since_s = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def _run(self) -> None:
        self.ident, self.native_id = threading.get_ident(), threading.get_native_id()
        sampler = self.sampler
        sampler.raise_priority()
        clock, sleep = time.monotonic_ns, time.sleep
        missed = 0
        while self.alive:
            now_ns = clock()
            period_ns = sampler.period_ns
            deadline_ns = (now_ns // period_ns + 1) * period_ns
            sleep((deadline_ns - now_ns) / 1e9)
            now_ns = clock()
            self._pass(now_ns)
            sampler.count(self, now_ns, now_ns - deadline_ns, missed)
            missed = (clock() - deadline_ns) // period_ns

    def _pass(self, now_ns: int) -> None:
        seats, tick = self.seats, self.sampler.tick
        for seat in seats:
            self.current = seat
            now_ns = tick(self, seat, now_ns)
            self.current = None
            if self.seats is not seats:  # set apart while the device held this thread
                return


class Sampler:
    """All runners of a worker, their common pace and their budget."""

    def __init__(
        self,
        backend: Backend,
        board: Board,
        start: Start,
        publish: Callable[[Seat], None],
        tick_fd: int,
    ) -> None:
        """Prepare to sample.

        Args:
            backend: Whose devices.
            board: Where to show how it goes.
            start: What the control side wants.
            publish: Hands a new page to the control side.
            tick_fd: Event descriptor through which it hears of a tick that it waits for.
        """
        self._tick_fd = tick_fd
        self._backend = backend
        self._board = board
        self._words = board.words
        self._cpu_share_max = start.cpu_share_max
        self._deadline_ns = int(start.sample_deadline_s * 1e9)
        self._realtime = start.realtime and limit_realtime()
        self._publish = publish
        self._lock = threading.Lock()
        self._pace = pace.PaceState(rate_hz=pace.checked_rate(start.rate_hz))
        self.period_ns = 0
        self._runners: list[Runner] = []
        self._carriers: list[int] = []  # threads of the event path
        self._slack: Callable[[], None] = _timer_slack()
        self._cpu_s: dict[int, float] = {}
        self._round_at_s = time.monotonic()
        self._round_process_s = time.process_time()
        self._set_period()

    # --- what a tick does ---

    def tick(self, runner: Runner, seat: Seat, now_ns: int) -> int:
        """Sample one device, if it is free, and publish; returns the time it is then."""
        if seat.quiesced or seat.page is None:
            return now_ns
        if seat.skip:
            seat.skip -= 1
            return now_ns
        gate = seat.gate
        if not gate.enter(SAMPLE, now_ns + self._deadline_ns, now_ns=now_ns):
            seat.owed = True
            self._words[SKIPPED] += 1
            return now_ns
        try:
            self.sample(seat)
        finally:
            gate.leave()
        done_ns = monotonic_ns()
        if done_ns - now_ns > self._deadline_ns:
            runner.in_time_since_s = time.monotonic()
            self.set_apart(runner, seat)
        return done_ns

    def sample(self, seat: Seat) -> None:
        """Sample one device whose gate is held."""
        page = seat.page
        if page is None or seat.quiesced:
            return
        seat.owed = False
        page.now_s = boottime_s(CLOCK)
        try:
            self._backend.sample(seat.device, page)
            page.commit(boottime_s(CLOCK))
        except Exception as exc:  # noqa: BLE001 - costs this device some ticks, no more
            self._failed(seat, exc)
            return
        seat.errors = 0

    def _failed(self, seat: Seat, exc: Exception) -> None:
        self._words[Field.ERRORS] += 1
        seat.errors += 1
        seat.skip = min(1 << min(seat.errors, 6), ERROR_SKIP_MAX) - 1
        if seat.errors == 1:
            LOG.warning("sample_failed", extra={"device": seat.device, "cause": str(exc)})

    def count(self, runner: Runner, now_ns: int, late_ns: int, missed: int) -> None:
        """Count one tick of a runner, and tell the control side of it where that waits for one.

        Args:
            runner: Whose tick it was.
            now_ns: When it began.
            late_ns: How long after its deadline.
            missed: How many ticks were missed before it.
        """
        words = self._words
        if missed > 0:
            with self._lock:
                words[MISSED] += missed
        if runner.apart:
            return
        words[TICKS] += 1
        self._board.late(late_ns)
        tell_ns = words[TELL_NS]
        if tell_ns and now_ns >= tell_ns:
            words[TELL_NS] = 0
            os.eventfd_write(self._tick_fd, 1)

    # --- seats ---

    def add(self, seat: Seat, *, apart: bool = False) -> None:
        """Sample one more device from now on; `apart`: on a thread of its own."""
        with self._lock:
            if any(seat in runner.seats for runner in self._runners):
                return
            shared = next((r for r in self._runners if not r.apart), None)
            if shared is not None and not apart:
                shared.seats = (*shared.seats, seat)
                return
            self._start((seat,), apart=apart)

    def _start(self, seats: tuple[Seat, ...], *, apart: bool) -> None:
        runner = Runner(self, seats, apart=apart)
        self._runners.append(runner)
        runner.thread.start()

    def set_apart(self, runner: Runner, seat: Seat) -> None:
        """Leave `runner` to one seat, and give its others a new thread."""
        with self._lock:
            if runner.apart or seat not in runner.seats:
                return
            others = tuple(s for s in runner.seats if s is not seat)
            runner.apart = True
            runner.in_time_since_s = time.monotonic()
            runner.seats = (seat,)
            self._words[Field.TAKEOVERS] += 1
            if others:
                self._start(others, apart=False)
        LOG.warning("device_set_apart", extra={"device": seat.device})

    def read_specs(self, seat: Seat) -> None:
        """Read the signals of a device whose gate is held; a new page when they changed."""
        if seat.quiesced:
            return
        seat.respec = False
        specs = tuple(self._backend.signal_specs(seat.device))
        if seat.page is not None and specs == seat.specs:
            return
        seat.epoch += 1
        page = PageWriter(len(specs), seat.epoch)
        old, seat.page, seat.specs = seat.page, page, specs
        seat.skip = seat.errors = 0
        self._publish(seat)
        if old is not None:
            old.retire()

    def settle(self, seat: Seat) -> None:
        """Do what a call has left over, inside the gate: read specs, make up a tick."""
        if seat.quiesced:
            return
        now_ns = time.monotonic_ns()
        if seat.respec:
            seat.gate.relabel(SPECS, now_ns + SPECS_DEADLINE_NS)
            self.read_specs(seat)
            self.add(seat)
        elif seat.owed:
            seat.gate.relabel(SAMPLE, now_ns + self._deadline_ns)
            self.sample(seat)

    # --- pace, watchdog, budget ---

    def ask(self, rate_hz: float, burst_s: float | None) -> None:
        """Change the rate for good, or for a burst."""
        with self._lock:
            self._pace = pace.ask(self._pace, rate_hz, burst_s, time.monotonic())
        self._set_period()

    def _set_period(self) -> None:
        now_s = time.monotonic()
        wanted_ns = int(1e9 / pace.wanted_hz(self._pace, now_s))
        self.period_ns = int(1e9 / pace.rate_hz(self._pace, now_s))
        self._words[Field.WANTED_PERIOD_NS] = wanted_ns
        self._words[Field.PERIOD_NS] = self.period_ns

    def watch(self) -> None:
        """Look after the runners; called ten times a second."""
        now_ns, now_s = time.monotonic_ns(), time.monotonic()
        for runner in tuple(self._runners):
            seat = runner.current
            if seat is None:
                self._rejoin(runner, now_s)
            elif not runner.apart and runner.ident:
                since_ns = seat.gate.since_ns()
                if since_ns and now_ns - since_ns > self._deadline_ns:
                    self.set_apart(runner, seat)
        self._set_period()
        if now_s - self._round_at_s >= BUDGET_ROUND_S:
            self._budget_round(now_s)

    def _rejoin(self, runner: Runner, now_s: float) -> None:
        """Put a device back with the others once it has been in time for long enough."""
        if not runner.apart or now_s - runner.in_time_since_s < APART_S:
            return
        with self._lock:
            shared = next((r for r in self._runners if not r.apart), None)
            runner.alive = False
            self._runners.remove(runner)
            if shared is not None:
                shared.seats = (*shared.seats, *runner.seats)
            else:
                self._start(runner.seats, apart=False)

    def _budget_round(self, now_s: float) -> None:
        wall_s = now_s - self._round_at_s
        process_s = time.process_time()
        sampling_s = self._sampling_cpu_s()
        share = sampling_s / wall_s
        self._words[Field.CPU_PPM] = int((process_s - self._round_process_s) / wall_s * 1e6)
        self._words[Field.SAMPLER_CPU_PPM] = int(share * 1e6)
        self._round_at_s, self._round_process_s = now_s, process_s
        before = self._pace
        with self._lock:
            self._pace = pace.budget(self._pace, share, self._cpu_share_max, now_s)
        if self._pace.divisor != before.divisor:
            LOG.warning(
                "sampling_rate_changed_by_budget",
                extra={"cpu_share": share, "rate_hz": pace.rate_hz(self._pace, now_s)},
            )

    def _sampling_cpu_s(self) -> float:
        """Return the CPU seconds that the runners took since the last round."""
        total_s, seen = 0.0, {}
        for runner in tuple(self._runners):
            if runner.ident and runner.thread.is_alive():
                cpu_s = time.clock_gettime(time.pthread_getcpuclockid(runner.ident))
                total_s += cpu_s - self._cpu_s.get(runner.ident, 0.0)
                seen[runner.ident] = cpu_s
        self._cpu_s = seen
        return total_s

    # --- priority ---

    def raise_priority(self) -> None:
        """Give the calling thread the best scheduling that is permitted, and publish it."""
        self._slack()
        self._words[Field.POLICY] = POLICIES.index(raise_priority(self._realtime))

    def serves_events(self) -> None:
        """Let the calling thread, which carries events, go before others as the runners do."""
        raise_priority(self._realtime)
        self._carriers.append(threading.get_native_id())

    def demote(self) -> None:
        """Take real-time scheduling away from all runners: one of them has kept a core busy."""
        runners = [runner.native_id for runner in self._runners if runner.thread.is_alive()]
        for native_id in (*filter(None, runners), *self._carriers):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.sched_setscheduler(native_id, os.SCHED_OTHER, os.sched_param(0))
        self._realtime = False
        self._words[Field.POLICY] = POLICIES.index("normal")
        LOG.warning("realtime_demoted")


def limit_realtime() -> bool:
    """Bound the CPU a real-time thread may take without sleeping; returns whether it is."""
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (RT_SOFT_US, RT_HARD_US))
    except (OSError, ValueError):
        soft, _hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        return 0 <= soft <= RT_HARD_US
    return True


def raise_priority(realtime: bool) -> str:
    """Raise the calling thread's priority; returns the policy that holds."""
    if realtime:
        try:
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(FIFO_PRIORITY))
        except OSError:
            LOG.debug("fifo_refused")
        else:
            return "fifo"
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except OSError:
        return "normal"
    return "nice"


def _timer_slack() -> Callable[[], None]:
    """Return what spares the calling thread the kernel's default 50 us of timer slack."""
    libc = ctypes.CDLL(None)

    def tighten() -> None:
        libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)

    return tighten
