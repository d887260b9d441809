"""A small node with facts in which every check passes, to be broken one thing at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from alloy_agent.conformance.checks import NODE, Grant, Intent
from alloy_agent.model import (
    Access,
    Device,
    DeviceId,
    DeviceLayout,
    Fact,
    Layout,
    Link,
    Mode,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Scheme,
    Snapshot,
    TenantId,
    Tier,
    TierLimit,
    Vendor,
)

GIB = 1 << 30
PROCS = ("/sys/fs/cgroup/cpuset/alloy/a/cgroup.procs", "/sys/fs/cgroup/memory/alloy/a/cgroup.procs")

CPU = Device(
    id=DeviceId("cpu-node0"),
    vendor=Vendor.CPU,
    model="Test CPU",
    backend="cpu",
    scheme=Scheme.CORES,
    slices=4,
    slice_name="core",
    units=(1, 2, 3, 4),
    reserved_units=(0,),
    tier_limits=(TierLimit(way="cores", tier=Tier.ENFORCED, reason="caches are shared"),),
)
GPU = Device(
    id=DeviceId("GPU-1"),
    vendor=Vendor.NVIDIA,
    model="H100",
    backend="fake",
    scheme=Scheme.INSTANCES,
    slices=8,
    slice_name="memory slice",
    simulated=True,
    modes=(Mode(kind=ModeKind.MIG, current="on", available=("off", "on")),),
    links=(Link(peer="GPU-2", kind="nvlink"),),
    tier_limits=(TierLimit(way="mig", tier=Tier.HARD, reason="TLB and power are shared"),),
)
AMD = Device(
    id=DeviceId("amd-1"),
    vendor=Vendor.AMD,
    model="MI300X",
    backend="fake",
    scheme=Scheme.MODES,
    slices=8,
    slice_name="XCD",
    simulated=True,
    modes=(
        Mode(kind=ModeKind.COMPUTE, current="CPX"),
        Mode(kind=ModeKind.MEMORY, current="NPS4"),
    ),
    tier_limits=(TierLimit(way="cpx", tier=Tier.HARD, reason="power is shared"),),
)
NEURON = Device(
    id=DeviceId("neuron-1"),
    vendor=Vendor.NEURON,
    model="trn1",
    backend="fake",
    scheme=Scheme.CORES,
    slices=2,
    slice_name="core",
    simulated=True,
    tier_limits=(
        TierLimit(way="cores", tier=Tier.SOFT, reason="the device node is shared"),
        TierLimit(way="whole", tier=Tier.HARD, reason="a device of its own"),
    ),
)


def piece(device: Device, profile: str, start: int, size: int, **more: Any) -> Partition:
    """Return a managed partition of generation 1 that tenant `acme` has."""
    return Partition(
        id=PartitionId(f"{device.id}/{profile}@{start}"),
        device=device.id,
        profile=profile,
        placement=Placement(start=start, size=size),
        incarnation="one",
        generation=1,
        managed=True,
        tenant=TenantId("acme"),
        **more,
    )


CPU_PIECE = piece(
    CPU, "2c", 0, 2, units=(1, 2), memory_bytes=GIB, access=Access(cgroup_procs=PROCS)
)
GPU_PIECE = piece(
    GPU,
    "3g.40gb",
    0,
    4,
    uuid="MIG-1",
    memory_bytes=40 * GIB,
    access=Access(device_nodes=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap3")),
)
AMD_PIECE = piece(
    AMD, "CPX", 0, 1, memory_bytes=24 * GIB, access=Access(device_nodes=("/dev/dri/renderD128",))
)
NEURON_PIECE = piece(NEURON, "1c", 0, 1, units=(0,), access=Access(device_nodes=("/dev/neuron0",)))
PIECES = {p.device: p for p in (CPU_PIECE, GPU_PIECE, AMD_PIECE, NEURON_PIECE)}

SNAPSHOT = Snapshot(
    boot_id="5a1c5cbe-7d2f-4e0a-9d0f-0123456789ab",
    sequence=7,
    taken_at_s=100.0,
    taken_wall_s=1_800_000_000.0,
    devices=(CPU, GPU, AMD, NEURON),
    partitions=tuple(PIECES.values()),
)
INTENT = Intent(
    layout=Layout(
        name="test",
        devices=tuple(
            DeviceLayout(
                device=p.device,
                partitions=(
                    PartitionSpec(
                        device=p.device,
                        profile=p.profile,
                        size=p.placement.size,
                        placement=p.placement,
                        memory_bytes=p.memory_bytes,
                    ),
                ),
            )
            for p in PIECES.values()
        ),
    ),
    grants=tuple(
        Grant(
            partition=p.id,
            generation=1,
            tenant=TenantId("acme"),
            pid=10 if p is CPU_PIECE else None,
        )
        for p in PIECES.values()
    ),
)

_MEMBER = {
    "pid": 10,
    "comm": "train",
    "uid": 1000,
    "cpus": [1, 2],
    "lacks": [],
    "threads": [],
    "threads_outside": [],
}
_CGROUP = {
    "cpu.granted": [1, 2],
    "cgroup.cpus": [1, 2],
    "cgroup.cpus_effective": [1, 2],
    "cgroup.members": [_MEMBER],
    "cgroup.hierarchies": [
        {"label": "cpuset", "version": 1, "path": "/alloy/a", "present": True},
        {"label": "memory", "version": 1, "path": "/alloy/a", "present": True},
    ],
    "cgroup.memory_leaves": [
        {"path": "/alloy/a", "limit_bytes": GIB, "ceiling_bytes": GIB, "processes": 1}
    ],
    "cgroup.memory_used_bytes": GIB // 2,
    "partition.pids": [10],
}
_MIG = {
    "uuid": "MIG-1",
    "gpu_instance": 1,
    "instance_slices": 3,
    "compute_instances": 1,
    "compute_slices": 3,
}
_AMD = {
    "compute_mode": "CPX",
    "memory_mode": "NPS4",
    "partitions": 8,
    "expected_partitions": 8,
    "render_node": "renderD128",
    "memory_domains": 4,
    "isolation": True,
}


def _silicon(partition: Partition, own: list[str]) -> dict[str, Any]:
    return {
        "partition.pids": [20],
        "partition.own_nodes": own,
        "cgroup.device_fence": {
            "by": "device rules",
            "allowed": [*partition.access.device_nodes, "/dev/nvidiactl"],
        },
        "partition.memory": {
            "limit_bytes": partition.memory_bytes,
            "used_bytes": 1,
            "enforced_by": "device",
        },
    }


def _geometry(partition: Partition) -> list[dict[str, Any]]:
    place = partition.placement
    return [
        {
            "id": partition.id,
            "profile": partition.profile,
            "start": place.start,
            "size": place.size,
            "incarnation": partition.incarnation,
        }
    ]


def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {
        NODE: {
            "host.alive": [1, 10, 11],
            "host.cpus": [0, 1, 2, 3, 4],
            "host.pinned": [
                {"pid": 10, "comm": "train", "cpus": [1, 2], "partition": CPU_PIECE.id},
                {"pid": 11, "comm": "irqd", "cpus": [0], "partition": ""},
            ],
            "host.owners": [],
            "evidence.chain": {"records": 12, "problems": 0},
        },
        CPU_PIECE.id: dict(_CGROUP),
        GPU_PIECE.id: _silicon(GPU_PIECE, ["/dev/nvidia-caps/nvidia-cap3"])
        | {"mig.instance": _MIG},
        AMD_PIECE.id: _silicon(AMD_PIECE, ["/dev/dri/renderD128"]) | {"amd.partition": _AMD},
        NEURON_PIECE.id: _silicon(NEURON_PIECE, [])
        | {"neuron.cores": {"cores": [0], "lnc": "1", "whole_device": False}},
    }
    for partition in (GPU_PIECE, AMD_PIECE, NEURON_PIECE):
        table[partition.device] = {
            "device.geometry": _geometry(partition),
            "device.clients": [
                {"pid": 20, "comm": "train", "partition": partition.id, "granted": True}
            ],
        }
    table[GPU_PIECE.device] |= {"driver.version": "580.95.05", "driver.floor": "525.53"}
    return table


def facts(changes: dict[tuple[str, str], Any] | None = None) -> tuple[Fact, ...]:
    """Return facts in which everything is right, but for the changed ones."""
    changed = changes or {}
    return tuple(
        Fact(
            subject=subject,
            name=name,
            value=msgspec.to_builtins(changed.get((subject, name), value)),
            method=f"read of {name}",
            resolution="each audit",
            read_at_s=100.0,
        )
        for subject, values in _table().items()
        for name, value in values.items()
    )
