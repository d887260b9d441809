"""The local socket: the commands of the brain, for the command line on the same host.

Theory of operation. gRPC for Python does not tell a servicer who is on the other end of a unix
socket. So the public socket is ours: each connection is accepted here, its peer's uid is asked of
the kernel (`SO_PEERCRED`), and only then its bytes are relayed to gRPC's own socket, which lies
in a folder that nobody else may enter. The public socket is made in that folder, gets its mode
there and is renamed into place: it never exists with another mode, and a stale one is replaced
atomically. A lock file, not the socket, says that an agent is running.

Rules that stay true in here:

* No byte of a peer reaches gRPC before its credentials were checked.
* A command runs to its end even when its caller leaves; it is never run twice for one call.
* Watchers cannot use up the threads that commands need.
* `ControlClient.connect` says within milliseconds that no daemon listens, and imports no gRPC for
  it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from alloy_agent.errors import AlloyError, ConfigError, DaemonGoneError, NotPermittedError

if TYPE_CHECKING:
    import grpc

    from alloy_agent.proto import agent_pb2 as pb

LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
MAX_WATCHERS = 8
MAX_COMMANDS = 16
BACKLOG = 128
CONNECT_TIMEOUT_S = 2.0
RELAY_CHUNK_BYTES = 64 * 1024
MAX_SOCKET_PATH_BYTES = 107  # Source: unix(7), sun_path
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid. Source: unix(7), struct ucred

OnProgress = Callable[[int, int, str], None]


class NodeApi(Protocol):
    """What a node can be asked. Every method may be called from any thread, and may block.

    Documents are JSON of the schema that their name says (`alloy.devices/v1`), as UTF-8.
    """

    def devices(self) -> bytes:
        """Return the devices document."""
        ...

    def status(self) -> bytes:
        """Return the status document: versions, workers, brain, outbox, addresses."""
        ...

    def document(self, name: str, options: Mapping[str, str]) -> bytes:
        """Return another document by name.

        Raises:
            ConfigError: There is no such document.
        """
        ...

    def plan(self, layout: str, source: str, name: str | None) -> bytes:
        """Return the plan document for the text of a layout file; changes nothing."""
        ...

    def apply(  # noqa: PLR0913 - a command has its parts
        self,
        layout: str,
        source: str,
        name: str | None,
        *,
        expected: Mapping[str, int],
        disruptive: bool,
        on_progress: OnProgress,
    ) -> bytes:
        """Apply a layout and return the apply document.

        Args:
            layout: Text of the layout file.
            source: Where it came from, for messages.
            name: Which of its layouts; None: the only one.
            expected: Generations (by partition id) that must still hold; empty: any.
            disruptive: Whether more than partitions may be interrupted.
            on_progress: Called with (done, total, text) as steps end.
        """
        ...

    def audit(self, subjects: tuple[str, ...], checks: tuple[str, ...]) -> bytes:
        """Run the checks once and return the audit document."""
        ...

    def access(self, partition: str, tenant: str, pid: int | None) -> bytes:
        """Bind a tenant to a partition under a standalone lease; return the access document."""
        ...

    def reset(self, device: str) -> bytes:
        """Reset a device that nobody is on; return the reset document."""
        ...

    def release_access(self, partition: str, tenant: str) -> bytes:
        """Give a standalone lease back; return the status of it."""
        ...

    def handle(self, command: pb.BrainMessage) -> pb.Reply:
        """Do what changes only this node's books: leases, drains, policies. Idempotent by id."""
        ...

    def watch(
        self, stop: threading.Event, interval_s: float, kinds: tuple[str, ...]
    ) -> Iterator[pb.AgentMessage]:
        """Yield what happens until `stop` is set; looks at `stop` at least once a second."""
        ...


# --- commands, for the socket and for the brain alike --------------------------------------------


def answer(
    api: NodeApi, command: pb.BrainMessage, emit: Callable[[pb.AgentMessage], None]
) -> BaseException | None:
    """Run one command: `emit` any number of progress messages and exactly one reply.

    Returns:
        None, or the exception that shows a defect of the agent; the caller decides what then.
    """
    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.proto.failures import failure_reply

    defect: BaseException | None = None
    try:
        reply = _run(api, command, emit)
    except AlloyError as failure:
        reply = failure_reply(command.id, failure)
    except Exception as failure:  # the caller gets an answer, the daemon the defect
        LOG.exception("command_defect", extra={"command": command.id})
        reply = failure_reply(command.id, failure)
        defect = failure
    reply.command_id = command.id
    emit(pb.AgentMessage(reply=reply))
    return defect


def _run(
    api: NodeApi, command: pb.BrainMessage, emit: Callable[[pb.AgentMessage], None]
) -> pb.Reply:
    """Return the reply of the room that a command is for."""
    from alloy_agent.proto.failures import unknown_command_reply

    kind = command.WhichOneof("body")
    if kind is None:
        return unknown_command_reply(command.id, "a command that this agent does not know")
    if kind == "query":
        return _query(api, command.query)
    if kind == "apply_layout":
        return _apply(api, command, emit)
    if kind in ("audit", "reset_device"):
        return _document(_done(api, command))
    if kind == "access":
        return _access(api, command.access)
    return api.handle(command)


def _query(api: NodeApi, query: pb.Query) -> pb.Reply:
    if query.document == "devices":
        return _document(api.devices())
    if query.document == "status":
        return _document(api.status())
    return _document(api.document(query.document, dict(query.options)))


def _done(api: NodeApi, command: pb.BrainMessage) -> bytes:
    """Return the document of an audit or a reset, after it was done."""
    if command.WhichOneof("body") == "audit":
        return api.audit(tuple(command.audit.subjects), tuple(command.audit.checks))
    return api.reset(command.reset_device.device)


def _access(api: NodeApi, access: pb.Access) -> pb.Reply:
    if access.release:
        return _document(api.release_access(access.partition, access.tenant))
    return _document(api.access(access.partition, access.tenant, access.pid or None))


def _apply(
    api: NodeApi, command: pb.BrainMessage, emit: Callable[[pb.AgentMessage], None]
) -> pb.Reply:
    """Return the plan, or the report of applying it with progress on the way."""
    from alloy_agent.proto import agent_pb2 as pb

    wanted = command.apply_layout
    name = wanted.layout_name or None
    try:
        layout = wanted.layout.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{wanted.source or 'layout'}: not UTF-8 at byte {exc.start}") from exc
    if wanted.dry_run:
        return _document(api.plan(layout, wanted.source, name))

    def on_progress(done: int, total: int, text: str) -> None:
        progress = pb.Progress(command_id=command.id, done=done, total=total, text=text)
        emit(pb.AgentMessage(progress=progress))

    expected = {ref.id: ref.generation for ref in wanted.expected}
    report = api.apply(
        layout,
        wanted.source,
        name,
        expected=expected,
        disruptive=wanted.disruptive,
        on_progress=on_progress,
    )
    return _document(report)


def _document(json: bytes) -> pb.Reply:
    """Return a reply that carries one document."""
    import msgspec

    from alloy_agent.proto import agent_pb2 as pb

    schema = str(msgspec.json.decode(json).get("schema", ""))
    return pb.Reply(status=pb.STATUS_OK, document=pb.Document(schema=schema, json=json))


# --- server --------------------------------------------------------------------------------------


class ControlServer:
    """Serves a `NodeApi` on a unix socket from construction of `start()` until `stop()`.

    Args:
        api: What commands are for.
        path: Of the socket; its folder is made when missing.
        allowed_uids: Who may connect besides root and the agent's own user.
        on_defect: Told of an exception that no command may raise; called on the command's thread.
    """

    def __init__(
        self,
        api: NodeApi,
        path: Path,
        *,
        allowed_uids: frozenset[int] = frozenset(),
        on_defect: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._api = api
        self._path = path
        self._allowed = allowed_uids | {0, os.geteuid()}
        self._on_defect = on_defect
        self._stop = threading.Event()
        self._watchers = threading.BoundedSemaphore(MAX_WATCHERS)
        self._cleanup = contextlib.ExitStack()

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: Another agent serves this socket, or it cannot be made here.
        """
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._cleanup = stack.pop_all()
        LOG.info("control_listening", extra={"socket": str(self._path)})

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Take lock, private folder, gRPC server and public socket, in this order."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_sole_server(self._path))
        private = stack.enter_context(_private_folder(self._path))
        inner = private / "g"
        if len(os.fsencode(inner)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{self._path}: too long for a socket", cure="set a shorter socket_path"
            )
        server = self._grpc_server(inner)
        stack.callback(_stop_grpc, server)
        listener = stack.enter_context(_public_socket(self._path, private))
        relay = _Relay(listener, inner, self._allowed)
        relay.start()
        stack.callback(relay.stop)
        stack.callback(self._stop.set)

    def stop(self) -> None:
        """Stop listening, let running commands end, remove the socket. Harmless when repeated."""
        self._cleanup.close()

    def __enter__(self) -> ControlServer:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _grpc_server(self, inner: Path) -> grpc.Server:
        """Return a started gRPC server on the private socket, with health and reflection."""
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        from alloy_agent.proto import agent_pb2, agent_pb2_grpc, keepalive

        workers = MAX_COMMANDS + MAX_WATCHERS + 4  # four for health and reflection
        server = grpc.server(
            futures.ThreadPoolExecutor(workers, thread_name_prefix="control"),
            options=keepalive.server_options(),
            maximum_concurrent_rpcs=workers,
        )
        name = agent_pb2.DESCRIPTOR.services_by_name["NodeAgent"].full_name
        agent_pb2_grpc.add_NodeAgentServicer_to_server(_servicer(self), server)
        checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        for service in ("", name):
            checks.set(service, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            (name, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            server.add_insecure_port(f"unix:{inner}")
        except RuntimeError as exc:
            raise ConfigError(f"{inner}: gRPC cannot listen") from exc
        server.start()
        return server

    def run_command(self, command: pb.BrainMessage) -> Iterator[pb.AgentMessage]:
        """Yield what one command says; it runs on a thread of its own and ends whoever listens."""
        out: queue.SimpleQueue[pb.AgentMessage] = queue.SimpleQueue()

        def run() -> None:
            defect = answer(self._api, command, out.put)
            if defect is not None and self._on_defect is not None:
                self._on_defect(defect)

        threading.Thread(target=run, name="control-command").start()
        while True:
            message = out.get()
            yield message
            if message.WhichOneof("body") == "reply":
                return

    def watch(
        self, stop: threading.Event, request: pb.WatchNodeRequest
    ) -> Iterator[pb.AgentMessage]:
        """Yield what happens on the node until the caller or the server leaves."""
        if not self._watchers.acquire(blocking=False):
            raise AlloyError(f"{MAX_WATCHERS} watchers are connected", cure="end one of them")
        try:
            both = _Either(stop, self._stop)
            yield from self._api.watch(both, request.interval_ms / 1e3, tuple(request.kinds))
        finally:
            self._watchers.release()


class _Either(threading.Event):
    """An event that also counts as set when another one is."""

    def __init__(self, *others: threading.Event) -> None:
        super().__init__()
        self._others = others

    def is_set(self) -> bool:
        return super().is_set() or any(other.is_set() for other in self._others)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in slices, so that any of the events ends it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if left <= 0:
                break
            self._others[0].wait(left)
        return self.is_set()


def _servicer(server: ControlServer) -> Any:
    """Return the gRPC servicer, a thin skin over `ControlServer`."""
    import grpc

    from alloy_agent.proto import agent_pb2_grpc

    class Servicer(agent_pb2_grpc.NodeAgentServicer):
        def Command(self, request: Any, context: Any) -> Any:  # noqa: N802
            yield from server.run_command(request)

        def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
            stop = threading.Event()
            context.add_callback(stop.set)
            try:
                yield from server.watch(stop, request)
            except AlloyError as failure:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(failure))

    return Servicer()


def _stop_grpc(server: grpc.Server) -> None:
    server.stop(grace=2.0).wait(5.0)


@contextlib.contextmanager
def _sole_server(path: Path) -> Iterator[None]:
    """Hold the lock that says an agent serves this socket.

    The file stays behind: removing a lock file lets two holders exist.

    Raises:
        ConfigError: Another process holds it.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise ConfigError(f"{lock}: {exc.strerror}", cure="run as root or set socket_path") from exc
    try:
        _lock(descriptor, path)
        with contextlib.suppress(OSError):  # the disk is full; the lock holds without our name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"{path}: an agent (pid {holder}) already serves it",
            cure="stop that agent or set another socket_path",
        ) from exc


@contextlib.contextmanager
def _private_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder beside the socket that only the agent's user may enter."""
    folder = path.with_name(f".{path.name}.d")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{folder}: not a folder of the agent's user", cure="remove it")
    folder.chmod(0o700)
    _empty(folder)
    try:
        yield folder
    finally:
        _empty(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            entry.unlink()


@contextlib.contextmanager
def _public_socket(path: Path, private: Path) -> Iterator[socket.socket]:
    """Give the listening socket at `path`, mode 0600 from its first moment; removed at the end.

    Raises:
        ConfigError: Something that is no socket is in the way, or the path is too long.
    """
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"{path}: is there and is no socket", cure="remove it or set socket_path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made = private / "p"
    try:
        listener.bind(str(made))
        made.chmod(0o600)
        listener.listen(BACKLOG)
        inode = made.lstat().st_ino
        made.rename(path)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"{path}: cannot listen: {exc.strerror or exc}") from exc
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == inode:
                path.unlink()


class _Relay:
    """Accepts, checks who it is, and joins the connection with gRPC's private socket."""

    def __init__(self, listener: socket.socket, inner: Path, allowed: frozenset[int]) -> None:
        self._listener = listener
        self._inner = str(inner)
        self._allowed = allowed
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="control-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(5.0)
        with self._lock:
            connections = tuple(self._open)
        for connection in connections:
            _shut(connection)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                peer, _ = self._listener.accept()
            except OSError as exc:
                if self._stopping or exc.errno in {errno.EBADF, errno.EINVAL}:
                    return
                LOG.warning("control_accept_failed", extra={"cause": str(exc)})
                time.sleep(0.1)  # out of descriptors: wait, do not spin
                continue
            if not self._admit(peer):
                peer.close()

    def _admit(self, peer: socket.socket) -> bool:
        """Start relaying for a peer that may connect; whether it may."""
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, _gid = CREDENTIALS.unpack(raw)
        if uid not in self._allowed:
            LOG.warning("control_peer_refused", extra={"uid": uid, "pid": pid})
            return False
        if not self._slots.acquire(blocking=False):
            LOG.warning("control_full", extra={"uid": uid, "pid": pid, "limit": MAX_CONNECTIONS})
            return False
        threading.Thread(target=self._join, args=(peer,), name="control-peer", daemon=True).start()
        return True

    def _join(self, peer: socket.socket) -> None:
        """Relay both ways until either side ends; open nothing for a peer that only looks in."""
        try:
            with peer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
                self._track(peer, inner)
                first = peer.recv(RELAY_CHUNK_BYTES)
                if not first:
                    return
                inner.connect(self._inner)
                inner.sendall(first)
                back = threading.Thread(target=_pump, args=(inner, peer), daemon=True)
                back.start()
                _pump(peer, inner)
                back.join()
        except OSError as exc:
            LOG.debug("control_relay_ended", extra={"cause": str(exc)})
        finally:
            self._untrack(peer)
            self._slots.release()

    def _track(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.update(connections)
        if self._stopping:
            for connection in connections:
                _shut(connection)

    def _untrack(self, peer: socket.socket) -> None:
        with self._lock:
            self._open = {one for one in self._open if one is not peer and one.fileno() >= 0}


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Move bytes until the source ends or either side breaks, then end both."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(RELAY_CHUNK_BYTES):
            sink.sendall(chunk)
    _shut(source)
    _shut(sink)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# --- client --------------------------------------------------------------------------------------


class ControlClient:
    """The command line's way to a running daemon."""

    def __init__(self, path: Path) -> None:
        import grpc

        from alloy_agent.proto import agent_pb2_grpc, keepalive

        self._path = path
        options = (*keepalive.client_options(), ("grpc.enable_http_proxy", 0))
        self._channel = grpc.insecure_channel(f"unix:{path.absolute()}", options=options)
        self._stub = agent_pb2_grpc.NodeAgentStub(self._channel)

    @classmethod
    def connect(cls, path: Path) -> ControlClient | None:
        """Return a client, or None when no daemon listens there.

        Raises:
            NotPermittedError: A daemon may listen, but this user may not ask it.
            AlloyError: A daemon listens, and too many ask it at once.
        """
        return cls(path) if _listens(path) else None

    def command(
        self, command: pb.BrainMessage, *, deadline_s: float | None = None
    ) -> Iterator[pb.AgentMessage]:
        """Yield progress and at last the reply of one command.

        Raises:
            AlloyError: Re-made from the wire, when the command was refused or failed.
        """
        import grpc

        from alloy_agent.proto.failures import raise_failure

        if not command.id:
            command.id = uuid.uuid4().hex
        call = self._stub.Command(command, timeout=deadline_s)
        try:
            for message in call:
                if message.WhichOneof("body") == "reply":
                    raise_failure(message.reply)
                yield message
        except grpc.RpcError as exc:
            raise self._broken(exc) from exc
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def watch(
        self, *, interval_s: float = 0.0, kinds: tuple[str, ...] = ()
    ) -> Iterator[pb.AgentMessage]:
        """Yield what happens on the node until the generator is closed.

        Raises:
            AlloyError: The daemon has ended or has too many watchers.
        """
        import grpc

        from alloy_agent.proto import agent_pb2 as pb

        call = self._stub.Watch(pb.WatchNodeRequest(interval_ms=int(interval_s * 1e3), kinds=kinds))
        try:
            yield from call
        except grpc.RpcError as exc:
            raise self._broken(exc) from exc
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _broken(self, exc: grpc.RpcError) -> AlloyError:
        """Return what a failed call means to a person."""
        code = getattr(exc, "code", lambda: None)()
        detail = " ".join(str(getattr(exc, "details", lambda: "")()).split())
        name = code.name.lower().replace("_", " ") if code is not None else "failed"
        if code is not None and code.name == "UNAVAILABLE":
            return DaemonGoneError(
                f"{self._path}: the daemon ended, or is too busy, before it answered ({detail})",
                cure="look at the log of `alloy-agent run`; what was begun goes on when it starts",
            )
        return AlloyError(
            f"{self._path}: the daemon's answer ended early ({name}: {detail})",
            cure="look at the log of `alloy-agent run`",
        )

    def document(self, command: pb.BrainMessage, on_progress: OnProgress | None = None) -> bytes:
        """Return the JSON document that one command ends with."""
        for message in self.command(command):
            if message.WhichOneof("body") == "reply":
                return message.reply.document.json
            if on_progress is not None and message.WhichOneof("body") == "progress":
                step = message.progress
                on_progress(step.done, step.total, step.text)
        raise AlloyError(f"{self._path}: the daemon gave no reply")

    def query(self, name: str, options: Mapping[str, str] | None = None) -> bytes:
        """Return a document by name: "devices", "status", "top", "doctor", ..."""
        from alloy_agent.proto import agent_pb2 as pb

        return self.document(pb.BrainMessage(query=pb.Query(document=name, options=options or {})))

    def devices(self) -> bytes:
        """Return the devices document."""
        return self.query("devices")

    def status(self) -> bytes:
        """Return the status document."""
        return self.query("status")

    def plan(self, layout: str, source: str, name: str | None = None) -> bytes:
        """Return the plan document for the text of a layout file."""
        return self.document(_layout_command(layout, source, name, dry_run=True))

    def apply(  # noqa: PLR0913 - a command has its parts
        self,
        layout: str,
        source: str,
        name: str | None = None,
        *,
        expected: Mapping[str, int] | None = None,
        disruptive: bool = False,
        on_progress: OnProgress | None = None,
    ) -> bytes:
        """Apply a layout and return the apply document."""
        from alloy_agent.proto import agent_pb2 as pb

        command = _layout_command(layout, source, name, dry_run=False)
        command.apply_layout.disruptive = disruptive
        command.apply_layout.expected.extend(
            pb.PartitionRef(id=key, generation=number) for key, number in (expected or {}).items()
        )
        return self.document(command, on_progress)

    def audit(self, subjects: tuple[str, ...] = (), checks: tuple[str, ...] = ()) -> bytes:
        """Run the checks once and return the audit document."""
        from alloy_agent.proto import agent_pb2 as pb

        return self.document(pb.BrainMessage(audit=pb.Audit(subjects=subjects, checks=checks)))

    def access(self, partition: str, tenant: str, pid: int | None = None) -> bytes:
        """Return the access document of a partition, bound to the tenant."""
        from alloy_agent.proto import agent_pb2 as pb

        asked = pb.Access(partition=partition, tenant=tenant, pid=pid or 0)
        return self.document(pb.BrainMessage(access=asked))

    def reset(self, device: str) -> bytes:
        """Return the reset document of a device, after it was reset."""
        from alloy_agent.proto import agent_pb2 as pb

        return self.document(pb.BrainMessage(reset_device=pb.ResetDevice(device=device)))

    def release_access(self, partition: str, tenant: str) -> bytes:
        """Give back what `access` took."""
        from alloy_agent.proto import agent_pb2 as pb

        asked = pb.Access(partition=partition, tenant=tenant, release=True)
        return self.document(pb.BrainMessage(access=asked))

    def join(self, wish: pb.Join) -> bytes:
        """Have a process share a device; return what its command needs."""
        from alloy_agent.proto import agent_pb2 as pb

        return self.document(pb.BrainMessage(join=wish))

    def rate_policy(self, policy: pb.SetRatePolicy) -> bytes:
        """Set what a shared device goes by; return the document of it."""
        from alloy_agent.proto import agent_pb2 as pb

        return self.document(pb.BrainMessage(set_rate_policy=policy))

    def close(self) -> None:
        """Let go of the daemon."""
        self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _listens(path: Path) -> bool:
    """Return whether a daemon listens; never no because it is busy.

    Raises:
        NotPermittedError: This user may not ask.
        AlloyError: It is too busy to say.
    """
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except BlockingIOError:  # its queue of connections is full: somebody listens
                pass
            except PermissionError as exc:
                raise NotPermittedError(
                    f"{path}: not permitted for uid {os.geteuid()}", cure="run as root"
                ) from exc
            except OSError:  # not there, stale, no socket, name too long: nobody listens
                return False
            else:
                return True
        if time.monotonic() >= deadline_s:
            raise AlloyError(f"{path}: the daemon is busy", cure="try again in a moment")
        time.sleep(0.01)


def _layout_command(
    layout: str, source: str, name: str | None, *, dry_run: bool
) -> pb.BrainMessage:
    from alloy_agent.proto import agent_pb2 as pb

    wanted = pb.ApplyLayout(
        layout=layout.encode(), source=source, layout_name=name or "", dry_run=dry_run
    )
    return pb.BrainMessage(apply_layout=wanted)
