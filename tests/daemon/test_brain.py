"""The daemon on the stream to a brain: told of the node, asked for leases, audits and documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.proto import agent_pb2 as pb
from tests.daemon.harness import DaemonProcess, Site, daemon, wait_for
from tests.daemon.test_process import LAYOUT
from tests.uplink.brains import Brain, serve


@pytest.fixture
def brain() -> Iterator[tuple[Brain, str]]:
    """Give a brain and its address."""
    brain = Brain()
    server, port = serve(brain)
    yield brain, f"127.0.0.1:{port}"
    server.stop(0).wait(10)


def ask(brain: Brain, command: pb.BrainMessage) -> pb.Reply:
    """Send a command and return its reply."""
    command.epoch = brain.epoch
    brain.stream.send(command)

    def answer() -> pb.Reply | None:
        with brain.lock:
            return next((r for r in brain.replies if r.command_id == command.id), None)

    reply: pb.Reply = wait_for(f"the reply to {command.id}", answer)
    return reply


def connected(brain: Brain, running: DaemonProcess) -> None:
    running.wait_event("dialling")
    wait_for("the stream", lambda: brain.streams)
    wait_for("the state", lambda: "partition_state" in brain.bodies)


def test_a_brain_sees_the_node_and_leases_a_partition(
    site: Site, brain: tuple[Brain, str], tmp_path: Path
) -> None:
    """State and samples arrive; a lease is granted at its generation, fences, and is an event."""
    mind, address = brain
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    assert site.run("apply", str(layout), "--layout", "halves", "--yes").returncode == 0
    (piece, _other) = site.partitions()
    with daemon(site, ALLOY_BRAIN_ADDRESS=address) as running:
        connected(mind, running)
        wait_for("samples", lambda: len(mind.fast) >= 2)
        refs = [pb.PartitionRef(id=piece["id"], generation=piece["generation"])]
        wish = pb.Reserve(lease="l1", tenant="acme", partitions=refs, ttl_ms=60_000)
        granted = ask(mind, pb.BrainMessage(id="r1", reserve=wish))
        assert granted.status == pb.STATUS_OK, granted
        commit = pb.Commit(lease="l1", token=granted.token)
        assert ask(mind, pb.BrainMessage(id="c1", commit=commit)).status == pb.STATUS_OK

        stale = [pb.PartitionRef(id=piece["id"], generation=piece["generation"] + 5)]
        again = pb.Reserve(lease="l2", tenant="b", partitions=stale, ttl_ms=60_000)
        assert ask(mind, pb.BrainMessage(id="r2", reserve=again)).status == pb.STATUS_REFUSED

        refused = site.run("apply", str(layout), "--layout", "quarters", "--yes")
        assert refused.returncode == 2, "a leased partition was taken away"
        assert "held by a lease" in refused.stderr
        tenants = {p["id"]: p["tenant"] for p in site.partitions()}
        assert tenants[piece["id"]] == "acme"
        wait_for(
            "the event",
            lambda: any(m.WhichOneof("body") == "lease_change" for m in mind.events.values()),
        )
        audit = ask(mind, pb.BrainMessage(id="a1", audit=pb.Audit()))
        assert json.loads(audit.document.json)["schema"] == "alloy.audit/v1"
        assert running.stop() == 0


def test_a_lease_outlives_the_daemon(site: Site, brain: tuple[Brain, str], tmp_path: Path) -> None:
    """Killed and started again, the node still keeps what it has granted."""
    mind, address = brain
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    assert site.run("apply", str(layout), "--layout", "halves", "--yes").returncode == 0
    (piece, _other) = site.partitions()
    with daemon(site, ALLOY_BRAIN_ADDRESS=address) as running:
        connected(mind, running)
        refs = [pb.PartitionRef(id=piece["id"], generation=piece["generation"])]
        wish = pb.Reserve(lease="l1", tenant="acme", partitions=refs, ttl_ms=60_000)
        granted = ask(mind, pb.BrainMessage(id="r1", reserve=wish))
        commit = pb.Commit(lease="l1", token=granted.token)
        assert ask(mind, pb.BrainMessage(id="c1", commit=commit)).status == pb.STATUS_OK
        running.kill()
    with daemon(site, ALLOY_BRAIN_ADDRESS=address) as running:
        wait_for("the second stream", lambda: len(mind.streams) >= 2)
        assert [lease.id for lease in mind.stream.hello.leases] == ["l1"]
        other = pb.Reserve(lease="l2", tenant="b", partitions=refs, ttl_ms=60_000)
        assert ask(mind, pb.BrainMessage(id="r2", reserve=other)).status == pb.STATUS_REFUSED
        assert running.stop() == 0
