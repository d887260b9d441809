"""The record of grants: which runs of cores were given, kept over a death of the agent.

One JSON file below the state directory, replaced whole and synced before a grant counts. Changes
of several processes are serialised by a lock file; each reads the file again under the lock.

Rules that stay true in here:

* A grant's serial number is never given twice, over restarts and reboots too.
* Grants of an earlier boot are void: their holders died with it. The logical core configuration
  stays.
* A file that is damaged is never written over; it is named, with what is wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.errors import BackendError, NotPermittedError
from alloy_agent.model import Share

VERSION: Final = 1
NAME: Final = "neuron.json"


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A run of logical cores that was given, under the configuration of that moment."""

    serial: int
    share: Share = Share.EXCLUSIVE
    profile: str
    start: int
    size: int
    ordinal: int = 0
    lnc: int = 1
    memory_bytes: int | None = None
    group: tuple[str, ...] = ()  # devices that one tenant was meant to get together, in order

    @property
    def incarnation(self) -> str:
        """What tells this grant from one before it in the same place."""
        return f"grant-{self.serial}"


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded of one device."""

    grants: tuple[Grant, ...] = ()
    lnc: int | None = None  # None: the node's default


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The whole record."""

    version: int = VERSION
    boot_id: str = ""
    serial: int = 0
    devices: dict[str, DeviceRecord] = {}

    def of(self, device: str) -> DeviceRecord:
        """Return what is recorded of a device."""
        return self.devices.get(device, DeviceRecord())


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    record: msgspec.Raw


Stamp = tuple[int, int, int]


class Record:
    """The record in a directory, or of this process alone. Thread-safe."""

    def __init__(self, state_dir: str | None, boot_id: str) -> None:
        self._path = None if state_dir is None else Path(state_dir) / NAME
        self._boot_id = boot_id
        self._lock = threading.RLock()
        self._stamp: Stamp | None = None
        self._contents = Contents(boot_id=boot_id)

    @property
    def path(self) -> str:
        """Where the record is; "" when it is kept nowhere."""
        return "" if self._path is None else str(self._path)

    def stamp(self) -> Stamp | None:
        """Return what differs after every change; None: nothing was recorded yet."""
        if self._path is None:
            return (0, 0, self._contents.serial)
        try:
            info = os.stat(self.path)  # noqa: PTH116 - once per sample
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._unusable(exc) from exc
        return info.st_ino, info.st_mtime_ns, info.st_size

    def read(self) -> Contents:
        """Return the record as it is now, without grants of an earlier boot.

        Raises:
            BackendError: The file cannot be read, or is damaged.
        """
        with self._lock:
            stamp = self.stamp()
            if self._path is None or stamp == self._stamp:
                return self._contents
            self._contents = Contents(boot_id=self._boot_id) if stamp is None else self._load()
            self._stamp = stamp
            return self._contents

    def change(self, device: str, update: Callable[[DeviceRecord, int], DeviceRecord]) -> None:
        """Change what is recorded of one device; durable when this returns.

        Args:
            device: Which.
            update: Gets what is recorded and the next serial number, returns what shall be.

        Raises:
            BackendError: The record cannot be changed; or as `update` raises.
        """
        with self._lock, self._exclusive():
            before = self.read()
            after = update(before.of(device), before.serial + 1)
            if after == before.of(device):
                return
            contents = msgspec.structs.replace(
                before, serial=before.serial + 1, devices={**before.devices, device: after}
            )
            if self._path is not None:
                self._write(contents)
            self._contents = contents

    def _load(self) -> Contents:
        try:
            sealed = msgspec.json.decode(Path(self.path).read_bytes(), type=_Sealed)
            if hashlib.sha256(bytes(sealed.record)).hexdigest() != sealed.sha256:
                raise self._damaged("its checksum does not match")
            contents = msgspec.json.decode(sealed.record, type=Contents)
        except (msgspec.MsgspecError, UnicodeError) as exc:
            raise self._damaged(str(exc)) from exc
        except OSError as exc:
            raise self._unusable(exc) from exc
        if contents.version != VERSION:
            raise self._damaged(f"it has version {contents.version}, this agent knows {VERSION}")
        if contents.boot_id == self._boot_id:
            return contents
        kept = {
            name: DeviceRecord(lnc=entry.lnc)
            for name, entry in contents.devices.items()
            if entry.lnc is not None
        }
        return msgspec.structs.replace(contents, boot_id=self._boot_id, devices=kept)

    def _write(self, contents: Contents) -> None:
        """Replace the file: write aside, sync, rename, sync the directory."""
        body = msgspec.json.encode(contents)
        sealed = _Sealed(sha256=hashlib.sha256(body).hexdigest(), record=msgspec.Raw(body))
        target = Path(self.path)
        aside = target.with_name(f".{NAME}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                file.write(msgspec.json.encode(sealed))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
            directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as exc:
            raise self._unusable(exc) from exc
        self._stamp = self.stamp()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._path is None:
            yield
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path.with_suffix(".lock"), flags, 0o600)
        except OSError as exc:
            raise self._unusable(exc) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _unusable(self, exc: OSError) -> BackendError:
        if isinstance(exc, PermissionError):
            return NotPermittedError(
                f"{self.path}: no permission", cure="run as root, or choose another state directory"
            )
        return BackendError(
            f"{self.path}: the record of Neuron grants cannot be kept ({exc.strerror})",
            cure="choose a writable state directory with room",
        )

    def _damaged(self, cause: str) -> BackendError:
        return BackendError(
            f"{self.path}: the record of Neuron grants is damaged ({cause})",
            cure="move it aside; cores that are still held are not granted again",
        )
