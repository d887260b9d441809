"""The lease desk on a real store: what was answered is on disk, whatever dies when."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from alloy_agent import leases
from alloy_agent.errors import ConfigError, LeaseExpiredError, StaleTokenError, StoreError
from alloy_agent.model import LeaseId, PartitionId, TenantId
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto.failures import raise_failure
from alloy_agent.store import Store
from alloy_agent.uplink import codec
from alloy_agent.uplink.desk import LeaseDesk, LeaseStore, _load, _save
from alloy_agent.uplink.outbox import Outbox
from tests.test_leases import LeaseMachine

ROOT = Path(__file__).resolve().parents[2]
PIECE = PartitionId("d/p@0")


def view(now_s: float = 10.0, boot_id: str = "boot-a") -> leases.View:
    return leases.View(now_s=now_s, boot_id=boot_id, generations={PIECE: 1})


def reserve(lease: str = "l1", epoch: int = 1, generation: int = 1) -> pb.BrainMessage:
    return pb.BrainMessage(
        id=f"r-{lease}",
        epoch=epoch,
        reserve=pb.Reserve(
            lease=lease,
            tenant="blue",
            ttl_ms=5000,
            partitions=[pb.PartitionRef(id=PIECE, generation=generation)],
        ),
    )


def commit(lease: str, token: int, ttl_ms: int = 0) -> pb.BrainMessage:
    return pb.BrainMessage(
        id=f"c-{lease}", epoch=1, commit=pb.Commit(lease=lease, token=token, ttl_ms=ttl_ms)
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "state")
    yield made
    made.close()


def test_the_whole_way_of_a_lease(store: Store) -> None:
    """Reserve, commit, release and cleared, each answered on the wire and told as a change."""
    changes: list[tuple[str, str]] = []
    desk = LeaseDesk(
        store, view, lambda change, command, _now: changes.append((change.cause, command))
    )
    granted = desk.handle(reserve())
    assert (granted.status, granted.token, granted.lease) == (pb.STATUS_OK, 1, "l1")
    assert granted.lease_state == pb.LEASE_STATE_RESERVED
    assert granted.expires_in_ms == 5000
    committed = desk.handle(commit("l1", 1))
    assert committed.lease_state == pb.LEASE_STATE_COMMITTED
    assert committed.expires_in_ms == 0
    release = pb.BrainMessage(id="x", epoch=1, release=pb.Release(lease="l1", token=1))
    assert desk.handle(release).lease_state == pb.LEASE_STATE_RELEASING
    desk.cleared(LeaseId("l1"))
    assert changes == [
        ("reserved", "r-l1"),
        ("committed", "c-l1"),
        ("released", "x"),
        ("released", ""),
    ]
    assert store.leases() == ()
    assert store.highest_token() == 1


def test_refusals_arrive_as_their_errors(store: Store) -> None:
    """A refusal on the wire becomes the class of error that says what to do."""
    desk = LeaseDesk(store, view)
    stale = desk.handle(reserve(generation=9))
    assert stale.refusal == pb.REFUSAL_STALE_GENERATION
    assert [(ref.id, ref.generation) for ref in stale.generations] == [(PIECE, 1)]
    with pytest.raises(StaleTokenError, match="its generation is 1, not 9"):
        raise_failure(stale)
    desk.handle(reserve())
    with pytest.raises(StaleTokenError):
        raise_failure(desk.handle(commit("l1", 7)))
    desk._view = lambda: view(99.0)
    with pytest.raises(LeaseExpiredError):
        raise_failure(desk.handle(commit("l1", 1)))
    with pytest.raises(ConfigError, match="not about leases"):
        desk.handle(pb.BrainMessage(audit=pb.Audit()))


def test_what_was_answered_survives(store: Store, tmp_path: Path) -> None:
    """After a restart leases, tokens, the brain's term and ended leases are what they were."""
    desk = LeaseDesk(store, view)
    desk.handle(reserve("l1", epoch=3))
    desk.handle(pb.BrainMessage(id="x", epoch=3, release=pb.Release(lease="l1", tenant="blue")))
    desk.handle(reserve("l2", epoch=3))
    before = desk.ledger
    store.close()
    again = Store.open(tmp_path / "state")
    desk = LeaseDesk(again, view)
    assert desk.ledger == before
    assert desk.ledger.brain_epoch == 3
    late = desk.handle(reserve("l1", epoch=3))
    assert late.refusal == pb.REFUSAL_EXPIRED
    again.close()


def test_after_a_reboot_nothing_holds(store: Store, tmp_path: Path) -> None:
    """Leases of another boot end at the first look, tokens go on growing."""
    desk = LeaseDesk(store, view)
    desk.handle(reserve())
    desk.handle(commit("l1", 1))
    store.close()
    again = Store.open(tmp_path / "state")
    desk = LeaseDesk(again, lambda: view(1.0, "boot-b"))
    desk.tick()
    assert desk.ledger.leases == ()
    assert desk.handle(reserve("l2")).token == 2
    again.close()


def test_the_boot_clock_alone_counts(store: Store) -> None:
    """A lease neither ends nor lives longer when the wall clock jumps: nobody looks at it."""
    now = [10.0]
    desk = LeaseDesk(store, lambda: view(now[0]))
    desk.handle(reserve())
    now[0] = 14.9
    assert desk.handle(commit("l1", 1, ttl_ms=1000)).status == pb.STATUS_OK
    now[0] = 15.9
    desk.tick()
    assert desk.ledger.leases[0].state.value == "releasing"


def test_a_disk_that_refuses_changes_nothing(store: Store) -> None:
    """When a lease cannot be put on disk it is not granted, and the ledger is as before."""
    desk = LeaseDesk(store, view)
    store.close()
    with pytest.raises(StoreError):
        desk.handle(reserve())
    assert desk.ledger.leases == ()


def test_older_brain_is_refused_from_the_welcome_on(store: Store) -> None:
    """The term of a brain is on disk before it is obeyed; an older one is refused at once."""
    desk = LeaseDesk(store, view)
    desk.see_brain(4)
    assert _load(store).brain_epoch == 4
    with pytest.raises(StaleTokenError, match="term 3"):
        desk.see_brain(3)


def test_local_tenant_enters_and_leaves(store: Store) -> None:
    """The desk lends a free piece to a local tenant, and takes it back when he has left."""
    desk = LeaseDesk(store, view)
    entered = desk.enter(LeaseId("exec-1"), TenantId("blue"), PIECE)
    assert entered.token == 1
    assert desk.release(LeaseId("exec-1"), TenantId("blue")).refusal is None
    assert desk.cleared(LeaseId("exec-1")).refusal is None
    assert desk.ledger.leases == ()


def test_killed_between_reserve_and_commit(tmp_path: Path) -> None:
    """Killed -9 after a grant was told, the agent still has it: same token, committed once."""
    script = textwrap.dedent(
        """
        import sys
        from tests.uplink.test_desk import LeaseDesk, Store, reserve, view
        desk = LeaseDesk(Store.open(sys.argv[1]), view)
        for line in sys.stdin:
            print(desk.handle(reserve(line.strip())).token, flush=True)
        """
    )
    folder = str(tmp_path / "state")
    with subprocess.Popen(
        [sys.executable, "-c", script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("l1\n")
        child.stdin.flush()
        token = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    store = Store.open(folder)
    desk = LeaseDesk(store, view)
    assert desk.handle(reserve("l1")).token == token
    assert desk.handle(commit("l1", token)).status == pb.STATUS_OK
    assert desk.handle(reserve("l2")).refusal == pb.REFUSAL_ALREADY_LEASED
    store.close()


KILLED = """
import os, signal, sys
from tests.uplink.test_desk import LeaseDesk, Store, Outbox, commit, event_of, pb, reserve, view

folder, point = sys.argv[1:]
store = Store.open(folder)
outbox = Outbox(store, "node", "boot-a", 1000)
desk = LeaseDesk(store, view, lambda change, command, now_s: outbox.add(event_of(change, now_s)))
desk.handle(reserve("l0"))
desk.handle(pb.BrainMessage(id="x", epoch=1, release=pb.Release(lease="l0", tenant="blue")))


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def after(name):
    inner = getattr(store, name)

    def wrapped(*args, **kwargs):
        found = inner(*args, **kwargs)
        die()
        return found

    return wrapped


name, _, when = point.partition(":")
setattr(store, name, die if when == "before" else after(name))
desk.handle(reserve("l1"))
"""


def event_of(change: leases.Change, now_s: float) -> pb.AgentMessage:
    """Return the event of a change, as the daemon's feed makes it."""
    return pb.AgentMessage(lease_change=codec.lease_change(change, now_s))


def told(store: Store) -> list[str]:
    """Return the lease of every event that waits."""
    outbox = Outbox(store, "node", "boot-a", 1000)
    return [message.lease_change.lease.id for message in outbox.pending(0)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", ["set_meta", "save_ledger", "outbox_add", "_commit"])
def test_a_lease_and_its_event_are_on_disk_together_or_not_at_all(
    tmp_path: Path, point: str, when: str
) -> None:
    """Killed -9 anywhere around a grant, the next start has both the lease and its event, or none.

    Asked again, the command then gives exactly one of each.
    """
    folder = str(tmp_path / "state")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, folder, f"{point}:{when}"], cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = Store.open(folder)
    held = [lease.id for lease in store.leases() if lease.id == "l1"]
    events = [lease for lease in told(store) if lease == "l1"]
    assert held == events
    outbox = Outbox(store, "node", "boot-a", 1000)
    desk = LeaseDesk(
        store, view, lambda change, command, now_s: outbox.add(event_of(change, now_s))
    )
    assert desk.handle(reserve("l1")).status == pb.STATUS_OK
    assert told(store).count("l1") == 1
    store.close()


def test_an_event_that_the_disk_refuses_takes_its_change_back(store: Store) -> None:
    """No lease changes without its event: the ledger, the outbox and the counts are as before."""
    outbox = Outbox(store, "node", "boot-a", 1000)
    woken: list[int] = []
    outbox.on_event(lambda: woken.append(len(outbox.pending(0))))

    def refuse(change: leases.Change, command: str, now_s: float) -> None:
        outbox.add(event_of(change, now_s))
        raise StoreError("the disk is full")

    desk = LeaseDesk(store, view, refuse)
    with pytest.raises(StoreError):
        desk.handle(reserve())
    assert desk.ledger.leases == ()
    assert store.leases() == ()
    assert (outbox.waiting, told(store), woken) == (0, [], [])
    desk = LeaseDesk(store, view, lambda c, _id, now_s: outbox.add(event_of(c, now_s)))
    desk.handle(reserve())
    assert woken == [1]  # the sender is woken once the event can be read


def test_adding_and_acknowledging_from_many_threads_ends(store: Store) -> None:
    """A desk that adds inside of its transaction and a sender that acknowledges never block."""
    outbox = Outbox(store, "node", "boot-a", 1000)
    desk = LeaseDesk(store, view, lambda c, _id, now_s: outbox.add(event_of(c, now_s)))

    def lend() -> None:
        for number in range(40):
            desk.handle(reserve(f"l{number}"))
            back = pb.Release(lease=f"l{number}", tenant="blue")
            desk.handle(pb.BrainMessage(id=f"x{number}", epoch=1, release=back))
            desk.cleared(LeaseId(f"l{number}"))

    def send() -> None:
        while not over.is_set():
            outbox.acknowledge(outbox.last_sequence)

    over = threading.Event()
    sender = threading.Thread(target=send, daemon=True)
    lender = threading.Thread(target=lend, daemon=True)
    sender.start()
    lender.start()
    lender.join(120.0)
    over.set()
    sender.join(60.0)
    assert not lender.is_alive()
    assert not sender.is_alive()


@pytest.mark.parametrize("dies_after", [0, 1])
def test_half_written_ledger_is_still_the_truth(store: Store, dies_after: int) -> None:
    """Dying between the two writes of a release neither revives the lease nor loses its token."""
    desk = LeaseDesk(store, view)
    desk.handle(reserve())
    before = desk.ledger

    class Dying:
        """Lets a number of writes through."""

        def __init__(self) -> None:
            self.left = dies_after

        def spend(self) -> None:
            if self.left == 0:
                raise StoreError("the lights went out")
            self.left -= 1

        def set_meta(self, key: str, value: str) -> None:
            self.spend()
            store.set_meta(key, value)

        def save_ledger(self, rows: object, highest_token: int) -> None:
            self.spend()

        leases = meta = highest_token = None

    command = leases.Release(lease=LeaseId("l1"), token=1, tenant=None, epoch=1)
    after = leases.decide(before, command, view()).ledger
    dying: LeaseStore = Dying()  # type: ignore[assignment]
    with pytest.raises(StoreError):
        _save(dying, before, after)
    found = _load(store)
    assert found == (before if dies_after == 0 else after)


class StoredMachine(LeaseMachine):
    """Any interleaving again, with the ledger on a real disk and each crash a new start from it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="alloy-leases-"))
        self.store = Store.open(self.folder)

    def save(self, outcome: leases.Outcome) -> None:
        if outcome.ledger != self.ledger:
            _save(self.store, self.ledger, outcome.ledger)

    def load(self) -> leases.Ledger:
        self.store.close()
        self.store = Store.open(self.folder)
        loaded = _load(self.store)
        by_id = sorted(self.ledger.leases, key=lambda lease: lease.id)
        assert sorted(loaded.leases, key=lambda lease: lease.id) == by_id
        assert loaded.highest_token == self.ledger.highest_token
        assert loaded.brain_epoch == self.ledger.brain_epoch
        assert loaded.ended == self.ledger.ended
        return loaded

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


StoredMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyInterleavingOnDisk = StoredMachine.TestCase
