"""The law of metering, and what breaks other meters: gaps, restarts, steps, re-used names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.model import Share
from alloy_agent.telemetry import journal, metering
from alloy_agent.telemetry.journal import UsageJournal
from alloy_agent.telemetry.ledger import Ledger
from alloy_agent.telemetry.metering import NS, Account, UsageRow
from tests.telemetry.world import BOOT, device, piece, snapshot

WALL = 1_796_000_400.0  # on the hour


def account(start_s: float = 0.0) -> Account:
    """Return a fresh account."""
    return Account(
        serial=1,
        partition="GPU-0/1g@0",
        generation=1,
        tenant="acme",
        device="GPU-0",
        boot_id=BOOT,
        start_wall_s=WALL,
        start_ns=metering.ns(start_s),
        at_ns=metering.ns(start_s),
        end_ns=metering.ns(start_s + 3600),
    )


def adds_up(one: Account | UsageRow) -> bool:
    """Whether the law holds to the nanosecond."""
    return one.active_ns + one.idle_ns + one.unobserved_ns == one.allocated_ns


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0, 5000), st.floats(-1, 2)), max_size=30).map(sorted),
        max_size=6,
    ),
    st.lists(st.floats(0, 6000), max_size=6),
    st.floats(0.01, 60),
)
def test_allocated_is_active_and_idle_and_unobserved_exactly(
    batches: list[list[tuple[float, float]]], settled_s: list[float], period_s: float
) -> None:
    """Whatever samples come, repeat, jump or stay away, the parts are the whole."""
    one = account()
    for number, batch in enumerate(batches):
        one = metering.advance(one, batch, period_s)
        assert adds_up(one)
        if number < len(settled_s):
            one = metering.settle(one, metering.ns(settled_s[number]), period_s)
            assert adds_up(one)
    assert min(one.active_ns, one.idle_ns, one.unobserved_ns) >= 0


def test_activity_is_the_integral_of_its_samples() -> None:
    """Half busy for ten seconds is five seconds; what came before is unobserved."""
    one = metering.advance(account(), [(s / 10, 0.5) for s in range(1, 101)], 0.1)
    assert one.active_ns == pytest.approx(4.95 * NS, rel=1e-6)
    assert one.unobserved_ns == metering.ns(0.1)
    ramp = metering.advance(account(), [(s / 10, s / 100) for s in range(101)], 0.1)
    assert ramp.active_ns == pytest.approx(5.0 * NS, rel=1e-6)


def test_a_gap_is_unobserved_not_idle() -> None:
    """A source that stops for a minute leaves a minute unobserved."""
    one = metering.advance(account(), [(0.0, 1.0), (0.1, 1.0), (60.1, 1.0), (60.2, 1.0)], 0.1)
    assert one.unobserved_ns == 60 * NS
    assert one.active_ns == metering.ns(0.2)


def test_repetitions_and_frozen_sources_are_not_used_time() -> None:
    """The same source time again and again is one sample; the rest of the time is a gap."""
    one = metering.advance(account(), [(1.0, 1.0)] * 500, 0.1)
    one = metering.settle(one, 100 * NS, 0.1)
    assert one.active_ns == 0
    assert one.unobserved_ns == 100 * NS


def test_energy_splits_by_activity_and_the_rest_is_nobodys() -> None:
    """Shares of the device get their joules, the rest has a line of its own; sums are exact."""
    split, rest = metering.split_energy(100.0, {"a": 0.25, "b": 0.125})
    assert split == {"a": 25.0, "b": 12.5}
    assert rest == pytest.approx(62.5)
    split, rest = metering.split_energy(100.0, {"a": 0.9, "b": 0.6})
    assert sum(split.values()) + rest == pytest.approx(100.0)
    assert rest == pytest.approx(0.0)


# --- the ledger -----------------------------------------------------------------------------------


class Meter:
    """A ledger with clocks of its own."""

    def __init__(self, folder: Path, now_s: float = 100.0, boot: str = BOOT) -> None:
        self.rows: list[UsageRow] = []
        self.folder = folder
        self.ledger = Ledger(UsageJournal(folder), self.rows.append)
        self.now_s, self.wall_s, self.boot = now_s, WALL, boot

    def saw(self, *pieces: object) -> None:
        """Look at the node."""
        seen = snapshot(*pieces, now_s=self.now_s, boot=self.boot)  # type: ignore[arg-type]
        self.ledger.saw(seen, {"GPU-0/1g@0": "lease-1"}, self.now_s, self.wall_s)

    def busy(self, seconds: float, ratio: float = 1.0, generation: int = 1) -> None:
        """Let time go by with samples ten times a second."""
        begun_s = self.now_s
        for tick in range(int(seconds * 10)):
            at_s = begun_s + tick / 10
            self.ledger.used("GPU-0/1g@0", generation, [(at_s, ratio)], 0.1, "gpm")
        self.pass_(seconds)

    def pass_(self, seconds: float, *, wall_s: float | None = None) -> None:
        """Let time go by."""
        self.now_s += seconds
        self.wall_s += seconds if wall_s is None else wall_s
        self.ledger.tick(self.boot, self.now_s, self.wall_s)

    def pieces(self) -> list[UsageRow]:
        """Return the rows of partitions on disk."""
        return [row for row in journal.read(self.folder).rows if row.partition]


def test_an_allocation_becomes_one_row_when_it_ends(tmp_path: Path) -> None:
    """Tenant, lease, shares, method and times are in it, and it adds up."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(30.0)
    meter.saw(piece(tenant=None))
    (row,) = meter.pieces()
    assert (row.tenant, row.lease, row.method) == ("acme", "lease-1", "gpm")
    assert row.allocated_ns == 30 * NS
    assert row.active_ns == pytest.approx(30 * NS, rel=0.01)
    assert adds_up(row)
    assert row.compute_share == pytest.approx(16 / 132)
    assert row.memory_share == pytest.approx(1 / 8)
    assert [r.serial for r in meter.rows if r.partition] == [row.serial]


def test_the_same_place_for_another_tenant_is_another_account(tmp_path: Path) -> None:
    """Re-made under the same index: two rows, two generations, nothing carried over."""
    meter = Meter(tmp_path)
    meter.saw(piece(generation=1, tenant="acme"))
    meter.busy(10.0)
    meter.saw(piece(generation=2, tenant="bolt"))
    meter.busy(10.0, 0.0, generation=2)
    meter.saw()
    first, second = meter.pieces()
    assert (first.tenant, first.generation) == ("acme", 1)
    assert (second.tenant, second.generation) == ("bolt", 2)
    assert first.active_ns > 9 * NS
    assert second.active_ns == 0


def test_hours_are_rows_of_their_own(tmp_path: Path) -> None:
    """At the full hour the account is closed and goes on, without a nanosecond lost."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    for _ in range(3 * 12):
        meter.pass_(300.0)
    meter.saw()
    rows = meter.pieces()
    assert len(rows) >= 3
    assert sum(row.allocated_ns for row in rows) == 3 * 3600 * NS
    assert all(adds_up(row) for row in rows)


def test_a_crash_loses_ten_seconds_and_shows_them(tmp_path: Path) -> None:
    """After a kill the account goes on from its checkpoint; the time between is unobserved."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    meter.busy(7.0)  # not checkpointed
    again = Meter(tmp_path, now_s=meter.now_s + 3.0)
    again.saw(piece())
    again.busy(5.0)
    again.saw(piece(tenant=None))
    (row,) = again.pieces()
    assert row.allocated_ns == 25 * NS
    assert row.unobserved_ns == pytest.approx(10 * NS, abs=0.2 * NS)
    assert adds_up(row)


def test_who_left_while_nobody_looked_ends_at_the_checkpoint(tmp_path: Path) -> None:
    """An allocation that is gone after a restart is not charged for the time without an agent."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    again = Meter(tmp_path, now_s=5000.0)
    again.saw()
    (row,) = again.pieces()
    assert row.allocated_ns == 10 * NS
    assert row.note


def test_a_boot_ends_every_account(tmp_path: Path) -> None:
    """The boot clock starts anew, so accounts of the old boot end where they were kept."""
    meter = Meter(tmp_path, now_s=9000.0)
    meter.saw(piece())
    meter.busy(10.0)
    again = Meter(tmp_path, now_s=20.0, boot="other")
    again.saw(piece())
    again.busy(10.0)
    again.saw()
    rows = again.pieces()
    assert [row.allocated_ns for row in rows] == [10 * NS, 10 * NS]
    assert len({row.serial for row in rows}) == 2


def test_a_wall_clock_step_moves_labels_only(tmp_path: Path) -> None:
    """An hour back and a day forward: durations stay, nothing is charged twice."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.pass_(10.0, wall_s=-3600.0)
    meter.pass_(10.0, wall_s=86400.0)
    meter.pass_(10.0)
    meter.saw()
    assert sum(row.allocated_ns for row in meter.pieces()) == 30 * NS


def test_a_suspend_is_unobserved(tmp_path: Path) -> None:
    """The boot clock runs on while the node sleeps; nobody measured, so nobody knows."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    meter.pass_(7200.0)
    meter.busy(10.0)
    meter.saw()
    unobserved = sum(row.unobserved_ns for row in meter.pieces())
    assert unobserved == pytest.approx(7200 * NS, rel=0.001)


def test_a_row_is_never_written_twice(tmp_path: Path) -> None:
    """Killed between row and checkpoint: the next start sees that the row is there."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    before = (tmp_path / "usage" / "open.json").read_bytes()
    meter.saw()
    (tmp_path / "usage" / "open.json").write_bytes(before)
    again = Meter(tmp_path, now_s=meter.now_s)
    again.saw()
    assert len(again.pieces()) == 1


def test_a_torn_line_costs_that_line_only(tmp_path: Path) -> None:
    """A crash in the middle of a write leaves a broken line that is counted and left alone."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    meter.saw()
    (path,) = (tmp_path / "usage").glob("usage-*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"serial": 99, "kind": "int')
    again = Meter(tmp_path, now_s=meter.now_s)
    again.saw(piece())
    again.busy(10.0)
    again.saw()
    found = journal.read(tmp_path)
    assert found.broken == 1
    assert len([row for row in found.rows if row.partition]) == 2


def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    """What could not be written is written when it can be."""
    from alloy_agent.errors import StoreError

    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.busy(10.0)
    folder = tmp_path / "usage"
    folder.rename(tmp_path / "away")
    with pytest.raises(StoreError):
        meter.saw()
    (tmp_path / "away").rename(folder)
    meter.pass_(11.0)
    assert len(meter.pieces()) == 1


def test_shared_pieces_are_marked_soft(tmp_path: Path) -> None:
    """Where interference cannot be told apart, the row says so."""
    meter = Meter(tmp_path)
    meter.saw(piece(share=Share.OPPORTUNISTIC))
    meter.busy(1.0)
    meter.saw()
    assert meter.pieces()[0].soft


def test_energy_is_charged_to_the_active_and_the_rest_is_a_line(tmp_path: Path) -> None:
    """Half of the device's joules to the one who was active for half, marked as an estimate."""
    meter = Meter(tmp_path)
    meter.saw(piece())
    meter.ledger.spent("GPU-0", 1000.0, {"GPU-0/1g@0": 0.5})
    meter.saw()
    for _ in range(13):
        meter.pass_(300.0)
    rows = journal.read(tmp_path).rows
    by_kind = {row.kind: row for row in rows}
    assert by_kind["interval"].energy_j == pytest.approx(500.0)
    assert by_kind["interval"].energy_method == "active_share"
    assert by_kind["unattributed"].energy_j == pytest.approx(500.0)
    assert device().id == by_kind["unattributed"].device
