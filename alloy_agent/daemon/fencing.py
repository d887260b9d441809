"""The device fence of a tenant that `exec` starts: made before it enters, gone after it left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import detect
from alloy_agent.model import Access, Device, Partition, Value, Vendor

if TYPE_CHECKING:
    from alloy_agent.store import Binding


class Fenced(Value, frozen=True, kw_only=True):
    """How to be inside, with the fence to enter; `path` "" where there is none."""

    access: Access
    path: str = ""
    notes: tuple[str, ...] = ()


def fence(partition: Partition, device: Device, bindings: Iterable[Binding]) -> Fenced:
    """Make the fence of a partition's device nodes where the kernel can hold one.

    Raises:
        BackendError: The kernel refused it; nobody may enter then.
    """
    nodes = partition.access.device_nodes
    if not nodes or device.simulated or device.vendor is Vendor.CPU:
        return Fenced(access=partition.access)
    topology = detect()
    hierarchy = topology.of("devices")
    if hierarchy is None or hierarchy.version != 1:
        return Fenced(access=partition.access, notes=(devicefence.RUNTIMES_TASK,))
    path = devicefence.fence_path(partition.id, partition.generation)
    devicefence.sweep(topology, {path, *_kept(bindings)})
    procs = devicefence.raise_fence(topology, path, nodes)
    access = msgspec.structs.replace(
        partition.access, cgroup_procs=(*partition.access.cgroup_procs, procs)
    )
    return Fenced(access=access, path=path)


def sweep(bindings: Iterable[Binding]) -> int:
    """Remove the fences that nobody is inside of or about to enter; return how many went."""
    return devicefence.sweep(detect(), _kept(bindings))


def _kept(bindings: Iterable[Binding]) -> set[str]:
    return {devicefence.fence_path(b.partition, b.generation) for b in bindings}
