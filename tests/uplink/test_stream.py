"""The stream: what is said, in which order, and what is answered to whatever a brain sends."""

from __future__ import annotations

import queue
import time

import grpc
import pytest

from alloy_agent.config import BrainSettings
from alloy_agent.errors import ConfigError, InvariantError
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import keepalive
from alloy_agent.uplink import client
from alloy_agent.uplink.client import Uplink
from tests.uplink.brains import Brain, Stream, serve, until
from tests.uplink.conftest import Agent, settings


def command(number: int | str, epoch: int = 1) -> pb.BrainMessage:
    return pb.BrainMessage(id=str(number), epoch=epoch, reserve=pb.Reserve(lease="l1"))


def test_hello_then_state_then_events_in_order(agent: Agent, brain: Brain, port: int) -> None:
    """Inventory comes before partitions; events come in order, each once, until acknowledged."""
    for number in range(200):
        agent.finding(f"F{number}")
    agent.dial(settings(port))
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    assert brain.stream.hello.node == "node-a"
    assert brain.stream.hello.last_sequence == 200
    assert brain.order == [(agent.outbox.epoch, number) for number in range(1, 201)]
    assert brain.duplicates == 0
    checks = [message.finding.check for message in brain.events.values()]
    assert checks == [f"F{number}" for number in range(200)]
    assert brain.bodies.index("inventory") < brain.bodies.index("partition_state")


def test_new_events_go_out_at_once(agent: Agent, brain: Brain, port: int) -> None:
    """An event that is added while a stream stands reaches the brain, with a small age."""
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    agent.finding("late")
    until(lambda: brain.events, "the event")
    (event,) = brain.events.values()
    assert event.finding.check == "late"
    assert event.event_age_ms < 60_000


def test_nothing_acknowledged_is_repeated(agent: Agent, brain: Brain, port: int) -> None:
    """A resumed stream goes on behind what the brain has, also when its word was lost."""
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    for number in range(20):
        agent.finding(f"A{number}")
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    brain.acknowledges = False
    for number in range(20):
        agent.finding(f"B{number}")
    until(lambda: len(brain.events) == 40, "the rest, without acknowledgement")
    brain.stream.close()
    until(lambda: len(brain.streams) == 2, "the next stream")
    until(lambda: agent.outbox.waiting == 0, "what Welcome said")
    assert brain.duplicates == 0
    assert brain.streams[1].hello.last_acknowledged == 20


def test_a_brain_that_lost_its_memory_gets_what_is_left(
    agent: Agent, brain: Brain, port: int
) -> None:
    """Events without an acknowledgement are sent again to whoever does not have them."""
    brain.acknowledges = False
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    for number in range(5):
        agent.finding(f"A{number}")
    until(lambda: len(brain.events) == 5, "the events")
    brain.high.clear()
    brain.events.clear()
    brain.acknowledges = True
    brain.stream.close()
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    assert len(brain.events) == 5


def test_events_on_their_way_are_bounded(agent: Agent, brain: Brain, port: int) -> None:
    """A brain that never acknowledges is not sent more than a window of events."""
    brain.acknowledges = False
    for number in range(client.MAX_UNACKNOWLEDGED + 50):
        agent.finding(f"F{number}")
    agent.dial(settings(port))
    until(lambda: len(brain.events) >= client.MAX_UNACKNOWLEDGED, "a window of events")
    time.sleep(0.3)
    assert len(brain.events) == client.MAX_UNACKNOWLEDGED


def test_telemetry_is_newest_wins_and_drops_are_counted(
    agent: Agent, brain: Brain, port: int
) -> None:
    """At the pace the brain asks for, old samples give way to new ones, and each is counted."""
    brain.telemetry_interval_ms = 100
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    for sample in range(1, 301):
        uplink.offer(pb.AgentMessage(fast=pb.Fast(sample=sample)))
        time.sleep(0.001)
    until(lambda: brain.fast and brain.fast[-1].sample == 300, "the newest sample")
    samples = [fast.sample for fast in brain.fast]
    assert samples == sorted(set(samples))
    assert len(samples) + uplink.state().telemetry_dropped == 300
    assert len(samples) < 100


def test_an_urgent_sample_does_not_wait(agent: Agent, brain: Brain, port: int) -> None:
    """A sample that changes a gate overtakes the pace of telemetry."""
    brain.telemetry_interval_ms = 3_600_000
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    uplink.offer(pb.AgentMessage(fast=pb.Fast(sample=1)))
    until(lambda: brain.fast, "the first sample")
    uplink.offer(pb.AgentMessage(fast=pb.Fast(sample=2)))
    uplink.offer(pb.AgentMessage(fast=pb.Fast(sample=3)), urgent=True)
    until(lambda: len(brain.fast) == 2, "the urgent sample")
    assert brain.fast[1].sample == 3


def test_a_repeated_command_runs_once(agent: Agent, brain: Brain, port: int) -> None:
    """Duplicates, early and late and on the next stream, get the first reply again."""
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    for number in ("a", "b", "a", "a", "b"):
        brain.stream.send(command(number))
    until(lambda: len(brain.replies) == 5, "five replies")
    brain.stream.close()
    until(lambda: len(brain.streams) == 2, "the next stream")
    brain.stream.send(command("a"))
    until(lambda: len(brain.replies) == 6, "the sixth reply")
    assert agent.ran == ["a", "b"]
    tokens = {(reply.command_id, reply.token) for reply in brain.replies}
    assert tokens == {("a", 1), ("b", 2)}
    assert [progress.command_id for progress in brain.progress] == ["a", "b"]


def test_books_do_not_wait_for_hardware(agent: Agent, brain: Brain, port: int) -> None:
    """A lease is answered while a change of partitions is still at work."""
    seen: list[str] = []
    slow = agent.run

    def run(message: pb.BrainMessage, emit: object) -> BaseException | None:
        if message.HasField("reserve"):
            seen.append(message.id)
            emit(pb.AgentMessage(reply=pb.Reply(command_id=message.id)))  # type: ignore[operator]
            return None
        return slow(message, emit)  # type: ignore[arg-type]

    agent.run = run  # type: ignore[assignment]
    agent.gate.clear()
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    brain.stream.send(pb.BrainMessage(id="apply", epoch=1, apply_layout=pb.ApplyLayout()))
    brain.stream.send(command("reserve"))
    until(lambda: brain.replies, "the lease's reply")
    assert brain.replies[0].command_id == "reserve"
    agent.gate.set()
    until(lambda: len(brain.replies) == 2, "the other reply")


def test_garbage_is_answered_and_survived(agent: Agent, brain: Brain, port: int) -> None:
    """Bytes that are no message, unknown messages and unknown fields get a typed refusal each."""
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    unknown = pb.BrainMessage(id="new", epoch=1).SerializeToString() + b"\xfa\x07\x00"
    for garbage in (b"\xff" * 50, b"\x0a\xff", unknown):
        brain.stream.send(garbage)
    brain.stream.send(command("after"))
    until(lambda: len(brain.replies) == 4, "four replies")
    statuses = [reply.status for reply in brain.replies]
    assert statuses.count(pb.STATUS_UNKNOWN_COMMAND) == 3
    assert {"new", "after"} <= {reply.command_id for reply in brain.replies}
    assert len(brain.streams) == 1
    assert agent.defects == []


def test_endless_garbage_ends_the_stream_not_the_agent(
    agent: Agent, brain: Brain, port: int
) -> None:
    """A peer that only babbles is left, and dialled again with back-off."""
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    for _ in range(client.MAX_GARBAGE + 1):
        brain.stream.send(b"\xff\xff\xff")
    until(lambda: len(brain.streams) == 2, "the next stream")
    assert uplink.state().garbage > client.MAX_GARBAGE
    brain.stream.send(command("after"))
    until(lambda: brain.replies and brain.replies[-1].command_id == "after", "its reply")


@pytest.mark.parametrize(
    "bad",
    [
        command("stale", epoch=6),
        command("local", epoch=0),
        command("future", epoch=8),
        command("", epoch=7),
    ],
)
def test_commands_of_no_right_are_refused(
    agent: Agent, brain: Brain, port: int, bad: pb.BrainMessage
) -> None:
    """Another term than Welcome's, the operator's term 0, or no id: refused, and never run."""
    brain.epoch = 7
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    brain.stream.send(bad)
    until(lambda: brain.replies, "the refusal")
    assert brain.replies[0].status == pb.STATUS_REFUSED
    assert brain.replies[0].refusal in {pb.REFUSAL_STALE_EPOCH, pb.REFUSAL_INVALID}
    assert agent.ran == []


def test_an_older_brain_is_not_obeyed(agent: Agent, brain: Brain, port: int) -> None:
    """Once a brain of term 7 was obeyed, one of term 6 gets no stream; one of term 8 does."""
    agent.brain_epoch = 7
    brain.epoch = 6
    uplink = agent.dial(settings(port))
    until(lambda: "its term 6 is older than 7" in uplink.state().reason, "the reason")
    assert not uplink.state().connected
    assert "inventory" not in brain.bodies
    brain.epoch = 8
    until(lambda: uplink.state().connected, "the newer brain")
    brain.epoch = 7
    brain.stream.close()
    until(lambda: "its term 7 is older than 8" in uplink.state().reason, "the reason again")


def test_senseless_acknowledgements_lose_nothing(agent: Agent, brain: Brain, port: int) -> None:
    """An acknowledgement of what was never sent, or of another outbox, is ignored."""
    brain.acknowledges = False
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    agent.finding("F")
    until(lambda: brain.events, "the event")
    for epoch, sequence in ((agent.outbox.epoch, 2**63), (agent.outbox.epoch + 1, 1)):
        ack = pb.Ack(epoch=epoch, sequence=sequence)
        brain.stream.send(pb.BrainMessage(epoch=1, ack=ack))
    until(lambda: uplink.state().garbage == 2, "both ignored")
    assert agent.outbox.waiting == 1
    brain.stream.send(pb.BrainMessage(epoch=1, ack=pb.Ack(epoch=agent.outbox.epoch, sequence=1)))
    until(lambda: agent.outbox.waiting == 0, "the true one")


def test_the_brains_hint_is_honoured(agent: Agent, brain: Brain, port: int) -> None:
    """A brain that asks to be left alone for a while is left alone for that while."""
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    hint = pb.RetryHint(after_ms=700, reconnect=True, reason="restarting")
    began = time.monotonic()
    brain.stream.send(pb.BrainMessage(epoch=1, retry_hint=hint))
    until(lambda: len(brain.streams) == 2, "the next stream")
    assert time.monotonic() - began >= 0.7


def test_a_hint_in_a_refused_call_is_honoured(agent: Agent, brain: Brain, port: int) -> None:
    """A full brain says when to come back in its trailing metadata."""
    metadata = ((keepalive.RETRY_AFTER_KEY, "600"),)
    brain.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata)
    uplink = agent.dial(settings(port))
    until(lambda: "full" in uplink.state().reason, "the refusal")
    began, brain.refusal = time.monotonic(), None
    until(lambda: brain.streams, "the stream")
    assert time.monotonic() - began >= 0.4
    assert uplink.state().attempts <= 3


def test_a_million_commands_are_bounded(agent: Agent, brain: Brain, port: int) -> None:
    """A brain that pours out commands is slowed by the stream; the agent keeps a few hundred."""
    agent.gate.clear()
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    sent = [0]

    class Flood(queue.Queue[pb.BrainMessage | bytes | None]):
        def get(self, *_: object, **__: object) -> pb.BrainMessage | bytes | None:
            if sent[0] < 1_000_000 and self.empty():
                sent[0] += 1
                return command(sent[0])
            return super().get()

    calm, brain.stream.out = brain.stream.out, Flood()
    calm.put(command("first"))  # for a stream that waits there already
    until(lambda: sent[0] > client.MAX_WAITING, "a full lane")
    before = -1
    while before != sent[0]:  # until the brain cannot send any more
        before = sent[0]
        time.sleep(0.5)
    assert before < 20_000  # what the windows of the connection hold
    assert uplink.state().connected
    agent.gate.set()
    until(lambda: len(brain.replies) > 1000, "the commands to move again")
    in_order = [number for number in agent.ran if number != "first"]
    assert in_order[:499] == [str(number) for number in range(1, 500)]


def test_a_brain_that_never_welcomes_is_left(agent: Agent, brain: Brain, port: int) -> None:
    """Without a welcome nothing is told, and the agent dials again after a while of silence."""
    brain.welcomes = False
    brain.refusal = None
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    brain.stream.send(command("early"))
    until(lambda: "not a welcome" in uplink.state().reason, "the reason")
    assert agent.ran == []
    assert set(brain.bodies) <= {"hello"}


def test_a_silent_brain_is_left(agent: Agent, brain: Brain, port: int) -> None:
    """A brain that says nothing for three heartbeats is taken for gone."""
    brain.answers_echo = False
    uplink = agent.dial(settings(port))
    until(lambda: len(brain.streams) >= 2, "the next stream")
    assert uplink.state().streams >= 1


def test_round_trip_is_measured(agent: Agent, brain: Brain, port: int) -> None:
    """The pulse measures the round trip."""
    uplink = agent.dial(settings(port))
    until(lambda: uplink.state().round_trip_s is not None, "a round trip")
    assert 0.0 <= (uplink.state().round_trip_s or 0.0) < 10.0


def test_a_defect_is_reported(agent: Agent, brain: Brain, port: int) -> None:
    """An exception that no command may raise reaches the daemon, with the stream still standing."""
    agent.failure = InvariantError("two tenants in one piece")
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    brain.stream.send(command("a"))
    until(lambda: agent.defects, "the defect")
    assert uplink.state().connected


def test_server_with_default_ping_limits_is_no_trouble(agent: Agent, brain: Brain) -> None:
    """A server that was told nothing of our keepalive keeps the stream."""
    server, port = serve(brain, options=())
    try:
        agent.dial(settings(port))
        until(lambda: brain.streams, "a stream")
        time.sleep(1.0)
        assert len(brain.streams) == 1
    finally:
        server.stop(0).wait(10)


def test_snapshot_tells_all_again(agent: Agent, brain: Brain, port: int) -> None:
    """A brain that asks for a snapshot gets inventory and partitions again, and a reply."""
    agent.dial(settings(port))
    until(lambda: brain.bodies.count("partition_state") == 1, "the first state")
    brain.stream.send(pb.BrainMessage(id="s", epoch=1, snapshot=pb.SnapshotRequest()))
    until(lambda: brain.bodies.count("partition_state") == 2, "the second state")
    until(lambda: brain.replies, "the reply")


def test_stop_is_prompt_and_leaves_no_thread(agent: Agent, brain: Brain, port: int) -> None:
    """Stopped with commands waiting and nobody dialled, the uplink ends all its threads."""
    uplink = agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    agent.gate.clear()
    for number in range(300):
        brain.stream.send(command(number))
    until(lambda: uplink.state().connected, "a stream")
    agent.gate.set()
    uplink.stop()
    assert not any(thread.is_alive() for thread in uplink._threads)


@pytest.mark.parametrize(
    ("address", "insecure", "plain"),
    [
        ("127.0.0.1:7000", False, True),
        ("localhost:7000", False, True),
        ("[::1]:7000", False, True),
        ("brain.example:7000", True, True),
        ("brain.example:7000", False, False),
        ("10.0.0.1:7000", False, False),
        ("127.0.0.1.example:7000", False, False),
    ],
)
def test_plain_text_needs_loopback_or_a_word(
    agent: Agent, address: str, insecure: bool, plain: bool
) -> None:
    """Plain text goes to loopback, or where the operator said `insecure`; nowhere else."""
    wish = BrainSettings(address=address, insecure=insecure)
    if plain:
        Uplink(wish, agent.outbox, agent.hello, agent.state, agent.run)
    else:
        with pytest.raises(ConfigError, match="mutual TLS is incomplete"):
            Uplink(wish, agent.outbox, agent.hello, agent.state, agent.run)


def test_streams_are_kept_apart(agent: Agent, brain: Brain, port: int) -> None:
    """Replies of commands that one stream began are not lost on the next: the brain asks again."""
    agent.gate.clear()
    agent.dial(settings(port))
    until(lambda: brain.streams, "a stream")
    brain.stream.send(command("slow"))
    until(lambda: agent.uplink is not None and agent.uplink._commands == 1, "the command to begin")
    first: Stream = brain.stream
    first.close()
    until(lambda: len(brain.streams) == 2, "the next stream")
    agent.gate.set()
    until(lambda: agent.ran == ["slow"], "the command to end")
    brain.stream.send(command("slow"))
    until(lambda: any(reply.token == 1 for reply in brain.replies), "its first reply")
    assert agent.ran == ["slow"]
