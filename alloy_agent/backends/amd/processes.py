"""Who computes on which partition, as KFD shows it.

`/sys/class/kfd/kfd/proc` has one directory for each process that opened `/dev/kfd`, named by its
pid in the initial pid namespace. One that has no queue and holds no memory is no user of a
partition, but it keeps a device from being cut anew all the same.

Source: kernel kfd_process.c (`queues/<qid>/gpuid`, `vram_<gpu_id>`, `stats_<gpu_id>/cu_occupancy`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

import msgspec

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.host.processes import printable
from alloy_agent.model import Value

HOLDERS_SHOWN: Final = 8


class KfdProcess(Value, frozen=True, kw_only=True):
    """One process with what it has on each node, by KFD id."""

    pid: int
    comm: str
    memory_bytes: dict[int, int] = msgspec.field(default_factory=dict)
    queues: dict[int, int] = msgspec.field(default_factory=dict)
    occupancy_cus: dict[int, int] = msgspec.field(default_factory=dict)
    monitor: bool = False  # this agent itself
    unread: bool = False  # what it has could not be read in full: it may be anywhere

    def uses(self, gpu_id: int) -> bool:
        """Whether it has a queue or memory on a node."""
        return bool(self.queues.get(gpu_id) or self.memory_bytes.get(gpu_id))

    @property
    def idle(self) -> bool:
        """Whether it opened KFD and did nothing with it."""
        return not any(self.queues.values()) and not any(self.memory_bytes.values())


def kfd_processes(files: Files, roots: Roots, *, queues: bool = True) -> tuple[KfdProcess, ...]:
    """Return every process that has KFD open; one that ends meanwhile is left out.

    Args:
        files: The file system.
        roots: Where it shows what.
        queues: Also count queues, which costs two more directories a process.
    """
    base = f"{roots.kfd}/proc"
    found = []
    for pid in files.numbered(base):
        with contextlib.suppress(OSError):
            found.append(_process(files, roots, f"{base}/{pid}", pid, queues=queues))
    return tuple(found)


def unlisted(files: Files, roots: Roots) -> str:
    """Return why the processes on KFD cannot be listed; empty when they can."""
    base = f"{roots.kfd}/proc"
    try:
        files.names(base)
    except OSError as error:
        return f"{base}: {error.strerror or error}"
    return ""


def _process(files: Files, roots: Roots, base: str, pid: int, *, queues: bool) -> KfdProcess:
    memory: dict[int, int] = {}
    occupancy: dict[int, int] = {}
    unread = False
    for name in files.names(base):
        kind, _, gpu = name.partition("_")
        if kind == "vram" and gpu.isdecimal():
            used = files.number(f"{base}/{name}")
            unread = unread or used is None
            memory[int(gpu)] = used or 0
        elif kind == "stats" and gpu.isdecimal() and queues:
            busy = files.number(f"{base}/{name}/cu_occupancy")
            if busy is not None:
                occupancy[int(gpu)] = busy
    counts: dict[int, int] = {}
    for queue in _queues(files, base) if queues else ():
        gpu_id = files.number(f"{base}/queues/{queue}/gpuid")
        if gpu_id is None:  # the queue ended meanwhile, or is not for us to see
            unread = unread or files.there(f"{base}/queues/{queue}")
        else:
            counts[gpu_id] = counts.get(gpu_id, 0) + 1
    if unread:
        files.mark(base)  # one that ended meanwhile is left out
    return KfdProcess(
        pid=pid,
        comm=comm_of(files, roots, pid),
        memory_bytes=memory,
        queues=counts,
        occupancy_cus=occupancy,
        monitor=pid == os.getpid(),
        unread=unread,
    )


def _queues(files: Files, base: str) -> list[str]:
    """Return the queues of a process; a driver that does not show them has no such directory."""
    try:
        return sorted(files.names(f"{base}/queues"))
    except FileNotFoundError:
        return []


def comm_of(files: Files, roots: Roots, pid: int) -> str:
    """Return a process's name, printable whatever bytes it chose; empty: it is gone."""
    try:
        return printable(files.data(f"{roots.proc}/{pid}/comm", 64).rstrip(b"\n"))
    except OSError:
        return ""


def holders(processes: Iterable[KfdProcess], gpu_ids: frozenset[int]) -> str:
    """Return who keeps a device busy, for a person: those on it, else everyone with KFD open."""
    listed = list(processes)
    here = [process for process in listed if any(process.uses(gpu) for gpu in gpu_ids)]
    shown = [f"pid {p.pid} ({p.comm or 'unknown'})" for p in (here or listed)]
    more = f" and {len(shown) - HOLDERS_SHOWN} more" if len(shown) > HOLDERS_SHOWN else ""
    return ", ".join(shown[:HOLDERS_SHOWN]) + more
