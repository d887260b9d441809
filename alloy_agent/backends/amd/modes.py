"""Compute and memory modes: what the driver's files say, and tables that only check it.

Source: kernel amdgpu `aqua_vanjaram.c` (modes by number of XCCs, memory modes that fit).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from alloy_agent.backends.amd.files import Files
from alloy_agent.backends.amd.topology import KfdNode
from alloy_agent.model import Value

UNKNOWN: Final = "UNKNOWN"
NOT_SUPPORTED: Final = "NOT SUPPORTED"
COMPUTE: Final = ("SPX", "DPX", "TPX", "QPX", "CPX")
_COUNTS: Final = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
_MEMORY: Final = re.compile(r"NPS[1-9][0-9]?")

# Which memory modes each compute mode works in; drivers list more than they accept.
COMPATIBLE: Final[dict[str, frozenset[str]]] = {
    "SPX": frozenset({"NPS1"}),
    "DPX": frozenset({"NPS1", "NPS2"}),
    "TPX": frozenset({"NPS1", "NPS4"}),
    "QPX": frozenset({"NPS1", "NPS4"}),
    "CPX": frozenset({"NPS1", "NPS2", "NPS4"}),
}

PRODUCTS: Final[dict[int, tuple[str, int]]] = {
    0x7408: ("MI250X", 1),
    0x740C: ("MI250X/MI250", 1),  # pci.ids has both under this number
    0x740F: ("MI210", 1),
    0x74A0: ("MI300A", 6),
    0x74A1: ("MI300X", 8),
    0x74A2: ("MI308X", 4),
    0x74A5: ("MI325X", 8),
    0x75A0: ("MI350X", 8),
    0x75A3: ("MI355X", 8),
}


class Modes(Value, frozen=True, kw_only=True):
    """The modes of one device; empty: it has no such switch."""

    compute: str = ""
    computes: tuple[str, ...] = ()
    memory: str = ""
    memories: tuple[str, ...] = ()


def word(text: str | None) -> str:
    """Return a mode as the driver means it: upper case, bare; `UNKNOWN` while it is in between."""
    value = (text or "").strip().upper()
    if value in COMPUTE or _MEMORY.fullmatch(value):
        return value
    return UNKNOWN


def listed(text: str | None) -> tuple[str, ...]:
    """Return the modes of an `available_*` file, in the driver's order, each once."""
    found = (word(part) for part in re.split(r"[\s,]+", text or ""))
    return tuple(dict.fromkeys(mode for mode in found if mode != UNKNOWN))


def read_modes(files: Files, pci: str) -> Modes:
    """Return the modes that a device's files tell."""
    compute = files.text(f"{pci}/current_compute_partition")
    memory = files.text(f"{pci}/current_memory_partition")
    more = files.text(f"{pci}/compute_partition_config/supported_xcp_configs")
    computes = (*listed(files.text(f"{pci}/available_compute_partition")), *listed(more))
    if not computes or compute is None or compute.strip().upper() == NOT_SUPPORTED:
        return Modes()
    now, here = word(compute), word(memory)
    options = _known(files.text(f"{pci}/available_memory_partition"), here)
    return Modes(
        compute=now,
        computes=_ordered((*computes, now)),
        memory="" if memory is None or memory.strip().upper() == NOT_SUPPORTED else here,
        memories=options,
    )


def _known(text: str | None, here: str) -> tuple[str, ...]:
    found = {*listed(text), here} - {UNKNOWN}
    return tuple(sorted(found, key=memory_domains))


def _ordered(modes: Iterable[str]) -> tuple[str, ...]:
    return tuple(mode for mode in COMPUTE if mode in set(modes))


def pieces_of(mode: str, xccs: int) -> int:
    """Return into how many partitions a compute mode cuts `xccs` XCCs."""
    return _COUNTS.get(mode, xccs if mode == "CPX" else 1)


def memory_domains(mode: str) -> int:
    """Return the number of memory partitions of `NPS<n>`; 1 where nothing is known."""
    return int(mode[3:]) if _MEMORY.fullmatch(mode) else 1


def xccs_of(modes: Modes, nodes: tuple[KfdNode, ...]) -> int:
    """Return the XCCs of a whole device.

    In CPX each node shows one; partitions may be missing. Then the product says, or the modes that
    the driver offers do, since they follow from the number.
    """
    each = max((node.xccs for node in nodes), default=1)
    if modes.compute in _COUNTS:
        return each * _COUNTS[modes.compute]
    if not modes.computes:
        return each
    product = PRODUCTS.get(nodes[0].device_id) if nodes else None
    offered = 8 if "QPX" in modes.computes else 6 if "TPX" in modes.computes else 0
    highest = max((node.partition + 1 for node in nodes), default=1)
    return max(highest, product[1] if product else offered)


def compatible(compute: str, memory: str) -> bool:
    """Return whether a compute mode works in a memory mode; the driver judges unknown ones."""
    return not memory or memory in COMPATIBLE.get(compute, frozenset({memory}))


def divides(compute: str, xccs: int) -> bool:
    """Return whether a compute mode cuts the XCCs evenly, as the kernel demands."""
    if compute == "DPX":
        return xccs % 4 == 0
    return xccs % pieces_of(compute, xccs) == 0
