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

    `cores` are counted within the device; None: they may be any. `elsewhere` says whether it has
    cores of other devices too.
    """

    holder: Holder
    cores: tuple[int, ...] | None
    source: Source
    monitor: bool = False  # holds no data descriptor, reserves nothing, runs nothing

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
    number: int, slices: int, holders: Sequence[Holder], report: Report | None
) -> tuple[Occupant, ...]:
    """Return everyone who holds one device.

    Args:
        number: Of the device.
        slices: Its logical cores, under its present configuration.
        holders: Of the whole node.
        report: The newest of the monitor, or None.
    """
    found = []
    for holder in holders:
        if number not in holder.devices:
            continue
        cores, source = _cores(number, slices, holder, report)
        found.append(Occupant(holder=holder, cores=cores, source=source, monitor=_tool(holder)))
    return tuple(found)


def _cores(
    number: int, slices: int, holder: Holder, report: Report | None
) -> tuple[tuple[int, ...] | None, Source]:
    told = report.of(holder.pid) if report is not None else None
    if told is not None and (told.cores or told.core_memory_bytes):
        used = {*told.cores, *(core for core, size in told.core_memory_bytes.items() if size)}
        return _within(number, slices, sorted(used)), Source.MONITOR
    configured = holder.configured_cores()
    if configured is not None:
        return _within(number, slices, configured), Source.ENVIRONMENT
    return None, Source.NOTHING


def _within(number: int, slices: int, cores: Sequence[int]) -> tuple[int, ...]:
    first = number * slices
    return tuple(core - first for core in cores if first <= core < first + slices)


def _tool(holder: Holder) -> bool:
    """Whether a process is one of the vendor's own tools, which run nothing on cores."""
    return holder.comm in {"neuron-monitor", "neuron-ls", "neuron-top"}


def place_of(occupant: Occupant, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition that a process belongs to: by its cores, else by the tag it was given.

    A process over the edge of its run belongs to the one that its tag names, or to none.
    """
    if occupant.monitor:
        return None
    tagged = (occupant.holder.variables or {}).get(TAG)
    by_tag = next((p for p in partitions if p.id == tagged), None)
    if occupant.cores:
        for partition in partitions:
            place = partition.placement
            inside = all(place.start <= core < place.stop for core in occupant.cores)
            if inside and partition.share is Share.EXCLUSIVE:
                return partition
    return by_tag


def is_granted(occupant: Occupant, partition: Partition | None) -> bool:
    """Whether a process is where its tenant may be, as far as anything tells."""
    if partition is None:
        return False
    tagged = (occupant.holder.variables or {}).get(TAG)
    place = partition.placement
    inside = occupant.cores is None or all(
        place.start <= core < place.stop for core in occupant.cores
    )
    return inside and tagged in {None, "", partition.id}
