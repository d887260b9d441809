"""Machines for the tests."""

from __future__ import annotations

from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.nvidia import NvidiaGpu
from alloy_agent.silicon.spec import parse_specs

SEVENTH, SEVENTH_ME, DOUBLE, TWO, THREE, FOUR, WHOLE = 19, 20, 15, 14, 9, 5, 0


def machine_of(*specs: str) -> Machine:
    """Return a machine that ends with the test."""
    return open_machine(parse_specs(specs))


def first(machine: Machine) -> str:
    """Return the id of the first device."""
    return machine.state.devices[0].id


def mig_gpu(spec: str = "1xH100") -> tuple[Machine, NvidiaGpu]:
    """Return a machine and its first GPU with MIG on."""
    machine = machine_of(spec)
    gpu = machine.nvidia(first(machine))
    assert gpu.set_mig_mode(True) == 0
    return machine, gpu
