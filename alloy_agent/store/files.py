"""The state directory: who may see it, who has it, and what outlives a broken state file.

Rules that stay true in here:

* The directory is the agent's own and closed to others (0700); the files in it are 0600.
* One writer: an exclusive `flock` on `lock`, which the kernel drops when its holder dies, however
  it dies.
* `marks.json` holds ceilings of the numbers that must never go down (fencing token, generation) and
  the agent's epoch. It is raised on disk *before* a number passes it, in blocks, so it costs a
  write only every `MARK_BLOCK` numbers. When `state.db` is lost, counting goes on above the marks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import stat
import time
import zlib
from pathlib import Path

import msgspec

from alloy_agent.errors import StoreCorruptError, StoreError, StoreFullError
from alloy_agent.model import Value

LOG = logging.getLogger(__name__)
MARK_BLOCK = 1000
FULL_BELOW_BYTES = 256 * 1024  # less room than this on the file system counts as full
ROOM_FROM_BYTES = 4 * FULL_BELOW_BYTES  # and it ends with this much, so that it does not flap

_CURES = {
    errno.ENOSPC: ("no space is left on the disk", "free some space there, then run it again"),
    errno.EDQUOT: ("the disk quota is used up", "raise the quota or free some space there"),
    errno.EROFS: (
        "the file system is read-only",
        "remount it writable, or give --state-dir a writable one",
    ),
    errno.EACCES: ("permission denied", "run as root, or give --state-dir one of your own"),
    errno.EPERM: ("operation not permitted", "run as root, or give --state-dir one of your own"),
    errno.EIO: (
        "the disk reports an input/output error",
        "check the disk (dmesg), then run it again",
    ),
    errno.ENOTDIR: ("a part of the path is no directory", "give --state-dir a directory"),
    errno.ELOOP: (
        "it is a symbolic link",
        "remove the link: the agent writes only to files of its own",
    ),
}

_FULL = (errno.ENOSPC, errno.EDQUOT)

_SQLITE_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


def os_failure(exc: OSError, path: Path) -> StoreError:
    """Return the `StoreError` that explains a failed system call on `path`."""
    default = (
        os.strerror(exc.errno) if exc.errno else str(exc),
        "check the path and its permissions",
    )
    cause, cure = _CURES.get(exc.errno or 0, default)
    kind = StoreFullError if exc.errno in _FULL else StoreError
    return kind(f"state {path}: {cause}", cure=cure)


# The module decodes names and even messages of SQLite as UTF-8, which damage need not be.
SQLITE_FAILURES = (sqlite3.Error, UnicodeDecodeError)


def sqlite_failure(exc: sqlite3.Error | UnicodeDecodeError, path: Path) -> StoreError:
    """Return the `StoreError` that explains a failed SQLite call on `path`."""
    full_code = getattr(exc, "sqlite_errorcode", 0)
    code = full_code & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "utf-8" in str(exc).lower():
        return corrupt(path, str(exc))
    if full_code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK):
        return corrupt(path, "its header says that it must not be written")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(
            f"state {path}: another program holds the database",
            cure="close what has it open (lsof names it), then run it again",
        )
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _is_full(path.parent):
        code = sqlite3.SQLITE_FULL
    if code == sqlite3.SQLITE_READONLY and not _is_read_only_mount(path.parent):
        code = sqlite3.SQLITE_PERM
    number = _SQLITE_ERRNO.get(code)
    if number is None:
        return StoreError(f"state {path}: {exc}", cure="check the path and its permissions")
    cause, cure = _CURES[number]
    kind = StoreFullError if number in _FULL else StoreError
    return kind(f"state {path}: {cause}", cure=cure)


def corrupt(path: Path, what: str) -> StoreCorruptError:
    """Return the error for a state file that cannot be trusted."""
    return StoreCorruptError(
        f"state {path}: damaged ({what})",
        cure="start the daemon, which keeps the file aside and rebuilds from the devices "
        "without destroying anything, or put back a copy of it",
    )


def has_room(directory: Path) -> bool:
    """Whether there is room again for state in a directory that was full."""
    probe = directory / f".room.{os.getpid()}"
    try:
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < ROOM_FROM_BYTES:
            return False
        try:
            probe.write_bytes(bytes(FULL_BELOW_BYTES))  # a quota shows in nothing else
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _is_full(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        room = os.statvfs(directory)
        return room.f_bavail * room.f_frsize < FULL_BELOW_BYTES or (
            room.f_files > 0 and room.f_favail == 0
        )
    return False


def _is_read_only_mount(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
    return False


def prepare_directory(state_dir: Path) -> None:
    """Make the state directory, or close an existing one to others.

    Raises:
        StoreError: It cannot be made, or belongs to another user, who could then change what the
            agent believes.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = state_dir.stat()
        if info.st_uid != os.geteuid():
            raise StoreError(
                f"state directory {state_dir}: it belongs to uid {info.st_uid}, not {os.geteuid()}",
                cure=f"chown it to {os.geteuid()}, or give --state-dir another one",
            )
        if stat.S_IMODE(info.st_mode) & 0o077:
            state_dir.chmod(0o700)
    except FileExistsError as exc:
        raise StoreError(
            f"state directory {state_dir}: it is no directory", cure="give --state-dir a directory"
        ) from exc
    except OSError as exc:
        raise os_failure(exc, state_dir) from exc


def refuse_odd_file(path: Path) -> None:
    """Raise `StoreError` for what is no file: opening a pipe could wait for ever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as exc:
        raise os_failure(exc, path) from exc
    if not stat.S_ISREG(mode):
        raise StoreError(f"state {path}: it is no file", cure="move it out of the way")


def claim_file(path: Path) -> None:
    """Make `path` with mode 0600 where it is missing; never follows a link."""
    refuse_odd_file(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
    except OSError as exc:
        raise os_failure(exc, path) from exc


class DirectoryLock:
    """The right to write to a state directory, held until `release` or the end of the process."""

    def __init__(self, state_dir: Path) -> None:
        """Take the lock.

        Raises:
            StoreError: Another process has it; the message names its pid.
        """
        path = state_dir / "lock"
        claim_file(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreError(
                f"state directory {state_dir}: process {holder} has it already",
                cure=f"stop that agent (kill {holder}), or give this one its own --state-dir",
            ) from exc
        except OSError as exc:
            os.close(self._fd)
            raise os_failure(exc, path) from exc

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_directory(directory: Path) -> None:
    """Make renames and new names in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, so that a crash leaves the old content or the new, never a part.

    Raises:
        StoreError: The disk refuses; the old content stays.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as exc:
        raise os_failure(exc, path) from exc


def keep_aside(path: Path) -> Path:
    """Rename a damaged database and its log to the next free `.corrupt-N`; return the path."""
    number = 1
    while (kept := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    try:
        # The database first: SQLite throws away a log that lies beside an empty database, whereas a
        # database without its log would open as an older truth.
        for suffix in ("", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(kept.with_name(kept.name + suffix))
        sync_directory(path.parent)
    except OSError as exc:
        raise os_failure(exc, path) from exc
    return kept


class Marks(Value, frozen=True, kw_only=True):
    """Ceilings that no number in use has passed yet, and the highest epoch given out."""

    token_ceiling: int = 0
    generation_ceiling: int = 0
    epoch: int = 0


class _SealedMarks(Value, frozen=True, kw_only=True):
    schema: str
    marks: Marks
    seal: int


def read_marks(state_dir: Path) -> Marks | None:
    """Return the marks on disk, or None where they are missing or damaged."""
    try:
        found = msgspec.json.decode((state_dir / "marks.json").read_bytes(), type=_SealedMarks)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    good = found.seal == zlib.crc32(msgspec.json.encode(found.marks))
    return found.marks if good else None


def put_marks_aside(state_dir: Path) -> None:
    """Keep a damaged `marks.json` under another name, and say so; there may be none at all.

    It is made anew from the database, or far above any number in use where that is lost, too.
    """
    path = state_dir / "marks.json"
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.corrupt-{number}")):
        number += 1
    with contextlib.suppress(OSError):  # a full disk: it is replaced in place, which says why not
        path.rename(kept)
    LOG.warning("marks_damaged", extra={"path": str(path), "kept_aside": str(kept)})


def write_marks(state_dir: Path, marks: Marks) -> None:
    """Put the marks on disk, durably."""
    record = _SealedMarks(
        schema="alloy.marks/v1", marks=marks, seal=zlib.crc32(msgspec.json.encode(marks))
    )
    replace_file(state_dir / "marks.json", msgspec.json.encode(record) + b"\n")


def last_resort_marks() -> Marks:
    """Return marks for a node that lost state file and marks alike.

    Seconds since 1970 are more than any count of tokens or generations that one node ever reached.
    """
    now = int(time.time())
    return Marks(token_ceiling=now, generation_ceiling=now, epoch=now)
