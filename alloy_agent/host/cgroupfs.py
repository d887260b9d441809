"""Where this host has its cgroup controllers, and the few file operations on cgroup trees.

A controller lives in exactly one hierarchy: the v2 tree or one v1 mount. Hosts are pure v2, pure v1
or hybrid (controllers on v1 beside a bare v2 tree that still freezes, kills and counts CPU time).
`detect` looks at each controller by itself, since hybrid hosts differ in which they moved.

`CgroupFs` is all that touches the trees, so that a generated tree with a kernel's refusals can
stand in for hierarchies that a host does not have.

Source: cgroups(7); Documentation/admin-guide/cgroup-v2.rst, Linux 6.18.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from alloy_agent.errors import BackendError, DeviceBusyError, NotPermittedError
from alloy_agent.host.processes import read_bytes
from alloy_agent.model import Value

READ_BYTES = 1 << 20  # a cgroup.procs of 100,000 processes


class Hierarchy(Value, frozen=True, kw_only=True):
    """One mounted cgroup tree.

    `root` is the cgroup that the mount shows as its top ("/" outside of containers). `label` names
    the hierarchy as `/proc/PID/cgroup` does: its controllers, or "" for v2.
    """

    version: int
    mount: str
    root: str
    controllers: tuple[str, ...]
    label: str

    def folder(self, path: str) -> str:
        """Return the directory of a cgroup given by its path below the mount."""
        return f"{self.mount}/{path.strip('/')}" if path.strip("/") else self.mount

    def visible(self, path: str) -> str:
        """Return a path as `/proc/PID/cgroup` shows it for a cgroup below the mount."""
        top = self.root.rstrip("/")
        return f"{top}/{path.strip('/')}"


class CgroupTopology(Value, frozen=True, kw_only=True):
    """All cgroup hierarchies of a host.

    `mode` is "v2", "v1", "hybrid" (controllers on v1 and a v2 tree) or "none". `disabled` are
    controllers that the kernel has but that are switched off (`cgroup_disable=`).
    """

    mode: str
    hierarchies: tuple[Hierarchy, ...]
    disabled: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def of(self, controller: str) -> Hierarchy | None:
        """Return the hierarchy that has a controller, or None."""
        return next((h for h in self.hierarchies if controller in h.controllers), None)

    @property
    def unified(self) -> Hierarchy | None:
        """The v2 tree, bare or not, or None."""
        return next((h for h in self.hierarchies if h.version == 2), None)


def detect(proc_root: str | Path = "/proc", host_root: str | Path = "") -> CgroupTopology:
    """Return the hierarchies that are mounted now.

    Args:
        proc_root: Where procfs is.
        host_root: Put before every mount point that the kernel names: "" on the host itself.
    """
    known, disabled = _controllers(read_bytes(f"{proc_root}/cgroups"))
    best: dict[str, Hierarchy] = {}
    for line in read_bytes(f"{proc_root}/self/mountinfo").split(b"\n"):
        point = _mount_point(line, str(host_root))
        for label in [name for name, kept in best.items() if point and _covers(point, kept.mount)]:
            del best[label]  # hidden: a container runtime mounts its own tree over the host's
        found = _hierarchy(line, str(host_root), known)
        if found is None:
            continue
        kept = best.get(found.label)
        if kept is None or len(found.root) < len(kept.root):  # bind mounts show a part of a tree
            best[found.label] = found
    hierarchies = tuple(best.values())
    return CgroupTopology(
        mode=_mode(hierarchies), hierarchies=hierarchies, disabled=disabled, known=known
    )


def _mode(hierarchies: tuple[Hierarchy, ...]) -> str:
    v1 = any(h.version == 1 and h.controllers for h in hierarchies)
    v2 = any(h.version == 2 for h in hierarchies)
    if v1 and v2:
        return "hybrid"
    return "v1" if v1 else "v2" if v2 else "none"


def _controllers(table: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known: list[str] = []
    disabled: list[str] = []
    for line in table.decode("ascii", "replace").splitlines():
        fields = line.split()
        if len(fields) != 4 or line.startswith("#"):
            continue
        (disabled if fields[3] == "0" else known).append(fields[0])
    return tuple(known), tuple(disabled)


def _hierarchy(line: bytes, host_root: str, known: tuple[str, ...]) -> Hierarchy | None:
    left, separator, right = line.partition(b" - ")
    fields, tail = left.split(b" "), right.split(b" ")
    if not separator or len(fields) < 6 or len(tail) < 3:
        return None
    kind, options = tail[0], tail[2].decode("ascii", "replace").split(",")
    root, mount = _unescape(fields[3]), host_root + _unescape(fields[4])
    if kind == b"cgroup2":
        listed = read_bytes(f"{mount}/cgroup.controllers").decode("ascii", "replace").split()
        return Hierarchy(version=2, mount=mount, root=root, controllers=tuple(listed), label="")
    if kind != b"cgroup":
        return None
    controllers = tuple(o for o in options if o in known)
    named = tuple(o for o in options if o.startswith("name="))
    label = ",".join(controllers or named)
    return Hierarchy(version=1, mount=mount, root=root, controllers=controllers, label=label)


def _mount_point(line: bytes, host_root: str) -> str:
    """Return where something is mounted, or nothing for a root.

    A root is listed after what an initial file system had mounted and handed over, and hides none.
    """
    fields = line.split(b" ")
    point = _unescape(fields[4]) if len(fields) > 4 else "/"
    return host_root + point if point != "/" else ""


def _covers(point: str, mount: str) -> bool:
    """Whether a mount hides an earlier one: it is at the same place, or above it."""
    return mount == point or mount.startswith(f"{point.rstrip('/')}/")


def _unescape(field: bytes) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8) & 0xFF]), field)
    return os.fsdecode(raw)


class CgroupFs:
    """The file operations on cgroup trees, with the kernel's refusals as `BackendError`s."""

    def exists(self, folder: str) -> bool:
        """Return whether a cgroup (or a file of one) is there."""
        return Path(folder).exists()

    def make(self, folder: str) -> bool:
        """Make one cgroup whose parent exists; return False if it was there."""
        try:
            os.mkdir(folder, 0o755)  # noqa: PTH102 - exactly one level, no Path semantics wanted
        except FileExistsError:
            return False
        except OSError as exc:
            raise refused(exc, f"making cgroup {folder}") from exc
        return True

    def remove(self, folder: str) -> bool:
        """Remove one cgroup without children and processes; return False if it was not there.

        Raises:
            DeviceBusyError: It still has processes or children.
        """
        try:
            os.rmdir(folder)  # noqa: PTH106
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise refused(exc, f"removing cgroup {folder}") from exc
        return True

    def read(self, path: str) -> str | None:
        """Return a control file's text without the last newline, or None if it is not there.

        Raises:
            BackendError: It is there and cannot be read.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise refused(exc, f"reading {path}") from exc
        try:
            chunks: list[bytes] = []
            while chunk := os.read(descriptor, READ_BYTES):
                chunks.append(chunk)
        except OSError as exc:
            if exc.errno in {errno.ENODEV, errno.ENOENT}:  # removed while open
                return None
            raise refused(exc, f"reading {path}") from exc
        finally:
            os.close(descriptor)
        return b"".join(chunks).decode("utf-8", "backslashreplace").rstrip("\n")

    def write(self, path: str, text: str) -> None:
        """Write a control file in one call, as the kernel wants it.

        Raises:
            NotPermittedError, DeviceBusyError, BackendError: By the kernel's answer.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise refused(exc, f"writing {text!r} to {path}") from exc

    def children(self, folder: str) -> tuple[str, ...]:
        """Return the names of the cgroups below one, sorted; empty if it is not there."""
        try:
            with os.scandir(folder) as entries:
                return tuple(sorted(e.name for e in entries if e.is_dir(follow_symlinks=False)))
        except OSError:
            return ()

    def inode(self, folder: str) -> int | None:
        """Return the number of a cgroup that no later one of this boot gets, or None.

        Source: `__kernfs_new_node` in fs/kernfs/dir.c numbers cyclically with a generation in the
        upper half, so that a 64-bit inode number is never given twice. The times of a kernfs
        directory are made up when its inode is loaded again, so they are no part of an identity.
        """
        try:
            return os.stat(folder).st_ino  # noqa: PTH116
        except OSError:
            return None


def refused(exc: OSError, what: str) -> BackendError:
    """Return the failure of a cgroup operation by what the caller can do about it."""
    reason = f"{what}: {exc.strerror or exc}"
    if exc.errno == errno.EROFS:
        cure = "mount the cgroup tree writable (in a container: privileged, host cgroup namespace)"
        return NotPermittedError(reason, cure=cure)
    if exc.errno in {errno.EACCES, errno.EPERM}:
        return NotPermittedError(
            reason, cure="run as root; for a cpuset the parent must hold the same CPUs and nodes"
        )
    if exc.errno in {errno.EBUSY, errno.ENOTEMPTY}:
        return DeviceBusyError(reason, cure="stop or move the processes in it first")
    return BackendError(reason)
