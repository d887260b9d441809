"""Events for the brain, kept until it has acknowledged them.

Sequences only grow within one state file and are never used twice; a file that was lost starts a
new epoch, so (node, epoch, sequence) names an event for good. The outbox is bounded: when it is
full the oldest event that may go goes, and is counted.
"""

from __future__ import annotations

import time

from alloy_agent.store.marked import MarkedDatabase
from alloy_agent.store.records import OutboxRow, OutboxState

MAX_ROWS = 20_000
MAX_BYTES = 8 * 1024 * 1024


class OutboxTable(MarkedDatabase):
    """At-least-once delivery in order, from disk."""

    def outbox_add(  # noqa: PLR0913
        self,
        node: str,
        kind: str,
        payload: bytes,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        keep: frozenset[str] = frozenset(),
    ) -> OutboxRow:
        """Keep one event and return it with its epoch and sequence.

        Kinds in `keep` are never dropped to make room, not even beyond the bounds.
        """
        with self._write() as con:
            (last,) = con.execute("SELECT coalesce(max(sequence), 0) FROM outbox").fetchone()
            sequence = max(int(last), self.outbox_acknowledged()) + 1
            epoch, now = self.epoch(), time.time()
            self._make_room(len(payload), max_rows, max_bytes, keep)
            self._put(con, "outbox", sequence, node, epoch, kind, payload, now)
        return OutboxRow(
            node=node, epoch=epoch, sequence=sequence, kind=kind, payload=payload, time_wall_s=now
        )

    def _make_room(self, size: int, max_rows: int, max_bytes: int, keep: frozenset[str]) -> None:
        state = self.outbox_state()
        rows, size_bytes = state.rows, state.size_bytes
        if rows < max_rows and size_bytes + size <= max_bytes:
            return
        dropped: list[tuple[int]] = []
        with self._write() as con:
            for sequence, length, kind in con.execute(
                "SELECT sequence, length(payload), kind FROM outbox ORDER BY sequence"
            ):
                if rows < max_rows and size_bytes + size <= max_bytes:
                    break
                if kind not in keep:
                    rows, size_bytes = rows - 1, size_bytes - int(length)
                    dropped.append((int(sequence),))
            if not dropped:
                return
            con.executemany("DELETE FROM outbox WHERE sequence = ?", dropped)
            (first,) = con.execute("SELECT min(sequence) FROM outbox").fetchone()
            through = dropped[-1][0] if first is None else int(first) - 1
            self.set_meta("outbox_dropped", str(state.dropped + len(dropped)))
            self.set_meta("outbox_floor", str(max(through, int(self.meta("outbox_floor") or 0))))

    def outbox_pending(self, after: int = 0, limit: int = 256) -> tuple[OutboxRow, ...]:
        """Return unacknowledged events behind sequence `after`, oldest first."""
        rows = self._rows("outbox", "WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, limit))
        return tuple(
            OutboxRow(
                sequence=int(sequence),
                node=node,
                epoch=int(epoch),
                kind=kind,
                payload=payload,
                time_wall_s=time_wall_s,
            )
            for sequence, node, epoch, kind, payload, time_wall_s in rows
        )

    def outbox_acknowledge(self, through: int) -> int:
        """Forget all events up to and with sequence `through`; return how many there were."""
        with self._write() as con:
            (last,) = con.execute("SELECT coalesce(max(sequence), 0) FROM outbox").fetchone()
            done = max(min(through, int(last)), self.outbox_acknowledged())
            count = con.execute("DELETE FROM outbox WHERE sequence <= ?", (done,)).rowcount
            self.set_meta("outbox_acknowledged", str(done))
        return count

    def outbox_acknowledged(self) -> int:
        """Return the highest sequence that the brain acknowledged or that had to be dropped."""
        return max(int(self.meta("outbox_acknowledged") or 0), int(self.meta("outbox_floor") or 0))

    def outbox_state(self) -> OutboxState:
        """Return how full the outbox is."""
        with self._translated(), self._reader() as con:
            rows, size = con.execute(
                "SELECT count(*), coalesce(sum(length(payload)), 0) FROM outbox"
            ).fetchone()
        return OutboxState(
            rows=int(rows),
            size_bytes=int(size),
            acknowledged=int(self.meta("outbox_acknowledged") or 0),
            dropped=int(self.meta("outbox_dropped") or 0),
        )
