"""From kept frames to windows, accounts and energy: each frame is looked at once.

Theory of operation. A worker keeps frames ten times a second (`worker.ring`). Once a tick all new
ones of a device are taken together and cut into columns, and a column goes into its window as a
whole: where all of a device's signals were read at the same moments, and every number can be a
reading, nothing is looked at one by one. Taking them less often costs less, since most of the work
is once for each column and not for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

from alloy_agent.model import Scope, SignalSpec, Snapshot
from alloy_agent.telemetry import headroom, signals
from alloy_agent.worker.ring import KEEP_EVERY_S

if TYPE_CHECKING:
    from alloy_agent.daemon.telemetry.load import Key, Load
    from alloy_agent.model import Device, Partition
    from alloy_agent.telemetry.ledger import Ledger
    from alloy_agent.telemetry.window import Windows
    from alloy_agent.worker import Worker
    from alloy_agent.worker.ring import Block, PageReader

ACTIVE: Final = "alloy_partition_compute_active_ratio"
ENERGY: Final = "alloy_device_energy_joules_total"
FREEZE_PERIOD_S: Final = 0.5
BUSY_SHARE: Final = 0.05


class _Column(NamedTuple):
    """One column of a page that is windowed."""

    slot: int
    spec: SignalSpec
    key: Key
    resource: headroom.Resource
    limit: float  # to divide by; 0: the newest value of the slot `limit_slot`
    limit_slot: int
    can: signals.Possible


class _Plan:
    """Which columns of one device's page are looked at, and what was taken of it so far."""

    def __init__(
        self, page: PageReader, shape: int, device: Device, pieces: Mapping[str, Partition]
    ) -> None:
        self.page = page
        self.shape = shape
        self.taken = 0
        places = {(spec.subject, spec.name): slot for slot, spec in enumerate(page.specs)}
        self.energy = places.get((device.id, ENERGY), -1)
        self.columns = tuple(
            column
            for slot, spec in enumerate(page.specs)
            if (column := _column(slot, spec, device, pieces, places)) is not None
        )
        self.windows: list[Windows | None] = [None] * len(self.columns)


class Frames:
    """Takes what is new in the pages of all workers; guarded by whoever owns it.

    Args:
        load: Whose windows are fed.
        ledger: Whose accounts are advanced.
    """

    def __init__(self, load: Load, ledger: Ledger) -> None:
        self._load = load
        self._ledger = ledger
        self._plans: dict[str, _Plan] = {}
        self._active: dict[str, float] = {}
        self._pieces: dict[str, dict[str, Partition]] = {}
        self.counters: dict[tuple[str, str], signals.Count] = {}

    def forget(self, subjects: frozenset[str]) -> None:
        """Drop what belongs to subjects that are gone."""
        for mark in [mark for mark in self.counters if mark[0] not in subjects]:
            del self.counters[mark]
        for subject in [subject for subject in self._active if subject not in subjects]:
            del self._active[subject]
        for device in [device for device in self._plans if device not in subjects]:
            del self._plans[device]

    def take(self, workers: tuple[Worker, ...], snapshot: Snapshot) -> None:
        """Put the new frames of all devices into windows and accounts."""
        pieces: dict[str, dict[str, Partition]] = {str(d.id): {} for d in snapshot.devices}
        for piece in snapshot.partitions:
            pieces.setdefault(piece.device, {})[piece.id] = piece
        self._pieces = pieces
        by_name = {worker.name: worker for worker in workers}
        for device in snapshot.devices:
            worker = by_name.get(device.backend)
            page = None if worker is None else worker.page(device.id)
            if worker is None or page is None:
                continue
            plan = self._plan(device, page, pieces[device.id])
            plan.taken, block = page.kept(plan.taken)
            if block is not None:
                self._put(plan, block, kept_period_s(worker.period_s()))
                if plan.energy >= 0:
                    self._spend(device, plan.energy, block)

    def _plan(self, device: Device, page: PageReader, pieces: Mapping[str, Partition]) -> _Plan:
        shape = hash(tuple((p.id, p.generation) for p in pieces.values()))
        plan = self._plans.get(device.id)
        if plan is not None and plan.page is page and plan.shape == shape:
            return plan
        new = self._plans[device.id] = _Plan(page, shape, device, pieces)
        if plan is not None and plan.page is page:
            new.taken = plan.taken
        return new

    def _put(self, plan: _Plan, block: Block, period_s: float) -> None:
        """Put every column into its window; activity into its account too."""
        common_s = block.common_times()
        for number, column in enumerate(plan.columns):
            limit = column.limit or block.last(column.limit_slot)
            if not limit > 0:
                continue
            slot = column.slot
            values = block.values(slot)
            renewed_s = period_s
            if common_s is not None and column.can.all_of(values):
                times_s = common_s
            else:
                sources_s = block.sources(slot)
                clocked = not math.isnan(sources_s[-1])
                times_s = sources_s if clocked else block.reads(slot)
                values, times_s = _sane(block.qualities(slot), values, times_s, column.can)
                if not values:
                    continue
                if clocked and block.refresh_s(slot) > period_s:  # false where not measured yet
                    renewed_s = block.refresh_s(slot)
            windows = plan.windows[number]
            if windows is None:
                windows = self._load.windows_of(column.key, column.resource)
                plan.windows[number] = windows
            windows.period_s = renewed_s
            windows.minute.add_all(values, times_s, limit, rising=times_s is common_s)
            if column.spec.name == ACTIVE:
                self._active[column.key[0]] = values[-1]
                samples = list(zip(times_s, values, strict=True))
                self._ledger.used(*column.key, samples, renewed_s, column.spec.source)

    # --- energy ---

    def _spend(self, device: Device, slot: int, block: Block) -> None:
        """Split what the device's energy counter grew by over its active partitions."""
        grown_j = 0.0
        mark = (str(device.id), ENERGY)
        before = self.counters.get(mark)
        for code, value, source_s, read_s in zip(
            block.qualities(slot),
            block.values(slot),
            block.sources(slot),
            block.reads(slot),
            strict=True,
        ):
            if code != 0 or not math.isfinite(value):
                continue
            at_s = read_s if math.isnan(source_s) else source_s
            if before is None:
                before = signals.begin_count(value, at_s)
                continue
            before, grown = signals.count(before, value, at_s, signals.POWER_MAX_W)
            grown_j += grown or 0.0
        if before is not None:
            self.counters[mark] = before
        if grown_j > 0:
            self._ledger.spent(device.id, grown_j, self._shares(device))

    def _shares(self, device: Device) -> dict[str, float]:
        """Return each partition's active share of the whole device."""
        active = self._active
        return {
            piece: active[piece] * min(1.0, p.placement.size / max(1, device.slices))
            for piece, p in self._pieces.get(device.id, {}).items()
            if piece in active
        }

    def energy_stands_still(self, device: Device, now_s: float) -> bool:
        """Whether the energy counter does not grow although the device works."""
        counter = self.counters.get((str(device.id), ENERGY))
        if counter is None or not signals.is_frozen(counter, now_s, FREEZE_PERIOD_S, busy=True):
            return False
        return any(share > BUSY_SHARE for share in self._shares(device).values())


def kept_period_s(period_s: float) -> float:
    """Return the time between two kept frames of a sampler with this period."""
    return period_s * max(1, math.ceil(KEEP_EVERY_S / period_s))


def _column(
    slot: int,
    spec: SignalSpec,
    device: Device,
    pieces: Mapping[str, Partition],
    places: Mapping[tuple[str, str], int],
) -> _Column | None:
    """Return how a signal is windowed; None where it is not."""
    resource = headroom.RESOURCES.get(spec.name)
    piece = pieces.get(spec.subject)
    if resource is None or (spec.scope is Scope.PARTITION and piece is None):
        return None
    limit, limit_slot = _limit(resource, device, piece, spec.subject, places)
    if not limit and limit_slot < 0:
        return None
    key = (spec.subject, 0 if piece is None else piece.generation)
    return _Column(slot, spec, key, resource, limit, limit_slot, signals.possible(spec))


def _limit(
    resource: headroom.Resource,
    device: Device,
    piece: Partition | None,
    subject: str,
    places: Mapping[tuple[str, str], int],
) -> tuple[float, int]:
    """Return what a resource's use is divided by: a number, or a column; (0, -1): nothing."""
    if not resource.limit:
        return 1.0, -1
    if resource.limit == "memory":
        size = device.memory_bytes if piece is None else piece.memory_bytes
        if size:
            return float(size), -1
        return 0.0, places.get((subject, "alloy_partition_memory_limit_bytes"), -1)
    return 0.0, places.get((subject, resource.limit), -1)


def _sane(
    codes: bytes, values: list[float], times_s: list[float], can: signals.Possible
) -> tuple[list[float], list[float]]:
    """Return the values that are readings, with their times."""
    if not any(codes) and can.all_of(values):
        return values, times_s
    low, high, never = can.low, can.high, can.never
    good = [
        code == 0 and low <= value <= high and value not in never
        for code, value in zip(codes, values, strict=True)
    ]
    return list(compress(values, good)), list(compress(times_s, good))
