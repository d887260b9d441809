"""What a MIG-capable GPU does and refuses: modes, GPU instances, compute instances.

Rules that stay true in here (Source: MIG User Guide v580, nvml.h API 13):

* A mode change that cannot happen now stays pending and says why by its activation status.
* Placements are counted in memory slices; a refusal for lack of room never says which lack.
* A GPU instance is destroyed only when it has no compute instance, no process and no open handle.
* GPU and compute instance ids are re-used; the MIG UUID is new at every creation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from alloy_agent.silicon.boards import InstanceShape, NvidiaBoard
from alloy_agent.silicon.refusals import (
    InsufficientResourcesError,
    InUseError,
    InvalidArgumentError,
    NotFoundError,
    NotSupportedError,
)
from alloy_agent.silicon.state import ComputeInstance, DeviceState, GpuInstance

if TYPE_CHECKING:
    from alloy_agent.silicon.machine import Machine

# Activation status of a mode change. Source: nvml.h, nvmlReturn_t.
ACTIVE: Final = 0
STATUS_NOT_SUPPORTED: Final = 3
STATUS_RESET_REQUIRED: Final = 16
STATUS_IN_USE: Final = 19

# Minor numbers of /dev/nvidia-caps: 1 is mig/config, 2 mig/monitor; then, per GPU, 15 GPU instances
# of 1 + 8 numbers. Source: listing of /proc/driver/nvidia-caps/mig-minors.
_CAPS_FIRST: Final = 3
_CAPS_PER_INSTANCE: Final = 9
_INSTANCES_PER_GPU: Final = 15


def caps_minor(minor: int, instance: int, compute: int | None = None) -> int:
    """Return the minor of an instance's capability node, or of one of its compute instances."""
    base = _CAPS_FIRST + (minor * _INSTANCES_PER_GPU + instance) * _CAPS_PER_INSTANCE
    return base if compute is None else base + 1 + compute


def instance_id(board: NvidiaBoard, shape: InstanceShape, start: int) -> int:
    """Return the id that the driver gives to an instance at this placement.

    Source: ids seen on A100: 7g 0; 4g and 3g 1, 2; 2g 3 to 5; 1g 7 to 13.
    """
    size, slices = shape.size, board.memory_slices
    if size == slices:
        return 0
    if size * 2 == slices:
        return 1 + start // size
    if shape.compute_slices == 1:
        return slices - 1 + start
    return 3 + start // size


class NvidiaGpu:
    """The calls of one GPU; each is one vendor call, subject to scripted faults."""

    def __init__(self, machine: Machine, device: str, board: NvidiaBoard) -> None:
        self._machine = machine
        self.id = device
        self.board = board

    # --- mode ---

    def mig_mode(self) -> tuple[bool, bool]:
        """Return whether MIG is on, and what is pending."""
        with self._machine.call("gpu.query", self.id) as device:
            self._need_mig_capable()
            return device.mig, device.mig_pending

    def set_mig_mode(self, on: bool) -> int:
        """Ask for a mode; return the activation status, 0 only when it holds now.

        Raises:
            NotSupportedError: The GPU has no MIG.
        """
        with self._machine.call("gpu.set_mig_mode", self.id, change=True) as device:
            self._need_mig_capable()
            device.mig_pending = on
            if device.mig == on and not device.needs_reset:
                return ACTIVE
            if self._machine.holders(self.id) or device.instances:
                return STATUS_IN_USE
            if device.passthrough and not self.board.resetless:
                device.needs_reset = True
                return STATUS_RESET_REQUIRED
            device.mig = on
            return ACTIVE

    def reset(self) -> None:
        """Reset the GPU: instances go, a pending mode holds.

        Raises:
            InUseError: Somebody holds the GPU.
            NotSupportedError: The hypervisor does not let a guest reset it.
        """
        with self._machine.call("gpu.reset", self.id, change=True) as device:
            if device.passthrough:
                raise NotSupportedError(f"{self.id}: reset is blocked by the hypervisor")
            holders = self._machine.holders(self.id)
            if holders:
                raise InUseError(f"{self.id}: GPU is in use by another client", holders=holders)
            device.mig = device.mig_pending
            device.instances = []
            device.needs_reset = False
            device.recovery_action = 0
            device.row_remap_pending = False

    # --- GPU instances ---

    def instances(self) -> tuple[GpuInstance, ...]:
        """Return all GPU instances, those without compute instance too; read only."""
        with self._machine.call("gpu.query", self.id) as device:
            return tuple(device.instances)

    def instance(self, instance: int) -> GpuInstance:
        """Return one GPU instance.

        Raises:
            NotFoundError: There is none of that id.
        """
        with self._machine.call("gpu.query", self.id) as device:
            return self._find(device, instance)

    def remaining_capacity(self, profile: int) -> int:
        """Return how many more instances of a profile could be made now, one after the other."""
        with self._machine.call("gpu.query", self.id) as device:
            self._need_mig_on(device)
            shape = self._shape(profile)
            trial = list(device.instances)
            count = 0
            while (start := self._first_fit(trial, shape)) is not None:
                trial.append(
                    GpuInstance(id=-1, profile=profile, start=start, size=shape.size, serial=0)
                )
                count += 1
            return count

    def create_gpu_instance(self, profile: int, start: int | None = None) -> GpuInstance:
        """Make a GPU instance, without compute instance; the driver places it if `start` is None.

        Raises:
            NotSupportedError: MIG is off.
            InvalidArgumentError: No such profile, or it cannot start there.
            InsufficientResourcesError: It overlaps, or the profile is exhausted.
        """
        with self._machine.call("gpu.create_gpu_instance", self.id, change=True) as device:
            self._need_mig_on(device)
            shape = self._shape(profile)
            if start is not None and start not in shape.starts:
                raise InvalidArgumentError(
                    f"{self.id}: {shape.name} cannot be placed at {start}:{shape.size}"
                )
            place = self._first_fit(device.instances, shape, start)
            if place is None:
                raise InsufficientResourcesError(
                    f"{self.id}: insufficient resources for {shape.name}"
                    + ("" if start is None else f" at {start}:{shape.size}")
                )
            made = GpuInstance(
                id=instance_id(self.board, shape, place),
                profile=profile,
                start=place,
                size=shape.size,
                serial=self._machine.next_serial(),
            )
            device.instances.append(made)
            device.instances.sort(key=lambda instance: (instance.start, instance.id))
            self._machine.emit(self.id, "geometry", f"gi{made.id}+", instance=made.id)
            return made

    def destroy_gpu_instance(self, instance: int) -> None:
        """Remove a GPU instance.

        Raises:
            NotFoundError: There is none of that id, or MIG is off.
            InUseError: It has compute instances, processes or open handles.
        """
        with self._machine.call("gpu.destroy_gpu_instance", self.id, change=True) as device:
            found = self._find(device, instance)
            if found.compute:
                raise InUseError(f"{self.id}: GPU instance {instance} has compute instances")
            holders = self._machine.holders(self.id, instance)
            if holders:
                raise InUseError(f"{self.id}: GPU instance {instance} in use", holders=holders)
            device.instances.remove(found)
            self._machine.emit(self.id, "geometry", f"gi{instance}-", instance=instance)

    # --- compute instances ---

    def create_compute_instance(self, instance: int, slices: int | None = None) -> ComputeInstance:
        """Make a compute instance of `slices` compute slices; None: all that the instance has.

        Raises:
            NotFoundError: No such GPU instance.
            InvalidArgumentError: More slices than the GPU instance has.
            InsufficientResourcesError: The slices are taken.
        """
        with self._machine.call("gpu.create_compute_instance", self.id, change=True) as device:
            found = self._find(device, instance)
            whole = self._shape(found.profile).compute_slices
            size = whole if slices is None else slices
            if not 1 <= size <= whole:
                raise InvalidArgumentError(f"{self.id}: no compute profile of {size} slices")
            start = sum(compute.slices for compute in found.compute)
            if start + size > whole:
                raise InsufficientResourcesError(f"{self.id}: compute slices are taken")
            used = {compute.id for compute in found.compute}
            number = next(n for n in range(whole) if n not in used)
            serial = self._machine.next_serial()
            made = ComputeInstance(
                id=number,
                slices=size,
                start=start,
                uuid="MIG-" + self._machine.uuid_of(self.id, instance, number, serial),
            )
            found.compute.append(made)
            return made

    def destroy_compute_instance(self, instance: int, compute: int) -> None:
        """Remove a compute instance.

        Raises:
            NotFoundError: There is none of that id.
            InUseError: It has processes or open handles.
        """
        with self._machine.call("gpu.destroy_compute_instance", self.id, change=True) as device:
            found = self._find(device, instance)
            target = next((entry for entry in found.compute if entry.id == compute), None)
            if target is None:
                raise NotFoundError(f"{self.id}: no compute instance {instance}/{compute}")
            holders = self._machine.holders(self.id, instance, compute)
            if holders:
                raise InUseError(
                    f"{self.id}: compute instance {instance}/{compute} in use", holders=holders
                )
            found.compute.remove(target)

    # --- inside ---

    def _need_mig_capable(self) -> None:
        if not self.board.profiles:
            raise NotSupportedError(f"{self.id}: {self.board.product} has no MIG")

    def _need_mig_on(self, device: DeviceState) -> None:
        self._need_mig_capable()
        if not device.mig:
            raise NotSupportedError(f"{self.id}: MIG is off")

    def _shape(self, profile: int) -> InstanceShape:
        for shape in self.board.profiles:
            if shape.vendor_id == profile:
                return shape
        raise InvalidArgumentError(f"{self.id}: no GPU instance profile {profile}")

    def _find(self, device: DeviceState, instance: int) -> GpuInstance:
        for entry in device.instances:
            if device.mig and entry.id == instance:
                return entry
        raise NotFoundError(f"{self.id}: no GPU instance {instance}")

    def _first_fit(
        self, instances: list[GpuInstance], shape: InstanceShape, start: int | None = None
    ) -> int | None:
        """Return where the shape fits (only `start`, if given), or None."""
        same = sum(entry.profile == shape.vendor_id for entry in instances)
        compute = sum(self._shape(entry.profile).compute_slices for entry in instances)
        if same >= shape.max_count or compute + shape.compute_slices > self.board.compute_slices:
            return None
        taken = {
            piece for entry in instances for piece in range(entry.start, entry.start + entry.size)
        }
        for place in shape.starts if start is None else (start,):
            if not taken.intersection(range(place, place + shape.size)):
                return place
        return None
