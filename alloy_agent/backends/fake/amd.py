"""The AMD half of the fake backend: compute modes, memory modes, shares.

Partitions exist by the compute mode; no step makes or removes one. A memory mode is requested on
every member of the hive and stays pending until the driver is loaded again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from alloy_agent.backends.fake.words import (
    SHARED_LIMIT,
    create_grant,
    destroy_grant,
    partition_id,
    share_grants,
    wrong_scheme,
)
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
    Scope,
    SetMode,
    Share,
    Tier,
    TierLimit,
    Vendor,
)
from alloy_agent.silicon.amd import XcdPartition, fits
from alloy_agent.silicon.boards import AmdBoard
from alloy_agent.silicon.boards.amd import memory_partitions_of, partitions_of
from alloy_agent.silicon.boards.shapes import MIB
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.state import Client, DeviceState

_WHOLE_LIMIT: Final = TierLimit(
    way="whole", tier=Tier.HARD, reason="a whole device behind its own render node"
)


def _limits(board: AmdBoard) -> tuple[TierLimit, ...]:
    """Return a limit for every pair of modes: hard where no two partitions share memory."""
    limits = [_WHOLE_LIMIT]
    for compute in board.compute_modes:
        count = partitions_of(compute, board.xcds)
        for memory in board.memory_modes:
            if count == 1 or not fits(board, compute, memory):
                continue
            sharing = count // memory_partitions_of(memory)
            way = f"{compute}/{memory}".lower()
            if sharing <= 1:
                reason = "own XCDs, own render node, own memory partition"
                limits.append(TierLimit(way=way, tier=Tier.HARD, reason=reason))
            else:
                reason = f"{sharing} partitions share one memory partition's bandwidth"
                limits.append(TierLimit(way=way, tier=Tier.ENFORCED, reason=reason))
    return (*limits, SHARED_LIMIT)


class AmdHalf:
    """Translates AMD accelerators of the machine."""

    vendor = Vendor.AMD

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def device(self, device_id: str) -> Device:
        """Return the accelerator as it is now."""
        gpu = self._machine.amd(device_id)
        modes = gpu.modes()
        state, board = self._machine.device(device_id), gpu.board
        memory_bytes = board.memory_mib * MIB
        partitionable = bool(board.compute_modes)
        return Device(
            id=DeviceId(device_id),
            vendor=Vendor.AMD,
            model=board.name,
            backend="fake",
            scheme=Scheme.MODES if partitionable else Scheme.WHOLE,
            slices=board.xcds,
            slice_name="XCD",
            index=state.index,
            pci_id=f"0x{board.device_id:04x}1002",
            simulated=True,
            bus=state.bus,
            serial=state.serial,
            numa_node=state.numa if state.numa >= 0 else None,
            hive=state.hive or None,
            driver=state.driver,
            memory_bytes=memory_bytes,
            compute_units=board.xcds * board.cus_per_xcd,
            profiles=_profiles(board),
            modes=_modes(board, modes) if partitionable else (),
            links=self._links(state, board),
            tier_limits=_limits(board),
            fault_note=self._missing_note(state),
        )

    def _links(self, state: DeviceState, board: AmdBoard) -> tuple[Link, ...]:
        links = [Link(peer=f"numa:{state.numa}", kind="numa")] if state.numa >= 0 else []
        links += [
            Link(peer=peer, kind="xgmi", bandwidth_bytes_per_s=board.xgmi_bytes_per_s, hops=1)
            for peer in self._machine.hive(state.id)
            if peer != state.id
        ]
        return tuple(links)

    def _missing_note(self, state: DeviceState) -> str:
        live = self._machine.amd_partitions(state)
        missing = [piece.number for piece in live if piece.render_minor is None]
        if not missing:
            return ""
        return f"{len(live) - len(missing)} of {len(live)} partitions live"

    def partitions(self, device: Device) -> tuple[Partition, ...]:
        """Return the partitions of the compute mode, or the shares of the device."""
        gpu = self._machine.amd(device.id)
        live = gpu.partitions()
        state = self._machine.device(device.id)
        shares = share_grants(self._machine, device)
        if shares:
            access = _access(live[0].render_minor)
            return tuple(msgspec.structs.replace(share, access=access) for share in shares)
        return tuple(
            self._piece(device, state, piece) for piece in live if piece.render_minor is not None
        )

    def _piece(self, device: Device, state: DeviceState, piece: XcdPartition) -> Partition:
        mode = state.compute_mode or "whole"
        return Partition(
            id=partition_id(device.id, mode, piece.first_xcd),
            device=device.id,
            profile=mode,
            placement=Placement(start=piece.first_xcd, size=piece.xcds),
            incarnation=f"{self._machine.state.boot}.{state.switches}.{piece.number}",
            uuid=None,  # unique ids are not unique over partitions on older drivers
            memory_bytes=piece.memory_bytes,
            compute_units=piece.cus,
            locator={
                "xcp": str(piece.number),
                "render_minor": str(piece.render_minor),
                "kfd_gpu_id": str(piece.kfd_gpu_id),
            },
            access=_access(piece.render_minor),
        )

    def faults(self, device: Device, partitions: tuple[Partition, ...]) -> list[DeviceFault]:
        """Return what is wrong with the accelerator now."""
        del partitions
        if not device.fault_note:
            return []
        reason = f"{device.fault_note}: no DRM minor was left for the others"
        return [DeviceFault(device=device.id, kind="partition_count_mismatch", reason=reason)]

    def set_mode(self, step: SetMode) -> None:
        """Switch the compute mode now, or request a memory mode on the whole hive."""
        if step.kind is ModeKind.COMPUTE:
            self._machine.amd(step.device).set_compute_mode(step.wanted)
        elif step.kind is ModeKind.MEMORY:
            for member in self._machine.hive(step.device):
                self._machine.amd(member).request_memory_mode(step.wanted)
        else:
            raise wrong_scheme(step.device, f"no mode {step.kind}", "set compute or memory")

    def create(self, step: Create) -> None:
        """Make a share; partitions come from the compute mode alone."""
        if step.spec.share is Share.EXCLUSIVE:
            raise wrong_scheme(step.device, "partitions follow the compute mode", "set compute")
        create_grant(self._machine, step.spec)

    def destroy(self, partition: Partition) -> None:
        """Remove a share; partitions go with the compute mode alone."""
        if partition.share is Share.EXCLUSIVE:
            raise wrong_scheme(
                partition.device, "partitions follow the compute mode", "set compute"
            )
        destroy_grant(self._machine, partition)

    def partition_of(self, client: Client, partitions: tuple[Partition, ...]) -> Partition | None:
        """Return the partition that a process works in."""
        if client.monitor:
            return None
        if partitions and partitions[0].share is not Share.EXCLUSIVE:
            wanted = Share.OPPORTUNISTIC if client.opportunistic else Share.PRODUCTION
            return next((p for p in partitions if p.share is wanted), None)
        number = str(client.instance or 0)
        return next((p for p in partitions if p.locator.get("xcp") == number), None)

    def own_nodes(self, partition: Partition) -> tuple[str, ...]:
        """Return the device nodes that fence this partition off from its neighbours."""
        return tuple(n for n in partition.access.device_nodes if n.startswith("/dev/dri/"))


def _access(minor: int | None) -> Access:
    nodes = ["/dev/kfd"]
    if minor is not None:
        nodes.append(f"/dev/dri/renderD{minor}")
    # Behind its fence the tenant sees one node, which is number 0.
    return Access(device_nodes=tuple(nodes), environment={"ROCR_VISIBLE_DEVICES": "0"})


def _profiles(board: AmdBoard) -> tuple[Profile, ...]:
    found = []
    for mode in board.compute_modes:
        count = partitions_of(mode, board.xcds)
        size = board.xcds // count
        found.append(
            Profile(
                name=mode,
                size=size,
                starts=tuple(range(0, board.xcds, size)),
                max_count=count,
                memory_bytes=board.memory_mib * MIB // count,
                compute_units=size * board.cus_per_xcd,
            )
        )
    return tuple(found)


def _modes(board: AmdBoard, now: tuple[str, str, str | None]) -> tuple[Mode, ...]:
    compute = Mode(kind=ModeKind.COMPUTE, current=now[0], available=board.compute_modes)
    memory = Mode(
        kind=ModeKind.MEMORY,
        current=now[1],
        pending=now[2],
        available=board.memory_modes,
        change=ModeChange.DRIVER_RELOAD,
        scope=Scope.HIVE,
    )
    return compute, memory
