"""The Neuron half of the fake backend: runs of logical cores, shares, core configuration.

The device knows nothing of a binding: partitions are what was granted, processes what the driver
says, and the two may differ.
"""

from __future__ import annotations

from typing import Final

import msgspec

from alloy_agent.backends.fake.words import (
    SHARED_LIMIT,
    create_grant,
    destroy_grant,
    grant_incarnation,
    partition_id,
    share_grants,
    wrong_scheme,
)
from alloy_agent.errors import BackendError
from alloy_agent.model import (
    Access,
    Create,
    Device,
    DeviceFault,
    DeviceId,
    Link,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    Placement,
    Profile,
    Scheme,
    SetMode,
    Share,
    Tier,
    TierLimit,
    Vendor,
)
from alloy_agent.silicon.boards import NeuronInstance
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.neuron import logical_cores, physical_cores
from alloy_agent.silicon.state import Client, DeviceState, Grant

_CORES_LIMIT: Final = TierLimit(
    way="cores",
    tier=Tier.SOFT,
    reason="tenants share the device node; core reservation binds only those who ask",
)
_UNLINKED_LIMIT: Final = TierLimit(
    way="whole", tier=Tier.HARD, reason="a whole device, linked to no other, behind its own node"
)
_LINKED_LIMIT: Final = TierLimit(
    way="whole",
    tier=Tier.ENFORCED,
    reason="fenced by its node, but NeuronLink reaches the other devices of the group",
)

# As the Neuron backend hands them out by default: simulated tenants get what real ones would.
UNSET: Final = ("NEURON_RT_NUM_CORES", "NEURON_RT_VIRTUAL_CORE_SIZE", "AWS_NEURON_VISIBLE_DEVICES")
PORTS_FROM: Final = 61000
PORTS_EACH: Final = 16


class NeuronHalf:
    """Translates Neuron devices of the machine."""

    vendor = Vendor.NEURON

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def device(self, device_id: str) -> Device:
        """Return the device as it is now, its cores counted as logical ones."""
        neuron = self._machine.neuron(device_id)
        lnc = neuron.lnc()
        state, board = self._machine.device(device_id), neuron.board
        cores = logical_cores(board, state)
        linked = bool(board.neighbours[self._machine.neuron_number(state)])
        mode = Mode(
            kind=ModeKind.LNC,
            current=str(lnc),
            available=tuple(str(value) for value in sorted(board.lnc)),
            change=ModeChange.PROCESS_START,
        )
        return Device(
            id=DeviceId(device_id),
            vendor=Vendor.NEURON,
            model=f"{board.product} ({board.name})",
            backend="fake",
            scheme=Scheme.CORES,
            slices=cores,
            slice_name="core",
            index=state.index,
            pci_id=f"0x{board.pci_id:08x}",
            simulated=True,
            bus=state.bus,
            serial=state.serial,
            numa_node=state.numa if state.numa >= 0 else None,
            driver=state.driver,
            memory_bytes=board.memory_bytes,
            compute_units=board.cores,
            profiles=_profiles(board, cores),
            modes=(mode,) if len(board.lnc) > 1 else (),
            links=self._links(state, board),
            group_sizes=self._group_sizes(state, board),
            tier_limits=(_CORES_LIMIT, _LINKED_LIMIT if linked else _UNLINKED_LIMIT, SHARED_LIMIT),
        )

    def _group_sizes(self, state: DeviceState, board: NeuronInstance) -> tuple[int, ...]:
        """Return how many devices from this one on work together: rows of a torus, else any run."""
        number = self._machine.neuron_number(state)
        torus = len(board.neighbours[0]) == 4
        return tuple(
            size
            for size in board.group_sizes
            if number + size <= board.devices and number % (size if torus else 1) == 0
        )

    def _links(self, state: DeviceState, board: NeuronInstance) -> tuple[Link, ...]:
        links = [Link(peer=f"numa:{state.numa}", kind="numa")] if state.numa >= 0 else []
        by_bus = {peer.bus: peer.id for peer in self._machine.state.devices}
        for number in board.neighbours[self._machine.neuron_number(state)]:
            peer = by_bus.get(board.bdfs[number])
            if peer is not None:
                links.append(
                    Link(
                        peer=peer,
                        kind="neuronlink",
                        bandwidth_bytes_per_s=board.link_bytes_per_s,
                        hops=1,
                    )
                )
        return tuple(links)

    def partitions(self, device: Device) -> tuple[Partition, ...]:
        """Return the granted runs of cores, and the shares of the whole device."""
        neuron = self._machine.neuron(device.id)
        grants = self._machine.grants(device.id)
        state = self._machine.device(device.id)
        runs = [
            self._run(device, state, neuron.board, grant)
            for grant in grants
            if grant.kind == "cores"
        ]
        shares = [
            msgspec.structs.replace(
                share, access=self._access(state, neuron.board, share.placement, share.id)
            )
            for share in share_grants(self._machine, device)
        ]
        return tuple(runs + shares)

    def _run(
        self, device: Device, state: DeviceState, board: NeuronInstance, grant: Grant
    ) -> Partition:
        placement = Placement(start=grant.start, size=grant.size)
        name = partition_id(device.id, grant.profile, grant.start)
        return Partition(
            id=name,
            device=device.id,
            profile=grant.profile,
            placement=placement,
            incarnation=grant_incarnation(grant),
            # The driver has no quota per core: a part of a device has no memory of its own.
            memory_bytes=board.memory_bytes if grant.size == device.slices else None,
            compute_units=grant.size * state.lnc,
            units=physical_cores(board, state, grant.start, grant.size),
            locator={"grant": str(grant.serial)},
            access=self._access(state, board, placement, name),
            group=tuple(DeviceId(member) for member in grant.group),
            group_access=self._group_access(state, board, grant),
        )

    def _group_access(
        self, state: DeviceState, board: NeuronInstance, grant: Grant
    ) -> Access | None:
        """Return the way into all devices of a group; None: there is none, or it is not whole."""
        if not grant.group:
            return None
        alike = [
            any(other.group == grant.group for other in self._machine.grants(member))
            for member in grant.group
        ]
        if not all(alike):
            return None
        first = self._machine.device(grant.group[0])
        cores = logical_cores(board, state)
        size, number = len(grant.group), self._machine.neuron_number(first)
        whole = Placement(start=0, size=size * cores)
        name = f"{partition_id(grant.group[0], grant.profile, 0)}+{size - 1}"
        access = self._access(first, board, whole, name)
        nodes = tuple(f"/dev/neuron{n}" for n in range(number, number + size))
        return msgspec.structs.replace(access, device_nodes=nodes)

    def _access(
        self, state: DeviceState, board: NeuronInstance, placement: Placement, tag: str
    ) -> Access:
        number = self._machine.neuron_number(state)
        first = number * logical_cores(board, state) + placement.start
        last = first + placement.size - 1
        environment = {
            "NEURON_RT_VISIBLE_CORES": str(first) if first == last else f"{first}-{last}",
            "NEURON_PROCESS_TAG": tag,
        }
        if len(board.lnc) > 1:
            environment["NEURON_LOGICAL_NC_CONFIG"] = str(state.lnc)
        if placement.size > 1:  # one core has nobody to meet
            port = PORTS_FROM + number * PORTS_EACH + placement.start
            environment["NEURON_RT_ROOT_COMM_ID"] = f"127.0.0.1:{port}"
        return Access(
            device_nodes=(f"/dev/neuron{number}",),
            environment=environment,
            unset=UNSET,
        )

    def faults(self, device: Device, partitions: tuple[Partition, ...]) -> list[DeviceFault]:
        """Return what is wrong with the device now."""
        del partitions
        if not self._machine.device(device.id).needs_reset:
            return []
        return [DeviceFault(device=device.id, kind="reset_required", reason="state is INVALID")]

    def set_mode(self, step: SetMode) -> None:
        """Change the logical core configuration."""
        if step.kind is not ModeKind.LNC or not step.wanted.isdecimal():
            raise wrong_scheme(step.device, f"no mode {step.kind} {step.wanted}", "set lnc 1 or 2")
        self._machine.neuron(step.device).set_lnc(int(step.wanted))

    def create(self, step: Create) -> None:
        """Grant a run of cores, or a share of the device."""
        spec = step.spec
        device = self.device(step.device)
        if spec.placement is None or spec.placement.stop > device.slices:
            raise BackendError(
                f"{step.device}: no cores {spec.placement}", cure=f"it has {device.slices} cores"
            )
        create_grant(self._machine, spec)

    def destroy(self, partition: Partition) -> None:
        """Take a grant back."""
        destroy_grant(self._machine, partition)

    def partition_of(self, client: Client, partitions: tuple[Partition, ...]) -> Partition | None:
        """Return the partition that holds all cores of a process; None: no grant covers them."""
        if client.monitor:
            return None
        cores = set(client.cores)
        for partition in partitions:
            span = range(partition.placement.start, partition.placement.stop)
            if partition.share is not Share.EXCLUSIVE:
                wanted = Share.OPPORTUNISTIC if client.opportunistic else Share.PRODUCTION
                if partition.share is wanted:
                    return partition
            elif cores and cores <= set(span):
                return partition
        return None

    def own_nodes(self, partition: Partition) -> tuple[str, ...]:
        """Return the device node, if the partition has the whole device."""
        state = self._machine.device(partition.device)
        alone = len(state.grants) == 1 and partition.share is Share.EXCLUSIVE
        board = self._machine.neuron(partition.device).board
        whole = partition.placement.size == logical_cores(board, state)
        return partition.access.device_nodes if alone and whole else ()


def _profiles(board: NeuronInstance, cores: int) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            name=f"{size}c",
            size=size,
            starts=tuple(range(cores - size + 1)),
            max_count=cores // size,
            memory_bytes=board.memory_bytes * size // cores,
            compute_units=size * (board.cores // cores),
        )
        for size in range(1, cores + 1)
    )
