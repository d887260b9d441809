"""Device hot plug, resets and driver changes, as the kernel announces them (uevents).

Only the kernel's own group is heard, not what udev passes on. Root is needed in the first network
namespace; without it `UeventListener.start` says so and the caller polls instead.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from alloy_agent.host.clock import boottime_s
from alloy_agent.host.processes import printable
from alloy_agent.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable

KERNEL_GROUP = 1  # MONITOR_GROUP_KERNEL
DATAGRAM_BYTES = 65_536
PROPERTIES_MAX = 64


class Uevent(Value, frozen=True, kw_only=True):
    """One announcement: `action` ("add", "remove", "change", "bind", ...) at a sysfs path."""

    action: str
    path: str
    subsystem: str
    properties: dict[str, str]
    time_s: float


def parse_uevent(datagram: bytes, time_s: float = 0.0) -> Uevent | None:
    """Return the announcement in a datagram of the kernel, or None if it is none."""
    head, *lines = datagram.split(b"\0")
    action, at, path = head.partition(b"@")
    if not at or not action or not path:
        return None
    properties: dict[str, str] = {}
    for line in lines[:PROPERTIES_MAX]:
        key, equals, value = line.partition(b"=")
        if equals and key:
            properties[printable(key)] = printable(value)
    return Uevent(
        action=printable(action),
        path=printable(path),
        subsystem=properties.get("SUBSYSTEM", ""),
        properties=properties,
        time_s=time_s,
    )


class UeventListener:
    """Hands every announcement to a callback, on a thread of its own.

    Args:
        on_event: Called on that thread; must not block.
        subsystems: Which subsystems to pass on; empty: all.
    """

    def __init__(
        self, on_event: Callable[[Uevent], None], subsystems: frozenset[str] = frozenset()
    ) -> None:
        self.mode = "polling"
        self.reason = "not started"
        self._on_event = on_event
        self._subsystems = subsystems
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = -1, -1

    def start(self) -> None:
        """Subscribe; `mode` is "events" when this returns, or `reason` says why not."""
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="uevents", daemon=True)
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """End the subscription and the thread."""
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
            return
        try:
            with socket.socket(fileno=os.dup(channel.fileno())) as reader:
                reader.setblocking(False)
                self._read(reader)
        finally:
            channel.close()

    def _open(self) -> Any:
        try:
            from pyroute2.netlink.uevent import UeventSocket

            channel = UeventSocket()
            channel.bind(groups=KERNEL_GROUP)
        except (OSError, ImportError, KeyError) as exc:
            self.reason = f"uevent socket: {exc}"
            return None
        self.mode, self.reason = "events", ""
        return channel

    def _read(self, reader: socket.socket) -> None:
        while True:
            readable, _, _ = select.select([reader.fileno(), self._wake_r], [], [])
            if self._wake_r in readable:
                return
            try:
                datagram, (port, _) = reader.recvfrom(DATAGRAM_BYTES)
            except OSError:  # lost some (ENOBUFS): the poll of the observer covers it
                continue
            event = parse_uevent(datagram, boottime_s()) if port == 0 else None
            if event and (not self._subsystems or event.subsystem in self._subsystems):
                self._on_event(event)
