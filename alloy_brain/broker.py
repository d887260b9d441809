"""From a request to a lease: decide, reserve in ledger and nodes, commit, or say why not.

Theory of operation. Everything runs on one event loop; the ledger has a thread of its own. Pieces
are taken out of the fleet's free ones before the first `await`, so two requests of this process
never want the same piece; the ledger guards against other processes, the node against everybody. A
node that refuses costs its piece this request's trust, and the decision is made anew.

Rules that stay true in here:

* A lease is in the ledger before a node hears of it, and leaves it after its nodes have let go, or
  after they were told and could not be reached: they are told again when they attach.
* What a node reports when it attaches wins over the ledger: it is where the tenant is.
* The same request again gets the same lease.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from alloy_agent.model import Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain import decision
from alloy_brain.facts import Choice, Demand, Inputs, Picked, Policy, Wish
from alloy_brain.fleet import Fleet
from alloy_brain.ledger import Grant, LeaseRow, Ledger
from alloy_brain.link import Link, LinkDownError
from alloy_brain.placement import choose

LOG = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S: Final = 5.0  # how long a node may take for a lease command
RESERVE_MS: Final = 10_000
MAX_ATTEMPTS: Final = 5
MAX_REQUESTS: Final = 16_384
MAX_UNWRITTEN: Final = 64  # decisions on their way to the disk
MIX_KEPT: Final = 12
MIX_DECAY: Final = 0.98  # of a class's weight with each request


class RefusedError(Exception):
    """A request that cannot be met, with what goes into its gRPC status."""

    def __init__(self, code: str, refusal: pl.PlaceRefusal, retry_after_ms: int = 0) -> None:
        super().__init__(refusal.message)
        self.code = code  # name of a grpc.StatusCode
        self.refusal = refusal
        self.retry_after_ms = retry_after_ms


class Order(Value, frozen=True, kw_only=True):
    """A checked request: what is wished for, and for how long."""

    wish: Wish
    digest: str
    reserve_ttl_ms: int
    lease_ttl_ms: int
    reserve_only: bool
    dry_run: bool
    attempts: int


class _Attempt(Value, frozen=True, kw_only=True):
    """One try: what was decided, on what, and what came of it."""

    lease: str
    decision: str
    inputs: Inputs
    choice: Choice
    number: int


def boottime_s() -> float:
    """Return the boot clock, which no one sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Broker:
    """Decides and keeps leases.

    Args:
        fleet: What is known of the nodes.
        ledger: Where leases live; its term has begun.
        policy: The numbers of decisions.
        name: Of this brain, for records.
    """

    def __init__(self, fleet: Fleet, ledger: Ledger, policy: Policy, name: str) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.policy = policy
        self.name = name
        self.links: dict[str, Link] = {}
        self.leases: dict[str, LeaseRow] = {}
        self.ends_s: dict[str, float] = {}  # when a lease ends, on the boot clock, as nodes said
        self.on_change: Callable[[LeaseRow], None] = lambda _row: None
        self.on_decision: Callable[[decision.Record], None] = lambda _record: None
        self._requests: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._running: dict[str, tuple[str, asyncio.Future[pl.PlaceReply]]] = {}
        self._mix: dict[Demand, float] = {}
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._closing: set[str] = set()
        self._unwritten: set[asyncio.Future[None]] = set()
        for row in ledger.leases():
            self._know(row)

    def stop(self) -> None:
        """Let what the ledger has to do end."""
        self._disk.shutdown()

    async def on_disk(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what a call of the ledger returns, made on the ledger's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, lambda: call(*arguments, **named))

    def _know(self, row: LeaseRow) -> None:
        """Take a lease into memory, and its pieces out of what is free."""
        fresh = row.lease not in self.leases
        self.leases[row.lease] = row
        self._requests[row.request] = row.lease
        while len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        if fresh:
            self.fleet.hold(_pieces(row), row.lease)
        self.on_change(row)

    def _forget(self, row: LeaseRow) -> None:
        """Give a lease's pieces back."""
        self.leases.pop(row.lease, None)
        self.ends_s.pop(row.lease, None)
        self.fleet.let_go(_pieces(row), row.lease)
        self.on_change(msgspec.structs.replace(row, state="released"))

    # --- place ------------------------------------------------------------------------------------

    async def place(self, order: Order) -> pl.PlaceReply:
        """Return the lease of a request.

        Raises:
            RefusedError: There is none, and why.
            LedgerError: The ledger refused; nothing was granted.
        """
        request = order.wish.request
        known = self.leases.get(self._requests.get(request, ""))
        if known is not None and known.state != "releasing":
            _check_same(known.digest, order)
            return self.reply(known)
        running = self._running.get(request)
        if running is not None:
            _check_same(running[0], order)
            return await asyncio.shield(running[1])
        task = asyncio.ensure_future(self._place(order))
        self._running[request] = (order.digest, task)
        task.add_done_callback(lambda _done: self._running.pop(request, None))
        return await asyncio.shield(task)  # a client that leaves does not stop half way

    async def _place(self, order: Order) -> pl.PlaceReply:
        """Decide until the nodes agree, or there is nothing left to decide on."""
        wish = order.wish
        self._note_mix(wish)
        refused: dict[str, str] = {}
        for number in range(1, order.attempts + 1):
            attempt = self._decide(wish, number)
            if attempt.choice.refusal:
                await self._keep(attempt, placed=False, refused=refused)
                raise _refusal(attempt, refused)
            if order.dry_run:
                await self._keep(attempt, placed=False, refused=refused)
                return pl.PlaceReply(
                    request=wish.request,
                    decision=attempt.decision,
                    granted=[_wanted(picked) for picked in attempt.choice.picked],
                )
            row = await self._reserve(order, attempt, refused)
            if row is not None:
                await self._keep(attempt, placed=True, refused=refused)
                return self.reply(row)
            wish = msgspec.structs.replace(wish, avoid={**wish.avoid, **refused})
            await self._keep(attempt, placed=False, refused=refused)
        raise _given_up(attempt, refused)

    def _decide(self, wish: Wish, number: int) -> _Attempt:
        """Decide, and take the pieces at once: nothing else runs in between."""
        mix = tuple(sorted(self._mix.items(), key=lambda item: repr(item[0])))
        inputs = Inputs(
            wish=wish, policy=self.policy, mix=mix, nodes=self.fleet.facts(boottime_s())
        )
        return _Attempt(
            lease=f"l-{secrets.token_hex(8)}",
            decision=f"d-{secrets.token_hex(8)}",
            inputs=inputs,
            choice=choose(inputs),
            number=number,
        )

    def _note_mix(self, wish: Wish) -> None:
        """Remember what is asked for, for fragmentation; what is rare is forgotten."""
        for demand in self._mix:
            self._mix[demand] *= MIX_DECAY
        for demand in wish.demands:
            one = msgspec.structs.replace(demand, count=1)
            self._mix[one] = round(self._mix.get(one, 0.0) + demand.count, 6)
        while len(self._mix) > MIX_KEPT:
            del self._mix[min(self._mix, key=lambda d: self._mix[d])]

    async def _keep(self, attempt: _Attempt, *, placed: bool, refused: dict[str, str]) -> None:
        """Put a decision on its way to the disk; `written` waits for all of it.

        A client waits for the short record only: that of a lease is on disk with its reservation,
        that of anything else is written here. The facts of the other nodes follow.
        """
        record = self._record(attempt, placed=placed, refused=refused)
        self.on_decision(record)
        if not placed:
            await self.on_disk(self._write, decision.shortened(record))
        while len(self._unwritten) >= MAX_UNWRITTEN:
            await asyncio.wait(self._unwritten, return_when=asyncio.FIRST_COMPLETED)
        writing = asyncio.ensure_future(self.on_disk(self._write, record))
        self._unwritten.add(writing)
        writing.add_done_callback(self._written)

    def _record(
        self, attempt: _Attempt, *, placed: bool, refused: dict[str, str]
    ) -> decision.Record:
        return decision.Record(
            id=attempt.decision,
            request=attempt.inputs.wish.request,
            lease=attempt.lease if placed else "",
            placed=placed,
            wall_s=time.time(),
            brain=self.name,
            term=self.ledger.term,
            attempt=attempt.number,
            inputs=attempt.inputs,
            choice=attempt.choice,
            refused_by=dict(refused),
        )

    def _written(self, writing: asyncio.Future[None]) -> None:
        """Note that a record is on disk, or why it is not."""
        self._unwritten.discard(writing)
        if not writing.cancelled() and writing.exception() is not None:
            LOG.error("decision_not_kept", extra={"reason": str(writing.exception())})

    async def written(self) -> None:
        """Wait until every decision made so far is on disk."""
        if self._unwritten:
            await asyncio.wait(tuple(self._unwritten))

    def _write(self, record: decision.Record) -> None:
        body = decision.pack(record)
        self.ledger.record(record.id, record.request, record.lease, placed=record.placed, body=body)

    async def _reserve(
        self, order: Order, attempt: _Attempt, refused: dict[str, str]
    ) -> LeaseRow | None:
        """Return the lease once every node has granted it; else note who refused what."""
        row = _new_row(order, attempt)
        pieces = _pieces(row)
        self.fleet.hold(pieces, row.lease)
        self.leases[row.lease] = row
        now_s = boottime_s()
        ahead = decision.shortened(self._record(attempt, placed=True, refused=refused))
        try:
            taken = await self.on_disk(
                self.ledger.reserve,
                row,
                now_s + order.reserve_ttl_ms / 1e3,
                now_s,
                decision.pack(ahead),
            )
        except BaseException:
            self.leases.pop(row.lease, None)
            self.fleet.let_go(pieces, row.lease)
            raise
        if taken is not None:
            self.leases.pop(row.lease, None)
            self.fleet.let_go(pieces, row.lease)
            holder = f"lease {taken.lease}" if taken.lease else f"generation {taken.generation}"
            refused[f"{taken.node}/{taken.partition}"] = f"the ledger has it at {holder}"
            return None
        granted = await self._ask_nodes(order, row, refused)
        if granted is None:
            await self._give_up(row)
            return None
        return granted

    async def _ask_nodes(
        self, order: Order, row: LeaseRow, refused: dict[str, str]
    ) -> LeaseRow | None:
        """Reserve on every node, then commit on every node; None when one of them did not."""
        tokens = await self._on_nodes(row, lambda node: self._reserve_on(order, row, node), refused)
        if tokens is None:
            return None
        row = msgspec.structs.replace(
            row,
            grants=tuple(msgspec.structs.replace(g, token=tokens[g.node]) for g in row.grants),
        )
        self.leases[row.lease] = row
        if not order.reserve_only:
            done = await self._on_nodes(row, lambda node: self._commit_on(row, node), refused)
            if done is None:
                return None
            row = msgspec.structs.replace(row, state="committed")
        try:
            await self.on_disk(self.ledger.save, row)
        except BaseException:
            await self._give_up(row)
            raise
        self._know(row)
        LOG.info(
            "placed",
            extra={
                "lease": row.lease,
                "tenant": row.tenant,
                "request": row.request,
                "pieces": [f"{g.node}/{g.partition}" for g in row.grants],
                "state": row.state,
            },
        )
        return row

    async def _on_nodes(
        self,
        row: LeaseRow,
        act: Callable[[str], Awaitable[pb.Reply]],
        refused: dict[str, str],
    ) -> dict[str, int] | None:
        """Return the token of each node of a lease, or None when one refused."""
        nodes = sorted({grant.node for grant in row.grants})
        answers = await asyncio.gather(*(act(node) for node in nodes), return_exceptions=True)
        tokens: dict[str, int] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, pb.Reply):
                if answer.status == pb.STATUS_OK:
                    tokens[node] = answer.token
                    self._note_end(row.lease, answer)
                    continue
                why = answer.error.message or pb.Refusal.Name(answer.refusal)
            elif isinstance(answer, LinkDownError):
                why = str(answer)
            else:
                raise answer
            LOG.info("node_refused", extra={"lease": row.lease, "node": node, "reason": why})
            refused.update(_blamed(row, node, answer, why))
        return tokens if len(tokens) == len(nodes) else None

    def _note_end(self, lease: str, reply: pb.Reply) -> None:
        if reply.expires_in_ms:
            self.ends_s[lease] = boottime_s() + reply.expires_in_ms / 1e3
        else:
            self.ends_s.pop(lease, None)

    async def _reserve_on(self, order: Order, row: LeaseRow, node: str) -> pb.Reply:
        refs = [
            pb.PartitionRef(id=g.partition, generation=g.generation)
            for g in row.grants
            if g.node == node
        ]
        floor: Any = order.wish.tier_floor
        reserve = pb.Reserve(
            lease=row.lease,
            tenant=row.tenant,
            partitions=refs,
            ttl_ms=order.reserve_ttl_ms,
            tier_floor=floor,
            decision=row.decision,
        )
        return await self.ask(node, pb.BrainMessage(id=f"{row.lease}/reserve", reserve=reserve))

    async def _commit_on(self, row: LeaseRow, node: str) -> pb.Reply:
        token = next(g.token for g in row.grants if g.node == node)
        commit = pb.Commit(lease=row.lease, token=token, ttl_ms=row.lease_ttl_ms)
        return await self.ask(node, pb.BrainMessage(id=f"{row.lease}/commit", commit=commit))

    async def ask(self, node: str, message: pb.BrainMessage) -> pb.Reply:
        """Return a node's reply to a command.

        Raises:
            LinkDownError: None came.
        """
        link = self.links.get(node)
        if link is None:
            raise LinkDownError(f"node {node}: its stream is down")
        return await link.ask(message, ANSWER_S)

    async def _give_up(self, row: LeaseRow) -> None:
        """Take a lease back from the nodes and out of the ledger."""
        await self._release_on_nodes(row, "not all of it was granted")
        await self.on_disk(self.ledger.release, row, time.time())
        self._forget(row)

    # --- release and renew ------------------------------------------------------------------------

    async def release(self, lease: str, tenant: str, reason: str) -> int:
        """Give a lease back; return its state, `LEASE_STATE_FREE` when nobody is inside any more.

        Raises:
            RefusedError: There is none, or it is another tenant's.
        """
        row = self.leases.get(lease) or await self.on_disk(self.ledger.lease, lease)
        if row is None:
            raise _plain("NOT_FOUND", pb.REFUSAL_NOT_FOUND, f"lease {lease[:64]}: there is none")
        if tenant and tenant != row.tenant:
            message = f"lease {lease}: it belongs to another tenant"
            raise _plain("PERMISSION_DENIED", pb.REFUSAL_CONFLICT, message)
        if row.lease not in self.leases:
            return pb.LEASE_STATE_FREE
        state = await self._release_on_nodes(row, reason or "the client released it")
        if state == pb.LEASE_STATE_FREE:
            await self.on_disk(self.ledger.release, row, time.time())
            self._forget(row)
        else:
            leaving = msgspec.structs.replace(row, state="releasing")
            await self.on_disk(self.ledger.save, leaving)
            self._know(leaving)
        LOG.info("released", extra={"lease": lease, "state": pb.LeaseState.Name(state)})
        return state

    async def _release_on_nodes(self, row: LeaseRow, reason: str) -> pb.LeaseState.ValueType:
        """Tell the nodes; return RELEASING where a tenant is still inside."""
        nodes = sorted({grant.node for grant in row.grants})
        message = pb.Release(lease=row.lease, tenant=row.tenant, reason=reason)
        answers = await asyncio.gather(
            *(
                self.ask(node, pb.BrainMessage(id=f"{row.lease}/release", release=message))
                for node in nodes
            ),
            return_exceptions=True,
        )
        state = pb.LEASE_STATE_FREE
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, LinkDownError):
                LOG.warning("release_waits", extra={"lease": row.lease, "node": node})
                continue  # told again when it attaches
            if isinstance(answer, BaseException):
                raise answer
            if answer.lease_state == pb.LEASE_STATE_RELEASING:
                state = pb.LEASE_STATE_RELEASING
        return state

    async def renew(self, request: pl.RenewRequest) -> pl.PlaceReply:
        """Commit a reservation, or move the end of a lease.

        Raises:
            RefusedError: There is no such lease, or a node refused.
        """
        known = self.leases.get(request.lease)
        if known is None or (request.tenant and request.tenant != known.tenant):
            message = f"lease {request.lease[:64]}: this tenant has none of this id"
            raise _plain("NOT_FOUND", pb.REFUSAL_NOT_FOUND, message)
        row: LeaseRow = msgspec.structs.replace(
            known, lease_ttl_ms=request.ttl_ms or known.lease_ttl_ms
        )
        refused: dict[str, str] = {}
        if request.commit and row.state == "reserved":
            done = await self._on_nodes(row, lambda node: self._commit_on(row, node), refused)
            row = msgspec.structs.replace(row, state="committed")
        else:
            if not request.ttl_ms:
                raise _plain("INVALID_ARGUMENT", pb.REFUSAL_INVALID, "ttl_ms: 0 moves no end")
            done = await self._on_nodes(row, lambda node: self._renew_on(row, node), refused)
        if done is None:
            why = "; ".join(refused.values())
            raise _plain("FAILED_PRECONDITION", pb.REFUSAL_WRONG_STATE, why)
        await self.on_disk(self.ledger.save, row)
        self._know(row)
        return self.reply(row)

    async def _renew_on(self, row: LeaseRow, node: str) -> pb.Reply:
        token = next(g.token for g in row.grants if g.node == node)
        renew = pb.Renew(lease=row.lease, token=token, ttl_ms=row.lease_ttl_ms)
        id_ = f"{row.lease}/renew-{secrets.token_hex(4)}"
        return await self.ask(node, pb.BrainMessage(id=id_, renew=renew))

    # --- what nodes say ---------------------------------------------------------------------------

    async def attached(self, node: str, leases: Iterable[pb.Lease]) -> None:
        """Make the ledger and a node that has just attached agree.

        What the node has and the ledger released is released; what it has and the ledger does not
        know is adopted; what the ledger has and the node does not is over.
        """
        told = {lease.id: lease for lease in leases}
        for row in [r for r in self.leases.values() if any(g.node == node for g in r.grants)]:
            if row.request in self._running:
                continue  # its own placement decides what becomes of it
            lease = told.get(row.lease)
            if lease is None:
                await self.ended(row.lease, f"node {node} has it no more")
            else:
                await self._agree(row, node, lease)
        for id_, lease in told.items():
            if id_ not in self.leases and lease.epoch:
                await self._unknown(node, lease)

    async def _agree(self, row: LeaseRow, node: str, lease: pb.Lease) -> None:
        """Bring a node's lease to the state that the ledger has."""
        if row.state == "releasing" or (
            row.state == "reserved" and not all(g.token for g in row.grants)
        ):
            await self.release(row.lease, row.tenant, "it was never finished")
        elif row.state == "committed" and lease.state == pb.LEASE_STATE_RESERVED:
            reply = await self._quietly(self._commit_on(row, node))
            if reply is None or reply.status != pb.STATUS_OK:
                await self.release(row.lease, row.tenant, "it could not be committed")

    async def _unknown(self, node: str, lease: pb.Lease) -> None:
        """Release a node's lease that is over, or adopt one that the ledger has lost."""
        known = await self.on_disk(self.ledger.lease, lease.id)
        if known is not None or lease.state == pb.LEASE_STATE_RESERVED:
            message = pb.Release(lease=lease.id, token=lease.token, reason="it is over")
            ask = self.ask(node, pb.BrainMessage(id=f"{lease.id}/release", release=message))
            await self._quietly(ask)
            return
        row = LeaseRow(
            lease=lease.id,
            request=f"adopted-{lease.id}",
            digest="",
            tenant=lease.tenant,
            state="committed" if lease.state == pb.LEASE_STATE_COMMITTED else "releasing",
            decision="",
            grants=tuple(
                Grant(
                    node=node,
                    device=ref.id.partition("/")[0],
                    partition=ref.id,
                    generation=ref.generation,
                    token=lease.token,
                )
                for ref in lease.partitions
            ),
            made_wall_s=time.time(),
        )
        taken = await self.on_disk(self.ledger.adopt, row, boottime_s())
        if taken is None:
            self._know(row)
            LOG.warning("lease_adopted", extra={"lease": row.lease, "node": node})
        else:
            LOG.error("lease_in_doubt", extra={"lease": row.lease, "holder": taken.lease})

    async def _quietly(self, asking: Awaitable[pb.Reply]) -> pb.Reply | None:
        try:
            return await asking
        except LinkDownError:
            return None

    async def ended(self, lease: str, cause: str) -> None:
        """Note that a node's part of a lease is over: all of it is, all or nothing."""
        row = self.leases.get(lease)
        if row is None or lease in self._closing or row.request in self._running:
            return
        self._closing.add(lease)
        try:
            await self._release_on_nodes(row, cause)
            await self.on_disk(self.ledger.release, row, time.time())
            self._forget(row)
        finally:
            self._closing.discard(lease)
        LOG.info("lease_ended", extra={"lease": lease, "tenant": row.tenant, "cause": cause})

    # --- answers ----------------------------------------------------------------------------------

    def reply(self, row: LeaseRow) -> pl.PlaceReply:
        """Return a lease as a client gets it."""
        return pl.PlaceReply(
            request=row.request,
            lease=row.lease,
            state=state_number(row.state),
            granted=[granted(grant) for grant in row.grants],
            decision=row.decision,
            expires_in_ms=self.left_ms(row.lease),
        )

    def left_ms(self, lease: str) -> int:
        """Return what is left of a lease's time; 0 where it has no end."""
        end_s = self.ends_s.get(lease)
        return 0 if end_s is None else max(1, round((end_s - boottime_s()) * 1e3))


def state_number(state: str) -> pb.LeaseState.ValueType:
    """Return the wire's number of a lease's state."""
    return {
        "reserved": pb.LEASE_STATE_RESERVED,
        "committed": pb.LEASE_STATE_COMMITTED,
        "releasing": pb.LEASE_STATE_RELEASING,
    }.get(state, pb.LEASE_STATE_FREE)


def granted(grant: Grant) -> pl.Granted:
    """Return one piece of a lease as a client gets it."""
    tier: Any = grant.tier
    return pl.Granted(
        node=grant.node,
        device=grant.device,
        partition=pb.PartitionRef(id=grant.partition, generation=grant.generation),
        token=grant.token,
        tier=tier,
    )


def digest_of(wish: Wish, *rest: object) -> str:
    """Return what tells one request from another of the same id."""
    body = msgspec.json.encode((wish, rest), order="deterministic")
    return hashlib.sha256(body).hexdigest()


def _wanted(picked: Picked) -> pl.Granted:
    return granted(
        Grant(
            node=picked.node,
            device=picked.device,
            partition=picked.partition,
            generation=picked.generation,
            tier=picked.tier,
        )
    )


def _new_row(order: Order, attempt: _Attempt) -> LeaseRow:
    return LeaseRow(
        lease=attempt.lease,
        request=order.wish.request,
        digest=order.digest,
        tenant=order.wish.tenant,
        state="reserved",
        decision=attempt.decision,
        grants=tuple(
            Grant(
                node=p.node,
                device=p.device,
                partition=p.partition,
                generation=p.generation,
                tier=p.tier,
            )
            for p in attempt.choice.picked
        ),
        made_wall_s=time.time(),
        lease_ttl_ms=order.lease_ttl_ms,
    )


def _pieces(row: LeaseRow) -> list[tuple[str, str]]:
    return [(grant.node, grant.partition) for grant in row.grants]


def _blamed(row: LeaseRow, node: str, answer: object, why: str) -> dict[str, str]:
    """Return which pieces of a node a refusal speaks of: those it names, else all of them."""
    own = [g for g in row.grants if g.node == node]
    named = [g for g in own if isinstance(answer, pb.Reply) and g.partition in why]
    return {f"{node}/{grant.partition}": why for grant in named or own}


def _check_same(digest: str, order: Order) -> None:
    if digest != order.digest:
        message = f"request {order.wish.request}: it was made before with other contents"
        raise _plain("ALREADY_EXISTS", pb.REFUSAL_CONFLICT, message, ("choose another id",))


def _plain(
    code: str, reason: pb.Refusal.ValueType, message: str, possible: tuple[str, ...] = ()
) -> RefusedError:
    return RefusedError(
        code, pl.PlaceRefusal(reason=reason, message=message, possible=list(possible))
    )


def _refusal(attempt: _Attempt, refused: dict[str, str]) -> RefusedError:
    """Return the refusal of a decision without a choice."""
    choice = attempt.choice
    never = choice.refusal == "invalid"
    tier = never and "tier" in choice.message
    message = choice.message
    if refused:
        message += "; " + "; ".join(f"{piece}: {why}" for piece, why in list(refused.items())[:4])
    reason = pb.REFUSAL_INVALID if never else pb.REFUSAL_NO_CAPACITY
    refusal = pl.PlaceRefusal(
        reason=pb.REFUSAL_TIER if tier else reason,
        message=message,
        possible=list(choice.possible),
        decision=attempt.decision,
    )
    return RefusedError("INVALID_ARGUMENT" if never else "RESOURCE_EXHAUSTED", refusal)


def _given_up(attempt: _Attempt, refused: dict[str, str]) -> RefusedError:
    """Return the refusal after every attempt met one of a node."""
    why = "; ".join(f"{piece}: {reason}" for piece, reason in list(refused.items())[:8])
    refusal = pl.PlaceRefusal(
        reason=pb.REFUSAL_CONFLICT,
        message=f"{attempt.number} decisions were refused: {why}",
        possible=["ask again"],
        decision=attempt.decision,
    )
    return RefusedError("FAILED_PRECONDITION", refusal, retry_after_ms=200)
