"""Who has which partition, and until when: a pure state machine.

Theory of operation. `decide(ledger, command, view)` returns the next ledger, the reply and what
changed; it never looks at a clock, a disk or a device. The `View` holds what the caller saw: the
time on the node's boot clock, the boot id, and the generation of every partition that exists. The
caller puts the new ledger on disk, then takes it as the present one, then answers.

A lease goes `free -> reserved -> committed -> releasing -> free`. It is `releasing` while a tenant
may still be inside; the caller says `Cleared` when nobody is. A reservation that nobody committed
ends by itself. `Ended` leases are remembered for a while, so that a late duplicate of an old
command cannot bring one back.

Rules that stay true in here:

* No partition is in two leases, whatever the order, repetition or loss of commands.
* A command for several partitions is done for all of them or for none.
* A fencing token is one more than the highest ever given; none is given twice.
* The same command again changes nothing and gets the same answer.
* Every command first ends what has run out: nothing is committed or renewed after its end.
* A lease of another boot is over. Its clock has stopped, and so have its tenants.
* A generation that differs from the view's, older or newer, is refused with the one that holds.
* A brain whose term (`epoch`) is older than the newest one seen changes nothing. Epoch 0 is the
  node's own operator; the stream never carries it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import field
from msgspec.structs import replace

from alloy_agent.model import (
    Lease,
    LeasedPiece,
    LeaseId,
    LeaseState,
    PartitionId,
    TenantId,
    Value,
)

MAX_ENDED = 512  # ended leases that are remembered
MAX_PIECES = 4096
MAX_NAME = 256  # characters of an id
MAX_RESERVE_S = 3600.0  # a decision older than this is no decision
MAX_TTL_S = 10 * 365 * 86400.0


class Refusal(StrEnum):
    """Why a command was refused; the ledger is then unchanged but for what had run out."""

    NOT_FOUND = "not_found"
    STALE_GENERATION = "stale_generation"
    ALREADY_LEASED = "already_leased"
    STALE_TOKEN = "stale_token"  # noqa: S105 - the name of a reason
    EXPIRED = "expired"
    OTHER_BOOT = "other_boot"
    STALE_EPOCH = "stale_epoch"
    CONFLICT = "conflict"  # the lease exists with other contents
    INVALID = "invalid"
    WRONG_STATE = "wrong_state"
    DRAINING = "draining"
    TIER = "tier"
    UNHEALTHY = "unhealthy"
    NO_BRAIN = "no_brain"


# --- commands ------------------------------------------------------------------------------------


class Reserve(Value, frozen=True, kw_only=True, tag="reserve"):
    """Keep these pieces for a tenant, all or none, until committed or `ttl_s` has passed."""

    lease: LeaseId
    tenant: TenantId
    pieces: tuple[LeasedPiece, ...]
    ttl_s: float
    epoch: int


class Commit(Value, frozen=True, kw_only=True, tag="commit"):
    """Make a reservation last: for `ttl_s`, or until released."""

    lease: LeaseId
    token: int
    ttl_s: float | None
    epoch: int


class Renew(Value, frozen=True, kw_only=True, tag="renew"):
    """Move the end of a lease to `ttl_s` from now, never to an earlier time."""

    lease: LeaseId
    token: int
    ttl_s: float
    epoch: int


class Release(Value, frozen=True, kw_only=True, tag="release"):
    """Give a lease back. `token` None: whatever it is, when `tenant` is the lease's own."""

    lease: LeaseId
    token: int | None
    tenant: TenantId | None
    epoch: int


class Enter(Value, frozen=True, kw_only=True, tag="enter"):
    """Let a tenant into one partition: under a lease it has, else under a new local one.

    A local lease is committed at once and lasts until it is released. It is granted only where
    `View.standalone` says that this node decides for itself.
    """

    lease: LeaseId  # of the new one, should it be needed
    tenant: TenantId
    partition: PartitionId
    epoch: int = 0


class Cleared(Value, frozen=True, kw_only=True, tag="cleared"):
    """Nobody of a releasing lease is inside its partitions any more."""

    lease: LeaseId
    epoch: int = 0


class Tick(Value, frozen=True, kw_only=True, tag="tick"):
    """Time has passed."""

    epoch: int = 0


Command = Reserve | Commit | Renew | Release | Enter | Cleared | Tick


# --- state ---------------------------------------------------------------------------------------


class Ended(Value, frozen=True, kw_only=True):
    """A lease that is over, remembered against late duplicates."""

    lease: LeaseId
    token: int
    cause: str  # "released", "expired", "boot"


class Ledger(Value, frozen=True, kw_only=True):
    """All live leases, and the numbers that only grow."""

    leases: tuple[Lease, ...] = ()
    highest_token: int = 0
    brain_epoch: int = 0
    ended: tuple[Ended, ...] = ()  # oldest first

    def lease(self, id_: LeaseId) -> Lease | None:
        """Return a live lease by id."""
        return next((lease for lease in self.leases if lease.id == id_), None)

    def ended_lease(self, id_: LeaseId) -> Ended | None:
        """Return what is remembered of a lease that is over."""
        return next((one for one in self.ended if one.lease == id_), None)

    def holder(self, partition: PartitionId) -> Lease | None:
        """Return the live lease that has a partition."""
        for lease in self.leases:
            if any(piece.partition == partition for piece in lease.pieces):
                return lease
        return None

    def protected(self) -> frozenset[PartitionId]:
        """Return the partitions that no plan may touch."""
        return frozenset(piece.partition for lease in self.leases for piece in lease.pieces)


class Block(Value, frozen=True, kw_only=True):
    """Why a partition takes no new lease, though it is free."""

    refusal: Refusal
    reason: str


class View(Value, frozen=True, kw_only=True):
    """What the caller sees of the node at this moment."""

    now_s: float  # CLOCK_BOOTTIME
    boot_id: str
    generations: dict[PartitionId, int]  # of every partition that exists
    blocked: dict[PartitionId, Block] = field(default_factory=dict)
    standalone: bool = True  # no brain decides for this node


class Reply(Value, frozen=True, kw_only=True):
    """The answer to one command; granted or done when `refusal` is None."""

    refusal: Refusal | None = None
    reason: str = ""
    cure: str = ""
    lease: Lease | None = None  # as it is now; None: free
    token: int = 0
    generations: tuple[LeasedPiece, ...] = ()  # as the node has them, for what was named


class Change(Value, frozen=True, kw_only=True):
    """A lease moved from `before` to `after` (None: free). `lease` is as it was last."""

    lease: Lease
    before: LeaseState | None
    after: LeaseState | None
    cause: str


class Outcome(Value, frozen=True, kw_only=True):
    """What `decide` returns: where `after` is RELEASING, the caller gets the tenant out."""

    ledger: Ledger
    reply: Reply
    changes: tuple[Change, ...] = ()


# --- decisions -----------------------------------------------------------------------------------


def decide(ledger: Ledger, command: Command, view: View) -> Outcome:
    """Return what becomes of the ledger and what to answer.

    Args:
        ledger: What the previous call returned, or what was on disk.
        command: From the brain, the local socket or the node's own loop.
        view: The node as seen now.
    """
    current, expired = _expire(ledger, view)
    if 0 < command.epoch < current.brain_epoch:
        reply = Reply(
            refusal=Refusal.STALE_EPOCH,
            reason=f"brain of term {command.epoch}: this node obeys term {current.brain_epoch}",
            cure="let the newer brain decide",
        )
        return Outcome(ledger=current, reply=reply, changes=expired)
    if command.epoch > current.brain_epoch:
        current = replace(current, brain_epoch=command.epoch)
    outcome = _dispatch(current, command, view)
    return replace(outcome, changes=expired + outcome.changes)


def _dispatch(ledger: Ledger, command: Command, view: View) -> Outcome:
    """Return the outcome of one command on a ledger in which nothing has run out."""
    outcome = Outcome(ledger=ledger, reply=Reply())
    match command:
        case Reserve():
            outcome = _reserve(ledger, command, view)
        case Commit():
            outcome = _commit(ledger, command, view)
        case Renew():
            outcome = _renew(ledger, command, view)
        case Release():
            outcome = _release(ledger, command)
        case Enter():
            outcome = _enter(ledger, command, view)
        case Cleared():
            outcome = _cleared(ledger, command)
        case Tick():
            pass
    return outcome


def _expire(ledger: Ledger, view: View) -> tuple[Ledger, tuple[Change, ...]]:
    """Return the ledger without what has run out, and what that changed."""
    changes: list[Change] = []
    for lease in ledger.leases:
        if lease.boot_id != view.boot_id:
            ledger, change = _end(ledger, lease, "boot")
            changes.append(change)
        elif _is_over(lease, view.now_s):
            ledger, change = _stop(ledger, lease, "expired")
            changes.append(change)
    return ledger, tuple(changes)


def _is_over(lease: Lease, now_s: float) -> bool:
    if lease.state is LeaseState.RELEASING or lease.expires_at_s is None:
        return False
    return now_s >= lease.expires_at_s


def _stop(ledger: Ledger, lease: Lease, cause: str) -> tuple[Ledger, Change]:
    """Return the ledger with a lease on its way out: at once, or when its tenant has left."""
    if lease.state is LeaseState.RESERVED:
        return _end(ledger, lease, cause)
    leaving = replace(lease, state=LeaseState.RELEASING)
    change = Change(lease=leaving, before=lease.state, after=LeaseState.RELEASING, cause=cause)
    return _with(ledger, leaving), change


def _end(ledger: Ledger, lease: Lease, cause: str) -> tuple[Ledger, Change]:
    """Return the ledger without a lease."""
    left = tuple(one for one in ledger.leases if one.id != lease.id)
    note = Ended(lease=lease.id, token=lease.token, cause=cause)
    ledger = _remember(replace(ledger, leases=left), note)
    return ledger, Change(lease=lease, before=lease.state, after=None, cause=cause)


def _remember(ledger: Ledger, note: Ended) -> Ledger:
    return replace(ledger, ended=(*ledger.ended, note)[-MAX_ENDED:])


def _with(ledger: Ledger, lease: Lease) -> Ledger:
    """Return the ledger with one lease put in or replaced."""
    others = tuple(one for one in ledger.leases if one.id != lease.id)
    return replace(ledger, leases=(*others, lease))


def _refused(  # noqa: PLR0913 - one argument for each part of the answer
    ledger: Ledger,
    refusal: Refusal,
    reason: str,
    cure: str = "",
    *,
    lease: Lease | None = None,
    generations: tuple[LeasedPiece, ...] = (),
) -> Outcome:
    reply = Reply(refusal=refusal, reason=reason, cure=cure, lease=lease, generations=generations)
    return Outcome(ledger=ledger, reply=reply)


def _granted(ledger: Ledger, lease: Lease, changes: tuple[Change, ...] = ()) -> Outcome:
    reply = Reply(lease=lease, token=lease.token, generations=lease.pieces)
    return Outcome(ledger=ledger, reply=reply, changes=changes)


# --- reserve -------------------------------------------------------------------------------------


def _reserve(ledger: Ledger, command: Reserve, view: View) -> Outcome:
    problem = _malformed(command)
    if problem:
        return _refused(ledger, Refusal.INVALID, f"lease {command.lease[:MAX_NAME]!r}: {problem}")
    known = ledger.lease(command.lease)
    if known is not None:
        return _reserve_again(ledger, command, known)
    over = ledger.ended_lease(command.lease)
    if over is not None:
        return _refused(
            ledger,
            Refusal.EXPIRED,
            f"lease {over.lease}: it is over ({over.cause})",
            "ask again under a new id",
        )
    refusal = _unavailable(ledger, command.pieces, view)
    if refusal is not None:
        return refusal
    lease = _new_lease(ledger, command, view)
    change = Change(lease=lease, before=None, after=LeaseState.RESERVED, cause="reserved")
    return _granted(_with(_spend(ledger, lease.token), lease), lease, (change,))


def _malformed(command: Reserve) -> str:
    """Return what is wrong with a reservation in itself, or nothing."""
    names = {piece.partition for piece in command.pieces}
    problems = (
        (not 0 < len(command.lease) <= MAX_NAME, f"the id needs 1 to {MAX_NAME} characters"),
        (not 0 < len(command.tenant) <= MAX_NAME, f"the tenant needs 1 to {MAX_NAME} characters"),
        (not command.pieces, "no partition is named"),
        (len(command.pieces) > MAX_PIECES, f"more than {MAX_PIECES} partitions"),
        (len(names) != len(command.pieces), "a partition is named twice"),
        (not 0 < command.ttl_s <= MAX_RESERVE_S, f"ttl must be in (0, {MAX_RESERVE_S:.0f}] s"),
    )
    return next((text for wrong, text in problems if wrong), "")


def _reserve_again(ledger: Ledger, command: Reserve, known: Lease) -> Outcome:
    """Return the first answer again, when it is the same question."""
    same = known.tenant == command.tenant and sorted(known.pieces) == sorted(command.pieces)
    if not same:
        return _refused(
            ledger,
            Refusal.CONFLICT,
            f"lease {known.id}: it exists for other partitions or another tenant",
            "ask under a new id",
        )
    if known.state is LeaseState.RELEASING:
        return _refused(
            ledger, Refusal.WRONG_STATE, f"lease {known.id}: it is being released", lease=known
        )
    return _granted(ledger, known)


def _unavailable(ledger: Ledger, pieces: tuple[LeasedPiece, ...], view: View) -> Outcome | None:
    """Return the refusal for the first piece that cannot be had, or None when all can."""
    present = _present(pieces, view)
    for piece in pieces:
        found = _why_not(ledger, piece, view)
        if found is not None:
            refusal, reason, cure = found
            return _refused(ledger, refusal, reason, cure, generations=present)
    return None


def _why_not(ledger: Ledger, piece: LeasedPiece, view: View) -> tuple[Refusal, str, str] | None:
    """Return why one piece cannot be had."""
    stale = _stale(piece, view)
    if stale is not None:
        return stale
    holder = ledger.holder(piece.partition)
    if holder is not None:
        whose = (
            "a lease that is being released"
            if holder.state is LeaseState.RELEASING
            else (f"lease {holder.id}")
        )
        reason = f"partition {piece.partition}: {whose} has it"
        return Refusal.ALREADY_LEASED, reason, "choose another partition"
    block = view.blocked.get(piece.partition)
    if block is not None:
        return block.refusal, f"partition {piece.partition}: {block.reason}", "choose another"
    return None


def _stale(piece: LeasedPiece, view: View) -> tuple[Refusal, str, str] | None:
    """Return why a piece is not the one that was meant."""
    generation = view.generations.get(piece.partition)
    if generation is None:
        reason = f"partition {piece.partition}: there is none on this node"
        return Refusal.NOT_FOUND, reason, "decide on a newer inventory"
    if generation != piece.generation:
        reason = (
            f"partition {piece.partition}: its generation is {generation}, not {piece.generation}"
        )
        return Refusal.STALE_GENERATION, reason, "decide on a newer inventory"
    return None


def _present(pieces: Iterable[LeasedPiece], view: View) -> tuple[LeasedPiece, ...]:
    """Return the generations that the node has for the pieces that exist."""
    return tuple(
        LeasedPiece(partition=piece.partition, generation=view.generations[piece.partition])
        for piece in pieces
        if piece.partition in view.generations
    )


def _new_lease(ledger: Ledger, command: Reserve, view: View) -> Lease:
    return Lease(
        id=command.lease,
        tenant=command.tenant,
        pieces=command.pieces,
        token=ledger.highest_token + 1,
        state=LeaseState.RESERVED,
        boot_id=view.boot_id,
        granted_at_s=view.now_s,
        expires_at_s=view.now_s + command.ttl_s,
        epoch=command.epoch,
    )


def _spend(ledger: Ledger, token: int) -> Ledger:
    return replace(ledger, highest_token=max(ledger.highest_token, token))


# --- commit, renew, release ----------------------------------------------------------------------


def _held(ledger: Ledger, id_: LeaseId, token: int | None) -> Lease | Outcome:
    """Return the live lease that a token is for, or why there is none."""
    lease = ledger.lease(id_)
    if lease is None:
        over = ledger.ended_lease(id_)
        if over is None:
            return _refused(
                ledger, Refusal.NOT_FOUND, f"lease {id_[:MAX_NAME]!r}: there is none", "reserve"
            )
        refusal = Refusal.OTHER_BOOT if over.cause == "boot" else Refusal.EXPIRED
        return _refused(
            ledger, refusal, f"lease {over.lease}: it is over ({over.cause})", "reserve anew"
        )
    if token is not None and token != lease.token:
        return _refused(
            ledger,
            Refusal.STALE_TOKEN,
            f"lease {lease.id}: token {token} is not its token {lease.token}",
            "use the token of the reservation",
            lease=lease,
        )
    return lease


def _commit(ledger: Ledger, command: Commit, view: View) -> Outcome:
    if command.ttl_s is not None and not 0 < command.ttl_s <= MAX_TTL_S:
        return _refused(ledger, Refusal.INVALID, f"lease {command.lease}: ttl must be above 0 s")
    lease = _held(ledger, command.lease, command.token)
    if isinstance(lease, Outcome):
        return lease
    if lease.state is LeaseState.COMMITTED:
        return _granted(ledger, lease)
    if lease.state is LeaseState.RELEASING:
        return _leaving(ledger, lease)
    for piece in lease.pieces:
        stale = _stale(piece, view)
        if stale is not None:
            present = _present(lease.pieces, view)
            return _refused(ledger, *stale, lease=lease, generations=present)
    expires_at_s = None if command.ttl_s is None else view.now_s + command.ttl_s
    done = replace(lease, state=LeaseState.COMMITTED, expires_at_s=expires_at_s)
    change = Change(
        lease=done, before=LeaseState.RESERVED, after=LeaseState.COMMITTED, cause="committed"
    )
    return _granted(_with(ledger, done), done, (change,))


def _renew(ledger: Ledger, command: Renew, view: View) -> Outcome:
    lease = _held(ledger, command.lease, command.token)
    if isinstance(lease, Outcome):
        return lease
    if lease.state is LeaseState.RELEASING:
        return _leaving(ledger, lease)
    limit_s = MAX_RESERVE_S if lease.state is LeaseState.RESERVED else MAX_TTL_S
    if not 0 < command.ttl_s <= limit_s:
        return _refused(
            ledger,
            Refusal.INVALID,
            f"lease {lease.id}: ttl must be in (0, {limit_s:.0f}] s",
            lease=lease,
        )
    if lease.expires_at_s is None or lease.expires_at_s >= view.now_s + command.ttl_s:
        return _granted(ledger, lease)
    longer = replace(lease, expires_at_s=view.now_s + command.ttl_s)
    return _granted(_with(ledger, longer), longer)


def _leaving(ledger: Ledger, lease: Lease) -> Outcome:
    """Return the refusal for a lease whose tenant has been told to go."""
    over = Refusal.WRONG_STATE if lease.expires_at_s is None else Refusal.EXPIRED
    return _refused(
        ledger, over, f"lease {lease.id}: it is being released", "reserve anew", lease=lease
    )


def _release(ledger: Ledger, command: Release) -> Outcome:
    lease = ledger.lease(command.lease)
    if lease is None:
        return Outcome(ledger=_never(ledger, command.lease), reply=Reply())
    if command.token is None and command.tenant != lease.tenant:
        return _refused(
            ledger,
            Refusal.CONFLICT,
            f"lease {lease.id}: it belongs to another tenant",
            "name its tenant or its token",
        )
    found = _held(ledger, command.lease, command.token)
    if isinstance(found, Outcome):
        return found
    if lease.state is LeaseState.RELEASING:
        return _granted(ledger, lease)
    ledger, change = _stop(ledger, lease, "released")
    left = ledger.lease(lease.id)
    reply = Reply(lease=left, token=lease.token, generations=lease.pieces)
    return Outcome(ledger=ledger, reply=reply, changes=(change,))


def _never(ledger: Ledger, id_: LeaseId) -> Ledger:
    """Return a ledger that refuses a reservation which its own release has overtaken."""
    if ledger.ended_lease(id_) is not None or not 0 < len(id_) <= MAX_NAME:
        return ledger
    return _remember(ledger, Ended(lease=id_, token=0, cause="released"))


def _cleared(ledger: Ledger, command: Cleared) -> Outcome:
    lease = ledger.lease(command.lease)
    if lease is None:
        return Outcome(ledger=ledger, reply=Reply())
    if lease.state is not LeaseState.RELEASING:
        return _refused(
            ledger, Refusal.WRONG_STATE, f"lease {lease.id}: it is {lease.state}", lease=lease
        )
    ledger, change = _end(ledger, lease, "released")
    return Outcome(ledger=ledger, reply=Reply(token=lease.token), changes=(change,))


# --- the node's own ------------------------------------------------------------------------------


def _enter(ledger: Ledger, command: Enter, view: View) -> Outcome:
    """Return the lease under which a tenant may start inside a partition."""
    holder = ledger.holder(command.partition)
    if holder is not None:
        return _enter_held(ledger, command, holder, view)
    if not view.standalone:
        return _refused(
            ledger,
            Refusal.NO_BRAIN,
            f"partition {command.partition}: the brain has not leased it to {command.tenant!r}",
            "ask the brain for a placement",
        )
    generation = view.generations.get(command.partition, 0)
    piece = LeasedPiece(partition=command.partition, generation=generation)
    reserve = Reserve(
        lease=command.lease, tenant=command.tenant, pieces=(piece,), ttl_s=1.0, epoch=0
    )
    reserved = _reserve(ledger, reserve, view)
    lease = reserved.reply.lease
    if reserved.reply.refusal is not None or lease is None:
        return reserved
    done = replace(lease, state=LeaseState.COMMITTED, expires_at_s=None)
    change = Change(lease=done, before=None, after=LeaseState.COMMITTED, cause="entered")
    return _granted(_with(reserved.ledger, done), done, (change,))


def _enter_held(ledger: Ledger, command: Enter, holder: Lease, view: View) -> Outcome:
    """Return whether a tenant may start under the lease that a partition is in."""
    if holder.tenant != command.tenant:
        return _refused(
            ledger,
            Refusal.ALREADY_LEASED,
            f"partition {command.partition}: lease {holder.id} has it for another tenant",
            "choose another partition",
        )
    if holder.state is not LeaseState.COMMITTED:
        return _refused(
            ledger,
            Refusal.WRONG_STATE,
            f"partition {command.partition}: lease {holder.id} is {holder.state}",
            "commit it first" if holder.state is LeaseState.RESERVED else "choose another",
            lease=holder,
        )
    piece = next(one for one in holder.pieces if one.partition == command.partition)
    stale = _stale(piece, view)
    if stale is not None:
        return _refused(ledger, *stale, lease=holder, generations=_present((piece,), view))
    return _granted(ledger, holder)
