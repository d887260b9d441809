"""Leases: whatever happens in whatever order, nothing is granted twice and nothing is lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from alloy_agent.leases import (
    MAX_ENDED,
    Block,
    Change,
    Cleared,
    Command,
    Commit,
    Enter,
    Ledger,
    Outcome,
    Refusal,
    Release,
    Renew,
    Reserve,
    Tick,
    View,
    decide,
)
from alloy_agent.model import LeasedPiece, LeaseId, LeaseState, PartitionId, TenantId

P1, P2, P3 = PartitionId("gpu0/1g@0"), PartitionId("gpu0/1g@1"), PartitionId("gpu1/7g@0")
BLUE, RED = TenantId("blue"), TenantId("red")
L1, L2 = LeaseId("l1"), LeaseId("l2")
VIEW = View(now_s=100.0, boot_id="boot-a", generations={P1: 1, P2: 5, P3: 2})


def piece(partition: PartitionId, generation: int) -> LeasedPiece:
    return LeasedPiece(partition=partition, generation=generation)


def reserve(
    lease: LeaseId = L1, *pieces: LeasedPiece, tenant: TenantId = BLUE, epoch: int = 1
) -> Reserve:
    return Reserve(
        lease=lease, tenant=tenant, pieces=pieces or (piece(P1, 1),), ttl_s=10.0, epoch=epoch
    )


def commit(token: int, lease: LeaseId = L1, ttl_s: float | None = None, epoch: int = 1) -> Commit:
    return Commit(lease=lease, token=token, ttl_s=ttl_s, epoch=epoch)


def release(lease: LeaseId = L1, token: int | None = None, tenant: TenantId = BLUE) -> Release:
    return Release(lease=lease, token=token, tenant=tenant, epoch=1)


def at(now_s: float, **other: Any) -> View:
    return replace(VIEW, now_s=now_s, **other)


def run(ledger: Ledger, *commands: Command, view: View = VIEW) -> Outcome:
    outcome = None
    for command in commands:
        outcome = decide(ledger, command, view)
        ledger = outcome.ledger
    assert outcome is not None
    return outcome


def test_a_lease_goes_through_its_states() -> None:
    """A lease is free, then reserved, committed, releasing and free again, each with its change."""
    first = run(Ledger(), reserve())
    assert first.reply.token == 1
    assert first.ledger.protected() == {P1}
    second = run(first.ledger, commit(1))
    assert second.reply.lease is not None
    assert second.reply.lease.expires_at_s is None
    third = run(second.ledger, release(token=1))
    assert third.changes[0].after is LeaseState.RELEASING
    assert third.ledger.protected() == {P1}
    fourth = run(third.ledger, Cleared(lease=L1))
    assert fourth.changes[0].after is None
    assert fourth.ledger.leases == ()
    assert fourth.ledger.highest_token == 1


def test_a_reservation_is_given_back_at_once() -> None:
    """Nobody can be inside of a piece that was only reserved, so it is free when released."""
    outcome = run(Ledger(), reserve(), release())
    assert outcome.ledger.leases == ()
    assert outcome.reply.refusal is None


def test_all_or_nothing() -> None:
    """With one piece missing, none is taken, no token is spent, and the node's view is told."""
    outcome = run(Ledger(), reserve(L1, piece(P1, 1), piece(P2, 4)))
    assert outcome.reply.refusal is Refusal.STALE_GENERATION
    assert outcome.reply.generations == (piece(P1, 1), piece(P2, 5))
    assert outcome.ledger == Ledger(brain_epoch=1)


@pytest.mark.parametrize("generation", [0, 4, 6, 2**63])
def test_generation_of_another_time_is_refused(generation: int) -> None:
    """Older or from the future, a generation that the node does not have is no licence."""
    outcome = run(Ledger(), reserve(L1, piece(P2, generation)))
    assert outcome.reply.refusal is Refusal.STALE_GENERATION


@pytest.mark.parametrize("token", [0, 1, 3, 2**63])
def test_token_of_another_time_is_refused(token: int) -> None:
    """A token from the past or from nowhere commits, renews and releases nothing."""
    before = run(Ledger(highest_token=1), reserve()).ledger
    for command in (
        commit(token),
        Renew(lease=L1, token=token, ttl_s=5.0, epoch=1),
        release(token=token),
    ):
        outcome = run(before, command)
        assert outcome.reply.refusal is Refusal.STALE_TOKEN
        assert outcome.ledger == before


def test_nothing_is_committed_after_its_end() -> None:
    """At the very second of its end a reservation is over, and its piece free for another."""
    before = run(Ledger(), reserve()).ledger
    late = decide(before, commit(1), at(110.0))
    assert late.reply.refusal is Refusal.EXPIRED
    assert late.ledger.leases == ()
    assert run(late.ledger, reserve(L2), view=at(110.0)).reply.token == 2
    assert decide(before, commit(1), at(109.9)).reply.refusal is None


def test_a_committed_lease_that_runs_out_is_released_not_dropped() -> None:
    """A tenant may still be inside when its time ends: the piece stays taken until cleared."""
    before = run(Ledger(), reserve(), commit(1, ttl_s=50.0)).ledger
    outcome = decide(before, Tick(), at(150.0))
    assert outcome.changes[0].after is LeaseState.RELEASING
    assert outcome.changes[0].cause == "expired"
    refused = decide(outcome.ledger, reserve(L2), at(150.0))
    assert refused.reply.refusal is Refusal.ALREADY_LEASED
    renew = Renew(lease=L1, token=1, ttl_s=50.0, epoch=1)
    assert decide(outcome.ledger, renew, at(151.0)).reply.refusal is Refusal.EXPIRED


def test_renew_never_shortens() -> None:
    """A renewal moves the end away; a late duplicate of a short one moves it nowhere."""
    before = run(Ledger(), reserve(), commit(1, ttl_s=50.0)).ledger
    longer = decide(before, Renew(lease=L1, token=1, ttl_s=90.0, epoch=1), at(120.0))
    assert longer.reply.lease is not None
    assert longer.reply.lease.expires_at_s == 210.0
    again = decide(longer.ledger, Renew(lease=L1, token=1, ttl_s=1.0, epoch=1), at(121.0))
    assert again.ledger == longer.ledger


def test_a_lease_of_another_boot_is_over() -> None:
    """After a reboot no lease holds, whatever its end was, and its token is not used again."""
    before = run(Ledger(), reserve(), commit(1), reserve(L2, piece(P2, 5))).ledger
    outcome = decide(before, commit(2, L2), at(5.0, boot_id="boot-b"))
    assert outcome.reply.refusal is Refusal.OTHER_BOOT
    assert outcome.ledger.leases == ()
    assert {change.cause for change in outcome.changes} == {"boot"}
    anew = decide(outcome.ledger, reserve(LeaseId("l3")), at(5.0, boot_id="boot-b"))
    assert anew.reply.token == 3


def test_repeated_commands_get_the_same_answer() -> None:
    """Every command, sent twice, changes nothing the second time and answers alike."""
    ledger = Ledger()
    for command in (
        reserve(),
        commit(1),
        Renew(lease=L1, token=1, ttl_s=5.0, epoch=1),
        release(token=1),
    ):
        first = decide(ledger, command, VIEW)
        second = decide(first.ledger, command, VIEW)
        assert second.ledger == first.ledger
        assert second.reply == first.reply
        assert second.changes == ()
        ledger = first.ledger


def test_same_id_for_something_else_is_a_conflict() -> None:
    """An id stands for one question only."""
    before = run(Ledger(), reserve()).ledger
    assert run(before, reserve(L1, piece(P2, 5))).reply.refusal is Refusal.CONFLICT
    assert run(before, reserve(tenant=RED)).reply.refusal is Refusal.CONFLICT


def test_late_duplicate_does_not_revive_a_lease() -> None:
    """A reservation that arrives again after its release is refused, also if it never arrived."""
    assert run(Ledger(), reserve(), release(), reserve()).reply.refusal is Refusal.EXPIRED
    assert run(Ledger(), release(), reserve()).reply.refusal is Refusal.EXPIRED


def test_what_is_remembered_is_bounded() -> None:
    """Ended leases are remembered, newest first to stay, in bounded number."""
    ledger = Ledger()
    for number in range(MAX_ENDED + 10):
        ledger = run(ledger, release(LeaseId(f"l{number}"))).ledger
    assert len(ledger.ended) == MAX_ENDED
    assert ledger.ended[-1].lease == f"l{MAX_ENDED + 9}"


def test_older_brain_is_refused() -> None:
    """Once a brain of a later term has spoken, an earlier one changes nothing."""
    before = run(Ledger(), reserve(epoch=7)).ledger
    for command in (reserve(L2, piece(P2, 5), epoch=6), commit(1, epoch=6)):
        outcome = run(before, command)
        assert outcome.reply.refusal is Refusal.STALE_EPOCH
        assert outcome.ledger == before
    assert run(before, commit(1, epoch=8)).reply.refusal is None


def test_only_its_tenant_releases_without_a_token() -> None:
    """Without the token, a lease is given back by its own tenant only."""
    before = run(Ledger(), reserve(), commit(1)).ledger
    assert run(before, release(tenant=RED)).reply.refusal is Refusal.CONFLICT
    assert run(before, release()).reply.refusal is None


def test_piece_made_anew_is_not_committed() -> None:
    """A reservation never reaches the successor of its piece."""
    before = run(Ledger(), reserve()).ledger
    outcome = decide(before, commit(1), at(101.0, generations={P1: 2}))
    assert outcome.reply.refusal is Refusal.STALE_GENERATION
    assert outcome.reply.generations == (piece(P1, 2),)


def test_blocked_pieces_keep_their_reason() -> None:
    """A draining or unhealthy piece is refused with what the caller said about it."""
    block = Block(refusal=Refusal.DRAINING, reason="drained by the operator")
    outcome = run(Ledger(), reserve(), view=replace(VIEW, blocked={P1: block}))
    assert outcome.reply.refusal is Refusal.DRAINING
    assert "drained by the operator" in outcome.reply.reason


@pytest.mark.parametrize(
    "change",
    [
        {"ttl_s": 0.0},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": 1e9},
        {"tenant": TenantId("")},
        {"lease": LeaseId("")},
        {"lease": LeaseId("x" * 300)},
        {"pieces": ()},
        {"pieces": (piece(P1, 1), piece(P1, 1))},
    ],
)
def test_senseless_reservations_are_refused(change: dict[str, Any]) -> None:
    """What cannot be meant is refused as invalid and spends nothing."""
    outcome = run(Ledger(), replace(reserve(), **change))
    assert outcome.reply.refusal is Refusal.INVALID
    assert outcome.ledger.highest_token == 0


def test_local_tenants_enter_free_pieces_and_their_own() -> None:
    """Without a brain the node lends a free piece itself; a tenant may enter its own again."""
    enter = Enter(lease=L1, tenant=BLUE, partition=P1)
    first = run(Ledger(), enter)
    assert first.reply.lease is not None
    assert first.reply.lease.state is LeaseState.COMMITTED
    again = run(first.ledger, replace(enter, lease=L2))
    assert again.ledger == first.ledger
    assert again.reply.token == 1
    other = run(first.ledger, replace(enter, lease=L2, tenant=RED))
    assert other.reply.refusal is Refusal.ALREADY_LEASED
    assert run(Ledger(), replace(enter, partition=PartitionId("x"))).reply.refusal is (
        Refusal.NOT_FOUND
    )


def test_with_a_brain_only_its_leases_let_tenants_in() -> None:
    """Where a brain decides, a free piece is not lent locally, and a reserved one not entered."""
    view = replace(VIEW, standalone=False)
    enter = Enter(lease=L2, tenant=BLUE, partition=P1)
    assert run(Ledger(), enter, view=view).reply.refusal is Refusal.NO_BRAIN
    reserved = run(Ledger(), reserve(), view=view).ledger
    assert run(reserved, enter, view=view).reply.refusal is Refusal.WRONG_STATE
    committed = run(reserved, commit(1), view=view).ledger
    assert run(committed, enter, view=view).reply.token == 1
    stale = decide(committed, enter, replace(view, generations={P1: 9}))
    assert stale.reply.refusal is Refusal.STALE_GENERATION


# --- any interleaving ----------------------------------------------------------------------------

PARTITIONS = tuple(PartitionId(f"d/p@{n}") for n in range(4))
TENANTS = (BLUE, RED)
LEASES = tuple(LeaseId(f"l{n}") for n in range(6))


@dataclasses.dataclass
class Known:
    """What an outside observer has been told."""

    tokens: dict[int, LeaseId] = dataclasses.field(default_factory=dict)
    commits: int = 0


class LeaseMachine(RuleBasedStateMachine):
    """Brains, duplicates, reordering, clocks, remade pieces, crashes and reboots against one node.

    Commands go into a network that may deliver them late, twice or never. A crash throws away what
    is not on disk; a save happens before the answer is believed, as the caller must do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.disk = Ledger()
        self.now_s = 10.0
        self.boot = 0
        self.generations = dict.fromkeys(PARTITIONS, 1)
        self.network: list[Command] = []
        self.known = Known()
        self.tokens_of: dict[LeaseId, int] = {}

    def view(self) -> View:
        return View(
            now_s=self.now_s, boot_id=f"boot-{self.boot}", generations=dict(self.generations)
        )

    def deliver(self, command: Command) -> None:
        before, view = self.ledger, self.view()
        outcome = decide(before, command, view)
        self.save(outcome)
        self.ledger = outcome.ledger
        reply = outcome.reply
        assert outcome.ledger.highest_token >= before.highest_token
        assert outcome.ledger.brain_epoch >= before.brain_epoch
        for change in outcome.changes:
            self.check_change(change, view)
        if reply.refusal is None and isinstance(command, Reserve):
            assert reply.lease is not None
            self.granted(reply.token, command.lease)
        again = decide(outcome.ledger, command, view)
        assert again.ledger == outcome.ledger
        assert again.changes == ()
        if reply.refusal is None and not isinstance(command, Cleared):
            assert again.reply.refusal is None

    def save(self, outcome: Outcome) -> None:
        self.disk = outcome.ledger

    def granted(self, token: int, lease: LeaseId) -> None:
        assert self.known.tokens.setdefault(token, lease) == lease
        assert self.tokens_of.setdefault(lease, token) == token

    def check_change(self, change: Change, view: View) -> None:
        lease = change.lease
        if change.after is LeaseState.COMMITTED:
            assert lease.boot_id == view.boot_id
            assert change.before in {LeaseState.RESERVED, None}
            assert lease.expires_at_s is None or lease.expires_at_s > view.now_s
            for one in lease.pieces:
                assert view.generations[one.partition] == one.generation
        if change.after is None and change.before is LeaseState.COMMITTED:
            assert change.cause == "boot"  # else its tenant could still be inside

    @rule(
        lease=st.sampled_from(LEASES),
        tenant=st.sampled_from(TENANTS),
        wanted=st.sets(st.sampled_from(PARTITIONS), min_size=1, max_size=3),
        skew=st.sampled_from((0, 0, 0, -1, 1)),
        epoch=st.integers(0, 3),
        ttl_s=st.floats(0.5, 20),
    )
    def send_reserve(  # noqa: PLR0917 - hypothesis passes them by name
        self,
        lease: LeaseId,
        tenant: TenantId,
        wanted: set[PartitionId],
        skew: int,
        epoch: int,
        ttl_s: float,
    ) -> None:
        pieces = tuple(piece(one, self.generations[one] + skew) for one in sorted(wanted))
        self.network.append(
            Reserve(lease=lease, tenant=tenant, pieces=pieces, ttl_s=ttl_s, epoch=epoch)
        )

    @rule(
        lease=st.sampled_from(LEASES),
        skew=st.sampled_from((0, 0, 0, -1, 1)),
        epoch=st.integers(0, 3),
        ttl_s=st.none() | st.floats(0.5, 40),
        renew=st.booleans(),
    )
    def send_commit(
        self, lease: LeaseId, skew: int, epoch: int, ttl_s: float | None, renew: bool
    ) -> None:
        token = self.tokens_of.get(lease, 1) + skew
        if renew and ttl_s is not None:
            self.network.append(Renew(lease=lease, token=token, ttl_s=ttl_s, epoch=epoch))
        else:
            self.network.append(Commit(lease=lease, token=token, ttl_s=ttl_s, epoch=epoch))

    @rule(
        lease=st.sampled_from(LEASES),
        tenant=st.sampled_from(TENANTS),
        with_token=st.booleans(),
        epoch=st.integers(0, 3),
    )
    def send_release(self, lease: LeaseId, tenant: TenantId, with_token: bool, epoch: int) -> None:
        token = self.tokens_of.get(lease) if with_token else None
        self.network.append(Release(lease=lease, token=token, tenant=tenant, epoch=epoch))

    @rule(
        lease=st.sampled_from(LEASES),
        tenant=st.sampled_from(TENANTS),
        partition=st.sampled_from(PARTITIONS),
    )
    def enter(self, lease: LeaseId, tenant: TenantId, partition: PartitionId) -> None:
        self.deliver(Enter(lease=lease, tenant=tenant, partition=partition))

    @rule(lease=st.sampled_from(LEASES))
    def clear(self, lease: LeaseId) -> None:
        self.deliver(Cleared(lease=lease))

    @rule(data=st.data(), keep=st.booleans())
    def receive(self, data: st.DataObject, keep: bool) -> None:
        """Deliver any of the commands under way: early, late, once, or again."""
        if not self.network:
            return
        position = data.draw(st.integers(0, len(self.network) - 1))
        command = self.network[position]
        if not keep:
            del self.network[position]
        self.deliver(command)

    @rule(step_s=st.floats(0.01, 15))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def tick(self) -> None:
        self.deliver(Tick())

    @rule(partition=st.sampled_from(PARTITIONS))
    def remade(self, partition: PartitionId) -> None:
        """Somebody makes a piece anew; our own planner never touches a leased one."""
        self.generations[partition] += 1

    @rule()
    def crash(self) -> None:
        """The agent dies and starts again: what is on disk is what there is."""
        self.ledger = self.load()

    def load(self) -> Ledger:
        return self.disk

    @rule()
    def reboot(self) -> None:
        self.crash()
        self.boot += 1
        self.now_s = 1.0

    @invariant()
    def no_partition_in_two_leases(self) -> None:
        held = [one.partition for lease in self.ledger.leases for one in lease.pieces]
        assert len(held) == len(set(held))

    @invariant()
    def every_token_once(self) -> None:
        tokens = [lease.token for lease in self.ledger.leases]
        assert len(tokens) == len(set(tokens))
        assert all(token <= self.ledger.highest_token for token in tokens)
        for lease in self.ledger.leases:
            assert self.known.tokens.setdefault(lease.token, lease.id) == lease.id

    @invariant()
    def leased_pieces_are_protected(self) -> None:
        protected = self.ledger.protected()
        for lease in self.ledger.leases:
            assert {one.partition for one in lease.pieces} <= protected


LeaseMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True
)


TestAnyInterleaving = LeaseMachine.TestCase


def test_remembering_only_the_newest_token_would_be_noticed() -> None:
    """The machine above can fail: a ledger that re-uses tokens breaks its invariants."""
    machine = LeaseMachine()
    machine.deliver(reserve(L1, piece(PARTITIONS[0], 1)))
    machine.deliver(release())
    machine.ledger = replace(machine.ledger, highest_token=0)
    with pytest.raises(AssertionError):
        machine.deliver(reserve(L2, piece(PARTITIONS[1], 1)))
