"""Usage on disk: closed rows are appended, open accounts are checkpointed.

    usage/usage-2026-11.jsonl   one row a line, only ever appended
    usage/open.json             all open accounts, replaced as a whole

Rules that stay true in here:

* A row is on disk before the checkpoint forgets its account; a serial that has its row already is
  not written a second time, whenever the process dies.
* A line that was cut short by a crash is skipped and counted, and never joined to the next one.
* Durations come from the boot clock; wall time only labels a row and names its file.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from alloy_agent.errors import StoreError
from alloy_agent.model import Value
from alloy_agent.telemetry.metering import Account, UsageRow

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger(__name__)
FOLDER: Final = "usage"
OPEN: Final = "open.json"


class Checkpoint(Value, frozen=True, kw_only=True):
    """The open accounts at one moment."""

    boot_id: str = ""
    at_s: float = 0.0
    wall_s: float = 0.0
    next_serial: int = 1
    accounts: tuple[Account, ...] = ()


class Reading(NamedTuple):
    """What a journal holds: closed rows, open accounts as rows, and lines that are no rows."""

    rows: tuple[UsageRow, ...]
    open: tuple[Account, ...]
    broken: int


class UsageJournal:
    """The writing side, one for each state directory."""

    def __init__(self, state_dir: Path | str) -> None:
        """Open or make the folder.

        Raises:
            StoreError: It cannot be written.
        """
        self.folder = Path(state_dir) / FOLDER
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self.folder.glob("usage-*.jsonl"):
                _end_line(path)
        except OSError as exc:
            raise _failure(self.folder, exc) from exc

    def recover(self) -> Checkpoint:
        """Return the accounts that were open and have no row yet."""
        kept = _checkpoint(self.folder)
        written = {row.serial for row in rows(self.folder)}
        serial = max(written, default=0) + 1
        return msgspec.structs.replace(
            kept,
            next_serial=max(kept.next_serial, serial),
            accounts=tuple(a for a in kept.accounts if a.serial not in written),
        )

    def append(self, closed: tuple[UsageRow, ...]) -> None:
        """Write rows and have them on disk.

        Raises:
            StoreError: The disk refuses.
        """
        by_file: dict[Path, list[bytes]] = {}
        for row in closed:
            month = time.strftime("%Y-%m", time.gmtime(row.start_wall_s))
            path = self.folder / f"usage-{month}.jsonl"
            by_file.setdefault(path, []).append(msgspec.json.encode(row) + b"\n")
        for path, lines in by_file.items():
            try:
                with path.open("ab", buffering=0) as file:
                    file.write(b"".join(lines))
                    os.fsync(file.fileno())
            except OSError as exc:
                raise _failure(path, exc) from exc

    def checkpoint(self, kept: Checkpoint) -> None:
        """Replace the open accounts.

        Raises:
            StoreError: The disk refuses.
        """
        path = self.folder / OPEN
        scratch = path.with_suffix(".new")
        try:
            with scratch.open("wb") as file:
                file.write(msgspec.json.encode(kept))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError as exc:
            raise _failure(path, exc) from exc


def _end_line(path: Path) -> None:
    """End a line that a crash cut short, so that the next row stands on its own."""
    with path.open("rb+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _failure(path: Path, exc: OSError) -> StoreError:
    reason = (exc.strerror or str(exc)).lower()
    return StoreError(f"usage {path}: {reason}", cure="make room or make it writable")


def _checkpoint(folder: Path) -> Checkpoint:
    """Return the accounts that were open; of a damaged file none, and that is said."""
    path = folder / OPEN
    try:
        return msgspec.json.decode(path.read_bytes(), type=Checkpoint)
    except FileNotFoundError:
        return Checkpoint()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        LOG.warning("usage_damaged", extra={"path": str(path), "reason": str(exc)})
        return Checkpoint()


def rows(folder: Path, broken: list[str] | None = None) -> Iterator[UsageRow]:
    """Yield all closed rows, oldest file first; lines that are none are noted in `broken`."""
    decoder = msgspec.json.Decoder(UsageRow)
    for path in sorted(folder.glob("usage-*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    if broken is not None and line.strip():
                        broken.append(f"{path}:{number}")


def read(state_dir: Path | str) -> Reading:
    """Return all usage of a state directory, each serial once.

    Raises:
        StoreError: It cannot be read.
    """
    folder = Path(state_dir) / FOLDER
    broken: list[str] = []
    try:
        found = {row.serial: row for row in rows(folder, broken)}
    except OSError as exc:
        raise StoreError(
            f"usage {folder}: {(exc.strerror or str(exc)).lower()}", cure="run as root"
        ) from exc
    accounts = tuple(a for a in _checkpoint(folder).accounts if a.serial not in found)
    return Reading(tuple(found.values()), accounts, len(broken))
