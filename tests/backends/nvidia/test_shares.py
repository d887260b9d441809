"""Shares of a GPU: cgroups, memory limits of the driver and of the kernel, and who is inside."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from alloy_agent.backends.nvidia import NvidiaBackend
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import judge
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    DeviceId,
    Fact,
    PartitionSpec,
    Placement,
    Share,
    Snapshot,
    Tier,
)
from tests.backends.nvidia.test_backend import fact_of, hosted
from tests.fakes.dmem import DmemTree
from tests.fakes.nvml.host import NvidiaHost
from tests.fakes.shared import host_facts


def share(device: DeviceId, memory_bytes: int | None = None) -> Create:
    """Return the step that makes a production share."""
    spec = PartitionSpec(
        device=device,
        profile="production-0",
        size=8,
        placement=Placement(start=0, size=8),
        share=Share.PRODUCTION,
        memory_bytes=memory_bytes,
    )
    return Create(device=device, spec=spec)


def with_v2_tree(host: NvidiaHost) -> Path:
    """Give the host a cgroup v2 tree; returns it."""
    tree = host.root / "sys/fs/cgroup"
    tree.mkdir(parents=True)
    (tree / "cgroup.controllers").write_text("cpu memory\n")
    return tree


def test_a_capped_share_is_enforced_by_the_driver(tmp_path: Path) -> None:
    """The limit is set on the share's cgroup, read back, changed in place, and taken back."""
    host, ident = hosted(tmp_path, memory_limits=True)
    tree = with_v2_tree(host)
    host.backend.apply(share(ident, 8 << 30))
    (piece,) = host.backend.observe(ident).partitions
    (procs,) = piece.access.cgroup_procs
    assert Path(procs).parent.is_relative_to(tree)
    value = fact_of(host, ident, piece.id, "partition.memory").value
    assert (value["limit_bytes"], value["enforced_by"]) == (8 << 30, "driver")
    host.backend.apply(Configure(device=ident, partition=piece, memory_bytes=4 << 30))
    assert host.backend.observe(ident).partitions[0].memory_bytes == 4 << 30
    assert [hard for _, hard in host.library.memory_limits.values()] == [4 << 30]
    (key,) = host.library.memory_limits
    host.library.memory_limits[key] = (0, 9 << 30)
    (altered,) = host.backend.observe(ident).partitions
    assert f"has {9 << 30} bytes as memory cap" in altered.altered
    host.backend.apply(Configure(device=ident, partition=altered, memory_bytes=4 << 30))
    assert host.backend.observe(ident).partitions[0].altered == ""
    with pytest.raises(DeviceBusyError, match="shared"):
        host.mig(ident)
    host.backend.apply(Destroy(device=ident, partition=piece))
    assert host.backend.observe(ident).partitions[0].profile == "whole"
    assert not Path(procs).parent.exists()


def test_a_cap_that_nobody_enforces_is_refused(tmp_path: Path) -> None:
    """Without memory limits in the driver, or without a v2 tree, a capped share is not made."""
    host, ident = hosted(tmp_path)
    with pytest.raises(UnsupportedError, match="v2 tree"):
        host.backend.apply(share(ident, 8 << 30))
    with_v2_tree(host)
    with pytest.raises(UnsupportedError):
        host.backend.apply(share(ident, 8 << 30))
    assert host.backend.observe(ident).partitions[0].profile == "whole"
    host.backend.apply(share(ident))
    assert host.backend.observe(ident).partitions[0].share is Share.PRODUCTION


def test_without_the_drivers_own_limits_the_kernel_caps_a_share(tmp_path: Path) -> None:
    """A driver that charges memory to cgroups is capped by dmem; the tier follows the cap."""
    host, ident = hosted(tmp_path)
    bus = host.backend.observe(ident).device.bus
    region = f"nvidia/{bus}/vidmem"
    kernel = DmemTree(host.root / "sys/fs/cgroup", {region: 80 << 30})
    host.backend = NvidiaBackend(host.backend.nvml, host.root, kernel)
    ident = host.backend.discover()[0]
    host.backend.apply(share(ident, 8 << 30))
    observed = host.backend.observe(ident)
    (piece,) = observed.partitions
    group = Path(piece.access.cgroup_procs[0]).parent
    assert f"{region} {8 << 30}" in (group / "dmem.max").read_text()
    kernel.enter(group, 21)
    (whole,) = observed.partitions
    host.run(whole, pid=21)
    assert tier_of_share(host, ident) is Tier.ENFORCED
    kernel.write(str(group / "dmem.max"), f"{region} max")
    assert tier_of_share(host, ident) is Tier.ADVISORY
    kernel.write(str(group / "dmem.max"), f"{region} {8 << 30}")
    host.run(whole, pid=22)
    assert tier_of_share(host, ident) is not Tier.ENFORCED


def tier_of_share(host: NvidiaHost, ident: DeviceId) -> Tier:
    """Return the tier of the only share, from what the backend shows now."""
    seen = host.backend.observe(ident)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(msgspec.structs.replace(seen.device, simulated=False),),
        partitions=seen.partitions,
    )
    found = host.backend.facts(ident)
    alone = Fact(subject="node", name="host.owners", value=[], method="this test")
    told = (*pids_of(found), *found, alone, *host_facts(seen.partitions[0]))
    return judge(snapshot, told)[0][0].tier


def test_processes_of_a_share_are_told_by_its_cgroup(tmp_path: Path) -> None:
    """Who is in the share's cgroup is in the share; anyone else on the GPU is in none."""
    host, ident = hosted(tmp_path)
    with_v2_tree(host)
    (whole,) = host.backend.observe(ident).partitions
    host.backend.apply(share(ident))
    (piece,) = host.backend.observe(ident).partitions
    procs = Path(piece.access.cgroup_procs[0])
    procs.write_text("21\n")
    host.run(whole, pid=21)
    host.run(whole, pid=22)
    clients = fact_of(host, ident, ident, "device.clients").value
    places = {client["pid"]: client["partition"] for client in clients}
    assert places == {21: piece.id, 22: ""}
    with pytest.raises(DeviceBusyError, match="21"):
        host.backend.apply(Destroy(device=ident, partition=piece))


def test_a_damaged_list_of_shares_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is an error with its cure, never an empty list."""
    host, ident = hosted(tmp_path)
    host.backend.apply(share(ident))
    (host.root / "run/alloy/nvidia-shares.json").write_text("{")
    with pytest.raises(BackendError, match=r"nvidia-shares\.json.*remove"):
        host.backend.observe(ident)
