"""Suspend, resume and wall-clock steps: windows have a gap, no gate opens on old data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.host import clock
from alloy_agent.model import Share
from alloy_agent.telemetry import gates
from alloy_agent.telemetry.gates import GateState
from tests.telemetry.test_joined import PIECE, World, fault
from tests.telemetry.world import GPU, piece

SHARED = piece(share=Share.OPPORTUNISTIC)
SLEEP_S = 3600.0


class Clocks:
    """All clocks of the agent, moved by a test. `ahead_s` is what the boot clock has slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boot_s = 10_000.0
        self.wall = 1_796_000_400.0
        self.ahead_s = 0.0
        monkeypatch.setattr(clock, "boottime_s", lambda: self.boot_s)
        monkeypatch.setattr(clock, "wall_s", lambda: self.wall)
        monkeypatch.setattr(clock, "monotonic_offset_s", lambda: self.ahead_s)

    def pass_(self, seconds: float) -> None:
        """Let time go by."""
        self.boot_s += seconds
        self.wall += seconds

    def suspend(self, seconds: float) -> None:
        """Sleep: the boot clock and the wall go on, the monotonic clock does not."""
        self.pass_(seconds)
        self.ahead_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Give clocks that stand still."""
    return Clocks(monkeypatch)


@pytest.fixture
def world(clocks: Clocks) -> Iterator[World]:
    """Give a node that has been watched for a minute."""
    del clocks
    made = World()
    made.worker.write(*[(0.5, 40.0)] * 620)
    made.tick(SHARED)
    yield made
    made.telemetry.close()


def look(world: World) -> None:
    """Judge the node without a new sample: a worker has not come to it yet."""
    write, world.worker.write = world.worker.write, lambda *_a, **_k: None  # type: ignore[method-assign]
    try:
        world.tick(SHARED)
    finally:
        world.worker.write = write  # type: ignore[method-assign]


def watch(world: World, clocks: Clocks, seconds: int) -> list[GateState]:
    """Sample and judge for some seconds; return the thermal gate of each."""
    states = []
    for _ in range(seconds):
        clocks.pass_(1.0)
        world.worker.write(*[(0.5, world.worker.margin_c)] * 9)
        world.tick(SHARED)
        states.append(world.gate(GPU, "thermal"))
    return states


def test_after_a_suspend_nothing_is_known_until_it_is_measured(
    world: World, clocks: Clocks
) -> None:
    """The first look after an hour: values are old, the window is empty, no gate is open."""
    assert world.gate(PIECE, "headroom") is GateState.OPEN
    assert world.gate(PIECE, "freshness") is GateState.OPEN
    clocks.suspend(SLEEP_S)
    look(world)
    clocks.pass_(3.0)  # headroom is weighed every few seconds
    look(world)
    assert world.gate(PIECE, "freshness") is GateState.UNKNOWN
    assert world.gate(GPU, "thermal") is GateState.UNKNOWN
    assert world.gate(PIECE, "headroom") is GateState.UNKNOWN
    assert world.telemetry.deciding()[PIECE].state is GateState.UNKNOWN
    minute = next(
        found
        for key, name, found in world.telemetry.quantiles(clocks.boot_s)
        if key[0] == PIECE and name == "compute" and found.span_s == 60
    )
    assert minute.p95 is None
    assert minute.coverage_ratio < 0.1
    watch(world, clocks, 5)
    assert world.gate(PIECE, "freshness") is GateState.OPEN
    assert world.gate(PIECE, "headroom") is GateState.UNKNOWN, "five seconds are no minute"


def test_a_suspend_is_no_dwell(world: World, clocks: Clocks) -> None:
    """Cool for three seconds, asleep for an hour, cool at once: ten more seconds are due."""
    world.worker.margin_c = 2.0
    assert watch(world, clocks, 2)[-1] is GateState.CLOSED
    world.worker.margin_c = 40.0
    assert set(watch(world, clocks, 3)) == {GateState.CLOSED}
    clocks.suspend(SLEEP_S)
    assert set(watch(world, clocks, 10)) == {GateState.CLOSED}
    assert watch(world, clocks, 1) == [GateState.OPEN]


def test_the_dwell_of_a_gate_counts_time_that_was_watched() -> None:
    """A gap as long as the dwell starts it anew; shorter ones, as of a busy node, do not."""

    def state_after(times: list[float]) -> GateState:
        gate = None
        for number, now_s in enumerate(times):
            opinion = gates.thermal(2.0 if number == 0 else 20.0, 0.0, gates.GateLimits())
            gate = gates.step("thermal", gate, opinion, now_s, 10.0)
        assert gate is not None
        return gate.state

    assert state_after([0.0, 1.0, 5.0, 12.0]) is GateState.OPEN
    assert state_after([0.0, 1.0, 100.0]) is GateState.CLOSED
    assert state_after([0.0, 1.0, 100.0, 105.0, 110.0]) is GateState.OPEN


def test_the_kernels_log_is_set_by_what_was_slept(clocks: Clocks, tmp_path: Path) -> None:
    """Its clock stops in a suspend: the line of an event after one still confirms it."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    world = World(log=path)
    try:
        world.tick(SHARED)
        clocks.suspend(SLEEP_S)
        world.telemetry.event(fault("xid:31"))
        micro = int((clocks.boot_s - SLEEP_S) * 1e6)
        os.write(keep, f"4,10,{micro},-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n".encode())
        world.tick(SHARED)
        known = world.telemetry.health[GPU]
        assert (known.counts, known.witnessed) == ({"xid:31": 1}, 1)
    finally:
        world.telemetry.close()
        os.close(keep)


@pytest.mark.parametrize("step_s", [-86_400.0, -1.0, 1.0, 86_400.0, 1e9])
def test_a_wall_clock_step_changes_no_gate_and_no_window(
    world: World, clocks: Clocks, step_s: float
) -> None:
    """A day back, a day forward: whatever is decided is decided by the boot clock."""
    before = {s: g.state for s, g in world.telemetry.deciding().items()}
    seconds = world.telemetry.ledger.seconds()
    clocks.wall += step_s
    watch(world, clocks, 3)
    assert {s: g.state for s, g in world.telemetry.deciding().items()} == before
    assert world.gate(PIECE, "headroom") is GateState.OPEN
    for key, parts in world.telemetry.ledger.seconds().items():
        assert 0 <= sum(parts) - sum(seconds[key]) <= 4.0


def test_a_drain_for_a_time_is_not_ended_by_a_wall_clock_step(world: World, clocks: Clocks) -> None:
    """Within a boot its time is that of the boot clock."""
    world.telemetry.drain(GPU, "s", "x", world.telemetry._seen(), 60.0)
    clocks.wall += 86_400.0
    watch(world, clocks, 2)
    assert world.gate(GPU, "drain") is GateState.CLOSED
    clocks.pass_(60.0)
    watch(world, clocks, 1)
    assert world.gate(GPU, "drain") is GateState.OPEN
