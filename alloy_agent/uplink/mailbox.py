"""What waits to be sent: one slot for each kind of state, a bounded queue of replies, no more.

Rules that stay true in here:

* State and telemetry are newest-wins: a message that was never sent is replaced, and counted.
* A reply waits for its place; whoever makes it waits too. That is how a brain that does not read
  slows its own commands down.
* Replies, events and state take turns, so that none of them starves.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator

from alloy_agent.proto import agent_pb2 as pb

MAX_REPLIES = 256
EARLY_RATIO = 0.1  # of an interval: what comes as often as it may is not kept waiting for jitter
FIRST = {"echo_reply": 0, "inventory": 1, "partition_state": 2}


class Mailbox:
    """Between the threads that have something to say and the one stream that says it."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._changed = threading.Condition()
        self._replies: collections.deque[pb.AgentMessage] = collections.deque()
        self._slots: dict[str, pb.AgentMessage] = {}
        self._not_before_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}  # the pace of each kind, which no lateness shifts
        self._dropped: collections.Counter[str] = collections.Counter()
        self._turn = 0
        self._open = False
        self._woken = False

    @property
    def dropped(self) -> dict[str, int]:
        """Return how many messages of each kind were replaced before they were sent."""
        with self._changed:
            return dict(self._dropped)

    @property
    def telemetry_dropped(self) -> int:
        """Return how many samples were replaced before they were sent."""
        return self._dropped["fast"] + self._dropped["slow"]

    def offer(self, message: pb.AgentMessage, *, urgent: bool = False) -> None:
        """Put a message into the slot of its kind; `urgent` overrides the pace of the kind."""
        kind = str(message.WhichOneof("body"))
        if kind == "echo" and message.echo.reply:
            kind = "echo_reply"
        if kind == "rate_state":  # one slot for each shared device
            kind = f"rate_state {message.rate_state.device}"
        with self._changed:
            if kind in self._slots:
                self._dropped[kind] += 1
            self._slots[kind] = message
            if urgent:
                self._not_before_s.pop(kind, None)
                self._due_s.pop(kind, None)
            self._changed.notify_all()

    def reply(self, message: pb.AgentMessage) -> None:
        """Queue a reply; wait while the queue is full and a stream is there to empty it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._replies) < MAX_REPLIES or not self._open)
            if self._open:
                self._replies.append(message)
                self._changed.notify_all()

    def wake(self) -> None:
        """Say that an event is on disk."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def open(self) -> None:
        """Begin to take replies: a stream stands."""
        with self._changed:
            self._open = True

    def close(self) -> None:
        """Forget replies; the brain asks again. Everybody who waits goes on."""
        with self._changed:
            self._open = False
            self._replies.clear()
            self._changed.notify_all()

    def take(
        self, events: Iterator[pb.AgentMessage | None], intervals_s: dict[str, float]
    ) -> pb.AgentMessage | None:
        """Return what is next to be sent, or None when nothing is.

        Args:
            events: Yields the next event, or None when there is none to send now.
            intervals_s: Least time between two messages of a kind.
        """
        for _ in range(3):
            self._turn = (self._turn + 1) % 3
            if self._turn == 0:
                message = self._take_reply()
            elif self._turn == 1:
                message = next(events, None)
            else:
                message = self._take_slot(intervals_s)
            if message is not None:
                return message
        return None

    def _take_reply(self) -> pb.AgentMessage | None:
        with self._changed:
            if not self._replies:
                return None
            message = self._replies.popleft()
            self._changed.notify_all()
            return message

    def _take_slot(self, intervals_s: dict[str, float]) -> pb.AgentMessage | None:
        """Return the message of the first kind that is due: what rows mean before the rows."""
        now_s = self._now_s()
        with self._changed:
            for kind in sorted(self._slots, key=lambda kind: FIRST.get(kind, len(FIRST))):
                if self._not_before_s.get(kind, now_s) <= now_s:
                    self._pace(kind, now_s, intervals_s.get(kind, 0.0))
                    return self._slots.pop(kind)
        return None

    def _pace(self, kind: str, now_s: float, interval_s: float) -> None:
        """Note when the next message of a kind may go."""
        due_s = max(self._due_s.get(kind, now_s) + interval_s, now_s + interval_s / 2)
        self._due_s[kind] = due_s
        self._not_before_s[kind] = due_s - interval_s * EARLY_RATIO

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to take."""
        now_s = self._now_s()
        with self._changed:
            if self._woken or self._replies:
                self._woken = False
                return
            due_s = [self._not_before_s.get(kind, now_s) - now_s for kind in self._slots]
            if due_s and min(due_s) <= 0:
                return
            self._changed.wait(min([timeout_s, *due_s]))
            self._woken = False
