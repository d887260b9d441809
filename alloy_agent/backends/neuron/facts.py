"""The facts that the checks of a Neuron device need, each with how it was seen.

Names are those of all backends. What nobody can prove is absent with the reason: a process whose
cores only its variables tell is configured there, not seen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from alloy_agent.backends.neuron.board import Board, physical
from alloy_agent.backends.neuron.holders import Fence, Scan, device_fence
from alloy_agent.backends.neuron.listing import Listing
from alloy_agent.backends.neuron.monitor import MonitorHealth, Report
from alloy_agent.backends.neuron.occupancy import Occupant, is_granted, place_of
from alloy_agent.backends.neuron.tree import COUNTER_MAX, DeviceTree, read_attribute, whole_number
from alloy_agent.host.cgroupfs import CgroupTopology, detect
from alloy_agent.host.deviceprograms import METHOD, PROGRAM, DevicePrograms
from alloy_agent.model import Device, Fact, Json, Partition, Quality, Share, Value

DRIVER_FLOOR: Final = "2.26.5"  # fixes three memory-safety faults of ioctls; release notes
DESCRIPTORS: Final = "descriptors below /proc by device number"
RECORD: Final = "record of grants"
MONITOR: Final = "neuron-monitor"
LISTED: Final = "devices.list of the processes' cgroups"


class Look(Value, frozen=True, kw_only=True):
    """Everything that one look at a device showed."""

    board: Board
    tree: DeviceTree
    device: Device
    partitions: tuple[Partition, ...]
    scan: Scan
    report: Report | None
    there: tuple[Occupant, ...]
    nodes: dict[int, int]
    listing: Listing
    monitor: MonitorHealth
    now_s: float

    @property
    def lnc(self) -> int:
        """Physical cores in a logical one."""
        return max(1, self.board.cores // self.device.slices)

    def inside(self, partition: Partition) -> tuple[Occupant, ...]:
        """Return the processes that belong to a partition."""
        return tuple(
            one
            for one in self.there
            if (home := place_of(one, self.partitions)) is not None and home.id == partition.id
        )


class _Facts:
    def __init__(self, now_s: float, topology: CgroupTopology, programs: DevicePrograms) -> None:
        self.topology, self.programs = topology, programs
        self._now_s = now_s
        self.found: list[Fact] = []

    def add(
        self, subject: str, name: str, value: Json, method: str, *, resolution: str = ""
    ) -> None:
        self.found.append(
            Fact(
                subject=subject,
                name=name,
                value=value,
                method=method,
                resolution=resolution or "each look",
                read_at_s=self._now_s,
            )
        )

    def absent(
        self,
        subject: str,
        name: str,
        reason: str,
        quality: Quality = Quality.NOT_SUPPORTED,
        method: str = DESCRIPTORS,
    ) -> None:
        self.found.append(
            Fact(
                subject=subject,
                name=name,
                quality=quality,
                reason=reason,
                method=method,
                read_at_s=self._now_s,
            )
        )


def collect(look: Look, proc_root: str, programs: DevicePrograms | None = None) -> tuple[Fact, ...]:
    """Return the facts of one device and of its partitions."""
    facts = _Facts(look.now_s, detect(proc_root), programs or DevicePrograms())
    _of_device(facts, look)
    for partition in look.partitions:
        inside = _of_partition(facts, look, partition)
        _fence(facts, look, partition, inside)
    return tuple(facts.found)


# --- the device --------------------------------------------------------------------------------


def _of_device(facts: _Facts, look: Look) -> None:
    device = look.device.id
    geometry: list[Json] = [
        {
            "id": partition.id,
            "profile": partition.profile,
            "start": partition.placement.start,
            "size": partition.placement.size,
            "incarnation": partition.incarnation,
        }
        for partition in look.partitions
    ]
    facts.add(device, "device.geometry", geometry, RECORD)
    modes: dict[str, Json] = {
        mode.kind.value: {"current": mode.current, "pending": mode.pending}
        for mode in look.device.modes
    }
    facts.add(device, "device.modes", modes, RECORD)
    untold, quality = _untold(look)
    if untold:
        facts.absent(device, "device.clients", untold, quality)
    else:
        facts.add(device, "device.clients", [_client(look, one) for one in look.there], DESCRIPTORS)
    if look.device.driver:
        facts.add(device, "driver.version", look.device.driver, "module/neuron/version")
    else:
        facts.absent(device, "driver.version", "the module does not tell its version")
    facts.add(device, "driver.floor", DRIVER_FLOOR, "release notes of the driver")
    sources: dict[str, Json] = {
        "sysfs": list(look.board.problems),
        "neuron_ls": look.listing.problem,
        "neuron_monitor": look.monitor.problem,
        "telemetry": "ok" if look.report is not None else "telemetry-degraded",
    }
    facts.add(device, "neuron.sources", sources, "each source's own account")
    _strays(facts, look)


def _untold(look: Look) -> tuple[str, Quality]:
    """Return why nobody can tell who is on the device; "" when the list is whole."""
    if look.scan.unreadable:
        reason = f"descriptors of {look.scan.unreadable} processes are for root only"
        return reason, Quality.NOT_PERMITTED
    if look.board.rdev is None:
        return "the driver does not tell the node's number", Quality.NOT_SUPPORTED
    return "", Quality.VALUE


def _client(look: Look, one: Occupant) -> Json:
    place = place_of(one, look.partitions)
    cores = None if one.cores is None else physical(look.board, look.lnc, _legal(look, one.cores))
    shown: list[Json] = list(cores or ())
    return {
        "pid": one.holder.pid,
        "comm": one.holder.comm,
        "partition": "" if place is None else place.id,
        "granted": is_granted(one, place),
        "monitor": one.monitor,
        "cores": shown,
        "cores_from": one.source.value,
        "control_only": not one.holder.data and not one.holder.mapped,
    }


def _legal(look: Look, cores: Sequence[int]) -> list[int]:
    return [core for core in cores if core < look.device.slices]


def _strays(facts: _Facts, look: Look) -> None:
    """Add the granted-to-nobody cores on which memory is in use: somebody works there unseen."""
    granted = {core for p in look.partitions if p.share is Share.EXCLUSIVE for core in p.units}
    shared = any(p.share is not Share.EXCLUSIVE for p in look.partitions)
    used: list[Json] = []
    for core in range(look.board.cores):
        total = core_memory(look.tree, core, look.board.memory_bytes)
        if total and core not in granted and not shared:
            used.append({"core": core, "memory_bytes": total})
    facts.add(look.device.id, "neuron.strays", used, "neuron_coreN/stats/memory_usage/device_mem")


def core_memory(tree: DeviceTree, core: int, most: int | None) -> int | None:
    """Return the device memory in use by one physical core.

    None where it is not told, or is more than the device has: the value can be cleared while
    memory is in use, and then falls below zero.
    """
    path = f"{tree.core_folder(core)}/stats/memory_usage/device_mem/total"
    total = whole_number(read_attribute(path).text)
    return None if total is None or total > (most or COUNTER_MAX) else total


# --- a partition -------------------------------------------------------------------------------


def _of_partition(facts: _Facts, look: Look, partition: Partition) -> tuple[Occupant, ...]:
    inside = look.inside(partition)
    ident = partition.id
    facts.add(ident, "partition.exists", True, RECORD)
    processes: list[Json] = [_process(look, one) for one in inside]
    untold, quality = _untold(look)
    if untold:
        facts.absent(ident, "partition.processes", untold, quality)
    else:
        facts.add(ident, "partition.processes", processes, DESCRIPTORS)
    own: list[Json] = list(_own_nodes(look, partition))
    facts.add(ident, "partition.own_nodes", own, RECORD)
    _memory(facts, look, partition)
    _cores(facts, look, partition, inside)
    return inside


def _process(look: Look, one: Occupant) -> Json:
    told = look.report.of(one.holder.pid) if look.report is not None else None
    variables: dict[str, Json] = dict(one.holder.variables or {})
    return {
        "pid": one.holder.pid,
        "start_ticks": one.holder.start_ticks,
        "comm": one.holder.comm,
        "memory_bytes": None if told is None else told.device_memory_bytes,
        "configured": variables,
    }


def _own_nodes(look: Look, partition: Partition) -> tuple[str, ...]:
    """Return the node, if the partition has the whole device and nobody else has any of it."""
    alone = len(look.partitions) == 1 and partition.share is Share.EXCLUSIVE
    whole = partition.placement.size == look.device.slices
    return partition.access.device_nodes if alone and whole else ()


def _memory(facts: _Facts, look: Look, partition: Partition) -> None:
    used = [core_memory(look.tree, core, look.board.memory_bytes) for core in partition.units]
    known = [value for value in used if value is not None]
    if not used or len(known) < len(used):
        facts.absent(partition.id, "partition.memory", "the driver does not tell it of every core")
        return
    whole = partition.memory_bytes is not None and partition.share is Share.EXCLUSIVE
    value: Json = {
        "limit_bytes": partition.memory_bytes,
        "used_bytes": sum(known),
        "enforced_by": "device" if whole else "none",
    }
    facts.add(partition.id, "partition.memory", value, "neuron_coreN/stats/memory_usage/device_mem")


def _cores(facts: _Facts, look: Look, partition: Partition, inside: tuple[Occupant, ...]) -> None:
    """Add the cores that the tenant is on: granted ones, and any other that it is seen on."""
    problem = _unproven(look, partition, inside)
    place = partition.placement
    bound = set(range(place.start, place.stop))
    for one in inside:
        bound |= set(_legal(look, one.cores or ())) if one.proven else set()
    # A process that is over the edge of a run belongs to it by its tag, or by the cores it shares.
    for one in look.there:
        if one.proven and one.cores and bound & set(one.cores) and one not in inside:
            bound |= set(_legal(look, one.cores))
    units = physical(look.board, look.lnc, sorted(bound))
    if units is None:
        problem = (
            "the core order is not known: no table, or an UltraServer's node is not elected yet"
        )
    outside = bound != set(range(place.start, place.stop))
    if problem and not outside:
        facts.absent(partition.id, "neuron.cores", problem)
        return
    cores: list[Json] = [*sorted(units or ())]
    nodes: list[Json] = list(partition.access.device_nodes)
    value: Json = {
        "cores": cores,
        "lnc": _seen_lnc(look, inside),
        "whole_device": bool(_own_nodes(look, partition)),
        "device_nodes": nodes,
        "finding": "outside-allocation" if outside else "",
    }
    proven = any(one.proven for one in inside) or outside
    method = f"{RECORD} and {MONITOR}" if proven else f"{RECORD} and {DESCRIPTORS}"
    facts.add(partition.id, "neuron.cores", value, method, resolution="one period of the monitor")


def _unproven(look: Look, partition: Partition, inside: tuple[Occupant, ...]) -> str:
    """Return why the cores of the tenant's processes are not proven; "" when they are."""
    if look.scan.unreadable:
        return f"descriptors of {look.scan.unreadable} processes are for root only"
    if _own_nodes(look, partition):
        return ""  # the node is the proof: whoever holds it has only this device
    unknown = [one for one in look.there if not one.monitor and not one.proven]
    mine = [one for one in unknown if one in inside or one.cores is None]
    if not mine:
        return ""
    names = ", ".join(one.holder.named() for one in mine[:4])
    if all(one.source.value.startswith("environment") for one in mine):
        return f"only its environment, which it may change, tells where {names} works"
    return f"nothing tells on which cores {names} works"


def _seen_lnc(look: Look, inside: tuple[Occupant, ...]) -> str:
    """Return the logical core configuration in use: the processes', else the one that is set."""
    planned = str(look.lnc)
    configured = {one.holder.configured_lnc() or planned for one in inside}
    if len(configured) > 1:
        return "mixed: " + ", ".join(sorted(configured))
    return configured.pop() if configured else planned


def _fence(
    facts: _Facts,
    look: Look,
    partition: Partition,
    inside: tuple[Occupant, ...],
) -> None:
    """Add what device rules let the tenant's processes open; the widest of them counts."""
    name = "cgroup.device_fence"
    if not inside:
        facts.absent(partition.id, name, "no process of the tenant to look at")
        return
    fences = [
        device_fence(one.holder.cgroups, facts.topology, look.nodes, facts.programs)
        for one in inside
    ]
    unseen = next((fence for fence in fences if isinstance(fence, str)), None)
    rules = [fence for fence in fences if isinstance(fence, Fence)]
    if unseen is not None and not any(fence.everything for fence in rules):
        facts.absent(partition.id, name, unseen)
        return
    method = METHOD if any(PROGRAM in fence.by for fence in rules) else LISTED
    facts.add(partition.id, name, _widest(rules), method)


def _widest(rules: Sequence[Fence]) -> Json:
    if any(fence.everything for fence in rules):
        return {"by": "", "allowed": ["*"]}
    numbers = sorted({number for fence in rules for number in fence.allowed})
    allowed: list[Json] = [f"/dev/neuron{number}" for number in numbers]
    return {"by": rules[0].by, "allowed": allowed}
