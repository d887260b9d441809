"""From a state directory to an open, checked and migrated database, or to the reason why not."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.errors import StoreCorruptError, StoreError
from alloy_agent.store import files, schema
from alloy_agent.store.database import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

NAME = "state.db"
UNSCANNED = ("outbox",)  # checked as it is read; the only table that may be large

# Rows that only ever protect: they make the agent refuse, fence or recognise its own. What tells it
# to act (the desired layout, unfinished runs) is never taken out of a damaged file, since a good
# row may be an old one.
PROTECTIVE = ("generations", "managed", "leases", "bindings", "claims")

Salvage = dict[str, list[tuple[Any, ...]]]


def open_writer(path: Path) -> sqlite3.Connection:
    """Return the one writing connection to a whole and current database, made where it is missing.

    Raises:
        StoreCorruptError: What is there cannot be trusted.
        StoreError: It is of a newer version, of another program, or the disk refuses.
    """
    files.claim_file(path)
    con: sqlite3.Connection | None = None
    try:
        con = connect(path.as_uri())
        inspect(con, path)
        con.execute("BEGIN IMMEDIATE")
        # A header can forbid writing and look whole; only a write finds out.
        con.execute(f"PRAGMA user_version = {schema.version_of(con)}")
        con.execute("ROLLBACK")
        con.execute("PRAGMA journal_mode = WAL")
        con.execute("PRAGMA synchronous = FULL")
        con.execute("PRAGMA wal_autocheckpoint = 256")
        con.execute("PRAGMA journal_size_limit = 4194304")
        _keep_before_migration(con, path)
        schema.migrate(con)
        files.sync_directory(path.parent)
    except files.SQLITE_FAILURES as exc:
        _close(con)
        raise files.sqlite_failure(exc, path) from exc
    except (StoreError, OSError) as exc:
        _close(con)
        if isinstance(exc, OSError):
            raise files.os_failure(exc, path) from exc
        raise
    return con


def _close(con: sqlite3.Connection | None) -> None:
    if con is not None:
        with contextlib.suppress(sqlite3.Error):
            con.close()


# What SQLite says to our fixed statements only when the file holds another schema or odd values.
_NONSENSE = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOMEM,
)


def inspect(con: sqlite3.Connection, path: Path) -> None:
    """Raise unless the database is ours, whole, and of a version that this program knows."""
    try:
        _inspect(con, path)
    except files.SQLITE_FAILURES as exc:
        if getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _NONSENSE:
            raise files.corrupt(path, str(exc)) from exc
        raise


def _inspect(con: sqlite3.Connection, path: Path) -> None:
    (application,) = con.execute("PRAGMA application_id").fetchone()
    tables = {
        name for (name,) in con.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    version = schema.version_of(con)
    if not tables and version == 0 and application == 0:
        return
    if application != schema.APPLICATION_ID:
        if "meta" in tables and "generations" in tables:
            raise files.corrupt(path, "its header is not as it was written")
        raise StoreError(
            f"state {path}: it is the database of another program",
            cure="give --state-dir a directory of the agent's own",
        )
    _check_version(con, path, version)
    findings = [row[0] for row in con.execute("PRAGMA quick_check(1)")]
    if findings != ["ok"]:
        raise files.corrupt(path, str(findings[0]).replace("\n", " "))
    if version >= len(schema.MIGRATIONS) and _tables_of(con) != _expected_tables():
        raise files.corrupt(path, "its tables are not those of its version")
    _check_rows(con, path, tables)


def _tables_of(con: sqlite3.Connection) -> set[tuple[str, str]]:
    return set(con.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _expected_tables() -> set[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        schema.migrate(fresh)
        return _tables_of(fresh)


def _check_version(con: sqlite3.Connection, path: Path, version: int) -> None:
    known = len(schema.MIGRATIONS)
    row = con.execute("SELECT * FROM meta WHERE key = 'schema_version'").fetchone()
    if row is None or not schema.sealed("meta", row) or row[1] != str(version):
        raise files.corrupt(path, f"it claims version {version} without proof")
    if version > known:
        raise StoreError(
            f"state {path}: version {version} is newer than this agent's {known}",
            cure="run the agent that wrote it or a later one, or use another --state-dir",
        )


def _check_rows(con: sqlite3.Connection, path: Path, tables: set[str]) -> None:
    for table in schema.TABLES:
        if table in UNSCANNED or table not in tables:
            continue
        for row in con.execute(f"SELECT * FROM {table}"):  # noqa: S608 (names from schema.py)
            if not schema.sealed(table, row):
                raise files.corrupt(path, f"a row of {table} is not as it was written")


def _keep_before_migration(con: sqlite3.Connection, path: Path) -> None:
    """Keep a copy of an older database, so that going back to the older agent stays possible."""
    version = schema.version_of(con)
    copy = path.with_name(f"{path.name}.v{version}")
    if 0 < version < len(schema.MIGRATIONS) and not copy.exists():
        con.execute("VACUUM INTO ?", (str(copy),))
        copy.chmod(0o600)


# --- reading only ---


def open_copy(path: Path) -> sqlite3.Connection:
    """Return a copy in memory of the database at one moment; empty where there is none.

    Raises:
        StoreCorruptError, StoreError: As `open_writer`.
    """
    memory = connect("file::memory:")
    try:
        if path.exists():
            files.refuse_odd_file(path)
            with _source(path) as source:
                inspect(source, path)
                source.backup(memory)
        schema.migrate(memory)
    except files.SQLITE_FAILURES as exc:
        memory.close()
        raise files.sqlite_failure(exc, path) from exc
    except (StoreError, OSError) as exc:
        memory.close()
        if isinstance(exc, OSError):
            raise files.os_failure(exc, path) from exc
        raise
    return memory


@contextlib.contextmanager
def _source(path: Path) -> Iterator[sqlite3.Connection]:
    """Lend a reading connection, whatever the directory allows.

    SQLite reads a write-ahead log only where it can make or find the shared index beside it. On a
    read-only or a full disk after an unclean stop there is a log and no way to index it in place,
    so both are copied elsewhere first.
    """
    con = connect(path.as_uri() + "?mode=ro")
    try:
        try:
            con.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF not in _NO_INDEX:
                raise
            con.close()
            with path.open("rb"):  # a refusal here is the true reason
                pass
        else:
            yield con
            return
    finally:
        con.close()
    with _copied(path) as folder, contextlib.closing(connect((folder / NAME).as_uri())) as copy:
        yield copy


# What SQLite says where it may not, or cannot for lack of room, make the index of a log.
_NO_INDEX = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
)
_MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder in it, where every disk is full


@contextlib.contextmanager
def _copied(path: Path) -> Iterator[Path]:
    """Lend a folder with copies of a database and its log, in memory if the disks are full."""
    for place in (None, _MEMORY):
        with tempfile.TemporaryDirectory(prefix="alloy-state-", dir=place) as folder:
            try:
                for suffix in ("", "-wal"):
                    part = path.with_name(path.name + suffix)
                    if part.exists():
                        shutil.copyfile(part, Path(folder) / (NAME + suffix))
            except OSError as exc:
                if exc.errno != errno.ENOSPC or place is not None or not _MEMORY.is_dir():
                    raise
                continue
            yield Path(folder)
            return


# --- damage ---


def salvage(path: Path) -> Salvage:
    """Return the rows of a damaged database that are as they were written and can only protect."""
    found: Salvage = {table: [] for table in PROTECTIVE}
    try:
        with _copied(path) as folder, contextlib.closing(connect((folder / NAME).as_uri())) as con:
            for table in PROTECTIVE:
                with contextlib.suppress(*files.SQLITE_FAILURES):
                    # Row by row: a broken page ends the table, and what came before it counts.
                    for row in con.execute(f"SELECT * FROM {table}"):  # noqa: S608
                        if schema.sealed(table, row):
                            found[table].append(row)
    except (OSError, *files.SQLITE_FAILURES) as exc:
        log.warning("state_salvage_failed", extra={"path": str(path), "reason": str(exc)})
    return found


def rebuild(path: Path) -> tuple[sqlite3.Connection, Path]:
    """Keep the damaged database aside and return a new one, with where the old one is now."""
    rows = salvage(path)
    kept = files.keep_aside(path)
    con = open_writer(path)
    refill(con, rows)
    log.error(
        "state_rebuilt",
        extra={"path": str(path), "kept_aside": str(kept), "rows": sum(map(len, rows.values()))},
    )
    return con, kept


def refill(con: sqlite3.Connection, rows: Salvage) -> None:
    """Put salvaged rows into a new database."""
    con.execute("BEGIN IMMEDIATE")
    for table, found in rows.items():
        for row in found:
            marks = ", ".join("?" * len(row))
            con.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)  # noqa: S608
    con.execute("COMMIT")


__all__ = ["StoreCorruptError", "open_copy", "open_writer", "rebuild", "refill", "salvage"]
