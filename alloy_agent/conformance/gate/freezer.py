"""The backstop: a neighbour's cgroup is frozen, and what was frozen is never left so.

Rules that stay true in here:

* The note on disk comes before the freeze and goes after the thaw. A restarted agent thaws all
  that is noted before it does anything else.
* A note that is damaged, or leads out of the tree, is set aside; all others are obeyed.
* A group that does not stop in time is thawed, counted as not stopped, and tried again later.
* A group with an MPS server in it is never frozen: its clients' locks would be held for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from alloy_agent.errors import AlloyError, BackendError
from alloy_agent.host.cgroups import Cgroup, CgroupTopology

LOG = logging.getLogger(__name__)

FREEZE_S: Final = 0.5
PATH_BYTES: Final = 4096  # Source: limits.h, PATH_MAX
NEVER: Final = frozenset({"nvidia-cuda-mps", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control"})


class Freezer:
    """Freezes cgroups, with a journal of one small file for each."""

    def __init__(
        self,
        topology: CgroupTopology,
        folder: Path,
        comm: Callable[[int], str] | None = None,
    ) -> None:
        self._topology = topology
        self._folder = folder
        self._comm = comm or _comm
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.frozen: set[str] = set()

    def recover(self) -> tuple[str, ...]:
        """Thaw all that an earlier agent froze; return the cgroups."""
        done = []
        for note in sorted(self._folder.glob("*.frozen")):
            try:
                path = _noted(note)
                if path:
                    with contextlib.suppress(AlloyError):
                        Cgroup(self._topology, path).thaw()
                    done.append(path)
                note.unlink()
            except (OSError, ValueError) as exc:  # the other notes count all the same
                _set_aside(note, str(exc))
        return tuple(done)

    def freeze(self, path: str) -> bool:
        """Stop a cgroup; return whether the kernel says that it stands still."""
        if path in self.frozen:
            return True
        group = Cgroup(self._topology, path)
        if any(self._comm(pid) in NEVER for pid in group.pids()):
            raise BackendError(
                f"cgroup {path} holds an MPS server and is never frozen",
                cure="run the MPS server in a cgroup of its own",
            )
        self._note(path)
        try:
            group.freeze(FREEZE_S)
        except BackendError:
            self.thaw(path)
            return False
        self.frozen.add(path)
        return True

    def thaw(self, path: str) -> None:
        """Let a cgroup run again; one that is gone needs nothing."""
        group = Cgroup(self._topology, path)
        if group.present():
            group.thaw()
        self.frozen.discard(path)
        self._file(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Thaw everything."""
        for path in sorted(self.frozen):
            with contextlib.suppress(AlloyError):
                self.thaw(path)

    def _file(self, path: str) -> Path:
        return self._folder / f"{hashlib.sha256(path.encode()).hexdigest()[:24]}.frozen"

    def _note(self, path: str) -> None:
        handle = os.open(self._file(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, path.encode())
            os.fsync(handle)
        finally:
            os.close(handle)


def _noted(note: Path) -> str:
    """Return the cgroup of a note, empty where its writer died before it froze anything.

    Raises:
        OSError: It cannot be read.
        ValueError: It names no cgroup: it is damaged, or would lead out of the tree.
    """
    handle = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        raw = os.read(handle, PATH_BYTES + 1)
    finally:
        os.close(handle)
    path = raw.decode("utf-8").strip()
    if len(raw) > PATH_BYTES or not path.isprintable() or {".", ".."} & set(path.split("/")):
        raise ValueError("it names no cgroup")
    if path and not path.strip("/"):
        raise ValueError("it names the root of the tree")
    return path


def _set_aside(note: Path, reason: str) -> None:
    """Say that a note is damaged and keep it under another name for whoever looks into it."""
    aside = note.with_suffix(".damaged")
    try:
        note.replace(aside)
    except OSError as exc:
        reason = f"{reason}; {exc}"
    LOG.warning("freeze_note_damaged", extra={"note": str(aside), "reason": reason})


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
