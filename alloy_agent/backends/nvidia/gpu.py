"""One GPU: its handle, what never changes about it, and what it is cut into now."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, Final, NamedTuple

from alloy_agent.backends.nvidia.instances import InstanceReader, Piece, Shape, read_shapes
from alloy_agent.backends.nvidia.library import (
    ABSENT,
    GONE,
    GPU_IS_LOST,
    LOST,
    Nvml,
    NvmlCallError,
)
from alloy_agent.backends.nvidia.topology import Topology
from alloy_agent.model import DeviceId

AMPERE: Final = 7  # nvml.h: NVML_DEVICE_ARCH_*
HOPPER: Final = 9
RESETLESS_FIELD: Final = 184  # NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED
# CUDA cores of one multiprocessor, by compute capability.
# Source: CUDA C Programming Guide, "Compute Capabilities", arithmetic throughput of 32-bit floats.
CORES_PER_SM: Final[dict[tuple[int, int], int]] = {
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
}


class Identity(NamedTuple):
    """What stays the same while the driver is loaded."""

    name: str
    serial: str | None
    bus: str
    pci_id: str
    minor: int | None
    numa: int | None
    memory_bytes: int | None
    multiprocessors: int | None
    mig_capable: bool
    resetless: bool
    gpm: bool
    shapes: tuple[Shape, ...]


class Gpu:
    """One GPU of this host, found by its UUID."""

    def __init__(self, nvml: Nvml, uuid: str, root: Path, index: int = 0) -> None:
        self.nvml = nvml
        self.id = DeviceId(uuid)
        self.index = index
        self._root = root
        self._handle: Any = None
        self._identity: Identity | None = None
        self._reader = InstanceReader(nvml)
        self.lock = threading.RLock()
        self.topology = Topology()
        self.names: dict[int, str] = {}  # GPU instance id to partition id, as last read

    def handle(self) -> Any:
        """Return the handle, resolved by UUID when there is none.

        Raises:
            NvmlCallError: The GPU has gone, or does not answer.
        """
        handle = self._handle
        if handle is None:
            try:
                handle = self.nvml.call("nvmlDeviceGetHandleByUUID", str(self.id))
            except NvmlCallError as failure:
                if failure.code in GONE:
                    text = "no such GPU in the driver's enumeration any more"
                    raise NvmlCallError(failure.name, GPU_IS_LOST, text) from failure
                raise
            self._handle = handle
        return handle

    def forget_handle(self) -> None:
        """Drop the handle; the next use resolves it again."""
        self._handle = None

    def has_handle(self) -> bool:
        """Whether a handle is kept."""
        return self._handle is not None

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Make one call on this GPU; a lost one gives up its handle."""
        try:
            return self.nvml.call(name, self.handle(), *args, **named)
        except NvmlCallError as failure:
            if failure.code in LOST:
                self.forget_handle()
            raise

    def maybe(self, name: str, *args: Any, default: Any = None, **named: Any) -> Any:
        """Return what a call on this GPU returns, or `default` where it does not exist."""
        try:
            return self.call(name, *args, **named)
        except NvmlCallError as failure:
            if failure.code in ABSENT:
                return default
            raise

    # --- what does not change ---

    def identity(self) -> Identity:
        """Return what stays the same; read once, and again after the GPU was lost."""
        if self._identity is None:
            self._identity = self._read_identity()
        return self._identity

    def forget(self) -> None:
        """Drop all that is remembered, after a reset or a reload of the driver."""
        self._identity = None
        self._handle = None
        self._reader = InstanceReader(self.nvml)
        self.topology = Topology()

    def _read_identity(self) -> Identity:
        pci = self.call("nvmlDeviceGetPciInfo")
        bus = _bus(pci.busId)
        memory = self.maybe("nvmlDeviceGetMemoryInfo")
        memory_bytes = None if memory is None else int(memory.total)
        mig = self.maybe("nvmlDeviceGetMigMode")
        shapes: tuple[Shape, ...] = ()
        if mig is not None:
            shapes = read_shapes(self.nvml, self.handle(), memory_bytes)
        return Identity(
            name=str(self.call("nvmlDeviceGetName")).removeprefix("NVIDIA ").strip(),
            serial=self.maybe("nvmlDeviceGetSerial"),
            bus=bus,
            pci_id=f"0x{int(pci.pciDeviceId):08x}",
            minor=self.maybe("nvmlDeviceGetMinorNumber"),
            numa=self._numa(bus),
            memory_bytes=memory_bytes,
            multiprocessors=self._multiprocessors(),
            mig_capable=bool(shapes),
            resetless=self._resetless(),
            gpm=self._gpm(),
            shapes=shapes,
        )

    def _multiprocessors(self) -> int | None:
        cores = self.maybe("nvmlDeviceGetNumGpuCores")
        capability = self.maybe("nvmlDeviceGetCudaComputeCapability")
        if cores is None or capability is None:
            return None
        per_unit = CORES_PER_SM.get((int(capability[0]), int(capability[1])))
        return None if per_unit is None else int(cores) // per_unit

    def _resetless(self) -> bool:
        value = self.field(RESETLESS_FIELD)
        if value is not None:
            return bool(value)
        architecture = self.maybe("nvmlDeviceGetArchitecture", default=AMPERE)
        return int(architecture) >= HOPPER

    def _gpm(self) -> bool:
        try:
            return bool(self.call("nvmlGpmQueryDeviceSupport").isSupportedDevice)
        except NvmlCallError as failure:
            if failure.code in LOST:
                raise
            return False

    def _numa(self, bus: str) -> int | None:
        """Return the CPU node; the kernel's -1 is "unknown", never node 0."""
        try:
            text = (self._root / "sys/bus/pci/devices" / bus / "numa_node").read_text()
            node = int(text)
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # --- what changes ---

    def field(self, field: int) -> float | None:
        """Return one field value, or None where the driver does not tell it."""
        values = self.maybe("nvmlDeviceGetFieldValues", [field])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return field_number(values[0])

    def mig(self) -> tuple[bool, bool] | None:
        """Return whether MIG is on and whether it will be; None: this GPU has no MIG."""
        mode = self.maybe("nvmlDeviceGetMigMode")
        return None if mode is None else (bool(mode[0]), bool(mode[1]))

    def pieces(self) -> tuple[Piece, ...]:
        """Return all GPU instances, the half-made ones too."""
        return self._reader.read(self.handle(), self.identity().shapes)

    def compute_profiles(self, gpu_instance: Any, shape: Shape) -> tuple[tuple[int, int, int], ...]:
        """Return the compute instance profiles of a GPU instance."""
        return self._reader.compute_profiles(gpu_instance, shape)

    def compute_of(self, gpu_instance: Any, shape: Shape) -> tuple[Any, ...]:
        """Return the compute instances of a GPU instance."""
        return self._reader.compute_of(gpu_instance, shape)

    def mig_handle(self, piece: Piece, number: int = 0) -> Any:
        """Return the MIG device handle of a compute instance; the caller lets go of it."""
        info = self.nvml.call("nvmlComputeInstanceGetInfo_v2", piece.compute[number].handle)
        return info.device

    def processes(self, handle: Any = None) -> tuple[tuple[int, int | None, int | None], ...]:
        """Return `(pid, GPU instance or None, bytes or None)` of each process on the GPU."""
        return self.told_processes(handle) or ()

    def told_processes(
        self, handle: Any = None
    ) -> tuple[tuple[int, int | None, int | None], ...] | None:
        """Return the processes on the GPU; None: the driver does not tell who computes on it."""
        found: dict[int, tuple[int, int | None, int | None]] = {}
        told = False
        for kind in ("Compute", "Graphics", "MPSCompute"):
            name = f"nvmlDeviceGet{kind}RunningProcesses"
            with contextlib.suppress(_AbsentError):
                running = self._running(name, handle or self.handle())
                told = told or kind == "Compute"
                for process in running:
                    instance = int(process.gpuInstanceId)
                    used = process.usedGpuMemory
                    found[int(process.pid)] = (
                        int(process.pid),
                        None if instance == WHOLE else instance,
                        None if used is None else int(used),
                    )
        return tuple(found[pid] for pid in sorted(found)) if told else None

    def _running(self, name: str, handle: Any) -> list[Any]:
        for version in ("", "_v2"):
            try:
                return list(self.nvml.call(name + version, handle))
            except NvmlCallError as failure:
                if failure.code not in ABSENT:
                    raise
        raise _AbsentError


class _AbsentError(Exception):
    """The driver has no such function."""


WHOLE: Final = 0xFFFFFFFF  # nvml.h: no instance, or the whole GPU
_NOT_AVAILABLE: Final = float((1 << 64) - 1)


def field_number(value: Any) -> float | None:
    """Return a field's number by its type; None for the driver's "not available"."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    kind = int(value.valueType)
    if not 0 <= kind < len(names):
        return None
    number = float(getattr(value.value, names[kind]))
    return None if number >= _NOT_AVAILABLE else number


def _bus(text: str | bytes) -> str:
    """Return a bus address as sysfs writes it: four digits of domain, lower case."""
    address = text.decode() if isinstance(text, bytes) else text
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"
