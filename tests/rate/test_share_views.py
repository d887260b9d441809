"""What keepers tell, as facts, figures, policies and pictures: pure parts, without a process."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.conformance.checks import FactBook, judge_partition
from alloy_agent.conformance.checks.base import Grant, Intent
from alloy_agent.conformance.gate import build
from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.pages import HEAD_BYTES, StatePage, make_state
from alloy_agent.conformance.keeper import members
from alloy_agent.conformance.keeper.messages import (
    History,
    Join,
    Policy,
    ShareView,
    TenantView,
    Watched,
    counts_differ,
)
from alloy_agent.conformance.keeper.process import Keeper
from alloy_agent.conformance.keeper.watch import Maps, Reading, _Tally, launches_between
from alloy_agent.conformance.report.shares import shares_section
from alloy_agent.conformance.shares import SharesOnHost, report_of, share_facts
from alloy_agent.daemon.shares import standing
from alloy_agent.daemon.shareviews import rate_states, share_families, top_shares
from alloy_agent.daemon.sharing import Throttles, piece_for, policies
from alloy_agent.errors import ConfigError, UnsupportedError
from alloy_agent.model import (
    DeviceId,
    Fact,
    Partition,
    PartitionId,
    Placement,
    Quality,
    Scope,
    Share,
    Signal,
    SignalSpec,
    Snapshot,
    TenantId,
    Tier,
    TierLimit,
    Verdict,
)
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord
from alloy_agent.telemetry.exposition import render
from alloy_agent.uplink.mailbox import Mailbox
from tests.rate.test_checks import DEVICE as BARE
from tests.rate.test_checks import PIECE

DEVICE = msgspec.structs.replace(
    BARE, tier_limits=(TierLimit(way="shared", tier=Tier.SOFT, reason="in time"),)
)
OURS = msgspec.structs.replace(PIECE, tenant=TenantId("n"), generation=1)
FRONT = msgspec.structs.replace(
    PIECE, id=PartitionId("d/front@0"), share=Share.PRODUCTION, tenant=TenantId("p"), generation=1
)
SNAPSHOT = Snapshot(
    boot_id="b",
    sequence=1,
    taken_at_s=0.0,
    taken_wall_s=0.0,
    devices=(DEVICE,),
    partitions=(FRONT, OURS),
)
SOUND = Watched(looked=True, launched=1000, witnessed=1003, window_s=1.0, witness="uprobes")


def tenant(name: str, role: str, **changes: Any) -> TenantView:
    fields: dict[str, Any] = {
        "name": name,
        "role": role,
        "weight": 1.0,
        "processes": 1,
        "launched": 10,
        "device_s": 1.5,
        "waiting": 0,
        "waited_s": 0.25,
        "frozen": False,
        "metered": True,
        "leased": role == "opportunistic",
        "watched": SOUND,
        "partition": str((FRONT if role == "production" else OURS).id),
    }
    found = TenantView(**{**fields, **changes})
    trouble = (found.trouble,) if found.trouble else ()
    return msgspec.structs.replace(found, bypass=(*trouble, *found.watched.bypass))


def view(*tenants: TenantView, **changes: Any) -> ShareView:
    fields: dict[str, Any] = {
        "device": str(DEVICE.id),
        "stage": "controlling",
        "opening": 0.7,
        "loss_ratio": 0.011,
        "lent_ratio": 0.4,
        "answer": "conform",
        "reason": "",
        "mean_ratio": 0.01,
        "lower_ratio": 0.005,
        "upper_ratio": 0.015,
        "ticks": 10,
        "overruns": 1,
        "e_value": 1.5,
        "windows": 60,
        "skipped": 3,
        "tenants": tenants or (tenant("p", "production"), tenant("n", "opportunistic")),
        "history": History(
            age_s=(4.0, 2.0, 0.0),
            production_ratio=(0.99, None, 0.985),
            lent_ratio=(0.1, 0.2, 0.3),
        ),
    }
    return ShareView(**{**fields, **changes})


# --- audit ------------------------------------------------------------------------------------


def verdicts(*views: ShareView, inside: bool = True) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts on the production share and on the opportunistic one."""
    pieces: tuple[Partition, ...] = (FRONT, OURS)
    if not inside:
        pieces = tuple(msgspec.structs.replace(p, tenant=None) for p in pieces)
    snapshot = msgspec.structs.replace(SNAPSHOT, partitions=pieces)
    facts = [
        *share_facts(snapshot, views),
        *(
            Fact(subject=p.id, name="partition.pids", quality=Quality.VALUE, value=[])
            for p in pieces
        ),
    ]
    found = {}
    for piece in pieces:
        report = judge_partition(piece, DEVICE, snapshot, FactBook(facts), Intent())
        found[str(piece.share)] = {
            j.check: j.verdict for j in report.judgements if j.check.startswith(("RATE-", "BYP-"))
        }
    return found


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("conform", "pass"), ("violated", "fail"), ("undecided", "unknown")],
)
def test_the_audits_answer_is_the_verdict(answer: str, expected: str) -> None:
    """Conform, violated and undecided are pass, fail and unknown on both kinds of share."""
    found = verdicts(view(answer=answer))
    assert found["production"]["RATE-01"] == Verdict(expected)
    assert found["opportunistic"]["RATE-01"] == Verdict(expected)
    assert found["opportunistic"]["RATE-02"] is Verdict.PASS
    assert {v for c, v in found["opportunistic"].items() if "BYP" in c} == {Verdict.PASS}
    assert not any("BYP" in check for check in found["production"])


def test_vacant_shares_claim_nothing() -> None:
    """Nobody is there: not applicable, with a keeper that idles and without one."""
    for views in ((), (view(tenants=(), stage="idle"),)):
        found = verdicts(*views, inside=False)
        assert {v for checks in found.values() for v in checks.values()} == {Verdict.NOT_APPLICABLE}


def test_of_a_tenant_without_a_control_loop_nothing_is_known() -> None:
    """A tenant on a device that no keeper keeps: nothing passes, and nothing was caught."""
    for checks in verdicts().values():
        assert set(checks.values()) == {Verdict.UNKNOWN}


def test_production_alone_is_beside_nobody() -> None:
    """Without a neighbour there is no slowdown to promise."""
    found = verdicts(view(tenant("p", "production"), answer="undecided"))
    assert found["production"] == {"RATE-01": Verdict.NOT_APPLICABLE, "RATE-02": Verdict.PASS}


@pytest.mark.parametrize(
    ("check", "watched", "verdict"),
    [
        ("BYP-01", {"page_trouble": "its page was replaced"}, Verdict.FAIL),
        ("BYP-02", {"witnessed": 2000}, Verdict.FAIL),
        ("BYP-02", {"witnessed": None, "witness": "no CAP_PERFMON"}, Verdict.UNKNOWN),
        ("BYP-03", {"unmapped_pids": (7,)}, Verdict.FAIL),
        ("BYP-04", {"static_pids": (7,)}, Verdict.FAIL),
        ("BYP-05", {"foreign_pids": (7,)}, Verdict.FAIL),
        ("BYP-03", {"looked": False}, Verdict.UNKNOWN),
    ],
)
def test_what_is_watched_is_judged(check: str, watched: dict[str, Any], verdict: Verdict) -> None:
    """Each way around the gate fails its check, and the device's RATE-02 on every share."""
    seen = msgspec.structs.replace(SOUND, **watched)
    found = verdicts(view(tenant("p", "production"), tenant("n", "opportunistic", watched=seen)))
    assert found["opportunistic"][check] is verdict
    expected = Verdict.FAIL if verdict is Verdict.FAIL else Verdict.PASS
    assert found["production"]["RATE-02"] is expected


def test_a_bypass_takes_the_tier() -> None:
    """A sound share is soft; with a way around the gate it is advisory, and says why."""

    def tier(*views: ShareView) -> tuple[Tier, str]:
        facts = FactBook(share_facts(SNAPSHOT, views))
        grants = tuple(
            Grant(partition=p.id, generation=1, tenant=TenantId("x")) for p in (FRONT, OURS)
        )
        report = judge_partition(OURS, DEVICE, SNAPSHOT, facts, Intent(grants=grants))
        ours = [j for j in report.judgements if j.check.startswith(("RATE-", "BYP-"))]
        assert ours
        return report.tier, report.reason

    assert "BYP-" not in tier(view())[1]
    slipped = msgspec.structs.replace(SOUND, unmapped_pids=(7,))
    low = tier(view(tenant("p", "production"), tenant("n", "opportunistic", watched=slipped)))
    assert low[0] is Tier.ADVISORY
    assert "fails" in low[1]


def test_statuses_that_make_no_sense_are_nobodys_word(tmp_path: Path) -> None:
    """Junk and old statuses are left out; a folder that is not there has none."""
    assert SharesOnHost(tmp_path / "none").views() == ()
    for name, content in (
        ("junk", b"\xff\x00"),
        ("old", msgspec.json.encode(view(taken_at_s=0.0))),
        ("other", b"{}"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_bytes(content)
    assert SharesOnHost(tmp_path).views() == ()
    assert SharesOnHost(tmp_path).reports() == ()


# --- figures ----------------------------------------------------------------------------------


def text_of(views: list[ShareView]) -> str:
    return render(share_families(views), 1000, openmetrics=False)[0]


def test_metrics_of_shares() -> None:
    """Base units, one series for each state, no sample for what was not measured."""
    text = text_of([view()])
    assert 'alloy_share_loss_ratio{device="d"} 0.011' in text
    assert 'alloy_share_verdict{device="d",verdict="conform"} 1.0' in text
    assert 'alloy_share_verdict{device="d",verdict="violated"} 0.0' in text
    assert 'alloy_share_windows_excluded_total{device="d"} 3.0' in text
    labels = 'device="d",tenant="n",role="opportunistic"'
    assert f"alloy_share_tenant_device_seconds_total{{{labels}}} 1.5" in text
    assert f"alloy_share_tenant_leased{{{labels}}} 1.0" in text
    assert 'alloy_share_tenant_leased{device="d",tenant="p"' not in text
    unmeasured = view(loss_ratio=None, lower_ratio=None, upper_ratio=None)
    bare = text_of([unmeasured])
    assert "alloy_share_loss_ratio{" not in bare
    assert list(share_families([])) == []


def test_the_wire_tells_of_shares_and_of_their_end() -> None:
    """RateState has the verdict, undecided as unknown; what is shared no more has ended."""
    states = list(rate_states(["d", "gone"], [view(answer="undecided", reason="why")], 1.0))
    assert [state.device for state in states] == ["d", "gone"]
    assert states[0].verdict == pb.VERDICT_UNKNOWN
    assert states[0].reason == "why"
    assert (states[0].tenants, states[0].leased) == (2, 1)
    assert states[1].phase == "ended"
    assert not states[1].HasField("loss_ratio")


def test_each_shared_device_has_its_own_place_in_the_mail() -> None:
    """The newest state of every device is sent; a device replaces its own alone."""
    mail = Mailbox(lambda: 0.0)
    for device, phase in (("a", "learning"), ("b", "idle"), ("a", "controlling")):
        mail.offer(pb.AgentMessage(rate_state=pb.RateState(device=device, phase=phase)))
    sent = [mail.take(iter(()), {}) for _ in range(3)]
    told = {m.rate_state.device: m.rate_state.phase for m in sent if m is not None}
    assert told == {"a": "controlling", "b": "idle"}


def test_top_shows_tenants_with_their_leases() -> None:
    """Production needs no lease; a frozen tenant says so."""
    shown = top_shares(
        [view(tenant("p", "production"), tenant("n", "opportunistic", frozen=True, leased=False))]
    )[0]
    assert [(t.name, t.lease, t.state) for t in shown.tenants] == [
        ("p", "", "running"),
        ("n", "none", "frozen"),
    ]
    assert shown.production_ratio == (0.99, None, 0.985)


def test_only_what_others_act_on_is_news() -> None:
    """Counters and ages are no news; a verdict, a bypass, a freeze and a tenant are."""
    before = view()
    assert standing(before) == standing(msgspec.structs.replace(before, ticks=99, lent_ratio=0.1))
    for other in (
        view(answer="violated"),
        view(tenant("p", "production")),
        view(tenant("p", "production"), tenant("n", "opportunistic", frozen=True)),
        view(throttled="hot"),
    ):
        assert standing(before) != standing(other)
    assert standing(None) == ()


# --- policies and conditions ------------------------------------------------------------------


def claim(device: str, ratio: float | None) -> ClaimRecord:
    piece = ClaimPiece(
        request="r",
        pool="p",
        name="n",
        device=DeviceId(device),
        profile="x",
        placement=Placement(start=0, size=1),
        share=Share.OPPORTUNISTIC,
        loss_budget_ratio=ratio,
    )
    return ClaimRecord(
        uid="u", namespace="ns", name="c", phase=ClaimPhase.PREPARED, pieces=(piece,)
    )


def test_the_smallest_budget_of_policies_and_claims_holds() -> None:
    """A claim's lossBudgetRatio reaches its device; a released claim has no pieces; 0 holds."""
    stated = {"d": Policy(budget_ratio=0.05), "e": Policy(held="operator")}
    found = policies(stated, [claim("d", 0.01), claim("e", 0.03), claim("f", None)])
    assert found["d"] == Policy(budget_ratio=0.01)
    assert found["e"] == Policy(budget_ratio=0.03, held="operator")
    assert "f" not in found
    assert policies(stated, [claim("d", 0.2)])["d"].budget_ratio == 0.05
    assert "allows no loss" in policies({}, [claim("d", 0.0)])["d"].held


def throttle(total_s: float, at_s: float) -> Signal:
    spec = SignalSpec(
        name="alloy_device_throttle_seconds_total",
        subject="d",
        scope=Scope.DEVICE,
        unit="seconds",
        counter=True,
    )
    return Signal(spec=spec, quality=Quality.VALUE, value=total_s, source_time_s=at_s)


def test_throttling_is_seen_by_the_counters_growth() -> None:
    """Growth means throttled until a newer reading has none; an old reading changes nothing."""
    seen = Throttles()
    assert seen.look([throttle(5.0, 1.0)]) == {}
    assert seen.look([throttle(5.5, 2.0)]) == {"d": "throttled 50 % of the time"}
    assert seen.look([throttle(5.5, 2.0)]) == {"d": "throttled 50 % of the time"}
    assert seen.look([]) == {"d": "throttled 50 % of the time"}
    assert seen.look([throttle(5.5, 3.0)]) == {}
    assert seen.look([throttle(5.505, 4.0)]) == {}


def test_a_tenant_gets_a_free_share_of_its_kind() -> None:
    """By device the first free share of the role; by partition that one; else a refusal."""
    free = msgspec.structs.replace(OURS, tenant=None)
    snapshot = msgspec.structs.replace(SNAPSHOT, partitions=(FRONT, free))
    assert piece_for("d", Share.OPPORTUNISTIC, snapshot) == free
    assert piece_for(str(free.id), Share.OPPORTUNISTIC, snapshot) == free
    with pytest.raises(ConfigError, match="held by p"):
        piece_for("d", Share.PRODUCTION, snapshot)
    with pytest.raises(ConfigError, match="is opportunistic, not production"):
        piece_for(str(free.id), Share.PRODUCTION, snapshot)
    bare = msgspec.structs.replace(SNAPSHOT, partitions=())
    with pytest.raises(ConfigError, match="has no production share"):
        piece_for("d", Share.PRODUCTION, bare)


# --- keeper -----------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_any_request_is_answered(raw: bytes) -> None:
    """What is no request is refused with one line; nothing is raised."""
    keeper = Keeper.__new__(Keeper)
    answer = keeper._reply(raw)
    assert answer.error.startswith("no request:")


def test_members_outlive_the_keeper(tmp_path: Path) -> None:
    """Tenants are read back; a later process of the same number is another; junk has none."""
    one = members.member_of(Join(name="n", role="opportunistic", pid=os.getpid()))
    members.save(tmp_path, (one,))
    assert members.load(tmp_path) == (one,)
    assert members.lives(one)
    assert not members.lives(msgspec.structs.replace(one, start_ticks=1))
    assert not members.lives(members.member_of(Join(name="n", role="production", pid=2**21)))
    (tmp_path / members.FILE).write_bytes(b"{")
    assert members.load(tmp_path) == ()


def test_a_slot_that_changes_hands_is_not_accounted_for(tmp_path: Path) -> None:
    """Launches add up over slots; where a process came or went in between, nobody can tell."""
    path = tmp_path / "state"
    make_state(path, os.getuid(), -1)

    def write(attached_ns: int, launched: int) -> None:
        with path.open("r+b") as page:
            page.seek(HEAD_BYTES)
            page.write(os.getpid().to_bytes(4, "little") + (1).to_bytes(4, "little"))
            page.write(attached_ns.to_bytes(8, "little") + launched.to_bytes(8, "little"))

    page = StatePage(path)
    tally = _Tally(page)
    write(1, 5)
    assert (tally.read(), tally.total) == (True, 5)
    write(1, 9)
    assert (tally.read(), tally.total) == (True, 9)
    write(2, 3)
    assert (tally.read(), tally.total) == (False, 12)
    write(2, 1)  # a count that goes back was written by somebody
    assert tally.read() is False
    page.close()


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_counts_differ_by_more_than_a_twentieth(launched: int, witnessed: int) -> None:
    """Small differences and shares are noise; an unknown count is no difference."""
    apart = abs(launched - witnessed)
    assert counts_differ(launched, witnessed) == (apart > max(20, 0.05 * launched))
    assert not counts_differ(launched, None)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=2, max_size=8),
)
def test_a_thread_that_is_put_aside_sees_no_bypass(steps: list[tuple[int, int]]) -> None:
    """However much is launched between the two looks at the page, an honest count agrees."""
    readings, launched = [], 0
    for during, between in steps:
        least = launched
        launched += during
        kernel = least + during // 3  # the counters were read somewhere in between
        readings.append(Reading(at_s=0.0, least=least, most=launched, kernel=kernel))
        launched += between
    page, witnessed = launches_between(readings[0], readings[-1])
    assert page == witnessed
    around = msgspec.structs.replace(readings[-1], kernel=readings[-1].kernel + 5000)
    assert counts_differ(*launches_between(readings[0], around))


def test_a_gate_is_known_by_its_content(tmp_path: Path) -> None:
    """A process with neither gate nor driver mapped has none, and one that is gone is left out."""
    gate = tmp_path / "liballoygate.so"
    gate.write_bytes(b"gate")
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as plain:
        found = Maps(gate).of((plain.pid, 2**22 - 1))
        plain.communicate(b"")
    assert set(found) == {plain.pid}
    assert (found[plain.pid].gated, found[plain.pid].foreign) == (False, False)
    assert not found[plain.pid].drivers


# --- report -----------------------------------------------------------------------------------


def test_the_chart_breaks_where_nothing_was_measured() -> None:
    """One line for the lent share, two pieces for production with a gap; hostile names escaped."""
    hostile = '<b>"&'
    shared = report_of(view(tenant(hostile, "production"), tenant("n", "opportunistic")))
    html = shares_section((shared,))
    assert hostile not in html
    svg = re.search(r"<svg.*</svg>", html, re.DOTALL)
    assert svg is not None
    root = ElementTree.fromstring(svg[0])  # noqa: S314 - our own text
    paths = {p.get("class"): p.get("d") or "" for p in root.iter("path")}
    assert paths["a"].count("M") == 2
    assert paths["b"].count("M") == 1
    assert 'class="promise"' in svg[0]
    assert shares_section(()) == ""
    assert "no history yet" in shares_section((msgspec.structs.replace(shared, history_age_s=()),))


@given(
    st.lists(st.one_of(st.none(), st.floats(0.0, 3.0)), min_size=2, max_size=20),
    st.floats(0.001, 0.5),
)
def test_any_history_can_be_drawn(values: list[float | None], budget: float) -> None:
    """Whatever was measured, the picture is well formed and stays within its frame."""
    ages = tuple(2.0 * (len(values) - n) for n in range(len(values)))
    shared = msgspec.structs.replace(
        report_of(view()),
        budget_ratio=budget,
        history_age_s=ages,
        production_ratio=tuple(values),
        lent_ratio=tuple(min(1.0, v or 0.0) for v in values),
    )
    svg = re.search(r"<svg.*</svg>", shares_section((shared,)), re.DOTALL)
    assert svg is not None
    root = ElementTree.fromstring(svg[0])  # noqa: S314 - our own text
    height = float((root.get("viewBox") or "").split()[3])
    for line in root.iter("line"):
        assert 0.0 <= float(line.get("y1") or -1) <= height


# --- the library ------------------------------------------------------------------------------


def test_tenants_that_come_at_once_get_one_whole_library(tmp_path: Path) -> None:
    """Many threads that ask for the gate have the same file, built once or many times."""
    try:
        library(tmp_path / "other")
    except UnsupportedError as exc:
        pytest.skip(f"no gate on this machine: {exc}")
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: library(tmp_path), range(4)))
    assert len(found) == 1
    path = found.pop()
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_image_brings_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built into the package is copied to where tenants see it, without a compiler."""
    digest = hashlib.sha256(build.SOURCE.read_bytes()).hexdigest()[:12]
    bundled = tmp_path / "image" / digest / "liballoygate.so"
    bundled.parent.mkdir(parents=True)
    bundled.write_bytes(b"built")
    monkeypatch.setattr(build, "BUNDLED", tmp_path / "image")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library(tmp_path / "state").read_bytes() == b"built"
    with pytest.raises(UnsupportedError, match="no C compiler"):
        library(tmp_path / "state", emulated=True)
