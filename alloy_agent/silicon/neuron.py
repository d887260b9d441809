"""What a Neuron device does and refuses: logical core configuration, core holders, core order.

Rules that stay true in here (Source: aws-neuron-driver 2.24.7):

* A core reservation binds only those who ask: a client may hold cores that nobody granted to it.
* Logical cores are numbered by the driver's own order, which on trn2 is not the sysfs order.
* At most 16 processes attach to one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from alloy_agent.silicon.boards import NeuronInstance
from alloy_agent.silicon.refusals import InUseError, InvalidArgumentError
from alloy_agent.silicon.state import DeviceState

if TYPE_CHECKING:
    from alloy_agent.silicon.machine import Machine

ATTACH_MAX: Final = 16


def logical_cores(board: NeuronInstance, device: DeviceState) -> int:
    """Return how many logical cores the device has in its present configuration."""
    return board.cores // device.lnc


def physical_cores(
    board: NeuronInstance, device: DeviceState, start: int, size: int
) -> tuple[int, ...]:
    """Return the sysfs numbers of the physical cores behind a run of logical cores."""
    order = range(board.cores)
    if board.logical_to_physical:
        number = neuron_number(board, device)
        return board.logical_to_physical[number][start * device.lnc : (start + size) * device.lnc]
    return tuple(order[start * device.lnc : (start + size) * device.lnc])


def neuron_number(board: NeuronInstance, device: DeviceState) -> int:
    """Return N of /dev/neuronN; found by bus address, which is unique within an instance."""
    return board.bdfs.index(device.bus)


class NeuronDevice:
    """The calls of one Neuron device; each is one vendor call, subject to scripted faults."""

    def __init__(self, machine: Machine, device: str, board: NeuronInstance) -> None:
        self._machine = machine
        self.id = device
        self.board = board

    def lnc(self) -> int:
        """Return the logical core configuration: physical cores per logical core."""
        with self._machine.call("neuron.query", self.id) as device:
            return device.lnc

    def set_lnc(self, lnc: int) -> None:
        """Change the configuration that processes of this device start with.

        Raises:
            InvalidArgumentError: The architecture does not have it.
            InUseError: Processes run, or cores are granted, under the present one.
        """
        with self._machine.call("neuron.set_lnc", self.id, change=True) as device:
            if lnc not in self.board.lnc:
                raise InvalidArgumentError(f"{self.id}: no logical core configuration {lnc}")
            if lnc == device.lnc:
                return
            holders = self._machine.holders(self.id)
            if holders:
                raise InUseError(f"{self.id}: processes use the device", holders=holders)
            if any(grant.kind == "cores" for grant in device.grants):
                raise InUseError(f"{self.id}: cores are granted under LNC {device.lnc}")
            device.lnc = lnc
            self._machine.emit(self.id, "geometry", f"lnc{lnc}")

    def reset(self) -> None:
        """Reset the device. Like the driver's file: silently nothing while somebody holds it."""
        with self._machine.call("neuron.reset", self.id, change=True) as device:
            if not self._machine.holders(self.id):
                device.needs_reset = False
                self._machine.emit(self.id, "reset", "reset")
