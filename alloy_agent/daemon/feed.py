"""What happens on the node, as the messages of the wire, for everyone who watches.

State goes out when it changes and to each new watcher at once, events as they come, samples at the
pace that a watcher asks for. A watcher that does not keep up loses its oldest messages, which costs
nobody else anything.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from alloy_agent.daemon.keeping import geometry
from alloy_agent.host import clock

if TYPE_CHECKING:
    from alloy_agent.daemon.telemetry import HealthChange
    from alloy_agent.leases import Change
    from alloy_agent.model import (
        AuditResult,
        Finding,
        Lease,
        PartitionId,
        Snapshot,
    )
    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.telemetry.metering import UsageRow
    from alloy_agent.telemetry.window import Quantiles
    from alloy_agent.uplink.codec import Standing

MakeSample = Callable[["Snapshot", int, int], "pb.Fast"]  # of a shape's revision; its number
MAX_WAITING = 1024  # messages of one watcher
SAMPLE_PERIOD_S = 1.0  # where a watcher asks for no pace
LOOK_AT_STOP_S = 0.5


class Feed:
    """Turns what the loops see into messages.

    Args:
        leases: Returns the living leases.
    """

    def __init__(self, leases: Callable[[], Sequence[Lease]]) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._watchers: list[Waiting] = []
        self._snapshot: Snapshot | None = None
        self._audit: AuditResult | None = None
        self._revision = 0
        self._on_event: Callable[[pb.AgentMessage], object] | None = None
        self._on_state: Callable[[pb.AgentMessage], object] | None = None
        self._samples = itertools.count(1)
        self._make_sample: MakeSample | None = None
        self._draining: Callable[[], frozenset[str]] = frozenset
        self._rates: Callable[[], Iterable[pb.RateState]] = tuple

    # --- what the loops say ---

    def saw(self, snapshot: Snapshot) -> None:
        """Take a new snapshot; watchers are told where it differs."""
        before = self._snapshot
        self._snapshot = snapshot
        if before is None or geometry(before) != geometry(snapshot):
            self._revision += 1
            self._tell_state()

    def audited(self, result: AuditResult) -> None:
        """Take a new audit; watchers are told where a tier differs."""
        before = self._audit
        self._audit = result
        if before is None or _tiers(before) != _tiers(result):
            self._tell_state()

    def found(self, finding: Finding) -> None:
        """Tell of a verdict or tier that changed."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        evidence = self._evidence()
        message = codec.finding(finding, clock.boottime_s(), evidence)
        self._event(pb.AgentMessage(finding=message))

    def lease_changed(self, change: Change, command_id: str, now_s: float) -> None:
        """Tell of a lease that moved to another state."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        message = codec.lease_change(change, now_s, command_id)
        self._event(pb.AgentMessage(lease_change=message))

    def judge_by(self, sample: MakeSample, draining: Callable[[], frozenset[str]]) -> None:
        """Take samples, and what is drained, from these from now on."""
        self._make_sample, self._draining = sample, draining

    def gates_changed(self) -> None:
        """Tell at once that a gate is otherwise than before."""
        message = self.sample()
        if message is not None:
            if self._on_state is not None:
                self._on_state(message)
            self._tell(message)

    def drains_changed(self) -> None:
        """Tell at once what is drained and what is not."""
        self._revision += 1
        self._tell_state()

    def health_changed(self, change: HealthChange) -> None:
        """Tell of a device's health, or of one more event that was counted on it."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        message = codec.health_change(change, clock.boottime_s(), shadow=change.shadow)
        self._event(pb.AgentMessage(health=message))

    def used(self, row: UsageRow) -> None:
        """Tell of usage that was closed."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        self._event(pb.AgentMessage(usage=codec.usage(row)))

    def rates_of(self, rates: Callable[[], Iterable[pb.RateState]]) -> None:
        """Take how shared devices stand from here from now on."""
        self._rates = rates

    def rated(self, states: Iterable[pb.RateState]) -> None:
        """Tell how shared devices stand; only the newest of each counts."""
        from alloy_agent.proto import agent_pb2 as pb

        for state in states:
            message = pb.AgentMessage(rate_state=state)
            if self._on_state is not None:
                self._on_state(message)
            self._tell(message)

    def slow(self, quantiles: Iterable[tuple[str, str, Quantiles]]) -> pb.AgentMessage:
        """Return quantiles as one message."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        return pb.AgentMessage(slow=codec.slow(self._revision, quantiles))

    def forward(
        self,
        on_event: Callable[[pb.AgentMessage], object],
        on_state: Callable[[pb.AgentMessage], object],
    ) -> None:
        """Have events (each of them) and state (the newest) go to a brain too."""
        self._on_event, self._on_state = on_event, on_state

    # --- messages ---

    def state(self) -> tuple[pb.AgentMessage, ...]:
        """Return the messages that tell all of the node; none before it was seen."""
        from alloy_agent.proto import agent_pb2 as pb
        from alloy_agent.uplink import codec

        snapshot, revision = self._snapshot, self._revision
        if snapshot is None:
            return ()
        now_s = clock.boottime_s()
        partitions = codec.partition_state(snapshot, revision, now_s, self._standings())
        return (
            pb.AgentMessage(
                inventory=codec.inventory(snapshot, revision, draining=self._draining())
            ),
            pb.AgentMessage(partition_state=partitions),
            *(pb.AgentMessage(rate_state=rate) for rate in self._rates()),
        )

    def sample(self) -> pb.AgentMessage | None:
        """Return the newest signals as one message; None before the node was seen."""
        from alloy_agent.proto import agent_pb2 as pb

        snapshot, revision, make = self._snapshot, self._revision, self._make_sample
        if snapshot is None or make is None:
            return None
        return pb.AgentMessage(fast=make(snapshot, revision, next(self._samples)))

    def _standings(self) -> dict[PartitionId, Standing]:
        from alloy_agent.uplink.codec import Standing

        audit = self._audit
        tiers = {r.partition.id: (r.tier, r.reason) for r in audit.partitions} if audit else {}
        holders = {piece.partition: lease.id for lease in self._leases() for piece in lease.pieces}
        draining = self._draining()
        found: dict[PartitionId, Standing] = {}
        for partition in self._snapshot.partitions if self._snapshot else ():
            tier, reason = tiers.get(partition.id, (None, "not audited yet"))
            found[partition.id] = Standing(
                tier=tier,
                tier_reason=reason,
                lease=holders.get(partition.id),
                draining=partition.id in draining,
            )
        return found

    # --- watchers ---

    def watch(
        self, stop: threading.Event, interval_s: float, kinds: tuple[str, ...]
    ) -> Iterator[pb.AgentMessage]:
        """Yield state, events and samples until `stop` is set.

        Args:
            stop: Ends it, within a second.
            interval_s: Time between two samples; 0: one a second.
            kinds: Names of the messages wanted; empty: all.
        """
        period_s = interval_s or SAMPLE_PERIOD_S
        sampled = not kinds or "fast" in kinds
        next_s = time.monotonic()
        with self._waiting(kinds) as waiting:
            for message in self.state():
                waiting.put(message)
            while not stop.is_set():
                left_s = next_s - time.monotonic()
                if sampled and left_s <= 0:
                    next_s = max(next_s + period_s, time.monotonic())
                    sample = self.sample()
                    if sample is not None:
                        waiting.put(sample)
                yield from waiting.take(min(max(left_s, 0.0), LOOK_AT_STOP_S))

    @contextmanager
    def _waiting(self, kinds: tuple[str, ...]) -> Iterator[Waiting]:
        waiting = Waiting(kinds)
        with self._lock:
            self._watchers.append(waiting)
        try:
            yield waiting
        finally:
            with self._lock:
                self._watchers.remove(waiting)

    def _tell_state(self) -> None:
        if not self._watchers and self._on_state is None:
            return
        for message in self.state():
            if self._on_state is not None:
                self._on_state(message)
            self._tell(message)

    def _event(self, message: pb.AgentMessage) -> None:
        """Keep an event for the brain, on disk, and tell watchers."""
        if self._on_event is not None:
            self._on_event(message)
        self._tell(message)

    def _evidence(self) -> tuple[int, str]:
        """Return sequence and hash of the newest evidence record that is known here."""
        audit = self._audit
        if audit is None or audit.evidence_sequence is None:
            return 0, ""
        return audit.evidence_sequence, audit.evidence_hash or ""

    def _tell(self, message: pb.AgentMessage) -> None:
        with self._lock:
            watchers = tuple(self._watchers)
        for waiting in watchers:
            waiting.put(message)


class Waiting:
    """The messages that wait for one watcher; the oldest goes when it is full."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._messages: collections.deque[pb.AgentMessage] = collections.deque(maxlen=MAX_WAITING)
        self._here = threading.Event()

    def put(self, message: pb.AgentMessage) -> None:
        """Add a message of a kind that is wanted."""
        if not self._kinds or message.WhichOneof("body") in self._kinds:
            self._messages.append(message)
            self._here.set()

    def take(self, timeout_s: float) -> Iterator[pb.AgentMessage]:
        """Yield what is there, after waiting for the first of it up to `timeout_s`."""
        self._here.wait(timeout_s)
        self._here.clear()
        while self._messages:
            yield self._messages.popleft()


def _tiers(result: AuditResult) -> tuple[tuple[str, str], ...]:
    return tuple((report.partition.id, report.tier) for report in result.partitions)
