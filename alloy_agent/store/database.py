"""One SQLite file, opened so that it can be trusted, written by one connection.

What protects what:

* A crash or power cut in the middle of a write: SQLite's write-ahead log. Its frames carry
  checksums, and with `synchronous=FULL` a commit returns once the log is on the disk. Losing
  transactions (`durable=False`: verdicts, telemetry counts) are ordered after the durable ones
  before them, never instead of them.
* Damage to a page at rest: `quick_check` at open finds broken structure; the `seal` of each row
  finds changed content, which SQLite itself would hand out as it is.
* A second writer: the `flock` of the state directory (`files.DirectoryLock`), not SQLite's locks,
  which only guard single transactions.
* Loss of the file: `marks.json` (see `files`), so that tokens, generations and epochs still only
  grow.
* A log cut short by a flipped bit looks like a shorter log. After an unclean stop the numbers that
  fence others are therefore raised to their marks, past whatever the lost tail had given out.

A read-only store is a private copy in memory of one consistent moment: it cannot write by
construction, works beside a running daemon and on a read-only disk, and reads older schema versions
by migrating the copy.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from alloy_agent.errors import StoreError
from alloy_agent.store import files, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Row = tuple[Any, ...]
T = TypeVar("T")
BUSY_TIMEOUT_S = 5.0
READERS_KEPT = 4


def connect(uri: str) -> sqlite3.Connection:
    """Return a connection that leaves transactions to the caller and distrusts the file."""
    con = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S
    )
    con.execute("PRAGMA trusted_schema = OFF")
    con.execute("PRAGMA cell_size_check = ON")
    return con


class Database:
    """Sealed rows in one file: `_write` for transactions, `_rows` for reading, on any thread."""

    def __init__(
        self,
        path: Path,
        writer: sqlite3.Connection,
        *,
        lock: files.DirectoryLock | None,
        kept_aside: Path | None = None,
    ) -> None:
        """Take over an open, checked and migrated connection; use `Store.open`."""
        self.path = path
        self.read_only = lock is None
        self.kept_aside = kept_aside
        self._writer = writer
        self._lock = lock
        self._mutex = threading.RLock()
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        self._pool = threading.Lock()
        self._owner: int | None = None  # the thread inside of a transaction
        self._synchronous = ""
        self._then: list[Callable[[], None]] = []  # to be done once the transaction is on disk

    # --- writing ---

    @contextlib.contextmanager
    def _write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one transaction, on disk at its end if `durable`; nested use joins the outer one."""
        if self.read_only:
            raise StoreError(
                f"state {self.path}: opened for reading only", cure="stop the daemon first"
            )
        with self._mutex:
            if self._owner is not None:
                yield self._writer
                return
            self._owner = threading.get_ident()
            try:
                with self._translated():
                    self._begin(durable=durable)
                    try:
                        yield self._writer
                        self._commit()
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            if self._writer.in_transaction:
                                self._writer.execute("ROLLBACK")
                        self._then.clear()
                        raise
            finally:
                self._owner = None
            then, self._then = self._then, []
            for do in then:
                do()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Put all that is written inside on disk at once, or none of it.

        Raises:
            StoreError: The disk refuses; nothing of it is there.
        """
        with self._write():
            yield

    def on_commit(self, do: Callable[[], None]) -> None:
        """Do something once the transaction of this thread is on disk: now, if there is none."""
        if self._owner == threading.get_ident():
            self._then.append(do)
        else:
            do()

    def _begin(self, *, durable: bool) -> None:
        wanted = "FULL" if durable else "NORMAL"
        if self._closed:
            raise StoreError(f"state {self.path}: already closed")
        if self._synchronous != wanted:
            self._writer.execute(f"PRAGMA synchronous = {wanted}")
            self._synchronous = wanted
        self._writer.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._writer.execute("COMMIT")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except files.SQLITE_FAILURES as exc:
            raise files.sqlite_failure(exc, self.path) from exc

    def _put(self, con: sqlite3.Connection, table: str, *values: Any) -> None:
        """Insert or replace one row, sealed."""
        marks = ", ".join("?" * (len(values) + 1))
        con.execute(
            f"INSERT OR REPLACE INTO {table} VALUES ({marks})",  # noqa: S608 (names from schema.py)
            (*values, schema.seal(table, values)),
        )

    # --- reading ---

    def _rows(self, table: str, where: str = "", values: Row = ()) -> list[Row]:
        """Return the rows of a table without their seals.

        Raises:
            StoreCorruptError: A row is not as it was written.
        """
        query = f"SELECT * FROM {table} {where}"  # noqa: S608 (both from this package)
        with self._translated(), self._reader() as con:
            rows = con.execute(query, values).fetchall()
        for row in rows:
            if not schema.sealed(table, row):
                raise files.corrupt(self.path, f"a row of {table} is not as it was written")
        return [row[:-1] for row in rows]

    def _row(self, table: str, where: str, values: Row) -> Row | None:
        rows = self._rows(table, where, values)
        return rows[0] if rows else None

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection: inside of a transaction the writer's, so that it sees its work."""
        if self._closed:
            raise StoreError(f"state {self.path}: already closed")
        if self.read_only or self._owner == threading.get_ident():
            with self._mutex:
                yield self._writer
            return
        with self._pool:
            con = self._readers.pop() if self._readers else None
        if con is None:
            con = connect(self.path.as_uri() + "?mode=ro")
        try:
            yield con
        finally:
            with self._pool:
                keep = not self._closed and len(self._readers) < READERS_KEPT
                if keep:
                    self._readers.append(con)
            if not keep:
                con.close()

    def _decode(self, body: bytes, type_: type[T], what: str) -> T:
        try:
            return msgspec.json.decode(body, type=type_)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise files.corrupt(self.path, f"{what}: {exc}") from exc

    # --- small values ---

    def meta(self, key: str) -> str | None:
        """Return a small value by its key."""
        row = self._row("meta", "WHERE key = ?", (key,))
        return None if row is None else str(row[1])

    def set_meta(self, key: str, value: str, *, durable: bool = True) -> None:
        """Keep a small value under a key."""
        with self._write(durable=durable) as con:
            self._put(con, "meta", key, value)

    # --- the end ---

    def close(self) -> None:
        """Close the file and give the directory back. A second call does nothing."""
        with self._mutex, self._pool:
            if self._closed:
                return
            self._closed = True
            for con in (*self._readers, self._writer):
                with contextlib.suppress(sqlite3.Error):
                    con.close()
            if self._lock is not None:
                self._lock.release()
