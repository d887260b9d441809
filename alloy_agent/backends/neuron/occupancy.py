"""Who works on which cores of one device, joined from all sources, each with its weight. Pure.

| source | tells | weight |
| --- | --- | --- |
| descriptors by device number | which process holds the device | proof, of the device only |
| `neuron-monitor` | which cores a process has | proof, as of its last period |
| variables at start | which cores it was told to use | configuration, never proof |

A process whose cores nobody proves may be on any core of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from alloy_agent.backends.neuron.holders import TAG, Holder
from alloy_agent.backends.neuron.monitor import Report
from alloy_agent.model import Partition, Placement, Share, Value


class Source(StrEnum):
    """What a process's cores are known from."""

    MONITOR = "neuron-monitor"
    ENVIRONMENT = "environment at start"
    NOTHING = "nothing"


class Occupant(Value, frozen=True, kw_only=True):
    """A process on the device, and the logical cores of the device that it is on.

    `cores` are counted within the device; None: they may be any. `configured` are those that its
    variables name, `tag` is what it was tagged with, by itself or as all others in its cgroup.
    """

    holder: Holder
    cores: tuple[int, ...] | None
    source: Source
    monitor: bool = False  # one of the vendor's tools: reserves nothing, runs nothing
    configured: tuple[int, ...] | None = None
    tag: str = ""

    @property
    def proven(self) -> bool:
        """Whether its cores rest on more than what it was told."""
        return self.source is Source.MONITOR

    def may_be_on(self, place: Placement) -> bool:
        """Whether it may be on any core of a run."""
        if self.cores is None:
            return True
        return any(place.start <= core < place.stop for core in self.cores)


def occupants(
    number: int,
    slices: int,
    holders: Sequence[Holder],
    report: Report | None,
    *,
    relative: bool = False,
) -> tuple[Occupant, ...]:
    """Return everyone who holds one device.

    Args:
        number: Of the device.
        slices: Its logical cores, under its present configuration.
        holders: Of the whole node.
        report: The newest of the monitor, or None.
        relative: Whether variables count cores from the first device that a process was given.
    """
    tags = _tags_by_cgroup(holders)
    found = []
    for holder in holders:
        if number not in holder.devices:
            continue
        told = holder.configured_cores()
        first = number - (min(holder.devices) if relative else 0)
        configured = None if told is None else _within(first, slices, told)
        cores, source = _cores(number, slices, holder, report)
        if cores is None and configured is not None:
            cores, source = configured, Source.ENVIRONMENT
        found.append(
            Occupant(
                holder=holder,
                cores=cores,
                source=source,
                monitor=_tool(holder),
                configured=configured,
                tag=(holder.variables or {}).get(TAG) or tags.get(_cgroup(holder), ""),
            )
        )
    return tuple(found)


def _tags_by_cgroup(holders: Sequence[Holder]) -> dict[str, str]:
    """Return the one tag that the processes of a cgroup have: it is that of their children too."""
    tags: dict[str, set[str]] = {}
    for holder in holders:
        tag = (holder.variables or {}).get(TAG)
        if tag and _cgroup(holder):
            tags.setdefault(_cgroup(holder), set()).add(tag)
    return {path: next(iter(found)) for path, found in tags.items() if len(found) == 1}


def _cgroup(holder: Holder) -> str:
    """Return what tells a tenant's cgroup; "" for the top, which is everybody's."""
    paths = sorted({path for path in holder.cgroups.values() if path.strip("/")})
    return "\n".join(paths)


def _cores(
    number: int, slices: int, holder: Holder, report: Report | None
) -> tuple[tuple[int, ...] | None, Source]:
    told = report.of(holder.pid) if report is not None else None
    if told is not None and (told.cores or told.core_memory_bytes):
        used = {*told.cores, *(core for core, size in told.core_memory_bytes.items() if size)}
        return _within(number, slices, sorted(used)), Source.MONITOR
    return None, Source.NOTHING


def _within(number: int, slices: int, cores: Sequence[int]) -> tuple[int, ...]:
    first = number * slices
    return tuple(core - first for core in cores if first <= core < first + slices)


def _tool(holder: Holder) -> bool:
    """Whether a process is one of the vendor's own tools, which run nothing on cores."""
    return holder.comm in {"neuron-monitor", "neuron-ls", "neuron-top"}


def place_of(occupant: Occupant, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition that a process was given: by its tag, else by the cores it was told.

    Cores that it took without being told are no sign of a grant: it may be anybody.
    """
    if occupant.monitor:
        return None
    for partition in partitions:
        if occupant.tag and occupant.tag in {partition.id, group_tag(partition)}:
            return partition
    if not occupant.configured or occupant.tag:
        return None
    for partition in partitions:
        place = partition.placement
        if partition.share is Share.EXCLUSIVE and all(
            place.start <= core < place.stop for core in occupant.configured
        ):
            return partition
    return None


def group_tag(partition: Partition) -> str:
    """Return the tag of those who entered the partition's whole group; "" where it is in none."""
    access = partition.group_access
    return "" if access is None else access.environment[TAG]


def is_granted(occupant: Occupant, partition: Partition | None) -> bool:
    """Whether a process is where its tenant may be, as far as anything tells."""
    if partition is None:
        return False
    place = partition.placement
    return occupant.cores is None or all(
        place.start <= core < place.stop for core in occupant.cores
    )
