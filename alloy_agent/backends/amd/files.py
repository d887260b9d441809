"""Reading and writing the kernel's small files, below roots that can be set.

Rules that stay true in here:

* Reads are bounded, and text is decoded so that any byte a tenant chose stays printable.
* `hang_hws` and `mem_limit` of the KFD's debugfs are never opened: a write hangs the scheduler, and
  nothing in them is worth the risk.
* An `OSError` becomes the `BackendError` that says what the caller can do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    InvariantError,
    NotPermittedError,
    UnsupportedError,
)
from alloy_agent.model import Value

TEXT_MAX: Final = 65536
NEVER: Final = frozenset({"hang_hws", "mem_limit"})
BUSY: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.ETXTBSY})
GONE: Final = frozenset({errno.ENODEV, errno.ENXIO})


class Roots(Value, frozen=True, kw_only=True):
    """Where the kernel shows itself."""

    sys: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    debug: str = "/sys/kernel/debug"

    @property
    def kfd(self) -> str:
        """KFD's own tree."""
        return f"{self.sys}/class/kfd/kfd"

    def pci(self, bus: str) -> str:
        """Directory of a PCI function."""
        return f"{self.sys}/bus/pci/devices/{bus}"


class Files:
    """The file system as the kernel offers it. Tests put a machine behind these few calls."""

    def data(self, path: str, limit: int = TEXT_MAX) -> bytes:
        """Return the first `limit` bytes of a file."""
        _allowed(path)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        parts: list[bytes] = []
        left = limit
        try:
            while left > 0 and (part := os.read(handle, left)):  # seq files give a page at a time
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            os.close(handle)

    def open(self, path: str) -> int:
        """Return a descriptor that `again` reads from the start; `close` lets it go."""
        _allowed(path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def again(self, handle: int, limit: int) -> bytes:
        """Return a file's present content through an open descriptor."""
        return os.pread(handle, limit, 0)

    def close(self, handle: int) -> None:
        """Let go of a descriptor."""
        os.close(handle)

    def write(self, path: str, text: str) -> None:
        """Write a value in one call, as the kernel's attribute files want it."""
        _allowed(path)
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)  # noqa: PTH208

    def mark(self, path: str) -> int:
        """Return a number that changes when a directory is made anew (its inode)."""
        return os.stat(path).st_ino  # noqa: PTH116

    def link(self, path: str) -> str:
        """Return where a symbolic link points."""
        return os.readlink(path)  # noqa: PTH115

    # --- the same, where absence is an answer ---

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding white space; None: it cannot be read."""
        try:
            return self.data(path).decode("utf-8", "backslashreplace").strip()
        except OSError:
            return None

    def number(self, path: str, base: int = 10) -> int | None:
        """Return a file's whole number; None: there is none."""
        text = self.text(path)
        try:
            return None if text is None else int(text, base)
        except ValueError:
            return None

    def listed(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if it cannot be read."""
        try:
            return sorted(self.names(path))
        except OSError:
            return []

    def numbered(self, path: str) -> list[int]:
        """Return the names in a directory that are numbers, in order."""
        return sorted(int(name) for name in self.listed(path) if name.isdecimal())

    def there(self, path: str) -> bool:
        """Whether something is at a path."""
        try:
            self.mark(path)
        except OSError:
            return False
        return True


def _allowed(path: str) -> None:
    if path.rpartition("/")[2] in NEVER:
        raise InvariantError(f"{path} must never be opened")


def flat(text: str | None) -> dict[str, int]:
    """Return the numbers of a `name value` file; lines that are none are left out."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        name, _, value = line.strip().partition(" ")
        with contextlib.suppress(ValueError):
            found[name] = int(value)
    return found


@contextlib.contextmanager
def translated(subject: str, cure: str = "") -> Iterator[None]:
    """Raise an `OSError` as the `BackendError` that says what the caller can do."""
    try:
        yield
    except OSError as error:
        raise meaning(error)(f"{subject}: {error.strerror or error}", cure=cure) from error


def meaning(error: OSError) -> type[BackendError]:
    """Return the kind of failure that an error of the kernel stands for."""
    if error.errno in BUSY:
        return DeviceBusyError
    if error.errno in GONE:
        return DeviceLostError
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return NotPermittedError
    if error.errno in {errno.ENOENT, errno.EOPNOTSUPP, errno.ENOSYS}:
        return UnsupportedError
    return BackendError
