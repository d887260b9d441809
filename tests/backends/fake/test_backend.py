"""The fake backend: what each vendor's half adds to the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends import BackendSpec, backend_specs, open_backend
from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.fake import FakeBackend
from alloy_agent.config import Settings
from alloy_agent.errors import BackendError, ConfigError, DeviceBusyError
from alloy_agent.model import (
    HALF_MADE,
    Configure,
    Create,
    Destroy,
    DeviceId,
    Json,
    ModeKind,
    PartitionSpec,
    Placement,
    Quality,
    SetMode,
    Tier,
)
from alloy_agent.silicon.refusals import SimulatedCrash
from alloy_agent.silicon.state import Client, Fault, SignalScript


class Sink(SignalSink):
    """Keeps the last value of each slot."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[float, Quality, float | None]] = {}

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Keep one value."""
        self.slots[slot] = (value, quality, source_time_s)


def backend_of(*specs: str) -> tuple[FakeBackend, DeviceId]:
    """Return a backend and its first device."""
    backend = FakeBackend.from_specs(specs)
    return backend, backend.discover()[0]


def mig_on(backend: FakeBackend, device: DeviceId) -> None:
    """Switch MIG on."""
    backend.apply(SetMode(device=device, kind=ModeKind.MIG, current="off", wanted="on"))


def create(device: DeviceId, profile: str, start: int, size: int) -> Create:
    """Return the step that makes a piece."""
    place = Placement(start=start, size=size)
    spec = PartitionSpec(device=device, profile=profile, size=size, placement=place)
    return Create(device=device, spec=spec)


def facts_of(backend: FakeBackend, device: DeviceId) -> dict[tuple[str, str], Json]:
    """Return all facts that have a value."""
    return {
        (fact.subject, fact.name): fact.value
        for fact in backend.facts(device)
        if fact.quality is Quality.VALUE
    }


def field(value: Json, name: str) -> Any:
    """Return one field of a fact."""
    assert isinstance(value, dict)
    return value[name]


def values_of(backend: FakeBackend, device: DeviceId) -> dict[tuple[str, str], object]:
    """Return one sample by subject and name: the value, or the quality where there is none."""
    specs, sink = backend.signal_specs(device), Sink()
    backend.sample(device, sink)
    return {
        (spec.subject, spec.name): sink.slots[slot][0]
        if sink.slots[slot][1] is Quality.VALUE
        else sink.slots[slot][1]
        for slot, spec in enumerate(specs)
    }


# --- NVIDIA --------------------------------------------------------------------------------------


def test_with_mig_off_the_gpu_is_one_piece() -> None:
    """The whole GPU is a partition by its own UUID, and no step removes it."""
    backend, device = backend_of("1xH100")
    (whole,) = backend.observe(device).partitions
    assert (whole.profile, whole.uuid, whole.placement.size) == ("whole", device, 8)
    with pytest.raises(BackendError):
        backend.apply(Destroy(device=device, partition=whole))
    mig_on(backend, device)
    assert backend.observe(device).partitions == ()


def test_a_mig_tenant_gets_its_own_capability_nodes() -> None:
    """Two instances share the GPU's node and no capability node; the UUID is in the environment."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    backend.apply(create(device, "3g.40gb", 0, 4))
    backend.apply(create(device, "3g.40gb", 4, 4))
    one, two = backend.observe(device).partitions
    common = set(one.access.device_nodes) & set(two.access.device_nodes)
    assert common == {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    assert len(set(one.access.device_nodes) - common) == 2
    assert one.access.environment["CUDA_VISIBLE_DEVICES"] == one.uuid


def test_a_mode_change_in_use_is_busy_and_stays_visible() -> None:
    """The error says in use (19), what is pending, and who holds the GPU."""
    backend, device = backend_of("1xH100")
    backend.machine.start_process(Client(pid=77, device=device))
    with pytest.raises(DeviceBusyError, match=r"in use \(19\).*on is pending.*pid 77"):
        mig_on(backend, device)
    (mode,) = backend.observe(device).device.modes
    assert (mode.current, mode.pending) == ("off", "on")


def test_a_mode_change_that_needs_a_reset_is_not_done() -> None:
    """On a passed-through A100 it says reset required (16) and what is pending."""
    backend, device = backend_of("1xA100-SXM4-40GB")
    backend.machine.edit(lambda state: setattr(state.devices[0], "passthrough", True))
    with pytest.raises(BackendError, match=r"reset required \(16\)"):
        mig_on(backend, device)
    seen = backend.observe(device)
    assert seen.device.modes[0].pending == "on"
    assert [fault.kind for fault in seen.faults] == ["reset_required"]


def test_a_failed_compute_instance_leaves_nothing_behind() -> None:
    """When the second half of a creation fails, the first is taken back at once."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    backend.machine.add_fault(Fault(call="gpu.create_compute_instance", times=1))
    with pytest.raises(BackendError):
        backend.apply(create(device, "3g.40gb", 0, 4))
    seen = backend.observe(device)
    assert (seen.partitions, seen.faults) == ((), ())
    backend.apply(create(device, "3g.40gb", 0, 4))


def test_a_half_made_piece_is_a_fault_that_the_same_step_ends() -> None:
    """Killed between the halves, the piece is no partition but named; create or destroy goes on."""
    for finish in (True, False):
        backend, device = backend_of("1xH100")
        mig_on(backend, device)
        step = create(device, "3g.40gb", 4, 4)
        backend.apply(step)
        (whole,) = backend.observe(device).partitions
        backend.apply(Destroy(device=device, partition=whole))
        # Crash points: two instance queries are before the creation, which is done at the third.
        backend.machine.add_fault(
            Fault(call="gpu.create_compute_instance", action="crash", times=1)
        )
        with pytest.raises(SimulatedCrash):
            backend.apply(step)
        seen = backend.observe(device)
        assert seen.partitions == ()
        assert [(fault.kind, "3g.40gb@4" in fault.reason) for fault in seen.faults] == [
            (HALF_MADE, True)
        ]
        if finish:
            backend.apply(step)
            assert len(backend.observe(device).partitions) == 1
        else:
            blank = msgspec.structs.replace(whole, incarnation="", locator={})
            backend.apply(Destroy(device=device, partition=blank))
            assert backend.observe(device).partitions == ()
        assert backend.observe(device).faults == ()


def test_every_crash_point_of_a_change_can_be_gone_through() -> None:
    """Whatever the point of death, applying the same steps again reaches the geometry."""
    for point in range(1, 60):
        backend, device = backend_of("1xH100")
        mig_on(backend, device)
        wanted = [create(device, "4g.40gb", 0, 4), create(device, "1g.10gb", 4, 1)]
        backend.machine.crash_at(point)
        died = False
        try:
            for step in wanted:
                backend.apply(step)
        except SimulatedCrash:
            died = True
            backend.machine.process_died()
        backend.machine.clear_faults()
        for step in wanted:
            there = {piece.id for piece in backend.observe(device).partitions}
            assert step.spec.placement is not None
            if f"{device}/{step.spec.profile}@{step.spec.placement.start}" not in there:
                backend.apply(step)
        assert [p.profile for p in backend.observe(device).partitions] == ["4g.40gb", "1g.10gb"]
        if not died:
            return
    raise AssertionError("the change has no end of crash points")


def test_an_ampere_gpu_in_mig_mode_tells_no_activity() -> None:
    """There is no utilisation on A100 with MIG on: absent, not zero; Hopper tells it."""
    for spec, told in (("1xA100-SXM4-80GB", False), ("1xH100", True)):
        backend, device = backend_of(spec)
        mig_on(backend, device)
        profile = "3g.40gb"
        backend.apply(create(device, profile, 0, 4))
        (piece,) = backend.observe(device).partitions
        value = values_of(backend, device)[piece.id, "alloy_partition_compute_active_ratio"]
        assert isinstance(value, float) is told
        assert told or value is Quality.NOT_SUPPORTED


def test_whole_gpu_events_and_instance_events_name_whom_they_concern() -> None:
    """An instance's fault carries its partition; the GPU's and an unknown one's do not."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    backend.apply(create(device, "3g.40gb", 4, 4))
    backend.wait_events(0.0)
    backend.machine.inject_event(device, "xid:48", instance=2)
    backend.machine.inject_event(device, "xid:13", instance=9)
    backend.machine.inject_event(device, "xid:79")
    events = backend.wait_events(1.0)
    assert [(event.code, event.partition) for event in events] == [
        ("xid:48", f"{device}/3g.40gb@4"),
        ("xid:13", None),
        ("xid:79", None),
    ]


# --- AMD -----------------------------------------------------------------------------------------


def test_partitions_follow_the_compute_mode() -> None:
    """CPX makes eight pieces, each with a render node of its own; no step makes or removes one."""
    backend, device = backend_of("1xMI300X")
    backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    pieces = backend.observe(device).partitions
    assert [piece.placement.start for piece in pieces] == list(range(8))
    assert len({piece.access.device_nodes for piece in pieces}) == 8
    with pytest.raises(BackendError, match="follow the"):
        backend.apply(Destroy(device=device, partition=pieces[0]))


def test_a_memory_mode_is_requested_on_the_whole_hive() -> None:
    """It shows as pending on every member and holds after the driver is loaded again."""
    backend, device = backend_of("4xMI300X")
    backend.apply(SetMode(device=device, kind=ModeKind.MEMORY, current="NPS1", wanted="NPS4"))
    for ident in backend.discover():
        modes = {mode.kind: mode for mode in backend.observe(ident).device.modes}
        assert (modes[ModeKind.MEMORY].current, modes[ModeKind.MEMORY].pending) == ("NPS1", "NPS4")
    backend.machine.driver_reload()
    assert {p.profile for i in backend.discover() for p in backend.observe(i).partitions} == {"CPX"}


def test_a_lost_xcd_is_a_fault_of_its_device() -> None:
    """63 of 64 partitions: the device that misses one says so, and the piece is not offered."""
    backend, _ = backend_of("8xMI300X")
    backend.machine.edit(lambda state: setattr(state, "display_card", True))
    for device in backend.discover():
        backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    seen = [backend.observe(device) for device in backend.discover()]
    assert sum(len(observation.partitions) for observation in seen) == 63
    assert [fault.kind for o in seen for fault in o.faults] == ["partition_count_mismatch"]
    assert seen[-1].device.fault_note == "7 of 8 partitions live"


def test_amd_tiers_follow_the_memory_mode() -> None:
    """Where several partitions share a memory partition the limit is enforced, else hard."""
    backend, device = backend_of("1xMI300X")
    limits = {limit.way: limit.tier for limit in backend.observe(device).device.tier_limits}
    assert limits["cpx/nps1"] is Tier.ENFORCED
    assert limits["cpx/nps4"] is Tier.ENFORCED
    assert limits["qpx/nps4"] is Tier.HARD
    assert limits["dpx/nps2"] is Tier.HARD
    assert limits["whole"] is Tier.HARD


# --- Neuron --------------------------------------------------------------------------------------


def test_core_runs_bind_by_environment_and_are_soft() -> None:
    """The third device's cores are numbered after those before it; the node is shared."""
    backend, _ = backend_of("inf2.24xlarge")
    device = backend.discover()[2]
    backend.apply(create(device, "1c", 1, 1))
    (piece,) = backend.observe(device).partitions
    assert piece.access.environment["NEURON_RT_VISIBLE_CORES"] == "5"
    assert piece.access.device_nodes == ("/dev/neuron2",)
    limits = {limit.way: limit.tier for limit in backend.observe(device).device.tier_limits}
    assert limits == {"cores": Tier.SOFT, "whole": Tier.ENFORCED, "shared": Tier.SOFT}


def test_a_run_of_cores_is_told_where_to_meet_as_on_real_devices() -> None:
    """Runs of several cores each have a port, one core has none, and the kin are unset alike."""
    from alloy_agent.backends.neuron.access import UNSET, Run, access_of
    from alloy_agent.backends.neuron.options import NeuronOptions

    backend, _ = backend_of("trn2.48xlarge")
    device = backend.discover()[3]
    for start, size in ((0, 1), (1, 3)):
        backend.apply(create(device, f"{size}c", start, size))
    for piece in backend.observe(device).partitions:
        place = piece.placement
        run = Run(number=3, start=place.start, size=place.size, lnc=2, device_cores=4)
        real = access_of(
            [run], piece.id, has_lnc=True, ports_from=NeuronOptions.read({}).ports_from
        )
        assert piece.access.environment == real.environment
        assert piece.access.unset == real.unset == UNSET
        assert ("NEURON_RT_ROOT_COMM_ID" in piece.access.environment) == (place.size > 1)


def test_an_unlinked_neuron_device_is_hard_as_a_whole() -> None:
    """Without NeuronLink a whole device is hard; physical cores follow the driver's order."""
    backend, device = backend_of("trn2.3xlarge")
    limits = {limit.way: limit.tier for limit in backend.observe(device).device.tier_limits}
    assert limits["whole"] is Tier.HARD
    backend.apply(create(device, "2c", 0, 2))
    (piece,) = backend.observe(device).partitions
    assert piece.units == (4, 5, 6, 7)
    assert piece.access.environment["NEURON_LOGICAL_NC_CONFIG"] == "2"


def test_a_neuron_tenant_beyond_its_grant_is_seen() -> None:
    """A process that takes its neighbour's cores shows among its own, and is not granted there."""
    backend, device = backend_of("trn2.3xlarge")
    backend.apply(create(device, "2c", 0, 2))
    backend.apply(create(device, "2c", 2, 2))
    one, two = backend.observe(device).partitions
    backend.machine.start_process(Client(pid=8, device=device, cores=(2, 3), tag=one.id))
    facts = facts_of(backend, device)
    assert set(field(facts[one.id, "neuron.cores"], "cores")) == {*one.units, *two.units}
    assert set(field(facts[two.id, "neuron.cores"], "cores")) == set(two.units)
    clients = facts[device, "device.clients"]
    assert isinstance(clients, list)
    assert [(field(c, "partition"), field(c, "granted")) for c in clients] == [(two.id, False)]


def test_a_memory_cap_of_cores_changes_in_place() -> None:
    """Configure needs a binding; an instance's memory is its profile's."""
    backend, device = backend_of("trn2.3xlarge")
    backend.apply(create(device, "2c", 0, 2))
    (piece,) = backend.observe(device).partitions
    backend.apply(Configure(device=device, partition=piece, memory_bytes=1 << 30))
    assert backend.machine.grants(device)[0].memory_bytes == 1 << 30
    gpu, ident = backend_of("1xH100")
    (whole,) = gpu.observe(ident).partitions
    with pytest.raises(BackendError):
        gpu.apply(Configure(device=ident, partition=whole, memory_bytes=1 << 30))


# --- facts and signals ---------------------------------------------------------------------------


def test_each_vendor_tells_its_own_facts() -> None:
    """What is cut in which way is told by the vendor's own fact, and by no other's."""
    backend, gpu = backend_of("mixed")
    amd, neuron = backend.discover()[2], backend.discover()[4]
    mig_on(backend, gpu)
    backend.apply(create(gpu, "3g.40gb", 0, 4))
    backend.apply(SetMode(device=amd, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    backend.apply(create(neuron, "4c", 0, 4))
    for device, own in ((gpu, "mig."), (amd, "amd."), (neuron, "neuron.")):
        facts = facts_of(backend, device)
        for piece in backend.observe(device).partitions:
            names = {name for subject, name in facts if subject == piece.id}
            vendor = {name for name in names if name.startswith(("mig.", "amd.", "neuron."))}
            assert len(vendor) == 1
            assert vendor.pop().startswith(own)
            nodes = piece.access.device_nodes
            assert field(facts[piece.id, "cgroup.device_fence"], "allowed") == list(nodes)
            assert set(names) >= {"partition.own_nodes", "partition.memory", "partition.exists"}
    amd_facts = facts_of(backend, amd)
    first = backend.observe(amd).partitions[0]
    told = amd_facts[first.id, "amd.partition"]
    assert [field(told, n) for n in ("partitions", "expected_partitions", "memory_domains")] == [
        8, 8, 1
    ]  # fmt: skip
    assert (field(told, "render_node"), field(told, "isolation")) == ("renderD128", False)


def test_own_nodes_are_nobody_elses() -> None:
    """MIG tenants have capability nodes, XCDs render nodes; cores of a shared node have none."""
    backend, gpu = backend_of("mixed")
    amd, neuron = backend.discover()[2], backend.discover()[4]
    mig_on(backend, gpu)
    for start in (0, 4):
        backend.apply(create(gpu, "3g.40gb", start, 4))
    backend.apply(SetMode(device=amd, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    for start in (0, 2):
        backend.apply(create(neuron, "2c", start, 2))
    for device, alone in ((gpu, True), (amd, True), (neuron, False)):
        facts, pieces = facts_of(backend, device), backend.observe(device).partitions
        for piece in pieces:
            own = facts[piece.id, "partition.own_nodes"]
            assert isinstance(own, list)
            assert bool(own) is alone
            for other in pieces:
                if other.id != piece.id:
                    assert not set(map(str, own)) & set(other.access.device_nodes)


def test_a_fence_that_was_dropped_is_reported() -> None:
    """Without device rules the fence says so and everything is open."""
    backend, device = backend_of("1xMI300X")
    backend.machine.edit(lambda state: setattr(state.devices[0], "fenced", False))
    (piece,) = backend.observe(device).partitions
    fence = facts_of(backend, device)[piece.id, "cgroup.device_fence"]
    assert fence == {"by": "", "allowed": ["*"]}


def test_a_compute_instance_that_spans_not_all_is_seen() -> None:
    """Of a foreign instance with two compute instances the fact shows both."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    gpu = backend.machine.nvidia(device)
    instance = gpu.create_gpu_instance(9, 0)
    gpu.create_compute_instance(instance.id, 1)
    gpu.create_compute_instance(instance.id, 2)
    (piece,) = backend.observe(device).partitions
    told = facts_of(backend, device)[piece.id, "mig.instance"]
    names = ("compute_instances", "compute_slices", "instance_slices")
    assert [field(told, name) for name in names] == [2, 1, 3]
    assert piece.uuid is None


def test_a_monitor_on_the_device_is_told_as_one() -> None:
    """A process that only holds a handle is in no partition, and marked."""
    backend, device = backend_of("1xH100")
    backend.machine.start_process(Client(pid=5, device=device, name="exporter", monitor=True))
    clients = facts_of(backend, device)[device, "device.clients"]
    assert clients == [
        {"pid": 5, "comm": "exporter", "partition": "", "granted": False, "monitor": True}
    ]


def test_load_shows_where_it_runs() -> None:
    """A busy instance reads busy, its idle neighbour reads zero, and the GPU draws more power."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    backend.apply(create(device, "3g.40gb", 0, 4))
    backend.apply(create(device, "3g.40gb", 4, 4))
    one, two = backend.observe(device).partitions
    idle = values_of(backend, device)[device, "alloy_device_power_watts"]
    backend.machine.start_process(
        Client(pid=1, device=device, instance=1, load_ratio=0.9, memory_bytes=1 << 33)
    )
    values = values_of(backend, device)
    busy = values[one.id, "alloy_partition_compute_active_ratio"]
    assert isinstance(busy, float)
    assert 0.7 <= busy <= 0.9
    assert values[two.id, "alloy_partition_compute_active_ratio"] == 0.0
    assert values[one.id, "alloy_partition_memory_used_bytes"] == float(1 << 33)
    loaded = values[device, "alloy_device_power_watts"]
    assert isinstance(loaded, float)
    assert isinstance(idle, float)
    assert loaded > idle


def test_a_value_renews_only_with_its_source() -> None:
    """Sampling faster than the source returns the same value with the same source time."""
    clock = [1000.0]
    backend, device = backend_of("1xH100")
    backend.machine._clock = lambda: clock[0]
    backend.machine.start_process(Client(pid=1, device=device, load_ratio=0.8))
    specs, sink = backend.signal_specs(device), Sink()
    slot = next(n for n, spec in enumerate(specs) if spec.name == "alloy_device_power_watts")
    seen = []
    for step in range(20):
        clock[0] = 1000.001 + step * 0.01
        backend.sample(device, sink)
        seen.append(sink.slots[slot])
    assert len(set(seen)) == 2
    sources = sorted({source for _, _, source in seen if source is not None})
    assert sources == pytest.approx([1000.0, 1000.1])


def test_a_scripted_signal_is_sampled() -> None:
    """A script replaces the value; where it has none the slot is absent."""
    backend, device = backend_of("1xH100")
    backend.machine.set_script(device, "alloy_device_power_watts", SignalScript(values=(123.0,)))
    assert values_of(backend, device)[device, "alloy_device_power_watts"] == 123.0
    backend.machine.set_script(device, "alloy_device_power_watts", SignalScript(values=(None,)))
    value = values_of(backend, device)[device, "alloy_device_power_watts"]
    assert value is Quality.NOT_SUPPORTED


def test_many_cycles_of_sampling_and_change_leave_no_handle() -> None:
    """A thousand times made, sampled and removed: no handle is left, no change is refused."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    for _ in range(1000):
        backend.apply(create(device, "1g.10gb", 0, 1))
        backend.resume(device)
        backend.sample(device, Sink())
        backend.quiesce(device)
        (piece,) = backend.observe(device).partitions
        backend.apply(Destroy(device=device, partition=piece))
    assert backend.machine.open_handles() == 0


def test_our_own_handle_is_why_a_change_fails_without_quiesce() -> None:
    """Sampling holds the instance; the removal names this process until quiesce."""
    backend, device = backend_of("1xH100")
    mig_on(backend, device)
    backend.apply(create(device, "1g.10gb", 0, 1))
    backend.sample(device, Sink())
    (piece,) = backend.observe(device).partitions
    with pytest.raises(DeviceBusyError):
        backend.apply(Destroy(device=device, partition=piece))
    backend.quiesce(device)
    backend.apply(Destroy(device=device, partition=piece))


# --- the list of backends ------------------------------------------------------------------------


def test_the_host_comes_first_and_simulated_devices_second(tmp_path: Path) -> None:
    """Settings decide which backends run, in which order and with what."""
    settings = Settings(state_dir=str(tmp_path), fake=("2xH100",))
    specs = backend_specs(settings, root=str(tmp_path))
    assert [spec.name for spec in specs] == ["cpu", "fake"]
    assert specs[1].options == {"specs": ["2xH100"], "state_dir": str(tmp_path)}
    off = msgspec.convert({"cpu": "off", "nvidia": "off"}, type(settings.backends))
    assert backend_specs(msgspec.structs.replace(settings, backends=off, fake=()), "/nowhere") == ()


def test_options_travel_as_json(tmp_path: Path) -> None:
    """A specification survives the way to its worker, and opens there."""
    settings = Settings(state_dir=str(tmp_path), fake=("1xH100", "1xMI300X"))
    specs = backend_specs(settings, root=str(tmp_path))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(specs), type=tuple[BackendSpec, ...])
    assert sent == specs
    backend = open_backend(sent[1])
    assert len(backend.discover()) == 2
    backend.close()


def test_a_backend_switched_on_without_its_driver_is_an_error(tmp_path: Path) -> None:
    """`on` asks for a driver that must be there; `auto` does not, and a late one is waited for."""
    late = msgspec.convert({"backends": {"neuron": "on"}}, Settings)
    assert backend_specs(late, root=str(tmp_path))[-1].name == "neuron"
    for name in ("nvidia", "amd"):
        settings = msgspec.convert({"backends": {name: "on"}}, Settings)
        with pytest.raises(ConfigError, match=f"backends.{name} is on"):
            backend_specs(settings, root=str(tmp_path))


def test_an_unknown_backend_is_named() -> None:
    """Opening what does not exist says what does."""
    with pytest.raises(ConfigError, match="cpu, fake"):
        open_backend(BackendSpec(name="abacus"))


def test_the_machine_is_remembered_in_the_state_directory(tmp_path: Path) -> None:
    """One command makes an instance, the next one sees it."""
    first = FakeBackend.from_specs(["1xH100"], str(tmp_path))
    device = first.discover()[0]
    mig_on(first, device)
    first.apply(create(device, "2g.20gb", 2, 2))
    first.close()
    second = FakeBackend.from_specs(["1xH100"], str(tmp_path))
    assert [piece.profile for piece in second.observe(device).partitions] == ["2g.20gb"]
    second.close()
