"""The fence of device nodes: real v1 devices cgroups, real nodes, real processes."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from alloy_agent.conformance.auditor import collect_all
from alloy_agent.conformance.checks import judge
from alloy_agent.conformance.collect import HostView
from alloy_agent.errors import BackendError
from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import CgroupTopology, Hierarchy, detect
from alloy_agent.model import Access, Fact, Partition, PartitionReport, Quality, Snapshot
from tests.conformance.world import GPU, GPU_PIECE, facts, piece

OWN, OTHER = (1, 11), (10, 235)  # /dev/kmsg and /dev/autofs: on every kernel, and harmless to open
OPEN_IT = """
import errno, os, sys
for node in sys.argv[1:]:
    try:
        os.close(os.open(node, os.O_RDONLY | os.O_NONBLOCK))
        print("open")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


class Site:
    """Two device nodes, one partition's and its neighbour's, and the fence of the first."""

    def __init__(self, folder: Path) -> None:
        self.topology = detect()
        self.own, self.other = str(folder / "own"), str(folder / "other")
        for node, (major, minor) in ((self.own, OWN), (self.other, OTHER)):
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
        self.partition = f"GPU-{uuid4().hex[:12]}/1g@0"
        self.path = devicefence.fence_path(self.partition, 1)
        hierarchy = self.topology.of("devices")
        assert hierarchy is not None
        self.folder = Path(hierarchy.folder(self.path))

    def fence(self) -> str:
        """Raise the fence around the own node."""
        return devicefence.raise_fence(self.topology, self.path, [self.own])

    def inside(self, *argv: str, **more: object) -> subprocess.Popen[str]:
        """Start a command behind the fence."""
        enter = f'echo 0 > {self.folder}/cgroup.procs && exec "$@"'
        return subprocess.Popen(
            ["/bin/sh", "-c", enter, "sh", *argv], stdout=subprocess.PIPE, text=True
        )

    def tries(self, *nodes: str) -> list[str]:
        """Return what becomes of opening nodes behind the fence."""
        run = self.inside(sys.executable, "-I", "-S", "-c", OPEN_IT, *nodes)
        return run.communicate(timeout=60)[0].split()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give a site; its fence goes with it."""
    hierarchy = detect().of("devices")
    if os.geteuid() != 0 or hierarchy is None or hierarchy.version != 1:
        pytest.skip("needs root and the v1 devices controller")
    made = Site(tmp_path)
    try:
        for node in (made.own, made.other):
            os.close(os.open(node, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"device nodes cannot be opened here: {errno.errorcode[error.errno or 0]}")
    yield made
    if made.folder.exists():
        made.folder.rmdir()


@pytest.mark.host
def test_a_tenant_opens_its_own_node_and_no_other(site: Site) -> None:
    """Behind the fence the own node and everyone's open; the neighbour's is refused, by number."""
    procs = site.fence()
    assert procs == f"{site.folder}/cgroup.procs"
    renamed = f"{site.own}-renamed"
    os.mknod(renamed, 0o600 | stat.S_IFCHR, os.makedev(*OTHER))
    tried = site.tries(site.own, site.other, renamed, "/dev/null", "/dev/urandom")
    assert tried == ["open", "EPERM", "EPERM", "open", "open"]


@pytest.mark.host
def test_a_fence_cut_off_half_way_is_completed(site: Site) -> None:
    """After a crash at any write the next one makes the fence whole, and repeats harmlessly."""
    for writes in ([], ["deny a"], ["deny a", "allow c 1:11 rw", "allow c 10:235 rw"]):
        site.folder.parent.mkdir(exist_ok=True)
        site.folder.mkdir(exist_ok=True)
        for line in writes:
            kind, _, rule = line.partition(" ")
            (site.folder / f"devices.{kind}").write_text(rule)
        site.fence()
        assert site.tries(site.own, site.other) == ["open", "EPERM"]
        site.folder.rmdir()


@pytest.mark.host
def test_who_is_inside_is_not_disturbed_and_the_empty_fence_goes(site: Site) -> None:
    """Raising it again leaves a tenant's open nodes alone; sweep takes it when nobody is left."""
    site.fence()
    running = site.inside("sleep", "60")
    try:
        while str(running.pid) not in (site.folder / "cgroup.procs").read_text().split():
            assert running.poll() is None
        site.fence()
        devicefence.sweep(site.topology, _others(site), spare_s=0.0)
        assert site.folder.exists()
        assert running.poll() is None
    finally:
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=60)
    devicefence.sweep(site.topology, {*_others(site), site.path}, spare_s=0.0)
    assert site.folder.exists()
    devicefence.sweep(site.topology, _others(site), spare_s=3600.0)
    assert site.folder.exists()
    devicefence.sweep(site.topology, _others(site), spare_s=0.0)
    assert not site.folder.exists()


def _others(site: Site) -> set[str]:
    """Return the fences of whoever else tests on this host now."""
    return set(devicefence.inside(site.topology)) - {site.path}


def audited(site: Site) -> PartitionReport:
    """Return the report of the site's partition; its driver lists no process yet."""
    partition: Partition = piece(
        GPU,
        "3g.40gb",
        0,
        4,
        uuid="MIG-1",
        memory_bytes=GPU_PIECE.memory_bytes,
        access=Access(device_nodes=("/dev/null", site.own)),
    )
    partition = _named(partition, site)
    neighbour = _named(
        piece(GPU, "3g.40gb", 4, 4, access=Access(device_nodes=(site.other,))), site, "x"
    )
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(GPU,),
        partitions=(partition, neighbour),
    )
    shown = [
        Fact(subject=partition.id, name="partition.processes", value=[]),
        Fact(subject=partition.id, name="partition.own_nodes", value=[site.own]),
        Fact(
            subject=partition.id,
            name="cgroup.device_fence",
            quality=Quality.NOT_SUPPORTED,
            reason="no process is inside",
        ),
        *(f for f in facts() if f.subject == GPU.id),
    ]
    book = collect_all(snapshot, HostView(snapshot), shown)
    return judge(snapshot, book)[0][0]


def _named(partition: Partition, site: Site, suffix: str = "") -> Partition:
    import msgspec

    return msgspec.structs.replace(partition, id=site.partition + suffix, tenant=None)


def verdict(report: PartitionReport, check: str = "MIG-03") -> str:
    """Return the verdict of one check."""
    return next(j.verdict for j in report.judgements if j.check == check)


@pytest.mark.host
def test_the_fence_is_judged_as_soon_as_a_tenant_is_behind_it(site: Site) -> None:
    """Not applicable while empty; pass with a tenant; fail when the rules were widened."""
    site.fence()
    assert verdict(audited(site)) == "not_applicable"
    running = site.inside("sleep", "60")
    try:
        while str(running.pid) not in (site.folder / "cgroup.procs").read_text().split():
            assert running.poll() is None
        assert verdict(audited(site)) == "pass"
        (site.folder / "devices.allow").write_text(f"c {OTHER[0]}:{OTHER[1]} rw")
        widened = audited(site)
        assert verdict(widened) == "fail"
        assert site.other in next(j.observed for j in widened.judgements if j.check == "MIG-03")
    finally:
        running.kill()
        running.communicate(timeout=60)


@pytest.mark.host
def test_a_neighbours_node_that_was_open_before_is_seen(site: Site) -> None:
    """A descriptor that a tenant brought along is no fence's matter, and the check fails."""
    site.fence()
    held = os.open(site.other, os.O_RDONLY | os.O_NONBLOCK)
    enter = f"echo 0 > {site.folder}/cgroup.procs && exec sleep 60"
    running = subprocess.Popen(["/bin/sh", "-c", enter], pass_fds=(held,))
    try:
        while str(running.pid) not in (site.folder / "cgroup.procs").read_text().split():
            assert running.poll() is None
        assert verdict(audited(site)) == "fail"
    finally:
        os.close(held)
        running.kill()
        running.wait(60)


def test_a_host_without_the_v1_controller_says_whose_job_the_fence_is() -> None:
    """On v2 alone nothing is made, and the error names the container runtime."""
    unified = Hierarchy(
        version=2, mount="/sys/fs/cgroup", root="/", controllers=("cpuset",), label=""
    )
    topology = CgroupTopology(mode="v2", hierarchies=(unified,))
    with pytest.raises(BackendError, match="container runtime's job"):
        devicefence.raise_fence(topology, "alloy-tenants/x", [])
    assert devicefence.sweep(topology, ()) == 0
    assert devicefence.inside(topology) == {}


def test_rules_are_read_as_the_kernel_writes_them() -> None:
    """Block devices and mknod alone count for nothing; a wildcard is everything."""
    assert devicefence.parse_rules("a *:* rwm").everything
    assert devicefence.parse_rules("c *:* rw").everything
    shown = devicefence.parse_rules("c *:* m\nb 8:0 rw\nc 1:3 rwm\nc 136:* rw\nnonsense")
    assert shown == devicefence.Rules(numbers=frozenset({"1:3", "136:*"}))
    assert devicefence.named(shown, ["/dev/null"]) == ()
    unknown = devicefence.parse_rules("c 1:3 rw\nc 195:7 rw\nc 510:* rw")
    assert devicefence.named(unknown, []) == ("/dev/char/195:7", "/dev/char/510:*")


def test_each_partition_and_generation_has_a_fence_of_its_own() -> None:
    """Names differ where ids or generations do, and stay within one directory."""
    names = {
        devicefence.fence_path(ident, generation)
        for ident in ("a/b@0", "a-b@0", "a/b@1", "../../x", "x" * 5000)
        for generation in (1, 2)
    }
    assert len(names) == 10
    assert all(name.count("/") == 1 and len(name) < 200 for name in names)
