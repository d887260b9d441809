"""What the agent remembers, and what it does when the disk does not play along."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from alloy_agent.errors import AlloyError, InvariantError, StoreCorruptError, StoreError
from alloy_agent.model import (
    Create,
    DeviceId,
    Layout,
    Lease,
    LeasedPiece,
    LeaseId,
    LeaseState,
    PartitionId,
    PartitionSpec,
    Placement,
    Plan,
    PlannedStep,
    TenantId,
    Verdict,
)
from alloy_agent.store import (
    Binding,
    EntryState,
    LastVerdict,
    PieceRef,
    RunStatus,
    Store,
    files,
    opening,
    schema,
)

P = PartitionId("gpu-a/1g@0")
Q = PartitionId("gpu-a/1g@1")
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount file systems")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "state")
    yield opened
    opened.close()


def lease(token: int, name: str = "l1") -> Lease:
    return Lease(
        id=LeaseId(name),
        tenant=TenantId("t"),
        pieces=(LeasedPiece(partition=P, generation=1),),
        token=token,
        state=LeaseState.COMMITTED,
        boot_id="b",
        granted_at_s=1.0,
        expires_at_s=None,
    )


def a_plan(name: str = "one") -> Plan:
    spec = PartitionSpec(
        device=DeviceId("gpu-a"), profile="1g", size=1, placement=Placement(start=0, size=1)
    )
    step = PlannedStep(number=1, step=Create(device=spec.device, spec=spec))
    return Plan(layout=Layout(name=name), boot_id="b", observed_sequence=1, steps=(step,))


def fill(state_dir: Path) -> None:
    """Leave a store behind in which every table has rows."""
    store = Store.open(state_dir)
    store.next_epoch()
    store.generation_of(P, "x")
    store.geometry_of(DeviceId("gpu-a"), "d")
    store.save_lease(lease(7))
    store.bind(Binding(partition=P, generation=1, tenant=TenantId("t"), since_s=1.0, boot_id="b"))
    store.set_last_verdicts([LastVerdict(check="CPU-01", subject=P, verdict=Verdict.PASS)])
    store.outbox_add("n", "finding", b"{}")
    run = store.begin(a_plan())
    position = store.intent(run, 1, a_plan().steps[0].step)
    store.outcome(run, position, None, made=(PieceRef(partition=Q, incarnation="y"),))
    store.finish(run, RunStatus.APPLIED)
    store.close()


# --- what is kept ---


def test_same_incarnation_same_generation(store: Store) -> None:
    """A generation counts incarnations at one place and never goes down."""
    assert [store.generation_of(P, i) for i in ("x", "x", "y", "x", "x")] == [1, 1, 2, 3, 3]
    assert store.generation_of(Q, "x") == 1


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """What was kept is there after closing and opening again."""
    fill(tmp_path)
    store = Store.open(tmp_path)
    assert store.generation_of(P, "x") == 1
    assert store.geometry_of(DeviceId("gpu-a"), "d") == 1
    assert store.geometry_of(DeviceId("gpu-a"), "e") == 2
    assert store.leases() == (lease(7),)
    assert store.highest_token() == 7
    assert store.epoch() == 1
    assert store.next_epoch() == 2
    assert [b.tenant for b in store.bindings(P)] == ["t"]
    assert store.last_verdicts()["CPU-01", P].verdict is Verdict.PASS
    assert [row.kind for row in store.outbox_pending()] == ["finding"]
    assert store.desired() == Layout(name="one")
    assert store.managed() == {Q: "y"}
    assert [run.status for run in store.runs()] == [RunStatus.APPLIED]
    store.close()


def test_a_token_outlives_its_lease(tmp_path: Path) -> None:
    """The highest token stays when the lease goes, over restarts, and never goes down."""
    store = Store.open(tmp_path)
    store.save_lease(lease(9))
    store.drop_lease(LeaseId("l1"))
    assert store.raise_token(3) == 9
    store.save_ledger([lease(10, "l2"), lease(11, "l3")], 12)
    store.close()
    store = Store.open(tmp_path)
    assert {entry.id for entry in store.leases()} == {"l2", "l3"}
    assert store.highest_token() == 12
    store.close()


def test_a_journal_has_one_unfinished_run(store: Store) -> None:
    """A second run cannot begin, and an outcome needs its intent."""
    run = store.begin(a_plan())
    with pytest.raises(InvariantError):
        store.begin(a_plan("two"))
    with pytest.raises(InvariantError):
        store.outcome(run, 1, None)
    position = store.intent(run, 1, a_plan().steps[0].step)
    found = store.unfinished()
    assert found is not None
    assert found.entries[0].state is EntryState.INTENT
    store.outcome(run, position, "no", made=(PieceRef(partition=P, incarnation="z"),))
    assert store.managed() == {P: "z"}, "what a failed step left behind is still the agent's own"
    store.finish(run, RunStatus.APPLIED)
    assert store.unfinished() is None
    assert store.begin(a_plan("two")) == run + 1


def test_a_run_that_failed_takes_its_wish_back(store: Store) -> None:
    """After a roll-back the layout before it is desired again; after success the new one is."""
    run = store.begin(a_plan("one"))
    assert store.desired() == Layout(name="one")
    store.finish(run, RunStatus.APPLIED)
    run = store.begin(a_plan("two"))
    store.finish(run, RunStatus.ROLLED_BACK)
    assert store.desired() == Layout(name="one")


def test_old_runs_are_forgotten(store: Store) -> None:
    """The journal is bounded."""
    for _ in range(205):
        run = store.begin(a_plan())
        store.intent(run, 1, a_plan().steps[0].step)
        store.finish(run, RunStatus.APPLIED)
    assert len(store.runs(1000)) == 200
    assert store.run(1) is None


def test_the_outbox_is_in_order_and_repeats_nothing(store: Store) -> None:
    """Events stay until acknowledged, in order; a sequence is never used twice."""
    rows = [store.outbox_add("n", "k", bytes([n])) for n in range(5)]
    assert [row.sequence for row in rows] == [1, 2, 3, 4, 5]
    assert store.outbox_acknowledge(3) == 3
    assert store.outbox_pending() == tuple(rows[3:])
    assert store.outbox_acknowledge(99) == 2
    assert store.outbox_acknowledged() == 5, "no acknowledgement of what was never sent"
    assert store.outbox_add("n", "k", b"").sequence == 6
    assert store.outbox_acknowledge(1) == 0
    assert store.outbox_acknowledged() == 5


def test_a_full_outbox_drops_the_oldest_and_says_so(store: Store) -> None:
    """The outbox is bounded by rows and by bytes, and every drop is counted."""
    for _ in range(5):
        store.outbox_add("n", "k", b"12345678", max_rows=3)
    assert [row.sequence for row in store.outbox_pending()] == [3, 4, 5]
    store.outbox_add("n", "k", b"12345678", max_bytes=16)
    assert [row.sequence for row in store.outbox_pending()] == [5, 6]
    state = store.outbox_state()
    assert (state.rows, state.size_bytes, state.dropped, state.acknowledged) == (2, 16, 4, 0)


def test_a_full_outbox_keeps_what_must_not_be_lost(store: Store) -> None:
    """Kinds that are kept stay in order, even beyond the bound, and acknowledging still works."""
    keep = frozenset({"finding"})
    for kind in ("finding", "usage", "finding", "usage", "finding"):
        store.outbox_add("n", kind, b"x", max_rows=2, keep=keep)
    assert [row.sequence for row in store.outbox_pending()] == [1, 3, 5]
    assert store.outbox_state().dropped == 2
    assert store.outbox_acknowledge(3) == 2
    assert store.outbox_add("n", "usage", b"x").sequence == 6


def test_bindings_go_with_their_partition(store: Store) -> None:
    """Removing a piece removes who was in it; unbinding is by tenant or process."""
    for tenant, pid in (("t", None), ("t", 5), ("u", 6)):
        store.bind(
            Binding(
                partition=P,
                generation=1,
                tenant=TenantId(tenant),
                pid=pid,
                since_s=0.0,
                boot_id="b",
            )
        )
    assert store.unbind(P, pid=5) == 1
    assert store.unbind(P, tenant=TenantId("u")) == 1
    assert len(store.bindings()) == 1
    store.set_managed(P, "x")
    store.set_managed(P, None)
    assert store.bindings() == ()


def test_many_threads_write_and_read(store: Store) -> None:
    """Writers take turns, readers see whole transactions, nothing is lost."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(20):
                store.outbox_add("n", str(number), b"x")
                store.generation_of(PartitionId(f"p{number}"), str(step))
                store.outbox_pending(limit=5)
                store.generations()
        except BaseException as exc:  # noqa: BLE001 - told to the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert store.outbox_state().rows == 120
    assert {generation for _, generation in store.generations().values()} == {20}


def write_and_fail(store: Store) -> None:
    with store._write():
        store.set_meta("a", "1")
        store.raise_token(5)
        raise RuntimeError


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    """An exception inside of a transaction takes all of it back."""
    with pytest.raises(RuntimeError):
        write_and_fail(store)
    assert store.meta("a") is None
    assert store.highest_token() == 0


# --- who may open it ---


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    """The directory is 0700, all files in it 0600, also where they were open before."""
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    (state / "state.db").touch(mode=0o644)
    store = Store.open(state)
    store.next_epoch()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    store.close()


def test_a_second_agent_is_refused_with_the_first_ones_pid(store: Store) -> None:
    """Two writers of one directory are impossible, and the error names who has it."""
    with pytest.raises(StoreError, match=rf"process {os.getpid()} has it .*kill {os.getpid()}"):
        Store.open(store.path.parent)


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """A killed agent leaves a directory that the next one can open, and the tokens it gave out."""
    code = (
        "import os, sys; from alloy_agent.store import Store\n"
        "store = Store.open(sys.argv[1]); store.raise_token(5); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -9
    store = Store.open(tmp_path)
    assert store.highest_token() >= 5
    store.close()


def test_reading_works_beside_a_running_agent(store: Store) -> None:
    """A read-only store is one consistent moment, and refuses to write."""
    store.generation_of(P, "x")
    reader = Store.open(store.path.parent, read_only=True)
    store.generation_of(P, "y")
    assert reader.generations() == {P: ("x", 1)}
    assert reader.generation_of(P, "x") == 1
    assert reader.generation_of(P, "new") == 2
    assert reader.generation_of(Q, "new") == 1
    assert reader.geometry_of(DeviceId("d"), "x") == 1
    assert reader.generations() == {P: ("x", 1)}
    with pytest.raises(StoreError, match="reading only"):
        reader.raise_token(1)
    reader.close()


def test_reading_where_there_is_nothing(tmp_path: Path) -> None:
    """A host on which the agent never ran reads as empty, and nothing is made there."""
    reader = Store.open(tmp_path / "none", read_only=True)
    assert reader.unfinished() is None
    assert reader.desired() is None
    assert not (tmp_path / "none").exists()
    reader.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Using a closed store is one error, closing it twice is none."""
    store = Store.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.leases()
    with pytest.raises(StoreError, match="closed"):
        store.raise_token(1)


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    """The agent never writes through a symbolic link."""
    (tmp_path / "state.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        Store.open(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A state directory that is a file, or lies below one, is one line."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="director"):
            Store.open(path)


@ROOT_ONLY
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Who owns the directory could change what the agent believes."""
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 12345, 0)
    with pytest.raises(StoreError, match="uid 12345"):
        Store.open(state)


# --- versions ---


def test_a_newer_version_is_refused_in_one_line(tmp_path: Path) -> None:
    """An older agent does not touch a newer file, rebuild asked for or not."""
    fill(tmp_path)
    con = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    schema.migrate(con, (*schema.MIGRATIONS, ("CREATE TABLE later (a)",)))
    con.close()
    for options in ({}, {"rebuild": True}, {"read_only": True}):
        with pytest.raises(StoreError, match="version 2 is newer than this agent's 1") as caught:
            Store.open(tmp_path, **options)
        assert not isinstance(caught.value, StoreCorruptError)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_an_older_version_is_migrated_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older file is brought up to date in place, after a copy; reading it changes nothing."""
    fill(tmp_path)
    newer = (*schema.MIGRATIONS, ("CREATE TABLE later (a INTEGER, seal INTEGER)",))
    monkeypatch.setattr(schema, "MIGRATIONS", newer)
    monkeypatch.setattr(schema.migrate, "__defaults__", (newer,))
    reader = Store.open(tmp_path, read_only=True)
    assert reader.managed() == {Q: "y"}
    reader.close()
    con = sqlite3.connect(tmp_path / "state.db")
    assert schema.version_of(con) == 1
    con.close()
    store = Store.open(tmp_path)
    assert store.managed() == {Q: "y"}
    assert store.meta("schema_version") == "2"
    store.close()
    kept = tmp_path / "state.db.v1"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    con = sqlite3.connect(kept)
    assert schema.version_of(con) == 1
    con.close()


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """A database that is not the agent's is refused and keeps its content."""
    con = sqlite3.connect(tmp_path / "state.db")
    con.execute("CREATE TABLE theirs (a)")
    con.commit()
    con.close()
    before = (tmp_path / "state.db").read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store.open(tmp_path, rebuild=True)
    assert (tmp_path / "state.db").read_bytes() == before


# --- damage ---


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda p: os.truncate(p, p.stat().st_size // 2),
    "cut to a page": lambda p: os.truncate(p, 4096),
    "zeroed": lambda p: overwrite(p, bytes(p.stat().st_size)),
    "noise": lambda p: overwrite(p, os.urandom(20_000)),
    "text": lambda p: overwrite(p, b"not a database"),
    "header": lambda p: flip(p, 20),
    "application id": lambda p: flip(p, 71),
    "version": lambda p: flip(p, 63, 0x40),
    "page type": lambda p: flip(p, 4096),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_kept_aside_and_rebuilt(how: str, tmp_path: Path) -> None:
    """A damaged file is one error; asked to rebuild, the agent keeps it aside and goes on."""
    fill(tmp_path)
    path = tmp_path / "state.db"
    DAMAGE[how](path)
    broken = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreCorruptError, match=r"state\.db") as caught:
            Store.open(tmp_path, read_only=read_only)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == broken, "nothing is changed until a rebuild is asked for"
    store = Store.open(tmp_path, rebuild=True)
    assert store.kept_aside == tmp_path / "state.db.corrupt-1"
    assert store.kept_aside.read_bytes() == broken
    assert store.unfinished() is None
    assert store.desired() is None
    assert store.highest_token() >= 7, "a token could be given out twice"
    assert store.next_epoch() > 1
    assert store.generation_of(PartitionId("new"), "n") > 1, "a generation could be used twice"
    store.close()
    store = Store.open(tmp_path)
    assert store.kept_aside is None
    store.close()


def test_a_second_damage_gets_the_next_number(tmp_path: Path) -> None:
    """No file that was kept aside is ever overwritten."""
    for number in (1, 2, 3):
        Store.open(tmp_path).close()
        (tmp_path / "state.db").write_bytes(b"x" * 9000)
        store = Store.open(tmp_path, rebuild=True)
        assert store.kept_aside == tmp_path / f"state.db.corrupt-{number}"
        store.close()


def test_one_changed_value_is_found(tmp_path: Path) -> None:
    """A change inside of a row, which SQLite does not notice, is damage; other rows are saved."""
    fill(tmp_path)
    path = tmp_path / "state.db"
    con = sqlite3.connect(path)
    con.execute("UPDATE managed SET incarnation = 'forged'")
    con.commit()
    con.close()
    with pytest.raises(StoreCorruptError, match="a row of managed"):
        Store.open(tmp_path)
    reader = Store.open(tmp_path, read_only=True, rebuild=True)
    assert reader.managed() == {}
    assert reader.leases() == (lease(7),)
    assert reader.kept_aside == path
    reader.close()
    store = Store.open(tmp_path, rebuild=True)
    assert store.managed() == {}, "a forged piece of ours could be destroyed"
    assert store.leases() == (lease(7),), "a tenant's grant was lost though its row was whole"
    assert store.generation_of(P, "x") == 1
    store.close()


def test_a_removed_file_is_no_fresh_start(tmp_path: Path) -> None:
    """With the state file gone, all counting goes on above what was ever given out."""
    fill(tmp_path)
    (tmp_path / "state.db").unlink()
    store = Store.open(tmp_path)
    assert store.managed() == {}
    assert store.highest_token() >= 7
    assert store.generation_of(P, "x") > 1
    assert store.next_epoch() == 2
    store.close()


def test_marks_that_are_damaged_are_renewed(tmp_path: Path) -> None:
    """Damaged marks beside a whole file are written anew; with both lost, counting starts high."""
    fill(tmp_path)
    marks = tmp_path / "marks.json"
    flip(marks, 40)
    assert files.read_marks(tmp_path) is None
    store = Store.open(tmp_path)
    assert store.highest_token() == 7
    store.close()
    found = files.read_marks(tmp_path)
    assert found is not None
    assert found.token_ceiling > 7
    marks.write_text("{")
    (tmp_path / "state.db").write_bytes(b"x" * 9000)
    store = Store.open(tmp_path, rebuild=True)
    assert store.highest_token() > 1_000_000_000
    store.close()


def test_a_log_with_a_flipped_bit_gives_no_token_twice(tmp_path: Path) -> None:
    """Where damage shortens the log, tokens go on above the marks."""
    store = Store.open(tmp_path / "a")
    for token in range(1, 30):
        store.save_lease(lease(token))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.close()
    log = tmp_path / "b" / "state.db-wal"
    assert log.stat().st_size > 40_000
    flip(log, log.stat().st_size // 2)
    store = Store.open(tmp_path / "b")
    assert store.highest_token() >= 29
    store.close()


def read_all(state: Path, **options: bool) -> str | None:
    """Open and read everything; return what was explained instead."""
    try:
        with contextlib.closing(Store.open(state, **options)) as store:
            store.unfinished()
            store.runs()
            store.managed()
            store.leases()
            assert store.highest_token() >= 7
            with contextlib.suppress(StoreCorruptError):  # read lazily: the one table not scanned
                store.outbox_pending()
    except AlloyError as exc:
        return str(exc)
    return None


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1))
@example([(0.0, 1)])
def test_any_flipped_bytes_are_an_explained_error_or_nothing(
    tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    """Whatever bytes change, opening and reading either work or say in one line what is wrong."""
    pattern = tmp_path / "pattern"
    if not pattern.exists():
        fill(pattern)
    state = tmp_path / "state"
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(pattern, state)
    size = (state / "state.db").stat().st_size
    for share, mask in flips:
        flip(state / "state.db", int(share * size), mask)
    for options in ({"read_only": True}, {"rebuild": True}):
        if (explained := read_all(state, **options)) is not None:
            assert "\n" not in explained
            assert "rebuild" not in options or "another program" in explained, explained


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["plan", "previous", "body"]),
    st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers(), st.lists).map(repr)),
)
def test_a_journal_with_any_content_reads_as_an_explained_error(
    tmp_path: Path, column: str, content: bytes | str
) -> None:
    """A sealed row that is no journal is a StoreCorruptError naming it, never a traceback."""
    state = tmp_path / "state"
    shutil.rmtree(state, ignore_errors=True)
    store = Store.open(state)
    data = content.encode() if isinstance(content, str) else content
    run = store.begin(a_plan())
    store.intent(run, 1, a_plan().steps[0].step)
    with store._write() as con:
        if column == "body":
            store._put(con, "entries", run, 1, data)
        else:
            row = list(store._rows("runs")[0])
            row[3 if column == "plan" else 4] = data
            store._put(con, "runs", *row)
    with pytest.raises(StoreCorruptError, match="run 1"):
        store.unfinished()
    store.close()


# --- disks that refuse, for real ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "alloy-test", str(folder)],
        check=True,
    )
    yield folder
    subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


def save_many(store: Store) -> None:
    for number in range(200):
        store.save_lease(lease(6 + number, f"l{number}"))


def fill_disk(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise


@ROOT_ONLY
@pytest.mark.host
def test_a_full_disk_stops_writes_and_keeps_what_there_was(small_disk: Path) -> None:
    """ENOSPC is one error with the cure; reading goes on, and writing once there is room."""
    store = Store.open(small_disk / "state")
    store.save_lease(lease(5))
    fill_disk(small_disk)
    with pytest.raises(StoreError, match=r"no space is left.*free some space"):
        save_many(store)
    assert lease(5) in store.leases()
    known = len(store.leases())
    with pytest.raises(StoreError, match="no space"):
        store.begin(a_plan("x" * 100_000))
    assert store.unfinished() is None
    (small_disk / "ballast").unlink()
    store.save_lease(lease(900, "after"))
    assert len(store.leases()) == known + 1
    store.close()
    store = Store.open(small_disk / "state")
    assert store.highest_token() >= 900
    store.close()


@ROOT_ONLY
@pytest.mark.host
@pytest.mark.parametrize("temporary_is_full", [False, True])
def test_a_full_disk_can_still_be_read(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, temporary_is_full: bool
) -> None:
    """With no room for SQLite's own files, in any folder, what is known can be looked at."""
    store = Store.open(small_disk / "state")
    store.save_lease(lease(5))
    store.close()
    if temporary_is_full:
        (small_disk / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(small_disk / "tmp"))
    fill_disk(small_disk)
    reader = Store.open(small_disk / "state", read_only=True)
    assert reader.leases() == (lease(5),)
    reader.close()


@ROOT_ONLY
@pytest.mark.host
def test_a_first_start_on_a_full_disk_is_one_line(small_disk: Path) -> None:
    """Opening with no room at all says so, and leaves nothing that blocks a later start."""
    (small_disk / "state").mkdir(mode=0o700)
    fill_disk(small_disk)
    with pytest.raises(StoreError, match="no space is left"):
        Store.open(small_disk / "state")
    (small_disk / "ballast").unlink()
    store = Store.open(small_disk / "state")
    assert store.next_epoch() == 1
    store.close()


@ROOT_ONLY
@pytest.mark.host
@pytest.mark.parametrize("unclean", [False, True])
def test_a_read_only_disk_can_still_be_read(tmp_path: Path, unclean: bool) -> None:
    """On a read-only disk reading works, also after an unclean stop; writing says why not."""
    origin, mounted = tmp_path / "origin", tmp_path / "mounted"
    fill(tmp_path / "first")
    store = Store.open(tmp_path / "first")
    store.raise_token(55)
    if unclean:
        shutil.copytree(tmp_path / "first", origin)
        (origin / "state.db-shm").unlink()
        assert (origin / "state.db-wal").stat().st_size > 0
    store.close()
    if not unclean:
        shutil.copytree(tmp_path / "first", origin)
    mounted.mkdir()
    subprocess.run(["/bin/mount", "--bind", str(origin), str(mounted)], check=True)
    try:
        subprocess.run(["/bin/mount", "-o", "remount,ro,bind", str(mounted)], check=True)
        reader = Store.open(mounted, read_only=True)
        assert reader.managed() == {Q: "y"}
        assert reader.highest_token() == 55
        reader.close()
        with pytest.raises(StoreError, match=r"read-only.*remount"):
            Store.open(mounted)
    finally:
        subprocess.run(["/bin/umount", "-l", str(mounted)], check=True)


@ROOT_ONLY
@pytest.mark.host
def test_a_user_without_rights_gets_one_line(tmp_path: Path) -> None:
    """Opened by another user, the state says that root is needed."""
    fill(tmp_path / "state")
    code = (
        "import os, sys; from alloy_agent.store import Store; from alloy_agent.errors import *\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "for read_only in (False, True):\n"
        "    try: Store.open(sys.argv[1], read_only=read_only); sys.exit(1)\n"
        "    except StoreError as exc: print(exc)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == 0 and folder != Path("/tmp"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        assert "as root" in line or "uid" in line


def test_sqlite_failures_have_a_cure() -> None:
    """Each way in which SQLite refuses is translated to what the reader can do."""
    path = Path("/nowhere/state.db")
    for code, word in (
        (sqlite3.SQLITE_FULL, "free some space"),
        (sqlite3.SQLITE_IOERR_FSYNC, "check the disk"),
        (sqlite3.SQLITE_BUSY, "lsof"),
        (sqlite3.SQLITE_CORRUPT, "keeps the file aside"),
        (sqlite3.SQLITE_MISUSE, "check the path"),
    ):
        exc = sqlite3.OperationalError("x")
        exc.sqlite_errorcode = code
        assert word in str(files.sqlite_failure(exc, path))


def test_rows_are_sealed_by_table_and_column() -> None:
    """A row that was moved to another table or column does not pass."""
    row = ("a", "b", schema.seal("meta", ("a", "b")))
    assert schema.sealed("meta", row)
    assert not schema.sealed("managed", row)
    assert not schema.sealed("meta", ("b", "a", row[2]))
    assert not schema.sealed("meta", ("a", "b", "c"))
    assert set(opening.PROTECTIVE) <= set(schema.TABLES)
    assert msgspec.json.encode(a_plan())
