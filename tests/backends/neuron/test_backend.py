"""The Neuron backend on generated hosts: what is there, what is granted, who holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends import BackendSpec, backend_specs, open_backend
from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.neuron import NeuronBackend
from alloy_agent.backends.neuron.doctor import version_key
from alloy_agent.backends.neuron.options import NeuronOptions
from alloy_agent.config import Settings
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import Grant, Intent, judge
from alloy_agent.errors import (
    BackendError,
    ConfigError,
    DeviceBusyError,
    DeviceLostError,
    UnsupportedError,
)
from alloy_agent.model import (
    Condition,
    Create,
    Destroy,
    DeviceId,
    DeviceLayout,
    Fact,
    Judgement,
    Layout,
    ModeKind,
    Partition,
    PartitionReport,
    PartitionSpec,
    Placement,
    Quality,
    SetMode,
    Share,
    Snapshot,
    TenantId,
    Tier,
    Verdict,
)
from tests.fakes.neuron import MAJOR, FakeNeuronHost, TreeNumbers

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look be a fresh one: these tests change the world between two of them."""
    for name in ("OBSERVED_AGE_S", "EVIDENCE_AGE_S"):
        monkeypatch.setattr(f"alloy_agent.backends.neuron.backend.{name}", 0.0)
    for name in ("ACTIVITY_PERIOD_S", "MEMORY_PERIOD_S", "SLOW_PERIOD_S", "POWER_PERIOD_S"):
        monkeypatch.setattr(f"alloy_agent.backends.neuron.signals.{name}", 0.0)


class Opened:
    """Hosts and backends of one test, closed after it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._backends: list[NeuronBackend] = []

    def host(self, instance: str, **more: Any) -> FakeNeuronHost:
        return FakeNeuronHost(self._root / f"{instance}-{len(self._backends)}", instance, **more)

    def backend(self, host: FakeNeuronHost, **more: Any) -> NeuronBackend:
        backend = host.open(**more)
        self._backends.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Make hosts and backends that do not outlive the test."""
    made = Opened(tmp_path)
    yield made
    made.close()


def create(device: DeviceId, start: int, size: int, **more: Any) -> Create:
    """Return the step that grants a run."""
    spec = PartitionSpec(
        device=device,
        profile=more.pop("profile", f"{size}c"),
        size=size,
        placement=Placement(start=start, size=size),
        **more,
    )
    return Create(device=device, spec=spec)


def grant(backend: NeuronBackend, device: DeviceId, start: int, size: int) -> Partition:
    """Grant a run and return it as read back."""
    backend.apply(create(device, start, size))
    found = backend.observe(device).partitions
    return next(p for p in found if p.placement.start == start)


def numbered(backend: NeuronBackend, number: int) -> DeviceId:
    """Return the device of a node's number."""
    return next(d for d in backend.discover() if backend.observe(d).device.index == number)


def fact(backend: NeuronBackend, device: DeviceId, subject: str, name: str) -> Fact:
    """Return one fact of a fresh look."""
    return next(f for f in backend.facts(device) if (f.subject, f.name) == (subject, name))


def audit(
    backend: NeuronBackend, device: DeviceId, intent: Intent | None = None
) -> dict[str, PartitionReport]:
    """Return the report of each partition of a device, as the auditor would make it."""
    seen = backend.observe(device)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(seen.device,),
        partitions=seen.partitions,
    )
    owners = Fact(subject="node", name="host.owners", value=[], method="test")
    facts = backend.facts(device)
    reports, _ = judge(snapshot, (*pids_of(facts), *facts, owners), intent)
    return {report.partition.id: report for report in reports}


def verdict(report: PartitionReport, check: str) -> Judgement:
    """Return one check's judgement."""
    return next(j for j in report.judgements if j.check == check)


def eventually(what: Callable[[], bool]) -> bool:
    """Return whether something becomes true within a generous time."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return what()


# --- discovery -----------------------------------------------------------------------------------


def test_a_device_is_told_by_serial_and_described_by_its_instance(opened: Opened) -> None:
    """Identity is the serial; model, cores, NUMA, bus and links are those of the instance."""
    host = opened.host("trn1.32xlarge")
    for name, vendor, node in (
        ("rdmap0", "0x1d0f", 0),
        ("rdmap1", "0x1d0f", 1),
        ("mlx", "0x15b3", 1),
    ):
        adapter = host.sys / f"class/infiniband/{name}/device"
        adapter.mkdir(parents=True)
        (adapter / "vendor").write_text(f"{vendor}\n")
        (adapter / "numa_node").write_text(f"{node}\n")
    backend = opened.backend(host)
    device = backend.observe(numbered(backend, 9)).device
    state = next(d for d in host.devices if host.number(d) == 9)
    assert device.id == f"neuron-{state.serial}"
    assert device.model == "Trainium1 (trn1.32xlarge)"
    assert (device.slices, device.compute_units, device.numa_node) == (2, 2, 1)
    assert device.bus == state.bus
    assert device.memory_bytes == 32 << 30
    peers = {link.peer for link in device.links if link.kind == "neuronlink"}
    assert peers == {numbered(backend, n) for n in (5, 8, 13, 10)}
    assert [link.peer for link in device.links if link.kind == "efa"] == ["efa:rdmap1"]
    linked = [link for link in device.links if link.kind == "neuronlink"]
    assert linked[0].bandwidth_bytes_per_s == 384 << 30


@pytest.mark.parametrize(
    ("told", "named"), [("trn1n.32xlarge", "trn1n.32xlarge"), ("", "trn1.32xlarge")]
)
def test_alike_instances_are_told_apart_by_the_firmware(
    opened: Opened, told: str, named: str
) -> None:
    """trn1 and trn1n have the same devices; the firmware's product name tells which it is."""
    host = opened.host("trn1n.32xlarge")
    host.set_product_name(told)
    backend = opened.backend(host)
    assert named in backend.observe(backend.discover()[0]).device.model


def test_without_tools_everything_but_the_bus_is_known(opened: Opened) -> None:
    """Sysfs is the ground: without `neuron-ls` there is no bus address, and grants work."""
    host = opened.host("inf2.24xlarge", tools=False)
    backend = opened.backend(host)
    device = backend.observe(backend.discover()[0]).device
    assert device.bus is None
    assert device.numa_node is None
    assert device.condition is Condition.OK
    assert grant(backend, device.id, 0, 2).access.device_nodes == ("/dev/neuron0",)
    sources = fact(backend, device.id, device.id, "neuron.sources").value
    assert isinstance(sources, dict)
    assert "no " in str(sources["neuron_ls"])
    assert sources["telemetry"] == "telemetry-degraded"


def test_an_old_driver_with_root_only_files_is_read_by_tables(opened: Opened) -> None:
    """Counts and links that an unprivileged reader cannot see come from directories and tables."""
    host = opened.host("trn1.32xlarge", driver="2.24.7.0", tools=False)
    for number in range(16):
        for name in ("core_count", "connected_devices"):
            (host.folder(number) / name).unlink()
    backend = opened.backend(host)
    device = backend.observe(numbered(backend, 0)).device
    assert device.slices == 2
    assert len([link for link in device.links if link.kind == "neuronlink"]) == 4
    assert not version_key(device.driver or "") >= version_key("2.26.5")
    line = next(d for d in backend.diagnose() if d.subject == "neuron driver")
    assert (line.ok, "2.26.5" in line.cure) == (False, True)


def test_moved_attributes_are_found_by_name(opened: Opened) -> None:
    """A driver that moved its files is read where they are; a name found twice is nobody's."""
    host = opened.host("inf2.8xlarge")
    folder = host.folder(0)
    before = opened.backend(host).discover()
    (folder / "identity").mkdir()
    (folder / "info/serial_number").rename(folder / "identity/serial_number")
    (folder / "topology").mkdir()
    (folder / "core_count").rename(folder / "topology/core_count")
    backend = opened.backend(host)
    assert backend.discover() == before
    assert backend.observe(before[0]).device.slices == 2
    (folder / "identity2").mkdir()
    (folder / "identity2/serial_number").write_text("0123456789abcdef\n")
    assert opened.backend(host).discover() == (DeviceId(f"neuron-{host.devices[0].bus}"),)


def test_a_device_without_any_identity_is_listed_and_refused(opened: Opened) -> None:
    """Neither serial nor bus: it is shown as failed, and no core of it is granted."""
    host = opened.host("inf2.8xlarge", tools=False)
    (host.folder(0) / "info/serial_number").write_text("\n")
    backend = opened.backend(host)
    device = backend.discover()[0]
    assert backend.observe(device).device.condition is Condition.FAILED
    with pytest.raises(BackendError, match="neither serial nor bus"):
        backend.apply(create(device, 0, 1))


@pytest.mark.parametrize("bad", ["", "\x00\x01", "99999999999999999999999", "-1", "two", "0x2"])
def test_malformed_attributes_harm_nobody(opened: Opened, bad: str) -> None:
    """Any text in any attribute: the device is still there, and the reader says what is wrong."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    for name in ("core_count", "connected_devices", "reset", "stats/hardware/mem_ecc_uncorrected"):
        (host.folder(0) / name).write_text(bad)
    memory = host.core(0, 0) / "stats/memory_usage/device_mem/total"
    memory.write_text(bad)
    seen = backend.observe(device).device
    assert seen.slices == 4
    sink = Sink()
    specs = backend.signal_specs(device)
    backend.sample(device, sink)
    slot = [s.name for s in specs].index("alloy_device_memory_used_bytes")
    assert sink.slots[slot][1] is Quality.NOT_SUPPORTED


def test_a_missing_device_degrades_the_others_and_unlinks_none(opened: Opened) -> None:
    """With 15 of 16 the driver tells no links: that is degraded, never a hard tier."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    gone, kept = numbered(backend, 3), numbered(backend, 4)
    host.lose(gone)
    for number in range(16):
        if number != 3:
            (host.folder(number) / "connected_devices").write_text("\n")
    host.behave("ls", "fail")
    again = opened.backend(host)
    device = again.observe(kept).device
    assert "1 devices of the instance are missing" in device.fault_note
    assert "degraded" in device.fault_note
    whole = next(limit for limit in device.tier_limits if limit.way == "whole")
    assert whole.tier is Tier.ENFORCED
    assert gone in backend.discover()
    with pytest.raises(DeviceLostError):
        backend.observe(gone)


def test_a_failed_reset_shows(opened: Opened) -> None:
    """Device state INVALID is a fault and takes no grant."""
    host = opened.host("inf2.8xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    (host.folder(0) / "reset").write_text("2\n")
    seen = backend.observe(device)
    assert seen.device.condition is Condition.FAILED
    assert [f.kind for f in seen.faults] == ["reset_required"]


def test_a_late_driver_is_waited_for(opened: Opened) -> None:
    """Without a tree the agent waits and says so; nothing is told as final; then they come."""
    host = opened.host("inf2.24xlarge")
    host.unload_driver()
    backend = opened.backend(host)
    with pytest.raises(BackendError, match="waiting-driver"):
        backend.discover()
    assert any("waiting-driver" in note for note in backend.capabilities().notes)
    assert not backend.capabilities().can_partition
    assert any("waiting-driver" in line.found for line in backend.diagnose())
    host.load_driver()
    assert len(backend.discover()) == 6
    assert backend.capabilities().can_partition


def test_presence_decides_whether_the_backend_runs(tmp_path: Path) -> None:
    """The module, its tree or the settings bring it; off keeps it away."""
    off = {"cpu": "off", "nvidia": "off", "amd": "off"}
    auto = msgspec.convert({"backends": off, "state_dir": "/s"}, Settings)
    assert backend_specs(auto, root=str(tmp_path)) == ()
    on = msgspec.convert({"backends": off | {"neuron": "on"}}, Settings)
    assert [s.name for s in backend_specs(on, root=str(tmp_path))] == ["neuron"]
    (tmp_path / "sys/devices/virtual/neuron_device").mkdir(parents=True)
    spec = backend_specs(auto, root=str(tmp_path))
    assert spec == (BackendSpec(name="neuron", options={"state_dir": "/s"}),)
    never = msgspec.convert({"backends": off | {"neuron": "off"}}, Settings)
    assert backend_specs(never, root=str(tmp_path)) == ()


def test_options_are_checked(tmp_path: Path) -> None:
    """A wrong option is one line with the cure; right ones open the backend."""
    with pytest.raises(ConfigError, match="neuron: options"):
        open_backend(BackendSpec(name="neuron", options={"sys_roof": "/sys"}))
    backend = open_backend(BackendSpec(name="neuron", options={"sys_root": str(tmp_path)}))
    assert isinstance(backend, NeuronBackend)
    backend.close()


# --- core order ----------------------------------------------------------------------------------


def test_trn2_cores_follow_the_drivers_order(opened: Opened) -> None:
    """Logical core 0 of device 0 with LNC 2 is physical 4 and 5; others have other orders."""
    backend = opened.backend(opened.host("trn2.48xlarge"))
    for number, units in ((0, (4, 5)), (1, (2, 3)), (4, (0, 1)), (5, (6, 7))):
        device = numbered(backend, number)
        assert grant(backend, device, 0, 1).units == units


def test_an_ultraserver_node_swaps_the_order_and_an_election_hides_it(opened: Opened) -> None:
    """Nodes 1 and 3 of four have other rows; while the number is elected, nothing is claimed."""
    host = opened.host("trn2.48xlarge")
    group = host.sys / "class/neuron_device"
    group.mkdir(parents=True)
    (group / "node_id_4").write_text("1\n")
    host.set_product_name("trn2u.48xlarge")
    backend = opened.backend(host)
    device = numbered(backend, 0)
    assert grant(backend, device, 0, 1).units == (0, 1)  # row of device 6
    (group / "node_id_4").write_text("busy\n")
    piece = backend.observe(device).partitions[0]
    assert piece.units == ()
    shown = fact(backend, device, piece.id, "neuron.cores")
    assert shown.quality is Quality.NOT_SUPPORTED
    assert "elected" in shown.reason


def test_lnc_changes_cores_variables_and_legal_runs(opened: Opened) -> None:
    """LNC 1 doubles the cores; halves of a memory bank are refused unless the operator allows."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    backend.apply(SetMode(device=device, kind=ModeKind.LNC, current="2", wanted="1"))
    seen = backend.observe(device).device
    assert (seen.slices, seen.legal_sizes) == (8, (2, 4, 6, 8))
    with pytest.raises(UnsupportedError, match="1c"):
        backend.apply(create(device, 0, 1))
    with pytest.raises(UnsupportedError, match="memory bank"):
        backend.apply(create(device, 1, 2))
    piece = grant(backend, device, 2, 2)
    assert piece.units == (6, 7)
    assert piece.access.environment["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert piece.access.environment["NEURON_RT_VISIBLE_CORES"] == "2-3"
    with pytest.raises(DeviceBusyError, match="LNC 1"):
        backend.apply(SetMode(device=device, kind=ModeKind.LNC, current="1", wanted="2"))
    liberal = opened.backend(host, share_hbm_bank=True)
    assert grant(liberal, device, 4, 1).units == (2,)


def test_the_nodes_default_configuration_counts(opened: Opened) -> None:
    """The node's own default of LNC holds where nothing was set."""
    host = opened.host("trn2.3xlarge")
    (host.root / "logical_nc_config").write_text("1\n")
    backend = opened.backend(host)
    assert backend.observe(backend.discover()[0]).device.slices == 8


def test_a_container_counts_from_its_first_device(opened: Opened) -> None:
    """Over all cores of the host on the host; from the granted device on inside a container."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    device = numbered(backend, 7)
    piece = grant(backend, device, 1, 1)
    assert piece.access.environment["NEURON_RT_VISIBLE_CORES"] == "15"
    assert piece.access.environment["NEURON_PROCESS_TAG"] == piece.id
    assert "NEURON_RT_NUM_CORES" in piece.access.unset
    inside = opened.backend(host, core_numbers="container")
    (same,) = inside.observe(device).partitions
    assert same.access.environment["NEURON_RT_VISIBLE_CORES"] == "1"


# --- the record ----------------------------------------------------------------------------------


def test_grants_outlive_the_agent_and_not_the_boot(opened: Opened) -> None:
    """Another process reads them back; after a boot they are void, and numbers go on."""
    host = opened.host("inf2.8xlarge")
    first = opened.backend(host)
    device = first.discover()[0]
    piece = grant(first, device, 0, 2)
    assert opened.backend(host).observe(device).partitions == (piece,)
    (host.proc / "sys/kernel/random/boot_id").write_text("0b9d3f0e-7a55-4c1c-9a50-2f1f7d9b3c22\n")
    after = opened.backend(host)
    assert after.observe(device).partitions == ()
    assert grant(after, device, 0, 2).incarnation != piece.incarnation


def test_a_damaged_record_is_named_and_kept(opened: Opened) -> None:
    """Nothing is granted over a record that cannot be trusted, and the file stays as it is."""
    host = opened.host("inf2.8xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    grant(backend, device, 0, 1)
    path = host.state_dir / "neuron.json"
    for content in (path.read_bytes()[:-20], path.read_bytes().replace(b"1c", b"2c"), b"", b"[]"):
        path.write_bytes(content)
        again = opened.backend(host)
        with pytest.raises(BackendError, match="damaged"):
            again.apply(create(device, 1, 1))
        with pytest.raises(BackendError, match="damaged"):
            again.observe(device)
        assert path.read_bytes() == content
        assert any(not d.ok and "damaged" in d.found for d in again.diagnose())


KILLED = """
import os, signal, sys
from alloy_agent.backends.neuron import record
point, calls = int(sys.argv[2]), 0
def counted(real):
    def call(*args, **more):
        global calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    return call
for name in ("fsync", "open", "stat"):
    setattr(os, name, counted(getattr(os, name)))
kept = record.Record(sys.argv[1], "boot")
def update(old, serial):
    made = record.Grant(serial=serial, profile="1c", start=1, size=1)
    return record.DeviceRecord(grants=(*old.grants, made))
kept.change("d", update)
print("done")
"""


def test_killed_at_any_point_the_record_is_old_or_new(tmp_path: Path) -> None:
    """SIGKILL at each call of a change: the record opens, with the grant or without it."""
    from alloy_agent.backends.neuron import record

    def first(old: record.DeviceRecord, serial: int) -> record.DeviceRecord:
        return record.DeviceRecord(
            grants=(record.Grant(serial=serial, profile="1c", start=0, size=1),)
        )

    outcomes = set()
    for point in range(1, 30):
        folder = tmp_path / str(point)
        record.Record(str(folder), "boot").change("d", first)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(point)],
            capture_output=True,
            check=False,
            text=True,
        )
        grants = record.Record(str(folder), "boot").read().of("d").grants
        assert [g.serial for g in grants] in ([1], [1, 2])
        outcomes.add(len(grants))
        if "done" in done.stdout:
            assert len(grants) == 2
            break
    else:
        pytest.fail("the change never ended")
    assert outcomes == {1, 2}


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


def values(backend: NeuronBackend, device: DeviceId, subject: str = "") -> dict[str, Any]:
    """Return what one sample of the announced columns gives, by name; absent ones are None."""
    specs = backend._samplers[device].specs
    sink = Sink()
    backend.sample(device, sink)
    return {
        spec.name: value if quality is Quality.VALUE else None
        for slot, spec in enumerate(specs)
        if spec.subject == (subject or device)
        for value, quality, _ in (sink.slots[slot],)
    }


# --- faults of the field -------------------------------------------------------------------------


def test_a_core_whose_grant_was_freed_is_not_granted_while_held(opened: Opened) -> None:
    """The ledger forgot a grant, a process still has the node: busy until that is gone."""
    host = opened.host("inf2.8xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    host.start(4711, 0, (0,), modes=(os.O_WRONLY,), reported=False)
    with pytest.raises(DeviceBusyError, match="still held by pid 4711"):
        backend.apply(create(device, 0, 1))
    seen = backend.observe(device)
    assert seen.partitions == ()
    assert [(f.kind, "4711" in f.reason) for f in seen.faults] == [("draining", True)]
    host.end(4711)
    assert grant(backend, device, 0, 1)
    assert backend.observe(device).faults == ()


def test_a_tenant_that_dies_frees_its_cores_by_itself(opened: Opened) -> None:
    """Held while it lives, also as a zombie of which a mapping is left; free when it is gone."""
    host = opened.host("inf2.8xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 1)
    host.enter(piece, pid=4711)
    with pytest.raises(DeviceBusyError, match="4711"):
        backend.apply(Destroy(device=device, partition=piece))
    for descriptor in (host.proc / "4711/fd").iterdir():
        descriptor.unlink()
    (host.proc / "4711/maps").write_text("7f00-7f10 rw-s 00000000 00:05 99 /dev/neuron0\n")
    clients = fact(backend, device, device, "device.clients").value
    assert isinstance(clients, list)
    assert [c["pid"] for c in clients if isinstance(c, dict)] == [4711]
    host.end(4711)
    backend.apply(Destroy(device=device, partition=piece))
    assert backend.observe(device).partitions == ()


def test_a_program_that_changes_its_visible_cores_is_outside_its_allocation(
    opened: Opened,
) -> None:
    """Environment says its own cores, the monitor shows others: a breach, and the tier falls."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece, other = grant(backend, device, 0, 2), grant(backend, device, 2, 2)
    host.enter(piece, pid=4711, cores=(2, 3))
    shown = fact(backend, device, piece.id, "neuron.cores").value
    assert isinstance(shown, dict)
    assert shown["finding"] == "outside-allocation"
    reports = audit(backend, device)
    assert verdict(reports[piece.id], "NRN-01").verdict is Verdict.FAIL
    assert reports[piece.id].tier is Tier.ADVISORY
    assert verdict(reports[other.id], "NRN-04").verdict is Verdict.FAIL
    assert reports[other.id].tier is Tier.ADVISORY


def test_what_only_the_environment_tells_is_unverifiable(opened: Opened) -> None:
    """Without a monitor, a shared device's tenants are configured, never verified."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 2)
    idle = audit(backend, device)[piece.id]
    assert (verdict(idle, "NRN-01").verdict, idle.tier) == (Verdict.PASS, Tier.SOFT)
    host.enter(piece, pid=4711)
    report = audit(backend, device)[piece.id]
    assert verdict(report, "NRN-01").verdict is Verdict.UNKNOWN
    assert "environment" in verdict(report, "NRN-01").reason
    assert report.tier is Tier.ADVISORY


def test_a_second_process_of_a_tenant_is_shown(opened: Opened) -> None:
    """Two processes in one run are both listed, and both keep it from being taken away."""
    host = opened.host("inf2.8xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 2)
    host.enter(piece, pid=4711, cores=(0,))
    host.enter(piece, pid=4712, cores=(1,))
    inside = fact(backend, device, piece.id, "partition.processes").value
    assert isinstance(inside, list)
    assert [p["pid"] for p in inside if isinstance(p, dict)] == [4711, 4712]
    assert verdict(audit(backend, device)[piece.id], "NRN-01").verdict is Verdict.PASS
    with pytest.raises(DeviceBusyError, match=r"4711.*4712"):
        backend.apply(Destroy(device=device, partition=piece))


def test_a_process_of_nobody_is_found_under_any_name_of_the_node(opened: Opened) -> None:
    """A node made by a container under another name has the same number: NRN-04 sees its holder."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 2)
    (host.dev / "innocent").write_text(f"{MAJOR}:0")
    host.start(6666, 0, (0,), node="innocent")
    judged = verdict(audit(backend, device)[piece.id], "NRN-04")
    assert judged.verdict is Verdict.FAIL
    assert "6666" in judged.observed
    host.end(6666)
    assert verdict(audit(backend, device)[piece.id], "NRN-04").verdict is Verdict.PASS
    host.start(6667, 0, (), reported=False)
    judged = verdict(audit(backend, device)[piece.id], "NRN-04")
    assert judged.verdict is Verdict.UNKNOWN


def test_the_hosts_cores_and_the_tenants_are_two_numbers(opened: Opened) -> None:
    """Six devices on the host, one granted: the tenant's access names one node and two cores."""
    host = opened.host("inf2.24xlarge")
    backend = opened.backend(host)
    piece = grant(backend, numbered(backend, 3), 0, 2)
    assert piece.access.device_nodes == ("/dev/neuron3",)
    assert piece.compute_units == 2
    assert sum(backend.observe(d).device.compute_units or 0 for d in backend.discover()) == 12


def test_a_fault_of_the_monitor_is_no_fault_of_a_device(opened: Opened) -> None:
    """No monitor, sysfs fine: telemetry is degraded, no device is unhealthy, no event comes."""
    host = opened.host("inf2.8xlarge")
    (host.tools / "neuron-monitor").unlink()
    backend = opened.backend(host)
    device = backend.discover()[0]
    backend.signal_specs(device)
    assert values(backend, device)["alloy_device_memory_used_bytes"] == 0.0
    seen = backend.observe(device)
    assert (seen.device.condition, seen.faults) == (Condition.OK, ())
    assert list(backend.wait_events(0.0)) == []
    sources = fact(backend, device, device, "neuron.sources").value
    assert isinstance(sources, dict)
    assert sources["telemetry"] == "telemetry-degraded"


# --- fences and tiers ----------------------------------------------------------------------------


def given(piece: Partition) -> Intent:
    """Return that a tenant was given one partition."""
    tenant = TenantId("t")
    return Intent(grants=(Grant(partition=piece.id, generation=0, tenant=tenant),))


@pytest.mark.parametrize(
    ("instance", "tier"), [("inf2.8xlarge", Tier.HARD), ("inf2.24xlarge", Tier.ENFORCED)]
)
def test_a_fenced_whole_device_is_hard_alone_and_enforced_when_linked(
    opened: Opened, instance: str, tier: Tier
) -> None:
    """The node's fence is the boundary; NeuronLink reaches around it; unfenced is soft."""
    host = opened.host(instance)
    backend = opened.backend(host)
    device = numbered(backend, 0)
    piece = grant(backend, device, 0, 2)
    host.devices_cgroup("/tenant", [f"c {MAJOR}:0 rw", "c 1:3 rwm"])
    host.enter(piece, pid=4711, cgroup="/tenant")
    report = audit(backend, device, given(piece))[piece.id]
    assert (report.tier, verdict(report, "NRN-02").verdict) == (tier, Verdict.PASS), report.reason
    host.devices_cgroup("/tenant", ["c *:* rwm"])
    report = audit(backend, device, given(piece))[piece.id]
    allowed = verdict(report, "NRN-02")
    wide = Verdict.FAIL if instance == "inf2.24xlarge" else Verdict.PASS
    assert allowed.verdict is wide
    host.devices_cgroup("/tenant", ["a *:* rwm"])
    report = audit(backend, device, given(piece))[piece.id]
    assert verdict(report, "NRN-02").verdict is Verdict.FAIL
    assert report.tier is Tier.SOFT


def test_rules_that_cannot_be_seen_are_unknown(opened: Opened) -> None:
    """Device rules of cgroup v2 are a program: unknown, never passed."""
    host = opened.host("inf2.8xlarge")
    (host.proc / "self/mountinfo").write_text("")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 2)
    host.enter(piece, pid=4711)
    report = audit(backend, device, given(piece))[piece.id]
    assert verdict(report, "NRN-02").verdict is Verdict.UNKNOWN
    assert report.tier is Tier.SOFT


def test_cores_of_one_device_are_soft_whatever_the_fence(opened: Opened) -> None:
    """A run of a shared device is soft, and the open classes are named."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 1)
    host.enter(piece, pid=4711)
    report = audit(backend, device, given(piece))[piece.id]
    assert report.tier is Tier.SOFT
    assert {"RC-NRN-OPS", "RC-ENV"} <= set(report.residual)


def test_another_lnc_than_planned_is_a_breach(opened: Opened) -> None:
    """NRN-03: a tenant started under LNC 1 where LNC 2 was granted."""
    host = opened.host("trn2.3xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 2)
    environ = {**piece.access.environment, "NEURON_LOGICAL_NC_CONFIG": "1"}
    host.enter(piece, pid=4711, environ=environ)
    assert verdict(audit(backend, device)[piece.id], "NRN-03").verdict is Verdict.FAIL
    host.end(4711)
    assert verdict(audit(backend, device)[piece.id], "NRN-03").verdict is Verdict.PASS
    wanted = DeviceLayout(device=device, modes={ModeKind.LNC: "1"})
    intent = Intent(layout=Layout(name="l", devices=(wanted,)))
    assert verdict(audit(backend, device, intent)[piece.id], "NRN-03").verdict is Verdict.FAIL


def test_memory_in_use_on_a_core_of_nobody_is_told(opened: Opened) -> None:
    """Somebody works on a core that was granted to nobody: its memory shows."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    grant(backend, device, 0, 1)
    host.set_memory(0, 0, 1 << 20)
    host.set_memory(0, 1, 2 << 20)
    strays = fact(backend, device, device, "neuron.strays").value
    assert strays == [{"core": 1, "memory_bytes": 2 << 20}]


def test_holders_are_seen_through_the_kernel(opened: Opened, tmp_path: Path) -> None:
    """A real process with a real descriptor is found by the number of its device, and named."""
    host = opened.host("inf2.8xlarge")
    full = Path("/dev/full").stat().st_rdev
    (host.folder(0) / "dev").write_text(f"{os.major(full)}:{os.minor(full)}\n")
    backend = NeuronBackend(
        NeuronOptions(
            **{**msgspec.structs.asdict(host.options()), "proc_root": "/proc", "monitor": False}
        )
    )
    device = backend.discover()[0]
    program = "import sys\nf = open('/dev/full', 'wb')\nprint('up', flush=True)\nsys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(DeviceBusyError, match=str(child.pid)):
            backend.apply(create(device, 0, 1))
    finally:
        child.communicate()
    assert grant(backend, device, 0, 1)
    assert backend.open_count(device) == 0
    backend.close()


# --- telemetry -----------------------------------------------------------------------------------


def test_memory_in_use_is_total_and_never_present(opened: Opened) -> None:
    """`total` is what is in use, `present` the last change; a cleared counter is absent."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    piece = grant(backend, device, 1, 1)
    host.set_memory(0, 1, 5 << 30)
    backend.signal_specs(device)
    told = values(backend, device, piece.id)
    assert told["alloy_partition_memory_used_bytes"] == 5 << 30
    assert told["alloy_partition_memory_tensors_bytes"] == 5 << 30
    assert told["alloy_partition_memory_bandwidth_active_ratio"] is None
    underflow = host.core(0, 1) / "stats/memory_usage/device_mem/total"
    underflow.write_text(f"{2**64 - 4096}\n")
    assert values(backend, device, piece.id)["alloy_partition_memory_used_bytes"] is None


def test_activity_comes_from_cycles_between_samples(opened: Opened) -> None:
    """The first sample has nothing to compare with; a reset gives no ratio."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 1)
    backend.signal_specs(device)
    name = "alloy_partition_compute_active_ratio"
    assert values(backend, device, piece.id)[name] is None
    host.set_cycles(host.core(0, 0), busy=300, idle=1700)
    assert values(backend, device, piece.id)[name] == pytest.approx(0.3)
    host.set_cycles(host.core(0, 0), busy=1, idle=1)
    assert values(backend, device, piece.id)[name] == pytest.approx(0.3)
    host.set_cycles(host.core(0, 0), busy=11, idle=1)
    assert values(backend, device, piece.id)[name] == pytest.approx(1.0)


def test_counters_that_are_cleared_go_on_growing(opened: Opened) -> None:
    """Write-to-clear and driver reloads start an epoch: the sum goes on and never falls."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 1)
    backend.signal_specs(device)
    seen = []
    for total in (7, 9, 2, 5, 0, 1):
        host.set_status(0, 0, "success", total)
        seen.append(values(backend, device, piece.id)["alloy_partition_executions_total"])
    assert seen == [7, 9, 11, 14, 14, 15]
    ecc = "alloy_device_ecc_uncorrected_total"
    file = host.folder(0) / "stats/hardware/mem_ecc_uncorrected"
    file.write_text("3\n")
    assert values(backend, device)[ecc] == 3
    file.write_text("3735928559\n")  # firmware that does not answer
    assert values(backend, device)[ecc] is None


def test_power_keeps_its_minute_and_its_own_time(opened: Opened) -> None:
    """A percentage once a minute stays that: own period, own source time, no watts."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    device = backend.discover()[0]
    specs = backend.signal_specs(device)
    slot = [s.name for s in specs].index("alloy_device_power_utilization_ratio")
    assert "power" in specs[slot].source
    moment = int(time.time()) - 42
    power = host.folder(0) / "stats/power/utilization"
    power.write_text(f"POWER_STATUS_VALID,{moment},11.20,63.75,48.00\n")
    sink = Sink()
    backend.sample(device, sink)
    value, quality, source_s = sink.slots[slot]
    assert quality is Quality.VALUE
    assert value == pytest.approx(0.48)
    assert source_s is not None
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - source_s == pytest.approx(42, abs=3)
    for text in ("POWER_STATUS_NO_DATA,0,0,0,0", "POWER_STATUS_VALID,1,2,3,nan", "x", ""):
        power.write_text(text)
        assert values(backend, device)["alloy_device_power_utilization_ratio"] is None
    assert values(backend, device)["alloy_device_power_watts"] is None


def test_the_monitor_tells_latency_and_stands_in_for_cycles(opened: Opened) -> None:
    """Percentiles and, without cycle counters, activity come from the monitor at its period."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    device = backend.discover()[0]
    piece = grant(backend, device, 0, 1)
    (host.core(0, 0) / "stats/tensor_engine/pe_cntrs").unlink()
    host.enter(piece, pid=4711)
    backend.signal_specs(device)
    name = "alloy_partition_latency_p99_seconds"
    assert eventually(lambda: values(backend, device, piece.id)[name] is not None)
    told = values(backend, device, piece.id)
    assert told[name] == 0.05
    assert told["alloy_partition_compute_active_ratio"] == 0.75
    host.end(4711)
    assert eventually(lambda: values(backend, device, piece.id)[name] is None)
    assert values(backend, device, piece.id)["alloy_partition_compute_active_ratio"] is None


def test_shares_have_no_numbers_of_their_own(opened: Opened) -> None:
    """Shares of one device have the same cores: what is told of them is of nobody alone."""
    backend = opened.backend(opened.host("trn1.2xlarge"), monitor=False)
    device = backend.discover()[0]
    backend.apply(create(device, 0, 2, profile="production-0", share=Share.PRODUCTION))
    (piece,) = backend.observe(device).partitions
    backend.signal_specs(device)
    assert set(values(backend, device, piece.id).values()) == {None}


# --- events --------------------------------------------------------------------------------------

LINE = "3,1,2,-;neuron:nd0 NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR nd-id=0 nc-id=1 action=x\n"


def test_a_line_in_the_log_counts_once_a_counter_bears_it_out(opened: Opened) -> None:
    """A forged line is a claim; with its counter it is a fault, once, with what to do."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    assert list(backend.wait_events(0.0)) == []
    with host.kernel_log.open("a") as log:
        log.write(LINE)
    (event,) = backend.wait_events(1.0)
    assert (event.kind, event.code) == ("claim", "neuron:hbm_ue")
    assert "any holder" in event.detail
    (host.folder(0) / "stats/hardware/mem_ecc_uncorrected").write_text("1\n")
    with host.kernel_log.open("a") as log:
        log.write(LINE)
    (event,) = backend.wait_events(1.0)
    assert (event.kind, event.code) == ("fault", "neuron:hbm_ue")
    assert "replace the instance" in event.detail


def test_counters_alone_are_faults_too(opened: Opened) -> None:
    """A counter that moves without any line is told; one that falls is not."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host, monitor=False)
    host.set_status(0, 1, "hw_dma_abort_error", 4)
    assert list(backend.wait_events(0.0)) == []
    host.set_status(0, 1, "hw_dma_abort_error", 5)
    (event,) = backend.wait_events(WAIT_S)
    assert (event.kind, event.code) == ("fault", "neuron:dma_error")
    host.set_status(0, 1, "hw_dma_abort_error", 0)
    backend._events._looked_s = 0.0
    assert list(backend.wait_events(0.0)) == []


def test_grants_of_another_process_are_an_event(opened: Opened) -> None:
    """Who waits is told that somebody else changed the grants of a device."""
    host = opened.host("trn1.2xlarge")
    backend, other = opened.backend(host, monitor=False), opened.backend(host, monitor=False)
    device = backend.discover()[0]
    assert list(backend.wait_events(0.0)) == []
    grant(other, device, 0, 1)
    (event,) = backend.wait_events(WAIT_S)
    assert (event.kind, event.device) == ("geometry", device)


# --- in processes of its own ---------------------------------------------------------------------


def test_the_daemon_waits_for_a_late_driver_and_serves_what_comes(opened: Opened) -> None:
    """Started without a driver it runs; when the devices come it shows them, once."""
    host = opened.host("inf2.24xlarge")
    host.unload_driver()
    assert alloy(host, "devices", "--json").returncode is not None  # writes the settings
    daemon = subprocess.Popen(
        [sys.executable, "-m", "alloy_agent", "--config", str(host.root / "agent.yaml"), "run"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: (host.root / "agent.sock").exists() or daemon.poll() is not None)
        assert daemon.poll() is None, daemon.stderr.read() if daemon.stderr else ""
        host.load_driver()

        def shown() -> int:
            done = alloy(host, "devices", "--json")
            return len(json.loads(done.stdout)["devices"]) if done.returncode == 0 else -1

        assert eventually(lambda: shown() == 6)
        assert daemon.poll() is None
    finally:
        daemon.terminate()
        daemon.communicate(timeout=60)
    assert daemon.returncode == 0


def alloy(host: FakeNeuronHost, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the agent in a process of its own, on a generated host."""
    file = host.root / "agent.yaml"
    settings = {
        "state_dir": str(host.root / "alloy"),
        "socket_path": str(host.root / "agent.sock"),
        "metrics": {"address": "127.0.0.1:0"},
        "backends": {"cpu": "off", "nvidia": "off", "amd": "off", "neuron": "on"},
        "neuron": {
            "sys_root": str(host.sys),
            "tools_dir": str(host.tools),
            "product_name_file": str(host.root / "product_name"),
        },
    }
    file.write_text(json.dumps(settings))
    return subprocess.run(
        [sys.executable, "-m", "alloy_agent", "--config", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("instance", ["inf2.24xlarge", "trn1.32xlarge", "trn2.48xlarge"])
def test_commands_compose_on_an_instance(opened: Opened, instance: str) -> None:
    """Plan, apply, devices and audit in processes of their own; an impossible layout is refused."""
    host = opened.host(instance)
    layout = host.root / "layout.yaml"
    text = (
        "version: v1\nlayouts:\n  a:\n    - match: {{vendor: neuron, index: 3}}\n      cores: {}\n"
    )
    layout.write_text(text.format([1, 1]))
    planned = alloy(host, "plan", str(layout), "--json", "--exit-code")
    assert planned.returncode == 1, planned.stderr
    assert len(json.loads(planned.stdout)["steps"]) == 2
    applied = alloy(host, "apply", str(layout), "--yes", "--json")
    assert applied.returncode == 0, applied.stderr
    devices = json.loads(alloy(host, "devices", "--json").stdout)["devices"]
    assert len(devices) == host.board.devices
    pieces = [piece for device in devices for piece in device["partitions"]]
    assert [piece["profile"] for piece in pieces] == ["1c", "1c"]
    audit_ = json.loads(alloy(host, "audit", "--json").stdout)
    verdicts = {
        judgement["check"]: judgement["verdict"]
        for report in audit_["partitions"]
        for judgement in report["judgements"]
    }
    assert {verdicts[name] for name in ("NRN-01", "NRN-04", "PART-01")} == {"pass"}
    assert {report["tier"] for report in audit_["partitions"]} == {"soft"}
    layout.write_text(text.format([64, 1]))
    refused = alloy(host, "plan", str(layout))
    assert refused.returncode not in {0, 1} or "64" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_numbers_of_the_tree_are_read_from_its_files(tmp_path: Path) -> None:
    """The generated `/dev` tells numbers where the kernel would; other files have none."""
    (tmp_path / "neuron0").write_text("248:0")
    (tmp_path / "link").symlink_to(tmp_path / "neuron0")
    numbers = TreeNumbers(tmp_path)
    assert numbers.rdev(str(tmp_path / "link")) == os.makedev(248, 0)
    assert numbers.rdev("/dev/null") is None
