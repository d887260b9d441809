"""Names of partitions and what the kernel's CPU sets mean in cores.

A partition's cgroup is called `<profile>@<start>` (`4c@2`, or `production-0@0` for a share of a
whole device), which is the last part of its id. The name says what was granted, and is the
placement; what holds is read from the kernel (`units`, cap, facts). A difference is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from alloy_agent.backends.cpu.topology import Core, Node
from alloy_agent.model import Placement, Share, Value

EXCLUSIVE = re.compile(r"([1-9][0-9]{0,4})c@(0|[1-9][0-9]{0,4})")
SHARED = re.compile(r"(production|opportunistic)-(0|[1-9][0-9]{0,3})@(0|[1-9][0-9]{0,4})")


class PieceName(Value, frozen=True, kw_only=True):
    """What a directory's name grants. `size` is None for a share: all cores of the device."""

    profile: str
    start: int
    size: int | None
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0


def parse_name(name: str) -> PieceName | None:
    """Return what a cgroup's name grants, or None for a name that the agent does not give."""
    if match := EXCLUSIVE.fullmatch(name):
        return PieceName(profile=f"{match[1]}c", start=int(match[2]), size=int(match[1]))
    if match := SHARED.fullmatch(name):
        return PieceName(
            profile=f"{match[1]}-{match[2]}",
            start=int(match[3]),
            size=None,
            share=Share(match[1]),
            ordinal=int(match[2]),
        )
    return None


def granted_placement(name: PieceName, node: Node) -> Placement | None:
    """Return where a named piece sits, or None if the device has no such cores."""
    size = len(node.cores) - name.start if name.size is None else name.size
    if size < 1 or name.start + size > len(node.cores):
        return None
    return Placement(start=name.start, size=size)


def cores_of(placement: Placement, node: Node) -> tuple[Core, ...]:
    """Return the cores of a placement that lies within the node."""
    return node.cores[placement.start : placement.stop]


def cpus_of(cores: Iterable[Core]) -> tuple[int, ...]:
    """Return the CPUs of cores, siblings included, ascending."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def touched(cpus: Sequence[int], node: Node) -> tuple[Core, ...]:
    """Return the cores, reserved ones too, of which a CPU set has at least one sibling."""
    held = set(cpus)
    return tuple(sorted(c for c in (*node.cores, *node.reserved) if held & set(c.cpus)))


def run_of(cpus: Sequence[int], node: Node) -> Placement | None:
    """Return the run of whole lendable cores that a CPU set is, or None if it is none."""
    indices = [i for i, core in enumerate(node.cores) if set(core.cpus) <= set(cpus)]
    if not indices or indices[-1] - indices[0] + 1 != len(indices):
        return None
    placement = Placement(start=indices[0], size=len(indices))
    return placement if cpus_of(cores_of(placement, node)) == tuple(sorted(cpus)) else None
