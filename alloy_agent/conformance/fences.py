"""The device fence as the host shows it: judged as soon as a tenant is behind it.

A driver lists a process when it computes. A tenant that `exec` put into a fence of its own is seen
at once, by its cgroup, so its fence need not wait for the driver. What both see counts together,
and the widest rule is the fence.

Rules that stay true in here:

* The host's view adds processes and openings; it never takes one away that a backend reported.
* A backend that could not list processes, or not read a fence, is not overruled.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from alloy_agent.conformance.checks.base import FactBook
from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import CgroupTopology
from alloy_agent.host.processes import ProcessInfo
from alloy_agent.model import Fact, Json, Partition, PartitionId, Quality, Snapshot, Value

PIDS: Final = "partition.pids"
FENCE: Final = "cgroup.device_fence"
# the same as the backend alone told them, so that they can be combined anew
TOLD: Final = {PIDS: "driver.pids", FENCE: "driver.device_fence"}


class Tenants(Value, frozen=True, kw_only=True):
    """Who is behind the fence of one partition, and what they may open."""

    pids: tuple[int, ...]
    by: str
    allowed: tuple[str, ...]


def as_told(facts: Iterable[Fact]) -> list[Fact]:
    """Return a backend's facts under the names that keep them as they were told."""
    return [msgspec.structs.replace(f, name=TOLD[f.name]) for f in facts if f.name in TOLD]


def partition_of(
    process: ProcessInfo, fences: Mapping[str, PartitionId], topology: CgroupTopology
) -> PartitionId | None:
    """Return the partition behind whose fence a process is."""
    path = process.cgroups.get("devices", "")
    hierarchy = topology.of("devices") if devicefence.TOP in path else None
    if hierarchy is None:
        return None
    top = hierarchy.visible(devicefence.TOP)
    if not path.startswith(f"{top}/"):
        return None
    return fences.get(f"{devicefence.TOP}/{path.removeprefix(f'{top}/').partition('/')[0]}")


def fences_of(snapshot: Snapshot) -> dict[str, PartitionId]:
    """Return which fence belongs to which partition."""
    return {
        devicefence.fence_path(p.id, p.generation): p.id
        for p in snapshot.partitions
        if p.access.device_nodes
    }


def tenants_of(
    partition: Partition,
    pids: Iterable[int],
    snapshot: Snapshot,
    topology: CgroupTopology,
    proc_root: str = "/proc",
) -> Tenants:
    """Return what the processes behind a partition's fence may open."""
    inside = tuple(sorted(pids))
    hierarchy = topology.of("devices")
    path = devicefence.fence_path(partition.id, partition.generation)
    rules = None if hierarchy is None else devicefence.read_rules(hierarchy, path)
    nodes = sorted({n for p in snapshot.partitions for n in p.access.device_nodes})
    if hierarchy is None or rules is None or rules.everything:
        return Tenants(pids=inside, by="", allowed=("*",))
    allowed = set(devicefence.named(rules, nodes)) | _open(inside, nodes, proc_root)
    by = f"devices cgroup {hierarchy.visible(path)}"
    return Tenants(pids=inside, by=by, allowed=tuple(sorted(allowed)))


def _open(pids: Iterable[int], nodes: Iterable[str], proc_root: str) -> set[str]:
    """Return the nodes that processes have open already: what is open is not refused any more."""
    numbers = {devicefence.number_of(node): node for node in nodes}
    found = set()
    for pid in pids:
        folder = f"{proc_root}/{pid}/fd"
        try:
            names = os.listdir(folder)  # noqa: PTH208 - for each process
        except OSError:
            continue
        for name in names:
            try:
                info = os.stat(f"{folder}/{name}")  # noqa: PTH116
            except OSError:
                continue
            if stat.S_ISCHR(info.st_mode):
                number = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
                found |= {numbers[number]} if number in numbers else set()
    return found


def combined(book: FactBook, partition: PartitionId, tenants: Tenants | None) -> list[Fact]:
    """Return processes and fence of a partition from what its backend and the host show."""
    pids, fence = (book.find(partition, TOLD[name]) for name in (PIDS, FENCE))
    found = []
    listed = _numbers(pids)
    if pids is not None and listed is not None:
        value: Json = [*sorted({*listed, *(tenants.pids if tenants else ())})]
        found.append(msgspec.structs.replace(pids, name=PIDS, value=value))
    if fence is None:
        return found
    widest = msgspec.structs.replace(fence, name=FENCE)
    if tenants is not None:
        if fence.quality is Quality.VALUE:
            widest = _wider(widest, tenants)
        elif listed == []:  # the driver has seen nobody yet, so the host's word is the only one
            widest = Fact(
                subject=partition,
                name=FENCE,
                value=msgspec.to_builtins({"by": tenants.by, "allowed": tenants.allowed}),
                method="devices.list of the tenants' cgroup; their open descriptors",
                resolution="read at the time of the audit",
                read_at_s=fence.read_at_s,
            )
    return [*found, widest]


def _wider(fence: Fact, tenants: Tenants) -> Fact:
    value = fence.value if isinstance(fence.value, dict) else {}
    by, allowed = value.get("by"), value.get("allowed")
    if not isinstance(by, str) or not isinstance(allowed, list):
        return fence  # the check says that it makes no sense
    held = "; ".join(dict.fromkeys((by, tenants.by))) if by and tenants.by else ""
    nodes: list[Json] = [*sorted({*map(str, allowed), *tenants.allowed})]
    return msgspec.structs.replace(fence, value={"by": held, "allowed": nodes})


def _numbers(fact: Fact | None) -> list[int] | None:
    if fact is None or fact.quality is not Quality.VALUE or not isinstance(fact.value, list):
        return None
    return [pid for pid in fact.value if isinstance(pid, int)]
