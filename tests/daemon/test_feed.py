"""What watchers of the node are told, and that none of them costs another anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from alloy_agent.daemon import feed
from alloy_agent.daemon.feed import Feed
from alloy_agent.model import Finding, Snapshot, Tier, Verdict
from alloy_agent.proto import agent_pb2 as pb
from tests.daemon.test_keeping import piece, snapshot

FINDING = Finding(
    check="CGR-01",
    subject="p",
    before=Verdict.PASS,
    after=Verdict.FAIL,
    tier_before=Tier.ENFORCED,
    tier_after=Tier.ADVISORY,
    expected="in",
    observed="out",
    time_s=1.0,
    time_wall_s=1.0,
)


class Listener:
    """One watcher on a thread of its own."""

    def __init__(self, source: Feed, *kinds: str) -> None:
        self.heard: list[pb.AgentMessage] = []
        self.stop = threading.Event()
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(source, kinds))
        self._thread.start()

    def _run(self, source: Feed, kinds: tuple[str, ...]) -> None:
        for message in source.watch(self.stop, 0.05, kinds):
            with self._more:
                self.heard.append(message)
                self._more.notify_all()

    def until(self, kind: str, count: int = 1) -> list[pb.AgentMessage]:
        """Return the messages of a kind once there are `count`."""

        def of_kind() -> list[pb.AgentMessage]:
            return [m for m in self.heard if m.WhichOneof("body") == kind]

        with self._more:
            assert self._more.wait_for(lambda: len(of_kind()) >= count, 30), kind
            return of_kind()

    def end(self) -> None:
        """Leave."""
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def listening(source: Feed, *kinds: str) -> Iterator[Listener]:
    listener = Listener(source, *kinds)
    try:
        yield listener
    finally:
        listener.end()


def new_feed() -> Feed:
    source = Feed(lambda: ())
    source.judge_by(lambda _seen, _revision, number: pb.Fast(sample=number), frozenset)
    return source


def later(base: Snapshot) -> Snapshot:
    return replace(base, sequence=base.sequence + 1)


def test_a_watcher_gets_the_state_at_once_and_again_when_it_changes() -> None:
    """Inventory and partitions come first; the same node again is no news, another geometry is."""
    source = new_feed()
    source.saw(snapshot())
    with listening(source, "inventory", "partition_state") as listener:
        listener.until("partition_state")
        source.saw(later(snapshot()))
        source.saw(later(later(snapshot(piece()))))
        second = listener.until("partition_state", 2)[1].partition_state
        assert [p.id for p in second.partitions] == ["GPU-1/1g.10gb@0"]
        assert second.revision == 2
        assert len(listener.until("inventory", 2)) == 2


def test_samples_come_at_the_pace_asked_for_and_findings_between() -> None:
    """Fast messages keep coming; a finding is passed on as it is."""
    source = new_feed()
    source.saw(snapshot(piece()))
    with listening(source) as listener:
        samples = [m.fast.sample for m in listener.until("fast", 3)]
        assert samples == sorted(set(samples))
        source.found(FINDING)
        (found,) = listener.until("finding")
        assert found.finding.check == "CGR-01"


def test_only_the_kinds_asked_for_come() -> None:
    """A watcher of findings hears nothing else."""
    source = new_feed()
    source.saw(snapshot())
    with listening(source, "finding") as listener:
        for _ in range(200):
            source.found(FINDING)
            if listener.heard:
                break
            listener.stop.wait(0.01)
        listener.until("finding")
        assert {m.WhichOneof("body") for m in listener.heard} == {"finding"}


def test_a_slow_watcher_loses_its_oldest() -> None:
    """What waits for one watcher is bounded, and the newest is kept."""
    waiting = feed.Waiting(())
    for number in range(feed.MAX_WAITING + 10):
        waiting.put(pb.AgentMessage(sequence=number))
    kept = [message.sequence for message in waiting.take(0)]
    assert len(kept) == feed.MAX_WAITING
    assert kept[-1] == feed.MAX_WAITING + 9
