"""What a driver reload or a restart of the node leaves of the devices' state.

Source: MIG User Guide v580 (instances never persist; the mode persists on Ampere only); kernel
amdgpu (a requested memory mode holds at load, the compute mode follows it); aws-neuron-driver
(software counters start anew).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alloy_agent.silicon.amd import auto_mode
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NvidiaBoard
from alloy_agent.silicon.state import DeviceState

if TYPE_CHECKING:
    from alloy_agent.silicon.machine import Machine


def restart_devices(machine: Machine, *, power_cycle: bool) -> None:
    """Change all devices as loading their drivers does; `power_cycle`: the node went down too."""
    _apply_memory_requests(machine)
    for device in machine.state.devices:
        device.energy_j = device.throttle_s = 0.0
        device.energy_since_s = machine.now_s()
        if power_cycle:
            _power_cycle(device)
        board = BOARDS[device.board]
        if isinstance(board, NvidiaBoard):
            _restart_nvidia(device, board, power_cycle=power_cycle)
        elif isinstance(board, AmdBoard) and board.compute_modes:
            device.compute_mode = auto_mode(board, device.memory_mode)
            device.switches += 1
            device.isolation = [0] * len(machine.amd_partitions(device))
        machine.emit(device.id, "reset", "reboot" if power_cycle else "driver_reload")


def _power_cycle(device: DeviceState) -> None:
    device.grants = []  # bindings live on a memory file system
    device.lost = False
    device.needs_reset = False
    device.recovery_action = 0
    device.ecc_corrected = device.ecc_uncorrected = 0
    device.row_remap_pending = False


def _restart_nvidia(device: DeviceState, board: NvidiaBoard, *, power_cycle: bool) -> None:
    device.instances = []
    if not board.mig_survives_reboot:
        device.mig = device.mig_pending = False
    elif power_cycle:
        device.mig = device.mig_pending


def _apply_memory_requests(machine: Machine) -> None:
    """Let requested memory modes hold where all members of the hive ask for the same."""
    for device in machine.state.devices:
        wanted = device.memory_requested
        if wanted is None:
            continue
        members = [machine.device(member) for member in machine.hive(device.id)]
        if all(wanted == (peer.memory_requested or peer.memory_mode) for peer in members):
            for peer in members:
                peer.memory_mode = wanted
                peer.memory_requested = None
