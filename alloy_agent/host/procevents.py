"""Processes as they fork, exec, change user and exit, pushed by the kernel's process connector.

The connector needs root in the first user, pid and network namespaces. Without that `ProcessEvents`
says so (`mode` "polling" and `reason`) and delivers a RESYNC at every poll interval, so a caller
reads `/proc` again either way and only its delay differs.

pyroute2 opens, binds and subscribes the socket, in a helper process (`subscribe`) that hands it
over. The messages are read and unpacked here: pyroute2's reader keeps an unbounded queue, cannot
be woken to stop, and decodes names as strict UTF-8, so a tenant that calls itself by the byte 0xff
would stop it. Names are not looked at: they come from `/proc`.

Rules that stay true in here:

* The queue is bounded. What does not fit, and what the kernel dropped (ENOBUFS), becomes one
  RESYNC: the reader then looks at `/proc`, which has the truth anyway.
* Only messages of the kernel (port 0) count.
* A new thread is no event: it is born where its process is.

Source: include/uapi/linux/cn_proc.h and connector.h, Linux 6.18.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import subprocess
import threading
from enum import StrEnum
from typing import TYPE_CHECKING

from alloy_agent.host import interpreter
from alloy_agent.host.clock import boottime_s, monotonic_offset_s
from alloy_agent.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

NLMSG_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
CONNECTOR = struct.Struct("=IIIIHH")  # idx, val, seq, ack, len, flags
EVENT = struct.Struct("=IIQ")  # what, cpu, timestamp (CLOCK_MONOTONIC nanoseconds)
PIDS = struct.Struct("=IIII")  # fork: parent pid, tgid, child pid, tgid; others: pid, tgid, ...
NLMSG_DONE = 3
CN_IDX_PROC = 1
FORK, EXEC, UID, EXIT = 0x1, 0x2, 0x4, 0x8000_0000
DATAGRAM_BYTES = 65_536
HELPER = "alloy_agent.host.subscribe"
HELPER_DEADLINE_S = 20.0


class ProcessEventKind(StrEnum):
    """What happened; RESYNC: events were lost or are not to be had, look at `/proc`."""

    FORK = "fork"
    EXEC = "exec"
    UID = "uid"
    EXIT = "exit"
    RESYNC = "resync"


class ProcessEvent(Value, frozen=True, kw_only=True):
    """One event of one process. `parent` is set for FORK. `time_s` is on `CLOCK_BOOTTIME`."""

    kind: ProcessEventKind
    pid: int = 0
    parent: int | None = None
    time_s: float = 0.0


KINDS = {
    FORK: ProcessEventKind.FORK,
    EXEC: ProcessEventKind.EXEC,
    UID: ProcessEventKind.UID,
    EXIT: ProcessEventKind.EXIT,
}


def parse_events(datagram: bytes, offset_s: float = 0.0) -> list[ProcessEvent]:
    """Return the events of one datagram; anything that is none, or cut short, is left out.

    Args:
        datagram: Netlink messages as received.
        offset_s: From `CLOCK_MONOTONIC` to `CLOCK_BOOTTIME`.
    """
    events: list[ProcessEvent] = []
    start = 0
    body = NLMSG_HEADER.size + CONNECTOR.size
    while start + body + EVENT.size + PIDS.size <= len(datagram):
        length, kind, _, _, _ = NLMSG_HEADER.unpack_from(datagram, start)
        if length < NLMSG_HEADER.size:
            break
        idx, _, _, _, _, _ = CONNECTOR.unpack_from(datagram, start + NLMSG_HEADER.size)
        if kind == NLMSG_DONE and idx == CN_IDX_PROC:
            event = _event(datagram, start + body, offset_s)
            if event is not None:
                events.append(event)
        start += (length + 3) & ~3
    return events


def _event(datagram: bytes, start: int, offset_s: float) -> ProcessEvent | None:
    what, _, nanoseconds = EVENT.unpack_from(datagram, start)
    kind = KINDS.get(what)
    if kind is None:
        return None
    first, second, third, fourth = PIDS.unpack_from(datagram, start + EVENT.size)
    time_s = nanoseconds / 1e9 + offset_s
    if kind is ProcessEventKind.FORK:
        if third != fourth:  # a thread
            return None
        return ProcessEvent(kind=kind, pid=fourth, parent=second, time_s=time_s)
    if first != second and kind is ProcessEventKind.EXIT:
        return None
    return ProcessEvent(kind=kind, pid=second, time_s=time_s)


class ProcessEvents:
    """A bounded stream of process events, read by one thread of its own.

    Args:
        capacity: How many events wait at most; more become one RESYNC.
        poll_interval_s: How often RESYNC comes where the kernel sends nothing.
        on_event: Called on the reader's thread after events were queued; must not block.
    """

    def __init__(
        self,
        capacity: int = 8192,
        poll_interval_s: float = 1.0,
        on_event: Callable[[], None] | None = None,
    ) -> None:
        self.mode = "polling"
        self.reason = "not started"
        self.lost_count = 0
        self._capacity = capacity
        self._poll_interval_s = poll_interval_s
        self._on_event = on_event
        self._queue: collections.deque[ProcessEvent] = collections.deque()
        self._ready = threading.Condition()
        self._started = threading.Event()
        self._resync = False
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = -1, -1

    def start(self) -> None:
        """Subscribe, or fall back to polling; `mode` and `reason` say which when this returns."""
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="process-events", daemon=True)
        self._thread.start()
        self._started.wait()
        log.info("process_events_started", extra={"mode": self.mode, "reason": self.reason})

    def get(self, timeout_s: float | None = None) -> tuple[ProcessEvent, ...]:
        """Return all events that wait, after at most `timeout_s` (None: for ever) for the first.

        Empty on time-out and after `stop`. A RESYNC stands before what came after it.
        """
        with self._ready:
            self._ready.wait_for(
                lambda: self._queue or self._resync or self._stopped, timeout=timeout_s
            )
            events = tuple(self._queue)
            self._queue.clear()
            if self._resync:
                self._resync = False
                lost = ProcessEvent(kind=ProcessEventKind.RESYNC, time_s=boottime_s())
                events = (lost, *events)
        return events

    def stop(self) -> None:
        """End the subscription and the thread; `get` returns empty from now on."""
        with self._ready:
            self._stopped = True
            self._ready.notify_all()
        if self._thread is None:
            return
        os.write(self._wake_w, b"x")
        self._thread.join()
        self._thread = None
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _run(self) -> None:
        try:
            channel = self._open()
        finally:
            self._started.set()
        if channel is None:
            self._poll()
            return
        with channel:
            channel.setblocking(False)
            self._read(channel)

    def _open(self) -> socket.socket | None:
        """Return the subscribed channel, or None with the reason set."""
        self.reason = missing_privilege()
        if self.reason:
            return None
        try:
            channel = _subscribe()
        except OSError as exc:
            self.reason = f"process connector: {exc}"
            return None
        self.mode = "events"
        return channel

    def _poll(self) -> None:
        while not select.select([self._wake_r], [], [], self._poll_interval_s)[0]:
            self._lost(0)

    def _read(self, reader: socket.socket) -> None:
        while True:
            readable, _, _ = select.select([reader.fileno(), self._wake_r], [], [])
            if self._wake_r in readable:
                return
            try:
                datagram, (port, _) = reader.recvfrom(DATAGRAM_BYTES)
            except BlockingIOError:
                continue
            except OSError as exc:
                self._lost(1)
                if exc.errno != errno.ENOBUFS:
                    self.mode, self.reason = "polling", f"process connector: {exc}"
                    log.warning("process_events_failed", extra={"reason": self.reason})
                    self._poll()
                    return
                continue
            if port == 0:
                self._put(parse_events(datagram, monotonic_offset_s()))

    def _put(self, events: list[ProcessEvent]) -> None:
        if not events:
            return
        with self._ready:
            if len(self._queue) + len(events) > self._capacity:
                self.lost_count += len(self._queue) + len(events)
                self._queue.clear()
                self._resync = True
            else:
                self._queue.extend(events)
            self._ready.notify_all()
        if self._on_event is not None:
            self._on_event()

    def _lost(self, count: int) -> None:
        with self._ready:
            self.lost_count += count
            self._resync = True
            self._ready.notify_all()
        if self._on_event is not None:
            self._on_event()


def missing_privilege() -> str:
    """Return why the kernel will not send us process events, or "" if nothing forbids it."""
    if os.geteuid() != 0:
        return "not root"
    for name, inode in (("pid", 0xEFFFFFFC), ("user", 0xEFFFFFFD)):  # include/linux/proc_ns.h
        try:
            here = os.stat(f"/proc/self/ns/{name}").st_ino  # noqa: PTH116
        except OSError:
            continue
        if here != inode:
            return f"not in the host's {name} namespace"
    return ""


def _subscribe() -> socket.socket:
    """Return a socket that receives process events from now on, subscribed by a helper process.

    Raises:
        OSError: The helper could not, for the reason that it gives.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            helper = subprocess.Popen(
                interpreter.module(HELPER, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=interpreter.FOLDER,
                env=interpreter.environment(),
            )
        ours.settimeout(HELPER_DEADLINE_S)
        try:
            said, fds, _, _ = socket.recv_fds(ours, 4096, 1)
            if not fds:
                raise OSError(said.decode("utf-8", "replace") or "its helper ended early")
            return socket.socket(fileno=fds[0])
        finally:
            ours.close()  # tells the helper that it may go
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(HELPER_DEADLINE_S)
            if helper.returncode is None:
                helper.kill()
                helper.wait()
