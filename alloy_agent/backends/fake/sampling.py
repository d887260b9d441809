"""The columns of a simulated device and how each is read.

A value renews at its source's period: sampling faster returns the same value with the same source
time, as real silicon does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from alloy_agent.backends.base import SignalSink
from alloy_agent.model import Device, Partition, Quality, Scope, SignalSpec, Vendor
from alloy_agent.silicon import signals
from alloy_agent.silicon.boards import BOARDS, NvidiaBoard
from alloy_agent.silicon.boards.shapes import MIB
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.state import Client

Reader = Callable[[float], float | None]
DEVICE_BASE_BYTES: Final = 600 * MIB  # what a driver keeps for itself on an idle device

# Source: facts of telemetry: GPM and AMD firmware refresh at 100 ms, Neuron power per minute.
_GPM_S: Final = 0.1
_COUNTER_S: Final = 0.02
_NEURON_S: Final = 1.0
_BANDWIDTH_RATIO: Final = 0.6  # of the busy time, memory is busy too

# Neuron tells a percentage of its power once a minute: no watts, no temperature, no throttling.
_NOT_ON_NEURON: Final = frozenset(
    {
        "alloy_device_power_watts",
        "alloy_device_power_limit_watts",
        "alloy_device_energy_joules_total",
        "alloy_device_temperature_headroom_celsius",
        "alloy_device_throttle_seconds_total",
    }
)


class Column(msgspec.Struct, frozen=True):
    """One slot: its specification and, while it can be read, its reader."""

    spec: SignalSpec
    reader: Reader | None
    quality: Quality = Quality.NOT_SUPPORTED


def columns(
    machine: Machine, device: Device, partitions: Sequence[tuple[Partition, Sequence[Client]]]
) -> list[Column]:
    """Return the slots of a device and its partitions, in a stable order."""
    found = _device_columns(machine, device)
    for partition, clients in partitions:
        found += _partition_columns(machine, device, partition, clients)
    return [_scripted(machine, device.id, column) for column in found]


def _device_columns(machine: Machine, device: Device) -> list[Column]:
    state = machine.device(device.id)
    model = machine.power_model(state)
    used = float(DEVICE_BASE_BYTES + sum(c.memory_bytes for c in machine.clients(device.id)))
    corrected, uncorrected = float(state.ecc_corrected), float(state.ecc_uncorrected)
    rows = (
        _Row("alloy_device_memory_used_bytes", "bytes", False, _COUNTER_S, lambda _: used),
        _Row("alloy_device_power_watts", "watts", False, _GPM_S, model.power_w),
        _Row("alloy_device_energy_joules_total", "joules", True, _GPM_S, model.energy_at),
        _Row(
            "alloy_device_temperature_headroom_celsius", "celsius", False, _GPM_S, model.headroom_c
        ),
        _Row("alloy_device_throttle_seconds_total", "seconds", True, _COUNTER_S, model.throttle_at),
        _Row("alloy_device_ecc_corrected_total", "errors", True, _NEURON_S, lambda _: corrected),
        _Row(
            "alloy_device_ecc_uncorrected_total", "errors", True, _NEURON_S, lambda _: uncorrected
        ),
        _Row("alloy_device_power_limit_watts", "watts", False, _NEURON_S, lambda _: model.cap_w),
    )
    silent = _NOT_ON_NEURON if device.vendor is Vendor.NEURON else ()
    return [
        row._replace(reader=None if row.name in silent else row.reader).column(
            device.id, Scope.DEVICE
        )
        for row in rows
    ]


def _partition_columns(
    machine: Machine, device: Device, partition: Partition, clients: Sequence[Client]
) -> list[Column]:
    load = sum(client.load_ratio * _share(device, partition, client) for client in clients)
    busy = signals.wave(machine.state.seed, partition.id, load)
    used = float(sum(client.memory_bytes for client in clients))
    period = _NEURON_S if device.vendor is Vendor.NEURON else _GPM_S
    active = busy.at if _has_activity(machine, device, partition) else None
    bandwidth = None if active is None or device.vendor is Vendor.NEURON else active
    rows = (
        _Row("alloy_partition_compute_active_ratio", "ratio", False, period, active),
        _Row("alloy_partition_memory_used_bytes", "bytes", False, _COUNTER_S, lambda _: used),
        _Row(
            "alloy_partition_memory_bandwidth_active_ratio",
            "ratio",
            False,
            period,
            None if bandwidth is None else lambda now_s: _BANDWIDTH_RATIO * bandwidth(now_s),
        ),
    )
    return [row.column(partition.id, Scope.PARTITION) for row in rows]


def _share(device: Device, partition: Partition, client: Client) -> float:
    """Return how much of the partition a process can fill."""
    if device.vendor is not Vendor.NEURON or not client.cores:
        return 1.0
    return min(1.0, len(client.cores) / partition.placement.size)


def _has_activity(machine: Machine, device: Device, partition: Partition) -> bool:
    """Whether the driver tells activity: an Ampere GPU in MIG mode does not."""
    board = BOARDS[machine.device(device.id).board]
    ampere = isinstance(board, NvidiaBoard) and board.architecture == "ampere"
    return not (ampere and "gi" in partition.locator)


class _Row(NamedTuple):
    """A column in short; the subject and its scope are added."""

    name: str
    unit: str
    counter: bool
    period_s: float
    reader: Reader | None

    def column(self, subject: str, scope: Scope) -> Column:
        """Return the column of one subject."""
        spec = SignalSpec(
            name=self.name,
            subject=subject,
            scope=scope,
            unit=self.unit,
            counter=self.counter,
            source="simulated",
            refresh_period_s=self.period_s,
        )
        return Column(spec, self.reader)


def _scripted(machine: Machine, device: str, column: Column) -> Column:
    script = machine.device(device).scripts.get(column.spec.name)
    if script is None:
        return column
    return Column(column.spec, lambda now_s: signals.scripted(script, now_s))


class Sampler:
    """The slots of one device as last announced, filled from the machine of the moment."""

    def __init__(self, specs: tuple[SignalSpec, ...]) -> None:
        self.specs = specs
        self._values = array("d", [0.0]) * len(specs)
        self._times_s = array("d", [math.nan]) * len(specs)
        self._odd: set[int] = set()  # slots whose reader has no value now
        self._silent: tuple[tuple[int, Quality], ...] = ()
        self._groups: tuple[tuple[float, tuple[tuple[int, Reader], ...]], ...] = ()
        self._sources: list[float] = []  # of each group, when its source renewed last

    def bind(self, found: list[Column]) -> None:
        """Take the readers of the moment; a slot whose partition has gone is stale from now on."""
        by_spec = {(column.spec.subject, column.spec.name): column for column in found}
        silent, groups = [], dict[float, list[tuple[int, Reader]]]()
        for slot, spec in enumerate(self.specs):
            column = by_spec.get((spec.subject, spec.name))
            if column is None:
                silent.append((slot, Quality.STALE))
            elif column.reader is None:
                silent.append((slot, column.quality))
            else:
                groups.setdefault(spec.refresh_period_s or 0.0, []).append((slot, column.reader))
        self._silent = tuple(silent)
        self._odd.clear()
        self._groups = tuple((period_s, tuple(slots)) for period_s, slots in groups.items())
        self._sources = [-1.0] * len(groups)

    def fill(self, now_s: float, sink: SignalSink) -> None:
        """Put every slot; a value is computed again only when its source has renewed it."""
        values, put = self._values, sink.put
        for number, (period_s, slots) in enumerate(self._groups):
            source_s = now_s - now_s % period_s if period_s else now_s
            if source_s != self._sources[number]:
                self._sources[number] = source_s
                self._renew(slots, source_s)
        sink.put_many(0, values, source_time_s=self._times_s)
        for slot in self._odd:
            put(slot, 0.0, Quality.NOT_SUPPORTED)
        for slot, quality in self._silent:
            put(slot, values[slot], quality)

    def _renew(self, slots: tuple[tuple[int, Reader], ...], source_s: float) -> None:
        for slot, reader in slots:
            value = reader(source_s)
            if value is None:
                self._values[slot], self._times_s[slot] = 0.0, math.nan
                self._odd.add(slot)
            else:
                self._values[slot], self._times_s[slot] = value, source_s
                self._odd.discard(slot)
