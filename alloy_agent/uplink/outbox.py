"""Events on their way to the brain: on disk until it has acknowledged them, in order.

An event is an `AgentMessage` whose body is a finding, a change of health or lease, an evidence
head, a usage record and the like. The store gives it a sequence that only grows; together with the
stream epoch, which changes only when the state file was lost or went back in time, it is told apart
from every other event for good.

Rules that stay true in here:

* Findings are never dropped. A full outbox drops usage and rates first, then at twice its bound
  everything else that is no finding; each drop is counted, and the first one is said.
* Only what was sent can be acknowledged.
* Memory holds one page of events, however many wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from alloy_agent.host.clock import boottime_s, wall_s
from alloy_agent.proto import agent_pb2 as pb

if TYPE_CHECKING:
    from alloy_agent.store import OutboxRow, OutboxState

LOG = logging.getLogger(__name__)

FINDING = frozenset({"finding"})
ESSENTIAL = FINDING | {"health", "lease_change", "evidence_head", "incompatibility"}
MAX_BYTES = 64 * 1024 * 1024
PAGE = 64
EPOCH_KEY = "uplink_stream_epoch"
BOOT_KEY = "uplink_boot"  # "<boot id> <first sequence of that boot>"


class OutboxStore(Protocol):
    """What the outbox asks of the store."""

    def transaction(self) -> AbstractContextManager[None]:
        """Put what is written inside on disk at once; nested in another, with that."""
        ...

    def on_commit(self, do: Callable[[], None]) -> None:
        """Do something once the present transaction is on disk."""
        ...

    def outbox_add(  # noqa: PLR0913 - as the store has it
        self,
        node: str,
        kind: str,
        payload: bytes,
        *,
        max_rows: int,
        max_bytes: int,
        keep: frozenset[str],
    ) -> OutboxRow:
        """Keep one event, durably."""
        ...

    def outbox_pending(self, after: int = 0, limit: int = 256) -> tuple[OutboxRow, ...]:
        """Return events behind a sequence."""
        ...

    def outbox_acknowledge(self, through: int) -> int:
        """Forget events up to a sequence."""
        ...

    def outbox_acknowledged(self) -> int:
        """Return the highest sequence that is done with."""
        ...

    def outbox_state(self) -> OutboxState:
        """Return how full it is."""
        ...

    def meta(self, key: str) -> str | None:
        """Return a small text."""
        ...

    def set_meta(self, key: str, value: str) -> None:
        """Keep a small text, durably."""
        ...


class Outbox:
    """Events of one node, for any thread.

    Args:
        store: Where they are kept.
        node: Name of the node.
        boot_id: Of this boot: an event of an earlier one has an age by wall clock only.
        max_rows: Events that may wait before any is dropped.
    """

    def __init__(self, store: OutboxStore, node: str, boot_id: str, max_rows: int) -> None:
        self._store = store
        self._node = node
        self._max_rows = max_rows
        self._mutex = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        state = store.outbox_state()
        self._waiting, self._dropped = state.rows, state.dropped
        self._full = False
        self._last = self._find_last()
        self._epoch = int(store.meta(EPOCH_KEY) or 0)
        if not self._epoch:
            self._epoch = self._new_epoch()
        self._boot_from = self._first_of_boot(boot_id)

    @property
    def epoch(self) -> int:
        """Return the stream epoch."""
        return self._epoch

    @property
    def last_sequence(self) -> int:
        """Return the highest sequence ever given in this epoch."""
        return self._last

    @property
    def acknowledged(self) -> int:
        """Return the highest sequence that is done with."""
        return self._store.outbox_acknowledged()

    @property
    def waiting(self) -> int:
        """Return how many events wait."""
        return self._waiting

    @property
    def dropped(self) -> int:
        """Return how many events were dropped because the outbox was full, ever."""
        return self._dropped

    @property
    def full(self) -> bool:
        """Return whether the outbox has reached its bound."""
        return self._full

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every event that is added."""
        self._wake = wake

    def add(self, event: pb.AgentMessage) -> int:
        """Keep one event, durably, and return its sequence.

        Inside of a transaction of the store it is on disk with the rest of that, or not at all, and
        is sent after.

        Raises:
            StoreError: The disk refused; the event is not kept.
        """
        kind = event.WhichOneof("body")
        if kind is None:
            raise ValueError("an event needs a body")
        event.sent_boottime_ms = round(boottime_s() * 1e3)
        # The store's own order comes first: whoever adds may be inside of a transaction already.
        with self._store.transaction(), self._mutex:
            keep = ESSENTIAL if self._waiting < 2 * self._max_rows else FINDING
            row = self._store.outbox_add(
                self._node,
                kind,
                event.SerializeToString(),
                max_rows=self._max_rows,
                max_bytes=MAX_BYTES,
                keep=keep,
            )
            self._store.on_commit(lambda: self._added(row.sequence))
        return row.sequence

    def _added(self, sequence: int) -> None:
        """Count an event that is on disk, and have it sent."""
        with self._mutex:
            self._last = max(self._last, sequence)
            self._waiting += 1
            if self._waiting > self._max_rows:
                self._note_full()
        self._wake()

    def _note_full(self) -> None:
        state = self._store.outbox_state()
        self._waiting, self._dropped = state.rows, state.dropped
        if not self._full:
            self._full = True
            LOG.warning(
                "outbox_full",
                extra={
                    "waiting": state.rows,
                    "bound": self._max_rows,
                    "dropped": state.dropped,
                    "cure": "bring the brain back or raise brain.outbox_records",
                },
            )

    def pending(self, after: int, limit: int = PAGE) -> list[pb.AgentMessage]:
        """Return events behind a sequence, oldest first, ready to be sent."""
        now_ms, wall = round(boottime_s() * 1e3), wall_s()
        messages = []
        for row in self._store.outbox_pending(after, limit):
            message = pb.AgentMessage.FromString(row.payload)
            if row.sequence >= self._boot_from:
                age_ms = now_ms - message.sent_boottime_ms
            else:
                age_ms = round((wall - row.time_wall_s) * 1e3)
            message.event_age_ms = max(0, age_ms)
            message.epoch, message.sequence = self._epoch, row.sequence
            messages.append(message)
        return messages

    def acknowledge(self, through: int) -> int:
        """Forget events up to a sequence; return how many there were."""
        with self._store.transaction(), self._mutex:
            count = self._store.outbox_acknowledge(through)
            self._waiting = max(0, self._waiting - count)
            if self._waiting < self._max_rows:
                self._full = False
        return count

    def resume(self, after: int) -> None:
        """Take the brain's word on what it has of this epoch when a stream begins.

        A brain that has more than was ever given here has seen the future of a state file that went
        back in time: sequences would be used twice, so a new epoch begins.
        """
        if after > self._last:
            LOG.warning("outbox_went_back", extra={"brain_has": after, "node_has": self._last})
            with self._store.transaction(), self._mutex:
                self._epoch = self._new_epoch()
        else:
            self.acknowledge(after)

    def notice(self, telemetry_dropped: int) -> pb.OutboxNotice:
        """Return how full the outbox is, for the brain."""
        state = self._store.outbox_state()
        text = ""
        if self._full:
            text = f"{state.rows} events wait, the bound is {self._max_rows}"
        return pb.OutboxNotice(
            events_waiting=state.rows,
            bytes_waiting=state.size_bytes,
            telemetry_dropped=telemetry_dropped,
            events_dropped=state.dropped,
            full=self._full,
            text=text,
        )

    def _new_epoch(self) -> int:
        """Return a stream epoch that no earlier one can be, after it is on disk."""
        epoch = max(self._epoch + 1, round(wall_s() * 1e6))
        self._store.set_meta(EPOCH_KEY, str(epoch))
        return epoch

    def _find_last(self) -> int:
        """Return the highest sequence that is on disk or was acknowledged."""
        last = self._store.outbox_acknowledged()
        while rows := self._store.outbox_pending(last, 256):
            last = rows[-1].sequence
        return last

    def _first_of_boot(self, boot_id: str) -> int:
        """Return the first sequence whose boot clock is this boot's."""
        known, _, first = (self._store.meta(BOOT_KEY) or "").partition(" ")
        if known == boot_id and first.isdigit():
            return int(first)
        self._store.set_meta(BOOT_KEY, f"{boot_id} {self._last + 1}")
        return self._last + 1
