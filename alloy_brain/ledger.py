"""The ledger: who has what, on disk, before any node hears of it. SQLite, or PostgreSQL by URL.

One row of `held` for each piece that ever was lent: its generation only grows, its holder is set
by compare-and-set, all pieces of a gang in one transaction. `until_s` bounds a reservation that
nobody finished; it counts on the boot clock of the brain's host and means nothing on another boot,
where the nodes' own books decide.

Rules that stay true in here:

* A piece has one holder. An older generation than the highest seen is refused.
* A brain whose term is not the newest in the ledger changes nothing.
* Events are acknowledged after they are committed here, not before.

A power cut may take the last moments of an SQLite ledger (`synchronous=NORMAL`); nodes keep their
own books durably, and what they hold is taken over when they attach.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from alloy_agent.model import Value

POSTGRES: Final = ("postgresql://", "postgres://")
KEPT_DECISIONS: Final = 10_000
KEPT_EVENTS: Final = 10_000  # of one node
SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, number BIGINT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS held (
        node TEXT NOT NULL, partition_id TEXT NOT NULL, generation BIGINT NOT NULL,
        lease TEXT, until_s DOUBLE PRECISION, boot TEXT NOT NULL,
        PRIMARY KEY (node, partition_id))""",
    "CREATE INDEX IF NOT EXISTS held_by ON held (lease)",
    """CREATE TABLE IF NOT EXISTS leases (
        lease TEXT PRIMARY KEY, request TEXT NOT NULL, state TEXT NOT NULL,
        ended_wall_s DOUBLE PRECISION, body {blob} NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS lease_state ON leases (state)",
    """CREATE TABLE IF NOT EXISTS decisions (
        number {serial}, id TEXT NOT NULL UNIQUE, request TEXT NOT NULL, lease TEXT NOT NULL,
        placed INTEGER NOT NULL, body {blob} NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS decided_request ON decisions (request)",
    "CREATE INDEX IF NOT EXISTS decided_lease ON decisions (lease)",
    """CREATE TABLE IF NOT EXISTS events (
        node TEXT NOT NULL, epoch TEXT NOT NULL, sequence BIGINT NOT NULL,
        kind TEXT NOT NULL, body {blob} NOT NULL, PRIMARY KEY (node, epoch, sequence))""",
    """CREATE TABLE IF NOT EXISTS heads (
        node TEXT NOT NULL, epoch TEXT NOT NULL, sequence BIGINT NOT NULL,
        PRIMARY KEY (node, epoch))""",
)
RESERVE: Final = """
    INSERT INTO held (node, partition_id, generation, lease, until_s, boot)
    VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (node, partition_id) DO UPDATE SET
        generation = excluded.generation, lease = excluded.lease,
        until_s = excluded.until_s, boot = excluded.boot
    WHERE held.generation <= excluded.generation AND (
        held.lease IS NULL OR held.lease = excluded.lease
        OR (held.boot = excluded.boot AND held.until_s < ?))"""


class LedgerError(Exception):
    """The ledger cannot be opened or written; the message names it, the cause and the cure."""


class StaleTermError(LedgerError):
    """A later brain has taken this ledger over."""


class Grant(Value, frozen=True, kw_only=True):
    """One piece of a lease, with the token that its node gave (0: not granted yet)."""

    node: str
    device: str
    partition: str
    generation: int
    tier: int = 0
    token: int = 0


class LeaseRow(Value, frozen=True, kw_only=True):
    """One lease as the brain knows it: "reserved", "committed", "releasing" or "released"."""

    lease: str
    request: str
    digest: str
    tenant: str
    state: str
    decision: str
    grants: tuple[Grant, ...]
    made_wall_s: float
    lease_ttl_ms: int = 0


class Taken(Value, frozen=True, kw_only=True):
    """Why a reservation was not made: the piece, and who has it at which generation."""

    node: str
    partition: str
    generation: int
    lease: str


class Event(Value, frozen=True, kw_only=True):
    """One event of a node's outbox, as it came."""

    node: str
    epoch: int
    sequence: int
    kind: str
    body: bytes


class Ledger:
    """The books of one brain. Calls may come from any thread, one at a time goes through.

    Args:
        url: A path of an SQLite file, ":memory:", or a PostgreSQL URL.
        boot: The boot id of this host, which `until_s` counts within.

    Raises:
        LedgerError: It cannot be opened.
    """

    def __init__(self, url: str, boot: str) -> None:
        self.url = url
        self.term = 0
        self._boot = boot
        self._mutex = threading.RLock()
        self._postgres = url.startswith(POSTGRES)
        self._decided = 0
        self._since_pruned: dict[tuple[str, int], int] = {}
        try:
            self._connection: Any = _postgres(url) if self._postgres else _sqlite(url)
            self._create()
        except LedgerError:
            raise
        except Exception as exc:
            raise LedgerError(
                f"ledger {_shown(url)}: {_cause(exc)}: check the path or URL"
            ) from exc

    def close(self) -> None:
        """Close it."""
        with self._mutex:
            self._connection.close()

    def begin_term(self, at_least: int = 1) -> int:
        """Return a term of office higher than any this ledger has seen, durably taken."""
        with self._transaction():
            self._run("INSERT INTO meta VALUES ('term', 0) ON CONFLICT (name) DO NOTHING")
            self._run("UPDATE meta SET number = number + 1 WHERE name = 'term'")  # locks the row
            row = self._run("SELECT number FROM meta WHERE name = 'term'").fetchone()
            self.term = max(int(row[0]), at_least)
            self._run("UPDATE meta SET number = ? WHERE name = 'term'", self.term)
        return self.term

    # --- leases -----------------------------------------------------------------------------------

    def reserve(
        self, lease: LeaseRow, until_s: float, now_s: float, decided: bytes = b""
    ) -> Taken | None:
        """Take all pieces of a lease or none; return the piece that stood in the way.

        Args:
            lease: What to write, in state "reserved".
            until_s: When the pieces come free by themselves, on the boot clock.
            now_s: The boot clock.
            decided: The decision that led to it, kept in the same transaction: whoever is told of
                the lease can have it explained, whatever happens to this process.

        Raises:
            StaleTermError: A later brain has the ledger.
        """
        grants = sorted(lease.grants, key=lambda g: (g.node, g.partition))
        try:
            with self._transaction():
                self._check_term()
                for grant in grants:
                    self._take(grant, lease.lease, until_s, now_s)
                self._put(lease)
                if decided:
                    self._note(lease.decision, lease.request, lease.lease, decided, placed=True)
        except _TakenError as exc:
            return exc.taken
        return None

    def _take(self, grant: Grant, lease: str, until_s: float | None, now_s: float) -> None:
        row = (grant.node, grant.partition, grant.generation, lease, until_s, self._boot, now_s)
        if self._run(RESERVE, *row).rowcount != 1:
            found = self._run(
                "SELECT generation, lease FROM held WHERE node = ? AND partition_id = ?",
                grant.node,
                grant.partition,
            ).fetchone()
            raise _TakenError(
                Taken(
                    node=grant.node,
                    partition=grant.partition,
                    generation=int(found[0]),
                    lease=found[1] or "",
                )
            )

    def save(self, lease: LeaseRow) -> None:
        """Write a lease that moved on; its pieces stay held, without an end of their own."""
        with self._transaction():
            self._check_term()
            self._put(lease)
            self._run("UPDATE held SET until_s = NULL WHERE lease = ?", lease.lease)

    def adopt(self, lease: LeaseRow, now_s: float) -> Taken | None:
        """Write a lease that nodes hold and this ledger does not know."""
        try:
            with self._transaction():
                self._check_term()
                for grant in sorted(lease.grants, key=lambda g: (g.node, g.partition)):
                    self._take(grant, lease.lease, None, now_s)
                self._put(lease)
        except _TakenError as exc:
            return exc.taken
        return None

    def release(self, lease: LeaseRow, wall_s: float) -> None:
        """Let go of all pieces of a lease; it is remembered as released."""
        with self._transaction():
            self._check_term()
            over = msgspec.structs.replace(lease, state="released")
            self._put(over, wall_s)
            self._run("UPDATE held SET lease = NULL, until_s = NULL WHERE lease = ?", lease.lease)

    def leases(self) -> list[LeaseRow]:
        """Return all leases that are not released."""
        rows = self._read("SELECT body FROM leases WHERE state <> 'released'")
        return [_lease(row[0]) for row in rows]

    def lease(self, lease: str) -> LeaseRow | None:
        """Return a lease, released ones included."""
        rows = self._read("SELECT body FROM leases WHERE lease = ?", lease)
        return _lease(rows[0][0]) if rows else None

    def holders(self) -> list[tuple[str, str, int, str]]:
        """Return (node, partition, generation, lease) of all pieces that are held."""
        rows = self._read(
            "SELECT node, partition_id, generation, lease FROM held WHERE lease IS NOT NULL"
        )
        return [(str(a), str(b), int(c), str(d)) for a, b, c, d in rows]

    def _put(self, lease: LeaseRow, ended_wall_s: float | None = None) -> None:
        self._run(
            """INSERT INTO leases (lease, request, state, ended_wall_s, body)
               VALUES (?, ?, ?, ?, ?) ON CONFLICT (lease) DO UPDATE SET
               state = excluded.state, ended_wall_s = excluded.ended_wall_s,
               body = excluded.body""",
            lease.lease,
            lease.request,
            lease.state,
            ended_wall_s,
            msgspec.msgpack.encode(lease),
        )

    # --- decisions --------------------------------------------------------------------------------

    def record(self, id_: str, request: str, lease: str, *, placed: bool, body: bytes) -> None:
        """Keep a decision, in place of what was kept of it before; of too many the oldest go."""
        with self._transaction():
            self._note(id_, request, lease, body, placed=placed)
            self._decided += 1
            if self._decided % 256 == 0:
                self._run(
                    "DELETE FROM decisions WHERE number <= (SELECT MAX(number) FROM decisions) - ?",
                    KEPT_DECISIONS,
                )

    def _note(self, id_: str, request: str, lease: str, body: bytes, *, placed: bool) -> None:
        self._run(
            """INSERT INTO decisions (id, request, lease, placed, body)
               VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
               lease = excluded.lease, placed = excluded.placed, body = excluded.body""",
            id_,
            request,
            lease,
            int(placed),
            body,
        )

    def decision(self, *, id_: str = "", lease: str = "", request: str = "") -> bytes | None:
        """Return the newest decision of an id, a lease or a request."""
        for column, value in (("id", id_), ("lease", lease), ("request", request)):
            if value:
                rows = self._read(
                    f"SELECT body FROM decisions WHERE {column} = ? ORDER BY number DESC LIMIT 1",  # noqa: S608 - a constant
                    value,
                )
                return bytes(rows[0][0]) if rows else None
        return None

    # --- events -----------------------------------------------------------------------------------

    def head(self, node: str, epoch: int) -> int:
        """Return the highest event sequence of a node's outbox that is on disk."""
        rows = self._read(
            "SELECT sequence FROM heads WHERE node = ? AND epoch = ?", node, f"{epoch:016x}"
        )
        return int(rows[0][0]) if rows else 0

    def keep(self, events: Sequence[Event]) -> None:
        """Write events; ones that are there already change nothing."""
        heads: dict[tuple[str, int], int] = {}
        with self._transaction():
            for event in events:
                self._run(
                    """INSERT INTO events (node, epoch, sequence, kind, body)
                       VALUES (?, ?, ?, ?, ?) ON CONFLICT (node, epoch, sequence) DO NOTHING""",
                    event.node,
                    f"{event.epoch:016x}",
                    event.sequence,
                    event.kind,
                    event.body,
                )
                key = (event.node, event.epoch)
                heads[key] = max(heads.get(key, 0), event.sequence)
            for (node, epoch), sequence in heads.items():
                self._head(node, epoch, sequence)

    def _head(self, node: str, epoch: int, sequence: int) -> None:
        self._run(
            """INSERT INTO heads (node, epoch, sequence) VALUES (?, ?, ?)
               ON CONFLICT (node, epoch) DO UPDATE SET sequence = excluded.sequence
               WHERE heads.sequence < excluded.sequence""",
            node,
            f"{epoch:016x}",
            sequence,
        )
        pruned = self._since_pruned.setdefault((node, epoch), sequence)
        if sequence - pruned > KEPT_EVENTS // 4:
            self._since_pruned[node, epoch] = sequence
            self._run(
                "DELETE FROM events WHERE node = ? AND epoch = ? AND sequence <= ?",
                node,
                f"{epoch:016x}",
                sequence - KEPT_EVENTS,
            )

    def events(self, node: str, kinds: Iterable[str] = ()) -> list[Event]:
        """Return the events of a node that are kept, oldest first."""
        wanted = frozenset(kinds)
        rows = self._read(
            "SELECT epoch, sequence, kind, body FROM events WHERE node = ?"
            " ORDER BY epoch, sequence",
            node,
        )
        return [
            Event(node=node, epoch=int(e, 16), sequence=int(s), kind=k, body=bytes(b))
            for e, s, k, b in rows
            if not wanted or k in wanted
        ]

    # --- the engine -------------------------------------------------------------------------------

    def _create(self) -> None:
        blob, serial = (
            ("BYTEA", "BIGSERIAL PRIMARY KEY")
            if self._postgres
            else (
                "BLOB",
                "INTEGER PRIMARY KEY AUTOINCREMENT",
            )
        )
        with self._transaction():
            if self._postgres:
                self._run("SELECT pg_advisory_xact_lock(717273)")  # two brains that start at once
            for statement in SCHEMA:
                self._run(statement.format(blob=blob, serial=serial))

    def _check_term(self) -> None:
        row = self._run("SELECT number FROM meta WHERE name = 'term'").fetchone()
        newest = int(row[0]) if row else 0
        if newest != self.term:
            raise StaleTermError(
                f"ledger {_shown(self.url)}: term {newest} is in office, not {self.term}: "
                "stop this brain"
            )

    def _run(self, statement: str, *values: Any) -> Any:
        if self._postgres:
            return self._connection.execute(statement.replace("?", "%s"), values or None)
        return self._connection.execute(statement, values)

    def _read(self, statement: str, *values: Any) -> list[Any]:
        with self._mutex:
            try:
                return list(self._run(statement, *values).fetchall())
            except Exception as exc:
                raise self._failure(exc) from exc

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Do all of it or nothing; a failure of the engine is a `LedgerError`."""
        with self._mutex:
            try:
                self._run("BEGIN" if self._postgres else "BEGIN IMMEDIATE")
                yield
                self._run("COMMIT")
            except BaseException as exc:
                self._roll_back()
                if isinstance(exc, (LedgerError, _TakenError)) or not isinstance(exc, Exception):
                    raise
                raise self._failure(exc) from exc

    def _roll_back(self) -> None:
        try:
            self._run("ROLLBACK")
        except Exception:  # noqa: BLE001 - the first failure is the one to tell
            if self._postgres:
                self._reconnect()

    def _reconnect(self) -> None:
        """Dial the server anew, which may have been restarted."""
        try:
            self._connection.close()
            self._connection = _postgres(self.url)
        except Exception:  # noqa: BLE001, S110 - the next call says so
            pass

    def _failure(self, exc: Exception) -> LedgerError:
        return LedgerError(
            f"ledger {_shown(self.url)}: {_cause(exc)}: check its disk, or the server's log"
        )


class _TakenError(Exception):
    """Ends a transaction because of a piece that somebody has."""

    def __init__(self, taken: Taken) -> None:
        super().__init__(taken.partition)
        self.taken = taken


def _lease(body: Any) -> LeaseRow:
    return msgspec.msgpack.decode(bytes(body), type=LeaseRow)


def _sqlite(url: str) -> sqlite3.Connection:
    if url != ":memory:":
        Path(url).parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(url, isolation_level=None, check_same_thread=False, timeout=10.0)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _postgres(url: str) -> Any:
    try:
        import psycopg
    except ImportError as exc:
        raise LedgerError(
            f"ledger {_shown(url)}: psycopg is not installed: install alloy-agent[postgres]"
        ) from exc
    return psycopg.connect(url, autocommit=True)


def _shown(url: str) -> str:
    """Return a URL without its password."""
    if not url.startswith(POSTGRES):
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _cause(exc: Exception) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__
