"""The CPU backend: generated hosts with NUMA and SMT on cgroup v1, v2 and hybrid, and this host."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.backends.base import Backend, SignalSink
from alloy_agent.backends.cpu import CpuBackend
from alloy_agent.backends.cpu.pieces import parse_name, run_of
from alloy_agent.backends.cpu.topology import read_nodes
from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    UnsupportedError,
)
from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    DeviceEvent,
    DeviceId,
    Fact,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Quality,
    SetMode,
    Share,
    Tier,
)
from tests.host.fake_kernel import CrashError, FakeHost

NODE0, NODE1 = DeviceId("cpu-node0"), DeviceId("cpu-node1")
KINDS = ("v1", "v2", "hybrid")
MIB, GIB = 1 << 20, 1 << 30
WAIT_S = 20.0
ENTER = (  # enters the cgroups given as arguments, then keeps its core busy
    "/bin/sh",
    "-c",
    'for f; do echo $$ > "$f" || exit 9; done; while :; do :; done',
    "tenant",
)


def backend_on(host: FakeHost, **options: Any) -> CpuBackend:
    return CpuBackend(**{"reserved_cores": (0,), **host.options(), **options})


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path, request.param)


def create(
    start: int,
    size: int,
    memory_bytes: int | None = None,
    *,
    device: DeviceId = NODE1,
    share: Share = Share.EXCLUSIVE,
    ordinal: int = 0,
) -> Create:
    profile = f"{size}c" if share is Share.EXCLUSIVE else f"{share}-{ordinal}"
    spec = PartitionSpec(
        device=device,
        profile=profile,
        size=size,
        placement=Placement(start=start, size=size),
        memory_bytes=memory_bytes,
        share=share,
        ordinal=ordinal,
    )
    return Create(device=device, spec=spec)


def only(backend: CpuBackend, device: DeviceId = NODE1) -> Partition:
    (partition,) = backend.observe(device).partitions
    return partition


def facts_of(backend: CpuBackend, subject: str, device: DeviceId = NODE1) -> dict[str, Any]:
    return {f.name: f.value for f in backend.facts(device) if f.subject == subject}


class Slots(SignalSink):
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[float, Quality]] = {}

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        del source_time_s
        self.values[slot] = (value, quality)


# --- devices -----------------------------------------------------------------------------------


def test_it_is_a_backend(host: FakeHost) -> None:
    """It has every call that the agent makes of a backend."""
    assert isinstance(backend_on(host), Backend)


def test_a_device_is_a_numa_node_with_whole_cores(host: FakeHost) -> None:
    """SMT siblings are one core, the reserve is apart, memory and distances are the node's own."""
    backend = backend_on(host)
    assert backend.discover() == (NODE0, NODE1)
    first, second = (backend.observe(d).device for d in (NODE0, NODE1))
    assert (first.units, first.reserved_units) == ((1,), (0,))
    assert (second.units, second.reserved_units) == ((2, 3), ())
    assert second.memory_bytes == 16 * GIB
    assert [(link.peer, link.hops) for link in second.links] == [("numa:0", 21)]
    assert [(p.name, p.starts, p.max_count) for p in second.profiles] == [
        ("1c", (0, 1), 2),
        ("2c", (0,), 1),
    ]
    assert [(limit.way, limit.tier) for limit in second.tier_limits] == [
        ("cores", Tier.ENFORCED),
        ("shared", Tier.SOFT),
    ]


def test_a_reserved_sibling_reserves_its_core(host: FakeHost) -> None:
    """Reserving one CPU of a core keeps the whole core, since siblings share it."""
    backend = backend_on(host, reserved_cores=(5, 0))
    device = backend.observe(NODE0).device
    assert (device.units, device.reserved_units) == ((), (0, 1))
    assert device.fault_note == "all cores are reserved for the system"
    assert device.profiles == ()


def test_an_offline_sibling_is_no_part_of_its_core(host: FakeHost) -> None:
    """CPUs that are offline are not granted."""
    (host.sys / "devices/system/cpu/online").write_text("0-6\n")
    backend = backend_on(host)
    backend.apply(create(1, 1))
    assert facts_of(backend, only(backend).id)["cpu.granted"] == [3]


def test_a_kernel_without_numa_shows_one_node(host: FakeHost) -> None:
    """Without a node folder all CPUs are node 0, with the host's memory."""
    (host.sys / "devices/system/node/online").unlink()
    (host.proc / "meminfo").write_text("MemTotal: 1024 kB\n")
    (node,) = read_nodes(str(host.sys), str(host.proc))
    assert (node.number, len(node.cores), node.memory_bytes) == (0, 4, MIB)


def test_a_node_that_is_gone_is_lost(host: FakeHost) -> None:
    """A device that the host does not have is lost, not empty."""
    with pytest.raises(DeviceLostError):
        backend_on(host).observe(DeviceId("cpu-node7"))


# --- making and removing -----------------------------------------------------------------------


def test_a_partition_is_read_back_from_the_kernel(host: FakeHost) -> None:
    """What was created is observed with its cores, cap and a way in; what was removed is gone."""
    backend = backend_on(host)
    backend.apply(create(1, 1, 512 * MIB))
    partition = only(backend)
    assert (partition.id, partition.profile) == ("cpu-node1/1c@1", "1c")
    assert (partition.placement, partition.units) == (Placement(start=1, size=1), (3,))
    assert partition.memory_bytes == 512 * MIB
    assert partition.access.environment["ALLOY_CPUS"] == "3,7"
    assert all(Path(file).exists() for file in partition.access.cgroup_procs)
    versions = {"v1": 4, "v2": 1, "hybrid": 3}
    assert len(partition.access.cgroup_procs) == versions[host.kind]
    backend.apply(Destroy(device=NODE1, partition=partition))
    assert backend.observe(NODE1).partitions == ()
    assert not list(host.root.rglob("alloy"))


def test_a_whole_piece_is_not_made_twice(host: FakeHost) -> None:
    """Creating what is there is refused and changes nothing; removing again is done."""
    backend = backend_on(host)
    backend.apply(create(0, 2, 512 * MIB))
    first = only(backend)
    with pytest.raises(DeviceBusyError, match="cpu-node1/2c@0 is there already"):
        backend.apply(create(0, 2, 256 * MIB))
    assert only(backend) == first
    for _ in range(2):
        backend.apply(Destroy(device=NODE1, partition=first))


def test_made_anew_it_is_another_incarnation(host: FakeHost) -> None:
    """The incarnation holds while the cgroup lives and differs once it was made anew."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    first = only(backend)
    assert only(backend).incarnation == first.incarnation
    backend.apply(Destroy(device=NODE1, partition=first))
    backend.apply(create(0, 1))
    assert only(backend).incarnation != first.incarnation
    with pytest.raises(BackendError, match="made anew"):
        backend.apply(Destroy(device=NODE1, partition=first))


def test_an_undo_that_was_only_planned_finds_its_cgroup(host: FakeHost) -> None:
    """A removal that knows only the location works, as a plan's undo does."""
    backend = backend_on(host)
    backend.apply(create(1, 1))
    planned = Partition(
        id=PartitionId("cpu-node1/1c@1"),
        device=NODE1,
        profile="1c",
        placement=Placement(start=1, size=1),
        incarnation="",
    )
    backend.apply(Destroy(device=NODE1, partition=planned))
    assert backend.observe(NODE1).partitions == ()


def test_overlapping_cores_are_refused_with_both_names(host: FakeHost) -> None:
    """A piece that needs another's core names both and leaves everything as it was."""
    backend = backend_on(host)
    backend.apply(create(1, 1))
    with pytest.raises(DeviceBusyError, match="cpu-node1/2c@0 needs cores that cpu-node1/1c@1 has"):
        backend.apply(create(0, 2))
    assert only(backend).id == "cpu-node1/1c@1"


@pytest.mark.parametrize(("start", "size"), [(2, 1), (1, 2), (0, 3)])
def test_cores_that_are_not_there_are_refused(host: FakeHost, start: int, size: int) -> None:
    """A placement beyond the device's cores touches nothing."""
    backend = backend_on(host)
    with pytest.raises(BackendError, match="no run of the 2 cores"):
        backend.apply(create(start, size))
    assert not list(host.root.rglob("alloy"))


def test_shares_of_a_device_have_the_same_cores(host: FakeHost) -> None:
    """Production and opportunistic tenants share all cores, each in a cgroup of its own."""
    backend = backend_on(host)
    backend.apply(create(0, 2, share=Share.PRODUCTION))
    backend.apply(create(0, 2, share=Share.OPPORTUNISTIC))
    backend.apply(create(0, 2, share=Share.OPPORTUNISTIC, ordinal=1))
    found = [(p.id, p.share, p.ordinal, p.units) for p in backend.observe(NODE1).partitions]
    assert found == [
        ("cpu-node1/opportunistic-0@0", Share.OPPORTUNISTIC, 0, (2, 3)),
        ("cpu-node1/opportunistic-1@0", Share.OPPORTUNISTIC, 1, (2, 3)),
        ("cpu-node1/production-0@0", Share.PRODUCTION, 0, (2, 3)),
    ]
    with pytest.raises(DeviceBusyError, match="needs cores"):
        backend.apply(create(0, 1))


def test_caps_never_add_up_into_the_reserve(host: FakeHost) -> None:
    """Sums over what can be lent are refused at creation and at a change, with the room left."""
    backend = backend_on(host, memory_reserve_bytes=2 * GIB)
    backend.apply(create(0, 1, 8 * GIB))
    with pytest.raises(DeviceBusyError, match=rf"{6 * GIB} of {14 * GIB} left"):
        backend.apply(create(1, 1, 7 * GIB))
    backend.apply(create(1, 1, 6 * GIB))
    first = backend.observe(NODE1).partitions[0]
    with pytest.raises(DeviceBusyError, match="lower another partition's cap first"):
        backend.apply(Configure(device=NODE1, partition=first, memory_bytes=9 * GIB))
    assert backend.observe(NODE1).partitions[0].memory_bytes == 8 * GIB


def test_a_cap_changes_in_place(host: FakeHost) -> None:
    """A new cap keeps the incarnation; None lifts it."""
    backend = backend_on(host)
    backend.apply(create(0, 1, 512 * MIB))
    before = only(backend)
    for cap in (GIB, 256 * MIB, None):
        backend.apply(Configure(device=NODE1, partition=before, memory_bytes=cap))
        assert only(backend).memory_bytes == cap
    assert only(backend).incarnation == before.incarnation


def test_there_is_no_mode_to_switch(host: FakeHost) -> None:
    """A mode change is never retried: there is none."""
    step = SetMode(device=NODE1, kind=ModeKind.MIG, current="off", wanted="on")
    with pytest.raises(UnsupportedError, match="no mode mig"):
        backend_on(host).apply(step)


def test_a_step_cannot_reach_out_of_the_root(host: FakeHost) -> None:
    """A locator that points elsewhere is refused: only the agent's own cgroups are touched."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    for path in (
        "system.slice",
        "alloy/cpu-node0/1c@0",
        "alloy/cpu-node1/..",
        "alloy/cpu-node1/a/b",
    ):
        stray = msgspec.structs.replace(only(backend), locator={"cgroup": path})
        with pytest.raises(BackendError, match="is not below"):
            backend.apply(Destroy(device=NODE1, partition=stray))
    assert only(backend).id == "cpu-node1/1c@0"


# --- what others do, and crashes -----------------------------------------------------------------


def test_cpus_changed_by_hand_are_believed_and_reported(host: FakeHost) -> None:
    """The kernel's CPUs are what is observed, and the difference to the grant is a fault."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    mount = host.mount("cpuset")
    host.kernel.write(f"{mount}/alloy/cpu-node1/1c@0/cpuset.cpus", "2-3,6-7")
    observation = backend.observe(NODE1)
    (partition,) = observation.partitions
    assert (partition.placement, partition.units) == (Placement(start=0, size=1), (2, 3))
    assert [(f.kind, f.reason) for f in observation.faults] == [
        ("altered", "cgroup cpu-node1/1c@0 was granted CPUs 2,6 and holds 2-3,6-7")
    ]
    facts = facts_of(backend, partition.id)
    assert (facts["cpu.granted"], facts["cgroup.cpus_effective"]) == ([2, 6], [2, 3, 6, 7])
    with pytest.raises(DeviceBusyError, match="needs cores that cpu-node1/1c@0 has"):
        backend.apply(create(1, 1))
    backend.apply(create(0, 1))  # the step that made it puts it right, with its tenant inside
    assert backend.observe(NODE1).faults == ()
    assert only(backend).incarnation == partition.incarnation


ALTERATIONS = {
    "cpuset.cpus": ("2-3,6-7", "holds 2-3,6-7"),
    "cpuset.mems": ("0-1", "memory from nodes 0-1"),
    "memory.memsw.limit_in_bytes": (str(128 * MIB), "swap beyond"),
    "memory.swap.max": ("max", "swap beyond"),
}


@pytest.mark.parametrize("file", ALTERATIONS)
def test_what_was_changed_by_hand_is_put_right_in_place(host: FakeHost, file: str) -> None:
    """An altered piece says how; configuring it gives it its grant again, cap and identity kept."""
    value, words = ALTERATIONS[file]
    backend = backend_on(host)
    backend.apply(create(0, 1, 64 * MIB))
    before = only(backend)
    assert before.altered == ""
    folder = f"{host.mount(file.partition('.')[0])}/alloy/cpu-node1/1c@0"
    if not host.kernel.exists(f"{folder}/{file}"):
        assert ".swap." in file or ".memsw." in file  # the other version's name for it
        return
    host.kernel.write(f"{folder}/{file}", value)
    altered = only(backend)
    assert words in altered.altered
    assert altered.altered in backend.observe(NODE1).faults[0].reason
    step = Configure(device=NODE1, partition=altered, memory_bytes=altered.memory_bytes)
    backend.apply(step)
    assert only(backend) == before
    assert backend.observe(NODE1).faults == ()


def test_half_a_core_is_seen(host: FakeHost) -> None:
    """A cgroup that splits siblings is reported with the CPUs that it holds."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    mount = host.mount("cpuset")
    host.kernel.write(f"{mount}/alloy/cpu-node1/1c@0/cpuset.cpus", "2")
    observation = backend.observe(NODE1)
    assert observation.partitions[0].units == (2,)
    assert [f.kind for f in observation.faults] == ["altered"]
    assert facts_of(backend, "cpu-node1/1c@0")["cgroup.cpus_effective"] == [2]


def test_partitions_made_by_hand_are_seen(host: FakeHost) -> None:
    """Somebody else's cgroups below the root are found, well named or not, and overlaps refused."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    from alloy_agent.host.cgroups import Cgroup, detect

    topology = detect(host.proc, host.root)
    Cgroup(topology, "alloy/cpu-node1/by hand", host.kernel).create((3, 7), (1,), None)
    observation = backend.observe(NODE1)
    assert [p.id for p in observation.partitions] == ["cpu-node1/1c@0", "cpu-node1/by hand"]
    assert [f.kind for f in observation.faults] == ["foreign_cgroup"]
    with pytest.raises(DeviceBusyError, match="by hand"):
        backend.apply(create(1, 1))


def test_an_empty_directory_is_a_fault_and_no_partition(host: FakeHost) -> None:
    """A directory without CPUs is half made: reported, and cleared by the next step."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    mount = host.mount("memory")
    host.kernel.make(f"{mount}/alloy/cpu-node1/1c@1")
    observation = backend.observe(NODE1)
    assert [p.id for p in observation.partitions] == ["cpu-node1/1c@0"]
    assert [f.kind for f in observation.faults] == ["half_made"]
    backend.apply(Destroy(device=NODE1, partition=observation.partitions[0]))
    assert backend.observe(NODE1).faults == ()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_write_the_next_step_finds_order(kind: str, tmp_path: Path) -> None:
    """Cut short anywhere, a step or its undo leaves exactly what it should and no orphan."""
    count = FakeHost(tmp_path / "count", kind)
    backend_on(count).apply(create(0, 1, 64 * MIB))
    total = count.kernel.changes
    for point in range(1, total + 1):
        host = FakeHost(tmp_path / str(point), kind)
        host.kernel.crash_at = point
        with pytest.raises(CrashError):
            backend_on(host).apply(create(0, 1, 64 * MIB))
        host.kernel.crash_at = 0
        backend = backend_on(host)
        assert backend.observe(NODE1).partitions == ()
        backend.apply(create(1, 1))  # a step for another piece clears what is left
        assert [p.id for p in backend.observe(NODE1).partitions] == ["cpu-node1/1c@1"]
        assert backend.observe(NODE1).faults == ()


def test_an_occupied_partition_is_never_taken_away(host: FakeHost) -> None:
    """Removal names the tenant and changes nothing."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    partition = only(backend)
    host.process(321, comm="trainer", cpus="2,6", cgroup="/alloy/cpu-node1/1c@0")
    for file in partition.access.cgroup_procs:
        host.kernel.write(file, "321")
    with pytest.raises(DeviceBusyError, match=r"process 321 \(trainer\)"):
        backend.apply(Destroy(device=NODE1, partition=partition))
    assert only(backend) == partition


# --- facts ---------------------------------------------------------------------------------------


def test_members_are_told_with_what_they_lack(host: FakeHost) -> None:
    """A process in one hierarchy only is listed with the hierarchies that it is not in."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    partition = only(backend)
    host.process(321, comm="trainer", cpus="2,6", cgroup="/")
    host.kernel.write(partition.access.cgroup_procs[-1], "321")
    for cgroup, lacking in (
        ("/", len(partition.access.cgroup_procs)),
        (f"/alloy/{partition.id}", 0),
    ):
        host.process(321, comm="trainer", cpus="2,6", cgroup=cgroup)
        (member,) = facts_of(backend, partition.id)["cgroup.members"]
        assert (member["pid"], member["cpus"], member["threads"]) == (321, [2, 6], [])
        assert len(member["lacks"]) == lacking


def test_being_placed_on_granted_cpus_is_not_being_allowed_to(host: FakeHost) -> None:
    """Pinned outsiders, outsiders that ran there and those that merely may are three facts."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    host.process(1, comm="init", last_cpu=0)
    host.process(50, comm="daemon", last_cpu=6)
    host.process(51, comm="squatter", cpus="2", last_cpu=0)
    host.process(52, comm="elsewhere", cpus="3", last_cpu=3)
    host.process(53, comm="kworker", cpus="2", last_cpu=2, flags=0x200000)
    facts = facts_of(backend, "cpu-node1/1c@0")
    assert [p["comm"] for p in facts["cpu.outsiders_pinned"]] == ["squatter"]
    assert [(p["comm"], p["active"]) for p in facts["cpu.outsiders_ran"]] == [("daemon", None)]
    assert facts["cpu.outsiders_allowed"] == {"count": 2, "names": ["daemon", "init"]}
    again = facts_of(backend, "cpu-node1/1c@0")["cpu.outsiders_ran"]
    assert [p["active"] for p in again] == [False]


def test_every_fact_says_how_it_was_read(host: FakeHost) -> None:
    """Each fact has a method and a resolution, is JSON, and is in the documented table."""
    from alloy_agent.backends import cpu

    backend = backend_on(host)
    backend.apply(create(0, 1, 64 * MIB))
    facts: Sequence[Fact] = backend.facts(NODE1)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=tuple[Fact, ...]) == facts
    for fact in facts:
        assert fact.method, fact.name
        assert fact.resolution, fact.name
        assert f"`{fact.name}`" in (cpu.__doc__ or ""), fact.name


def test_where_the_controllers_are_is_shown(host: FakeHost) -> None:
    """Which version is used is a fact of the device, a note of the backend and a line of doctor."""
    backend = backend_on(host)
    version = "v2" if host.kind == "v2" else "v1"
    shown = facts_of(backend, NODE1)["cpu.hierarchies"]
    assert shown["mode"] == host.kind
    assert shown["cpuset"].startswith(version)
    assert backend.capabilities().notes[0].startswith(f"cpuset: {version} at ")
    (line,) = [d for d in backend.diagnose() if d.subject == "cpu: cpuset controller"]
    assert line.ok
    assert f"cgroup {version}" in line.found


@pytest.mark.parametrize(
    ("rows", "found", "cure"),
    [
        ("cpuset\t0\t1\t0\nmemory\t0\t1\t1\n", "switched off", "cgroup_enable=cpuset"),
        ("cpuset\t0\t1\t1\n", "in the kernel, mounted nowhere", "mount"),
        ("memory\t0\t1\t1\n", "not in the kernel", "CONFIG_CPUSETS"),
    ],
)
def test_a_missing_controller_is_told_with_its_cure(
    rows: str, found: str, cure: str, tmp_path: Path
) -> None:
    """Switched off, not mounted and not built are three different cures."""
    host = FakeHost(tmp_path, "v2")
    (host.proc / "cgroups").write_text(rows)
    (host.proc / "self/mountinfo").write_text("")
    backend = backend_on(host)
    (line,) = [d for d in backend.diagnose() if d.subject == "cpu: cpuset controller"]
    assert (line.ok, line.required, line.found) == (False, True, found)
    assert cure in line.cure
    assert not backend.capabilities().can_partition
    assert backend.observe(NODE1).device.tier_limits[0].tier is Tier.ADVISORY


def test_swap_that_nobody_counts_is_told(tmp_path: Path) -> None:
    """Swap areas without accounting let a tenant leave its cap: doctor says so."""
    host = FakeHost(tmp_path, "v1")
    (host.proc / "swaps").write_text("Filename\tType\n/dev/sda2 partition\n")
    Path(f"{host.mount('memory')}/memory.memsw.limit_in_bytes").unlink()
    (line,) = [d for d in backend_on(host).diagnose() if d.subject == "cpu: swap accounting"]
    assert not line.ok
    assert "swapaccount=1" in line.cure


# --- confining the rest of the host --------------------------------------------------------------


def test_by_default_nobody_else_is_touched(host: FakeHost) -> None:
    """Without the setting no cgroup but the partition's is made, and the fact says so."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    assert not list(host.root.rglob("system.slice"))
    assert not list(host.root.rglob("alloy/system"))
    assert facts_of(backend, NODE1)["cpu.confined"]["in_force"] is False


@pytest.mark.parametrize("kind", ["v1", "hybrid"])
def test_confining_on_v1_moves_the_unpinned_and_brings_them_back(kind: str, tmp_path: Path) -> None:
    """Ordinary processes leave granted CPUs, pinned ones and kernel threads stay, all is undone."""
    host = FakeHost(tmp_path, kind)
    top = host.mount("cpuset")
    for pid, options in {
        70: {"comm": "daemon"},
        71: {"comm": "pinned", "cpus": "2"},
        72: {"comm": "kworker", "flags": 0x200000},
    }.items():
        host.process(pid, **options)  # type: ignore[arg-type]
        host.kernel.place(top, pid)
    backend = backend_on(host, confine_system=True)
    backend.apply(create(0, 1))
    confined = facts_of(backend, NODE1)["cpu.confined"]
    assert (confined["in_force"], confined["cpus"]) == (True, [0, 1, 3, 4, 5, 7])
    assert host.kernel.read(f"{top}/alloy/system/cgroup.procs") == "70"
    backend.apply(create(1, 1))
    assert facts_of(backend, NODE1)["cpu.confined"]["cpus"] == [0, 1, 4, 5]
    for partition in backend.observe(NODE1).partitions:
        backend.apply(Destroy(device=NODE1, partition=partition))
    assert (host.kernel.read(f"{top}/cgroup.procs") or "").split() == ["71", "72", "70"]
    assert not list(host.root.rglob("alloy"))


def test_confining_on_v2_makes_partition_roots(tmp_path: Path) -> None:
    """On v2 the kernel itself takes the CPUs from everyone else; nobody is moved."""
    host = FakeHost(tmp_path, "v2")
    backend = backend_on(host, confine_system=True)
    backend.apply(create(0, 1))
    assert facts_of(backend, "cpu-node1/1c@0")["cgroup.exclusive"] == "root"
    assert facts_of(backend, NODE1)["cpu.confined"]["in_force"] is True
    above = host.kernel.read(f"{host.mount('cpuset')}/alloy/cpuset.cpus.exclusive")
    assert above == "2,6"


# --- signals -------------------------------------------------------------------------------------


def sample(backend: CpuBackend, device: DeviceId) -> Slots:
    slots = Slots()
    backend.sample(device, slots)
    return slots


def test_signals_come_from_the_kernels_counters(host: FakeHost) -> None:
    """Memory, caps and use are values at once; ratios need two samples; absent sensors say so."""
    backend = backend_on(host)
    backend.apply(create(0, 1, 64 * MIB))
    specs = backend.signal_specs(NODE1)
    first = sample(backend, NODE1)
    assert len(first.values) == len(specs)
    shown = {spec.name: first.values[slot] for slot, spec in enumerate(specs)}
    assert shown["alloy_device_memory_used_bytes"] == (float(4 * GIB), Quality.VALUE)
    assert shown["alloy_partition_memory_limit_bytes"] == (float(64 * MIB), Quality.VALUE)
    assert shown["alloy_device_temperature_celsius"][1] == Quality.NOT_SUPPORTED
    assert shown["alloy_partition_compute_active_ratio"][1] == Quality.STALE
    slot = [spec.name for spec in specs].index("alloy_partition_compute_active_ratio")
    time.sleep(0.01)
    assert sample(backend, NODE1).values[slot] == (0.0, Quality.VALUE)
    backend.close()


def test_an_absent_cap_is_no_number(host: FakeHost) -> None:
    """Without a cap there is no limit to show, and no zero in its place."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    specs = backend.signal_specs(NODE1)
    slot = [s.name for s in specs].index("alloy_partition_memory_limit_bytes")
    value, quality = sample(backend, NODE1).values[slot]
    assert math.isnan(value)
    assert quality is Quality.NOT_SUPPORTED
    backend.close()


def test_energy_survives_a_wrap(host: FakeHost) -> None:
    """A RAPL counter that wraps goes on growing, by what it grew."""
    for number in (0, 1):
        folder = host.sys / f"class/powercap/intel-rapl:{number}"
        folder.mkdir(parents=True)
        (folder / "energy_uj").write_text("90000000\n")
        (folder / "max_energy_range_uj").write_text("100000000\n")
    backend = backend_on(host)
    slot = [s.name for s in backend.signal_specs(NODE1)].index("alloy_device_energy_joules_total")
    assert sample(backend, NODE1).values[slot] == (90.0, Quality.VALUE)
    (host.sys / "class/powercap/intel-rapl:1/energy_uj").write_text("5000000\n")
    assert sample(backend, NODE1).values[slot] == (105.0, Quality.VALUE)
    backend.close()


def test_quiesced_it_holds_nothing(host: FakeHost) -> None:
    """After quiesce no descriptor of the device is open and sampling opens none."""
    backend = backend_on(host)
    backend.apply(create(0, 1))
    backend.signal_specs(NODE1)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    sample(backend, NODE1)
    assert len(os.listdir("/proc/self/fd")) > before  # noqa: PTH208
    backend.quiesce(NODE1)
    assert sample(backend, NODE1).values == {}
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    backend.resume(NODE1)
    assert sample(backend, NODE1).values
    backend.close()


# --- names ---------------------------------------------------------------------------------------


@given(st.text(max_size=20))
def test_no_directory_name_breaks_the_reader(name: str) -> None:
    """Any name is one of the agent's or none; what is one says what it grants."""
    piece = parse_name(name)
    if piece is not None:
        assert name == f"{piece.profile}@{piece.start}"


@given(st.sets(st.integers(0, 9), max_size=10))
def test_a_set_of_cpus_is_a_run_only_of_whole_cores(cpus: set[int]) -> None:
    """Only whole neighbouring cores of the node are a placement."""
    from alloy_agent.backends.cpu.topology import Core, Node

    cores = tuple(Core(first=n, cpus=(n, n + 4)) for n in range(4))
    node = Node(number=0, cores=cores, reserved=(), memory_bytes=None, distances={})
    place = run_of(tuple(cpus), node)
    runs = {
        frozenset(c for core in cores[a:b] for c in core.cpus): Placement(start=a, size=b - a)
        for a in range(4)
        for b in range(a + 1, 5)
    }
    assert place == runs.get(frozenset(cpus))


# --- this host -----------------------------------------------------------------------------------


@pytest.fixture
def real() -> Iterator[CpuBackend]:
    root = f"alloytest-{os.getpid()}-{time.monotonic_ns()}"
    backend = CpuBackend(reserved_cores=(), cgroup_root=root, memory_reserve_bytes=0)
    yield backend
    for device in backend.discover():
        for partition in backend.observe(device).partitions:
            backend.apply(Destroy(device=device, partition=partition))
    backend.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{root}"))


def first_core(backend: CpuBackend) -> tuple[DeviceId, int]:
    device = backend.discover()[0]
    usable = os.sched_getaffinity(0)
    units = backend.observe(device).device.units
    return device, next(i for i, unit in enumerate(units) if unit in usable)


@pytest.mark.host
def test_a_real_tenant_is_fenced_seen_and_counted(real: CpuBackend) -> None:
    """On this host a busy process in a partition has its cores, is a member, and shows as load."""
    device, index = first_core(real)
    real.apply(create(index, 1, 256 * MIB, device=device))
    partition = only(real, device)
    specs = real.signal_specs(device)
    tenant = subprocess.Popen([*ENTER, *partition.access.cgroup_procs])
    try:
        granted = facts_of(real, partition.id, device)["cpu.granted"]
        end = time.monotonic() + WAIT_S
        while os.sched_getaffinity(tenant.pid) != set(granted) and time.monotonic() < end:
            time.sleep(0.01)
        assert os.sched_getaffinity(tenant.pid) == set(granted)
        sample(real, device)
        slot = [s.name for s in specs].index("alloy_partition_compute_active_ratio")
        end = time.monotonic() + WAIT_S
        value = 0.0
        while not value > 0.05 and time.monotonic() < end:
            time.sleep(0.2)
            value, quality = sample(real, device).values[slot]
            assert quality is Quality.VALUE
        assert 0.05 < value <= 1.0
        facts = facts_of(real, partition.id, device)
        assert [m["pid"] for m in facts["cgroup.members"]] == [tenant.pid]
        assert facts["cgroup.members"][0]["lacks"] == []
        assert facts["cgroup.cpus_effective"] == granted
        assert facts["cgroup.memory_leaves"][0]["ceiling_bytes"] == 256 * MIB
        with pytest.raises(DeviceBusyError, match=str(tenant.pid)):
            real.apply(Destroy(device=device, partition=partition))
    finally:
        tenant.kill()
        tenant.wait()


@pytest.mark.host
def test_a_real_squatter_is_told_from_the_rest(real: CpuBackend) -> None:
    """A process that was pinned to granted cores from outside is named as such, this one is not."""
    device, index = first_core(real)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs to tell a pinned process from a free one")
    real.apply(create(index, 1, device=device))
    partition = only(real, device)
    cpu = partition.units[0]
    squatter = subprocess.Popen(["/bin/sleep", "60"])
    try:
        os.sched_setaffinity(squatter.pid, {cpu})
        pinned = facts_of(real, partition.id, device)["cpu.outsiders_pinned"]
        assert squatter.pid in {p["pid"] for p in pinned}
        assert os.getpid() not in {p["pid"] for p in pinned}
    finally:
        squatter.kill()
        squatter.wait()


@pytest.mark.host
def test_a_real_move_becomes_an_event(real: CpuBackend) -> None:
    """A process that enters or leaves, and CPUs changed by hand, wake the event waiter."""
    device, index = first_core(real)
    real.apply(create(index, 1, device=device))
    partition = only(real, device)
    procs = partition.access.cgroup_procs[-1]
    while real.wait_events(0.1):
        pass
    tenant = subprocess.Popen(["/bin/sleep", "60"])
    try:
        top = str(Path(procs).parents[3] / "cgroup.procs")
        cpus = str(Path(procs).with_name("cpuset.cpus"))
        for path, text, kind in (
            (procs, str(tenant.pid), "process"),
            (top, str(tenant.pid), "process"),
            (cpus, str(partition.units[0]), "geometry"),
        ):
            timer = threading.Timer(0.1, Path(path).write_text, (text,))
            timer.start()
            events: list[DeviceEvent] = []
            end = time.monotonic() + WAIT_S
            while not events and time.monotonic() < end:
                told = real.wait_events(0.5)
                events = [e for e in told if e.kind == kind and e.detail == path]
            timer.join()
            assert {e.device for e in events} == {device}
    finally:
        tenant.kill()
        tenant.wait()


@pytest.mark.host
def test_what_others_do_in_their_cgroups_is_no_event(real: CpuBackend) -> None:
    """Somebody else's cgroup that comes and goes wakes nobody."""
    device, index = first_core(real)
    real.apply(create(index, 1, device=device))
    while real.wait_events(0.1):
        pass
    mount = Path(only(real, device).access.cgroup_procs[-1]).parents[3]
    other = mount / f"alloytest-other-{os.getpid()}-{time.monotonic_ns()}"
    other.mkdir()
    try:
        events = real.wait_events(0.2)
        assert not [e for e in events if str(other) in e.detail]
    finally:
        other.rmdir()
    assert not [e for e in real.wait_events(0.2) if str(other) in e.detail]


@pytest.mark.host
def test_real_confinement_moves_only_what_it_is_shown(real: CpuBackend, tmp_path: Path) -> None:
    """On this host's v1 cpuset a process leaves granted cores and comes back afterwards.

    The generated /proc lists one process of this test, so that nobody else on the host is moved.
    """
    from alloy_agent.backends.cpu.confine import Confinement
    from alloy_agent.host.cgroups import Cgroup, CgroupFs, detect

    topology = detect()
    cpuset = topology.of("cpuset")
    if cpuset is None or cpuset.version != 1 or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs cpuset on cgroup v1 and two CPUs")
    tenant = subprocess.Popen(["/bin/sleep", "60"])
    root = f"alloytest-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / str(tenant.pid)).symlink_to(f"/proc/{tenant.pid}")
    before = os.sched_getaffinity(tenant.pid)
    granted = (max(before),)
    nodes = read_nodes()
    try:
        Cgroup(topology, f"{root}/x", CgroupFs()).create(granted, (0,), None)
        Confinement(root, True, str(tmp_path), CgroupFs()).follow(topology, nodes, granted)
        assert os.sched_getaffinity(tenant.pid) == before - set(granted)
        Confinement(root, False, str(tmp_path), CgroupFs()).follow(topology, nodes, granted)
        assert os.sched_getaffinity(tenant.pid) == before
    finally:
        tenant.kill()
        tenant.wait()
        Confinement(root, False, str(tmp_path), CgroupFs()).follow(topology, nodes, ())
        cgroup = Cgroup(topology, f"{root}/x", CgroupFs())
        cgroup.remove()
        cgroup.prune_parents()
    del real
