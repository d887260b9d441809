"""Notifications to the service manager: readiness, reload, stop, status, watchdog.

The protocol is one datagram of `KEY=value` lines to the UNIX socket named by `NOTIFY_SOCKET`; a
leading `@` stands for the abstract namespace. Nobody listening is normal (a shell, a container) and
no error. Source: sd_notify(3), systemd 252.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from alloy_agent.host.clock import monotonic_offset_s

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"


def reloading(boottime_s: float) -> str:
    """Return the state line of a reload that began at `boottime_s` (`CLOCK_BOOTTIME`).

    The manager wants `CLOCK_MONOTONIC` microseconds, with which it tells this reload from the next.
    """
    microseconds = int((boottime_s - monotonic_offset_s()) * 1e6)
    return f"RELOADING=1\nMONOTONIC_USEC={microseconds}"


def status(text: str) -> str:
    """Return the state line that shows one line of free text to the operator."""
    return f"STATUS={' '.join(text.split())}"


def sd_notify(*states: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send states to the service manager; return whether it took them (False: there is none)."""
    name = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")) or not states:
        return False
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)  # a manager that does not read must not hold the daemon
        try:
            channel.sendto("\n".join(states).encode(), address)
        except OSError:
            return False
    return True


def watchdog_interval_s(
    environ: Mapping[str, str] | None = None, pid: int | None = None
) -> float | None:
    """Return how often to send `WATCHDOG`, half of what is allowed, or None without a watchdog."""
    env = os.environ if environ is None else environ
    owner = env.get("WATCHDOG_PID")
    if owner is not None and owner != str(os.getpid() if pid is None else pid):
        return None
    period = env.get("WATCHDOG_USEC", "")
    if not (period.isascii() and period.isdigit()) or int(period) == 0:
        return None
    return int(period) / 2e6
