"""The host's CPUs by NUMA node and physical core, as sysfs shows them now.

A core is the set of its online SMT siblings and is never split; it goes by its lowest CPU number.
Source: Documentation/ABI/stable/sysfs-devices-node, Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from alloy_agent.host.cpulist import parse_cpu_list
from alloy_agent.host.processes import printable, read_bytes
from alloy_agent.model import Value


class Core(Value, frozen=True, kw_only=True, order=True):
    """One physical core with its online siblings, ascending."""

    first: int
    cpus: tuple[int, ...]


class Node(Value, frozen=True, kw_only=True):
    """One NUMA node that has CPUs. `cores` can be lent, `reserved` stay with the system."""

    number: int
    cores: tuple[Core, ...]
    reserved: tuple[Core, ...]
    memory_bytes: int | None
    distances: dict[int, int]

    @property
    def cpus(self) -> tuple[int, ...]:
        """All online CPUs of the node, ascending."""
        return tuple(sorted(c for core in (*self.cores, *self.reserved) for c in core.cpus))


def read_nodes(
    sys_root: str = "/sys", proc_root: str = "/proc", reserved_cpus: Iterable[int] = ()
) -> tuple[Node, ...]:
    """Return the nodes that have online CPUs, by number. A kernel without NUMA shows node 0.

    Args:
        sys_root: Where sysfs is.
        proc_root: Where procfs is.
        reserved_cpus: CPUs whose whole cores are kept for the system.
    """
    online = set(_cpus(f"{sys_root}/devices/system/cpu/online"))
    keep = set(reserved_cpus)
    folder = f"{sys_root}/devices/system/node"
    numbers = _cpus(f"{folder}/online")
    if not numbers:
        return _one_node(online, keep, sys_root, proc_root)
    nodes = []
    for number in numbers:
        cpus = set(_cpus(f"{folder}/node{number}/cpulist")) & online
        if not cpus:  # memory only
            continue
        lent, reserved = _cores(cpus, keep, sys_root)
        nodes.append(
            Node(
                number=number,
                cores=lent,
                reserved=reserved,
                memory_bytes=_kib(f"{folder}/node{number}/meminfo", b"MemTotal:"),
                distances=_distances(f"{folder}/node{number}/distance", numbers),
            )
        )
    return tuple(nodes)


def model_name(proc_root: str = "/proc") -> str:
    """Return the processor's name, or its architecture where the kernel tells none."""
    names = {b"model name": "", b"Model": "", b"cpu model": ""}
    for line in read_bytes(f"{proc_root}/cpuinfo").split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip() in names and value.strip():
            return printable(value.strip())
    arch = read_bytes(f"{proc_root}/sys/kernel/arch").strip()
    return printable(arch) or "CPU"


def _one_node(online: set[int], keep: set[int], sys_root: str, proc_root: str) -> tuple[Node, ...]:
    if not online:
        return ()
    lent, reserved = _cores(online, keep, sys_root)
    total = _kib(f"{proc_root}/meminfo", b"MemTotal:")
    return (Node(number=0, cores=lent, reserved=reserved, memory_bytes=total, distances={0: 10}),)


def _cores(
    cpus: set[int], keep: set[int], sys_root: str
) -> tuple[tuple[Core, ...], tuple[Core, ...]]:
    lent: list[Core] = []
    reserved: list[Core] = []
    left = set(cpus)
    while left:
        first = min(left)
        folder = f"{sys_root}/devices/system/cpu/cpu{first}/topology"
        listed = _cpus(f"{folder}/core_cpus_list") or _cpus(f"{folder}/thread_siblings_list")
        siblings = (set(listed) | {first}) & left
        left -= siblings
        core = Core(first=first, cpus=tuple(sorted(siblings)))
        (reserved if siblings & keep else lent).append(core)
    return tuple(lent), tuple(reserved)


def _cpus(path: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(read_bytes(path).decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        return ()


def _kib(path: str, key: bytes) -> int | None:
    """Return the bytes of a `MemTotal:  123 kB` line, with or without `Node 0` before it."""
    for line in read_bytes(path).split(b"\n"):
        _, found, value = line.partition(key)
        fields = value.split()
        if found and fields and fields[0].isdigit():
            return int(fields[0]) * 1024
    return None


def used_bytes(node: Node, sys_root: str, proc_root: str) -> int | None:
    """Return the memory of a node that is neither free nor reclaimable file cache."""
    path = f"{sys_root}/devices/system/node/node{node.number}/meminfo"
    if not Path(path).exists():
        path = f"{proc_root}/meminfo"
    free, files = _kib(path, b"MemFree:"), _kib(path, b"FilePages:") or _kib(path, b"Cached:")
    total = _kib(path, b"MemTotal:")
    if total is None or free is None:
        return None
    return max(0, total - free - (files or 0))


def _distances(path: str, numbers: tuple[int, ...]) -> dict[int, int]:
    values = read_bytes(path).split()
    if len(values) != len(numbers) or not all(v.isdigit() for v in values):
        return {}
    return {number: int(value) for number, value in zip(numbers, values, strict=True)}
