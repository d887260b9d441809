"""What the agent remembers: one SQLite file in its state directory.

Start at `Store.open`. Tables stand in files of their own (`identity`, `journal`, `ledger`,
`outbox`) over one `Database`, whose docstring says what protects what; `files` holds the directory,
the lock and the marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from alloy_agent.errors import StoreCorruptError
from alloy_agent.store import files, opening, schema
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord, ClaimTable
from alloy_agent.store.database import connect
from alloy_agent.store.journal import JournalTables
from alloy_agent.store.ledger import LedgerTables
from alloy_agent.store.outbox import OutboxTable
from alloy_agent.store.records import (
    Before,
    Binding,
    Entry,
    EntryState,
    LastVerdict,
    OutboxRow,
    OutboxState,
    PieceRef,
    Run,
    RunStatus,
)


class Store(JournalTables, LedgerTables, OutboxTable, ClaimTable):
    """All that survives a restart. Safe to use from any thread."""

    @classmethod
    def open(cls, state_dir: Path | str, *, read_only: bool = False, rebuild: bool = False) -> Self:
        """Return the store of a state directory, made where it is missing.

        Args:
            state_dir: Closed to others when it is made or opened for writing.
            read_only: A copy of this moment: works beside a daemon, on a read-only disk, and where
                there is nothing.
            rebuild: Put a damaged file aside (`kept_aside` says where) and start from the rows that
                can only protect; every piece that they do not name is foreign, and foreign pieces
                are never destroyed.

        Raises:
            StoreCorruptError: The file cannot be trusted, and `rebuild` was not asked for.
            StoreError: Another agent has the directory, the file is of a newer version, or the disk
                refuses.
        """
        path = Path(state_dir).absolute() / opening.NAME
        return cls._open_reader(path, rebuild) if read_only else cls._open_writer(path, rebuild)

    @classmethod
    def _open_reader(cls, path: Path, rebuild: bool) -> Self:
        kept: Path | None = None
        try:
            con = opening.open_copy(path)
        except StoreCorruptError:
            if not rebuild:
                raise
            con, kept = connect("file::memory:"), path
            schema.migrate(con)
            opening.refill(con, opening.salvage(path))
        return cls(path, con, lock=None, kept_aside=kept)

    @classmethod
    def _open_writer(cls, path: Path, rebuild: bool) -> Self:
        files.prepare_directory(path.parent)
        lock = files.DirectoryLock(path.parent)
        kept: Path | None = None
        try:
            log = path.with_name(path.name + "-wal")
            unclean = log.exists() and log.stat().st_size > 0
            lost = not path.exists()  # a first start, or somebody removed it: the marks tell
            try:
                con = opening.open_writer(path)
            except StoreCorruptError:
                if not rebuild:
                    raise
                con, kept = opening.rebuild(path)
            store = cls(path, con, lock=lock, kept_aside=kept)
            lost = kept is not None or (lost and files.read_marks(path.parent) is not None)
            try:
                store._settle_marks(lost=lost, unclean=unclean)
            except BaseException:
                store.close()
                raise
        except files.SQLITE_FAILURES as exc:
            lock.release()
            raise files.sqlite_failure(exc, path) from exc
        except OSError as exc:
            lock.release()
            raise files.os_failure(exc, path) from exc
        except BaseException:
            lock.release()
            raise
        return store


__all__ = [
    "Before",
    "Binding",
    "ClaimPhase",
    "ClaimPiece",
    "ClaimRecord",
    "Entry",
    "EntryState",
    "LastVerdict",
    "OutboxRow",
    "OutboxState",
    "PieceRef",
    "Run",
    "RunStatus",
    "Store",
]
