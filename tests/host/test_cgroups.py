"""Cgroups over several hierarchies: generated v1, v2 and hybrid hosts, and this host's own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    NotPermittedError,
    UnsupportedError,
)
from alloy_agent.host.cgroups import Cgroup, CgroupTopology, detect
from alloy_agent.host.cpulist import format_cpu_list, parse_cpu_list
from tests.host.fake_kernel import CrashError, FakeHost

KINDS = ("v1", "v2", "hybrid")
MIB = 1 << 20


def topology_of(host: FakeHost) -> CgroupTopology:
    return detect(host.proc, host.root)


def cgroup_of(host: FakeHost, path: str = "alloy/cpu-node0/1c@0") -> Cgroup:
    return Cgroup(topology_of(host), path, host.kernel)


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path, request.param)


def test_each_controller_is_found_where_it_is(tmp_path: Path) -> None:
    """Pure v1, pure v2 and hybrid hosts are told apart, controller by controller."""
    found = {}
    for kind in KINDS:
        topology = topology_of(FakeHost(tmp_path / kind, kind))
        cpuset = topology.of("cpuset")
        assert cpuset is not None
        found[kind] = (topology.mode, cpuset.version, topology.unified is not None)
    assert found == {
        "v1": ("v1", 1, False),
        "v2": ("v2", 2, True),
        "hybrid": ("hybrid", 1, True),
    }


def test_a_switched_off_controller_is_named(tmp_path: Path) -> None:
    """A controller that the kernel was told to leave out is known as disabled, not as absent."""
    topology = topology_of(FakeHost(tmp_path, "v2"))
    assert topology.disabled == ("pids",)
    assert topology.of("pids") is None


def test_the_whole_tree_wins_over_a_bind_mount_of_a_part(tmp_path: Path) -> None:
    """Where a hierarchy is mounted twice, the mount that shows its top is used."""
    host = FakeHost(tmp_path, "v2")
    info = host.proc / "self/mountinfo"
    part = "50 22 0:30 /kubepods /mnt/part\\040of rw - cgroup2 cgroup2 rw\n"
    info.write_text(part + info.read_text())
    tree = topology_of(host).unified
    assert tree is not None
    assert tree.root == "/"


@given(st.binary(max_size=400))
def test_no_mountinfo_breaks_detection(noise: bytes) -> None:
    """Any bytes in the mount table give a topology, never an exception."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "self").mkdir()
        (Path(folder) / "self/mountinfo").write_bytes(
            noise + b"\n1 2 0:1 / /x rw - cgroup c " + noise
        )
        (Path(folder) / "cgroups").write_bytes(noise)
        assert detect(folder).mode in {"none", "v1", "v2", "hybrid"}


def test_what_was_asked_for_is_read_back(host: FakeHost) -> None:
    """CPUs, memory node and cap are in force in the right hierarchies, and nothing is lacking."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    state = cgroup.state()
    assert state.lacks == ()
    assert (state.cpus_effective, state.mems_effective) == ((1, 5), (0,))
    assert state.memory_limit_bytes == state.memory_ceiling_bytes == 64 * MIB
    assert state.swap_limit_bytes == (0 if host.kind == "v2" else 64 * MIB)


def test_the_ceiling_is_the_lowest_cap_on_the_way_up(host: FakeHost) -> None:
    """A lower cap of an ancestor binds, and is what the state calls the ceiling."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    cgroup_of(host, "alloy/cpu-node0").set_memory(32 * MIB)
    assert cgroup.state().memory_ceiling_bytes == 32 * MIB
    assert cgroup.state().memory_limit_bytes == 64 * MIB


def test_a_cap_goes_up_and_down_and_away(host: FakeHost) -> None:
    """Raising, lowering and lifting a cap each take the order of writes that the kernel wants."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    for wanted in (128 * MIB, 32 * MIB, None, 16 * MIB):
        cgroup.set_memory(wanted)
        assert cgroup.state().memory_limit_bytes == wanted


def test_a_cap_below_use_is_refused_and_says_so(host: FakeHost) -> None:
    """A cap below what is in use names both numbers, and the old cap stays."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    assert cgroup.memory is not None
    host.kernel.memory_used[cgroup.memory.folder(cgroup.path)] = 40 * MIB
    with pytest.raises(DeviceBusyError, match=f"{40 * MIB} bytes, more than the cap of {8 * MIB}"):
        cgroup.set_memory(8 * MIB)
    assert cgroup.state().memory_limit_bytes == 64 * MIB


def test_a_member_is_in_every_hierarchy(host: FakeHost) -> None:
    """Moving a process puts it into each hierarchy, and an occupied cgroup is not removed."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    host.process(77, comm="trainer")
    cgroup.move(77)
    assert set(cgroup.pids_by_hierarchy().values()) == {frozenset({77})}
    with pytest.raises(DeviceBusyError, match=r"process 77 \(trainer\)"):
        cgroup.remove(str(host.proc))
    assert cgroup.state().lacks == ()


def test_removing_leaves_nothing(host: FakeHost) -> None:
    """After removal nothing of the agent is in any tree, and a second removal is fine."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), 64 * MIB)
    inner = cgroup_of(host, f"{cgroup.path}/inner")
    assert inner.cpuset is not None
    host.kernel.make(inner.cpuset.folder(inner.path))
    for _ in range(2):
        cgroup.remove(str(host.proc))
        cgroup.prune_parents()
    assert not list(host.root.rglob("alloy"))


def test_processes_in_an_inner_v2_cgroup_are_named(tmp_path: Path) -> None:
    """On v2 a controller cannot go past a cgroup with processes; the error says which they are."""
    host = FakeHost(tmp_path, "v2")
    mount = host.mount("cpuset")
    host.kernel.make(f"{mount}/alloy")
    host.process(88, comm="squatter")
    host.kernel.place(f"{mount}/alloy", 88)
    with pytest.raises(DeviceBusyError, match="cannot hand cpuset, memory, cpu down while it has"):
        cgroup_of(host).create((1, 5), (0,), None)


def test_a_narrower_ancestor_is_not_taken_for_success(host: FakeHost) -> None:
    """CPUs that an ancestor does not have make creation fail, whatever the kernel answered."""
    top = cgroup_of(host, "alloy")
    top.create((0, 4), (0,), None)
    if host.kind != "v2":  # a v1 ancestor gets all that the root has, unless someone narrows it
        cgroup_of(host, "alloy/cpu-node0").create((0, 4), (0,), None)
        mount = host.mount("cpuset")
        Path(f"{mount}/cpuset.effective_cpus").write_text("0,4\n")
    with pytest.raises(BackendError, match=r"narrower|same CPUs"):
        cgroup_of(host).create((1, 5), (0,), None)


def crash_points(kind: str, folder: Path) -> int:
    host = FakeHost(folder, kind)
    cgroup_of(host).create((1, 5), (0,), 64 * MIB)
    return host.kernel.changes


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_write_of_creation_it_is_completed_or_removed(
    kind: str, tmp_path: Path
) -> None:
    """Cut short anywhere, the cgroup is seen as half made; the same step and its undo both work."""
    total = crash_points(kind, tmp_path / "count")
    assert total > 5
    for point in range(1, total + 1):
        for way in ("again", "undo"):
            host = FakeHost(tmp_path / f"{way}{point}", kind)
            host.kernel.crash_at = point
            with pytest.raises(CrashError):
                cgroup_of(host).create((1, 5), (0,), 64 * MIB)
            host.kernel.crash_at = 0
            cgroup = cgroup_of(host)
            assert cgroup.state().lacks
            if way == "again":
                cgroup.create((1, 5), (0,), 64 * MIB)
                assert cgroup.state().lacks == ()
                assert cgroup.state().memory_limit_bytes == 64 * MIB
            else:
                cgroup.remove(str(host.proc))
                cgroup.prune_parents()
                assert not list(host.root.rglob("alloy"))


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_write_of_removal_it_is_removed_again(kind: str, tmp_path: Path) -> None:
    """A removal cut short leaves no whole cgroup behind once it began, and can be repeated."""
    host = FakeHost(tmp_path / "count", kind)
    cgroup_of(host).create((1, 5), (0,), 64 * MIB)
    before = host.kernel.changes
    cgroup_of(host).remove(str(host.proc))
    for point in range(1, host.kernel.changes - before + 1):
        again = FakeHost(tmp_path / str(point), kind)
        cgroup_of(again).create((1, 5), (0,), 64 * MIB)
        again.kernel.crash_at = again.kernel.changes + point
        with pytest.raises(CrashError):
            cgroup_of(again).remove(str(again.proc))
        again.kernel.crash_at = 0
        assert bool(cgroup_of(again).state().lacks) is (point > 1)
        cgroup_of(again).remove(str(again.proc))
        cgroup_of(again).prune_parents()
        assert not list(again.root.rglob("alloy"))


def test_freezing_waits_for_the_kernel(host: FakeHost) -> None:
    """Freezing returns once the kernel says so, and a thaw lets go."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), None)
    host.kernel.freezing_reads = 3
    cgroup.freeze()
    cgroup.thaw()
    if host.kind == "v1":
        assert host.kernel.read(f"{host.mount('freezer')}/{cgroup.path}/freezer.state") == "THAWED"
    else:
        events = host.kernel.read(f"{host.mount('')}/{cgroup.path}/cgroup.events") or ""
        assert "frozen 0" in events


def test_what_never_freezes_fails_and_is_left_thawed(host: FakeHost) -> None:
    """A group that stays in FREEZING is reported and runs on; nothing loops for ever."""
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), None)
    host.kernel.freezing_reads = 1 << 30
    host.kernel.frozen_by_v2 = False
    with pytest.raises(BackendError, match="did not freeze"):
        cgroup.freeze(deadline_s=0.2)
    host.kernel.freezing_reads = 0
    if host.kind == "v1":
        assert host.kernel.read(f"{host.mount('freezer')}/{cgroup.path}/freezer.state") == "THAWED"
    else:
        assert host.kernel.read(f"{host.mount('')}/{cgroup.path}/cgroup.freeze") == "0"


def test_exclusive_cpus_are_believed_only_as_read_back(tmp_path: Path) -> None:
    """A v2 partition that the kernel calls invalid is undone, with the kernel's reason."""
    host = FakeHost(tmp_path, "v2")
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), None)
    cgroup.set_exclusive()
    assert cgroup.state().partition == "root"
    host.kernel.partition_answer = "root invalid (Cpu list in cpuset.cpus not exclusive)"
    with pytest.raises(BackendError, match="not exclusive"):
        cgroup.set_exclusive()
    assert cgroup.state().partition == "member"


def test_exclusive_cpus_need_v2(tmp_path: Path) -> None:
    """On v1 the refusal says what it would take."""
    host = FakeHost(tmp_path, "v1")
    cgroup = cgroup_of(host)
    cgroup.create((1, 5), (0,), None)
    with pytest.raises(UnsupportedError, match="boot with the v2 tree"):
        cgroup.set_exclusive()


def test_a_host_without_cpuset_says_how_to_get_it(tmp_path: Path) -> None:
    """No cpuset controller is refused with the cure, not with a missing file."""
    host = FakeHost(tmp_path, "v2")
    (host.proc / "self/mountinfo").write_text("")
    with pytest.raises(UnsupportedError, match="mount the v2 tree"):
        Cgroup(topology_of(host), "alloy/x", host.kernel).create((0,), (0,), None)


@given(st.sets(st.integers(0, 300), max_size=60))
def test_a_cpu_list_survives_both_ways(numbers: set[int]) -> None:
    """Formatting and parsing a CPU list gives the same numbers."""
    assert set(parse_cpu_list(format_cpu_list(numbers))) == numbers


@given(st.text(max_size=40))
def test_no_cpu_list_does_more_than_raise_value_error(text: str) -> None:
    """Any text is a list of CPUs or a ValueError, quickly."""
    try:
        numbers = parse_cpu_list(text)
    except ValueError:
        return
    assert all(number >= 0 for number in numbers)


# --- this host -------------------------------------------------------------------------------


@pytest.fixture
def real() -> Iterator[Cgroup]:
    root = f"alloytest-{os.getpid()}-{time.monotonic_ns()}"
    cgroup = Cgroup(detect(), f"{root}/cpu-node0/1c@0")
    yield cgroup
    if cgroup.present():
        cgroup.kill()
        cgroup.remove()
    cgroup.prune_parents()
    assert not any(Path(h.folder(root)).exists() for h in cgroup.hierarchies)


def cpu_and_node() -> tuple[int, int]:
    cpu = max(os.sched_getaffinity(0))
    found = next(Path("/sys/devices/system/cpu").glob(f"cpu{cpu}/node*"), Path("node0"))
    return cpu, int(found.name.removeprefix("node"))


@pytest.mark.host
def test_this_host_fences_a_real_process(real: Cgroup) -> None:
    """In this host's own trees a real process is confined, frozen, thawed, and never killed."""
    cpu, node = cpu_and_node()
    real.create((cpu,), (node,), 64 * MIB)
    state = real.state()
    assert (state.lacks, state.cpus_effective, state.mems_effective) == ((), (cpu,), (node,))
    assert state.memory_ceiling_bytes == 64 * MIB
    tenant = subprocess.Popen(["/bin/sleep", "60"])
    try:
        real.move(tenant.pid)
        assert os.sched_getaffinity(tenant.pid) == {cpu}
        assert set(real.pids_by_hierarchy().values()) == {frozenset({tenant.pid})}
        real.freeze()
        real.thaw()
        with pytest.raises(DeviceBusyError, match=rf"process {tenant.pid} \(sleep\)"):
            real.remove()
        assert tenant.poll() is None
        real.kill()
    finally:
        tenant.kill()
        tenant.wait()
    real.remove()
    assert not real.present()


@pytest.mark.host
def test_this_host_caps_memory(real: Cgroup) -> None:
    """A tenant that asks for more than its cap is stopped by the kernel, not by its manners."""
    cpu, node = cpu_and_node()
    real.create((cpu,), (node,), 32 * MIB)
    hog = subprocess.Popen(
        ["/bin/sh", "-c", "read go; exec head -c 100000000 /dev/zero | tail"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    real.move(hog.pid)
    assert hog.stdin is not None
    hog.stdin.write(b"go\n")
    hog.stdin.close()
    assert hog.wait(timeout=30) != 0
    real.kill()


@pytest.mark.host
def test_this_host_numbers_cgroups_anew(real: Cgroup) -> None:
    """A cgroup that is made again at the same path has other inode numbers in each hierarchy."""
    cpu, node = cpu_and_node()
    real.create((cpu,), (node,), None)
    first = real.state().inodes
    assert real.state().inodes == first
    real.remove()
    real.create((cpu,), (node,), None)
    second = real.state().inodes
    assert set(first) == set(second)
    assert all(first[label] != second[label] for label in first)


@pytest.mark.host
def test_killed_for_real_at_random_moments(real: Cgroup) -> None:
    """Killed while making and removing a cgroup, a process leaves what the next can finish."""
    cpu, node = cpu_and_node()
    for round_number in range(25):
        pid = os.fork()
        if pid == 0:
            while True:
                real.create((cpu,), (node,), 64 * MIB)
                real.remove()
        time.sleep(0.002 + 0.0007 * round_number)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        if round_number % 2:
            real.remove()
            assert not real.present()
        else:
            real.create((cpu,), (node,), 64 * MIB)
            assert real.state().lacks == ()


def test_a_read_only_tree_says_so(tmp_path: Path) -> None:
    """A write that the kernel forbids names the file, the cause and the cure."""
    from alloy_agent.host.cgroupfs import refused

    error = refused(OSError(30, "Read-only file system"), "writing '1' to /sys/fs/cgroup/x")
    assert isinstance(error, NotPermittedError)
    assert str(error).startswith("writing '1' to /sys/fs/cgroup/x: Read-only file system: mount")


def test_a_tree_that_is_mounted_over_is_not_seen(tmp_path: Path) -> None:
    """A container runtime mounts its own tree over the host's: what is hidden is not there."""
    (tmp_path / "self").mkdir()
    (tmp_path / "cgroups").write_text("cpuset\t1\t1\t1\nmemory\t2\t1\t1\n")
    lines = [
        "1 0 0:1 / /sys rw - sysfs sysfs rw",
        "2 1 0:2 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
        "3 2 0:3 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
        "4 2 0:4 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "5 1 0:5 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
        "6 5 0:3 /pod/c /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
    ]
    (tmp_path / "self/mountinfo").write_text("\n".join(lines) + "\n")
    (only,) = detect(tmp_path).hierarchies
    assert (only.label, only.root) == ("cpuset", "/pod/c")
    root_last = [*lines[:4], "9 0 8:1 / / rw - ext4 /dev/sda rw"]
    (tmp_path / "self/mountinfo").write_text("\n".join(root_last) + "\n")
    assert len(detect(tmp_path).hierarchies) == 2
