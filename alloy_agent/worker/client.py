"""The control side of one backend: starts its worker, calls it with deadlines, restarts it.

    worker = Worker(spec)
    worker.start()                      # returns at once; several workers start in parallel
    worker.observe(device)              # waits for the start if it must, never past its deadline
    worker.signals()                    # from shared memory; the worker is not asked
    worker.stop()

Rules that stay true in here:

* No method waits longer than its deadline, whatever the worker does: hang, die, or talk nonsense.
* One thread for each worker supervises it: it alone starts the process (the kernel ties the
  worker's life to the thread that started it), reads its frames and buries it.
* What is learned about devices outlives their worker: which are stalled, which are quarantined,
  which are taken away for a change of geometry.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from alloy_agent.errors import AlloyError, BackendError, DeviceLostError, DeviceStalledError
from alloy_agent.host import interpreter
from alloy_agent.model import (
    Capabilities,
    DeviceEvent,
    DeviceId,
    DeviceStep,
    Diagnosis,
    Fact,
    Observation,
    Signal,
    Value,
    WorkerState,
)
from alloy_agent.worker import wire
from alloy_agent.worker.board import Board, Field, SamplerState
from alloy_agent.worker.pace import checked_rate
from alloy_agent.worker.ring import PageReader, RingError, signals_of
from alloy_agent.worker.supervision import HEALTHY_AFTER_S, Blame, Crash, backoff_s, blame, forgive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from alloy_agent.backends import BackendSpec

LOG = logging.getLogger(__name__)
POLL_S: Final = 0.5
GRACE_S: Final = 0.05  # for the worker's own answer at the deadline to arrive
BURY_S: Final = 1.0
HUNG_S: Final = 1.0  # a worker that died after so long without a sign of life was hanging
EVENTS_MAX: Final = 65536
RAISED_NICE: Final = -10
TRACE: Final = re.compile(rb"Current thread 0x([0-9a-fA-F]+)")

RESULTS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    "capabilities": msgspec.msgpack.Decoder(Capabilities),
    "discover": msgspec.msgpack.Decoder(tuple[DeviceId, ...]),
    "observe": msgspec.msgpack.Decoder(Observation),
    "apply": msgspec.msgpack.Decoder(type(None)),
    "quiesce": msgspec.msgpack.Decoder(type(None)),
    "resume": msgspec.msgpack.Decoder(type(None)),
    "facts": msgspec.msgpack.Decoder(tuple[Fact, ...]),
    "diagnose": msgspec.msgpack.Decoder(tuple[Diagnosis, ...]),
}


class WorkerDownError(BackendError):
    """The worker of this backend is not running; it is started again by itself."""


class WorkerSettings(Value, frozen=True, kw_only=True):
    """How one worker is run. Deadlines are the longest a caller waits."""

    rate_hz: float = 10.0
    cpu_share_max: float = 0.03  # of one core, for sampling; above it the rate is lowered
    sample_deadline_s: float = 0.05
    realtime: bool = True  # ask for SCHED_FIFO; without permission nice, then normal
    open_deadline_s: float = 10.0
    observe_deadline_s: float = 1.0
    facts_deadline_s: float = 2.0
    apply_deadline_s: float = 60.0
    discover_deadline_s: float = 5.0
    quiesce_deadline_s: float = 2.0
    diagnose_deadline_s: float = 5.0
    hang_after_s: float = 3.0  # the whole process shows no sign of life
    quarantine_after: int = 2  # crashes on one device
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 30.0


class _Pending:
    """A call that waits for its answer."""

    __slots__ = ("answer", "device", "here", "id", "method", "within_s")

    def __init__(self, number: int, method: str, device: DeviceId | None, within_s: float) -> None:
        self.id = number
        self.method = method
        self.device = device
        self.within_s = within_s
        self.here = threading.Event()
        self.answer: wire.Reply | AlloyError | None = None


class _Process:
    """One life of the worker process."""

    def __init__(self, factory_argv: Callable[[int, int, int], subprocess.Popen[bytes]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.board = Board.make()
            self.note_fd = os.memfd_create("alloy-note", os.MFD_CLOEXEC)
            self.child = factory_argv(theirs.fileno(), self.board.fd, self.note_fd)
        self.channel = wire.Channel(ours)
        self.born_s = time.monotonic()
        self.ready = False
        self.open_failure: AlloyError | None = None
        self.reason = ""
        self.killed_by_us = False

    def kill(self, reason: str) -> None:
        """End it at once, for `reason`."""
        self.reason, self.killed_by_us = reason, True
        self.child.kill()

    def silent_s(self) -> float:
        """Return for how long it has shown no sign of life."""
        beat_s = self.board.get(Field.BEAT_NS) / 1e9
        return time.monotonic() - max(beat_s, self.born_s)

    def note(self) -> bytes:
        """Return what a fatal signal's trace says."""
        return os.pread(self.note_fd, 65536, 0)

    def close(self) -> None:
        """Let go of all descriptors."""
        self.channel.sock.close()
        self.board.close()
        os.close(self.note_fd)
        while self.channel.fds:
            os.close(self.channel.fds.popleft())


class Worker:
    """One backend in a process of its own."""

    def __init__(
        self,
        spec: BackendSpec,
        settings: WorkerSettings | None = None,
        *,
        sample: bool = True,
        on_event: Callable[[DeviceEvent], None] | None = None,
        factory: str = "",
    ) -> None:
        """Prepare a worker.

        Args:
            spec: Which backend, with its options.
            settings: Deadlines, rates and limits.
            sample: Whether to run the sampler; a command that acts once and leaves has no use for
                it.
            on_event: Called for each device event on a thread of its own, beside `events()`.
            factory: "/path/file.py:callable", used instead of the backend that `spec` names.
        """
        self.spec = spec
        self.settings = settings or WorkerSettings()
        self._sample = sample
        self._on_event = on_event
        self._factory = factory
        self._rate_hz = checked_rate(self.settings.rate_hz)
        self._change = threading.Condition()
        self._phase = "new"  # new, starting, ready, down, stopped
        self._process: _Process | None = None
        self._board: Board | None = None
        self._reason = ""
        self._open_failure: AlloyError | None = None
        self._failures = 0
        self._restarts = 0
        self._stopping = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        self._capabilities: Capabilities | None = None
        self._devices: tuple[DeviceId, ...] = ()
        self._pages: dict[DeviceId, PageReader] = {}
        self._stalled: dict[DeviceId, str] = {}
        self._quiesced: set[DeviceId] = set()
        self._blame = Blame()
        self._events: deque[DeviceEvent] = deque()
        self._events_here = threading.Event()
        self._for_callback: deque[DeviceEvent] = deque()
        self._dropped_there = 0
        self._dropped_before = 0
        self._dropped_here = 0
        self._from_worker = msgspec.msgpack.Decoder(wire.ToControl)
        self.tick_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.tick_fd)

    # --- life ---

    @property
    def name(self) -> str:
        """Name of the backend."""
        return str(self.spec.name)

    def start(self) -> None:
        """Start the worker and its supervision; returns at once."""
        with self._change:
            if self._phase not in ("new", "stopped"):
                return
            self._phase = "starting"
        self._stopping.clear()
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"worker-{self.name}"[:15], daemon=True
        )
        self._supervisor.start()
        if self._on_event is not None:
            threading.Thread(target=self._call_back, name="events", daemon=True).start()

    def stop(self, within_s: float = 1.0) -> None:
        """Have the worker close its backend and leave; kill it if it has not after `within_s`."""
        with self._change:
            process, phase = self._process, self._phase
            self._phase = "stopped"
            self._change.notify_all()
        self._stopping.set()
        self._events_here.set()
        if process is not None and phase in ("starting", "ready"):
            with contextlib.suppress(OSError):
                process.channel.send(wire.Stop())
            try:
                process.child.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill("did not stop in time")
        if self._supervisor is not None:
            self._supervisor.join(BURY_S + within_s)

    def state(self) -> WorkerState:
        """Return how the worker is doing."""
        with self._change:
            alive = self._phase in ("starting", "ready") and self._process is not None
            process = self._process
            return WorkerState(
                backend=self.name,
                alive=alive,
                pid=process.child.pid if alive and process is not None else None,
                restarts=self._restarts,
                reason=self._reason,
            )

    # --- calls ---

    def capabilities(self) -> Capabilities:
        """Return what the backend can do here; remembered from its start."""
        self._await_ready(self.settings.open_deadline_s)
        assert self._capabilities is not None  # noqa: S101 - ready implies it
        return self._capabilities

    def discover(self, deadline_s: float | None = None) -> tuple[DeviceId, ...]:
        """Return the ids of all devices."""
        found: tuple[DeviceId, ...] = self._ask(
            "discover", None, deadline_s or self.settings.discover_deadline_s
        )
        self._devices = found
        for gone in set(self._pages) - set(found):
            self._pages.pop(gone, None)
        return found

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        """Return the device as it is now.

        Raises:
            DeviceStalledError: It has not answered in time, or has been silent since an earlier
                call.
            DeviceLostError: It has gone, or crashed its worker too often.
            WorkerDownError: Its worker is not running.
        """
        result: Observation = self._ask(
            "observe", device, deadline_s or self.settings.observe_deadline_s
        )
        return result

    def observe_many(
        self, devices: Iterable[DeviceId], deadline_s: float | None = None
    ) -> dict[DeviceId, Observation | BackendError]:
        """Return all devices' answers or failures, asked at once, within one deadline."""
        within_s = deadline_s or self.settings.observe_deadline_s
        until_s = time.monotonic() + within_s
        asked: dict[DeviceId, _Pending] = {}
        out: dict[DeviceId, Observation | BackendError] = {}
        for device in devices:
            try:
                left_s = max(until_s - time.monotonic(), 0.001)
                asked[device] = self._begin("observe", device, left_s)
            except BackendError as exc:
                out[device] = exc
        for device, pending in asked.items():
            try:
                out[device] = self._finish(pending, until_s - time.monotonic())
            except BackendError as exc:
                out[device] = exc
        return out

    def apply(self, step: DeviceStep, deadline_s: float | None = None) -> None:
        """Do one step on its device, or reset it.

        Raises:
            DeviceStalledError: The outcome is open; observe before going on.
            BackendError: It was refused or failed.
        """
        self._ask("apply", step.device, deadline_s or self.settings.apply_deadline_s, step)

    def quiesce(self, device: DeviceId, deadline_s: float | None = None) -> None:
        """Take the device from the sampler and have the backend let go of every handle on it."""
        self._quiesced.add(device)  # also for a worker that dies before it answers
        try:
            self._ask("quiesce", device, deadline_s or self.settings.quiesce_deadline_s)
        except BackendError:
            self._quiesced.discard(device)
            raise

    def resume(self, device: DeviceId, deadline_s: float | None = None) -> None:
        """Give the device back; its signals are read anew."""
        self._quiesced.discard(device)
        self._ask("resume", device, deadline_s or self.settings.quiesce_deadline_s)

    def facts(self, device: DeviceId, deadline_s: float | None = None) -> tuple[Fact, ...]:
        """Return what the checks of this device need to see."""
        found: tuple[Fact, ...] = self._ask(
            "facts", device, deadline_s or self.settings.facts_deadline_s
        )
        return found

    def diagnose(self, deadline_s: float | None = None) -> tuple[Diagnosis, ...]:
        """Return what this host has and lacks for this vendor."""
        found: tuple[Diagnosis, ...] = self._ask(
            "diagnose", None, deadline_s or self.settings.diagnose_deadline_s
        )
        return found

    def set_rate(self, rate_hz: float, burst_s: float | None = None) -> None:
        """Sample at `rate_hz` (1 to 100) from now on, or for `burst_s` seconds.

        Raises:
            ConfigError: The rate is out of range.
        """
        checked_rate(rate_hz)
        if burst_s is None:
            self._rate_hz = rate_hz
        self._send(wire.Pace(rate_hz=rate_hz, burst_s=burst_s))

    def release(self, device: DeviceId) -> None:
        """Take a device out of quarantine: it was reset, or an operator says that it is well."""
        with self._change:
            self._blame = forgive(self._blame, device)
        with contextlib.suppress(WorkerDownError):
            self._send(wire.Release(device=device))

    # --- what is known without asking ---

    def signals(self) -> tuple[Signal, ...]:
        """Return the newest value of every signal, from shared memory."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        period_s = self.period_s()
        down = "" if self._phase == "ready" else f"its worker is down: {self._reason}"
        out: list[Signal] = []
        for device, page in tuple(self._pages.items()):
            why = down or self._stalled.get(device, "")
            block = page.newest()
            frame = None if block is None else block.newest()
            out.extend(signals_of(page.specs, frame, now_s, period_s, why))
        return tuple(out)

    def pages(self) -> dict[DeviceId, PageReader]:
        """Return the page of each device: a new one with each geometry and each worker."""
        return dict(self._pages)

    def page(self, device: DeviceId) -> PageReader | None:
        """Return the page of one device; None when it has none yet."""
        return self._pages.get(device)

    def tell_tick(self, due_ns: int) -> None:
        """Have `tick_fd` become readable after the first tick at or after `due_ns`, once.

        Args:
            due_ns: Of `CLOCK_MONOTONIC`. A worker that is down tells nothing: wait with a limit.
        """
        board = self._board
        if board is not None:
            board.words[Field.TELL_NS] = due_ns

    def sampler(self) -> SamplerState:
        """Return how the sampler is doing."""
        board = self._board
        return SamplerState() if board is None else board.sampler_state()

    def lateness(self) -> tuple[int, ...]:
        """Return the counters of the lateness histogram (`board.bucket_ceiling_s`), to subtract."""
        board = self._board
        return () if board is None else board.lateness()

    def stalled(self) -> dict[DeviceId, str]:
        """Return the devices that do not answer, each with what has not returned."""
        return dict(self._stalled)

    def quarantined(self) -> tuple[DeviceId, ...]:
        """Return the devices that are not touched, since the worker crashed on them."""
        return self._blame.quarantined

    def events(self) -> tuple[DeviceEvent, ...]:
        """Return and forget the device events that came since the last call."""
        return tuple(self._events.popleft() for _ in range(len(self._events)))

    def events_dropped(self) -> int:
        """Return how many events were lost to full queues, here and in all workers so far."""
        return self._dropped_before + self._dropped_there + self._dropped_here

    def period_s(self) -> float:
        """Return the time between two ticks, as it is now."""
        board = self._board
        period_ns = 0 if board is None else board.get(Field.PERIOD_NS)
        return period_ns / 1e9 if period_ns else 1.0 / self._rate_hz

    # --- asking ---

    def _ask(
        self, method: str, device: DeviceId | None, within_s: float, step: DeviceStep | None = None
    ) -> Any:
        return self._finish(self._begin(method, device, within_s, step), within_s)

    def _begin(
        self, method: str, device: DeviceId | None, within_s: float, step: DeviceStep | None = None
    ) -> _Pending:
        until_s = time.monotonic() + within_s
        if device is not None and device in self._blame.quarantined:
            raise DeviceLostError(
                f"{device}: worker crashed on it",
                cure="reset the device, then release it from quarantine",
            )
        self._await_ready(within_s)
        with self._change:
            self._number += 1
            pending = _Pending(self._number, method, device, within_s)
            self._pending[pending.id] = pending
        call = wire.Call(
            id=pending.id, method=method, device=device, step=step, deadline_monotonic_s=until_s
        )
        try:
            self._send(call)
        except WorkerDownError:
            self._pending.pop(pending.id, None)
            raise
        return pending

    def _finish(self, pending: _Pending, wait_s: float) -> Any:
        here = pending.here.wait(max(wait_s, 0.0) + GRACE_S)
        self._pending.pop(pending.id, None)
        answer = pending.answer
        subject = pending.device or self.name
        if not here or answer is None:
            answer = DeviceStalledError(
                f"{subject}: {pending.method} has not returned within {pending.within_s:g} s"
            )
        if isinstance(answer, AlloyError):
            if isinstance(answer, DeviceStalledError) and pending.device is not None:
                self._stalled[pending.device] = answer.message
            raise answer
        if pending.device is not None:
            self._stalled.pop(pending.device, None)
        try:
            return RESULTS[pending.method].decode(answer.result)
        except msgspec.DecodeError as exc:
            self._kill(f"answered {pending.method} with garbage: {exc}")
            raise BackendError(f"{subject}: {pending.method} was answered with garbage") from exc

    def _await_ready(self, within_s: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._phase != "starting", within_s)
            if self._phase == "ready":
                return
            failure = self._open_failure
            if self._phase == "starting":
                raise DeviceStalledError(
                    f"{self.name}: opening its backend has not returned within {within_s:g} s"
                )
            if failure is not None:
                raise type(failure)(failure.message, cure=failure.cure)
            raise WorkerDownError(
                f"{self.name}: its worker is down: {self._reason or 'not started'}",
                cure="it is started again by itself" if self._phase == "down" else "start it",
            )

    def _send(self, message: wire.ToWorker) -> None:
        process = self._process
        if process is None or self._phase != "ready":
            raise WorkerDownError(f"{self.name}: its worker is down: {self._reason}")
        try:
            process.channel.send(message)
        except OSError as exc:
            raise WorkerDownError(f"{self.name}: its worker has gone: {exc}") from exc

    # --- supervision, on its own thread ---

    def _supervise(self) -> None:
        usual = max(0, os.getpriority(os.PRIO_PROCESS, 0))  # a worker raises what it has to
        while not self._stopping.is_set():
            self._nice(usual)
            process = self._spawn()
            if self._sample and self.settings.realtime:
                self._nice(RAISED_NICE)  # only now: a worker inherits what holds when it is made
            if process is None:
                reason = self._reason
            else:
                self._converse(process)
                reason = self._bury(process)
            if self._stopping.is_set():
                return
            lived_s = 0.0 if process is None else time.monotonic() - process.born_s
            self._failures = 1 if lived_s > HEALTHY_AFTER_S else self._failures + 1
            wait_s = backoff_s(
                self._failures,
                random.random(),  # noqa: S311 - jitter, not a secret
                self.settings.backoff_base_s,
                self.settings.backoff_cap_s,
            )
            LOG.warning(
                "worker_died",
                extra={"backend": self.name, "reason": reason, "restart_in_s": round(wait_s, 3)},
            )
            if self._stopping.wait(wait_s):
                return
            with self._change:
                if self._phase == "stopped":
                    return
                self._phase = "starting"
                self._restarts += 1

    @staticmethod
    def _nice(nice: int) -> None:
        """Set the calling thread's niceness, if that is permitted; events pass through it."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)

    def _spawn(self) -> _Process | None:
        try:
            process = _Process(self._popen)
            process.channel.send(self._start_frame())
        except OSError as exc:
            with self._change:
                self._reason = f"cannot be started: {exc}"
                self._phase = "down"
                self._change.notify_all()
            return None
        with self._change:
            self._process, self._board = process, process.board
            if self._phase == "stopped":  # meanwhile; whoever stopped us saw no process to end
                process.kill("stopped")
        return process

    def _popen(self, socket_fd: int, board_fd: int, note_fd: int) -> subprocess.Popen[bytes]:
        fds = (socket_fd, board_fd, note_fd, self.tick_fd)
        return subprocess.Popen(
            interpreter.module("alloy_agent.worker", *map(str, fds), str(os.getpid())),
            stdin=subprocess.DEVNULL,
            stdout=2,  # a vendor's chatter must not reach the stdout of a command
            pass_fds=fds,
            start_new_session=True,
            env=interpreter.environment(),
            cwd=interpreter.FOLDER,
        )

    def _start_frame(self) -> wire.Start:
        settings = self.settings
        return wire.Start(
            name=self.spec.name,
            options=self.spec.options,
            factory=self._factory,
            sample=self._sample,
            rate_hz=self._rate_hz,
            cpu_share_max=settings.cpu_share_max,
            sample_deadline_s=settings.sample_deadline_s,
            realtime=settings.realtime,
            suspects=tuple(sorted(self._stalled)),
            quarantined=self._blame.quarantined,
            quiesced=tuple(sorted(self._quiesced)),
        )

    def _converse(self, process: _Process) -> None:
        """Read frames until the worker has gone or has to."""
        poll = select.poll()
        poll.register(process.channel.sock, select.POLLIN)
        try:
            while not process.killed_by_us:
                if poll.poll(POLL_S * 1000):
                    bodies = process.channel.receive()
                    if bodies is None:
                        return
                    for body in bodies:
                        self._take(process, self._from_worker.decode(body))
                self._judge(process)
        except (wire.WireError, msgspec.DecodeError, RingError, IndexError) as exc:
            process.kill(f"sent garbage: {exc}")
        except OSError:
            return

    def _judge(self, process: _Process) -> None:
        """Kill a worker that hangs as a whole."""
        age_s = time.monotonic() - process.born_s
        if not process.ready and age_s > self.settings.open_deadline_s:
            process.kill(f"did not open its backend within {self.settings.open_deadline_s:g} s")
        elif process.ready and process.silent_s() > self.settings.hang_after_s:
            process.kill(f"hung: no sign of life for {process.silent_s():.1f} s")

    def _take(self, process: _Process, message: wire.ToControl) -> None:
        if isinstance(message, wire.Reply):
            self._answer(message.id, message)
        elif isinstance(message, wire.Failure):
            error = wire.error_of(message)
            if message.id:
                self._answer(message.id, error)
            else:
                process.open_failure = error
        elif isinstance(message, wire.Page):
            fd = process.channel.fds.popleft()
            self._pages[message.device] = PageReader(fd, message.specs, message.epoch)
        elif isinstance(message, wire.Events):
            self._take_events(message)
        else:
            with self._change:
                process.ready = True
                self._capabilities = message.capabilities
                if self._phase == "starting":
                    self._phase = "ready"
                    self._reason, self._open_failure = "", None
                self._change.notify_all()

    def _answer(self, number: int, answer: wire.Reply | AlloyError) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            pending.answer = answer
            pending.here.set()

    def _take_events(self, message: wire.Events) -> None:
        self._dropped_there = message.dropped
        for event in message.events:
            if len(self._events) >= EVENTS_MAX:
                self._events.popleft()
                self._dropped_here += 1
            self._events.append(event)
            if self._on_event is not None and len(self._for_callback) < EVENTS_MAX:
                self._for_callback.append(event)
        self._events_here.set()

    def _call_back(self) -> None:
        callback = self._on_event
        if self._sample and self.settings.realtime:
            self._nice(RAISED_NICE)
        while callback is not None and not self._stopping.is_set():
            self._events_here.wait()
            self._events_here.clear()
            while self._for_callback:
                try:
                    callback(self._for_callback.popleft())
                except Exception:
                    LOG.exception("event_callback_failed", extra={"backend": self.name})

    def _kill(self, reason: str) -> None:
        process = self._process
        if process is not None:
            process.kill(reason)

    def _bury(self, process: _Process) -> str:
        """Wait for the process's end, learn from it, fail what waited; returns why it died."""
        try:
            code = process.child.wait(BURY_S)
        except subprocess.TimeoutExpired:
            process.kill("closed its socket but stayed")
            code = process.child.wait()
        crash = self._crash_of(process, code)
        reason = self._reason_of(process, code, crash)
        with self._change:
            before = self._blame.quarantined
            if not self._stopping.is_set():
                self._blame = blame(self._blame, crash, self.settings.quarantine_after)
            self._open_failure = process.open_failure
            self._reason = reason
            if self._phase == "stopped":
                self._reason = "stopped"
            else:
                self._phase = "down"
            self._dropped_before += self._dropped_there
            self._dropped_there = 0
            self._process = None
            pending, self._pending = self._pending, {}
            self._change.notify_all()
        for device in set(self._blame.quarantined) - set(before):
            LOG.error("device_quarantined", extra={"backend": self.name, "device": device})
        for call in pending.values():
            call.answer = WorkerDownError(f"{call.device or self.name}: its worker died: {reason}")
            call.here.set()
        process.close()
        return reason

    def _crash_of(self, process: _Process, code: int) -> Crash:
        """Return which devices the worker died in."""
        activities = tuple(process.board.activities())
        trace = TRACE.search(process.note())
        if trace is not None:
            thread = int(trace.group(1), 16)
            inside = [a.device for a in activities if a.thread == thread]
            named = [DeviceId(device) for device in inside if not device.startswith("*")]
            return Crash(witness=named[0] if named else None)
        devices = {DeviceId(a.device) for a in activities if not a.device.startswith("*")}
        hung = process.ready and process.silent_s() > HUNG_S
        garbage = process.killed_by_us and not hung
        return Crash(
            inside=frozenset(devices - set(self._stalled)),
            killed_from_outside=garbage or (code == -signal.SIGKILL and not hung),
        )

    def _reason_of(self, process: _Process, code: int, crash: Crash) -> str:
        if process.reason:
            return process.reason
        if process.open_failure is not None:
            return str(process.open_failure)
        if code >= 0:
            how = f"left with exit code {code}"
        else:
            with contextlib.suppress(ValueError):
                return f"died of {signal.Signals(-code).name}" + (
                    f" in a call on {crash.witness}" if crash.witness else ""
                )
            how = f"died of signal {-code}"
        return how
