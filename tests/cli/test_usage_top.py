"""`usage` and `top`: times, forms, names that are no formulas, pictures of any size, every key."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.cli import main, topview
from alloy_agent.cli.usage import time_of
from alloy_agent.daemon.live import TopDevice, TopDocument, TopPartition
from alloy_agent.daemon.shareviews import TopShare, TopTenant
from alloy_agent.errors import ConfigError
from alloy_agent.telemetry import export
from alloy_agent.telemetry.journal import UsageJournal
from alloy_agent.telemetry.metering import NS, UsageRow

WALL = 1_796_000_400.0


def row(serial: int = 1, tenant: str = "acme", start_wall_s: float = WALL) -> UsageRow:
    """Return an hour of a tenant."""
    return UsageRow(
        serial=serial,
        kind="interval",
        partition="GPU-0/1g@0",
        generation=3,
        tenant=tenant,
        device="GPU-0",
        boot_id="b",
        start_wall_s=start_wall_s,
        allocated_ns=3600 * NS,
        active_ns=1800 * NS,
        idle_ns=1700 * NS,
        unobserved_ns=100 * NS,
        profile="1g.10gb",
        size=1,
        compute_share=1 / 7,
        energy_j=5000.0,
        energy_method="active_share",
    )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Give a state directory with two hours of two tenants."""
    journal = UsageJournal(tmp_path)
    journal.append((row(1), row(2, "=cmd()", WALL + 3600)))
    return tmp_path


def usage(state: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    assert main(["--state-dir", str(state), "usage", *arguments]) == 0
    return capsys.readouterr().out


def test_focus_is_csv_with_the_columns_of_the_standard(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row an hour, custom columns prefixed, the split of energy marked, no formulas."""
    rows = list(csv.DictReader(io.StringIO(usage(state, capsys, "--format", "focus"))))
    assert list(rows[0]) == list(export.COLUMNS)
    assert rows[0]["ResourceId"] == "GPU-0/1g@0#3"
    assert rows[0]["ChargePeriodEnd"] > rows[0]["ChargePeriodStart"]
    assert rows[0]["ConsumedUnit"] == "Slice-Hours"
    assert float(rows[0]["ConsumedQuantity"]) == 1.0
    assert rows[0]["AllocatedMethodId"] == "active_share"
    assert rows[1]["SubAccountId"] == "'=cmd()"
    parts = [float(rows[0][f"x_{n}Seconds"]) for n in ("Used", "Idle", "Unobserved")]
    assert sum(parts) == float(rows[0]["x_AllocatedSeconds"])


def test_json_lines_are_exact(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nanoseconds that add up, seconds for people, and how wrong the figure can be."""
    first, _ = map(json.loads, usage(state, capsys, "--format", "json").splitlines())
    assert first["schema"] == "alloy.usage/v1"
    assert first["row"]["allocated_ns"] == 3600 * NS
    assert first["error_ratio_max"] == pytest.approx(100 / 3600, abs=1e-5)


def test_a_span_and_a_tenant_choose(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from` is included, `--to` is not; a tenant sees its own."""
    begin = "2026-11-30T01:00:00Z"
    assert time_of(begin, "--from", 0.0) == WALL - WALL % 3600
    later = usage(state, capsys, "--from", "2026-11-30T02:00Z", "--format", "json")
    assert len(later.splitlines()) == 1
    assert "acme" not in usage(state, capsys, "--tenant", "bolt")
    assert "acme: had 60 min, active 30 min" in usage(state, capsys, "--tenant", "acme")


@pytest.mark.parametrize("text", ["yesterday", "", "99999999h", "2026-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """One line that names the option."""
    with pytest.raises(ConfigError, match="--from"):
        time_of(text, "--from", 1e9)


def test_ago() -> None:
    """Minutes, hours, days and weeks before now."""
    assert time_of("90m", "--from", 10_000.0) == 4600.0
    assert time_of("2d", "--from", 1e9) == 1e9 - 172_800


# --- top ------------------------------------------------------------------------------------------


def document(pieces: int = 3, **changes: object) -> TopDocument:
    """Return a node with some partitions."""
    partitions = tuple(
        TopPartition(
            id=f"GPU-0/1g.10gb@{n}",
            generation=1,
            device="GPU-0",
            profile="1g.10gb",
            tenant="acme" if n == 0 else "",
            gate="open" if n else "closed",
            gate_name="" if n else "health",
            reason="" if n else "xid:109: context switch timeout",
            active_ratio=None if n == 2 else n / 10,
            memory_used_bytes=float(n << 30),
            memory_bytes=10 << 30,
        )
        for n in range(pieces)
    )
    device = TopDevice(id="GPU-0", index=0, model="H100", condition="ok", health="ok")
    made = TopDocument(
        node="n1", taken_at_s=1.0, snapshot_age_s=0.1, devices=(device,), partitions=partitions
    )
    return msgspec.structs.replace(made, **changes)


def draw(made: TopDocument, view: topview.View, width: int = 80, height: int = 24) -> list[str]:
    """Return a picture as text."""
    history = topview.History()
    history.add(made)
    lines = topview.frame(made, view, history, width, height)
    return ["".join(span.text for span in line) for line in lines]


@given(
    st.integers(1, 200),
    st.integers(0, 60),
    st.sampled_from(topview.VIEWS),
    st.booleans(),
    st.integers(0, 100),
    st.integers(0, 40),
)
def test_a_picture_fits_any_terminal(  # noqa: PLR0917
    width: int, height: int, view: str, helped: bool, top: int, pieces: int
) -> None:
    """Never wider or higher than there is room, whatever is shown and however far scrolled."""
    chosen = topview.View(view=view, help=helped, top=top)
    lines = draw(document(pieces), chosen, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_everything_is_told_in_words() -> None:
    """Without colour: gate, reason, missing values, and the keys."""
    lines = draw(document(), topview.View(), 140)
    assert any("closed health: xid:109" in line for line in lines)
    assert any("@2" in line and " - " in line for line in lines)
    assert "q quit" in lines[-1]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", ["1g@0", "opportunistic-0@0", "a-profile-with-a-long-name@0"])
def test_the_gate_is_always_readable(width: int, name: str) -> None:
    """The bars give way before the gate does: its title and its word are there in full."""
    piece = msgspec.structs.replace(document().partitions[0], id=f"GPU-0/{name}", gate="unknown")
    lines = draw(document(partitions=(piece,)), topview.View(), width)
    assert lines[2].endswith(" GATE")
    assert " unknown" in lines[3]


def test_the_help_fits_a_terminal_of_80_columns() -> None:
    """No line of it is cut."""
    assert max(map(len, topview.HELP)) <= 80


def test_a_name_cannot_command_the_terminal() -> None:
    """Escape sequences in a tenant's name are shown as question marks."""
    piece = msgspec.structs.replace(document().partitions[0], tenant="\x1b[2Jx")
    shown = "\n".join(draw(document(partitions=(piece,)), topview.View()))
    assert "\x1b" not in shown
    assert "?[2Jx" in shown


def test_plain_terminals_get_ascii() -> None:
    """Where the terminal has no UTF-8 not one other character is drawn."""
    assert "\n".join(draw(document(), topview.View(plain=True))).isascii()


def test_order_and_filter() -> None:
    """By activity the busiest first; a filter takes tenant, place, gate and device."""
    made = document(10)
    busiest = topview.ordered(made, topview.View(sort="active"))[0]
    assert busiest.active_ratio == 0.9
    assert [p.tenant for p in topview.ordered(made, topview.View(filter="ACME"))] == ["acme"]
    assert len(topview.ordered(made, topview.View(filter="closed"))) == 1
    assert topview.ordered(made, topview.View(sort="gate"))[0].gate == "closed"


def test_keys() -> None:
    """Each key does what the help says, and leaving is `q` except while typing."""
    view: topview.View | None = topview.View()
    for key in ("tab", "s", "r", "h", "h", "+", "-", " ", "down", "up", "/", "q", "enter"):
        assert view is not None
        view = topview.press(view, key)
    assert view is not None
    assert (view.view, view.sort, view.reverse, view.held) == ("devices", "active", True, True)
    assert view.filter == "q"
    assert topview.press(view, "q") is None


@given(st.lists(st.one_of(st.characters(), st.sampled_from(["tab", "escape", "up", "resize"]))))
def test_any_keys_are_taken(keys: list[str]) -> None:
    """No sequence of keys breaks the view."""
    view: topview.View | None = topview.View()
    for key in keys:
        if view is None:
            return
        view = topview.press(view, key)
        draw(document(), view or topview.View())


def test_the_sparkline_ends_with_now_and_forgets_what_is_gone() -> None:
    """Newest at the right, a gap where there was no value, nothing of an earlier generation."""
    history = topview.History()
    piece = document().partitions[1]
    for second, value in enumerate((0.0, None, 1.0)):
        changed = msgspec.structs.replace(piece, active_ratio=value)
        history.add(document(partitions=(changed,), taken_at_s=float(second)))
    assert history.spark(piece, 5, plain=False) == "  ▁ █"
    for tenth, value in enumerate((None, 0.2, 0.7, 0.1)):  # within a second: its peak
        changed = msgspec.structs.replace(piece, active_ratio=value)
        history.add(document(partitions=(changed,), taken_at_s=3.0 + tenth / 10))
    assert history.spark(piece, 3, plain=False) == " █▆"
    assert history.spark(piece, 3, plain=True) == " #+"
    again = msgspec.structs.replace(piece, generation=2, active_ratio=0.5)
    history.add(document(partitions=(again,)))
    assert history.spark(piece, 3, plain=False).strip() == ""


def shared(**changes: object) -> TopShare:
    """Return a device that production and one neighbour share."""
    tenants = (
        TopTenant(
            name="prod", role="production", weight=1.0, partition="GPU-0/1g.10gb@0", processes=2,
            launches=900, device_s=12.5, lease="", state="running",
        ),
        TopTenant(
            name="batch", role="opportunistic", weight=2.0, partition="GPU-0/1g.10gb@1",
            processes=1, launches=70, device_s=3.25, lease="none", state="frozen",
        ),
    )  # fmt: skip
    share = TopShare(
        device="GPU-0", stage="controlling", verdict="conform", loss_ratio=0.013,
        budget_ratio=0.02, lent_now_ratio=0.4, e_value=1.0, windows=60, keeper="ok",
        tenants=tenants, production_ratio=(1.0, None, 0.5), lent_ratio=(0.4, 0.4, 0.4),
    )  # fmt: skip
    return msgspec.structs.replace(share, **changes)


def test_rate_state_is_shown_and_a_dash_where_nothing_is_controlled() -> None:
    """Per device, per partition, per tenant, and a view of its own; '-' without any of it."""
    made = document(shares=(shared(),))
    lines = draw(made, topview.View(view="shares"), 120)
    (device,) = [line for line in lines if line.startswith("GPU-0")]
    assert re.search(r"controlling conform +1.3% +2.0% +40% .*█ ▅", device)
    assert any("batch" in line and "lease none, frozen" in line for line in lines)
    wide = "\n".join(draw(made, topview.View(), 140))
    assert re.search(r"@0 .* prod running", wide)
    assert re.search(r"@1 .* opp frozen", wide)
    assert re.search(r"@2 .* - ", wide)
    (row,) = [x for x in draw(made, topview.View(view="devices")) if x.startswith(" 0 ")]
    assert " controll " in row
    (row,) = [x for x in draw(document(), topview.View(view="devices")) if x.startswith(" 0 ")]
    assert re.search(r" - +unknown", row)
    bad = shared(verdict="violated", loss_ratio=None, bypasses=("a context of its own",))
    shown = "\n".join(draw(document(shares=(bad,)), topview.View(view="shares"), 120))
    assert "violated       -" in shown
    assert "a context of its own" in shown
    assert "no device is shared now" in "\n".join(draw(document(), topview.View(view="shares")))


def test_tenants_are_added_up() -> None:
    """Pieces, devices, mean activity, memory, and the worst of their gates."""
    pieces = [
        msgspec.structs.replace(p, tenant="acme" if n < 3 else "bolt", active_ratio=n / 10)
        for n, p in enumerate(document(5).partitions)
    ]
    pieces[1] = msgspec.structs.replace(pieces[1], active_ratio=None, device="GPU-1")
    made = document(partitions=tuple(pieces), shares=(shared(),))
    acme, bolt = topview.tenants_of(made)
    assert (acme.partitions, acme.devices, acme.worst) == (3, 2, "closed")
    assert acme.active == pytest.approx(0.1)
    assert acme.rate == "opp frozen, prod running"
    assert (bolt.name, bolt.worst, bolt.rate) == ("bolt", "open", "")
    lines = draw(made, topview.View(view="tenants", sort="active"))
    assert [line.split()[0] for line in lines[3:5]] == ["bolt", "acme"]
    assert "no tenant" in "\n".join(draw(document(0), topview.View(view="tenants")))


@given(st.integers(1, 160), st.sampled_from(topview.VIEWS), st.text(max_size=8))
def test_every_view_fits_with_shares_and_filters(width: int, view: str, text: str) -> None:
    """Whatever is shared and filtered, no line is wider than the terminal."""
    made = document(12, shares=(shared(), shared(device="GPU-1", reason=text)))
    for plain in (False, True):
        chosen = topview.View(view=view, filter=text, plain=plain)
        assert all(len(line) <= width for line in draw(made, chosen, width))


def test_scrolling_stops_at_the_last_row() -> None:
    """However long a key is held, the way back begins at once."""
    made, history = document(40), topview.History()
    view = topview.View(top=500)
    stopped = topview.clamped(made, view, history, 24)
    assert stopped.top < 40
    lines = draw(made, stopped, 80, 24)
    assert "@9" in "\n".join(lines), "rows are in order of their names; @9 is the last"
    assert topview.clamped(made, topview.View(top=0), history, 24).top == 0
