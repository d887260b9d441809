"""What a claim's containers have against its file: compared from outside, judged as CDI-01."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.conformance.checks import judge
from alloy_agent.host.cgroupfs import detect
from alloy_agent.host.processes import ProcessInfo, iter_processes
from alloy_agent.kubernetes import cdi, containers
from alloy_agent.kubernetes.attribution import of_claims
from alloy_agent.kubernetes.cdi import CdiDevice, CdiDirectory
from alloy_agent.kubernetes.containers import Granted, Seen, claim_variable, compare, facts_of
from alloy_agent.model import (
    Access,
    Device,
    DeviceId,
    Judgement,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    Snapshot,
    TenantId,
    Tier,
    TierLimit,
    Vendor,
    Verdict,
)
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord
from tests.kubernetes.test_faults import PODMAN, runtime

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")
OURS = frozenset({"c 240:1", "c 240:2"})
GRANTED = Granted(
    nodes={"/dev/piece-1": "c 240:1"},
    env={"ALLOY_CLAIM_UID": ("u1", "u2"), "PIECE": ("1",)},
    mounts=("/opt/driver",),
)
EXACT = Seen(
    pid=7,
    container="ab" * 32,
    pod_uid="",
    env={"ALLOY_CLAIM_UID": "u2", "PIECE": "1", "HOME": "/"},
    nodes={
        "/dev/piece-1": "c 240:1",
        "/dev/null": "c 1:3",
        "/dev/pts/0": "c 136:0",
        "/dev/console": "c 5:1",
    },
    mounts=("/", "/opt/driver"),
)


def seen(**change: Any) -> Seen:
    return msgspec.structs.replace(EXACT, **change)


def test_exactly_the_grant_is_neither_more_nor_less() -> None:
    """What every container has counts for nothing; of two claims' variables the last one stands."""
    fact = compare(EXACT, GRANTED, OURS)
    assert (fact.more, fact.less, fact.others) == ((), (), ())


@pytest.mark.parametrize(
    ("change", "more", "less"),
    [
        ({"nodes": {**EXACT.nodes, "/dev/x": "c 240:2"}}, "/dev/x (c 240:2)", ""),
        ({"nodes": {**EXACT.nodes, "/dev/disk": "b 240:1"}}, "", ""),
        ({"nodes": {"/dev/null": "c 1:3"}}, "", "/dev/piece-1 (c 240:1)"),
        (
            {"nodes": {"/dev/piece-1": "c 240:2"}},
            "/dev/piece-1 (c 240:2)",
            "/dev/piece-1 (c 240:1)",
        ),
        ({"env": {"ALLOY_CLAIM_UID": "u1"}}, "", "variable PIECE"),
        ({"env": {"ALLOY_CLAIM_UID": "u1", "PIECE": "2"}}, "", "variable PIECE"),
        ({"mounts": ("/",)}, "", "mount /opt/driver"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], more: str, less: str) -> None:
    """A node too many or too few, a node that is another one, a variable, a mount."""
    fact = compare(seen(**change), GRANTED, OURS)
    assert ("".join(fact.more), "".join(fact.less)) == (more, less)


def test_nodes_of_other_drivers_are_told_and_not_judged() -> None:
    """A network card's node is beside our grant, and none of our business."""
    fact = compare(
        seen(nodes={**EXACT.nodes, "/dev/infiniband/uverbs0": "c 231:192"}), GRANTED, OURS
    )
    assert fact.others == ("/dev/infiniband/uverbs0 (c 231:192)",)
    assert not fact.more


def test_device_rules_that_allow_more_are_more() -> None:
    """A container that may open a neighbour's node has it, with or without a path for it."""
    fact = compare(EXACT, GRANTED, OURS, frozenset(OURS))
    assert fact.more == ("device rules for c 240:2",)
    assert compare(EXACT, GRANTED, OURS, frozenset({"c 240:1"})).more == ()


def test_a_node_that_the_host_lacks_is_less() -> None:
    """The file grants a node that no longer exists."""
    spec = cdi.spec_of(
        "gpu.alloy.dev", [CdiDevice(name="gone", access=Access(device_nodes=("/dev/no-such",)))], {}
    )
    fact = compare(EXACT, containers.granted_by([spec]), OURS)
    assert fact.less == ("/dev/no-such (not on the host)",)


@given(st.binary(max_size=300))
def test_any_variables_are_read(raw: bytes) -> None:
    """Variables are the tenant's: any bytes."""
    assert all(isinstance(k, str) for k in containers._variables(raw))


def test_the_first_process_of_each_container_is_looked_at() -> None:
    """Neither a child in it, nor a process that a runtime put in later, nor one outside of any."""
    one, two = "a" * 64, "b" * 64

    def process(pid: int, ppid: int, path: str) -> ProcessInfo:
        return ProcessInfo(
            pid=pid,
            start_ticks=pid,
            ppid=ppid,
            comm="x",
            uid=0,
            state="S",
            kernel_thread=False,
            cgroups={"memory": path},
            cpus_allowed=(0,),
            last_cpu=0,
            cpu_ticks=0,
            thread_count=1,
        )

    found = containers.containers_of(
        [
            process(9, 1, f"/docker/{one}"),
            process(5, 1, f"/docker/{one}"),
            process(6, 5, f"/docker/{one}"),
            process(7, 1, f"/libpod-{two}.scope"),
            process(8, 1, "/system.slice/x.service"),
        ]
    )
    assert [(p.pid, container) for p, container, _ in found] == [(5, one), (7, two)]


def _process(pid: int) -> ProcessInfo:
    return ProcessInfo(
        pid=pid,
        start_ticks=pid,
        ppid=1,
        comm="x",
        uid=0,
        state="S",
        kernel_thread=False,
        cgroups={},
        cpus_allowed=(0,),
        last_cpu=0,
        cpu_ticks=0,
        thread_count=1,
    )


@pytest.mark.parametrize("deep", [False, True], ids=["in one folder", "in folders of folders"])
def test_a_full_dev_is_not_walked_to_its_end(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a tenant puts there counts, of any kind; that there was more is said."""
    monkeypatch.setattr(containers, "ENTRIES_MAX", 50)
    place = tmp_path / "7/root/dev"
    place.mkdir(parents=True)
    for number in range(50):
        if deep:
            place = place / "d"
            place.mkdir()
        else:
            (place / f"file-{number}").touch()
    looked: list[str] = []
    entries = containers._entries

    def counted(root: str) -> Iterator[tuple[str, os.stat_result]]:
        for path, info in entries(root):
            looked.append(path)
            yield path, info

    monkeypatch.setattr(containers, "_entries", counted)
    assert (
        "/dev beyond 50 entries" not in containers.look(_process(7), "c", "", str(tmp_path)).unread
    )
    for number in range(20):
        (place / f"more-{number}").touch()
    looked.clear()
    assert "/dev beyond 50 entries" in containers.look(_process(7), "c", "", str(tmp_path)).unread
    assert len(looked) == 51


@needs_root
def test_a_node_in_a_deep_folder_is_found(tmp_path: Path) -> None:
    """No depth hides a node; what is in the container's shared memory is no device."""
    place = tmp_path / "7/root/dev"
    for folder in ("/".join("abcdefgh"), "shm"):
        (place / folder).mkdir(parents=True)
        os.mknod(place / folder / "node", 0o600 | stat.S_IFCHR, os.makedev(240, 9))
    found = containers.look(_process(7), "c", "", str(tmp_path)).nodes
    assert found == {"/dev/a/b/c/d/e/f/g/h/node": "c 240:9"}


# --- a real container ----------------------------------------------------------------------------


class Place:
    """A claim on one of two device nodes, its file, and a runtime that reads it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uid, self.pod = str(uuid.uuid4()), str(uuid.uuid4())
        self.vendor = "test.alloy.dev"
        self.folder = CdiDirectory(Path("/var/run/cdi"), self.vendor)
        self.nodes = [Path(f"/dev/alloy-{self.uid[:8]}-{n}") for n in (1, 2)]
        number = int(self.uid[:4], 16) * 4  # 240 to 254 are for local use: devices.txt
        for n, node in enumerate(self.nodes):
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(240, number + n))
        self.access = Access(device_nodes=(str(self.nodes[0]),), environment={"ALLOY_PIECE": "one"})
        self.device = CdiDevice(name=cdi.device_name(self.uid, "piece"), access=self.access)
        extra = {"ALLOY_CLAIM_UID": self.uid, claim_variable(self.uid): "1"}
        self.folder.write(self.uid, cdi.spec_of(self.vendor, [self.device], extra))
        self.rootfs = root / "rootfs"
        for name in ("bin", "dev", "proc", "sys", "tmp", "etc", "run"):
            (self.rootfs / name).mkdir(parents=True)
        shutil.copy(str(shutil.which("busybox")), self.rootfs / "bin" / "sh")

    def close(self) -> None:
        self.folder.remove(self.uid)
        tops = [Path(h.folder(f"alloy-test-{self.uid[:8]}")) for h in detect().hierarchies]
        until_s = time.monotonic() + 60.0  # the container's monitor ends after the container
        while any(top.is_dir() for top in tops) and time.monotonic() < until_s:
            for path in [p for top in tops for p in (*sorted(top.rglob("*/"), reverse=True), top)]:
                with contextlib.suppress(OSError):
                    path.rmdir()
            time.sleep(0.02)
        for node in self.nodes:
            node.unlink()

    @contextlib.contextmanager
    def container(self, *options: str, pod: str = "") -> Iterator[None]:
        """Run a container of a pod, ours where none is named, that waits until it is looked at."""
        group = f"/alloy-test-{self.uid[:8]}/pod{pod or self.pod}"
        store = ("--root", str(self.root / "store"), "--runroot", str(self.root / "run"))
        driver = ("--storage-driver", "vfs", "--cgroup-manager", "cgroupfs")
        process = subprocess.Popen(
            [
                *(str(PODMAN), *store, *driver, "--runtime", runtime(self.root)),
                *("run", "--rm", "--interactive", "--network", "none", *options),
                *("--cgroup-parent", group),
                *("--rootfs", str(self.rootfs), "/bin/sh", "-c", "echo up; read line"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "up\n":
                words = process.communicate(timeout=60)[1].strip()[-300:]
                assert "unresolvable" not in words, words
                pytest.skip(f"podman cannot run a container here: {words}")
            yield
        finally:
            process.communicate("\n", timeout=60)

    def judged(self) -> Judgement:
        """Return what CDI-01 says of the claim's partition now."""
        partition, device = PartitionId("GPU-1/half@0"), DeviceId("GPU-1")
        place = Placement(start=0, size=1)
        piece = ClaimPiece(
            request="r", pool="p", name="piece", device=device, profile="half", placement=place,
            partition=partition,
        )  # fmt: skip
        record = ClaimRecord(
            uid=self.uid, namespace="team", name="c", phase=ClaimPhase.PREPARED, pieces=(piece,),
            pods=(self.pod,),
        )  # fmt: skip
        other = Access(device_nodes=(str(self.nodes[1]),))
        mine = Partition(
            id=partition, device=device, profile="half", placement=place, incarnation="i",
            generation=1, access=self.access, tenant=TenantId("k8s/team/c"),
            occupants=of_claims([record], (), self.vendor)[partition],
        )  # fmt: skip
        theirs = msgspec.structs.replace(
            mine, id=PartitionId("GPU-1/half@1"), placement=Placement(start=1, size=1),
            access=other, occupants=(), tenant=None,
        )  # fmt: skip
        snapshot = Snapshot(
            boot_id="b", sequence=1, taken_at_s=1.0, taken_wall_s=1.0, devices=(_device(device),),
            partitions=(mine, theirs),
        )  # fmt: skip
        processes = tuple(one for one in iter_processes() if not one.kernel_thread)
        facts = facts_of(snapshot, [record], self.folder, processes, detect())
        reports, _ = judge(snapshot, facts)
        (found,) = [j for j in reports[0].judgements if j.check == "CDI-01"]
        return found


def _device(ident: DeviceId) -> Device:
    return Device(
        id=ident,
        vendor=Vendor.NVIDIA,
        backend="nvidia",
        index=0,
        model="test",
        slices=2,
        slice_name="half",
        scheme=Scheme.INSTANCES,
        tier_limits=(TierLimit(way="mig", tier=Tier.HARD, reason=""),),
    )


@pytest.fixture
def place() -> Iterator[Place]:
    if shutil.which("busybox") is None:
        pytest.skip("no static busybox to put into a container")
    with tempfile.TemporaryDirectory(prefix="alloy-c-") as folder:
        made = Place(Path(folder))
        try:
            yield made
        finally:
            made.close()


needs_podman = pytest.mark.skipif(
    PODMAN is None, reason="no container runtime that reads CDI is on the PATH"
)


@pytest.mark.host
@needs_podman
def test_a_container_with_its_claim_passes(place: Place) -> None:
    """Podman resolves the file: the container has exactly what it grants."""
    assert place.judged().verdict is Verdict.NOT_APPLICABLE
    with place.container("--device", cdi.qualified(place.vendor, place.device.name)):
        judged = place.judged()
        assert judged.verdict is Verdict.PASS, judged
        assert "1 container" in judged.observed


@pytest.mark.host
@needs_podman
def test_a_node_beside_the_claim_fails(place: Place) -> None:
    """A neighbour's node that somebody added by hand is found and named."""
    claim = ("--device", cdi.qualified(place.vendor, place.device.name))
    with place.container(*claim, "--device", str(place.nodes[1])):
        judged = place.judged()
        assert judged.verdict is Verdict.FAIL, judged
        assert str(place.nodes[1]) in judged.observed


@pytest.mark.host
@needs_podman
def test_a_claim_without_its_node_fails(place: Place) -> None:
    """The container says that it has the claim, and its runtime has given it no node."""
    variables = (
        f"ALLOY_CLAIM_UID={place.uid}",
        f"{claim_variable(place.uid)}=1",
        "ALLOY_PIECE=one",
    )
    with place.container(*(word for one in variables for word in ("--env", one))):
        judged = place.judged()
        assert judged.verdict is Verdict.FAIL, judged
        assert f"lacks {place.nodes[0]}" in judged.observed


@pytest.mark.host
@needs_podman
def test_a_claims_node_without_the_claim_fails(place: Place) -> None:
    """A container that got the node by hand has it, though no claim says so."""
    with place.container("--device", str(place.nodes[0])):
        judged = place.judged()
        assert judged.verdict is Verdict.FAIL, judged
        assert f"has {place.nodes[0]}" in judged.observed


@pytest.mark.host
@needs_podman
def test_a_claim_that_is_another_pods_is_not_had(place: Place) -> None:
    """All that the claim's file gives, in a pod for which it is not reserved, is beside the claim.

    The variable alone, which anyone can set, is neither a fault nor a container of the claim.
    """
    stranger = str(uuid.uuid4())
    with place.container("--device", cdi.qualified(place.vendor, place.device.name), pod=stranger):
        judged = place.judged()
        assert judged.verdict is Verdict.FAIL, judged
        assert f"has {place.nodes[0]}" in judged.observed
    with place.container("--env", f"{claim_variable(place.uid)}=1", pod=stranger):
        assert place.judged().verdict is Verdict.NOT_APPLICABLE


@pytest.mark.host
@needs_podman
def test_a_file_that_is_gone_is_unknown(place: Place) -> None:
    """Without the file there is nothing to compare with, which is no pass."""
    with place.container("--device", cdi.qualified(place.vendor, place.device.name)):
        place.folder.remove(place.uid)
        assert place.judged().verdict is Verdict.UNKNOWN
