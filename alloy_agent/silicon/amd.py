"""What an Instinct accelerator does and refuses: compute modes, memory modes, partitions.

Rules that stay true in here (Source: kernel amdgpu `aqua_vanjaram.c`, `amdgpu_xcp.c`, KFD):

* A compute mode must fit the number of XCCs and the memory mode of the moment (EINVAL), needs a
  device without compute clients (EBUSY), holds at once, and takes effect on one device.
* A memory mode is only requested; it takes effect at the next driver load, on all members of a
  hive, when all of them ask for the same. The driver then picks the compute mode that goes with it.
* Every switch renumbers what is not the primary: render minors of partitions, KFD ids.
* There are 64 DRM minors. A partition that gets none has no render node: its XCD is lost.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.silicon.boards import AmdBoard
from alloy_agent.silicon.boards.amd import (
    COMPATIBLE_MEMORY,
    memory_partitions_of,
    partitions_of,
)
from alloy_agent.silicon.boards.shapes import MIB
from alloy_agent.silicon.refusals import InUseError, InvalidArgumentError, NotSupportedError
from alloy_agent.silicon.state import DeviceState

if TYPE_CHECKING:
    from alloy_agent.silicon.machine import Machine

RENDER_FIRST: Final = 128
RENDER_LAST: Final = 191
MINOR_LAST: Final = (1 << 20) - 1  # where newer kernels end; drm_drv.c
RENDER_PER_DEVICE: Final = 8


class XcdPartition(msgspec.Struct, frozen=True, kw_only=True):
    """One live partition: `xcds` XCDs from `first_xcd` on. `render_minor` None: it got no node."""

    number: int
    first_xcd: int
    xcds: int
    cus: int
    memory_bytes: int
    render_minor: int | None
    kfd_gpu_id: int


def fits(board: AmdBoard, mode: str, memory_mode: str) -> bool:
    """Return whether a compute mode works on this board in this memory mode."""
    if mode not in board.compute_modes or memory_mode not in COMPATIBLE_MEMORY[mode]:
        return False
    count = partitions_of(mode, board.xcds)
    return board.xcds % count == 0 and (mode != "DPX" or board.xcds % 4 == 0)


def auto_mode(board: AmdBoard, memory_mode: str) -> str:
    """Return the compute mode that the driver picks at load for a memory mode."""
    parts = memory_partitions_of(memory_mode)
    if parts == 1:
        return "SPX"
    if parts == 2:
        return "DPX"
    return "TPX" if board.apu and parts * 2 == board.xcds else "CPX"


def partitions(
    board: AmdBoard, device: DeviceState, ordinal: int, *, minors: range, seed: int
) -> tuple[XcdPartition, ...]:
    """Return the partitions of a device; `ordinal` counts the node's AMD devices from 0."""
    count = partitions_of(device.compute_mode, board.xcds) if device.compute_mode else 1
    size = board.xcds // count
    base = minors.start + RENDER_PER_DEVICE * ordinal
    found = []
    for number in range(count):
        minor = base
        if number:
            minor += 1 + (number - 1 + device.switches) % (RENDER_PER_DEVICE - 1)
        mark = zlib.crc32(f"{seed}/{device.bus}/{number}/{device.switches}".encode())
        found.append(
            XcdPartition(
                number=number,
                first_xcd=number * size,
                xcds=size,
                cus=size * board.cus_per_xcd,
                memory_bytes=board.memory_mib * MIB // count,
                render_minor=minor if minor in minors else None,
                kfd_gpu_id=1 + mark % 65535,
            )
        )
    return tuple(found)


class AmdGpu:
    """The calls of one accelerator; each is one vendor call, subject to scripted faults."""

    def __init__(self, machine: Machine, device: str, board: AmdBoard) -> None:
        self._machine = machine
        self.id = device
        self.board = board

    def modes(self) -> tuple[str, str, str | None]:
        """Return compute mode, memory mode and requested memory mode; empty texts: it has none."""
        with self._machine.call("amd.query", self.id) as device:
            return device.compute_mode, device.memory_mode, device.memory_requested

    def available_compute_modes(self) -> tuple[str, ...]:
        """Return the compute modes that work in the memory mode of the moment."""
        with self._machine.call("amd.query", self.id) as device:
            return tuple(
                mode
                for mode in self.board.compute_modes
                if fits(self.board, mode, device.memory_mode)
            )

    def partitions(self) -> tuple[XcdPartition, ...]:
        """Return the partitions that are live now."""
        with self._machine.call("amd.query", self.id) as device:
            return self._machine.amd_partitions(device)

    def set_compute_mode(self, mode: str) -> None:
        """Cut the device anew, at once.

        Raises:
            NotSupportedError: The board has no modes.
            InvalidArgumentError: Unknown, or does not fit the memory mode.
            InUseError: A process has the device open.
        """
        with self._machine.call("amd.set_compute_mode", self.id, change=True) as device:
            if not self.board.compute_modes:
                raise NotSupportedError(f"{self.id}: {self.board.product} has no compute modes")
            if not fits(self.board, mode, device.memory_mode):
                raise InvalidArgumentError(
                    f"{self.id}: compute mode {mode} is not valid in {device.memory_mode}"
                )
            if mode == device.compute_mode:
                return
            holders = self._machine.kfd_holders(self.id)
            if holders:
                raise InUseError(f"{self.id}: device or resource busy", holders=holders)
            device.compute_mode = mode
            device.switches += 1
            device.isolation = [0] * partitions_of(mode, self.board.xcds)
            self._machine.emit(self.id, "geometry", mode)

    def request_memory_mode(self, mode: str) -> None:
        """Ask for a memory mode at the next driver load.

        Raises:
            NotSupportedError: The board has one memory mode only.
            InvalidArgumentError: The board does not have this one.
        """
        with self._machine.call("amd.set_memory_mode", self.id, change=True) as device:
            if len(self.board.memory_modes) < 2:
                raise NotSupportedError(f"{self.id}: {self.board.product} has no memory modes")
            if mode not in self.board.memory_modes:
                raise InvalidArgumentError(f"{self.id}: no memory mode {mode}")
            device.memory_requested = None if mode == device.memory_mode else mode

    def set_isolation(self, values: list[int]) -> None:
        """Set process isolation (0 or 1) for each partition.

        Raises:
            InvalidArgumentError: Not one value per partition.
        """
        with self._machine.call("amd.set_isolation", self.id, change=True) as device:
            count = len(self._machine.amd_partitions(device))
            if len(values) != count or not set(values) <= {0, 1}:
                raise InvalidArgumentError(f"{self.id}: isolation needs {count} values 0 or 1")
            device.isolation = list(values)
