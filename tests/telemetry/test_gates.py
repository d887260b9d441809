"""Gates: closing at once, opening with margin and dwell, unknown where nothing is known."""

from __future__ import annotations

from alloy_agent.model import Condition, DeviceFault, Mode, ModeKind
from alloy_agent.telemetry import gates
from alloy_agent.telemetry.gates import GateLimits, GateState
from tests.telemetry.world import GPU, device

LIMITS = GateLimits()


def run(margins: list[float | None], dwell_s: float = 10.0) -> list[GateState]:
    """Return the states of a thermal gate, one margin a second."""
    gate, states = None, []
    for second, margin in enumerate(margins):
        opinion = gates.thermal(margin, 0.0, LIMITS)
        gate = gates.step("thermal", gate, opinion, float(second), dwell_s)
        states.append(gate.state)
    return states


def test_closing_is_immediate_and_opening_needs_margin_and_dwell() -> None:
    """One hot second closes; opening takes ten cool ones in a row above the higher limit."""
    states = run([20.0, 2.0, *[20.0] * 12])
    assert states[:2] == [GateState.OPEN, GateState.CLOSED]
    assert states[2:12] == [GateState.CLOSED] * 10
    assert states[12] is GateState.OPEN


def test_between_the_limits_a_closed_gate_stays_closed() -> None:
    """Above the closing limit but below the opening one there is no end of the closing."""
    assert set(run([2.0, *[5.0] * 40])) == {GateState.CLOSED}
    assert set(run([5.0] * 5)) == {GateState.OPEN}


def test_a_relapse_starts_the_dwell_anew() -> None:
    """Nine cool seconds and a hot one count for nothing."""
    states = run([2.0, *[20.0] * 9, 2.0, *[20.0] * 9])
    assert GateState.OPEN not in states[1:]


def test_unknown_neither_opens_nor_closes() -> None:
    """A missing value is unknown, and does not shorten the dwell of a gate that was closed."""
    states = run([20.0, None, 20.0])
    assert states == [GateState.OPEN, GateState.UNKNOWN, GateState.OPEN]
    states = run([2.0, None, *[20.0] * 9])
    assert states[1] is GateState.UNKNOWN
    assert GateState.OPEN not in states


def test_stale_values_make_freshness_unknown_never_closed() -> None:
    """Age alone never closes a gate, so nothing is drained for it."""
    opinion = gates.freshness({"a": (0.2, 1.0), "b": (1.5, 1.0)})
    assert opinion.state is GateState.UNKNOWN
    assert "b" in opinion.reason
    assert gates.freshness({"a": (None, 1.0)}).state is GateState.UNKNOWN
    assert gates.freshness({"a": (0.2, 1.0)}).state is GateState.OPEN


def test_topology_closes_for_a_shape_that_will_change() -> None:
    """A pending mode, a half-made piece or a wrong count closes; a silent device is unknown."""
    pending = device(modes=(Mode(kind=ModeKind.MIG, current="on", pending="off"),))
    assert gates.topology(pending, (), 0.0).state is GateState.CLOSED
    fault = DeviceFault(device=GPU, kind="partition_count_mismatch", reason="8 of 16")
    assert gates.topology(device(), (fault,), 0.0).state is GateState.CLOSED
    stalled = device(condition=Condition.STALLED)
    assert gates.topology(stalled, (), 0.0).state is GateState.UNKNOWN
    assert gates.topology(None, (), 0.0).state is GateState.UNKNOWN
    assert gates.topology(device(), (), 0.0).state is GateState.OPEN


def test_headroom_gate_follows_the_scarcest_resource() -> None:
    """Under 5 % closes and names the resource; not covered is unknown."""
    closed = gates.headroom(0.02, "memory", 0.0, LIMITS)
    assert closed.state is GateState.CLOSED
    assert "memory" in closed.reason
    assert gates.headroom(None, "compute", 0.0, LIMITS).state is GateState.UNKNOWN
    assert gates.headroom(0.07, "compute", 0.0, LIMITS).near


def test_the_worst_gate_decides() -> None:
    """Closed comes before unknown, unknown before open."""
    table = gates.judge(
        {},
        {
            "health": gates.health(""),
            "freshness": gates.freshness({"a": (None, 1.0)}),
            "thermal": gates.thermal(1.0, 0.0, LIMITS),
        },
        0.0,
    )
    worst = gates.worst(tuple(table.values()))
    assert worst is not None
    assert worst.gate == "thermal"


def test_a_persons_word_opens_at_once() -> None:
    """An undrain needs no dwell."""
    first = gates.judge({}, {"drain": gates.health("drained")}, 0.0)
    second = gates.judge(first, {"drain": gates.health("")}, 1.0)
    assert second["drain"].state is GateState.OPEN
