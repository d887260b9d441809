# ruff: noqa: N802 - functions bear the names of the library
"""The functions of the library, by their C names: pointers in, codes out.

Each call meets the machine's scripted faults under its C name (`nvmlDeviceGetTemperature`), with
the code that the fault asks for, so that a test can make any function fail, wait, hang or end the
process. A handle of an instance names its place (GPU, instance, compute instance), as the real
one does: after a re-creation it silently means the successor.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from alloy_agent.silicon import refusals, signals
from alloy_agent.silicon.boards import InstanceShape, NvidiaBoard
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.nvidia import NvidiaGpu
from alloy_agent.silicon.state import Client, ComputeInstance, DeviceState, GpuInstance
from tests.fakes.nvml.memory import (
    number,
    pointer,
    put,
    put_field_pointer,
    put_pointer,
    put_slot,
    put_text,
    target,
)

# Source: nvml.h, nvmlReturn_t.
OK = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
GPU_IS_LOST = 15
RESET_REQUIRED = 16
IN_USE = 19
INSUFFICIENT_RESOURCES = 23
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

CODES: dict[type[refusals.RefusalError], int] = {
    refusals.InsufficientResourcesError: INSUFFICIENT_RESOURCES,
    refusals.InUseError: IN_USE,
    refusals.ResetRequiredError: RESET_REQUIRED,
    refusals.InvalidArgumentError: INVALID_ARGUMENT,
    refusals.NotSupportedError: NOT_SUPPORTED,
    refusals.NotPermittedError: NO_PERMISSION,
    refusals.NotFoundError: NOT_FOUND,
    refusals.LostError: GPU_IS_LOST,
    refusals.UnknownFailureError: UNKNOWN,
}

WHOLE = 0xFFFFFFFF
MIB = 1 << 20
RESERVED_BYTES = 600 * MIB  # what the driver keeps for itself on an idle GPU
GPM_REFRESH_S = 0.1
DEVICE, INSTANCE, COMPUTE, MIG = 1, 2, 3, 4
ARCHITECTURES = {"ampere": 7, "hopper": 9, "blackwell": 10}
CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}
CORES_PER_SM = {"ampere": 64, "hopper": 128, "blackwell": 128}
# Compute instance profiles: enum to slices. Source: nvml.h.
COMPUTE_ENUMS = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1, 8: 7}
XID_EVENT, MIG_EVENT, ACTION_EVENT = 0x8, 0x100, 0x8000
SUPPORTED_EVENTS = 0x1 | 0x2 | XID_EVENT | MIG_EVENT | ACTION_EVENT
# Privileged: refused without CAP_SYS_ADMIN. Source: nvml.h.
PRIVILEGED = frozenset(
    {
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceDestroy",
        "nvmlComputeInstanceDestroy",
    }
)


class CodeError(Exception):
    """A code that a function returns."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Traits:
    """What this host's driver is like."""

    missing: tuple[str, ...] = ()
    privileged: bool = True
    no_driver: bool = False
    no_gpus: bool = False
    vanish: bool = False
    memory_limits: bool = False


@dataclass
class _Sample:
    """One GPM sample buffer."""

    device: str = ""
    instance: int | None = None
    taken_s: float = 0.0
    held: bool = False


@dataclass
class _EventSet:
    """One event set."""

    devices: dict[str, int]
    seen: int


class _Function:
    """One exported function; callers may set its `restype`."""

    restype: Any = None

    def __init__(self, library: FakeNvml, name: str, body: Callable[..., int | None]) -> None:
        self._library = library
        self._name = name
        self._body = body

    def __call__(self, *args: Any) -> Any:
        if self._name == "nvmlErrorString":
            return f"code {number(args[0])}".encode()
        return self._library.enter(self._name, self._body, args)


class FakeNvml:
    """What `ctypes.CDLL` would return."""

    _bodies: ClassVar[dict[str, str]] = {}

    def __init__(self, machine: Machine, traits: Traits) -> None:
        self.machine = machine
        self.traits = traits
        self.counts: dict[str, int] = {}
        self.memory_limits: dict[tuple[str, str], tuple[int, int]] = {}
        self.hidden: set[int] = set()  # processes that the driver does not list
        self.compute_mode = 0
        self._lock = threading.Lock()
        self._references = 0
        self._next = 1
        self._samples: dict[int, _Sample] = {}
        self._sets: dict[int, _EventSet] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.traits.missing):
            raise AttributeError(name)
        body = type(self).__dict__.get(f"_{name}")
        if body is None and name != "nvmlErrorString":
            raise AttributeError(name)
        function = _Function(self, name, (lambda *_: OK) if body is None else body)
        self.__dict__[name] = function
        return function

    def enter(self, name: str, body: Callable[..., int | None], args: tuple[Any, ...]) -> int:
        """Make one call: count it, meet scripted faults, turn refusals into codes."""
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            if not name.startswith("nvmlInit") and not self._references:
                return UNINITIALIZED
            self.machine.enter(name, self._device_of(args))
            if name in PRIVILEGED and not self.traits.privileged:
                return NO_PERMISSION
            return body(self, *args) or OK
        except CodeError as error:
            return error.code
        except refusals.RefusalError as error:
            return error.code if error.code is not None else CODES.get(type(error), UNKNOWN)

    def open_resources(self) -> int:
        """Return how many GPM samples and event registrations hold a GPU now."""
        held = sum(sample.held for sample in self._samples.values())
        return held + sum(len(entry.devices) for entry in self._sets.values())

    # --- handles ---

    def _device_of(self, args: tuple[Any, ...]) -> str | None:
        if not args or isinstance(args[0], (int, bytes)):
            return None
        with_pointer = type(args[0]).__name__.startswith("LP_struct")
        if not with_pointer:
            return None
        handle = pointer(args[0])
        if handle >> 40 != 1:
            return None
        index = handle >> 16 & 0xFF
        gpus = self._gpus()
        return gpus[index].id if index < len(gpus) else None

    def _gpus(self) -> list[DeviceState]:
        if self.traits.no_gpus:
            return []
        return [
            device
            for device in self.machine.state.devices
            if isinstance(self.machine.board(device.id), NvidiaBoard)
        ]

    @staticmethod
    def _handle(kind: int, index: int, instance: int = 0, compute: int = 0) -> int:
        return 1 << 40 | kind << 32 | index << 16 | instance << 8 | compute

    def _resolve(self, argument: Any, *kinds: int) -> tuple[DeviceState, int, int, int]:
        """Return device, kind, instance and compute instance of a handle."""
        handle = pointer(argument)
        kind, index = handle >> 32 & 0xFF, handle >> 16 & 0xFFFF
        gpus = self._gpus()
        if handle >> 40 != 1 or kind not in kinds or index >= len(gpus):
            raise CodeError(INVALID_ARGUMENT)
        if gpus[index].lost:
            raise CodeError(GPU_IS_LOST)
        return gpus[index], kind, handle >> 8 & 0xFF, handle & 0xFF

    def _gpu(self, argument: Any) -> tuple[NvidiaGpu, DeviceState]:
        state, *_ = self._resolve(argument, DEVICE)
        return self.machine.nvidia(state.id), state

    def _board(self, state: DeviceState) -> NvidiaBoard:
        board = self.machine.board(state.id)
        assert isinstance(board, NvidiaBoard)
        return board

    def _instance(self, argument: Any) -> tuple[NvidiaGpu, DeviceState, GpuInstance]:
        state, _, instance, _ = self._resolve(argument, INSTANCE)
        gpu = self.machine.nvidia(state.id)
        return gpu, state, gpu.instance(instance)

    def _compute(
        self, argument: Any, *kinds: int
    ) -> tuple[NvidiaGpu, DeviceState, GpuInstance, ComputeInstance]:
        state, _, instance, compute = self._resolve(argument, *kinds)
        gpu = self.machine.nvidia(state.id)
        found = gpu.instance(instance)
        for entry in found.compute:
            if entry.id == compute:
                return gpu, state, found, entry
        raise CodeError(NOT_FOUND)

    def _shape(self, state: DeviceState, ident: int) -> InstanceShape:
        for shape in self._board(state).profiles:
            if shape.vendor_id == ident:
                return shape
        raise CodeError(INVALID_ARGUMENT)

    def _index(self, state: DeviceState) -> int:
        return [gpu.id for gpu in self._gpus()].index(state.id)

    # --- library ---

    def _nvmlInitWithFlags(self, flags: Any) -> int:
        del flags
        if self.traits.no_driver:
            return DRIVER_NOT_LOADED
        self._references += 1
        return OK

    def _nvmlInit_v2(self) -> int:
        return self._nvmlInitWithFlags(0)

    def _nvmlShutdown(self) -> int:
        self._references -= 1
        if not self._references:
            for key in list(self._samples):
                self._free(key)
            for entry in self._sets.values():
                for device in list(entry.devices):
                    self.machine.close_handle(device)
            self._sets.clear()
        return OK

    def _nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        gpus = self._gpus()
        return put_text(buffer, length, gpus[0].driver if gpus else "580.95.05")

    def _nvmlSystemGetNVMLVersion(self, buffer: Any, length: Any) -> int:
        gpus = self._gpus()
        return put_text(buffer, length, f"13.{gpus[0].driver if gpus else '580.95.05'}")

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        gpus = self._gpus()
        put(count, sum(not (gpu.lost and self.traits.vanish) for gpu in gpus))
        return OK

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        gpus = [gpu for gpu in self._gpus() if not (gpu.lost and self.traits.vanish)]
        if number(index) >= len(gpus):
            return INVALID_ARGUMENT
        state = gpus[number(index)]
        if state.lost:
            return GPU_IS_LOST
        put_pointer(handle, self._handle(DEVICE, self._index(state)))
        return OK

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        text = uuid.value.decode()
        for state in self._gpus():
            if state.uuid == text:
                if state.lost:
                    return NOT_FOUND if self.traits.vanish else GPU_IS_LOST
                put_pointer(handle, self._handle(DEVICE, self._index(state)))
                return OK
            for instance in state.instances if state.mig else []:
                for compute in instance.compute:
                    if compute.uuid == text:
                        index = self._index(state)
                        put_pointer(handle, self._handle(MIG, index, instance.id, compute.id))
                        return OK
        return NOT_FOUND

    # --- identity ---

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        state, kind, _, _ = self._resolve(handle, DEVICE, MIG)
        if kind == DEVICE:
            return put_text(buffer, length, state.uuid)
        return put_text(buffer, length, self._compute(handle, MIG)[3].uuid)

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        state, kind, _, _ = self._resolve(handle, DEVICE, MIG)
        name = self._board(state).product
        if kind == MIG:
            found = self._compute(handle, MIG)[2]
            name += f" MIG {self._shape(state, found.profile).name}"
        return put_text(buffer, length, name)

    def _nvmlDeviceGetSerial(self, handle: Any, buffer: Any, length: Any) -> int:
        return put_text(buffer, length, self._gpu(handle)[1].serial)

    def _nvmlDeviceGetMinorNumber(self, handle: Any, minor: Any) -> int:
        put(minor, self._gpu(handle)[1].minor)
        return OK

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        _, state = self._gpu(handle)
        self._pci(state, target(info))
        return OK

    def _pci(self, state: DeviceState, out: Any) -> None:
        _, bus, slot = state.bus.split(":")
        out.domain, out.bus, out.device = 0, int(bus, 16), int(slot.split(".")[0], 16)
        out.pciDeviceId = self._board(state).pci_id
        out.pciSubSystemId = 0x146310DE
        out.busId = f"00000000:{bus.upper()}:{slot.upper()}".encode()
        out.busIdLegacy = f"0000:{bus.upper()}:{slot.upper()}".encode()

    def _nvmlDeviceGetArchitecture(self, handle: Any, out: Any) -> int:
        put(out, ARCHITECTURES[self._gpu(handle)[0].board.architecture])
        return OK

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        high, low = CAPABILITIES[self._gpu(handle)[0].board.architecture]
        put(major, high)
        put(minor, low)
        return OK

    def _nvmlDeviceGetNumGpuCores(self, handle: Any, cores: Any) -> int:
        board = self._gpu(handle)[0].board
        put(cores, board.sms * CORES_PER_SM[board.architecture])
        return OK

    # --- MIG ---

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        on, waiting = self._gpu(handle)[0].mig_mode()
        put(current, on)
        put(pending, waiting)
        return OK

    def _nvmlDeviceSetMigMode(self, handle: Any, mode: Any, activation: Any) -> int:
        wanted = number(mode)
        if wanted not in {0, 1}:
            return INVALID_ARGUMENT
        put(activation, self._gpu(handle)[0].set_mig_mode(wanted == 1))
        return OK

    def _nvmlDeviceGetGpuInstanceProfileInfoV(self, handle: Any, enum: Any, info: Any) -> int:
        return self._profile_info(handle, number(enum), target(info), named=True)

    def _nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, enum: Any, info: Any) -> int:
        return self._profile_info(handle, number(enum), target(info), named=False)

    def _profile_info(self, handle: Any, enum: int, out: Any, *, named: bool) -> int:
        _, state = self._gpu(handle)
        if enum > 0x11:
            return INVALID_ARGUMENT
        if named and out.version != 0x02000098:
            return ARGUMENT_VERSION_MISMATCH
        shape = next((s for s in self._board(state).profiles if s.enum == enum), None)
        if shape is None:
            return NOT_SUPPORTED
        out.id, out.sliceCount, out.instanceCount = (
            shape.vendor_id,
            shape.compute_slices,
            shape.max_count,
        )
        out.multiprocessorCount, out.memorySizeMB = shape.sms, shape.memory_mib
        if shape.engines is not None:
            (out.copyEngineCount, out.decoderCount, out.jpegCount, out.ofaCount) = shape.engines
        if named:
            out.name = f"MIG {shape.name}"
        return OK

    def _nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        self, handle: Any, ident: Any, places: Any, count: Any
    ) -> int:
        _, state = self._gpu(handle)
        shape = self._shape(state, number(ident))
        if places is not None:
            array = target(places)
            if number(target(count)) < len(shape.starts):
                return INSUFFICIENT_SIZE
            for index, start in enumerate(shape.starts):
                array[index].start, array[index].size = start, shape.size
        put(count, len(shape.starts))
        return OK

    def _nvmlDeviceCreateGpuInstanceWithPlacement(
        self, handle: Any, ident: Any, place: Any, made: Any
    ) -> int:
        gpu, state = self._gpu(handle)
        wanted = target(place)
        shape = self._shape(state, number(ident))
        if wanted.size != shape.size:
            return INVALID_ARGUMENT
        instance = gpu.create_gpu_instance(shape.vendor_id, int(wanted.start))
        put_pointer(made, self._handle(INSTANCE, self._index(state), instance.id))
        return OK

    def _nvmlDeviceGetGpuInstances(self, handle: Any, ident: Any, out: Any, count: Any) -> int:
        gpu, state = self._gpu(handle)
        if not gpu.mig_mode()[0]:
            return NOT_SUPPORTED
        shape = self._shape(state, number(ident))
        found = [entry for entry in gpu.instances() if entry.profile == shape.vendor_id]
        for position, entry in enumerate(found):
            put_slot(out, position, self._handle(INSTANCE, self._index(state), entry.id))
        put(count, len(found))
        return OK

    def _nvmlGpuInstanceGetInfo(self, handle: Any, info: Any) -> int:
        _, state, found = self._instance(handle)
        out = target(info)
        put_field_pointer(out, "device", self._handle(DEVICE, self._index(state)))
        out.id, out.profileId = found.id, found.profile
        out.placement.start, out.placement.size = found.start, found.size
        return OK

    def _nvmlGpuInstanceDestroy(self, handle: Any) -> int:
        gpu, _, found = self._instance(handle)
        gpu.destroy_gpu_instance(found.id)
        return OK

    def _nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, handle: Any, enum: Any, engine: Any, info: Any
    ) -> int:
        del engine
        _, state, found = self._instance(handle)
        wanted, out = number(enum), target(info)
        if wanted not in COMPUTE_ENUMS:
            return INVALID_ARGUMENT
        shape = self._shape(state, found.profile)
        slices = COMPUTE_ENUMS[wanted]
        if slices > shape.compute_slices or wanted >= 7:
            return NOT_SUPPORTED
        out.id, out.sliceCount = wanted, slices
        out.instanceCount = shape.compute_slices // slices
        out.multiprocessorCount = shape.sms * slices // shape.compute_slices
        return OK

    def _nvmlGpuInstanceCreateComputeInstance(self, handle: Any, ident: Any, made: Any) -> int:
        gpu, state, found = self._instance(handle)
        if number(ident) not in COMPUTE_ENUMS:
            return INVALID_ARGUMENT
        compute = gpu.create_compute_instance(found.id, COMPUTE_ENUMS[number(ident)])
        put_pointer(made, self._handle(COMPUTE, self._index(state), found.id, compute.id))
        return OK

    def _nvmlGpuInstanceGetComputeInstances(
        self, handle: Any, ident: Any, out: Any, count: Any
    ) -> int:
        _, state, found = self._instance(handle)
        slices = COMPUTE_ENUMS.get(number(ident))
        entries = [entry for entry in found.compute if entry.slices == slices]
        for position, entry in enumerate(entries):
            handle_of = self._handle(COMPUTE, self._index(state), found.id, entry.id)
            put_slot(out, position, handle_of)
        put(count, len(entries))
        return OK

    def _nvmlComputeInstanceGetInfo_v2(self, handle: Any, info: Any) -> int:
        _, state, found, compute = self._compute(handle, COMPUTE)
        out, index = target(info), self._index(state)
        put_field_pointer(out, "device", self._handle(MIG, index, found.id, compute.id))
        put_field_pointer(out, "gpuInstance", self._handle(INSTANCE, index, found.id))
        out.id = compute.id
        out.profileId = next(e for e, slices in COMPUTE_ENUMS.items() if slices == compute.slices)
        out.placement.start, out.placement.size = compute.start, compute.slices
        return OK

    def _nvmlComputeInstanceDestroy(self, handle: Any) -> int:
        gpu, _, found, compute = self._compute(handle, COMPUTE)
        gpu.destroy_compute_instance(found.id, compute.id)
        return OK

    # --- memory and processes ---

    def _clients(self, state: DeviceState, instance: int | None = None) -> list[Client]:
        return [
            client
            for client in self.machine.clients(state.id)
            if not client.monitor and instance in {None, client.instance}
        ]

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """Return total, reserved and used bytes."""
        state, kind, instance, _ = self._resolve(handle, DEVICE, MIG)
        with self.machine.call("gpu.query", state.id):
            pass
        if kind == MIG:
            found = self._compute(handle, MIG)[2]
            total = self._shape(state, found.profile).memory_mib * MIB
            return total, 0, sum(c.memory_bytes for c in self._clients(state, instance))
        total = self._board(state).memory_mib * MIB
        return total, RESERVED_BYTES, sum(c.memory_bytes for c in self._clients(state))

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:
        total, reserved, used = self._memory(handle)
        out = target(info)
        out.total, out.used, out.free = total, used + reserved, total - used - reserved
        return OK

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, info: Any) -> int:
        out = target(info)
        if out.version != 0x02000028:
            return ARGUMENT_VERSION_MISMATCH
        total, reserved, used = self._memory(handle)
        out.total, out.used, out.reserved = total, used, reserved
        out.free = total - used - reserved
        return OK

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        state, kind, instance, compute = self._resolve(handle, DEVICE, MIG)
        if kind == MIG:
            self._compute(handle, MIG)
            clients = [
                client
                for client in self._clients(state, instance)
                if client.compute_instance in {None, compute}
            ]
        else:
            clients = self._clients(state)
        clients = [client for client in clients if client.pid not in self.hidden]
        room = number(target(count))
        put(count, len(clients))
        if room < len(clients) or (out is None and clients):
            return INSUFFICIENT_SIZE
        for position, client in enumerate(clients):
            slot = target(out)[position]
            slot.pid, slot.usedGpuMemory = client.pid, client.memory_bytes
            slot.gpuInstanceId = WHOLE if client.instance is None else client.instance
            inner = client.compute_instance
            slot.computeInstanceId = (
                WHOLE if client.instance is None else 0 if inner is None else inner
            )
        return OK

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        del out
        self._resolve(handle, DEVICE, MIG)
        put(count, 0)
        return OK

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:
        return self._nvmlDeviceGetGraphicsRunningProcesses_v3(handle, count, out)

    # --- measurements ---

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:
        _, state = self._gpu(handle)
        with self.machine.call("device.sample", state.id):
            pass
        array = target(values)
        now_s = self.machine.now_s()
        stamp_us = int((time.time() - (self._boot_s() - now_s)) * 1e6)
        for position in range(number(count)):
            slot = array[position]
            slot.timestamp = stamp_us
            value = self._field(state, int(slot.fieldId), now_s)
            if int(slot.fieldId) in {138, 139} and int(slot.scopeId) != 0xFFFFFFFF:
                value = None  # of one link: not asked for here
            slot.nvmlReturn = OK if value is not None else NOT_SUPPORTED
            slot.valueType = 3
            slot.value.ullVal = int(value or 0)
        return OK

    @staticmethod
    def _boot_s() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def _field(self, state: DeviceState, field: int, now_s: float) -> float | None:
        model = self.machine.power_model(state)
        board = self._board(state)
        late = board.architecture != "ampere"
        active = state.mig and bool(state.instances)
        known: dict[int, float | None] = {
            3: state.ecc_corrected,
            4: state.ecc_uncorrected,
            5: state.ecc_corrected,
            6: state.ecc_uncorrected,
            74: model.throttle_at(now_s) * 1e9,
            83: model.energy_at(now_s) * 1e3,
            94: 0,
            144: None if active else float(state.row_remap_pending),
            145: None if active else float(state.row_remap_failed),
            184: float(late),
            186: model.power_w(now_s) * 1e3,
            190: model.cap_w * 1e3 if late else None,
            199: 1,
            230: float(state.recovery_action),
            **(dict.fromkeys((38, 45, 52, 59), 2.0) if board.nvlinks else {}),
            **({138: now_s * 1000, 139: now_s * 500} if board.nvlinks else {}),
            269: 0,
            270: 0,
            271: 0,
        }
        return known.get(field)

    def _nvmlDeviceGetMarginTemperature(self, handle: Any, info: Any) -> int:
        _, state = self._gpu(handle)
        out = target(info)
        if out.version != 0x1000008:
            return ARGUMENT_VERSION_MISMATCH
        out.marginTemperature = int(self.machine.power_model(state).headroom_c(self._now()))
        return OK

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> int:
        del sensor
        _, state = self._gpu(handle)
        model = self.machine.power_model(state)
        put(out, int(model.limit_c - model.headroom_c(self._now())))
        return OK

    def _nvmlDeviceGetTemperatureThreshold(self, handle: Any, kind: Any, out: Any) -> int:
        del kind
        put(out, int(self._gpu(handle)[0].board.temperature_limit_c))
        return OK

    def _nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:
        _, state = self._gpu(handle)
        put(out, int(self.machine.power_model(state).power_w(self._now()) * 1e3))
        return OK

    def _nvmlDeviceGetComputeMode(self, handle: Any, out: Any) -> int:
        self._gpu(handle)
        put(out, self.compute_mode)
        return OK

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:
        _, state = self._gpu(handle)
        put(out, int(self.machine.power_model(state).energy_at(self._now()) * 1e3))
        return OK

    def _nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> int:
        del counter
        _, state = self._gpu(handle)
        put(out, state.ecc_uncorrected if number(kind) else state.ecc_corrected)
        return OK

    def _nvmlDeviceGetRemappedRows(
        self, handle: Any, corrected: Any, uncorrected: Any, pending: Any, failed: Any
    ) -> int:
        _, state = self._gpu(handle)
        if state.mig and state.instances:
            return NOT_SUPPORTED
        put(corrected, 0)
        put(uncorrected, int(state.row_remap_pending))
        put(pending, int(state.row_remap_pending))
        put(failed, int(state.row_remap_failed))
        return OK

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, out: Any) -> int:
        _, state = self._gpu(handle)
        load = self.machine.power_model(state).wave.load
        put(out, 0x4 if load > signals.THROTTLE_FROM else 0x1 if load == 0 else 0)
        return OK

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:
        state, kind, _, _ = self._resolve(handle, DEVICE, MIG)
        if kind == MIG or state.mig:
            return NOT_SUPPORTED
        busy = self.machine.power_model(state).wave.at(self._now())
        target(out).gpu, target(out).memory = int(busy * 100), int(busy * 60)
        return OK

    def _now(self) -> float:
        return self.machine.now_s()

    def _limits_key(self, state: DeviceState, limits: Any) -> tuple[str, str]:
        if not self.traits.memory_limits:
            raise CodeError(NOT_SUPPORTED)
        name = limits.nameSpace
        text = name.decode() if isinstance(name, bytes) else str(name)
        if not text.startswith("/"):
            raise CodeError(INVALID_ARGUMENT)
        return state.id, text

    def _nvmlDeviceSetMemoryLimits_v1(self, handle: Any, limits: Any) -> int:
        _, state = self._gpu(handle)
        if not self.traits.privileged:
            return NO_PERMISSION
        asked = target(limits)
        self.memory_limits[self._limits_key(state, asked)] = (asked.softLimit, asked.hardLimit)
        return OK

    def _nvmlDeviceGetMemoryLimits_v1(self, handle: Any, limits: Any) -> int:
        _, state = self._gpu(handle)
        out = target(limits)
        known = self.memory_limits.get(self._limits_key(state, out), (0, (1 << 64) - 1))
        out.softLimit, out.hardLimit = known
        out.currentUsed = 0
        return OK

    # --- topology ---

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, out: Any) -> int:
        gpu, _ = self._gpu(handle)
        if not gpu.board.nvlinks:
            return NOT_SUPPORTED
        if number(link) >= gpu.board.nvlinks:
            return INVALID_ARGUMENT
        put(out, 1)
        return OK

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: Any, out: Any) -> int:
        left, right = self._gpu(one), self._gpu(other)
        nvlink = number(index) == 2
        mig = left[1].mig or right[1].mig
        linked = left[0].board.nvlinks and right[0].board.nvlinks and not mig
        put(out, 0 if (linked or not nvlink) and not mig else 5)
        return OK

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, out: Any) -> int:
        left, right = self._gpu(one)[1], self._gpu(other)[1]
        put(out, 0 if left.id == right.id else 30 if left.numa == right.numa else 50)
        return OK

    def _nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> int:
        gpu, state = self._gpu(handle)
        out = target(info)
        if out.version not in {0x02000024, 0x3000028}:
            return ARGUMENT_VERSION_MISMATCH
        script = self.fabric.get(state.id)
        if gpu.board.architecture == "ampere":
            return NOT_SUPPORTED
        out.state, out.status, out.cliqueId, uuid, health = script or (3, 0, 1, b"\x07" * 16, 1)
        for position, byte in enumerate(uuid):
            out.clusterUuid[position] = byte
        if out.version == 0x3000028:
            out.healthSummary = health
        return OK

    @property
    def fabric(self) -> dict[str, tuple[int, int, int, bytes, int]]:
        """Scripted fabric answers: state, status, clique, cluster UUID, health summary."""
        scripts: dict[str, tuple[int, int, int, bytes, int]] = self.__dict__.setdefault(
            "_fabric", {}
        )
        return scripts

    # --- GPM ---

    def _nvmlGpmQueryDeviceSupport(self, handle: Any, info: Any) -> int:
        gpu, _ = self._gpu(handle)
        target(info).isSupportedDevice = int(gpu.board.architecture != "ampere")
        return OK

    def _nvmlGpmSampleAlloc(self, out: Any) -> int:
        with self._lock:
            self._next += 1
            self._samples[self._next] = _Sample()
            put_pointer(out, self._next)
        return OK

    def _nvmlGpmSampleFree(self, sample: Any) -> int:
        self._free(pointer(sample))
        return OK

    def _free(self, key: int) -> None:
        found = self._samples.pop(key, None)
        if found is None:
            raise CodeError(INVALID_ARGUMENT)
        self._release(found)

    def _release(self, sample: _Sample) -> None:
        if sample.held:
            self.machine.close_handle(sample.device, sample.instance)
            sample.held = False

    def _take(self, state: DeviceState, instance: int | None, sample: Any) -> int:
        if self._board(state).architecture == "ampere":
            return NOT_SUPPORTED
        with self.machine.call("device.sample", state.id):
            pass
        found = self._samples.get(pointer(sample))
        if found is None:
            return INVALID_ARGUMENT
        self._release(found)
        found.device, found.instance, found.taken_s = state.id, instance, self._now()
        self.machine.open_handle(state.id, instance)
        found.held = True
        return OK

    def _nvmlGpmSampleGet(self, handle: Any, sample: Any) -> int:
        _, state = self._gpu(handle)
        return self._take(state, None, sample)

    def _nvmlGpmMigSampleGet(self, handle: Any, instance: Any, sample: Any) -> int:
        gpu, state = self._gpu(handle)
        found = gpu.instance(number(instance))
        return self._take(state, found.id, sample)

    def _nvmlGpmMetricsGet(self, request: Any) -> int:
        out = target(request)
        if out.version != 1:
            return ARGUMENT_VERSION_MISMATCH
        one = self._samples.get(_field_pointer(out, "sample1"))
        two = self._samples.get(_field_pointer(out, "sample2"))
        if one is None or two is None or (one.device, one.instance) != (two.device, two.instance):
            return INVALID_ARGUMENT
        if two.taken_s - one.taken_s < GPM_REFRESH_S * 0.99:
            return INVALID_ARGUMENT
        state = self.machine.device(two.device)
        ratio = self._busy(state, two.instance)(two.taken_s)
        for position in range(out.numMetrics):
            metric = out.metrics[position]
            factor = {2: 100.0, 10: 60.0}.get(metric.metricId)
            metric.nvmlReturn = NOT_SUPPORTED if factor is None else OK
            metric.value = ratio * (factor or 0.0)
        return OK

    def _busy(self, state: DeviceState, instance: int | None) -> Callable[[float], float]:
        clients = self._clients(state, instance)
        load = sum(client.load_ratio for client in clients)
        key = f"{state.id}/{instance}"
        return signals.wave(self.machine.state.seed, key, load).at

    # --- events ---

    def _nvmlDeviceGetSupportedEventTypes(self, handle: Any, out: Any) -> int:
        self._gpu(handle)
        put(out, SUPPORTED_EVENTS)
        return OK

    def _nvmlEventSetCreate(self, out: Any) -> int:
        with self._lock:
            self._next += 1
            self._sets[self._next] = _EventSet({}, self.machine.state.event_number)
            put_pointer(out, self._next)
        return OK

    def _nvmlEventSetFree(self, handle: Any) -> int:
        entry = self._sets.pop(pointer(handle), None)
        if entry is None:
            return INVALID_ARGUMENT
        for device in entry.devices:
            self.machine.close_handle(device)
        return OK

    def _nvmlDeviceRegisterEvents(self, handle: Any, types: Any, event_set: Any) -> int:
        _, state = self._gpu(handle)
        entry = self._sets.get(pointer(event_set))
        if entry is None or number(types) & ~SUPPORTED_EVENTS:
            return INVALID_ARGUMENT
        if state.id not in entry.devices:
            self.machine.open_handle(state.id)
        entry.devices[state.id] = entry.devices.get(state.id, 0) | number(types)
        return OK

    def _nvmlEventSetWait_v2(self, handle: Any, data: Any, timeout_ms: Any) -> int:
        entry = self._sets.get(pointer(handle))
        if entry is None:
            return INVALID_ARGUMENT
        deadline = time.monotonic() + number(timeout_ms) / 1000
        while True:
            left = max(0.0, deadline - time.monotonic())
            for event in self.machine.wait_events(entry.seen, left):
                entry.seen = event.number
                found = self._as_event(event.kind, event.code)
                mask = entry.devices.get(event.device, 0)
                if found is None or not mask & found[0]:
                    continue
                out = target(data)
                index = self._index(self.machine.device(event.device))
                put_field_pointer(out, "device", self._handle(DEVICE, index))
                out.eventType, out.eventData = found
                out.gpuInstanceId = WHOLE if event.instance is None else event.instance
                out.computeInstanceId = WHOLE
                return OK
            if any(self.machine.device(device).lost for device in entry.devices):
                return GPU_IS_LOST
            if time.monotonic() >= deadline:
                return TIMEOUT

    @staticmethod
    def _as_event(kind: str, code: str) -> tuple[int, int] | None:
        if kind == "geometry":
            return MIG_EVENT, 0
        family, _, mark = code.partition(":")
        if kind == "fault" and family == "xid" and mark.isdecimal():
            return XID_EVENT, int(mark)
        return None


def _field_pointer(struct: Any, field: str) -> int:
    import ctypes

    place = ctypes.addressof(struct) + getattr(type(struct), field).offset
    return ctypes.c_void_p.from_address(place).value or 0
