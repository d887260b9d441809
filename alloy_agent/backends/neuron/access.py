"""What a tenant is handed: device nodes and the variables its runtime reads. Pure.

Source: AWS Neuron SDK, NeuronX runtime configuration. NEURON_RT_VISIBLE_CORES counts logical cores
over all devices that the process sees, and wins over NEURON_RT_NUM_CORES, whose default is all
cores. Inside a container the count starts at the first device that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import Access, Value

# What would let a tenant's runtime take more than the run, or read another configuration.
UNSET: Final = ("NEURON_RT_NUM_CORES", "NEURON_RT_VIRTUAL_CORE_SIZE", "AWS_NEURON_VISIBLE_DEVICES")
PORTS_EACH: Final = 16  # so that runs of different starts never meet in a port


class Run(Value, frozen=True, kw_only=True):
    """A run of logical cores of one device, with what its numbering depends on."""

    number: int  # of the device node
    start: int
    size: int
    lnc: int
    device_cores: int  # logical ones of each device, under this configuration


def access_of(
    runs: Sequence[Run],
    tag: str,
    *,
    has_lnc: bool,
    ports_from: int,
    counted_from: int = 0,
) -> Access:
    """Return what enters one run, or several of neighbouring devices as one set.

    Args:
        runs: In the order of their devices.
        tag: Name of the allocation, for the runtime's process tag.
        has_lnc: Whether these devices have a choice of logical core configuration.
        ports_from: Port that belongs to core 0 of device 0.
        counted_from: Device with whose first core the count starts.

    Raises:
        PlanImpossibleError: The cores are no single run, or the configurations differ.
    """
    first, last = runs[0], runs[-1]
    if len({run.lnc for run in runs}) > 1:
        raise PlanImpossibleError(
            f"{tag}: its devices have different logical core configurations",
            cure="give them one, the runtime takes it for the whole process",
        )
    cores = [core for run in runs for core in _cores(run, counted_from)]
    if cores != list(range(cores[0], cores[0] + len(cores))):
        raise PlanImpossibleError(
            f"{tag}: cores {_shown(cores)} have a hole",
            cure="take whole neighbouring devices, the runtime wants one run",
        )
    environment = {
        "NEURON_RT_VISIBLE_CORES": _range(cores[0], cores[-1]),
        "NEURON_PROCESS_TAG": tag,
    }
    if has_lnc:
        environment["NEURON_LOGICAL_NC_CONFIG"] = str(first.lnc)
    if len(cores) > 1:
        port = ports_from + first.number * PORTS_EACH + first.start
        environment["NEURON_RT_ROOT_COMM_ID"] = f"127.0.0.1:{port}"
    nodes = tuple(f"/dev/neuron{number}" for number in range(first.number, last.number + 1))
    return Access(device_nodes=nodes, environment=environment, unset=UNSET)


def group_tag(first: str, count: int) -> str:
    """Return the name of a group: that of its first piece, and how many more there are."""
    return f"{first}+{count - 1}"


def _cores(run: Run, counted_from: int) -> range:
    first = (run.number - counted_from) * run.device_cores + run.start
    return range(first, first + run.size)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _shown(cores: list[int]) -> str:
    return ", ".join(map(str, cores[:16]))
