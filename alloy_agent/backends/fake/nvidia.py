"""The NVIDIA half of the fake backend: MIG instances, whole GPUs, shares.

With MIG off the GPU is one partition, `whole@0`, unless it is shared.
"""

from __future__ import annotations

import contextlib
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
from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.model import (
    HALF_MADE,
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
from alloy_agent.silicon import refusals
from alloy_agent.silicon.boards import BOARDS, InstanceShape, NvidiaBoard
from alloy_agent.silicon.boards.shapes import MIB
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.nvidia import (
    ACTIVE,
    STATUS_IN_USE,
    STATUS_RESET_REQUIRED,
    NvidiaGpu,
    caps_minor,
)
from alloy_agent.silicon.state import Client, DeviceState, GpuInstance

_LIMITS: Final = (
    TierLimit(
        way="mig",
        tier=Tier.HARD,
        reason="memory, compute and faults are cut in hardware; TLB, PCIe and power are shared",
    ),
    TierLimit(way="whole", tier=Tier.HARD, reason="a whole GPU behind its own device node"),
    SHARED_LIMIT,
)
_COMMON_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class NvidiaHalf:
    """Translates NVIDIA GPUs of the machine."""

    vendor = Vendor.NVIDIA

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def device(self, device_id: str) -> Device:
        """Return the GPU as it is now."""
        gpu = self._machine.nvidia(device_id)
        on, pending = gpu.mig_mode()
        state, board = self._machine.device(device_id), gpu.board
        mode = Mode(
            kind=ModeKind.MIG,
            current=_word(on),
            pending=_word(pending) if pending != on else None,
            available=("on", "off"),
            change=ModeChange.NOW if board.resetless else ModeChange.DEVICE_RESET,
        )
        return Device(
            id=DeviceId(device_id),
            vendor=Vendor.NVIDIA,
            model=board.name,
            backend="fake",
            scheme=Scheme.INSTANCES,
            slices=board.memory_slices,
            slice_name="memory slice",
            index=state.index,
            pci_id=f"0x{board.pci_id:08x}",
            simulated=True,
            bus=state.bus,
            serial=state.serial,
            numa_node=state.numa if state.numa >= 0 else None,
            driver=state.driver,
            memory_bytes=board.memory_mib * MIB,
            compute_units=board.sms,
            profiles=tuple(_profile(shape) for shape in board.profiles),
            modes=(mode,),
            links=self._links(state, board, on=on),
            tier_limits=_LIMITS,
        )

    def _links(self, state: DeviceState, board: NvidiaBoard, *, on: bool) -> tuple[Link, ...]:
        links = [Link(peer=f"numa:{state.numa}", kind="numa")] if state.numa >= 0 else []
        if on or not board.nvlinks:  # a GPU in MIG mode is no NVLink peer
            return tuple(links)
        for peer in self._machine.state.devices:
            other = BOARDS[peer.board]
            if peer.id != state.id and isinstance(other, NvidiaBoard) and not peer.mig:
                width = board.nvlinks * board.nvlink_bytes_per_s
                links.append(Link(peer=peer.id, kind="nvlink", bandwidth_bytes_per_s=width, hops=1))
        return tuple(links)

    def partitions(self, device: Device) -> tuple[Partition, ...]:
        """Return GPU instances, or the shares, or the whole GPU."""
        gpu = self._machine.nvidia(device.id)
        state = self._machine.device(device.id)
        if state.mig:
            made = [entry for entry in gpu.instances() if entry.compute]
            return tuple(self._instance(gpu, state, entry) for entry in made)
        access = Access(
            device_nodes=(f"/dev/nvidia{state.minor}", *_COMMON_NODES),
            environment=_visible(state.uuid),
        )
        shares = share_grants(self._machine, device)
        if shares:
            return tuple(_with_access(share, access) for share in shares)
        whole = Partition(
            id=partition_id(device.id, "whole", 0),
            device=device.id,
            profile="whole",
            placement=Placement(start=0, size=device.slices),
            incarnation=state.uuid,
            uuid=state.uuid,
            memory_bytes=device.memory_bytes,
            compute_units=device.compute_units,
            access=access,
        )
        return (whole,)

    def _instance(self, gpu: NvidiaGpu, state: DeviceState, entry: GpuInstance) -> Partition:
        shape = next(s for s in gpu.board.profiles if s.vendor_id == entry.profile)
        uuids = [compute.uuid for compute in entry.compute]
        caps = [caps_minor(state.minor, entry.id)]
        caps += [caps_minor(state.minor, entry.id, compute.id) for compute in entry.compute]
        nodes = [f"/dev/nvidia{state.minor}", *_COMMON_NODES]
        nodes += [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in caps]
        return Partition(
            id=partition_id(gpu.id, shape.name, entry.start),
            device=DeviceId(gpu.id),
            profile=shape.name,
            placement=Placement(start=entry.start, size=entry.size),
            incarnation=_incarnation(entry),
            uuid=uuids[0] if len(uuids) == 1 else None,
            memory_bytes=shape.memory_mib * MIB,
            compute_units=shape.sms,
            locator={
                "gi": str(entry.id),
                "ci": ",".join(str(compute.id) for compute in entry.compute),
                "serial": str(entry.serial),
            },
            access=Access(
                device_nodes=tuple(nodes),
                environment=_visible(",".join(uuids)),
            ),
        )

    def faults(self, device: Device, partitions: tuple[Partition, ...]) -> list[DeviceFault]:
        """Return what is wrong with the GPU now."""
        del partitions
        state, board = self._machine.device(device.id), self._machine.nvidia(device.id).board
        names = {shape.vendor_id: shape.name for shape in board.profiles}
        found = [
            DeviceFault(
                device=device.id,
                kind=HALF_MADE,
                reason=f"{names[entry.profile]}@{entry.start} without compute instance",
            )
            for entry in state.instances
            if state.mig and not entry.compute
        ]
        checks = (
            (state.needs_reset, "reset_required", "a mode change waits for a reset"),
            (state.row_remap_failed, "row_remap_failed", "rows could not be remapped: replace"),
            (state.row_remap_pending, "row_remap_pending", "rows are remapped at the next reset"),
            (state.recovery_action != 0, "recovery_action", f"action {state.recovery_action}"),
        )
        found += [
            DeviceFault(device=device.id, kind=kind, reason=reason)
            for holds, kind, reason in checks
            if holds
        ]
        return found

    def set_mode(self, step: SetMode) -> None:
        """Switch MIG on or off; what stays pending is a failure that says why."""
        if step.kind is not ModeKind.MIG or step.wanted not in {"on", "off"}:
            raise wrong_scheme(
                step.device, f"no mode {step.kind} {step.wanted}", "set mig on or off"
            )
        gpu = self._machine.nvidia(step.device)
        status = gpu.set_mig_mode(step.wanted == "on")
        if status == ACTIVE:
            return
        current, pending = (_word(mode) for mode in gpu.mig_mode())
        state = f"MIG is {current}, {pending} is pending"
        if status == STATUS_IN_USE:
            holders = ", ".join(f"pid {pid}" for pid in self._machine.holders(step.device))
            raise DeviceBusyError(
                f"{step.device}: in use (19): {state}",
                cure=f"end the holders: {holders}" if holders else "destroy its instances first",
            )
        if status == STATUS_RESET_REQUIRED:
            raise BackendError(
                f"{step.device}: reset required (16): {state}", cure="restart the machine"
            )
        raise BackendError(f"{step.device}: activation status {status}: {state}")

    def create(self, step: Create) -> None:
        """Make a GPU instance with one compute instance over all of it, or a share."""
        spec = step.spec
        if spec.share is not Share.EXCLUSIVE:
            create_grant(self._machine, spec)
            return
        gpu = self._machine.nvidia(step.device)
        shape = gpu.board.profile(spec.profile)
        if shape is None or spec.placement is None:
            raise BackendError(f"{step.device}: no profile {spec.profile}")
        found = _at(gpu, spec.profile, spec.placement.start)
        half_made = found if found is not None and not found.compute else None
        instance = half_made or gpu.create_gpu_instance(shape.vendor_id, spec.placement.start)
        try:
            gpu.create_compute_instance(instance.id)
        except refusals.RefusalError:
            with contextlib.suppress(refusals.RefusalError):
                gpu.destroy_gpu_instance(instance.id)
            raise

    def destroy(self, partition: Partition) -> None:
        """Remove an instance, compute instances first, if it still is the one that is meant."""
        if partition.share is not Share.EXCLUSIVE:
            destroy_grant(self._machine, partition)
            return
        if partition.profile == "whole":
            raise wrong_scheme(partition.device, "a whole GPU cannot be removed", "set mig on")
        gpu = self._machine.nvidia(partition.device)
        entry = _at(gpu, partition.profile, partition.placement.start)
        if entry is None:
            return
        # Half-made it has no identity; whole it must be the one that is meant, ids being re-used.
        if entry.compute and partition.incarnation not in {"", _incarnation(entry)}:
            raise BackendError(
                f"{partition.id}: GPU instance {entry.id} has been made anew by somebody else",
                cure="look at the devices and plan again",
            )
        for compute in tuple(entry.compute):
            gpu.destroy_compute_instance(entry.id, compute.id)
        gpu.destroy_gpu_instance(entry.id)

    def partition_of(self, client: Client, partitions: tuple[Partition, ...]) -> Partition | None:
        """Return the partition that a process works in; None: on the parent device."""
        if client.monitor:
            return None
        if client.instance is None:
            fitting = [p for p in partitions if "gi" not in p.locator]
            wanted = Share.OPPORTUNISTIC if client.opportunistic else Share.PRODUCTION
            return next((p for p in fitting if p.share in {wanted, Share.EXCLUSIVE}), None)
        return next((p for p in partitions if p.locator.get("gi") == str(client.instance)), None)

    def own_nodes(self, partition: Partition) -> tuple[str, ...]:
        """Return the device nodes that fence this partition off from its neighbours."""
        caps = tuple(n for n in partition.access.device_nodes if n.startswith("/dev/nvidia-caps/"))
        if "gi" in partition.locator:
            return caps
        return partition.access.device_nodes[:1]


def _at(gpu: NvidiaGpu, profile: str, start: int) -> GpuInstance | None:
    """Return the GPU instance of that profile at that place, whole or half-made."""
    shape = gpu.board.profile(profile)
    if shape is None:
        return None
    for entry in gpu.instances():
        if (entry.profile, entry.start) == (shape.vendor_id, start):
            return entry
    return None


def _incarnation(entry: GpuInstance) -> str:
    return "+".join(compute.uuid for compute in entry.compute)


def _profile(shape: InstanceShape) -> Profile:
    return Profile(
        name=shape.name,
        size=shape.size,
        starts=shape.starts,
        max_count=shape.max_count,
        memory_bytes=shape.memory_mib * MIB,
        compute_units=shape.sms,
        attributes=shape.attributes,
        vendor_ref=shape.vendor_id,
    )


def _word(on: bool) -> str:
    return "on" if on else "off"


def _visible(uuid: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": uuid}


def _with_access(partition: Partition, access: Access) -> Partition:
    return msgspec.structs.replace(partition, access=access)
