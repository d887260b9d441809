"""What no driver remembers: how often a device was cut anew, what was asked for, who shares it.

The kernel has no name for "this partition, made the second time": KFD's ids are hashes of the
location, and its directories are re-created whenever any device is switched. So each cut of a
device is counted here: when this backend makes one, and when a device no longer looks as noted
(modes, KFD ids, driver instance). A cut and its undoing by somebody else between two observations
look like nothing happened; a partition with a process in it cannot be cut.

A requested memory mode is noted here too, with the driver instance that was told, for the kernel
takes the request and shows it nowhere. Shares of a device are bindings that no driver knows.

Rules that stay true in here:

* The file is replaced whole, below a lock that other processes of the agent honour.
* Where it cannot be written (a reading command without privilege), observation goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from alloy_agent.errors import BackendError
from alloy_agent.model import Share

FILE: Final = "amd.json"
T = TypeVar("T")


class ShareEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A share of a whole device."""

    profile: str
    share: Share
    ordinal: int
    serial: int
    memory_bytes: int | None = None
    cu_mask: str = ""  # value of HSA_CU_MASK; empty: unmasked
    cus: int = 0
    choice: tuple[int, int] | None = None  # of the layout; None: the settings'


class DeviceEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is noted of one device."""

    looks: str = ""
    cuts: int = 0
    memory_requested: str = ""
    requested_epoch: str = ""
    cleaned: list[int] = []  # partitions that the cleaner shader ran on
    cleaned_cut: int = -1  # at which count of cuts that was
    shares: list[ShareEntry] = []


class Notes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    version: int = 1
    boot: str = ""
    serial: int = 0
    devices: dict[str, DeviceEntry] = {}


class Ledger:
    """The notes, shared by all processes of the agent through a file; in memory without one."""

    def __init__(self, state_dir: str | None, boot: str) -> None:
        self._path = None if state_dir is None else Path(state_dir) / FILE
        self._boot = boot
        self._lock = threading.RLock()
        self._notes = Notes(boot=boot)
        self._stamp: tuple[int, int] | None = None

    def device(self, device: str) -> DeviceEntry:
        """Return what is noted of a device now; read only."""
        with self._lock:
            self._load()
            return self._notes.devices.get(device, DeviceEntry())

    def change(self, device: str, edit: Callable[[DeviceEntry, Notes], T]) -> T:
        """Change what is noted of a device; return what `edit` returns."""
        with self._lock, self._locked():
            self._load()
            result = edit(self._notes.devices.setdefault(device, DeviceEntry()), self._notes)
            self._save()
            return result

    def cuts(self, device: str, looks: str) -> int:
        """Return how often the device was cut, counting one more if it looks otherwise."""
        noted = self.device(device)
        if noted.looks == looks:
            return noted.cuts

        def edit(entry: DeviceEntry, _notes: Notes) -> int:
            if entry.looks != looks:
                entry.cuts += bool(entry.looks)
                entry.looks = looks
            return entry.cuts

        return self.change(device, edit)

    # --- the file ---

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            status = self._path.stat()
            stamp = status.st_ino, status.st_mtime_ns
            if stamp == self._stamp:
                return
            raw = self._path.read_bytes()
        except OSError:
            return
        self._stamp = stamp
        try:
            notes = msgspec.json.decode(raw, type=Notes)
        except msgspec.DecodeError as error:
            raise BackendError(
                f"{self._path} is damaged: {error}", cure="move it away; shares must be bound again"
            ) from error
        if notes.boot != self._boot:
            for entry in notes.devices.values():
                entry.shares, entry.looks = [], ""
                entry.memory_requested = entry.requested_epoch = ""
                entry.cuts += 1
            notes.boot = self._boot
        self._notes = notes

    def _save(self) -> None:
        if self._path is None:
            return
        part = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            part.write_bytes(msgspec.json.encode(self._notes))
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = None
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                handle = os.open(self._path.with_suffix(".lock"), flags, 0o600)
                fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)
