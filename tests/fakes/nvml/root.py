"""The files that the NVIDIA kernel driver shows, for a simulated machine."""

from __future__ import annotations

from pathlib import Path

from alloy_agent.silicon.boards import NvidiaBoard
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.nvidia import caps_minor

CAPS_MAJOR = 237


def write_root(machine: Machine, root: Path) -> Path:
    """Write `/proc/driver/nvidia*` and `/proc/devices` below `root`; returns it."""
    driver = root / "proc/driver"
    (driver / "nvidia-caps").mkdir(parents=True, exist_ok=True)
    lines = ["config 1", "monitor 2"]
    version = ""
    for device in machine.state.devices:
        board = machine.board(device.id)
        if not isinstance(board, NvidiaBoard):
            continue
        version = device.driver
        bus = f"0000:{device.bus.split(':', 1)[1]}"
        place = driver / "nvidia/gpus" / bus
        place.mkdir(parents=True, exist_ok=True)
        (place / "information").write_text(
            f"Model: \t\t {board.product}\nGPU UUID: \t {device.uuid}\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {device.minor}\n"
        )
        numa = root / "sys/bus/pci/devices" / bus
        numa.mkdir(parents=True, exist_ok=True)
        (numa / "numa_node").write_text(f"{device.numa}\n")
        for instance in range(15):
            lines.append(
                f"gpu{device.minor}/gi{instance}/access {caps_minor(device.minor, instance)}"
            )
            lines += [
                f"gpu{device.minor}/gi{instance}/ci{compute}/access "
                f"{caps_minor(device.minor, instance, compute)}"
                for compute in range(8)
            ]
    (driver / "nvidia").mkdir(exist_ok=True)
    (driver / "nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Release Build\n"
    )
    (driver / "nvidia-caps/mig-minors").write_text("\n".join(lines) + "\n")
    (root / "proc/devices").write_text(
        f"Character devices:\n  1 mem\n195 nvidia\n{CAPS_MAJOR} nvidia-caps\n\nBlock devices:\n"
    )
    return root
