"""The brain over real streams: leases on real books, races, faults, refusals, identities."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import agent_pb2_grpc, keepalive
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain.client import BrainClient, PlacementError
from alloy_brain.embedded import EmbeddedBrain
from alloy_brain.identity import Identity, IdentityError
from alloy_brain.server import BrainSettings, Door
from tests.brain.world import Agent, device, piece, until
from tests.uplink.identities import Authority


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[EmbeddedBrain]:
    made = EmbeddedBrain(BrainSettings(address="127.0.0.1:0", ledger=str(tmp_path / "brain.db")))
    with made:
        yield made


@pytest.fixture
def client(brain: EmbeddedBrain) -> Iterator[BrainClient]:
    with BrainClient(brain.address) as made:
        yield made


def node(folder: Path, name: str, pieces: int = 2) -> Agent:
    parts = [piece(f"{name}-D", "1g.10gb", n) for n in range(pieces)]
    return Agent(folder / name, name, [device(f"{name}-D")], parts)


@pytest.fixture
def agent(tmp_path: Path, brain: EmbeddedBrain, client: BrainClient) -> Iterator[Agent]:
    made = node(tmp_path, "a").dial(brain.address)
    ready(client, "a")
    yield made
    made.close()


def ready(client: BrainClient, *names: str) -> None:
    """Wait until the brain could place on these nodes."""

    def look() -> bool:
        found = {n.node: n for n in client.nodes()}
        return all(
            name in found
            and found[name].connected
            and found[name].partition_count
            and found[name].telemetry_age_ms
            for name in names
        )

    until(look, f"nodes {names} to be known")


def request(name: str, count: int = 1, **other: Any) -> pl.PlaceRequest:
    demand = other.pop("demand", None) or pl.Demand(count=count)
    values: dict[str, Any] = {"tenant": "t", "demands": [demand], **other}
    return pl.PlaceRequest(request=name, **values)


def refused(client: BrainClient, asked: pl.PlaceRequest) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        client.place(asked)
    return caught.value


def test_a_lease_is_on_the_node_before_the_client_has_it(agent: Agent, client: BrainClient) -> None:
    """Place reserves and commits; the node's own book holds what the client was told."""
    reply = client.place(request("r1"))
    held = agent.desk.ledger.leases
    assert [lease.id for lease in held] == [reply.lease]
    assert held[0].state.value == "committed"
    assert held[0].token == reply.granted[0].token > 0
    assert reply.state == pb.LEASE_STATE_COMMITTED
    assert [one.lease for one in client.leases(tenant="t")] == [reply.lease]


def test_release_gives_the_piece_back(agent: Agent, client: BrainClient) -> None:
    """After a release everything can be had again, and releasing twice is no error."""
    reply = client.place(request("r1", 2))
    assert refused(client, request("r2")).code == "RESOURCE_EXHAUSTED"
    client.release(reply.lease, "t")
    until(lambda: not client.leases(), "the lease to end")
    assert client.release(reply.lease, "t").state == pb.LEASE_STATE_FREE
    assert client.place(request("r3", 2)).lease != reply.lease
    assert agent.commands


def test_the_same_request_gets_the_same_lease(agent: Agent, client: BrainClient) -> None:
    """A repeated request changes nothing; the same id for something else is refused."""
    first = client.place(request("r1"))
    assert client.place(request("r1")) == first
    assert refused(client, request("r1", 2)).code == "ALREADY_EXISTS"
    assert len(agent.desk.ledger.leases) == 1


def test_of_many_at_once_each_piece_has_one(agent: Agent, client: BrainClient) -> None:
    """Twelve clients want two pieces: two get one, ten are told who has them."""

    def run(number: int) -> str | PlacementError:
        try:
            return client.place(request(f"r{number}")).granted[0].partition.id
        except PlacementError as exc:
            return exc

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(run, range(12)))
    got = [one for one in answers if isinstance(one, str)]
    lost = [one for one in answers if isinstance(one, PlacementError)]
    assert sorted(got) == sorted(p.id for p in agent.partitions)
    assert {one.code for one in lost} == {"RESOURCE_EXHAUSTED"}
    assert all("held by lease" in one.message for one in lost)


def test_a_stale_decision_fails_on_the_node_and_is_made_anew(
    agent: Agent, client: BrainClient
) -> None:
    """A piece re-made behind the brain's back is refused by the node, and another is chosen."""
    stale = agent.partitions[0]
    agent.partitions[0] = piece(stale.device, "1g.10gb", 0, generation=7)
    replies = [client.place(request("r1"))]
    assert replies[0].granted[0].partition.id == agent.partitions[1].id
    document = json.loads(client.explain(lease=replies[0].lease).document.json)
    assert any("generation is 7, not 1" in why for why in document["refused_by"].values())
    assert document["attempt"] == 2
    assert document["replayed"] is True


def test_a_gang_over_nodes_is_all_or_nothing(
    tmp_path: Path, brain: EmbeddedBrain, client: BrainClient
) -> None:
    """When one node refuses its part, the other nodes' parts are given back."""
    agents = [node(tmp_path, name, 1).dial(brain.address) for name in ("a", "b")]
    try:
        ready(client, "a", "b")
        agents[1].partitions[0] = piece("b-D", "1g.10gb", 0, generation=9)
        error = refused(client, request("gang", 2))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert "generation is 9" in error.message
        until(lambda: not agents[0].desk.ledger.leases, "the other part to be given back")
        assert not client.leases()
        agents[1].tell()
        until(lambda: _try(client, "gang-2", 2), "the gang to be placed on what there is")
    finally:
        for one in agents:
            one.close()


def _try(client: BrainClient, name: str, count: int = 1) -> pl.PlaceReply | None:
    try:
        return client.place(request(f"{name}-{time.monotonic_ns()}", count))
    except PlacementError:
        return None


def test_a_reservation_can_be_committed_later(agent: Agent, client: BrainClient) -> None:
    """Reserve only, then Renew with commit; a lease's end moves with Renew."""
    reply = client.place(request("r1", reserve_only=True))
    assert reply.state == pb.LEASE_STATE_RESERVED
    done = client.renew(pl.RenewRequest(lease=reply.lease, tenant="t", commit=True, ttl_ms=60_000))
    assert done.state == pb.LEASE_STATE_COMMITTED
    assert 0 < done.expires_in_ms <= 60_000
    longer = client.renew(pl.RenewRequest(lease=reply.lease, tenant="t", ttl_ms=600_000))
    assert longer.expires_in_ms > 60_000
    assert agent.desk.ledger.leases[0].expires_at_s is not None


def test_a_lease_that_ran_out_on_the_node_is_over(agent: Agent, client: BrainClient) -> None:
    """The node's clock ends it; the brain hears of it and has the piece to give again."""
    client.place(request("r1", 2, lease_ttl_ms=200))

    def tick() -> bool:
        agent.desk.tick()
        return not client.leases()

    until(tick, "the lease to end in the brain's book too")
    assert client.place(request("r2", 2)).lease


def test_a_sick_device_is_out_until_it_is_well(agent: Agent, client: BrainClient) -> None:
    """A health event closes the gate, the explanation says why, a later one opens it."""
    sick = pb.Health(device="a-D", state=pb.HEALTH_STATE_FAILED, cause="bus error", code="xid:79")
    agent.event(pb.AgentMessage(health=sick))
    until(lambda: client.nodes()[0].open_gates == 0, "the gate to close")
    error = refused(client, request("r1"))
    assert "health closed: bus error (xid:79)" in error.message
    well = pb.Health(device="a-D", state=pb.HEALTH_STATE_OK, before=pb.HEALTH_STATE_FAILED)
    agent.event(pb.AgentMessage(health=well))
    until(lambda: client.nodes()[0].open_gates, "the gate to open")
    assert client.place(request("r2")).lease


def test_a_node_that_is_gone_gets_nothing(agent: Agent, client: BrainClient) -> None:
    """With its stream down a node is no candidate, and what it holds stays held."""
    kept = client.place(request("r1"))
    assert agent.uplink is not None
    agent.uplink.stop()
    until(lambda: not client.nodes()[0].connected, "the stream to be gone")
    error = refused(client, request("r2"))
    assert "connected unknown" in error.message
    assert [one.lease for one in client.leases()] == [kept.lease]


def test_events_are_acknowledged_once_on_disk(
    agent: Agent, brain: EmbeddedBrain, client: BrainClient
) -> None:
    """Findings arrive in order, are kept, and leave the agent's outbox."""
    for number in range(50):
        agent.event(pb.AgentMessage(finding=pb.Finding(check=f"C-{number}")))
    until(lambda: agent.outbox.waiting == 0, "everything to be acknowledged")
    kept = brain.server.ledger.events("a", ("finding",))
    checks = [pb.AgentMessage.FromString(event.body).finding.check for event in kept]
    assert checks == [f"C-{number}" for number in range(50)]
    assert client.nodes()[0].last_sequence >= 50


def test_watchers_hear_of_everything(agent: Agent, client: BrainClient) -> None:
    """Watch begins with the nodes and goes on with leases, decisions and findings."""
    seen: list[str] = []
    stream = client.watch()

    def read() -> None:
        try:
            seen.extend(str(event.WhichOneof("body")) for event in stream)
        except grpc.RpcError:
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until(lambda: "node_changed" in seen, "the node")
    client.place(request("r1"))
    agent.event(pb.AgentMessage(finding=pb.Finding(check="C-1")))
    until(lambda: {"lease_changed", "decided", "finding"} <= set(seen), "the news")
    stream.cancel()
    thread.join(5.0)


BAD = [
    (pl.PlaceRequest(), "request: it is empty"),
    (request("r", tenant=""), "tenant: it is empty"),
    (request("r", demands=[]), "demands: 0"),
    (request("r", 0), "count 0"),
    (request("r", 4294967295), "count 4294967295"),
    (request("r", demand=pl.Demand(count=1, memory_bytes=1 << 60)), "memory_bytes"),
    (request("r", demands=[pl.Demand(count=256)] * 2), "512 pieces"),
    (request("r", tier_floor=99), "tier_floor: 99 means nothing"),
    (request("r\n", 1), "request: not a name"),
    (request("r", lease_ttl_ms=1 << 60), "lease_ttl_ms"),
    (request("r", demand=pl.Demand(count=1, vendor=pb.VENDOR_AMD)), "not amd"),
    (request("r", 200), "the whole fleet has 2"),
]


@pytest.mark.parametrize(("asked", "said"), BAD, ids=[said for _, said in BAD])
def test_nonsense_is_refused_with_what_is_possible(
    agent: Agent, client: BrainClient, asked: pl.PlaceRequest, said: str
) -> None:
    """A typed status, the field or cause, and what would do; the node never hears of it."""
    error = refused(client, asked)
    assert error.code == "INVALID_ARGUMENT"
    assert said in error.message
    assert error.possible
    assert not agent.commands


def test_strangers_leases_are_not_touched(agent: Agent, client: BrainClient) -> None:
    """Another tenant cannot release or renew, and a lease that never was is not found."""
    reply = client.place(request("r1"))
    with pytest.raises(PlacementError) as denied:
        client.release(reply.lease, "somebody")
    assert denied.value.code == "PERMISSION_DENIED"
    with pytest.raises(PlacementError) as missing:
        client.release("l-none", "t")
    assert missing.value.code == "NOT_FOUND"
    with pytest.raises(PlacementError) as unknown:
        client.explain(decision="d-none")
    assert unknown.value.code == "NOT_FOUND"
    assert len(agent.desk.ledger.leases) == 1


def test_a_stream_of_garbage_ends_alone(agent: Agent, brain: EmbeddedBrain, client: Any) -> None:
    """Peers that say nonsense lose their own stream; the brain goes on placing."""
    with grpc.insecure_channel(brain.address) as channel:
        make: Any = channel.stream_stream
        raw = make("/alloy.agent.v1.PlacementBrain/Attach")
        for first in (b"\xff\xff\xff", b"", pb.AgentMessage(echo=pb.Echo()).SerializeToString()):
            with pytest.raises(grpc.RpcError):
                list(raw(iter([first])))
        unnamed = pb.AgentMessage(hello=pb.Hello(node="")).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            list(raw(iter([unnamed])))
        assert "name" in str(caught.value.details())
    assert client.place(request("r1")).lease
    assert agent.desk.ledger.leases


def test_an_older_brain_is_refused_and_says_so(
    agent: Agent, brain: EmbeddedBrain, client: BrainClient
) -> None:
    """A brain whose term is below one that a node obeys does not take the node."""
    with grpc.insecure_channel(brain.address) as channel:
        stub = agent_pb2_grpc.PlacementBrainStub(channel)
        hello = pb.AgentMessage(hello=pb.Hello(node="z", brain_epoch=99))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Attach(iter([hello])))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "it obeys term 99" in str(caught.value.details())
    assert [n.node for n in client.nodes()] == ["a"]
    assert agent.uplink is not None


def test_reflection_and_health_are_served(brain: EmbeddedBrain) -> None:
    """Standard tools find the services and see that they serve."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(brain.address) as channel:
        asked = health_pb2.HealthCheckRequest(service="alloy.agent.v1.Placement")
        answer = health_pb2_grpc.HealthStub(channel).Check(asked)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_too_many_newcomers_are_told_when_to_come_back() -> None:
    """The door lets its pace through and spreads the others over the time they need."""
    door = Door(per_s=100.0, burst=50)
    start_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    waits = [door.enter(start_s) for _ in range(1050)]
    assert waits.count(0) in (50, 51)
    assert max(waits) > 5_000
    assert min(wait for wait in waits if wait) >= 200


def test_mutual_tls_and_names(tmp_path: Path) -> None:
    """Only a certificate of the authority enters, and a node speaks for itself alone."""
    authority = Authority(tmp_path / "ca")
    stranger = Authority(tmp_path / "other", "other")
    key, certificate = authority.install("brain", spiffe="spiffe://alloy/brain")
    node_key, node_certificate = authority.install("a", spiffe="spiffe://alloy/node/a")
    bad_key, bad_certificate = stranger.install("a", spiffe="spiffe://alloy/node/a")
    identity = Identity(
        ca_file=str(authority.file),
        certificate_file=str(certificate),
        key_file=str(key),
        spiffe_nodes="spiffe://alloy/node/{node}",
        spiffe_clients="spiffe://alloy/client",
    )
    settings = BrainSettings(
        address="127.0.0.1:0", ledger=str(tmp_path / "b.db"), identity=identity
    )
    with EmbeddedBrain(settings) as brain:
        tls = {
            "ca_file": str(authority.file),
            "certificate_file": str(node_certificate),
            "key_file": str(node_key),
        }
        agents = [node(tmp_path, name) for name in ("a", "b", "c")]
        agents[0].dial(brain.address, **tls)
        agents[1].dial(brain.address, **tls)  # a's certificate, b's name
        bad = {"certificate_file": str(bad_certificate), "key_file": str(bad_key)}
        agents[2].dial(brain.address, **{**tls, **bad})
        try:
            until(lambda: brain.server.broker.links, "the node that is who it says")
            down = [a.uplink for a in agents[1:] if a.uplink is not None]
            until(lambda: all(u.state().attempts > 1 for u in down), "the others to be refused")
            assert list(brain.server.broker.links) == ["a"]
            assert "not for spiffe://alloy/node/b" in down[0].state().reason
            files = (str(authority.file), str(node_certificate), str(node_key))
            with BrainClient(brain.address, files) as client:
                with pytest.raises(PlacementError) as caught:
                    client.nodes()
                assert caught.value.code == "PERMISSION_DENIED"
        finally:
            for one in agents:
                one.close()


def test_plain_text_needs_loopback_or_a_word(tmp_path: Path) -> None:
    """Off loopback there is TLS, or somebody said that there shall be none."""
    with pytest.raises(IdentityError, match="--insecure"):
        EmbeddedBrain(BrainSettings(address="0.0.0.0:0", ledger=str(tmp_path / "b.db")))


# --- processes ------------------------------------------------------------------------------------


class Served:
    """`alloy-brain serve` as a process on a fixed port, killed and started at will."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "alloy_brain", "serve", "--listen", self.address]
        words += ["--ledger", str(self.folder / "brain.db")]
        with (self.folder / "brain.log").open("ab") as log:
            self.process = subprocess.Popen(words, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def weather(tmp_path: Path, kills: int) -> None:
    served = Served(tmp_path)
    served.start()
    agents = [node(tmp_path, name, 4).dial(served.address) for name in ("a", "b")]
    stop = threading.Event()
    granted: list[str] = []

    def traffic() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                with BrainClient(served.address) as client:
                    reply = client.place(request(f"r{number}", 1 + number % 3), timeout_s=3.0)
                    granted.append(reply.lease)
                    if number % 2:
                        client.release(reply.lease, "t")
            except PlacementError:
                make_room(served.address)
                time.sleep(0.05)

    thread = threading.Thread(target=traffic, daemon=True)
    thread.start()
    try:
        for number in range(kills):
            before = len(granted)
            time.sleep(0.9 + 0.1 * (number % 3))
            until(lambda n=before: len(granted) > n, "a grant before the kill")  # type: ignore[misc]
            served.kill()
            served.start()
        stop.set()
        thread.join(20.0)
        with BrainClient(served.address) as client:
            until(lambda: _ready(client), "the last brain to know both nodes")
            until(lambda: _agrees(client, agents), "brain and nodes to agree on every lease")
        held = [p.partition for a in agents for x in a.desk.ledger.leases for p in x.pieces]
        tokens = [x.token for a in agents for x in a.desk.ledger.leases]
        assert len(held) == len(set(held))
        assert all(token > 0 for token in tokens)
        assert granted
    finally:
        stop.set()
        for one in agents:
            one.close()
        served.kill()


def make_room(address: str) -> None:
    """Give back what the brain lists; some replies died with a brain, so the caller cannot."""
    with contextlib.suppress(PlacementError), BrainClient(address) as client:
        for one in client.leases():
            client.release(one.lease, "t")


def _ready(client: BrainClient) -> bool:
    try:
        ready_nodes = [n for n in client.nodes() if n.connected and n.partition_count]
    except PlacementError:
        return False
    return len(ready_nodes) == 2


def _agrees(client: BrainClient, agents: list[Agent]) -> bool:
    told = {
        (g.node, one.lease, g.partition.id, g.partition.generation)
        for one in client.leases()
        for g in one.granted
    }
    found = {
        (a.name, x.id, p.partition, p.generation)
        for a in agents
        for x in a.desk.ledger.leases
        for p in x.pieces
    }
    return told == found


def test_a_brain_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """Killed during traffic, each new brain ends up in agreement with the nodes' books."""
    weather(tmp_path, 3)


@pytest.mark.slow
def test_a_brain_that_is_killed_a_hundred_times_loses_nothing(tmp_path: Path) -> None:
    """A hundred kills during traffic: no piece granted twice, no lease lost."""
    weather(tmp_path, 100)


def test_two_brains_the_newer_term_has_the_nodes(tmp_path: Path) -> None:
    """A second brain on the same ledger takes over; the older one can change nothing more."""
    ledger = str(tmp_path / "brain.db")
    with (
        EmbeddedBrain(BrainSettings(address="127.0.0.1:0", ledger=ledger, name="old")) as old,
        EmbeddedBrain(BrainSettings(address="127.0.0.1:0", ledger=ledger, name="new")) as new,
    ):
        agent = node(tmp_path, "a").dial(new.address)
        try:
            with BrainClient(new.address) as client, BrainClient(old.address) as stale:
                ready(client, "a")
                assert client.place(request("r1")).lease
                until(lambda: agent.desk.ledger.brain_epoch == 2, "the node to obey term 2")
                with grpc.insecure_channel(old.address) as channel:
                    stub = agent_pb2_grpc.PlacementBrainStub(channel)
                    hello = pb.Hello(node="a", brain_epoch=agent.desk.ledger.brain_epoch)
                    with pytest.raises(grpc.RpcError, match="it obeys term 2"):
                        list(stub.Attach(iter([pb.AgentMessage(hello=hello)])))
                assert not stale.nodes()
        finally:
            agent.close()


def test_an_agent_killed_between_reserve_and_commit(
    tmp_path: Path, brain: EmbeddedBrain, client: BrainClient
) -> None:
    """The reservation that nobody committed is released when the agent comes back."""
    agent = node(tmp_path, "a").dial(brain.address)
    ready(client, "a")
    reply = client.place(request("r1", reserve_only=True))
    agent.close()
    until(lambda: not client.nodes()[0].connected, "the agent to be gone")
    again = node(tmp_path, "a").dial(brain.address)
    try:
        ready(client, "a")
        assert [x.id for x in again.desk.ledger.leases] == [reply.lease]
        done = client.renew(pl.RenewRequest(lease=reply.lease, tenant="t", commit=True))
        assert done.state == pb.LEASE_STATE_COMMITTED
    finally:
        again.close()


def test_the_command_line_asks_a_served_brain(agent: Agent, brain: EmbeddedBrain) -> None:
    """place, leases, explain, nodes and release work from the shell, as tables and as JSON."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "alloy_brain", *words, "--brain", brain.address]
        environment = {**os.environ, "GRPC_VERBOSITY": "ERROR"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    placed = run("place", "--tenant", "t", "--memory", "8GiB", "--tier", "hard", "--json")
    assert placed.returncode == 0, placed.stderr
    document = json.loads(placed.stdout)
    assert document["schema"] == "alloy.placement/v1"
    assert document["lease"] in run("leases").stdout
    explained = run("explain", document["lease"])
    assert "chosen" in explained.stdout
    assert "gives the same choice" in explained.stdout
    assert "a " in run("nodes").stdout
    never = run("place", "--tenant", "t", "--vendor", "amd")
    assert (never.returncode, never.stderr.count("\n")) == (1, 1)
    assert "INVALID_ARGUMENT" in never.stderr
    assert run("place", "--tenant", "t", "--count", "-3").returncode == 2
    assert run("release", document["lease"], "--tenant", "t").returncode == 0
    assert agent.commands


def test_hints_are_in_the_metadata(brain: EmbeddedBrain) -> None:
    """A newcomer that is sent away finds the time to come back under the agreed key."""
    brain.server._door = Door(per_s=0.001, burst=0)
    with grpc.insecure_channel(brain.address) as channel:
        stub = agent_pb2_grpc.PlacementBrainStub(channel)
        hello = pb.AgentMessage(hello=pb.Hello(node="z"))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Attach(iter([hello])))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    hints: dict[str, Any] = dict(iter(caught.value.trailing_metadata()))  # type: ignore[arg-type]
    assert int(hints[keepalive.RETRY_AFTER_KEY]) >= 200
