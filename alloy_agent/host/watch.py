"""Changes of cgroup trees as the kernel reports them: made, removed, written to.

Moving a process between cgroups gives no process event. Yet it is a write to a `cgroup.procs` (or
`tasks`) file, and inotify reports that as it reports any write: a watch on a cgroup's directory
tells of processes moved into it, of changed CPUs and caps, and of cgroups made or removed below it.
The kernel's own changes of `cgroup.events` on v2 (emptied, frozen) arrive in the same way, but only
where that file itself is watched.

A process that moves out is a write to the cgroup it moves *to*: watch the whole tree to see those.
A process that the kernel starts directly inside of a cgroup (`clone3`) is a fork event instead.

inotify is called through the C library: the reader in pyroute2 passes on neither overflow nor which
watch an event belongs to. Source: inotify(7); fsnotify_modify in fs/read_write.c, Linux 6.18.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterable
from enum import StrEnum

from alloy_agent.errors import BackendError, NotPermittedError
from alloy_agent.model import Value

IN_MODIFY, IN_CREATE, IN_DELETE, IN_DELETE_SELF = 0x2, 0x100, 0x200, 0x400
IN_Q_OVERFLOW, IN_IGNORED, IN_ISDIR = 0x4000, 0x8000, 0x4000_0000
EVENT = struct.Struct("=iIII")
READ_BYTES = 65_536
WATCHES_MAX = 4096


class ChangeKind(StrEnum):
    """What happened to a cgroup; LOST: more than the kernel could hold, look at the tree."""

    MADE = "made"
    REMOVED = "removed"
    WRITTEN = "written"
    LOST = "lost"


class CgroupChange(Value, frozen=True, kw_only=True):
    """One change. `folder` is what was watched, `name` the file or child in it."""

    kind: ChangeKind
    folder: str = ""
    name: str = ""


class CgroupWatch:
    """A set of watched cgroup directories (and `cgroup.events` files).

    Raises:
        BackendError: The kernel gives no inotify instance (`fs.inotify.max_user_instances`).
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise BackendError(f"inotify: {reason}", cure="raise fs.inotify.max_user_instances")
        self._folders: dict[int, str] = {}
        self.refused: tuple[str, ...] = ()

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return int(self._fd)

    def watch(self, folders: Iterable[str]) -> None:
        """Watch exactly these directories from now on; `refused` names those that cannot be."""
        wanted = dict.fromkeys(folders)
        refused = list(wanted)[WATCHES_MAX:]
        for number in [n for n, folder in self._folders.items() if folder not in wanted]:
            self._libc.inotify_rm_watch(self._fd, number)
            del self._folders[number]
        known = set(self._folders.values())
        mask = IN_MODIFY | IN_CREATE | IN_DELETE | IN_DELETE_SELF
        for folder in list(wanted)[:WATCHES_MAX]:
            if folder in known:
                continue
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
            if number < 0:
                refused.append(folder)
            else:
                self._folders[number] = folder
        self.refused = tuple(refused)

    def wait(self, timeout_s: float) -> tuple[CgroupChange, ...]:
        """Return the changes that wait, after at most `timeout_s` for the first."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return ()
        try:
            return self._parse(os.read(self._fd, READ_BYTES))
        except BlockingIOError:
            return ()
        except PermissionError as exc:
            raise NotPermittedError(f"inotify: {exc}") from exc

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._folders.clear()

    def _parse(self, data: bytes) -> tuple[CgroupChange, ...]:
        changes: dict[CgroupChange, None] = {}  # one write can come many times
        start = 0
        while start + EVENT.size <= len(data):
            number, mask, _, length = EVENT.unpack_from(data, start)
            start += EVENT.size
            name = os.fsdecode(data[start : start + length].rstrip(b"\0"))
            start += length
            change = self._change(number, mask, name)
            if change is not None:
                changes[change] = None
        return tuple(changes)

    def _change(self, number: int, mask: int, name: str) -> CgroupChange | None:
        if mask & IN_Q_OVERFLOW:
            return CgroupChange(kind=ChangeKind.LOST)
        folder = self._folders.get(number)
        if folder is None:
            return None
        if mask & (IN_IGNORED | IN_DELETE_SELF):
            self._folders.pop(number, None)
            return CgroupChange(kind=ChangeKind.REMOVED, folder=folder)
        if mask & IN_ISDIR:
            kind = ChangeKind.MADE if mask & IN_CREATE else ChangeKind.REMOVED
            return CgroupChange(kind=kind, folder=folder, name=name)
        return CgroupChange(kind=ChangeKind.WRITTEN, folder=folder, name=name)
