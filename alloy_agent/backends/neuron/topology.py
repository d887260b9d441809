"""Which instance this is, how its devices are linked, and which sets of them work together. Pure.

The driver tells links from tables keyed on the number of devices: where one is missing it tells
none. So a device of a linked instance without links is degraded, not unlinked.

Source: aws-neuron-driver 2.24.7 (neighbour tables, core map of ioctl 128); AWS Neuron SDK, logical
cores, Trn2 architecture; valid sets for collectives: 1, 4 (a row), 8 (two rows) or 16 devices of a
4x4 torus, contiguous runs of a line or ring.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.silicon.boards.neuron import NEURON_INSTANCES
from alloy_agent.silicon.boards.shapes import GIB, NeuronInstance

ROW: Final = 4  # devices in a row of the torus
_XOR_NODES: Final = frozenset({1, 3})  # nodes of a 4-node UltraServer with rows swapped
_XOR: Final = 6
# trn2u.48xlarge is a trn2.48xlarge with links to three more. Source: SDK, Trn2 architecture.
_SAME_INSIDE: Final = {"trn2u.48xlarge": "trn2.48xlarge", "trn2u.3xlarge": "trn2.3xlarge"}


# What is documented of a Trainium3 device. Its instances' names, links and core order are not, so
# it forms no groups, counts as linked, and its cores are lent without saying which they are.
# Source: AWS Neuron SDK 2.32, Trainium3 architecture. Never seen on hardware.
TRAINIUM3: Final = NeuronInstance(
    name="unknown instance",
    product="Trainium3",
    instance_type="Trn3",
    arch="",
    core_arch="",
    pci_id=0,
    devices=0,
    cores=8,
    memory_bytes=144 * GIB,
    lnc=(2, 1),
    source="AWS Neuron SDK 2.32, trainium3.rst",
)


def find_instance(product_name: str, device_name: str, devices: int) -> NeuronInstance | None:
    """Return the table of this instance: by its type, else by what its devices are and how many.

    Args:
        product_name: Instance type as the firmware tells it; "" when it does not.
        device_name: Product of the devices, as the driver tells it.
        devices: How many there are.
    """
    name = _SAME_INSIDE.get(product_name, product_name)
    for instance in NEURON_INSTANCES:
        if instance.name == name and device_name in {"", instance.product}:
            return instance
    alike = [i for i in NEURON_INSTANCES if i.product == device_name and i.devices == devices]
    return alike[0] if alike else None


def find_product(device_name: str) -> NeuronInstance | None:
    """Return any instance with such devices: what one device is does not depend on the others."""
    known = (*NEURON_INSTANCES, TRAINIUM3)
    return next((i for i in known if i.product == device_name), None)


def is_linked(
    instance: NeuronInstance | None, number: int, told: Sequence[int], count: int
) -> bool:
    """Whether a device can be reached from others; where that is not known, it is.

    Args:
        instance: Its instance, if it is known.
        number: The device's.
        told: The neighbours that the driver tells.
        count: How many devices there are.
    """
    if told:
        return True
    if instance is None:
        return count > 1
    if number >= len(instance.neighbours):
        return True
    return bool(instance.neighbours[number])


def core_order(instance: NeuronInstance, number: int, node_id: str) -> tuple[int, ...] | None:
    """Return the physical cores in the order of logical ones; None: it is not known now.

    Args:
        instance: The instance, or another with such devices.
        number: The device's.
        node_id: `node_id_4` of the driver's class: "-1" or "" alone, "busy" during an election.
    """
    if instance is TRAINIUM3:
        return None
    table = instance.logical_to_physical
    if not table:
        return tuple(range(instance.cores))
    if node_id == "busy":
        return None
    row = number
    if node_id.isdigit() and int(node_id) in _XOR_NODES:
        row = number ^ _XOR
    return table[row] if row < len(table) else None


def legal_groups(instance: NeuronInstance, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the sets of so many devices on which collectives work, lowest first."""
    count = instance.devices
    if size not in instance.group_sizes:
        return ()
    step = size if _is_torus(instance) else 1
    return tuple(tuple(range(s, s + size)) for s in range(0, count - size + 1, step))


def group_sizes(
    instance: NeuronInstance | None, number: int, there: Collection[int]
) -> tuple[int, ...]:
    """Return how many devices from this one on collectives work on; () where that is not known.

    Args:
        instance: The instance, if it is known.
        number: The device's.
        there: Numbers of the devices that the driver shows.
    """
    if instance is None:
        return ()
    present = set(there)
    return tuple(
        size
        for size in instance.group_sizes
        if any(
            group[0] == number and present >= set(group) for group in legal_groups(instance, size)
        )
    )


def check_group(instance: NeuronInstance, devices: Collection[int]) -> None:
    """Raise unless collectives work on exactly these devices.

    Raises:
        PlanImpossibleError: With the sets that would do.
    """
    wanted = tuple(sorted(set(devices)))
    groups = legal_groups(instance, len(wanted))
    if wanted in groups:
        return
    named = "; ".join(f"{group[0]}-{group[-1]}" for group in groups) or "none of this size"
    raise PlanImpossibleError(
        f"{instance.name}: collectives do not work on devices {', '.join(map(str, wanted))}",
        cure=f"take one of the sets {named}; sizes are {', '.join(map(str, instance.group_sizes))}",
    )


def _is_torus(instance: NeuronInstance) -> bool:
    return instance.devices == ROW * ROW and len(instance.neighbours[0]) == ROW


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores that a NEURON_RT_VISIBLE_CORES names.

    Raises:
        ValueError: It is malformed, not increasing, or has a hole; the runtime refuses it too.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = _core(first)
        high = _core(last) if dash else low
        if high < low or high - low > 4096:
            raise ValueError(f"range {part.strip()!r}")
        cores += range(low, high + 1)
    if cores != list(range(cores[0], cores[0] + len(cores))):
        raise ValueError("the cores are not one increasing run")
    return tuple(cores)


def _core(text: str) -> int:
    text = text.strip()
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise ValueError(f"core {text[:20]!r}")
    return int(text)
