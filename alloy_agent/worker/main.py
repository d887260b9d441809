"""The worker process: one backend, its lanes, its sampler and its event waiter.

The main thread reads frames and hands them on; it never calls the backend, so it answers even while
every device hangs. It leaves when the control process has gone, twice over: the socket ends, and
the kernel sends SIGKILL.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.errors import BackendError, DeviceLostError, UnsupportedError
from alloy_agent.worker import wire
from alloy_agent.worker.board import DOING_CODES, POLICIES, Board, Field
from alloy_agent.worker.lanes import Gate, Job, Lane
from alloy_agent.worker.sampler import Sampler, Seat

if TYPE_CHECKING:
    from collections.abc import Callable

    from alloy_agent.backends.base import Backend
    from alloy_agent.model import DeviceEvent, DeviceId, DeviceStep

LOG = logging.getLogger(__name__)
PR_SET_PDEATHSIG: Final = 1
EXIT_GARBAGE: Final = 4
EXIT_NOT_OPENED: Final = 3
BEAT_S: Final = 0.1
OPEN_DEADLINE_S: Final = 10.0
CLOSE_DEADLINE_S: Final = 0.5
EVENT_WAIT_S: Final = 1.0
EVENT_QUEUE_MAX: Final = 8192
EVENT_BATCH: Final = 512
WAIT_EVENTS: Final = DOING_CODES["wait_events"]
SWITCH_INTERVAL_S: Final = 0.0005
STACK_BYTES: Final = 512 * 1024
COLLECT_EVERY_S: Final = 60.0
DEVICE_METHODS: Final = ("observe", "apply", "facts", "quiesce", "resume")
HOST_METHODS: Final = ("discover", "capabilities", "diagnose")


def _nothing(_result: object) -> None:
    """Take a result that nobody waits for."""


def quarantined_error(device: DeviceId) -> DeviceLostError:
    """Return what is said about a device that is not touched any more."""
    return DeviceLostError(
        f"{device}: worker crashed on it", cure="reset the device, then release it from quarantine"
    )


class Answer:
    """Sends the result or the failure of one call."""

    def __init__(self, channel: wire.Channel, call: wire.Call) -> None:
        self._channel = channel
        self._id = call.id
        self.doing = f"{call.method} on {call.device}" if call.device else call.method
        self.on_failure: Callable[[], None] | None = None

    def done(self, result: object) -> None:
        """Send the result."""
        with contextlib.suppress(OSError):
            try:
                raw = msgspec.Raw(msgspec.msgpack.encode(result))
                self._channel.send(wire.Reply(id=self._id, result=raw))
            except (TypeError, ValueError, wire.WireError) as exc:
                self._channel.send(wire.failure_of(self._id, exc, self.doing))

    def failed(self, exc: Exception) -> None:
        """Send the failure."""
        if self.on_failure is not None:
            self.on_failure()
        if not isinstance(exc, BackendError):
            LOG.warning("call_failed", extra={"call": self.doing}, exc_info=exc)
        with contextlib.suppress(OSError):
            self._channel.send(wire.failure_of(self._id, exc, self.doing))


class Server:
    """The worker's side of the conversation."""

    def __init__(self, channel: wire.Channel, board: Board, tick_fd: int) -> None:
        self._channel = channel
        self._board = board
        self._tick_fd = tick_fd
        self._start = wire.Start(name="")
        self._backend: Backend | None = None
        self._sampler: Sampler | None = None
        self._seats: dict[DeviceId, Seat] = {}
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._cells = 0
        self._quarantined: set[DeviceId] = set()
        self._events: collections.deque[DeviceEvent] = collections.deque()
        self._events_here = threading.Event()
        self._dropped = 0

    def serve(self) -> int:
        """Answer frames until the control process says stop or goes; returns the exit code."""
        decoder = msgspec.msgpack.Decoder(wire.ToWorker)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while True:
                bodies = self._channel.receive()
                if bodies is None:
                    break
                for body in bodies:
                    message = decoder.decode(body)
                    if isinstance(message, wire.Stop):
                        return self._close()
                    self._handle(message)
        except (wire.WireError, msgspec.DecodeError) as exc:
            LOG.error("garbage_from_control", extra={"cause": str(exc)})  # noqa: TRY400
            return EXIT_GARBAGE
        except OSError:
            pass
        return self._close()

    def _handle(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Call):
            self._call(message)
        elif isinstance(message, wire.Start):
            self._open(message)
        elif isinstance(message, wire.Pace):
            if self._sampler is not None:
                self._sampler.ask(message.rate_hz, message.burst_s)
        elif isinstance(message, wire.Release):
            self._quarantined.discard(message.device)
            if self._start.sample and self._backend is not None:
                self._respec(message.device)

    # --- opening and closing ---

    def _open(self, start: wire.Start) -> None:
        self._start = start
        self._quarantined = set(start.quarantined)

        def failed(exc: Exception) -> None:
            with contextlib.suppress(OSError):
                self._channel.send(wire.failure_of(0, exc, f"opening {start.name}"))
            os._exit(EXIT_NOT_OPENED)

        deadline_ns = time.monotonic_ns() + int(OPEN_DEADLINE_S * 1e9)
        self._host_lane("open").submit(Job("open", deadline_ns, self._do_open, _nothing, failed))

    def _do_open(self) -> None:
        start = self._start
        backend = _open_backend(start)
        capabilities = backend.capabilities()
        if start.sample:
            self._sampler = Sampler(backend, self._board, start, self._publish, self._tick_fd)
        self._backend = backend
        gc.collect()
        gc.freeze()
        for (
            device
        ) in start.quiesced:  # an earlier worker died with these devices taken away from it
            if device not in self._quarantined:
                _seat, lane = self._seat(device)
                self._submit(lane, "quiesce", OPEN_DEADLINE_S, partial(backend.quiesce, device))
        self._channel.send(wire.Ready(capabilities=capabilities))
        if start.sample:
            threading.Thread(target=self._wait_events, name="events", daemon=True).start()
            threading.Thread(target=self._push_events, name="push", daemon=True).start()
            self._submit(
                self._host_lane("discover"),
                "discover",
                OPEN_DEADLINE_S,
                lambda: self._seat_all(backend.discover()),
            )

    def _close(self) -> int:
        backend = self._backend
        if backend is not None:
            closed = threading.Event()

            def close() -> None:
                try:
                    backend.close()
                finally:
                    closed.set()

            self._submit(self._host_lane("close"), "close", CLOSE_DEADLINE_S, close)
            closed.wait(CLOSE_DEADLINE_S)
        return 0

    # --- calls ---

    def _call(self, call: wire.Call) -> None:
        answer = Answer(self._channel, call)
        backend = self._backend
        if backend is None:
            answer.failed(BackendError(f"{answer.doing}: the backend is not open yet"))
            return
        wait_s = call.deadline_monotonic_s - time.monotonic()
        if call.method in HOST_METHODS and call.device is None:
            run = self._host_call(backend, call.method)
            self._submit(self._host_lane(call.method), call.method, wait_s, run, answer)
        elif call.method in DEVICE_METHODS and call.device is not None:
            self._device_call(backend, call, call.device, wait_s, answer)
        else:
            answer.failed(UnsupportedError(f"{answer.doing}: no such call"))

    def _host_call(self, backend: Backend, method: str) -> Callable[[], object]:
        if method == "discover":

            def discover() -> object:
                found = backend.discover()
                self._seat_all(found)
                return found

            return discover
        return backend.capabilities if method == "capabilities" else backend.diagnose

    def _device_call(
        self, backend: Backend, call: wire.Call, device: DeviceId, wait_s: float, answer: Answer
    ) -> None:
        if device in self._quarantined:
            answer.failed(quarantined_error(device))
            return
        seat, lane = self._seat(device)
        if call.method == "quiesce":
            before, seat.quiesced = seat.quiesced, True  # the sampler stays out from now on

            def undo() -> None:
                seat.quiesced = before

            answer.on_failure = undo
        self._submit(lane, call.method, wait_s, self._device_run(backend, call, seat), answer)

    def _device_run(self, backend: Backend, call: wire.Call, seat: Seat) -> Callable[[], object]:
        device = seat.device
        if call.method == "observe":

            def observe() -> object:
                seen = backend.observe(device)
                pieces = tuple((p.id, p.incarnation) for p in seen.partitions)
                if pieces != seat.pieces:
                    seat.pieces, seat.respec = pieces, True
                return seen

            return observe
        if call.method == "apply":
            step = call.step
            if step is None or step.device != device:
                raise wire.WireError("an apply without a step of its device")

            def apply() -> object:
                seat.respec = True  # even a failed step may have changed something
                _apply(backend, step)
                return None

            return apply
        if call.method == "resume":

            def resume() -> object:
                backend.resume(device)
                seat.quiesced, seat.respec = False, True
                return None

            return resume
        if call.method == "quiesce":
            return lambda: backend.quiesce(device)
        return lambda: backend.facts(device)

    def _submit(
        self,
        lane: Lane,
        doing: str,
        wait_s: float,
        run: Callable[[], object],
        answer: Answer | None = None,
    ) -> None:
        def log(exc: Exception) -> None:
            LOG.warning("call_failed", extra={"call": doing, "on": lane.name, "cause": str(exc)})

        deadline_ns = time.monotonic_ns() + int(wait_s * 1e9)
        if answer is None:
            lane.submit(Job(doing, deadline_ns, run, _nothing, log))
        else:
            lane.submit(Job(doing, deadline_ns, run, answer.done, answer.failed))

    # --- devices ---

    def _gate(self, name: str) -> Gate:
        gate = Gate(self._board, self._cells, name)
        self._cells += 1
        return gate

    def _host_lane(self, method: str) -> Lane:
        with self._lock:
            name = f"*{method}"
            if name not in self._lanes:
                self._lanes[name] = Lane(name, self._gate(name))
            return self._lanes[name]

    def _seat(self, device: DeviceId) -> tuple[Seat, Lane]:
        with self._lock:
            if device not in self._seats:
                seat = Seat(device, self._gate(device))
                seat.quiesced = device in self._start.quiesced
                self._seats[device] = seat
                sampler = self._sampler
                after = None if sampler is None else (lambda: sampler.settle(seat))
                self._lanes[device] = Lane(device, seat.gate, after)
            return self._seats[device], self._lanes[device]

    def _seat_all(self, devices: tuple[DeviceId, ...]) -> None:
        """Give every device that is new a seat, and have its signals read."""
        for device in devices:
            if device not in self._seats and device not in self._quarantined:
                self._respec(device)

    def _respec(self, device: DeviceId) -> None:
        """Have the signals of a device read on its lane."""
        sampler = self._sampler
        if sampler is None:
            return
        seat, lane = self._seat(device)
        seat.respec = True

        def first() -> None:
            if device in self._start.suspects and not seat.quiesced:
                sampler.read_specs(seat)
                sampler.add(seat, apart=True)

        self._submit(lane, "signal_specs", OPEN_DEADLINE_S, first)  # the lane settles the rest

    def _publish(self, seat: Seat) -> None:
        if seat.page is not None:
            page = wire.Page(device=seat.device, epoch=seat.epoch, specs=seat.specs)
            with contextlib.suppress(OSError):
                self._channel.send(page, seat.page.fd)

    # --- events ---

    def _wait_events(self) -> None:
        backend = self._backend
        gate = self._gate("*wait_events")
        if self._sampler is not None:
            self._sampler.serves_events()
        failures = 0
        while backend is not None:
            began_s = time.monotonic()
            gate.enter(WAIT_EVENTS, time.monotonic_ns() + int(10e9))
            try:
                events = backend.wait_events(EVENT_WAIT_S)
                failures = 0
            except UnsupportedError:
                return
            except Exception as exc:  # noqa: BLE001 - events pause, the rest goes on
                failures += 1
                events = ()
                if failures == 1:
                    LOG.warning("wait_events_failed", extra={"cause": str(exc)})
            finally:
                gate.leave()
            for event in events:
                self._take_event(event)
            if not events:  # a waiter that does not wait must not spin
                time.sleep(max(EVENT_WAIT_S * 0.5 - (time.monotonic() - began_s), 0.0))

    def _take_event(self, event: DeviceEvent) -> None:
        if len(self._events) >= EVENT_QUEUE_MAX:
            self._dropped += 1
        else:
            self._events.append(event)
            self._events_here.set()
        if event.kind == "geometry" and event.device not in self._quarantined:
            self._respec(event.device)

    def _push_events(self) -> None:
        if self._sampler is not None:
            self._sampler.serves_events()
        while True:
            self._events_here.wait()
            self._events_here.clear()
            while self._events:
                batch = [self._events.popleft() for _ in range(min(len(self._events), EVENT_BATCH))]
                try:
                    self._channel.send(wire.Events(events=tuple(batch), dropped=self._dropped))
                except OSError:
                    return

    # --- sign of life ---

    def _beat(self) -> None:
        words = self._board.words
        collected_s = time.monotonic()
        while True:
            words[Field.BEAT_NS] = time.monotonic_ns()
            if self._sampler is not None:
                self._sampler.watch()
                if signal.sigtimedwait((signal.SIGXCPU,), 0) is not None:
                    self._sampler.demote()
            if time.monotonic() - collected_s > COLLECT_EVERY_S:
                collected_s = time.monotonic()
                gc.collect()
            time.sleep(BEAT_S)


def _open_backend(start: wire.Start) -> Backend:
    """Return the backend that `start` names."""
    if start.factory:
        import importlib.util

        path, _, name = start.factory.rpartition(":")
        spec = importlib.util.spec_from_file_location("worker_factory", path)
        if spec is None or spec.loader is None:
            raise BackendError(f"cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["worker_factory"] = module
        spec.loader.exec_module(module)
        made: Backend = getattr(module, name)(start.options)
        return made
    from alloy_agent.backends import BackendSpec, open_backend

    return open_backend(BackendSpec(name=start.name, options=start.options))


def _apply(backend: Backend, step: DeviceStep) -> None:
    from alloy_agent.backends.base import refuse_reset, reset
    from alloy_agent.model import Reset

    if isinstance(step, Reset):
        (refuse_reset if step.only_ask else reset)(backend, step.device)
    else:
        backend.apply(step)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, or has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main(argv: list[str]) -> int:
    """Run a worker on inherited descriptors; returns its exit code."""
    if len(argv) != 5:
        sys.stderr.write("alloy_agent.worker is started by alloy-agent, not by hand\n")
        return 2
    socket_fd, board_fd, note_fd, tick_fd, parent = (int(arg) for arg in argv)
    _die_with(parent)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # the control process ends us; it may need us for its own end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGXCPU,))  # all threads; the beat takes it
    # All threads: only then does the trace name the thread that the signal struck.
    faulthandler.enable(note_fd, all_threads=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.stack_size(STACK_BYTES)
    gc.disable()
    board = Board(board_fd)
    board.words[Field.POLICY] = POLICIES.index("not sampling")
    server = Server(wire.Channel(socket.socket(fileno=socket_fd)), board, tick_fd)
    code = server.serve()
    os._exit(code)  # threads that are stuck in the vendor's library must not keep us
