"""The local socket: who may speak, what a command answers, and what is left after crashes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from alloy_agent import control
from alloy_agent.control import ControlClient, ControlServer, OnProgress
from alloy_agent.errors import (
    AlloyError,
    ConfigError,
    DaemonGoneError,
    InvariantError,
    NotPermittedError,
    PlanImpossibleError,
)
from alloy_agent.proto import agent_pb2 as pb


def document(name: str, **fields: object) -> bytes:
    return json.dumps({"schema": f"alloy.{name}/v1", **fields}).encode()


class Node:
    """A node that records what it is asked."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, str, str | None, dict[str, int]]] = []
        self.handled: list[pb.BrainMessage] = []
        self.gate = threading.Event()
        self.gate.set()
        self.finished = threading.Event()

    def devices(self) -> bytes:
        return document("devices", devices=[])

    def status(self) -> bytes:
        return document("status", pid=os.getpid())

    def document(self, name: str, options: Mapping[str, str]) -> bytes:
        if name == "broken":
            raise InvariantError("a lease without pieces")
        if name != "top":
            raise ConfigError(f"document {name!r} is unknown", cure="ask for 'devices'")
        return document(name, options=dict(options))

    def plan(self, layout: str, source: str, name: str | None) -> bytes:
        if "impossible" in layout:
            raise PlanImpossibleError(f"{source}:1: 8g does not fit", cure="use 7g")
        return document("plan", steps=[layout, source, name])

    def apply(
        self,
        layout: str,
        source: str,
        name: str | None,
        *,
        expected: Mapping[str, int],
        disruptive: bool,
        on_progress: OnProgress,
    ) -> bytes:
        self.applied.append((layout, source, name, dict(expected)))
        for done in range(1, 4):
            on_progress(done, 3, f"step {done}")
        self.gate.wait(20)
        self.finished.set()
        return document("apply", steps=3)

    def audit(self, subjects: tuple[str, ...], checks: tuple[str, ...]) -> bytes:
        return document("audit", subjects=subjects, checks=checks)

    def access(self, partition: str, tenant: str, pid: int | None) -> bytes:
        return document("access", partition=partition, tenant=tenant, pid=pid)

    def reset(self, device: str) -> bytes:
        return document("reset", device=device)

    def release_access(self, partition: str, tenant: str) -> bytes:
        return document("access_released", partition=partition, tenant=tenant)

    def handle(self, command: pb.BrainMessage) -> pb.Reply:
        self.handled.append(command)
        return pb.Reply(status=pb.STATUS_OK, token=7)

    def watch(
        self, stop: threading.Event, interval_s: float, kinds: tuple[str, ...]
    ) -> Iterator[pb.AgentMessage]:
        sample = 0
        try:
            while not stop.wait(max(interval_s, 0.001)):
                sample += 1
                yield pb.AgentMessage(fast=pb.Fast(sample=sample))
        finally:  # a watcher that leaves while a message is under way closes the generator
            self.finished.set()


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent.sock"


@pytest.fixture
def server(node: Node, path: Path) -> Iterator[ControlServer]:
    with ControlServer(node, path) as running:
        yield running


@pytest.fixture
def client(server: ControlServer, path: Path) -> Iterator[ControlClient]:
    found = ControlClient.connect(path)
    assert found is not None
    with found:
        yield found


def test_documents_come_back_as_the_node_gave_them(client: ControlClient) -> None:
    """Each document command carries its arguments there and its JSON back, unchanged."""
    assert json.loads(client.devices())["devices"] == []
    assert json.loads(client.query("top", {"sort": "busy"}))["options"] == {"sort": "busy"}
    assert json.loads(client.plan("a: b", "f.yaml", "x"))["steps"] == ["a: b", "f.yaml", "x"]
    assert json.loads(client.plan("a: b", "f.yaml"))["steps"][2] is None
    assert json.loads(client.audit(("p1",), ("CPU-01",)))["checks"] == ["CPU-01"]
    assert json.loads(client.access("p1", "blue", 12))["pid"] == 12
    assert json.loads(client.access("p1", "blue"))["pid"] is None
    released = json.loads(client.release_access("p1", "blue"))
    assert released["schema"] == "alloy.access_released/v1"


def test_apply_shows_its_progress_in_order(client: ControlClient, node: Node) -> None:
    """Progress comes before the document, in order, and the expected generations arrive."""
    seen: list[tuple[int, int, str]] = []
    report = client.apply(
        "l", "f", None, expected={"d/p@0": 3}, on_progress=lambda *step: seen.append(step)
    )
    assert json.loads(report)["steps"] == 3
    assert seen == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]
    assert node.applied == [("l", "f", None, {"d/p@0": 3})]


def test_an_error_arrives_as_its_own_class(client: ControlClient) -> None:
    """Kind, message and cure of a failure survive the socket."""
    with pytest.raises(PlanImpossibleError) as caught:
        client.plan("impossible", "f.yaml")
    assert caught.value.message == "f.yaml:1: 8g does not fit"
    assert caught.value.cure == "use 7g"
    with pytest.raises(ConfigError, match="document 'horoscope' is unknown"):
        client.query("horoscope")


def test_layout_that_is_no_text_is_refused(client: ControlClient, node: Node) -> None:
    """Bytes that are not UTF-8 are refused by name, and nothing is applied."""
    command = pb.BrainMessage(apply_layout=pb.ApplyLayout(layout=b"\xff\xfe", source="f.yaml"))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        client.document(command)
    assert node.applied == []


def test_a_defect_is_answered_and_reported(node: Node, path: Path) -> None:
    """A broken invariant is never eaten: the caller gets an answer, the daemon the exception."""
    defects: list[BaseException] = []
    with ControlServer(node, path, on_defect=defects.append):
        client = ControlClient.connect(path)
        assert client is not None
        with client, pytest.raises(AlloyError, match="defect: InvariantError"):
            client.query("broken")
        deadline = time.monotonic() + 10
        while not defects and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [type(defect) for defect in defects] == [InvariantError]


def test_lease_commands_reach_the_node(client: ControlClient, node: Node) -> None:
    """What is no document goes to the node's books with its id."""
    command = pb.BrainMessage(id="c1", reserve=pb.Reserve(lease="l1"))
    (message,) = client.command(command)
    assert message.reply.token == 7
    assert message.reply.command_id == "c1"
    assert node.handled == [command]


def test_an_unknown_command_gets_a_typed_refusal(client: ControlClient) -> None:
    """A command of a later version is refused by name, and the socket goes on serving."""
    with pytest.raises(AlloyError, match="does not know"):
        list(client.command(pb.BrainMessage(id="c1")))
    assert json.loads(client.devices())["devices"] == []


def test_a_command_ends_though_its_caller_left(
    client: ControlClient, node: Node, path: Path
) -> None:
    """Leaving in the middle of an apply does not stop it half way."""
    node.gate.clear()
    call = client.command(pb.BrainMessage(apply_layout=pb.ApplyLayout(layout=b"x")))
    assert next(call).progress.done == 1
    call.close()  # type: ignore[attr-defined]
    client.close()
    node.gate.set()
    assert node.finished.wait(20)


def test_watch_streams_until_the_caller_leaves(client: ControlClient, node: Node) -> None:
    """A watcher gets messages, and its end ends the node's generator."""
    stream = client.watch(interval_s=0.001)
    samples = [next(stream).fast.sample for _ in range(3)]
    assert samples == [1, 2, 3]
    stream.close()  # type: ignore[attr-defined]
    assert node.finished.wait(20)


def test_watchers_that_left_keep_no_place(client: ControlClient, node: Node) -> None:
    """However a watcher leaves, its place is free again: many more than fit come in turn."""
    for _ in range(3 * control.MAX_WATCHERS):
        node.finished.clear()
        stream = client.watch(interval_s=0.001)
        assert next(stream).fast.sample == 1
        stream.close()  # type: ignore[attr-defined]
        assert node.finished.wait(20)


def test_watchers_cannot_starve_commands(server: ControlServer, path: Path) -> None:
    """With every place for watchers taken, one more is refused and commands still answer."""
    clients = [ControlClient(path) for _ in range(control.MAX_WATCHERS + 1)]
    streams = [one.watch(interval_s=0.01) for one in clients[: control.MAX_WATCHERS]]
    for stream in streams:
        next(stream)
    with pytest.raises(AlloyError, match="watchers are connected"):
        next(clients[-1].watch())
    assert json.loads(clients[-1].devices())["devices"] == []
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    for one in clients:
        one.close()


def test_health_and_reflection_are_served(server: ControlServer, path: Path) -> None:
    """The standard services answer, so that ordinary tools can look at the agent."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(f"unix:{path}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="alloy.agent.v1.NodeAgent"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = list(reflection.ServerReflectionInfo(iter([asked])))
        names = {service.name for service in listed.list_services_response.service}
        assert "alloy.agent.v1.NodeAgent" in names


def test_socket_mode_and_private_folder(server: ControlServer, path: Path) -> None:
    """Socket 0600, private folder 0700: nobody else can reach gRPC's own socket."""
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name(".agent.sock.d").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.host
def test_another_user_is_refused_even_past_the_mode(server: ControlServer, path: Path) -> None:
    """With the file mode opened by mistake, the kernel's word on the peer keeps others out."""
    for folder in (path.parent, *path.parent.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    path.chmod(0o666)
    for uid, talks in ((65534, False), (0, True)):
        child = os.fork()
        if child == 0:
            os._exit(_speaks_as(uid, path))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if talks else 0)


def _become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _speaks_as(uid: int, path: Path) -> int:
    """Return 1 when a server answers this user's HTTP/2 preface, 0 when it hangs up, 2 if lost."""
    try:
        _become(uid)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(str(path))
            try:
                peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                return 1 if peer.recv(100) else 0
            except (BrokenPipeError, ConnectionResetError):
                return 0
    except OSError:
        return 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.host
def test_client_without_permission_says_so(server: ControlServer, path: Path) -> None:
    """A user who may not open the socket is told, rather than acting beside the daemon."""
    for folder in (path.parent, *path.parent.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    child = os.fork()
    if child == 0:
        _become(65534)
        try:
            ControlClient.connect(path)
        except NotPermittedError as exc:
            os._exit(7 if "run as root" in str(exc) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_no_daemon_is_said_at_once(path: Path, tmp_path: Path) -> None:
    """Without a socket, with a stale one or with a plain file there is no client."""
    assert ControlClient.connect(path) is None
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    assert ControlClient.connect(stale) is None
    plain = tmp_path / "plain"
    plain.touch()
    assert ControlClient.connect(plain) is None
    assert ControlClient.connect(tmp_path / ("x" * 200)) is None


def test_a_busy_daemon_is_not_taken_for_none(tmp_path: Path) -> None:
    """With its queue of connections full a daemon is busy, and nobody acts beside it."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            while True:
                one = socket.socket(socket.AF_UNIX)
                one.setblocking(False)
                waiting.append(one)
                one.connect(str(path))
        with pytest.raises(AlloyError, match="busy"):
            ControlClient.connect(path)
        for one in waiting:
            one.close()


def test_looking_for_a_daemon_loads_no_grpc(path: Path) -> None:
    """A one-shot command pays for no wire library when no daemon runs."""
    script = (
        "import sys, pathlib; from alloy_agent.control import ControlClient; "
        "assert ControlClient.connect(pathlib.Path(sys.argv[1])) is None; "
        "print([m for m in sys.modules if m.split('.')[0] in ('grpc', 'google')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_stale_socket_is_replaced(node: Node, path: Path) -> None:
    """What a killed agent left behind does not hinder the next one."""
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    left = path.with_name(".agent.sock.d")
    left.mkdir(mode=0o755)
    (left / "grpc.sock").touch()
    with ControlServer(node, path):
        client = ControlClient.connect(path)
        assert client is not None
        with client:
            client.devices()
    assert not path.exists()
    assert not left.exists()


def test_a_file_in_the_way_is_never_removed(node: Node, path: Path) -> None:
    """A path that is no socket is refused by name and left alone."""
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        ControlServer(node, path).start()
    assert path.read_text() == "precious"


def test_path_too_long_is_named(node: Node, tmp_path: Path) -> None:
    """The kernel's limit on socket paths is told as such."""
    with pytest.raises(ConfigError, match="shorter socket_path"):
        ControlServer(node, tmp_path / ("x" * 100) / "agent.sock").start()


def test_second_server_is_refused_and_harms_nothing(server: ControlServer, path: Path) -> None:
    """A second agent on the same socket is refused by pid; the first goes on serving."""
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        ControlServer(Node(), path).start()
    client = ControlClient.connect(path)
    assert client is not None
    with client:
        client.devices()


def test_killed_server_is_replaced_while_clients_wait(path: Path) -> None:
    """After kill -9 the client is told, and a new agent takes the same socket."""
    script = textwrap.dedent(
        """
        import sys, time, pathlib
        sys.path.insert(0, sys.argv[2])
        from tests.test_control import Node
        from alloy_agent.control import ControlServer
        ControlServer(Node(), pathlib.Path(sys.argv[1])).start()
        print("up", flush=True)
        time.sleep(60)
        """
    )
    root = str(Path(__file__).resolve().parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path), root], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "up"
        client = ControlClient.connect(path)
        assert client is not None
        stream = client.watch(interval_s=0.01)
        next(stream)
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        with client, pytest.raises(DaemonGoneError, match="before it answered"):
            list(stream)
    assert ControlClient.connect(path) is None
    with ControlServer(Node(), path):
        again = ControlClient.connect(path)
        assert again is not None
        with again:
            again.devices()


def test_peers_that_say_nothing_or_garbage_do_no_harm(server: ControlServer, path: Path) -> None:
    """Silent, closing and babbling connections beyond the limit leave the socket serving."""
    silent = []
    for _ in range(control.MAX_CONNECTIONS + 8):
        one = socket.socket(socket.AF_UNIX)
        one.connect(str(path))
        silent.append(one)
    for one in silent:
        one.close()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as babbler:
            babbler.connect(str(path))
            babbler.sendall(os.urandom(4096))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            client = ControlClient.connect(path)
            assert client is not None
            with client:
                client.devices()
        except AlloyError:  # the queue is still worked off, and places are given back
            time.sleep(0.05)
            continue
        return
    pytest.fail("the socket did not come back")


def test_stop_leaves_nothing_behind(node: Node, path: Path) -> None:
    """Started and stopped ten times, the agent keeps no thread, descriptor, socket or folder."""
    threads = threading.active_count()
    with ControlServer(node, path):
        pass
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        with ControlServer(node, path):
            client = ControlClient.connect(path)
            assert client is not None
            with client:
                client.devices()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads + 2  # gRPC keeps at most two of its own
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # noqa: PTH208
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["agent.sock.lock"]
