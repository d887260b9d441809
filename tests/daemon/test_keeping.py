"""What the daemon may do by itself to keep a layout, and what it leaves to people."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alloy_agent.daemon import keeping
from alloy_agent.model import (
    Create,
    Destroy,
    Device,
    DeviceId,
    Interrupt,
    Layout,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Plan,
    PlannedStep,
    Scheme,
    Scope,
    SetMode,
    Snapshot,
    Step,
    TenantId,
    Vendor,
)

DEVICE = DeviceId("GPU-1")


def device(pending: str | None = None) -> Device:
    mode = Mode(
        kind=ModeKind.MIG,
        current="off",
        pending=pending,
        available=("on", "off"),
        change=ModeChange.DEVICE_RESET,
    )
    return Device(
        id=DEVICE,
        vendor=Vendor.NVIDIA,
        model="H100",
        backend="fake",
        scheme=Scheme.INSTANCES,
        slices=8,
        slice_name="memory slice",
        modes=(mode,),
    )


def piece(*, managed: bool = True, tenant: str | None = None) -> Partition:
    return Partition(
        id=PartitionId("GPU-1/1g.10gb@0"),
        device=DEVICE,
        profile="1g.10gb",
        placement=Placement(start=0, size=1),
        incarnation="a",
        generation=1,
        managed=managed,
        tenant=None if tenant is None else TenantId(tenant),
    )


def snapshot(*partitions: Partition, pending: str | None = None) -> Snapshot:
    return Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=1.0,
        taken_wall_s=1.0,
        devices=(device(pending),),
        partitions=partitions,
    )


def plan(*steps: Step, interrupts: tuple[Interrupt, ...] = ()) -> Plan:
    return Plan(
        layout=Layout(name="wanted"),
        boot_id="b",
        observed_sequence=1,
        steps=tuple(
            PlannedStep(number=n, step=s, interrupts=interrupts) for n, s in enumerate(steps, 1)
        ),
    )


CREATE = Create(
    device=DEVICE,
    spec=PartitionSpec(
        device=DEVICE, profile="1g.10gb", size=1, placement=Placement(start=0, size=1)
    ),
)
MIG_ON = SetMode(device=DEVICE, kind=ModeKind.MIG, current="off", wanted="on")


def test_a_vanished_partition_is_made_again() -> None:
    """Creating what the layout wants needs nobody's consent."""
    assert keeping.hindrance(plan(CREATE), snapshot()) == ""


def test_an_own_empty_partition_may_go() -> None:
    """What the agent made itself and nobody uses may be replaced."""
    own = piece()
    assert keeping.hindrance(plan(Destroy(device=DEVICE, partition=own)), snapshot(own)) == ""


@pytest.mark.parametrize(
    ("found", "word"),
    [(piece(managed=False), "somebody else"), (piece(tenant="acme"), "tenant acme")],
)
def test_foreign_and_occupied_partitions_are_never_destroyed(found: Partition, word: str) -> None:
    """A piece that others made, or that a tenant is in, stops the keeper and is named."""
    stale = piece()  # as planned: own and free; the snapshot knows better
    reason = keeping.hindrance(plan(Destroy(device=DEVICE, partition=stale)), snapshot(found))
    assert word in reason
    assert found.id in reason


def test_a_pending_mode_is_not_asked_for_again() -> None:
    """A switch that waits for a reset is reported as waiting instead of thrown again."""
    reason = keeping.hindrance(plan(MIG_ON), snapshot(pending="on"))
    assert reason == "mig of GPU-1 waits for a device reset"


def test_a_mode_is_not_switched_under_a_tenant() -> None:
    """A wrong mode of a device with a tenant on it is left to a person."""
    assert "tenant acme" in keeping.hindrance(plan(MIG_ON), snapshot(piece(tenant="acme")))


@pytest.mark.parametrize("scope", [Scope.HIVE, Scope.NODE])
def test_a_hive_or_node_is_never_interrupted(scope: Scope) -> None:
    """Steps that reach further than a device need a person."""
    wide = Interrupt(scope=scope, subject="h0", why="driver reload")
    assert "h0" in keeping.hindrance(plan(MIG_ON, interrupts=(wide,)), snapshot())


def test_waits_grow_and_are_bounded() -> None:
    """Each failure in the same situation doubles the wait, up to the longest."""
    state, waits = keeping.Keeping(), []
    for _ in range(14):
        state = keeping.after_failure(state, "no", "same", now_s=100.0)
        waits.append(state.not_before_s - 100.0)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == keeping.WAIT_LONGEST_S
    assert keeping.waits(state, "same", 101.0)
    assert not keeping.waits(state, "other", 101.0)
    assert not keeping.waits(state, "same", 100.0 + keeping.WAIT_LONGEST_S)


def test_a_new_situation_starts_afresh() -> None:
    """A change of layout, geometry, mode or condition ends the patience."""
    layout = Layout(name="wanted", digest="d")
    base = keeping.situation(layout, snapshot())
    assert keeping.situation(layout, snapshot(piece())) != base
    assert keeping.situation(replace(layout, digest="e"), snapshot()) != base
    remade = replace(piece(), incarnation="b")
    assert keeping.situation(layout, snapshot(piece())) != keeping.situation(
        layout, snapshot(remade)
    )
    later = replace(snapshot(), sequence=9, taken_at_s=50.0)
    assert keeping.situation(layout, later) == base
