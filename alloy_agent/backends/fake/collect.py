"""The facts that the checks of a simulated device need; names as in the package's table."""

from __future__ import annotations

from typing import Final, Protocol

from alloy_agent.model import (
    Create,
    Device,
    DeviceFault,
    Fact,
    Json,
    Partition,
    Quality,
    SetMode,
    Share,
    Vendor,
)
from alloy_agent.silicon.boards import BOARDS
from alloy_agent.silicon.boards.amd import memory_partitions_of, partitions_of
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.neuron import physical_cores
from alloy_agent.silicon.state import Client

METHOD: Final = "simulated"
FENCE: Final = "simulated device rules"


class Half(Protocol):
    """One vendor's half of the backend."""

    vendor: Vendor

    def device(self, device_id: str) -> Device:
        """Return the device as it is now."""
        ...

    def partitions(self, device: Device) -> tuple[Partition, ...]:
        """Return its partitions."""
        ...

    def faults(self, device: Device, partitions: tuple[Partition, ...]) -> list[DeviceFault]:
        """Return what is wrong with it."""
        ...

    def set_mode(self, step: SetMode) -> None:
        """Switch a mode."""
        ...

    def create(self, step: Create) -> None:
        """Make a partition."""
        ...

    def destroy(self, partition: Partition) -> None:
        """Remove a partition."""
        ...

    def partition_of(self, client: Client, partitions: tuple[Partition, ...]) -> Partition | None:
        """Return where a process works."""
        ...

    def own_nodes(self, partition: Partition) -> tuple[str, ...]:
        """Return the device nodes that nobody else needs."""
        ...


class Facts:
    """Collects facts of one reading."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self.found: list[Fact] = []

    def add(self, subject: str, name: str, value: Json) -> None:
        """Add what was seen."""
        self.found.append(
            Fact(subject=subject, name=name, value=value, method=METHOD, read_at_s=self._now_s)
        )

    def absent(self, subject: str, name: str, reason: str) -> None:
        """Add that there is nothing to see, and why."""
        self.found.append(
            Fact(
                subject=subject,
                name=name,
                quality=Quality.NOT_SUPPORTED,
                reason=reason,
                method=METHOD,
                read_at_s=self._now_s,
            )
        )


def collect(
    machine: Machine, half: Half, device: Device, partitions: tuple[Partition, ...]
) -> tuple[Fact, ...]:
    """Return all facts of one device and its partitions."""
    facts = Facts(machine.now_s())
    places = [(c, half.partition_of(c, partitions)) for c in machine.clients(device.id)]
    _device_facts(facts, machine, device, partitions, places)
    for partition in partitions:
        here = [client for client, place in places if place is partition]
        _partition_facts(facts, machine, half, partition, here)
        if "gi" in partition.locator:
            facts.add(partition.id, "mig.instance", _mig(machine, partition))
        elif "xcp" in partition.locator and device.modes:
            facts.add(partition.id, "amd.partition", _amd(machine, partition))
        elif device.vendor is Vendor.NEURON:
            own = bool(half.own_nodes(partition))
            facts.add(partition.id, "neuron.cores", _neuron(machine, partition, whole_device=own))
    return tuple(facts.found)


def _device_facts(
    facts: Facts,
    machine: Machine,
    device: Device,
    partitions: tuple[Partition, ...],
    places: list[tuple[Client, Partition | None]],
) -> None:
    state = machine.device(device.id)
    geometry: list[Json] = [
        {
            "id": partition.id,
            "profile": partition.profile,
            "start": partition.placement.start,
            "size": partition.placement.size,
            "incarnation": partition.incarnation,
        }
        for partition in partitions
    ]
    facts.add(device.id, "device.geometry", geometry)
    modes: dict[str, Json] = {
        mode.kind.value: {"current": mode.current, "pending": mode.pending} for mode in device.modes
    }
    facts.add(device.id, "device.modes", modes)
    clients: list[Json] = [
        {
            "pid": client.pid,
            "comm": client.name,
            "partition": "" if place is None else place.id,
            "granted": place is not None and client.tag in {"", place.id},
            "monitor": client.monitor,
            **_client_cores(machine, device, client),
        }
        for client, place in places
    ]
    facts.add(device.id, "device.clients", clients)
    facts.add(device.id, "driver.version", state.driver)
    floor = BOARDS[state.board].driver_floor
    if floor:
        facts.add(device.id, "driver.floor", floor)
    else:
        facts.absent(device.id, "driver.floor", "no oldest safe driver is known for this board")


def _client_cores(machine: Machine, device: Device, client: Client) -> dict[str, Json]:
    """Return the physical cores of a process on a Neuron device; nothing on any other."""
    if device.vendor is not Vendor.NEURON:
        return {}
    state, board = machine.device(device.id), machine.neuron(device.id).board
    cores: list[Json] = []
    for core in client.cores:
        cores += physical_cores(board, state, core, 1)
    return {"cores": cores}


def _partition_facts(
    facts: Facts, machine: Machine, half: Half, partition: Partition, here: list[Client]
) -> None:
    facts.add(partition.id, "partition.exists", True)
    processes: list[Json] = [
        {"pid": client.pid, "comm": client.name, "memory_bytes": client.memory_bytes}
        for client in here
    ]
    facts.add(partition.id, "partition.processes", processes)
    fenced = machine.device(partition.device).fenced
    allowed: list[Json] = list(partition.access.device_nodes) if fenced else ["*"]
    rules: Json = {"by": FENCE if fenced else "", "allowed": allowed}
    facts.add(partition.id, "cgroup.device_fence", rules)
    own: list[Json] = list(half.own_nodes(partition))
    facts.add(partition.id, "partition.own_nodes", own)
    memory: Json = {
        "limit_bytes": partition.memory_bytes,
        "used_bytes": sum(client.memory_bytes for client in here),
        "enforced_by": _memory_guard(partition),
    }
    facts.add(partition.id, "partition.memory", memory)


def _mig(machine: Machine, partition: Partition) -> Json:
    """Return how the instance and its compute instances stand."""
    serial = partition.locator["serial"]
    instances = machine.device(partition.device).instances
    entry = next((e for e in instances if str(e.serial) == serial), None)
    shape = machine.nvidia(partition.device).board.profile(partition.profile)
    made = entry.compute if entry is not None else []
    return {
        "uuid": made[0].uuid if made else "",
        "gpu_instance": int(partition.locator["gi"]),
        "instance_slices": 0 if shape is None else shape.compute_slices,
        "compute_instances": len(made),
        "compute_slices": made[0].slices if made else 0,
    }


def _amd(machine: Machine, partition: Partition) -> Json:
    """Return modes, count and node of a partition that a mode made."""
    state = machine.device(partition.device)
    board = machine.amd(partition.device).board
    live = machine.amd_partitions(state)
    number = int(partition.locator["xcp"])
    return {
        "compute_mode": state.compute_mode,
        "memory_mode": state.memory_mode,
        "partitions": sum(piece.render_minor is not None for piece in live),
        "expected_partitions": partitions_of(state.compute_mode, board.xcds),
        "render_node": f"renderD{partition.locator['render_minor']}",
        "memory_domains": memory_partitions_of(state.memory_mode),
        "isolation": bool(state.isolation[number]) if number < len(state.isolation) else None,
    }


def _neuron(machine: Machine, partition: Partition, *, whole_device: bool) -> Json:
    """Return the physical cores granted, and those that the tenant took beside them."""
    state = machine.device(partition.device)
    board = machine.neuron(partition.device).board
    granted = set(range(partition.placement.start, partition.placement.stop))
    bound = set(granted)
    for client in machine.clients(partition.device):
        if client.tag == partition.id or (not client.tag and granted & set(client.cores)):
            bound |= set(client.cores)
    physical: list[int] = []
    for core in sorted(bound):
        physical += physical_cores(board, state, core, 1)
    cores: list[Json] = list(physical)
    nodes: list[Json] = list(partition.access.device_nodes)
    return {
        "cores": cores,
        "lnc": str(state.lnc),
        "whole_device": whole_device,
        "device_nodes": nodes,
    }


def _memory_guard(partition: Partition) -> str:
    """Return what keeps a tenant within the partition's memory."""
    if "gi" in partition.locator:
        return "instance"
    if "xcp" in partition.locator:
        return "driver"
    alone = partition.memory_bytes is not None and partition.share is Share.EXCLUSIVE
    return "device" if alone else "none"
