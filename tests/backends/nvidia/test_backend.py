"""The NVIDIA backend over a stand-in of its library, on simulated silicon that refuses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends import BackendSpec, backend_specs
from alloy_agent.backends.nvidia import open_backend, topology
from alloy_agent.backends.nvidia.processes import fence_of
from alloy_agent.config import NvidiaSettings, Settings
from alloy_agent.errors import (
    BackendError,
    ConfigError,
    DeviceBusyError,
    DeviceLostError,
    DeviceStalledError,
    NotPermittedError,
    UnsupportedError,
)
from alloy_agent.model import (
    HALF_MADE,
    Create,
    Destroy,
    Device,
    DeviceId,
    Layout,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Quality,
    Scheme,
    SetMode,
    Snapshot,
    Step,
)
from alloy_agent.planner import difference, plan
from alloy_agent.silicon.boards import BOARDS, NvidiaBoard
from alloy_agent.silicon.state import MachineState
from tests.fakes.nvml.host import LIBRARY, NvidiaHost, Sink
from tests.planner.world import Oracle, layout, wanted

H100 = "H100-SXM5-80GB"
A100 = "A100-SXM4-40GB"
REPOSITORY = Path(__file__).parents[3]
ACTIVE = "alloy_partition_compute_active_ratio"


def hosted(directory: Path, *specs: str, **traits: Any) -> tuple[NvidiaHost, DeviceId]:
    """Return a host and its first GPU."""
    host = NvidiaHost(directory, *(specs or (f"1x{H100}",)), **traits)
    return host, host.backend.discover()[0]


def mode_of(device: Device) -> tuple[str, str | None]:
    """Return current and pending MIG mode."""
    (mode,) = device.modes
    return mode.current, mode.pending


# --- what the driver tells ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "board", [name for name, board in BOARDS.items() if isinstance(board, NvidiaBoard)]
)
def test_a_board_is_read_back_as_it_is(board: str, tmp_path: Path) -> None:
    """Names, places, sizes and counts of all profiles come from the driver, in each board."""
    host, ident = hosted(tmp_path, f"1x{board}")
    device, table = host.backend.observe(ident).device, BOARDS[board]
    assert isinstance(table, NvidiaBoard)
    assert device.slices == table.memory_slices
    assert device.compute_units == table.sms
    assert device.pci_id == f"0x{table.pci_id:08x}"
    assert device.bus == host.machine.state.devices[0].bus
    assert {p.name: (p.size, p.starts, p.max_count, p.vendor_ref) for p in device.profiles} == {
        s.name: (s.size, s.starts, s.max_count, s.vendor_id) for s in table.profiles
    }


def test_an_old_driver_without_names_still_partitions(tmp_path: Path) -> None:
    """Without `...ProfileInfoV` names are computed, equal the newer driver's, and say so."""
    host, ident = hosted(tmp_path, f"1x{A100}", missing=["*InfoV", "nvmlGpm*"])
    device = host.backend.observe(ident).device
    board = BOARDS[A100]
    assert isinstance(board, NvidiaBoard)
    assert {p.name for p in device.profiles} == {s.name for s in board.profiles}
    assert "computed" in device.fault_note


def test_a_gpu_without_mig_is_one_piece(tmp_path: Path) -> None:
    """A GPU that cannot be partitioned is whole, has no modes, and refuses steps clearly."""
    host, ident = hosted(tmp_path)
    host.fail("nvmlDeviceGetMigMode", error="not_supported")
    seen = host.backend.observe(ident)
    assert seen.device.scheme is Scheme.WHOLE
    assert (seen.device.modes, seen.device.profiles) == ((), ())
    (piece,) = seen.partitions
    assert (piece.id, piece.placement) == (f"{ident}/whole@0", Placement(start=0, size=1))
    with pytest.raises(UnsupportedError, match="no MIG"):
        host.mig(ident)


def test_access_names_the_nodes_of_the_instance_alone(tmp_path: Path) -> None:
    """Each instance has its GPU instance's and compute instance's capability nodes, no others."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    one, two = host.make(ident, "3g.40gb@0", "3g.40gb@4")
    caps = [
        {node for node in piece.access.device_nodes if "nvidia-caps" in node}
        for piece in (one, two)
    ]
    assert [len(nodes) for nodes in caps] == [2, 2]
    assert not caps[0] & caps[1]
    assert "/dev/nvidia-caps/nvidia-cap1" not in caps[0] | caps[1]
    assert one.access.environment["CUDA_VISIBLE_DEVICES"] == one.uuid


def test_mig_on_without_instances_is_a_state_of_its_own(tmp_path: Path) -> None:
    """With MIG on and nothing made there is no partition: the GPU cannot be used."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    seen = host.backend.observe(ident)
    assert mode_of(seen.device) == ("on", None)
    assert seen.partitions == ()


def test_the_nodes_of_an_instance_exist_once_it_does(tmp_path: Path) -> None:
    """The driver makes no capability nodes: they are there after the step; a lost one is named."""
    host, ident = hosted(tmp_path)
    (host.root / "dev").mkdir()
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    caps = [host.root / n.lstrip("/") for n in piece.access.device_nodes if "nvidia-caps" in n]
    if not caps[0].exists():
        pytest.skip("this host does not let us make device nodes")
    assert [(os.major(p.stat().st_rdev), p.stat().st_rdev & 0xFF) for p in caps] == [
        (237, int(p.name.removeprefix("nvidia-cap"))) for p in caps
    ]
    assert host.backend.observe(ident).faults == ()
    caps[0].unlink()
    (fault,) = host.backend.observe(ident).faults
    assert (fault.kind, caps[0].name in fault.reason) == ("device_node_missing", True)


# --- mode --------------------------------------------------------------------------------------


def test_a_mode_that_is_only_pending_is_no_success(tmp_path: Path) -> None:
    """Activation 19 is "in use": current, pending and the holder are named; later it holds."""
    host, ident = hosted(tmp_path, f"1x{A100}")
    (whole,) = host.backend.observe(ident).partitions
    host.run(whole)
    with pytest.raises(DeviceBusyError, match=r"in use \(19\): MIG is off, on is pending.*4242"):
        host.mig(ident)
    assert mode_of(host.backend.observe(ident).device) == ("off", "on")
    host.machine.stop_process(4242)
    host.mig(ident)
    assert mode_of(host.backend.observe(ident).device) == ("on", None)


def test_a_blocked_reset_is_said_and_not_repeated(tmp_path: Path) -> None:
    """A passthrough A100 ends pending with activation 16, after one call, and is marked."""
    recipe = tmp_path / "node.yaml"
    recipe.write_text(f"boards:\n  - {{board: {A100}, passthrough: true}}\n")
    host, ident = hosted(tmp_path, str(recipe))
    with pytest.raises(BackendError, match=r"reset required \(16\)"):
        host.mig(ident)
    assert host.library.counts["nvmlDeviceSetMigMode"] == 1
    seen = host.backend.observe(ident)
    assert mode_of(seen.device) == ("off", "on")
    assert "reset_required" in {fault.kind for fault in seen.faults}


def test_start_up_changes_nothing(tmp_path: Path) -> None:
    """Foreign instances of a passthrough A100 are read; no mode is set, nothing destroyed."""
    recipe = tmp_path / "node.yaml"
    recipe.write_text(
        f"boards:\n  - {{board: {A100}, passthrough: true, instances: [3g.20gb@0, 3g.20gb@4]}}\n"
    )
    host, ident = hosted(tmp_path, str(recipe))
    assert len(host.backend.observe(ident).partitions) == 2
    host.backend.facts(ident)
    host.sampled(ident)
    host.backend.close()
    called = {name for name in host.library.counts if "Set" in name or "Destroy" in name}
    assert called <= {"nvmlEventSetCreate"}


def test_mig_stays_on_while_instances_live(tmp_path: Path) -> None:
    """Turning MIG off over a living instance is refused before the driver is asked."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "1g.10gb@0")
    with pytest.raises(DeviceBusyError, match="destroy its instances"):
        host.mig(ident, "off")
    assert host.library.counts["nvmlDeviceSetMigMode"] == 1
    host.backend.apply(Destroy(device=ident, partition=piece))
    host.mig(ident, "off")
    assert host.backend.observe(ident).partitions[0].profile == "whole"


# --- instances ---------------------------------------------------------------------------------


def test_what_is_not_named_keeps_its_uuid(tmp_path: Path) -> None:
    """A busy 4g survives the change of its neighbours: same UUID, no call on it."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    big, middle, small = host.make(ident, "4g.40gb@0", "2g.20gb@4", "1g.10gb@6")
    host.run(big)
    host.backend.apply(Destroy(device=ident, partition=middle))
    after = host.make(ident, "1g.10gb@4", "1g.10gb@5")
    assert [piece for piece in after if piece.profile == "4g.40gb"] == [big]
    assert small in after
    assert host.library.counts["nvmlComputeInstanceDestroy"] == 1


def test_a_failed_compute_instance_takes_its_gpu_instance_along(tmp_path: Path) -> None:
    """When the second half cannot be made, nothing is left over that takes room."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    key = host.fail("nvmlGpuInstanceCreateComputeInstance", error="insufficient_resources")
    with pytest.raises(BackendError, match="23"):
        host.make(ident, "3g.40gb@0")
    assert host.machine.state.devices[0].instances == []
    host.machine.remove_fault(key)
    assert len(host.make(ident, "3g.40gb@0")) == 1


def test_a_half_made_instance_is_shown_and_completed(tmp_path: Path) -> None:
    """A GPU instance without compute instance is a fault, and the same step completes it."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    host.machine.nvidia(ident).create_gpu_instance(9, 4)
    seen = host.backend.observe(ident)
    assert seen.partitions == ()
    assert [(f.kind, f.reason) for f in seen.faults] == [
        (HALF_MADE, "3g.40gb@4 without compute instance")
    ]
    (piece,) = host.make(ident, "3g.40gb@4")
    assert piece.placement.start == 4
    assert len(host.machine.state.devices[0].instances) == 1


def test_a_removal_cut_in_half_can_be_ended(tmp_path: Path) -> None:
    """When the compute instance went and the GPU instance did not, the same step ends it."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    key = host.fail("nvmlGpuInstanceDestroy", error="unknown")
    step = Destroy(device=ident, partition=piece)
    with pytest.raises(BackendError, match="999"):
        host.backend.apply(step)
    assert host.backend.observe(ident).faults[0].kind == HALF_MADE
    host.machine.remove_fault(key)
    host.backend.apply(step)
    assert host.machine.state.devices[0].instances == []


def test_a_gpu_instance_that_lets_go_late_is_waited_for(tmp_path: Path) -> None:
    """IN_USE without a process inside passes by itself: the removal succeeds."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.fail("nvmlGpuInstanceDestroy", error="in_use", times=3)
    host.backend.apply(Destroy(device=ident, partition=piece))
    assert host.backend.observe(ident).partitions == ()


@pytest.mark.parametrize("code", [2, 6, 7, 10, 19, 20, 23, 25, 999, 12345])
def test_any_code_of_any_reading_stays_with_its_gpu(code: int, tmp_path: Path) -> None:
    """Whatever a call answers, it is an error of ours or no error, and the sibling answers."""
    for call in ("nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlDeviceGetName"):
        host, ident = hosted(tmp_path / f"{call}-{code}", f"2x{H100}")
        host.mig(ident)
        host.backend.observe(ident)
        host.backend._gpus[ident].forget()
        host.fail(call, device=ident, error="unknown", code=code)
        with contextlib.suppress(BackendError):
            assert host.backend.observe(ident).device.id == ident
        other = host.backend.discover()[1]
        assert host.backend.observe(other).device.id == other


def follow(host: NvidiaHost, ident: DeviceId, goal: Layout) -> int:
    """Carry a layout out, check that it holds, and return how many pieces were destroyed."""

    def observed() -> Snapshot:
        seen = host.backend.observe(ident)
        return Snapshot(
            boot_id="boot",
            sequence=1,
            taken_at_s=0.0,
            taken_wall_s=0.0,
            devices=(seen.device,),
            partitions=seen.partitions,
        )

    made = plan(goal, observed())
    for planned in made.steps:
        host.backend.apply(planned.step)
    assert difference(goal, observed()) == ()
    return sum(isinstance(planned.step, Destroy) for planned in made.steps)


def walk(host: NvidiaHost, ident: DeviceId, targets: list[tuple[str, ...]], oracle: Oracle) -> None:
    """Go from layout to layout; each destroys exactly the fewest that exhaustive search finds."""
    device = host.backend.observe(ident).device
    for after in targets:
        here = host.backend.observe(ident).partitions
        before = tuple((piece.profile, piece.placement.start) for piece in here)
        fewest = oracle.fewest_destroyed(before, after)
        assert follow(host, ident, layout(wanted(device, *after))) == fewest


@pytest.mark.parametrize("board", [A100, H100, "B200-180GB"])
def test_layouts_follow_each_other_with_the_fewest_destroyed(board: str, tmp_path: Path) -> None:
    """A random walk over a board's layouts through the real calls, each at the least cost."""
    host, ident = hosted(tmp_path, f"1x{board}")
    host.mig(ident)
    oracle = Oracle(host.backend.observe(ident).device)
    targets = random.Random(board).sample(sorted(oracle.by_multiset), 25)  # noqa: S311
    walk(host, ident, targets, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("board", [A100, H100, "B200-180GB"])
def test_every_layout_is_reached_from_every_other(board: str, tmp_path: Path) -> None:
    """All ordered pairs of a board's layouts, through the real calls, each at the least cost."""
    host = NvidiaHost(tmp_path, f"1x{board}", state_dir=None)
    ident = host.backend.discover()[0]
    host.mig(ident)
    oracle = Oracle(host.backend.observe(ident).device)
    every = sorted(oracle.by_multiset)
    for number, one in enumerate(every):
        walk(host, ident, [t for other in every[:number] for t in (one, other)], oracle)


# --- handles -----------------------------------------------------------------------------------


def cycles(host: NvidiaHost, ident: DeviceId, count: int) -> None:
    """Create, sample at 50 Hz, destroy, with a live event waiter; nothing may stay open."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            while not stop.is_set():
                host.backend.wait_events(0.2)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        for number in range(count):
            host.backend.quiesce(ident)
            assert host.machine.open_handles(ident) == 0
            piece = host.make(ident, f"1g.10gb@{number % 7}")[0]
            host.backend.resume(ident)
            host.sampled(ident)
            time.sleep(0.02)
            host.sampled(ident)
            host.backend.quiesce(ident)
            assert host.machine.open_handles(ident) == 0
            host.backend.apply(Destroy(device=ident, partition=piece))
            host.backend.resume(ident)
    finally:
        stop.set()
        waiter.join(10)
    assert failures == []
    host.backend.close()
    assert host.machine.open_handles() == host.library.open_resources() == 0


def test_a_few_cycles_leave_no_handle(tmp_path: Path) -> None:
    """Twenty cycles of create, sample, destroy, with events live, leave nothing open."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    cycles(host, ident, 20)


@pytest.mark.slow
def test_a_thousand_cycles_leave_no_handle(tmp_path: Path) -> None:
    """A thousand cycles of create, sample at 50 Hz, destroy leave zero open handles."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    cycles(host, ident, 1000)


def test_a_live_event_waiter_gives_way(tmp_path: Path) -> None:
    """While events are waited for on another GPU, quiesce and resume get their turn."""
    host, ident = hosted(tmp_path, f"2x{H100}")
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            host.backend.wait_events(1.0)

    def change() -> None:
        for _ in range(10):
            host.backend.quiesce(ident)
            host.backend.resume(ident)

    waiter = threading.Thread(target=wait, daemon=True)
    changer = threading.Thread(target=change, daemon=True)
    waiter.start()
    changer.start()
    changer.join(30)
    stop.set()
    waiter.join(10)
    assert not changer.is_alive()
    assert not waiter.is_alive()


def test_a_held_sample_is_why_a_change_fails(tmp_path: Path) -> None:
    """Without quiesce a GPM buffer holds its instance, as the silicon has it; with it, not."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.sampled(ident)
    assert host.backend.open_count(ident) > 0
    with pytest.raises(DeviceBusyError):
        host.backend.apply(Destroy(device=ident, partition=piece))
    host.backend.quiesce(ident)
    host.backend.apply(Destroy(device=ident, partition=piece))


# --- signals -----------------------------------------------------------------------------------


def test_signals_of_a_busy_instance(tmp_path: Path) -> None:
    """Memory, activity, power and energy read what the machine does, in our units."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.run(piece, load_ratio=0.8, memory_bytes=5 << 30)
    specs = host.backend.signal_specs(ident)
    first = host.sampled(ident)
    assert first[ACTIVE, piece.id][1] is Quality.NOT_SUPPORTED  # one sample is no rate yet
    time.sleep(0.12)
    sink = Sink()
    host.backend.sample(ident, sink)
    found = {(s.name, s.subject): sink.slots[n] for n, s in enumerate(specs)}
    assert found[ACTIVE, piece.id][0] == pytest.approx(0.72, abs=0.09)
    assert found["alloy_partition_memory_used_bytes", piece.id][0] == 5 << 30
    assert found["alloy_device_memory_used_bytes", ident][0] == 5 << 30
    assert 70 < found["alloy_device_power_watts", ident][0] < 700
    assert found["alloy_device_energy_joules_total", ident][0] > 0
    assert all(
        abs((source or 0) - time.clock_gettime(time.CLOCK_BOOTTIME)) < 10
        for _, quality, source in found.values()
        if quality is Quality.VALUE
    )


def test_ampere_in_mig_mode_has_no_activity(tmp_path: Path) -> None:
    """An A100's instance has no activity from NVML: absent, never zero."""
    host, ident = hosted(tmp_path, f"1x{A100}")
    host.mig(ident)
    (piece,) = host.make(ident, "3g.20gb@0")
    host.run(piece, load_ratio=1.0)
    found = host.sampled(ident)
    assert found[ACTIVE, piece.id][1] is Quality.NOT_SUPPORTED
    assert found["alloy_partition_memory_used_bytes", piece.id][1] is Quality.VALUE


def test_a_successor_is_never_read_under_its_predecessors_name(tmp_path: Path) -> None:
    """A handle that has come to mean a new instance at the same place reads stale."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "1g.10gb@0")
    specs = host.backend.signal_specs(ident)
    host.backend.sample(ident, Sink())
    gpu = host.machine.nvidia(ident)
    host.machine.process_died()  # lets somebody else re-make it under our handles
    gpu.destroy_compute_instance(int(piece.locator["gi"]), 0)
    gpu.destroy_gpu_instance(int(piece.locator["gi"]))
    gpu.create_compute_instance(gpu.create_gpu_instance(19, 0).id)
    time.sleep(0.12)
    sink = Sink()
    host.backend.sample(ident, sink)
    gone = [n for n, spec in enumerate(specs) if spec.subject == piece.id]
    assert {sink.slots[n][1] for n in gone} == {Quality.STALE}


def test_a_tick_makes_few_calls(tmp_path: Path) -> None:
    """Between two readings of what renews slowly, one tick of a GPU is one vendor call."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    host.make(ident, "3g.40gb@0", "3g.40gb@4")
    host.backend.signal_specs(ident)
    sink = Sink()
    for _ in range(3):
        host.backend.sample(ident, sink)
    before = sum(host.library.counts.values())
    ticks = 5
    for _ in range(ticks):
        host.backend.sample(ident, sink)
    per_tick = (sum(host.library.counts.values()) - before) / ticks
    assert per_tick <= 8


def test_a_full_gpu_takes_turns(tmp_path: Path) -> None:
    """With seven instances no tick but the first makes more than eight calls, and all are read."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    pieces = host.make(ident, *(f"1g.10gb@{start}" for start in range(7)))
    specs = host.backend.signal_specs(ident)
    sink, most = Sink(), 0
    host.backend.sample(ident, sink)
    memory = "alloy_partition_memory_used_bytes"
    known = {spec.subject for n, spec in enumerate(specs) if sink.slots[n][1] is Quality.VALUE}
    assert known >= {piece.id for piece in pieces}
    times: dict[str, set[float | None]] = {}
    for _ in range(20):
        time.sleep(0.1)
        before = sum(host.library.counts.values())
        host.backend.sample(ident, sink)
        most = max(most, sum(host.library.counts.values()) - before)
        for n, spec in enumerate(specs):
            times.setdefault(f"{spec.name} {spec.subject}", set()).add(sink.slots[n][2])
    assert most <= 8
    assert all(len(times[f"{name} {p.id}"]) >= 3 for p in pieces for name in (ACTIVE, memory))
    assert all(q is Quality.VALUE for n, (_, q, _) in sink.slots.items() if specs[n].name == ACTIVE)


def test_an_old_driver_without_fields_uses_the_getters(tmp_path: Path) -> None:
    """Without `nvmlDeviceGetFieldValues` power and energy are still read."""
    host, ident = hosted(tmp_path, missing=["nvmlDeviceGetFieldValues", "*Margin*", "*InfoV"])
    found = host.sampled(ident)
    for name in ("power_watts", "energy_joules_total", "temperature_headroom_celsius"):
        assert found[f"alloy_device_{name}", ident][1] is Quality.VALUE
    assert found["alloy_device_ecc_corrected_total", ident][1] is Quality.NOT_SUPPORTED


# --- events ------------------------------------------------------------------------------------


def events_after(host: NvidiaHost, act: Callable[[], None]) -> list[Any]:
    """Return the events that an act causes."""
    host.backend.wait_events(0.0)
    act()
    found: list[Any] = []
    while more := list(host.backend.wait_events(0.2)):
        found += more
    return found


def test_xids_reach_the_instance_they_name(tmp_path: Path) -> None:
    """Whole-GPU, instance and unknown-instance XIDs go to the GPU, the piece and the GPU."""
    host, ident = hosted(tmp_path, f"2x{H100}")
    host.mig(ident)
    pieces = host.make(ident, "2g.20gb@0", "2g.20gb@2", "3g.40gb@4")
    second = pieces[1]

    def act() -> None:
        host.machine.inject_event(ident, "xid:48", instance=int(second.locator["gi"]))
        host.machine.inject_event(ident, "xid:13", instance=int(second.locator["gi"]))
        host.machine.inject_event(ident, "xid:31", instance=99)
        host.machine.inject_event(ident, "xid:95")

    found = [(e.device, e.code, e.partition) for e in events_after(host, act)]
    assert found == [
        (ident, "xid:48", second.id),
        (ident, "xid:13", second.id),
        (ident, "xid:31", None),
        (ident, "xid:95", None),
    ]


def test_a_burst_keeps_every_event_in_order(tmp_path: Path) -> None:
    """62, 45, 31, 31 within one period are four events, in order."""
    host, ident = hosted(tmp_path)

    def act() -> None:
        for xid in (62, 45, 31, 31):
            host.machine.inject_event(ident, f"xid:{xid}")

    codes = [event.code for event in events_after(host, act)]
    assert codes == ["xid:62", "xid:45", "xid:31", "xid:31"]


def test_one_lost_gpu_does_not_silence_the_others(tmp_path: Path) -> None:
    """The lost one is reported once; events of its sibling still arrive."""
    host, lost = hosted(tmp_path, f"2x{H100}")
    well = host.backend.discover()[1]
    found = events_after(host, lambda: host.machine.inject_event(lost, "xid:79"))
    assert {event.device for event in found} == {lost}
    assert [e.code for e in found].count("nvml:gpu_is_lost") <= 1
    later = events_after(host, lambda: host.machine.inject_event(well, "xid:31"))
    assert (well, "xid:31") in [(e.device, e.code) for e in later]
    assert "nvml:gpu_is_lost" not in [e.code for e in later if e.device == well]


def test_a_gpu_that_came_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset a lost GPU is found by itself, once, and its events arrive again."""
    monkeypatch.setattr("alloy_agent.backends.nvidia.events.LOOK_AGAIN_S", 0.05)
    host, ident = hosted(tmp_path)
    events_after(host, lambda: host.machine.inject_event(ident, "xid:79"))

    def revive(state: MachineState) -> None:
        state.devices[0].lost = False

    found = events_after(host, lambda: host.machine.edit(revive))
    assert [event.code for event in found if event.kind == "reset"] == ["nvml:gpu_is_back"]
    later = events_after(host, lambda: host.machine.inject_event(ident, "xid:31"))
    assert [event.code for event in later] == ["xid:31"]


def test_a_change_of_geometry_is_an_event(tmp_path: Path) -> None:
    """Somebody else's new instance is told by the driver."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    gpu = host.machine.nvidia(ident)

    def act() -> None:
        gpu.create_gpu_instance(19, 0)

    found = events_after(host, act)
    assert "geometry" in {event.kind for event in found}


# --- faults ------------------------------------------------------------------------------------


def test_a_gpu_that_vanished_is_still_listed_as_lost(tmp_path: Path) -> None:
    """Off the bus and out of the enumeration, it keeps its id, in a new process too."""
    host, ident = hosted(tmp_path, f"2x{H100}", vanish=True)
    both = host.backend.discover()
    host.machine.inject_event(ident, "xid:79")
    assert host.backend.discover() == both
    with pytest.raises(DeviceLostError):
        host.backend.observe(ident)
    again = host.open()
    assert set(again.discover()) == set(both)
    with pytest.raises(DeviceLostError):
        again.observe(ident)
    assert again.observe(both[1]).device.id == both[1]


def test_the_drivers_verdict_comes_first(tmp_path: Path) -> None:
    """The recovery action is the first fault named, in the driver's meaning."""
    host, ident = hosted(tmp_path)
    host.machine.inject_event(ident, "xid:154", detail="4")
    host.machine.inject_event(ident, "xid:63")
    kinds = [(f.kind, f.reason) for f in host.backend.observe(ident).faults]
    assert kinds[0] == ("recovery_action", "action 4: drain the GPU, then reset it")
    assert "row_remap_pending" in {kind for kind, _ in kinds}


def test_row_remapping_is_remembered_while_instances_hide_it(tmp_path: Path) -> None:
    """Rows are unreadable once instances live; what was seen before, and XID 64, still count."""
    host, ident = hosted(tmp_path)
    host.machine.inject_event(ident, "xid:63")
    host.backend.observe(ident)
    host.mig(ident)
    host.make(ident, "1g.10gb@0")
    assert "row_remap_pending" in {f.kind for f in host.backend.observe(ident).faults}
    events_after(host, lambda: host.machine.inject_event(ident, "xid:64"))
    assert "row_remap_failed" in {f.kind for f in host.backend.observe(ident).faults}


def test_no_permission_reads_and_does_not_change(tmp_path: Path) -> None:
    """Without privilege a step is refused with the cure; observation goes on."""
    host, ident = hosted(tmp_path, privileged=False)
    with pytest.raises(NotPermittedError, match="root"):
        host.mig(ident)


# --- topology ----------------------------------------------------------------------------------


def test_links_and_numa(tmp_path: Path) -> None:
    """NVLink peers without MIG, PCIe with it, the CPU node from sysfs, unknown never node 0."""
    host, ident = hosted(tmp_path, f"3x{H100}")
    kinds = {link.kind for link in host.backend.observe(ident).device.links}
    assert kinds == {"numa", "nvlink"}
    host.mig(ident)
    kinds = {link.kind for link in host.backend.observe(ident).device.links}
    assert "nvlink" not in kinds
    bus = host.machine.state.devices[1].bus
    (host.root / "sys/bus/pci/devices" / bus / "numa_node").write_text("-1\n")
    other = host.backend.discover()[1]
    assert host.backend.observe(other).device.numa_node is None


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ((2, 0, 0, bytes(16), 0), "not-ready"),
        ((3, 0, 7, b"\x01" * 16, 1), "ready"),
        ((3, 23, 0, bytes(16), 1), "unhealthy"),
        ((3, 0, 7, b"\x01" * 16, 2), "unhealthy"),
        ((3, 0, 0, bytes(16), 1), "not-ready"),
        ((0, 0, 0, bytes(16), 0), "none"),
        ((9, 0, 0, bytes(16), 0), "not-ready"),
    ],
)
def test_only_a_complete_fabric_names_a_domain(
    answer: tuple[int, int, int, bytes, int], state: str, tmp_path: Path
) -> None:
    """Of all shades of fabric state one gives a domain; none hides the GPU."""
    host, ident = hosted(tmp_path)
    host.library.fabric[ident] = answer
    device = host.backend.observe(ident).device
    fabric = topology.fabric_of(host.backend._gpus[ident])
    assert fabric.state == state
    assert bool(fabric.reason) == (state != "ready")
    assert device.hive == (f"{'01' * 16}.7" if state == "ready" else None)


def test_a_gpu_without_fabric_is_not_unhealthy(tmp_path: Path) -> None:
    """An A100 has no fabric: none, with the reason."""
    host, ident = hosted(tmp_path, f"1x{A100}")
    host.backend.observe(ident)
    assert topology.fabric_of(host.backend._gpus[ident]).state == "none"


# --- evidence ----------------------------------------------------------------------------------


def process(host: NvidiaHost, pid: int, **how: Any) -> None:
    """Write a process into the host's `/proc`."""
    place = host.root / "proc" / str(pid)
    (place / "fd").mkdir(parents=True, exist_ok=True)
    (place / "ns").mkdir(exist_ok=True)
    (place / "comm").write_text(how.get("comm", "python3") + "\n")
    (place / "cgroup").write_text(how.get("cgroup", "0::/tenant\n"))
    (place / "status").write_text(f"Name:\tx\nCapEff:\t{how.get('caps', 0):016x}\n")
    (place / "cmdline").write_bytes(how.get("cmdline", "python3").encode() + b"\0")
    environ = "\0".join(f"{k}={v}" for k, v in how.get("environ", {}).items())
    (place / "environ").write_bytes(environ.encode())
    spaces = {"mnt": how.get("namespace", 1), "user": 1, "pid": 1, **how.get("namespaces", {})}
    for kind, number in spaces.items():
        (place / "ns" / kind).symlink_to(f"{kind}:[{number}]")
    for number, node in enumerate(["/dev/nvidiactl", *how.get("nodes", ())]):
        (place / "fd" / str(number)).symlink_to(node)
    for node in how.get("dev", ()):
        file = place / "root" / node.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def fact_of(host: NvidiaHost, device: DeviceId, subject: str, name: str) -> Any:
    """Return one fact."""
    return next(f for f in host.backend.facts(device) if (f.subject, f.name) == (subject, name))


def fenced_piece(tmp_path: Path, **how: Any) -> tuple[NvidiaHost, DeviceId, Partition]:
    """Return a piece with a process of its own `/dev` in it."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.run(piece, pid=77)
    process(host, 1, namespace=1)
    process(host, 77, **{"namespace": 2, "dev": piece.access.device_nodes, **how})
    return host, ident, piece


def test_a_fence_is_the_nodes_that_a_container_has(tmp_path: Path) -> None:
    """With its own `/dev` and no capability to make nodes, a tenant has exactly its nodes."""
    host, ident, piece = fenced_piece(tmp_path)
    value = fact_of(host, ident, piece.id, "cgroup.device_fence").value
    assert value["by"]
    assert set(value["allowed"]) == set(piece.access.device_nodes)


def test_a_neighbours_open_node_shows_in_the_fence(tmp_path: Path) -> None:
    """A capability node that is open counts, however it came there."""
    host, ident, piece = fenced_piece(tmp_path, nodes=["/dev/nvidia-caps/nvidia-cap1"])
    value = fact_of(host, ident, piece.id, "cgroup.device_fence").value
    assert "/dev/nvidia-caps/nvidia-cap1" in value["allowed"]


@pytest.mark.parametrize("how", [{"caps": 1 << 21}, {"caps": 1 << 27}, {"namespace": 1}])
def test_privilege_or_the_hosts_dev_is_no_fence(how: dict[str, int], tmp_path: Path) -> None:
    """CAP_SYS_ADMIN, CAP_MKNOD or the host's own mounts void the fence."""
    host, ident, piece = fenced_piece(tmp_path, **how)
    value = fact_of(host, ident, piece.id, "cgroup.device_fence").value
    assert (value["by"], value["allowed"]) == ("", ["*"])


def test_a_fence_that_cannot_be_read_is_absent(tmp_path: Path) -> None:
    """A process that has gone from `/proc` leaves the fence unknown, not passed."""
    host, _, _ = fenced_piece(tmp_path)
    assert fence_of(host.root / "proc", 99).unknown


def test_memory_without_owner_is_nobodys(tmp_path: Path) -> None:
    """Memory that no listed process owns is unattributed."""
    host, ident, piece = fenced_piece(tmp_path)
    host.run(piece, pid=78, memory_bytes=3 << 30)
    host.library.hidden.add(78)
    value = fact_of(host, ident, ident, "device.memory").value
    assert value["unattributed_bytes"] == 3 << 30


def test_mps_is_judged_by_its_value(tmp_path: Path) -> None:
    """The daemon's percentage is read from its environment; absent stays absent."""
    host, ident = hosted(tmp_path)
    assert fact_of(host, ident, ident, "mps.control").value == {"running": False}
    process(host, 1)
    process(
        host,
        9,
        comm="nvidia-cuda-mps",
        cmdline="/usr/bin/nvidia-cuda-mps-control",
        environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"},
    )
    value = fact_of(host, ident, ident, "mps.control").value
    assert (value["running"], value["thread_percentage"], value["pinned_memory"]) == (
        True,
        40,
        None,
    )


def test_throttling_names_its_reasons(tmp_path: Path) -> None:
    """At full load the power cap is named as what couples co-tenants."""
    host, ident = hosted(tmp_path)
    (whole,) = host.backend.observe(ident).partitions
    assert fact_of(host, ident, ident, "device.throttling").value == {"reasons": []}
    host.run(whole, load_ratio=1.0)
    assert fact_of(host, ident, ident, "device.throttling").value == {
        "reasons": ["software power cap"]
    }


# --- doctor and settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traits", "subject", "words"),
    [
        ({"no_library": True}, "NVML", "libnvidia-ml.so.1"),
        ({"no_driver": True}, "NVML", "modprobe"),
        ({"no_gpus": True}, "NVIDIA GPUs", "sees none"),
        ({"privileged": False}, "permission to partition", "CAP_SYS_ADMIN"),
        ({"missing": ["nvmlGpm*", "*InfoV"]}, "NVML functions", "newer driver"),
    ],
)
def test_each_lack_is_one_clear_line(
    traits: dict[str, Any], subject: str, words: str, tmp_path: Path
) -> None:
    """A missing library, driver, GPU, permission or function is named with its cure."""
    host = NvidiaHost(tmp_path, f"1x{H100}", **traits)
    bad = {line.subject: line for line in host.backend.diagnose() if not line.ok}
    assert words in f"{bad[subject].found} {bad[subject].cure}"
    assert bad[subject].cure
    host.backend.capabilities()
    host.backend.close()


def test_the_backend_runs_where_a_driver_or_a_setting_is(tmp_path: Path) -> None:
    """It is listed with a driver's sign or a named library, and gets what settings say."""
    off = {"cpu": "off", "amd": "off", "neuron": "off"}
    settings = msgspec.convert({"backends": off}, Settings)
    assert backend_specs(settings, root=str(tmp_path)) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert backend_specs(settings, root=str(tmp_path)) == (BackendSpec(name="nvidia"),)
    named = msgspec.structs.replace(settings, nvidia=NvidiaSettings(library="/opt/libnvidia-ml.so"))
    (spec,) = backend_specs(named, root=str(tmp_path / "none"))
    assert spec.options == {"library": "/opt/libnvidia-ml.so"}


def test_a_library_that_is_not_there_is_no_crash(tmp_path: Path) -> None:
    """A wrong path fails at the first call with the cure; a wrong factory at once."""
    backend = open_backend({"library": str(tmp_path / "none.so")})
    with pytest.raises(BackendError):
        backend.discover()
    with pytest.raises(ConfigError, match=r"nvidia\.library"):
        open_backend({"library": "tests.nowhere:factory"})


# --- in a process of its own -------------------------------------------------------------------


def config(directory: Path, **traits: Any) -> Path:
    """Write settings that put the stand-in below the agent."""
    file = directory / "agent.yaml"
    inner = {
        "specs": [f"2x{H100}"],
        "state_dir": str(directory / "silicon"),
        "root": str(directory / "root"),
        **traits,
    }
    text = {
        "state_dir": str(directory / "state"),
        "socket_path": str(directory / "agent.sock"),
        "backends": {"cpu": "off", "amd": "off", "neuron": "off"},
        "nvidia": {
            "library": LIBRARY,
            "library_options": inner,
            "root": str(directory / "root"),
        },
    }
    file.write_text(json.dumps(text))
    return file


def alloy(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the agent in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "alloy_agent", "--config", str(file), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands_compose_on_the_stand_in(tmp_path: Path) -> None:
    """Apply in one process, see it in the next, audit it in a third."""
    file, goal = config(tmp_path), tmp_path / "layout.yaml"
    goal.write_text(
        "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia, index: 0}\n"
        "      mig: [3g.40gb, 2g.20gb, 1g.10gb, 1g.10gb]\n"
    )
    applied = alloy(file, "apply", str(goal), "--yes", "--json")
    assert applied.returncode == 0, applied.stderr
    devices = json.loads(alloy(file, "devices", "--json").stdout)["devices"]
    profiles = sorted(piece["profile"] for piece in devices[0]["partitions"])
    assert profiles == ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]
    audit = json.loads(alloy(file, "audit", "--json").stdout)
    checks = {
        judgement["check"]: judgement["verdict"]
        for report in audit["partitions"]
        for judgement in report["judgements"]
        if report["partition"]["profile"] == "3g.40gb"
    }
    wanted_checks = ("MIG-01", "MIG-02", "MIG-04", "DRV-01")
    assert {checks[name] for name in wanted_checks} == {"pass"}


@pytest.mark.parametrize("lack", ["no_library", "no_driver", "no_gpus"])
def test_the_agent_runs_where_something_lacks(lack: str, tmp_path: Path) -> None:
    """Doctor and devices answer, whatever is missing."""
    file = config(tmp_path, **{lack: True})
    assert "NV" in alloy(file, "doctor").stdout
    assert alloy(file, "devices", "--json").returncode == 0


def test_a_crash_inside_the_library_is_the_workers_alone(tmp_path: Path) -> None:
    """A segmentation fault on one GPU costs the worker; it comes back, and we live on."""
    from alloy_agent.worker.client import Worker

    host, ident = hosted(tmp_path, f"2x{H100}")
    worker = Worker(BackendSpec(name="nvidia", options=host.options), sample=False)
    worker.start()
    try:
        first, second = worker.discover()
        assert first == ident
        host.fail("nvmlDeviceGetMigMode", device=first, action="sigsegv", times=1)
        with pytest.raises((DeviceLostError, DeviceStalledError, BackendError)):
            worker.observe(first)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert worker.observe(second).device.id == second
                break
            except BackendError:
                time.sleep(0.05)
        else:
            pytest.fail("the other GPU did not come back")
    finally:
        worker.stop()


def test_a_hung_call_holds_its_own_gpu_only(tmp_path: Path) -> None:
    """While one GPU's call hangs, the other answers; the stuck one says stalled."""
    from alloy_agent.worker.client import Worker

    host, _ = hosted(tmp_path, f"2x{H100}")
    worker = Worker(BackendSpec(name="nvidia", options=host.options), sample=False)
    worker.start()
    try:
        first, second = worker.discover()
        key = host.fail("nvmlDeviceGetMigMode", device=first, action="hang")
        with pytest.raises(DeviceStalledError):
            worker.observe(first, deadline_s=0.3)
        assert worker.observe(second).device.id == second
        host.machine.remove_fault(key)
    finally:
        worker.stop()


def test_a_reused_place_is_never_destroyed_for_its_predecessor(tmp_path: Path) -> None:
    """Ids and places are re-used; the UUID decides."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (old,) = host.make(ident, "3g.40gb@4")
    host.backend.apply(Destroy(device=ident, partition=old))
    (new,) = host.make(ident, "3g.40gb@4")
    assert (old.id, old.locator) == (new.id, new.locator)
    with pytest.raises(BackendError, match="made anew"):
        host.backend.apply(Destroy(device=ident, partition=old))
    assert host.backend.observe(ident).partitions == (new,)


def test_no_room_names_what_takes_it(tmp_path: Path) -> None:
    """INSUFFICIENT_RESOURCES says nothing; the error names the pieces that are there."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    host.make(ident, "3g.40gb@0")
    spec = PartitionSpec(
        device=ident, profile="1g.10gb", size=1, placement=Placement(start=2, size=1)
    )
    with pytest.raises(BackendError, match=r"23.*3g\.40gb@0"):
        host.backend.apply(Create(device=ident, spec=spec))


def test_a_layout_by_others_needs_no_state_of_ours(tmp_path: Path) -> None:
    """A second MIG mode change while somebody edits the machine is read, not assumed."""
    host, ident = hosted(tmp_path)

    def switch(state: MachineState) -> None:
        state.devices[0].mig = state.devices[0].mig_pending = True

    host.machine.edit(switch)
    assert mode_of(host.backend.observe(ident).device) == ("on", None)
    assert ModeKind.MIG in {mode.kind for mode in host.backend.observe(ident).device.modes}


def test_a_sampling_worker_lets_go_for_each_change(tmp_path: Path) -> None:
    """In a worker that samples and listens, changes of an A100 succeed between its ticks."""
    from alloy_agent.worker.client import Worker

    host, ident = hosted(tmp_path, f"2x{A100}")
    worker = Worker(BackendSpec(name="nvidia", options=host.options))
    worker.start()
    try:
        worker.discover()

        def change(step: Step) -> None:
            worker.quiesce(ident)
            worker.apply(step)
            worker.resume(ident)

        change(SetMode(device=ident, kind=ModeKind.MIG, current="off", wanted="on"))
        for start in range(5):
            place = Placement(start=start, size=1)
            spec = PartitionSpec(device=ident, profile="1g.5gb", size=1, placement=place)
            change(Create(device=ident, spec=spec))
            time.sleep(0.25)
            (piece,) = worker.observe(ident).partitions
            change(Destroy(device=ident, partition=piece))
        assert worker.state().restarts == 0
    finally:
        worker.stop()
