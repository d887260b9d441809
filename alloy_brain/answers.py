"""What clients ask: Place, Release, Renew, Explain, ListNodes, ListLeases, Watch."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import keepalive, placement_pb2_grpc
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain import decision, draining
from alloy_brain import identity as identities
from alloy_brain.broker import Broker, RefusedError, boottime_s, granted, state_number
from alloy_brain.fleet import Fleet, Node
from alloy_brain.ledger import LeaseRow, LedgerError
from alloy_brain.requests import invalid, order_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

LOG = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAGE: Final = 1000
MAX_WATCH: Final = 1024  # events of one watcher that wait


class Watcher:
    """Somebody who watches; the oldest event goes when too many wait."""

    def __init__(self, node: str, kinds: frozenset[str]) -> None:
        self.node = node
        self.kinds = kinds
        self.queue: asyncio.Queue[pl.WatchEvent] = asyncio.Queue(MAX_WATCH)

    def tell(self, event: pl.WatchEvent) -> None:
        """Put an event that is wanted."""
        if self.node and event.node != self.node:
            return
        if self.kinds and str(event.WhichOneof("body")) not in self.kinds:
            return
        if self.queue.full():
            self.queue.get_nowait()
        self.queue.put_nowait(event)


class Answers(placement_pb2_grpc.PlacementServicer):
    """The service of clients.

    Args:
        broker: Decides.
        fleet: What is known.
        identity: Who may call.
    """

    def __init__(self, broker: Broker, fleet: Fleet, identity: identities.Identity) -> None:
        self._broker = broker
        self._fleet = fleet
        self._identity = identity
        self._watchers: set[Watcher] = set()
        self._sequence = itertools.count(1)
        broker.on_change = self._lease_changed
        broker.on_decision = self._decided

    # --- the service ------------------------------------------------------------------------------

    async def Place(  # noqa: N802 - the name in the proto
        self, request: pl.PlaceRequest, context: Any
    ) -> pl.PlaceReply:
        """Choose, reserve and commit."""

        async def call() -> pl.PlaceReply:
            return await self._broker.place(order_of(request))

        return await self._guarded(context, call())

    async def Release(  # noqa: N802 - the name in the proto
        self, request: pl.ReleaseRequest, context: Any
    ) -> pl.ReleaseReply:
        """Give a lease back."""

        async def call() -> pl.ReleaseReply:
            state: Any = await self._broker.release(request.lease, request.tenant, request.reason)
            return pl.ReleaseReply(lease=request.lease, state=state)

        return await self._guarded(context, call())

    async def Renew(  # noqa: N802 - the name in the proto
        self, request: pl.RenewRequest, context: Any
    ) -> pl.PlaceReply:
        """Commit or lengthen a lease."""
        return await self._guarded(context, self._broker.renew(request))

    async def Explain(  # noqa: N802 - the name in the proto
        self, request: pl.ExplainRequest, context: Any
    ) -> pl.Decision:
        """Return a decision record in full."""
        return await self._guarded(context, self._explain(request))

    async def ListNodes(  # noqa: N802 - the name in the proto
        self, request: pl.ListNodesRequest, context: Any
    ) -> pl.ListNodesReply:
        """Return what is known of nodes, by name."""
        return await self._guarded(context, self._list_nodes(request))

    async def ListLeases(  # noqa: N802 - the name in the proto
        self, request: pl.ListLeasesRequest, context: Any
    ) -> pl.ListLeasesReply:
        """Return the living leases, by id."""
        return await self._guarded(context, self._list_leases(request))

    async def DrainNode(  # noqa: N802 - the name in the proto
        self, request: pl.DrainNodeRequest, context: Any
    ) -> pl.DrainNodeReply:
        """Have a node take nothing new."""
        return await self._guarded(context, draining.drain(self._broker, request))

    async def UndrainNode(  # noqa: N802 - the name in the proto
        self, request: pl.UndrainNodeRequest, context: Any
    ) -> pl.DrainNodeReply:
        """Have a node take new work again."""
        return await self._guarded(context, draining.undrain(self._broker, request))

    async def Watch(  # noqa: N802 - the name in the proto
        self, request: pl.WatchRequest, context: Any
    ) -> AsyncIterator[pl.WatchEvent]:
        """Yield what changes, every node first."""
        await self._check_caller(context)
        watcher = Watcher(request.node, frozenset(request.kinds))
        for _, node in sorted(self._fleet.nodes.items())[:MAX_WATCH]:
            watcher.tell(self._event(node.name, node_changed=self.summary(node)))
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher.queue.get()
        finally:
            self._watchers.discard(watcher)

    # --- how --------------------------------------------------------------------------------------

    async def _guarded(self, context: Any, work: Awaitable[T]) -> T:
        """Return an answer, with every refusal turned into its status."""
        import grpc

        await self._check_caller(context, work)
        try:
            return await work
        except RefusedError as exc:
            await _abort(context, exc)
        except LedgerError as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(exc))
            raise AssertionError("abort raises") from exc

    async def _check_caller(self, context: Any, work: Any = None) -> None:
        import grpc

        why = identities.refusal(self._identity.spiffe_clients, context.auth_context(), "")
        if why:
            if work is not None:
                work.close()
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"client: {why}")

    async def _explain(self, request: pl.ExplainRequest) -> pl.Decision:
        if not (request.decision or request.lease or request.request):
            raise invalid("explain: nothing is named", "name a decision, a lease or a request")
        broker = self._broker
        await broker.written()
        body = await broker.on_disk(
            broker.ledger.decision,
            id_=request.decision,
            lease=request.lease,
            request=request.request,
        )
        if body is None:
            name = request.decision or request.lease or request.request
            refusal = pl.PlaceRefusal(
                reason=pb.REFUSAL_NOT_FOUND, message=f"{name[:64]}: there is no decision of it"
            )
            raise RefusedError("NOT_FOUND", refusal)
        record, text = await asyncio.to_thread(_told, body)
        return pl.Decision(
            id=record.id,
            request=record.request,
            lease=record.lease,
            placed=record.placed,
            document=pb.Document(schema=decision.SCHEMA, json=text),
        )

    async def _list_nodes(self, request: pl.ListNodesRequest) -> pl.ListNodesReply:
        names = [n for n in sorted(self._fleet.nodes) if not request.node or n == request.node]
        page, token = _page(names, request.page_size, request.page_token)
        nodes = [self.summary(self._fleet.nodes[name], full=request.full) for name in page]
        return pl.ListNodesReply(
            nodes=nodes, next_page_token=token, brain_epoch=self._broker.ledger.term
        )

    async def _list_leases(self, request: pl.ListLeasesRequest) -> pl.ListLeasesReply:
        ids = [
            row.lease
            for row in sorted(self._broker.leases.values(), key=lambda row: row.lease)
            if (not request.tenant or row.tenant == request.tenant)
            and (not request.node or any(g.node == request.node for g in row.grants))
        ]
        page, token = _page(ids, request.page_size, request.page_token)
        found = [self.lease_summary(self._broker.leases[id_]) for id_ in page]
        return pl.ListLeasesReply(leases=found, next_page_token=token)

    def summary(self, node: Node, *, full: bool = False) -> pl.NodeSummary:
        """Return a node in short, or with its devices and partitions."""
        now_s = boottime_s()
        facts = node.facts(now_s)
        summary = pl.NodeSummary(
            node=node.name,
            cluster=node.cluster,
            boot_id=node.boot_id,
            agent_version=node.agent_version,
            connected=node.connected,
            last_heard_age_ms=facts.heard_age_ms,
            telemetry_age_ms=facts.telemetry_age_ms or 0,
            device_count=node.device_count,
            partition_count=node.partition_count,
            leased_count=sum(len(row.taken) for row in node.rows),
            open_gates=sum(
                len(row.free) + len(row.taken) for row in node.rows if row.health == "open"
            ),
            labels=node.labels,
            draining=node.draining,
            last_sequence=node.last_sequence,
        )
        if full:
            summary.devices.extend(pb.Inventory.FromString(node.inventory_bytes).devices)
            state = pb.PartitionState.FromString(node.partitions_bytes)
            summary.partitions.extend(state.partitions)
        return summary

    def lease_summary(self, row: LeaseRow) -> pl.LeaseSummary:
        """Return a lease in short."""
        import time

        return pl.LeaseSummary(
            lease=row.lease,
            tenant=row.tenant,
            state=state_number(row.state),
            granted=[granted(grant) for grant in row.grants],
            decision=row.decision,
            expires_in_ms=self._broker.left_ms(row.lease),
            age_ms=max(0, round((time.time() - row.made_wall_s) * 1e3)),
        )

    # --- watching ---------------------------------------------------------------------------------

    def node_changed(self, node: Node) -> None:
        """Tell that a node came, left or changed."""
        if self._watchers:
            self.told(node.name, node_changed=self.summary(node))

    def told(self, node: str, **body: Any) -> None:
        """Tell everybody who watches."""
        if self._watchers:
            event = self._event(node, **body)
            for watcher in self._watchers:
                watcher.tell(event)

    def _event(self, node: str, **body: Any) -> pl.WatchEvent:
        return pl.WatchEvent(sequence=next(self._sequence), node=node, **body)

    def _lease_changed(self, row: LeaseRow) -> None:
        if self._watchers:
            node = row.grants[0].node if row.grants else ""
            self.told(node, lease_changed=self.lease_summary(row))

    def _decided(self, record: decision.Record) -> None:
        if self._watchers:
            short = pl.Decision(
                id=record.id, request=record.request, lease=record.lease, placed=record.placed
            )
            self.told("", decided=short)


def _told(body: bytes) -> tuple[decision.Record, bytes]:
    """Return a record and its document as JSON; a fleet's is megabytes."""
    record = decision.unpack(body)
    return record, msgspec.json.encode(decision.document(record))


def _page(names: list[str], size: int, token: str) -> tuple[list[str], str]:
    """Return one page behind a token, and the token of the next."""
    size = min(size or MAX_PAGE, MAX_PAGE)
    rest = [name for name in names if name > token]
    return rest[:size], rest[size - 1] if len(rest) > size else ""


async def _abort(context: Any, exc: RefusedError) -> NoReturn:
    """End a call with the status of a refusal, its details in the trailing metadata."""
    import grpc

    metadata: list[tuple[str, str | bytes]] = [
        (keepalive.REFUSAL_KEY, exc.refusal.SerializeToString())
    ]
    if exc.retry_after_ms:
        metadata.append((keepalive.RETRY_AFTER_KEY, str(exc.retry_after_ms)))
    message = exc.refusal.message
    if exc.refusal.possible:
        message += f" (possible: {'; '.join(exc.refusal.possible)})"
    LOG.info("refused", extra={"code": exc.code, "reason": exc.refusal.message})
    await context.abort(getattr(grpc.StatusCode, exc.code), message[:4096], tuple(metadata))
    raise AssertionError("abort raises")
