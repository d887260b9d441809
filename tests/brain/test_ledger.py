"""The ledger on SQLite and on a real PostgreSQL server: compare-and-set, all or nothing, terms."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_brain.ledger import Event, Grant, LeaseRow, Ledger, LedgerError, StaleTermError

BOOT = "boot-a"


def postgres_bin() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Give the URL of a private server on a socket of its own."""
    folder = postgres_bin()
    if folder is None:
        pytest.skip("needs a PostgreSQL server: initdb is not installed")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs psycopg: install alloy-agent[postgres]")
    home = Path(tempfile.mkdtemp(prefix="alloy-pg-"))
    as_user = []
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(home, "nobody")
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    data = home / "data"

    def run(*words: str | Path, check: bool = True) -> None:
        command = [*as_user, *map(str, words)]
        subprocess.run(command, check=check, capture_output=True, cwd=home)

    control = (folder / "pg_ctl", "-D", data)
    try:
        run(folder / "initdb", "-D", data, "-A", "trust", "-U", "alloy", "--no-sync")
        options = f"-k {home} -c listen_addresses= -c fsync=off"
        run(*control, "-w", "-o", options, "-l", home / "log", "start")
        try:
            yield f"postgresql://alloy@/postgres?host={home}"
        finally:
            run(*control, "-m", "immediate", "stop", check=False)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "brain.db")
    address: str = request.getfixturevalue("postgres")
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        for table in ("meta", "held", "leases", "decisions", "events", "heads"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
    return address


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    made = Ledger(url, BOOT)
    made.begin_term()
    yield made
    made.close()


def lease(name: str, *pieces: str, generation: int = 1) -> LeaseRow:
    return LeaseRow(
        lease=name,
        request=f"r-{name}",
        digest="x",
        tenant="t",
        state="reserved",
        decision="d",
        grants=tuple(
            Grant(node="n", device="D", partition=piece, generation=generation) for piece in pieces
        ),
        made_wall_s=0.0,
    )


def test_a_piece_has_one_holder(ledger: Ledger) -> None:
    """The second reservation of a piece is refused and told who has it."""
    assert ledger.reserve(lease("l1", "p1", "p2"), 100.0, 0.0) is None
    taken = ledger.reserve(lease("l2", "p2", "p3"), 100.0, 1.0)
    assert taken is not None
    assert (taken.partition, taken.lease) == ("p2", "l1")


def test_a_gang_is_all_or_nothing(ledger: Ledger) -> None:
    """A refused gang leaves none of its pieces behind."""
    ledger.reserve(lease("l1", "p2"), 100.0, 0.0)
    ledger.reserve(lease("l2", "p1", "p2"), 100.0, 0.0)
    assert [holder[1] for holder in ledger.holders()] == ["p2"]
    assert ledger.lease("l2") is None
    assert ledger.reserve(lease("l3", "p1"), 100.0, 0.0) is None


def test_generations_only_grow(ledger: Ledger) -> None:
    """A decision on an older generation than one that was lent is refused."""
    first = lease("l1", "p1", generation=5)
    assert ledger.reserve(first, 100.0, 0.0) is None
    ledger.release(first, 1.0)
    taken = ledger.reserve(lease("l2", "p1", generation=4), 100.0, 0.0)
    assert taken is not None
    assert taken.generation == 5
    assert ledger.reserve(lease("l3", "p1", generation=6), 100.0, 0.0) is None


def test_a_forgotten_reservation_ends(ledger: Ledger) -> None:
    """A reservation past its time is no obstacle, one that was committed is."""
    one = lease("l1", "p1")
    ledger.reserve(one, 10.0, 0.0)
    assert ledger.reserve(lease("l2", "p1"), 30.0, 9.0) is not None
    second = lease("l3", "p1")
    assert ledger.reserve(second, 30.0, 11.0) is None
    ledger.save(second)
    assert ledger.reserve(lease("l4", "p1"), 1e9, 1e8) is not None


def test_times_of_another_boot_mean_nothing(url: str) -> None:
    """After a reboot a reservation is not over by the clock: the node's books decide."""
    before = Ledger(url, "boot-before")
    before.begin_term()
    before.reserve(lease("l1", "p1"), 10.0, 0.0)
    before.close()
    after = Ledger(url, "boot-after")
    after.begin_term()
    assert after.reserve(lease("l2", "p1"), 1e9, 1e8) is not None
    after.close()


def test_an_older_brain_changes_nothing(url: str) -> None:
    """Two brains on one ledger: the one whose term is over is refused every change."""
    older, newer = Ledger(url, BOOT), Ledger(url, BOOT)
    assert (older.begin_term(), newer.begin_term()) == (1, 2)
    with pytest.raises(StaleTermError, match="term 2 is in office"):
        older.reserve(lease("l1", "p1"), 10.0, 0.0)
    with pytest.raises(StaleTermError):
        older.release(lease("l1", "p1"), 0.0)
    assert newer.reserve(lease("l1", "p1"), 10.0, 0.0) is None
    older.close()
    newer.close()


def test_many_at_once_never_share_a_piece(url: str) -> None:
    """Eight connections that want overlapping gangs: each piece ends with at most one lease."""
    opener = Ledger(url, BOOT)
    term = opener.begin_term()
    ledgers = [Ledger(url, BOOT) for _ in range(8)]
    for one in ledgers:
        one.term = term

    def run(index: int) -> list[str]:
        won = []
        for number in range(12):
            row = lease(f"l{index}-{number}", *(f"p{(number + k) % 16}" for k in range(3)))
            if ledgers[index].reserve(row, 1e9, 0.0) is None:
                won.append(row.lease)
        return won

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = {name for names in pool.map(run, range(8)) for name in names}
    held: dict[str, int] = {}
    for _, _, _, name in opener.holders():
        held[name] = held.get(name, 0) + 1
    assert set(held) == won
    assert set(held.values()) == {3}
    for one in (*ledgers, opener):
        one.close()


def test_everything_is_there_after_a_restart(url: str) -> None:
    """Leases, decisions, events and their heads outlive the process."""
    first = Ledger(url, BOOT)
    first.begin_term()
    row = lease("l1", "p1")
    first.reserve(row, 10.0, 0.0)
    first.record("d1", "r1", "l1", placed=True, body=b"\x00record")
    event = Event(node="n", epoch=2**63 + 5, sequence=3, kind="finding", body=b"\xff\x00")
    first.keep([event, event])
    first.close()
    again = Ledger(url, BOOT)
    assert again.begin_term() == 2
    assert again.leases() == [row]
    assert [again.decision(**{k: v}) for k, v in (("id_", "d1"), ("lease", "l1"))] == [
        b"\x00record"
    ] * 2
    assert again.head("n", 2**63 + 5) == 3
    assert again.events("n") == [event]
    again.close()


def test_a_term_can_be_raised(ledger: Ledger) -> None:
    """Whoever takes over from a lost ledger begins above the nodes' term."""
    assert ledger.begin_term(40) == 40
    assert ledger.begin_term() == 41


@pytest.mark.parametrize(
    "bad", ["/proc/no/brain.db", "postgresql://nobody:secret@127.0.0.1:1/none"]
)
def test_a_ledger_that_cannot_be_opened_is_one_line(bad: str) -> None:
    """The failure names the ledger, without its password, and a cure."""
    if bad.startswith("postgres") and importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs psycopg: install alloy-agent[postgres]")
    with pytest.raises(LedgerError) as caught:
        Ledger(bad, BOOT)
    text = str(caught.value)
    assert "secret" not in text
    assert text.startswith("ledger ")
    assert "\n" not in text


def test_a_damaged_ledger_is_said(tmp_path: Path) -> None:
    """A file that is no database is refused, and left as it is."""
    path = tmp_path / "brain.db"
    path.write_bytes(b"not a database, but somebody's notes" * 100)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="check"):
        Ledger(str(path), BOOT)
    assert path.read_bytes() == before
