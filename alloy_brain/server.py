"""The brain as a server: agents attach, clients ask, everybody who watches is told.

Rules that stay true in here:

* Nothing that a peer sends ends the process: it ends at most its own stream.
* An event is acknowledged when it is on disk.
* A stream that says the name of a node takes that node over: the older one is a half-open ghost.
* Too many newcomers at once are sent away with a time to come back, each with another.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from alloy_agent.model import Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import agent_pb2_grpc, keepalive, placement_pb2_grpc
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain import identity as identities
from alloy_brain.answers import Answers
from alloy_brain.broker import Broker, boottime_s
from alloy_brain.facts import Policy
from alloy_brain.fleet import Fleet, Node
from alloy_brain.ledger import Event, Ledger, LedgerError
from alloy_brain.link import Link, LinkDownError

LOG = logging.getLogger(__name__)

FIRST_WORD_S: Final = 10.0  # how long a peer may take for its Hello
MAX_EVENTS: Final = 4096  # that wait for the disk, of all nodes
MAX_NAME: Final = 253
SILENCE_LOOK_S: Final = 1.0


class BrainSettings(Value, frozen=True, kw_only=True):
    """How one brain serves.

    At most `attach_per_s` new streams are taken in a second, with a reserve of `attach_burst`.
    """

    address: str = "127.0.0.1:7443"
    ledger: str = "brain.db"
    name: str = "brain"
    least_term: int = 1
    identity: identities.Identity = identities.Identity()
    policy: Policy = Policy()
    heartbeat_ms: int = 5_000
    telemetry_interval_ms: int = 1_000
    attach_per_s: float = 150.0
    attach_burst: int = 300


class Door:
    """Lets newcomers in at a pace, and tells the others when to come back."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._looked_s = boottime_s()
        self._sent_away: collections.deque[float] = collections.deque()

    def enter(self, now_s: float) -> int:
        """Return 0 for a newcomer who may enter, else milliseconds to wait."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._looked_s) * self._per_s)
        self._looked_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0
        while self._sent_away and self._sent_away[0] < now_s - 10.0:
            self._sent_away.popleft()
        self._sent_away.append(now_s)
        expected_s = len(self._sent_away) / self._per_s
        return round(1e3 * (0.2 + random.uniform(0.0, max(0.5, expected_s))))  # noqa: S311 - spreads load


class BrainServer(agent_pb2_grpc.PlacementBrainServicer):
    """One brain, from `start()` to `stop()`, on one event loop.

    Args:
        settings: Where and how.
        boot: The boot id of this host.

    Raises:
        LedgerError: The ledger cannot be opened.
    """

    def __init__(self, settings: BrainSettings, boot: str) -> None:
        identities.check(settings.address, settings.identity)
        self.settings = settings
        self.ledger = Ledger(settings.ledger, boot)
        self.ledger.begin_term(settings.least_term)
        self.fleet = Fleet()
        self.broker = Broker(self.fleet, self.ledger, settings.policy, settings.name)
        self.answers = Answers(self.broker, self.fleet, settings.identity)
        self.port = 0
        self.samples = 0
        self.events = 0
        self.on_event: Callable[[str, pb.AgentMessage], object] = lambda _node, _message: None
        self.on_sample: Callable[[str, pb.Fast], object] = lambda _node, _fast: None
        self._door = Door(settings.attach_per_s, settings.attach_burst)
        self._events: asyncio.Queue[tuple[Link, Event]] = asyncio.Queue(MAX_EVENTS)
        self._server: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen.

        Raises:
            IdentityError: The address cannot be used.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        health: Any = importlib.import_module("grpc_health.v1.health")
        self._server = _aio().server(options=list(keepalive.server_options()))
        agent_pb2_grpc.add_PlacementBrainServicer_to_server(self, self._server)
        placement_pb2_grpc.add_PlacementServicer_to_server(self.answers, self._server)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, self._server)
        names = [
            pb.DESCRIPTOR.services_by_name["PlacementBrain"].full_name,
            pl.DESCRIPTOR.services_by_name["Placement"].full_name,
        ]
        reflected = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)
        for name in ("", *names):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.port = self._listen()
        await self._server.start()
        self._spawn(self._write_events())
        self._spawn(self._watch_silence())
        LOG.info(
            "serving",
            extra={
                "what": "brain",
                "addresses": [self.address],
                "term": self.ledger.term,
                "ledger": self.ledger.url.rpartition("@")[2],
                "leases": len(self.broker.leases),
                "tls": self.settings.identity.secure,
            },
        )

    def _listen(self) -> int:
        address, identity = self.settings.address, self.settings.identity
        try:
            if identity.secure:
                port = self._server.add_secure_port(address, identities.credentials(identity))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as exc:
            raise identities.IdentityError(
                f"{address}: it cannot be listened on: choose another address, or end who has it"
            ) from exc
        return int(port)

    @property
    def address(self) -> str:
        """Return where it listens, its port filled in."""
        host, colon, port = self.settings.address.rpartition(":")
        if colon and port == "0" and not self.settings.address.startswith("unix"):
            return f"{host}:{self.port}"
        return self.settings.address

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop serving; leases stay as they are."""
        for link in list(self.broker.links.values()):
            link.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.broker.written()
        self.broker.stop()
        self.ledger.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            failure = task.exception()
            if isinstance(failure, (LedgerError, LinkDownError)):
                LOG.error("work_failed", extra={"reason": str(failure)})
            else:
                LOG.error("defect", exc_info=failure)

    # --- streams ----------------------------------------------------------------------------------

    async def Attach(  # type: ignore[override]  # noqa: N802 - the name in the proto
        self, incoming: AsyncIterator[pb.AgentMessage], context: Any
    ) -> None:
        """Serve one agent until either side ends the stream."""
        del incoming  # read through the context, which costs less
        hello = await self._greet(context)
        if hello is None:
            return
        node = self.fleet.node(hello.node)
        link = Link(hello.node, self.ledger.term)
        older = self.broker.links.get(hello.node)
        if older is not None:
            older.close()
            LOG.info("stream_replaced", extra={"node": hello.node})
        head = await self.broker.on_disk(self.ledger.head, hello.node, hello.epoch)
        self.broker.links[hello.node] = link
        node.hello(hello, boottime_s())
        node.last_sequence = head
        await context.write(self._welcome(head))
        self.answers.node_changed(node)
        LOG.info("agent_attached", extra=_who(hello, head))
        writer = asyncio.ensure_future(_write(link, context))
        self._spawn(self.broker.attached(hello.node, hello.leases))
        try:
            await self._read(node, link, context, writer)
        finally:
            link.close()
            writer.cancel()
            if self.broker.links.get(hello.node) is link:
                del self.broker.links[hello.node]
                node.connected = False
                self.answers.node_changed(node)
            LOG.info("agent_left", extra={"node": hello.node})

    async def _greet(self, context: Any) -> pb.Hello | None:
        """Return the Hello of a peer that may enter; others are sent away with the reason."""
        import grpc

        wait_ms = self._door.enter(boottime_s())
        if wait_ms:
            hint = ((keepalive.RETRY_AFTER_KEY, str(wait_ms)),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many at once", hint)
        try:
            first = await asyncio.wait_for(context.read(), FIRST_WORD_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came")
        if not isinstance(first, pb.AgentMessage) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is no Hello")
        hello: pb.Hello = first.hello
        if not 0 < len(hello.node) <= MAX_NAME or not hello.node.isprintable():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the node has no name")
        pattern = self.settings.identity.spiffe_nodes
        why = identities.refusal(pattern, context.auth_context(), hello.node)
        if why:
            LOG.warning("agent_refused", extra={"node": hello.node, "reason": why})
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"node {hello.node}: {why}")
        if hello.brain_epoch > self.ledger.term:
            why = f"it obeys term {hello.brain_epoch}, this brain has {self.ledger.term}"
            LOG.error(
                "older_brain",
                extra={
                    "node": hello.node,
                    "reason": why,
                    "cure": "stop this brain, or start it with --term above that",
                },
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"node {hello.node}: {why}")
        return hello

    def _welcome(self, head: int) -> pb.BrainMessage:
        welcome = pb.Welcome(
            epoch=self.ledger.term,
            brain=self.settings.name,
            resume_after=head,
            heartbeat_ms=self.settings.heartbeat_ms,
            telemetry_interval_ms=self.settings.telemetry_interval_ms,
        )
        return pb.BrainMessage(epoch=self.ledger.term, welcome=welcome)

    async def _read(
        self, node: Node, link: Link, context: Any, writer: asyncio.Future[None]
    ) -> None:
        """Take what an agent says until its stream ends."""
        end = _aio().EOF
        while not link.closed and not writer.done():
            message = await context.read()
            if message is end:
                return
            node.heard_s = boottime_s()
            if message.sequence:
                await self._take_event(node, link, message)
            else:
                self._take(node, link, message)

    def _take(self, node: Node, link: Link, message: pb.AgentMessage) -> None:
        """Take a message that is no event."""
        kind = message.WhichOneof("body")
        if kind == "fast":
            self.samples += 1
            node.fast(message.fast, node.heard_s)
            self.on_sample(node.name, message.fast)
        elif kind == "reply":
            link.replied(message.reply)
        elif kind == "inventory":
            node.inventory(message.inventory)
            self.answers.node_changed(node)
        elif kind == "partition_state":
            node.partition_state(message.partition_state)
            self.answers.node_changed(node)
        elif kind == "echo" and not message.echo.reply:
            link.send(pb.BrainMessage(echo=pb.Echo(token=message.echo.token, reply=True)))
        elif kind == "outbox_notice":
            self.answers.told(node.name, outbox_notice=message.outbox_notice)

    async def _take_event(self, node: Node, link: Link, message: pb.AgentMessage) -> None:
        """Act on an event and queue it for the disk; a full queue makes the agent wait."""
        kind = str(message.WhichOneof("body") or "unknown")
        fresh = message.sequence > node.last_sequence
        if fresh:
            node.last_sequence = message.sequence
            self.events += 1
            self._act(node, kind, message)
            self.on_event(node.name, message)
        event = Event(
            node=node.name,
            epoch=message.epoch,
            sequence=message.sequence,
            kind=kind,
            body=message.SerializeToString(),
        )
        await self._events.put((link, event))

    def _act(self, node: Node, kind: str, message: pb.AgentMessage) -> None:
        if kind == "health":
            node.health(message.health)
            self.answers.told(node.name, health=message.health)
            self.answers.node_changed(node)
        elif kind == "finding":
            self.answers.told(node.name, finding=message.finding)
        elif kind == "lease_change":
            change = message.lease_change
            node.lease_change(change)
            if change.lease.state == pb.LEASE_STATE_FREE:
                self._spawn(self.broker.ended(change.lease.id, change.cause))

    async def _write_events(self) -> None:
        """Put events on disk, as many at once as are there, and acknowledge them."""
        while True:
            batch = [await self._events.get()]
            while not self._events.empty() and len(batch) < MAX_EVENTS:
                batch.append(self._events.get_nowait())
            try:
                await self.broker.on_disk(self.ledger.keep, [event for _, event in batch])
            except LedgerError as exc:
                reason = {"reason": str(exc), "count": len(batch)}
                LOG.error("events_not_kept", extra=reason)  # noqa: TRY400 - one line, explained
                for link, _ in batch:
                    link.close()  # not acknowledged: they come again
                await asyncio.sleep(1.0)
                continue
            heads: dict[int, tuple[Link, Event]] = {}
            for link, event in batch:
                heads[link.number] = (link, event)
            for link, event in heads.values():
                _acknowledge(link, event)

    async def _watch_silence(self) -> None:
        """End streams of agents that say nothing: half-open, or hung."""
        limit_s = 3 * self.settings.heartbeat_ms / 1e3
        while True:
            await asyncio.sleep(SILENCE_LOOK_S)
            now_s = boottime_s()
            for name, link in list(self.broker.links.items()):
                silent_s = now_s - self.fleet.node(name).heard_s
                if silent_s > limit_s:
                    LOG.warning("agent_silent", extra={"node": name, "silent_s": round(silent_s)})
                    link.close()


async def _write(link: Link, context: Any) -> None:
    """Write what a link has, until it has no more; then cancel the call, which may be hung."""
    try:
        while (message := await link.outgoing()) is not None:
            await context.write(message)
    finally:
        cancel = getattr(context, "cancel", None)
        if link.closed and cancel is not None:
            cancel()


def _aio() -> Any:
    """Return `grpc.aio`, which the type stubs do not know."""
    return importlib.import_module("grpc.aio")


def _acknowledge(link: Link, event: Event) -> None:
    try:
        link.send(pb.BrainMessage(ack=pb.Ack(sequence=event.sequence, epoch=event.epoch)))
    except LinkDownError:
        return  # it is told where to resume when it comes back


def _who(hello: pb.Hello, head: int) -> dict[str, Any]:
    return {
        "node": hello.node,
        "boot_id": hello.boot_id,
        "version": hello.agent_version,
        "attempt": hello.attempt,
        "resume_after": head,
        "leases": len(hello.leases),
    }


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
