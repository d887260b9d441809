"""Which process of this host the driver means by a pid, and when nobody can tell.

Drivers tell pids of the host, of the container, or of one in one call and of the other in the
next, and an agent in a pid namespace of its own cannot see most of either. So a pid is believed
only if the process of that number has a node of the driver open; else one process whose innermost
pid (`NSpid`) is that number and that has a node open is meant. Two of them are nobody: the pid is
told as it is, with the reason, and never given to the nearest tenant.

Source: proc_pid_status(5), `NSpid`; pid_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.backends.nvidia.processes import open_nodes, pids
from alloy_agent.host.pidspace import initial_namespace

SHOWN: Final = 4


class Sighting(NamedTuple):
    """A pid as the driver tells it: the process of this host; why there is none ("" if it is)."""

    pid: int
    note: str = ""


def sighted(
    proc: Path, told: Iterable[int], known: frozenset[int] = frozenset()
) -> dict[int, Sighting]:
    """Return, by pid as told, the process that is meant.

    Args:
        proc: Where procfs is.
        told: Pids from the driver.
        known: Pids of this host that are seen elsewhere, in a cgroup: they need no proof.
    """
    found = {pid: Sighting(pid) for pid in told}
    doubtful = [pid for pid in found if pid not in known and not _plain(proc, pid)]
    if not doubtful:
        return found
    inner = _by_inner_pid(proc)
    for pid in doubtful:
        meant = inner.get(pid, [])
        if len(meant) == 1:
            found[pid] = Sighting(meant[0])
        else:
            found[pid] = Sighting(pid, _why(proc, pid, meant))
    return found


def _plain(proc: Path, pid: int) -> bool:
    """Whether the process of that number has a node of the driver open, or cannot be looked at."""
    folder = proc / str(pid) / "fd"
    try:
        with os.scandir(folder):
            pass
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return bool(open_nodes(proc, pid))


def _by_inner_pid(proc: Path) -> dict[int, list[int]]:
    """Return, by innermost pid, the processes of nested pid namespaces that have a node open."""
    found: dict[int, list[int]] = {}
    for pid in pids(proc):
        inner = _inner_pid(proc, pid)
        if inner is not None and open_nodes(proc, pid):
            found.setdefault(inner, []).append(pid)
    return found


def _inner_pid(proc: Path, pid: int) -> int | None:
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("NSpid:"):
            words = line.split()[1:]
            return int(words[-1]) if len(words) > 1 and words[-1].isdecimal() else None
    return None


def _why(proc: Path, pid: int, meant: list[int]) -> str:
    if meant:
        shown = ", ".join(str(one) for one in meant[:SHOWN])
        return f"the driver tells pid {pid}, which is that of {shown} in their own pid namespaces"
    if (proc / str(pid)).exists():
        return (
            f"the driver tells pid {pid}, but the process of that number has no node of it open: "
            "the pid is another namespace's"
        )
    where = "" if initial_namespace(str(proc)) else "; this agent is in a pid namespace of its own"
    return (
        f"the driver tells pid {pid}, which is not in {proc}: it has ended, or is in another pid "
        f"namespace{where}"
    )
