"""The daemon's half of telemetry over a worker that answers from memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.daemon.telemetry import HealthChange, Hooks, Telemetry
from alloy_agent.errors import StoreFullError
from alloy_agent.host import clock
from alloy_agent.model import (
    Condition,
    DeviceEvent,
    DeviceFault,
    Scope,
    Share,
    SignalSpec,
    WorkerState,
)
from alloy_agent.store import Store
from alloy_agent.telemetry.gates import GateState
from alloy_agent.telemetry.health import Level
from alloy_agent.telemetry.kernel_log import KernelLog
from alloy_agent.worker.board import SamplerState
from alloy_agent.worker.ring import PageReader, PageWriter
from tests.telemetry.world import GPU, device, piece, snapshot

PIECE = "GPU-0/1g@0"
SPECS = tuple(
    SignalSpec(name=name, subject=subject, scope=scope, unit="", refresh_period_s=0.1)
    for name, subject, scope in (
        ("alloy_partition_compute_active_ratio", PIECE, Scope.PARTITION),
        ("alloy_device_temperature_headroom_celsius", GPU, Scope.DEVICE),
    )
)


class Memory:
    """A worker whose page a test writes."""

    name = "fake"

    def __init__(self) -> None:
        self.margin_c = 40.0
        self.writer = PageWriter(len(SPECS), 1, 1024)
        self.reader = PageReader(os.dup(self.writer.fd), SPECS, 1)

    def write(self, *values: tuple[float, ...], step_s: float = 0.1) -> None:
        """Add frames that end now."""
        now_s = clock.boottime_s()
        for number, row in enumerate(values):
            at_s = now_s - (len(values) - 1 - number) * step_s
            self.writer.begin(at_s)
            for slot, value in enumerate(row):
                self.writer.put(slot, value, source_time_s=at_s)
            self.writer.commit(at_s)

    def state(self) -> WorkerState:
        """Return that it runs."""
        return WorkerState(backend="fake", alive=True)

    def sampler(self) -> SamplerState:
        """Return ten samples a second."""
        return SamplerState(rate_hz=10.0)

    def period_s(self) -> float:
        """Return the time between two samples."""
        return 0.1

    def page(self, _device: str) -> PageReader:
        """Return the one page."""
        return self.reader

    def pages(self) -> dict[str, PageReader]:
        """Return the one page."""
        return {GPU: self.reader}

    def lateness(self) -> tuple[int, ...]:
        """Return no lateness."""
        return ()


class World:
    """Telemetry with everything it tells."""

    def __init__(self, store: Store | None = None, log: Path | None = None) -> None:
        self.worker = Memory()
        self.health: list[HealthChange] = []
        self.pushes = 0
        hooks = Hooks(self.health.append, self._push, lambda _: None, lambda *_: None)
        self.telemetry = Telemetry(
            (self.worker,),  # type: ignore[arg-type]
            hooks,
            store=store,
            kernel_log=None if log is None else lambda after: KernelLog(after or 0, str(log)),
        )

    def _push(self) -> None:
        self.pushes += 1

    def tick(self, *pieces: Any, **changes: Any) -> None:
        """Look at the node and judge it."""
        changes = {"bus": "0000:3b:00.0", **changes}
        self.worker.write((0.5, self.worker.margin_c))
        seen = snapshot(*pieces, now_s=clock.boottime_s(), devices=(device(**changes),))
        self.telemetry.tick(seen, {})

    def gate(self, subject: str, name: str) -> GateState:
        """Return a gate's state."""
        return self.telemetry.gates[subject][name].state


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path)
    yield store
    store.close()


def fault(code: str, detail: str = "") -> DeviceEvent:
    """Return a fault event of the device, now."""
    return DeviceEvent(
        device=GPU, kind="fault", code=code, detail=detail, time_s=clock.boottime_s()
    )


def test_an_event_closes_the_gate_before_it_returns(world: World) -> None:
    """No tick in between: the gate is closed, and whoever watches is told, at once."""
    world.tick(piece())
    world.pushes = 0
    world.telemetry.event(fault("xid:109"))
    assert world.gate(GPU, "health") is GateState.CLOSED
    assert world.gate(PIECE, "health") is GateState.CLOSED
    assert world.pushes == 1
    (change,) = world.health
    assert (change.before, change.after, change.action) == (Level.OK, Level.FAILED, "reset")


def test_a_storm_is_counted_in_full_and_told_in_brief(world: World) -> None:
    """Ten thousand events: all counted, two messages, one push."""
    world.tick(piece())
    world.pushes = 0
    for _ in range(10_000):
        world.telemetry.event(fault("xid:109"))
    world.tick(piece())
    assert world.telemetry.health[GPU].counts["xid:109"] == 10_000
    assert [change.count for change in world.health] == [1, 10_000]
    assert world.pushes == 1


def test_shadow_mode_tells_and_closes_nothing(world: World) -> None:
    """Everything is folded, nothing is shut."""
    world.telemetry.shadow = True
    world.tick(piece())
    world.telemetry.event(fault("xid:79"))
    assert world.telemetry.health[GPU].level is Level.FAILED
    assert world.gate(GPU, "health") is GateState.OPEN
    assert world.health[0].shadow


def test_a_restart_takes_up_health_and_drains(store: Store) -> None:
    """What was known is known again, before the first look at the node."""
    first = World(store)
    first.tick(piece())
    first.telemetry.event(fault("xid:62"))
    first.telemetry.drain(GPU, "s1", "work", snapshot(piece(), now_s=clock.boottime_s()))
    first.telemetry.close()
    second = World(store)
    assert second.telemetry.health[GPU].counts == {"xid:62": 1}
    second.tick(piece())
    assert second.gate(GPU, "health") is GateState.CLOSED
    assert second.gate(PIECE, "drain") is GateState.CLOSED


def test_what_cannot_be_kept_is_not_promised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain or its end that the store refuses changes nothing in memory, and tells nobody."""
    world = World(store)
    world.tick(piece())
    world.telemetry.event(fault("xid:62"))
    seen = snapshot(piece(), now_s=clock.boottime_s())
    (held, health) = (world.telemetry.drains, dict(world.telemetry.health))

    def full(*_: object, **__: object) -> None:
        raise StoreFullError("no space is left")

    with monkeypatch.context() as broken:
        broken.setattr(store, "set_meta", full)
        world.pushes = 0
        with pytest.raises(StoreFullError):
            world.telemetry.drain(GPU, "s1", "work", seen)
        with pytest.raises(StoreFullError):
            world.telemetry.undrain(GPU, "", seen)
        assert (world.telemetry.drains, world.telemetry.health) == (held, health)
        assert world.pushes == 0
    world.telemetry.drain(GPU, "s1", "work", seen)
    assert [drain.subject for drain in World(store).telemetry.drains] == [GPU]


def test_damaged_health_is_said_and_does_not_stop_the_agent(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Unreadable state begins anew, with an error in the log."""
    store.set_meta("health", "{not json")
    world = World(store)
    world.tick(piece())
    assert "health_not_restored" in caplog.text


def test_the_kernels_line_confirms_the_drivers_event(tmp_path: Path) -> None:
    """One fault from two witnesses is one; one that only the kernel tells of is one too."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    world = World(log=path)
    try:
        world.tick(piece())
        world.telemetry.event(fault("xid:31"))
        micro = int((clock.boottime_s() - clock.monotonic_offset_s()) * 1e6)
        line = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, name=x"
        os.write(keep, f"4,10,{micro},-;{line.format(31)}\n".encode())
        world.tick(piece())
        os.write(keep, f"4,11,{micro},-;{line.format(109)}\n".encode())
        world.tick(piece())
        os.write(keep, f"12,12,{micro},-;{line.format(79)}\n".encode())  # a program wrote it
        world.tick(piece())
        known = world.telemetry.health[GPU]
        assert known.counts == {"xid:31": 1, "xid:109": 1}
        assert known.witnessed == 1
    finally:
        world.telemetry.close()
        os.close(keep)


def test_windows_fill_from_frames_and_forget_other_incarnations(world: World) -> None:
    """A minute of frames gives a P95; a partition made anew starts from nothing."""
    world.worker.write(*[(0.7, 40.0)] * 620)
    world.tick(piece(share=Share.OPPORTUNISTIC))
    room = world.telemetry.headrooms[PIECE, 1]
    assert room.least == pytest.approx(0.3, abs=0.005)
    assert world.gate(PIECE, "headroom") is GateState.OPEN
    world.tick(piece(generation=2, share=Share.OPPORTUNISTIC))
    assert (PIECE, 1) not in world.telemetry.windows
    assert (PIECE, 1) not in world.telemetry.headrooms
    assert world.gate(PIECE, "headroom") is GateState.UNKNOWN


def test_impossible_readings_never_reach_a_window(world: World) -> None:
    """Sentinels and numbers beyond physics are left out of the quantiles."""
    rows = [(0.2, 40.0) if n % 2 else (65535.0, math.inf) for n in range(40)]
    world.worker.write(*rows)
    world.tick(piece())
    assert world.telemetry.windows[PIECE, 1]["compute"].minute.samples == 20


def test_heat_closes_the_device_and_its_pieces(world: World) -> None:
    """Two degrees from the slow-down threshold: closed, with the reason."""
    world.worker.margin_c = 2.0
    world.tick(piece())
    assert world.gate(GPU, "thermal") is GateState.CLOSED
    assert world.gate(PIECE, "thermal") is GateState.CLOSED
    assert "2.0 degrees" in world.telemetry.deciding()[PIECE].reason


def test_what_the_snapshot_shows_is_folded(world: World) -> None:
    """A lost device closes; a wrong number of partitions degrades."""
    world.tick(piece(), condition=Condition.LOST, condition_reason="gone")
    assert world.telemetry.health[GPU].closed_by
    other = World()
    seen = snapshot(piece(), now_s=clock.boottime_s())
    mismatch = DeviceFault(device=GPU, kind="partition_count_mismatch", reason="8 of 16")
    import msgspec

    other.telemetry.tick(msgspec.structs.replace(seen, faults=(mismatch,)), {})
    assert other.telemetry.health[GPU].level is Level.DEGRADED
    assert other.gate(PIECE, "topology") is GateState.CLOSED


def test_a_reset_by_the_vendor_begins_validation_and_its_announcement_does_not(
    world: World,
) -> None:
    """A pre-reset is a fault, a reset that was done waits to be validated."""
    world.tick(piece())
    world.telemetry.event(
        DeviceEvent(device=GPU, kind="reset", code="amd:gpu_pre_reset", time_s=1.0)
    )
    assert world.telemetry.health[GPU].level is Level.FAILED
    world.telemetry.event(
        DeviceEvent(device=GPU, kind="reset", code="amd:gpu_post_reset", time_s=2.0)
    )
    (open_,) = world.telemetry.health[GPU].faults
    assert open_.reset_s is not None
