"""Tolerant readers of `/proc`: processes and threads, whatever their names, whenever they go.

Rules that stay true in here:

* A process that ends while it is read is simply not listed; nothing raises for it.
* Names and paths chosen by tenants may hold any byte. They are returned printable and reversible:
  invalid UTF-8, control characters and backslashes are escaped (`printable`), so that no name can
  break a table, a log or JSON, and two different names never become one.
* A process is `(pid, start_ticks)`: a pid alone is re-used.

Source: proc_pid_stat(5), proc_pid_status(5), proc_pid_cgroup(5); `PF_KTHREAD` is 0x00200000 in
include/linux/sched.h.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from alloy_agent.host.cpulist import parse_cpu_list
from alloy_agent.model import Value

PF_KTHREAD = 0x0020_0000
READ_BYTES = 65_536  # more than any stat, status or cgroup file of a process holds


class ThreadInfo(Value, frozen=True, kw_only=True):
    """One thread of a process that is not its leader, with its own affinity and cgroups."""

    tid: int
    cpus_allowed: tuple[int, ...]
    last_cpu: int
    cpu_ticks: int
    cgroups: dict[str, str]


class ProcessInfo(Value, frozen=True, kw_only=True):
    """One process as read at one moment.

    `cgroups` maps each controller (`cpuset`), named hierarchy (`name=systemd`) and the v2 tree
    (`""`) to the path that the kernel shows. `last_cpu` is where it ran last, `cpu_ticks` its user
    and system time in clock ticks. `threads` is empty unless asked for; it then lists all but the
    leader.
    """

    pid: int
    start_ticks: int
    ppid: int
    comm: str
    uid: int
    state: str
    kernel_thread: bool
    cgroups: dict[str, str]
    cpus_allowed: tuple[int, ...]
    last_cpu: int
    cpu_ticks: int
    thread_count: int
    threads: tuple[ThreadInfo, ...] = ()


class Stat(NamedTuple):
    """The fields of `/proc/PID/stat` that the agent uses."""

    pid: int
    comm: bytes
    state: str
    ppid: int
    flags: int
    cpu_ticks: int
    thread_count: int
    start_ticks: int
    last_cpu: int


def printable(raw: bytes) -> str:
    """Return bytes as text without control characters; two inputs never give one output."""
    text = raw.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def parse_stat(raw: bytes) -> Stat:
    """Return the fields of a `stat` line. The name may hold spaces, newlines and parentheses.

    Raises:
        ValueError: It is not such a line.
    """
    opening, closing = raw.find(b"("), raw.rfind(b")")
    if opening < 1 or closing < opening:
        raise ValueError("stat line without a name in parentheses")
    rest = raw[closing + 1 :].split()
    if len(rest) < 37:
        raise ValueError(f"stat line with {len(rest)} fields behind the name, not 37")
    return Stat(
        pid=int(raw[:opening]),
        comm=raw[opening + 1 : closing],
        state=rest[0].decode("ascii", "replace"),
        ppid=int(rest[1]),
        flags=int(rest[6]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        thread_count=int(rest[17]),
        start_ticks=int(rest[19]),
        last_cpu=int(rest[36]),
    )


def parse_cgroups(raw: bytes) -> dict[str, str]:
    """Return controller to path from `/proc/PID/cgroup`; lines that are none are left out."""
    paths: dict[str, str] = {}
    for line in raw.split(b"\n"):
        parts = line.split(b":", 2)
        if len(parts) != 3:
            continue
        path = printable(parts[2])
        for controller in parts[1].split(b","):
            paths[printable(controller)] = path
    return paths


def parse_status(raw: bytes) -> tuple[int, tuple[int, ...]]:
    """Return the real uid and the allowed CPUs from `/proc/PID/status`.

    Raises:
        ValueError: A line is missing or malformed.
    """
    uid = _field(raw, b"\nUid:").split()
    cpus = _field(raw, b"\nCpus_allowed_list:")
    if not uid:
        raise ValueError("status without a Uid")
    return int(uid[0]), parse_cpu_list(cpus.decode("ascii"))


def _field(raw: bytes, key: bytes) -> bytes:
    start = raw.find(key)
    if start < 0:
        raise ValueError(f"status without {key.decode().strip()}")
    start += len(key)
    end = raw.find(b"\n", start)
    return raw[start : end if end >= 0 else None].strip()


def read_bytes(path: str) -> bytes:
    """Return a small kernel file's content, or `b""` if it is gone or not for us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, READ_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def read_process(
    pid: int, proc_root: str | Path = "/proc", threads: bool = False
) -> ProcessInfo | None:
    """Return one process, or None if it is gone (or its files make no sense, as while it goes)."""
    base = f"{proc_root}/{pid}"
    try:
        stat = parse_stat(read_bytes(f"{base}/stat"))
        uid, cpus_allowed = parse_status(read_bytes(f"{base}/status"))
    except ValueError:
        return None
    return ProcessInfo(
        pid=stat.pid,
        start_ticks=stat.start_ticks,
        ppid=stat.ppid,
        comm=printable(stat.comm),
        uid=uid,
        state=stat.state,
        kernel_thread=bool(stat.flags & PF_KTHREAD),
        cgroups=parse_cgroups(read_bytes(f"{base}/cgroup")),
        cpus_allowed=cpus_allowed,
        last_cpu=stat.last_cpu,
        cpu_ticks=stat.cpu_ticks,
        thread_count=stat.thread_count,
        threads=_threads(pid, proc_root) if threads and stat.thread_count > 1 else (),
    )


def start_ticks(pid: int, proc_root: str | Path = "/proc") -> int | None:
    """Return when a process started (pids are re-used), or None if it is gone."""
    try:
        return parse_stat(read_bytes(f"{proc_root}/{pid}/stat")).start_ticks
    except ValueError:
        return None


def iter_processes(proc_root: str | Path = "/proc", threads: bool = False) -> Iterator[ProcessInfo]:
    """Yield every process, kernel threads included; with `threads` also the threads of each."""
    for pid in list_pids(proc_root):
        process = read_process(pid, proc_root, threads)
        if process is not None:
            yield process


def list_pids(proc_root: str | Path = "/proc") -> tuple[int, ...]:
    """Return the pids of this moment, ascending; empty if the tree cannot be read."""
    return _numbers(str(proc_root))


def _threads(pid: int, proc_root: str | Path) -> tuple[ThreadInfo, ...]:
    found: list[ThreadInfo] = []
    for tid in _numbers(f"{proc_root}/{pid}/task"):
        if tid == pid:
            continue
        base = f"{proc_root}/{pid}/task/{tid}"
        try:
            stat = parse_stat(read_bytes(f"{base}/stat"))
            _, cpus_allowed = parse_status(read_bytes(f"{base}/status"))
        except ValueError:
            continue
        found.append(
            ThreadInfo(
                tid=tid,
                cpus_allowed=cpus_allowed,
                last_cpu=stat.last_cpu,
                cpu_ticks=stat.cpu_ticks,
                cgroups=parse_cgroups(read_bytes(f"{base}/cgroup")),
            )
        )
    return tuple(found)


def _numbers(folder: str) -> tuple[int, ...]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names only, called for thousands of folders
    except OSError:
        return ()
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))
