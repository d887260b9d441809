"""Tables of the state file and the steps from one version of them to the next.

Rules that stay true in here:

* A released migration is never edited; a change is a new one at the end.
* Each migration is one transaction that also moves `user_version` and the sealed copy of it in
  `meta`.
* The last column of every table is `seal`, a CRC-32 over table name and all other columns in order.
  Columns are therefore only ever added by making the table anew and sealing its rows again.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID = 0x416C6C79  # "Ally"; read by file(1) and by us before anything else

_V1 = (
    """CREATE TABLE meta (
        key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE generations (
        partition TEXT PRIMARY KEY, incarnation TEXT NOT NULL, generation INTEGER NOT NULL,
        seal INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE geometry (
        device TEXT PRIMARY KEY, digest TEXT NOT NULL, counter INTEGER NOT NULL,
        seal INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE managed (
        partition TEXT PRIMARY KEY, incarnation TEXT NOT NULL, run INTEGER NOT NULL,
        seal INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE desired (
        one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB NOT NULL, seal INTEGER NOT NULL)""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, status TEXT NOT NULL, plan BLOB NOT NULL,
        previous BLOB, started_wall_s REAL NOT NULL, detail TEXT NOT NULL,
        seal INTEGER NOT NULL)""",
    """CREATE TABLE entries (
        run INTEGER NOT NULL, position INTEGER NOT NULL, body BLOB NOT NULL, seal INTEGER NOT NULL,
        PRIMARY KEY (run, position)) WITHOUT ROWID""",
    """CREATE TABLE bindings (
        partition TEXT NOT NULL, generation INTEGER NOT NULL, tenant TEXT NOT NULL,
        pid INTEGER NOT NULL, body BLOB NOT NULL, seal INTEGER NOT NULL,
        PRIMARY KEY (partition, generation, tenant, pid)) WITHOUT ROWID""",
    """CREATE TABLE verdicts (
        check_id TEXT NOT NULL, subject TEXT NOT NULL, body BLOB NOT NULL, seal INTEGER NOT NULL,
        PRIMARY KEY (check_id, subject)) WITHOUT ROWID""",
    """CREATE TABLE leases (
        id TEXT PRIMARY KEY, body BLOB NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE outbox (
        sequence INTEGER PRIMARY KEY, node TEXT NOT NULL, epoch INTEGER NOT NULL,
        kind TEXT NOT NULL, payload BLOB NOT NULL, time_wall_s REAL NOT NULL, seal INTEGER NOT
        NULL)""",
    """CREATE TABLE claims (
        uid TEXT PRIMARY KEY, body BLOB NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID""",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_V1,)  # MIGRATIONS[n] leads from version n to n + 1

TABLES = (
    "meta",
    "generations",
    "geometry",
    "managed",
    "desired",
    "runs",
    "entries",
    "bindings",
    "verdicts",
    "leases",
    "outbox",
    "claims",
)


def seal(table: str, values: tuple[Any, ...] | list[Any]) -> int:
    """Return the checksum of one row: SQLite guards its log with checksums, but not its pages."""
    return zlib.crc32(msgspec.msgpack.encode([table, *values]))


def sealed(table: str, row: tuple[Any, ...]) -> bool:
    """Return whether a row, read whole with its seal last, is as it was written."""
    try:
        return bool(row[-1] == seal(table, row[:-1]))
    except (TypeError, ValueError, OverflowError):  # damage that SQLite hands out as an odd type
        return False


def version_of(con: sqlite3.Connection) -> int:
    """Return the schema version of an open database; 0 for a fresh one."""
    (version,) = con.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(con: sqlite3.Connection, migrations: tuple[tuple[str, ...], ...] = MIGRATIONS) -> None:
    """Bring an open database to the newest version, one transaction for each step."""
    for number in range(version_of(con), len(migrations)):
        con.execute("BEGIN IMMEDIATE")
        for statement in migrations[number]:
            con.execute(statement)
        con.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        con.execute(f"PRAGMA user_version = {number + 1}")
        text = str(number + 1)
        con.execute(
            "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)",
            ("schema_version", text, seal("meta", ("schema_version", text))),
        )
        con.execute("COMMIT")
