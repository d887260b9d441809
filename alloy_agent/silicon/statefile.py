"""The file of a simulated machine: read whole, replaced whole, changed under a lock file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from alloy_agent.errors import ConfigError
from alloy_agent.silicon.boards import BOARDS
from alloy_agent.silicon.state import STATE_VERSION, MachineState

Stamp = tuple[int, int]  # inode and time of change: differs after every replacement


class StateFile:
    """One state file, shared by all processes that open it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path)

    def stamp(self) -> Stamp | None:
        """Return what tells two versions of the file apart; None: there is no file yet."""
        try:
            info = os.stat(self._name)  # noqa: PTH116 - once per sample; Path costs five times it
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        return info.st_ino, info.st_mtime_ns

    def read(self) -> tuple[MachineState, Stamp]:
        """Return the state and its stamp.

        Raises:
            ConfigError: The file cannot be read, is damaged, or of another version.
        """
        try:
            with self._path.open("rb") as file:
                info = os.fstat(file.fileno())
                content = file.read()
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            state = msgspec.json.decode(content, type=MachineState)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise self._damaged(str(error)) from error
        if not state.devices:
            raise self._damaged("it holds no devices")
        if state.version != STATE_VERSION:
            raise self._damaged(f"version {state.version}, this agent knows {STATE_VERSION}")
        unknown = next((d.board for d in state.devices if d.board not in BOARDS), None)
        if unknown is not None:
            raise self._damaged(f"unknown board {unknown}")
        return state, (info.st_ino, info.st_mtime_ns)

    def write(self, state: MachineState) -> Stamp:
        """Replace the file; return its new stamp.

        Raises:
            ConfigError: The directory does not take it.
        """
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            info = temporary.stat()
            temporary.replace(self._path)
        except OSError as error:
            raise self._unwritable(error) from error
        return info.st_ino, info.st_mtime_ns

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the machine; makes the directory if needed."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path.with_suffix(".lock"), flags, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path}: simulated machine cannot be saved ({error.strerror})",
            cure="choose a writable --state-dir",
        )

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path}: simulated machine cannot be read ({error.strerror})",
            cure="run as the user who made it, or choose another --state-dir",
        )

    def _damaged(self, cause: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: not the state of a simulated machine ({cause})",
            cure="remove the file to start with new simulated devices",
        )
