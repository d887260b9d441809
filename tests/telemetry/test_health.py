"""Health as a fold: every catalogued code, repeats, witnesses, exits, quarantine, restarts."""

from __future__ import annotations

import msgspec
import pytest

from alloy_agent.model import Scope
from alloy_agent.telemetry import catalogue, health
from alloy_agent.telemetry.health import DeviceHealth, Event, Level
from tests.telemetry.world import BOOT, GPU, at

TABLE = catalogue.load()
WELL = DeviceHealth(device=GPU)


def event(code: str, time_s: float = 100.0, **changes: object) -> Event:
    """Return an event of the driver."""
    return Event(code=code, time_s=time_s, **changes)  # type: ignore[arg-type]


def after(*events: Event, start: DeviceHealth = WELL) -> DeviceHealth:
    """Return the health after events, each folded at its own time."""
    for one in events:
        start = health.fold(start, one, TABLE, at(one.time_s))
    return start


def later(state: DeviceHealth, seconds: float, *, since_s: float = 100.0) -> DeviceHealth:
    """Return the health after a while in which the device answers well, looked at each second."""
    for second in range(int(seconds) + 1):
        state = health.tick(state, TABLE, at(since_s + second), well=True)
    return state


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(TABLE.rows))
def test_every_code_has_its_effect_and_its_exit(code: str) -> None:
    """Class decides the gate; and each state that a code leads to can be left again."""
    row = TABLE.rows[code]
    detail = "1" if row.fault_class == "verdict" else ""
    state = later(after(event(code, detail=detail)), 11.0)
    effect = row.alone if row.fault_class == "companion" else row.fault_class
    closes = effect in ("reset", "reboot", "other", "verdict")
    assert bool(state.closed_by) is closes, row
    assert state.counts == {code: 1}
    if row.clear in ("reset", "verdict"):
        state = later(health.after_reset(state, 120.0), 61.0, since_s=120.0)
    elif row.clear == "quiet":
        state = later(state, 2.0, since_s=101.0 + row.clear_after_s)
    elif row.clear == "seen":
        state = health.probe(state, (), TABLE, at(130.0))
        state = health.probe(state, (), TABLE, at(161.0))
    elif row.clear in ("reboot", "operator"):
        state, refused = health.taken_back(state, "")
        assert not refused
    assert state.level is Level.OK, row
    assert state.counts == {code: 1}


def test_the_table_is_versioned_data_with_sources() -> None:
    """Each row's family names where it is from, and the file is one whole."""
    assert TABLE.version
    for code in TABLE.rows:
        assert code.partition(":")[0] in TABLE.sources, code


@pytest.mark.parametrize("code", ["xid:94", "xid:69", "xid:13", "xid:31", "xid:43", "amd:vmfault"])
def test_an_applications_fault_never_closes_the_device(code: str) -> None:
    """However often a program fails, the device's gate stays open."""
    state = after(*(event(code, 100.0 + n) for n in range(500)))
    assert not state.closed_by
    assert state.counts[code] == 500


@pytest.mark.parametrize(
    ("code", "scope", "action"),
    [
        ("xid:109", Scope.DEVICE, "reset"),
        ("xid:79", Scope.NODE, "reboot"),
        ("xid:54", Scope.NODE, "service"),
        ("ras:umc", Scope.DEVICE, "reset"),
        ("ras:xgmi_wafl", Scope.HIVE, "reset"),
        ("neuron:hbm_ue", Scope.NODE, "replace"),
    ],
)
def test_what_needs_a_reset_closes_with_scope_and_action(
    code: str, scope: Scope, action: str
) -> None:
    """The fault says how far it reaches and what helps."""
    state = after(event(code))
    assert state.level is Level.FAILED
    worst = state.worst
    assert worst is not None
    assert (worst.scope, worst.action) == (scope, action)


def test_a_code_that_nobody_knows_closes_and_is_reported() -> None:
    """An unknown code is never ignored."""
    state = after(event("xid:4711"))
    assert "xid:4711" in state.closed_by


# --- counting -------------------------------------------------------------------------------------


def test_four_events_in_one_tick_are_four() -> None:
    """62, 45, 31, 31: each counted, the two equal ones twice, the first not lost."""
    codes = ("xid:62", "xid:45", "xid:31", "xid:31")
    state = after(*(event(code, 100.001) for code in codes))
    assert state.counts == {"xid:62": 1, "xid:45": 1, "xid:31": 2}
    assert state.level is Level.FAILED
    assert state.worst is not None
    assert state.worst.code == "xid:62"


def test_a_second_witness_confirms_and_does_not_count() -> None:
    """The kernel log's lines of two events pair off with the two, in either order."""
    driver = [event("xid:79", 100.0), event("xid:79", 100.5)]
    kernel = [event("xid:79", 100.1, witness="kernel"), event("xid:79", 100.6, witness="kernel")]
    for order in (driver + kernel, kernel + driver, [driver[0], kernel[0], kernel[1], driver[1]]):
        state = after(*order)
        assert state.counts == {"xid:79": 2}
        assert state.witnessed == 2


def test_a_witness_alone_is_an_event() -> None:
    """What only the kernel tells, or tells much later, counts by itself."""
    state = after(event("xid:79", 100.0, witness="kernel"))
    assert state.counts == {"xid:79": 1}
    state = after(event("xid:79", 100.0), event("xid:79", 200.0, witness="kernel"))
    assert state.counts == {"xid:79": 2}


def test_a_storm_is_counted_and_bounded() -> None:
    """Ten thousand events: all counted, memory of them bounded, one penalty."""
    state = WELL
    now = at(100.0)
    for number in range(10_000):
        state = health.fold(state, event("xid:109", 100.0 + number * 1e-4), TABLE, now)
    assert state.counts == {"xid:109": 10_000}
    assert len(state.recent) <= health.RECENT_MAX
    assert len(state.faults) == 1
    assert state.quarantine is None
    assert len(msgspec.json.encode(state)) < 32_000


# --- companions and verdicts ----------------------------------------------------------------------


def test_a_companion_says_what_a_code_was() -> None:
    """48 followed by 94 is contained, by 95 it is not; alone it needs a reset."""
    assert not later(after(event("xid:48"), event("xid:94", 103.0)), 15.0).closed_by
    assert "xid:95" in later(after(event("xid:48"), event("xid:95", 103.0)), 15.0).closed_by
    assert "xid:48" in later(after(event("xid:48")), 15.0).closed_by
    assert not later(after(event("xid:48")), 5.0).closed_by
    assert not later(after(event("xid:45")), 15.0).closed_by


def test_the_drivers_verdict_comes_first() -> None:
    """`none` takes back what the table made of a code; `reboot` makes more of it."""
    state = after(event("xid:109"), event("xid:154", 101.0, detail="0"))
    assert state.level is Level.OK
    state = after(event("xid:31"), event("xid:154", 101.0, detail="2"))
    assert state.worst is not None
    assert (state.worst.action, state.worst.scope) == ("reboot", Scope.NODE)


# --- exits ----------------------------------------------------------------------------------------


def test_a_reset_must_be_validated() -> None:
    """A reset alone is not enough; a minute of answering well is, and a relapse starts it anew."""
    state = health.after_reset(after(event("xid:109")), 110.0)
    assert later(state, 50.0, since_s=110.0).level is Level.FAILED
    assert later(state, 61.0, since_s=110.0).level is Level.OK
    relapsed = health.probe(state, (("probe:failed", "refused"),), TABLE, at(150.0))
    assert later(relapsed, 50.0, since_s=151.0).level is Level.FAILED


def test_a_repeated_application_fault_asks_for_a_look() -> None:
    """Two page faults on one device within a day degrade it, and a quiet day ends that."""
    state = after(event("xid:31"), event("xid:31", 3700.0))
    assert state.level is Level.DEGRADED
    assert not state.closed_by
    assert later(state, 1.0, since_s=3701.0 + 86400).level is Level.OK


def test_a_stalled_device_closes_and_opens_by_itself() -> None:
    """A probe that holds closes; thirty seconds of answers open."""
    stalled = (("probe:stalled", "no answer for 6 s"),)
    state = health.probe(WELL, stalled, TABLE, at(100.0))
    assert state.closed_by
    state = health.probe(state, stalled, TABLE, at(200.0))
    assert state.counts["probe:stalled"] == 1
    state = health.probe(state, (), TABLE, at(201.0))
    assert state.closed_by
    state = health.probe(state, (), TABLE, at(232.0))
    assert state.level is Level.OK


# --- quarantine -----------------------------------------------------------------------------------


def flapping() -> DeviceHealth:
    """Return a device that failed three times within an hour, each time reset and validated."""
    state, now_s = WELL, 0.0
    for _ in range(3):
        now_s += 900.0
        state = after(event("xid:109", now_s), start=state)
        state = later(health.after_reset(state, now_s + 10), 61.0, since_s=now_s + 10)
    return state


def test_flapping_is_quarantined_and_served() -> None:
    """Out at the third failure, with a session; back when the penalty has decayed, not before."""
    state = flapping()
    assert state.level is Level.QUARANTINED
    assert state.quarantine is not None
    assert state.quarantine.until_s is not None
    early = health.tick(state, TABLE, at(state.quarantine.until_s + 1), well=True)
    assert early.level is Level.QUARANTINED
    back = health.tick(state, TABLE, at(2700.0 + 12 * 3600), well=True)
    assert back.level is Level.OK


def test_readmission_takes_longer_each_time_and_then_a_person() -> None:
    """Ten minutes, an hour, six, a day, and then only an operator's word."""
    served = []
    for session in range(6):
        state = msgspec.structs.replace(WELL, sessions=session, penalty=1900.0, penalty_s=100.0)
        state = after(event("xid:109"), start=state)
        assert state.quarantine is not None
        until_s = state.quarantine.until_s
        served.append(None if until_s is None else until_s - 100.0)
    assert served == [600.0, 3600.0, 21600.0, 86400.0, None, None]


def test_a_stale_session_takes_nothing_back() -> None:
    """Who names an earlier quarantine changes nothing; who names this one ends it."""
    state = flapping()
    assert state.quarantine is not None
    same, refused = health.taken_back(state, "an-earlier-one")
    assert same is state
    assert refused
    well, refused = health.taken_back(state, state.quarantine.session)
    assert not refused
    assert well.level is Level.OK


def test_the_penalty_is_bounded() -> None:
    """However many faults, a day without any is enough to decay below the limit."""
    state = WELL
    for number in range(500):
        state = after(event("xid:109", number * 200.0), start=state)
    assert health.penalty_of(state, 500 * 200.0 + 86400.0) <= health.REUSE


# --- restarts -------------------------------------------------------------------------------------


def restart(state: DeviceHealth, now: health.Now, *, saved_s: float = 200.0) -> DeviceHealth:
    """Return the health as a later process reads it back."""
    kept = health.Saved(saved=at(saved_s), devices=(state,))
    body = msgspec.json.encode(kept)
    return health.restored(msgspec.json.decode(body, type=health.Saved), now)[0]


def test_a_restart_restores_and_counts_nothing_twice() -> None:
    """The same boot: everything as it was."""
    state = after(event("xid:62"), event("xid:31", 101.0))
    assert restart(state, at(300.0)) == state


def test_a_boot_is_a_reset_that_is_still_to_be_validated() -> None:
    """Failed before, failed after, well once it has answered for a minute."""
    state = restart(after(event("xid:79")), at(30.0, boot="other", wall_s=1e9 + 260.0))
    assert state.level is Level.FAILED
    assert later(state, 61.0, since_s=30.0).level is Level.OK
    unknown = restart(after(event("xid:142")), at(30.0, boot="other", wall_s=1e9 + 260.0))
    assert later(unknown, 1000.0, since_s=30.0).level is Level.FAILED


def test_a_wall_clock_that_stepped_back_makes_nobody_younger_than_zero() -> None:
    """Over a boot only wall time bridges; a step backwards bridges zero seconds, never less."""
    state = flapping()
    assert state.quarantine is not None
    assert state.quarantine.until_s is not None
    left_s = state.quarantine.until_s - 2800.0
    back = restart(state, at(10.0, boot="other", wall_s=5.0), saved_s=2800.0)
    assert back.quarantine is not None
    assert back.quarantine.until_s == pytest.approx(10.0 + left_s)
    assert health.penalty_of(back, 10.0) == pytest.approx(health.penalty_of(state, 2800.0))
    assert BOOT != "other"
