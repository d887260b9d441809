"""The telemetry of a running node: samples to windows, gates, health and usage, joined.

    tick (1 s)   frames of all workers -> windows, accounts; snapshot -> probes; all -> gates
    event        device event -> health -> gates, at once, on the thread that brought it

Rules that stay true in here:

* Nothing here reads a device: frames come from the shared memory, shapes from snapshots.
* What was known of health and open accounts is read back at the start, before the first tick.
* One lock around the state; what others are told is told outside of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from alloy_agent.errors import StoreError
from alloy_agent.host import clock
from alloy_agent.model import (
    Condition,
    Device,
    DeviceEvent,
    DeviceId,
    Partition,
    Quality,
    Scope,
    Share,
    Signal,
    SignalSpec,
    Snapshot,
    Value,
)
from alloy_agent.telemetry import catalogue, drains, gates, headroom, health, signals
from alloy_agent.telemetry.journal import UsageJournal
from alloy_agent.telemetry.kernel_log import KernelLog, fault_of
from alloy_agent.telemetry.ledger import Ledger
from alloy_agent.telemetry.window import Quantiles, Windows

if TYPE_CHECKING:
    from pathlib import Path

    from alloy_agent.telemetry.exposition import Family
    from alloy_agent.telemetry.metering import UsageRow
    from alloy_agent.uplink.codec import GateRow
    from alloy_agent.worker import Worker
    from alloy_agent.worker.ring import Frame

LOG = logging.getLogger(__name__)

ACTIVE: Final = "alloy_partition_compute_active_ratio"
ENERGY: Final = "alloy_device_energy_joules_total"
MARGIN: Final = "alloy_device_temperature_headroom_celsius"
HEADROOM: Final = "alloy_partition_headroom_p95_ratio"
HEADROOM_EVERY_S: Final = 2.0
SAVE_EVERY_S: Final = 5.0
FRAMES_HZ: Final = 10.0  # windows and accounts need no more, however fast is sampled
META: Final = "health"
REQUIRED: Final = {  # of the freshness gate, where the source has them
    Scope.DEVICE: ("alloy_device_memory_used_bytes", MARGIN),
    Scope.PARTITION: (ACTIVE, "alloy_partition_memory_used_bytes"),
}
PROBES: Final = {
    "probe_stalled": "probe:stalled",
    "lost": "probe:lost",
    "missing": "probe:missing",
    "not_permitted": "probe:not_permitted",
    "failed": "probe:failed",
    "partition_count_mismatch": "probe:partition_count_mismatch",
    "bad_pages_pending": "ras:page_pending",
    "bad_pages_unreservable": "ras:page_unreservable",
}
CONDITIONS: Final = {
    Condition.STALLED: "probe:stalled",
    Condition.LOST: "probe:lost",
    Condition.NOT_PERMITTED: "probe:not_permitted",
    Condition.FAILED: "probe:failed",
}

Key = tuple[str, int]  # subject, generation (0 for a device)


class HealthChange(Value, frozen=True, kw_only=True):
    """A device that is otherwise than before, or a fault that was counted on it."""

    device: str
    before: health.Level
    after: health.Level
    cause: str
    code: str
    count: int
    scope: Scope
    action: str
    session: str
    time_s: float
    wall_s: float
    shadow: bool = False


class Hooks(NamedTuple):
    """Whom the telemetry tells."""

    health: Callable[[HealthChange], object]
    gates: Callable[[], object]
    usage: Callable[[UsageRow], object]
    drains: Callable[[drains.Drained, bool], object]  # and whether it begins


class _Slot(NamedTuple):
    """One column of a page that is windowed."""

    slot: int
    spec: SignalSpec
    key: Key
    resource: headroom.Resource
    limit: float  # to divide by; 0: that of the slot `limit_slot`
    limit_slot: int
    low: float  # what a reading can be
    high: float
    never: frozenset[float]


class _Page(NamedTuple):
    """Which columns of one device's page are looked at."""

    mark: tuple[int, int, int]  # restarts, epoch, revision of the snapshot
    slots: tuple[_Slot, ...]
    energy: int


class _Kept(Value, frozen=True, kw_only=True):
    """What survives a restart."""

    health: health.Saved
    drains: drains.Drains = ()
    kernel_sequence: int | None = None


class Telemetry:
    """Joins the rooms of telemetry for one node.

    Args:
        workers: Whose samples are read.
        store: Where health is kept; None: nowhere.
        state_dir: Where usage is kept; None: nowhere.
        hooks: Whom to tell.
        shadow: Judge health and tell it, and close nothing because of it.
        kernel_log: The second witness; None: there is none.
    """

    def __init__(  # noqa: PLR0913 - what it joins
        self,
        workers: tuple[Worker, ...],
        hooks: Hooks,
        *,
        store: Any = None,
        state_dir: Path | None = None,
        shadow: bool = False,
        kernel_log: Callable[[int | None], KernelLog] | None = None,
    ) -> None:
        self._workers = workers
        self._hooks = hooks
        self._store = store
        self._boot_id = clock.boot_id()
        self.shadow = shadow
        self.catalogue = catalogue.load()
        self._lock = threading.RLock()
        self.health: dict[str, health.DeviceHealth] = {}
        self.drains: drains.Drains = ()
        self.windows: dict[Key, dict[str, Windows]] = {}
        self.headrooms: dict[Key, headroom.Headroom] = {}
        self.gates: dict[str, dict[str, gates.Gate]] = {}
        self.counters: dict[tuple[str, str], signals.Count] = {}
        self.limits = gates.GateLimits()
        self.kernel_unattributed = 0
        self.save_failures = 0
        self._cursor: dict[str, tuple[tuple[int, int], int]] = {}
        self._pages: dict[str, _Page] = {}
        self._active: dict[str, float] = {}
        self._short: dict[tuple[Key, str], Quantiles] = {}
        self._counted: dict[tuple[str, str], None] = {}
        self._snapshot: Snapshot | None = None
        self._leases: Mapping[str, str] = {}
        self._headroom_s = self._saved_s = 0.0
        self._dirty = False
        kernel_sequence = self._restore()
        self._kernel = None if kernel_log is None else kernel_log(kernel_sequence)
        self.ledger = Ledger(
            None if state_dir is None else UsageJournal(state_dir), on_row=hooks.usage
        )

    def _now(self) -> health.Now:
        return health.Now(boot_id=self._boot_id, now_s=clock.boottime_s(), wall_s=clock.wall_s())

    # --- what survives ---

    def _restore(self) -> int | None:
        """Take up health and drains as they were kept; return the last kernel record taken."""
        text = None if self._store is None else self._store.meta(META)
        if not text:
            return None
        try:
            kept = msgspec.json.decode(text, type=_Kept)
        except msgspec.MsgspecError as exc:
            LOG.error("health_not_restored", extra={"reason": str(exc)})  # noqa: TRY400 - data, not ours
            return None
        now = self._now()
        same_boot = kept.health.saved.boot_id == now.boot_id
        self.drains = (
            kept.drains if same_boot else drains.over_boot(kept.drains, now.now_s, now.wall_s)
        )
        self.health = {str(h.device): h for h in health.restored(kept.health, now)}
        return kept.kernel_sequence if same_boot else None

    def _save(self) -> None:
        if self._store is None:
            return
        kept = _Kept(
            health=health.Saved(
                saved=self._now(),
                devices=tuple(self.health.values()),
                catalogue=self.catalogue.version,
            ),
            drains=self.drains,
            kernel_sequence=None if self._kernel is None else self._kernel.sequence,
        )
        try:
            self._store.set_meta(META, msgspec.json.encode(kept).decode())
            self._dirty = False
            self._saved_s = clock.boottime_s()
        except StoreError as exc:
            self.save_failures += 1
            LOG.warning("health_not_kept", extra={"reason": str(exc)})

    def close(self) -> None:
        """Keep what is known; nothing is made well by a stop."""
        with self._lock:
            self._save()
            with contextlib.suppress(StoreError):
                self.ledger.close(self._boot_id, clock.boottime_s(), clock.wall_s())
            if self._kernel is not None:
                self._kernel.close()

    # --- events ---

    def event(self, event: DeviceEvent) -> None:
        """Fold one event of a device, and judge its gates at once."""
        if event.kind == "reset" and not event.code.endswith("pre_reset"):
            self._change(event.device, lambda h, now: health.after_reset(h, now.now_s))
        elif event.kind in ("fault", "reset") and event.code:
            self._fold(
                event.device,
                health.Event(
                    code=event.code,
                    time_s=event.time_s or clock.boottime_s(),
                    partition=event.partition,
                    detail=event.detail,
                ),
            )

    def _fold(self, device: str, event: health.Event) -> None:
        self._change(device, lambda h, now: health.fold(h, event, self.catalogue, now), event.code)

    def _change(
        self,
        device: str,
        step: Callable[[health.DeviceHealth, health.Now], health.DeviceHealth],
        code: str = "",
    ) -> None:
        now = self._now()
        with self._lock:
            before = self.health.get(device) or health.DeviceHealth(device=DeviceId(device))
            after = step(before, now)
            if after is before:
                return
            self.health[device] = after
            self._dirty = True
            moved = after.level is not before.level
            changed = self._judge_all(now.now_s) if moved else False
        counted = bool(code) and after.counts.get(code) != before.counts.get(code)
        if moved or (counted and after.counts[code] == 1):
            self._tell_health(before, after, code, now)
        elif counted:
            with self._lock:  # told at the next tick, once for all that came meanwhile
                self._counted[device, code] = None
        if changed:
            self._hooks.gates()

    def _tell_counted(self) -> None:
        """Tell of codes that came again since the last tick, each once with its count of now."""
        with self._lock:
            counted, self._counted = tuple(self._counted), {}
            known = [(self.health[device], code) for device, code in counted]
        now = self._now()
        for found, code in known:
            self._tell_health(found, found, code, now)

    def _tell_health(
        self, before: health.DeviceHealth, after: health.DeviceHealth, code: str, now: health.Now
    ) -> None:
        worst = after.worst or before.worst
        row = self.catalogue.of(code or (worst.code if worst is not None else "probe:failed"))
        quarantine = after.quarantine
        change = HealthChange(
            device=after.device,
            before=before.level,
            after=after.level,
            cause=after.reason or (row.title if code else "well again"),
            code=code or (worst.code if worst is not None else ""),
            count=after.counts.get(code, 0),
            scope=row.scope,
            action=row.action,
            session="" if quarantine is None else quarantine.session,
            time_s=now.now_s,
            wall_s=now.wall_s,
            shadow=self.shadow,
        )
        if change.before is not change.after:
            LOG.warning(
                "health_changed",
                extra={
                    "device": change.device,
                    "before": change.before,
                    "after": change.after,
                    "code": change.code,
                    "reason": change.cause,
                    "action": change.action,
                    "shadow": self.shadow,
                },
            )
        self._hooks.health(change)

    # --- ticks ---

    def tick(self, snapshot: Snapshot, leases: Mapping[str, str]) -> None:
        """Take what is new since the last tick and judge everything.

        Raises:
            StoreError: Usage could not be kept; it is tried again at the next tick.
        """
        now = self._now()
        self._end_drains(now.now_s)
        with self._lock:
            self._snapshot, self._leases = snapshot, leases
            self._forget(snapshot)
            failure = self._meter(lambda: self.ledger.saw(snapshot, leases, now.now_s, now.wall_s))
            for worker in self._workers:
                self._take(worker, snapshot)
        self._probe(snapshot)
        self._listen(snapshot)
        self._tell_counted()
        with self._lock:
            if now.now_s - self._headroom_s >= HEADROOM_EVERY_S:
                self._headroom_s = now.now_s
                self._weigh(now.now_s)
            changed = self._judge_all(now.now_s)
            failure = failure or self._meter(
                lambda: self.ledger.tick(now.boot_id, now.now_s, now.wall_s)
            )
            if self._dirty and now.now_s - self._saved_s >= SAVE_EVERY_S:
                self._save()
        if changed:
            self._hooks.gates()
        if failure is not None:
            raise failure

    @staticmethod
    def _meter(step: Callable[[], None]) -> StoreError | None:
        try:
            step()
        except StoreError as exc:
            return exc
        return None

    def _forget(self, snapshot: Snapshot) -> None:
        """Drop what belongs to partitions that are gone or were made anew."""
        living = {(str(p.id), p.generation) for p in snapshot.partitions}
        living |= {(str(d.id), 0) for d in snapshot.devices}
        for table in (self.windows, self.headrooms):
            for key in [key for key in table if key not in living]:
                del table[key]
        for short in [short for short in self._short if short[0] not in living]:
            del self._short[short]
        subjects = {subject for subject, _ in living}
        for subject in [subject for subject in self.gates if subject not in subjects]:
            del self.gates[subject]
        for mark in [mark for mark in self.counters if mark[0] not in subjects]:
            del self.counters[mark]
        for subject in [subject for subject in self._active if subject not in subjects]:
            del self._active[subject]

    # --- samples ---

    def _take(self, worker: Worker, snapshot: Snapshot) -> None:
        """Put the new frames of a worker's devices into windows and accounts."""
        restarts = worker.state().restarts
        rate_hz = max(worker.sampler().rate_hz, 0.1)
        every = max(1, int(rate_hz / FRAMES_HZ))
        period_s = every / rate_hz
        for device in snapshot.devices:
            if device.backend != worker.name:
                continue
            mark, number = self._cursor.get(device.id, ((-1, -1), 0))
            epoch, specs, frames = worker.history(device.id, number)
            if mark != (restarts, epoch):
                epoch, specs, frames = worker.history(device.id, 0)
            if not frames:
                continue
            self._cursor[device.id] = ((restarts, epoch), frames[-1].number + 1)
            chosen = tuple(frame for frame in frames if frame.number % every == 0)
            if chosen:
                page = self._page(device, specs, (restarts, epoch), snapshot)
                self._frames(device, page, chosen, period_s)

    def _page(
        self,
        device: Device,
        specs: tuple[SignalSpec, ...],
        mark: tuple[int, int],
        snapshot: Snapshot,
    ) -> _Page:
        pieces = {str(p.id): p for p in snapshot.partitions if p.device == device.id}
        shape = hash(tuple((p.id, p.generation) for p in pieces.values()))
        page = self._pages.get(device.id)
        if page is not None and page.mark == (*mark, shape):
            return page
        places = {(spec.subject, spec.name): slot for slot, spec in enumerate(specs)}
        slots = []
        for slot, spec in enumerate(specs):
            resource = headroom.RESOURCES.get(spec.name)
            piece = pieces.get(spec.subject)
            if resource is None or (spec.scope is Scope.PARTITION and piece is None):
                continue
            limit, limit_slot = _limit(resource, device, piece, spec.subject, places)
            if limit or limit_slot >= 0:
                key = (spec.subject, 0 if piece is None else piece.generation)
                can = signals.possible(spec)
                slots.append(
                    _Slot(
                        slot, spec, key, resource, limit, limit_slot, can.low, can.high, can.never
                    )
                )
        page = _Page((*mark, shape), tuple(slots), places.get((device.id, ENERGY), -1))
        self._pages[device.id] = page
        return page

    def _frames(
        self, device: Device, page: _Page, frames: tuple[Frame, ...], period_s: float
    ) -> None:
        rows = [(f.qualities, f.values, f.source_times_s, f.read_times_s) for f in frames]
        refresh_s = frames[-1].refresh_periods_s
        for column in page.slots:
            slot, low, high, never = column.slot, column.low, column.high, column.never
            clocked = rows[-1][2][slot] == rows[-1][2][slot]  # NaN: the source has no clock
            times = 2 if clocked else 3
            new = [
                (row[times][slot], row[1][slot])
                for row in rows
                if row[0][slot] == 0 and low <= row[1][slot] <= high and row[1][slot] not in never
            ]
            if not new:
                continue
            renewed_s = refresh_s[slot] if clocked else 0.0
            if not renewed_s > period_s:  # or not measured yet
                renewed_s = period_s
            self._count(column, new, frames[-1], renewed_s)
        self._spend(device, page, frames)

    def _count(
        self, column: _Slot, new: list[tuple[float, float]], last: Frame, period_s: float
    ) -> None:
        """Put values into the windows of a column, and into an account where it is activity."""
        limit = column.limit or last.values[column.limit_slot]
        if not limit > 0:
            return
        table = self.windows.setdefault(column.key, {})
        windows = table.get(column.resource.name)
        if windows is None:
            windows = table[column.resource.name] = Windows(high=column.resource.high)
        windows.period_s = period_s
        windows.minute.add_all(new, limit)
        if column.spec.name == ACTIVE:
            self._active[column.key[0]] = new[-1][1]
            self.ledger.used(*column.key, new, period_s, column.spec.source)

    def _spend(self, device: Device, page: _Page, frames: tuple[Frame, ...]) -> None:
        """Split what the device's energy counter grew by over its active partitions."""
        slot = page.energy
        if slot < 0:
            return
        grown_j = 0.0
        mark = (str(device.id), ENERGY)
        for frame in frames:
            value = frame.values[slot]
            if frame.qualities[slot] != 0 or not math.isfinite(value):
                continue
            source_s = frame.source_times_s[slot]
            at_s = frame.read_times_s[slot] if math.isnan(source_s) else source_s
            before = self.counters.get(mark)
            if before is None:
                self.counters[mark] = signals.begin_count(value, at_s)
                continue
            after, grown = signals.count(before, value, at_s, signals.POWER_MAX_W)
            self.counters[mark] = after
            grown_j += grown or 0.0
        if grown_j > 0:
            self.ledger.spent(device.id, grown_j, self._shares(device))

    def _shares(self, device: Device) -> dict[str, float]:
        """Return each partition's active share of the whole device."""
        snapshot = self._snapshot
        return {
            str(p.id): self._active[p.id] * min(1.0, p.placement.size / max(1, device.slices))
            for p in (() if snapshot is None else snapshot.partitions)
            if p.device == device.id and p.id in self._active
        }

    def _weigh(self, now_s: float) -> None:
        """Work out the headroom of everything."""
        for key, table in self.windows.items():
            ratios: dict[str, float | None] = {}
            for name, windows in table.items():
                windows.settle(now_s)
                found = windows.minute.quantiles(now_s, windows.period_s or 1.0)
                resource = headroom.Resource(name, margin=name == "temperature")
                ratios[name] = headroom.left(resource, found)
                if found.p95 is None:
                    self._short[key, name] = found
                else:
                    self._short.pop((key, name), None)
            self.headrooms[key] = headroom.together(ratios)

    def quantiles(self, now_s: float) -> list[tuple[Key, str, Quantiles]]:
        """Return the quantiles of every window, of the minute and of the quarter hour."""
        found = []
        with self._lock:
            for key, table in self.windows.items():
                for name, windows in table.items():
                    windows.settle(now_s)
                    period_s = windows.period_s or 1.0
                    found += [
                        (key, name, window.quantiles(now_s, period_s))
                        for window in (windows.minute, windows.quarter)
                    ]
        return found

    # --- health ---

    def _probe(self, snapshot: Snapshot) -> None:
        """Fold what the snapshot shows of each device."""
        faults: dict[str, list[tuple[str, str]]] = {}
        for fault in snapshot.faults:
            if fault.kind in PROBES:
                faults.setdefault(fault.device, []).append((PROBES[fault.kind], fault.reason))
        for device in snapshot.devices:
            with self._lock:
                self.health.setdefault(device.id, health.DeviceHealth(device=device.id))
            found = dict(faults.get(device.id, ()))
            code = CONDITIONS.get(device.condition)
            if code is not None and not found:
                found[code] = device.condition_reason
            if self._is_frozen(device):
                found["probe:counter_frozen"] = "the energy counter stands still under load"
            self._probed(device.id, tuple(found.items()))

    def _probed(self, device: str, found: tuple[tuple[str, str], ...]) -> None:
        self._change(device, lambda h, now: health.probe(h, found, self.catalogue, now))

    def _is_frozen(self, device: Device) -> bool:
        counter = self.counters.get((str(device.id), ENERGY))
        if counter is None:
            return False
        busy = any(share > 0.05 for share in self._shares(device).values())
        return signals.is_frozen(counter, clock.boottime_s(), 0.5, busy=busy)

    def _listen(self, snapshot: Snapshot) -> None:
        """Fold what the kernel's log tells of devices."""
        if self._kernel is None:
            return
        records = self._kernel.read()
        if not records:
            return
        real = [device for device in snapshot.devices if not device.simulated]
        by_place = {device.bus: device.id for device in real if device.bus}
        ahead_s = clock.monotonic_offset_s()  # a suspend stops the log's clock alone
        for record in records:
            fault = fault_of(record.text)
            if fault is None:
                continue
            device = by_place.get(fault.where)
            if device is None:
                self.kernel_unattributed += 1
                continue
            event = health.Event(
                code=fault.code,
                time_s=record.time_s + ahead_s,
                witness="kernel",
                detail=fault.detail,
            )
            self._fold(device, event)
        self._dirty = True

    # --- gates ---

    def _judge_all(self, now_s: float) -> bool:
        """Judge every gate; return whether one is otherwise than before."""
        snapshot = self._snapshot
        if snapshot is None:
            return False
        latest = {
            (signal.spec.subject, signal.spec.name): signal
            for worker in self._workers
            for signal in worker.signals()
        }
        age_s = max(0.0, now_s - snapshot.taken_at_s)
        changed = False
        devices = {device.id: device for device in snapshot.devices}
        for device in snapshot.devices:
            opinions = self._device_opinions(device, snapshot, latest, now_s, age_s)
            changed |= self._put(device.id, opinions, now_s)
        for piece in snapshot.partitions:
            device_of = devices.get(piece.device)
            opinions = self._piece_opinions(piece, device_of, snapshot, latest, now_s, age_s)
            changed |= self._put(piece.id, opinions, now_s)
        return changed

    def _put(self, subject: str, opinions: dict[str, gates.Opinion], now_s: float) -> bool:
        before = self.gates.get(subject, {})
        after = gates.judge(before, opinions, now_s, self.limits.dwell_s)
        self.gates[subject] = after
        return any(
            name not in before or before[name].state is not gate.state
            for name, gate in after.items()
        )

    def _health_opinion(self, device: str) -> gates.Opinion:
        known = self.health.get(device)
        closed = "" if known is None or self.shadow else known.closed_by
        return gates.health(closed)

    def _device_opinions(
        self,
        device: Device,
        snapshot: Snapshot,
        latest: Mapping[tuple[str, str], Signal],
        now_s: float,
        age_s: float,
    ) -> dict[str, gates.Opinion]:
        faults = [fault for fault in snapshot.faults if fault.device == device.id]
        found = {
            "health": self._health_opinion(device.id),
            "drain": gates.health(drains.why(self.drains, device.id, snapshot)),
            "topology": gates.topology(device, faults, age_s),
        }
        _add_freshness(found, device.id, Scope.DEVICE, latest, now_s)
        margin = latest.get((device.id, MARGIN))
        if margin is not None and margin.quality is not Quality.NOT_SUPPORTED:
            fresh = signals.is_fresh(margin, now_s) and not signals.doubt(
                margin.spec, margin.value or 0.0
            )
            found["thermal"] = gates.thermal(
                margin.value if fresh else None, signals.age_s(margin, now_s), self.limits
            )
        return found

    def _piece_opinions(  # noqa: PLR0913, PLR0917 - what a judgement rests on
        self,
        piece: Partition,
        device: Device | None,
        snapshot: Snapshot,
        latest: Mapping[tuple[str, str], Signal],
        now_s: float,
        age_s: float,
    ) -> dict[str, gates.Opinion]:
        faults = [fault for fault in snapshot.faults if fault.device == piece.device]
        found = {
            "health": self._health_opinion(piece.device),
            "drain": gates.health(drains.why(self.drains, piece.id, snapshot)),
            "topology": gates.topology(device, faults, age_s),
        }
        _add_freshness(found, piece.id, Scope.PARTITION, latest, now_s)
        thermal = self.gates.get(piece.device, {}).get("thermal")
        if thermal is not None and thermal.state is not gates.GateState.OPEN:
            found["thermal"] = gates.Opinion(state=thermal.state, reason=thermal.reason)
        if piece.share is not Share.EXCLUSIVE:
            room = self.headrooms.get((str(piece.id), piece.generation))
            least, scarcest = (None, "") if room is None else (room.least, room.scarcest)
            found["headroom"] = gates.headroom(least, scarcest, 0.0, self.limits)
        return found

    def deciding(self) -> dict[str, gates.Gate]:
        """Return the gate that decides for each device and partition."""
        with self._lock:
            found = {}
            for subject, table in self.gates.items():
                worst = gates.worst(tuple(table.values()))
                if worst is not None:
                    found[subject] = worst
            return found

    def gate_rows(self) -> dict[str, GateRow]:
        """Return the gates of each subject together, as the wire has them."""
        from alloy_agent.uplink.codec import GateRow

        words = {gates.GateState.OPEN: True, gates.GateState.CLOSED: False}
        return {
            subject: GateRow(open=words.get(gate.state), gate=gate.gate, reason=gate.reason)
            for subject, gate in self.deciding().items()
        }

    def collectors(self) -> tuple[tuple[str, Callable[[], Iterable[Family]]], ...]:
        """Return what the metrics page shows of telemetry, by name."""
        from alloy_agent.telemetry import metrics

        now = clock.boottime_s

        def locked(make: Callable[[], Iterable[Family]]) -> Callable[[], list[Family]]:
            def collect() -> list[Family]:
                with self._lock:
                    return list(make())

            return collect

        return (
            ("counters", locked(lambda: metrics.counter_families(self.counters))),
            (
                "windows",
                locked(lambda: metrics.window_families(self.coverages(), self.headrooms)),
            ),
            ("gates", locked(lambda: metrics.gate_families(self.gates))),
            (
                "health",
                locked(
                    lambda: metrics.health_families(
                        self.health, self.catalogue.version, self.kernel_unattributed, now()
                    )
                ),
            ),
            ("metering", locked(lambda: metrics.usage_families(self.ledger.seconds()))),
            ("samplers", lambda: metrics.sampler_families(self._samplers())),
        )

    def coverages(self) -> list[tuple[Key, str, Quantiles]]:
        """Return the minute's quantiles of every window whose coverage is short."""
        return [(key, name, found) for (key, name), found in self._short.items()]

    def _samplers(self) -> dict[str, tuple[Any, list[tuple[float, int]]]]:
        from alloy_agent.worker.board import bucket_ceiling_s

        found = {}
        for worker in self._workers:
            buckets = [
                (bucket_ceiling_s(number), count)
                for number, count in enumerate(worker.lateness())
                if count
            ]
            found[worker.name] = (worker.sampler(), buckets)
        return found

    def sampler_words(self) -> dict[str, str]:
        """Return in few words how each worker samples."""
        found = {}
        for worker in self._workers:
            state = worker.sampler()
            late = state.lateness_p99_s
            p99 = "" if late is None else f", p99 {late * 1e3:.1f} ms late"
            found[worker.name] = f"{state.rate_hz:.3g} Hz {state.policy}{p99}"
        return found

    # --- drains ---

    def draining(self) -> frozenset[str]:
        """Return the devices and partitions that take nothing new by somebody's word."""
        with self._lock:
            snapshot = self._snapshot
            if snapshot is None or not self.drains:
                return frozenset()
            subjects = [str(d.id) for d in snapshot.devices]
            subjects += [str(p.id) for p in snapshot.partitions]
            return frozenset(s for s in subjects if drains.why(self.drains, s, snapshot))

    def _end_drains(self, now_s: float) -> None:
        """Take back what was drained for a time that is over; the gates follow in this tick."""
        with self._lock:
            self.drains, ended = drains.lapsed(self.drains, now_s)
            if ended:
                self._save()
        for drain in ended:
            fields = {"subject": drain.subject or "node", "session": drain.session}
            LOG.warning("drain_ended", extra=fields)
            self._hooks.drains(drain, False)

    def drain(
        self, subject: str, session: str, reason: str, snapshot: Snapshot, ttl_s: float = 0.0
    ) -> drains.Drained:
        """Take nothing new on a subject, for a time or until told; returns what that reaches.

        Raises:
            ConfigError: There is nothing of that name.
            StaleTokenError: Another session has drained it.
        """
        with self._lock:
            self._snapshot = snapshot
            before = self.drains
            self.drains, drained = drains.drained(
                before, subject, session, reason, snapshot, clock.boottime_s(), ttl_s
            )
            self._save()
            self._judge_all(clock.boottime_s())
        if self.drains is not before:
            LOG.warning(
                "drained",
                extra={
                    "subject": subject or "node",
                    "scope": drained.scope,
                    "session": drained.session,
                    "reason": drained.reason,
                    "takes": drained.takes,
                    "ttl_s": ttl_s,
                },
            )
            self._hooks.drains(drained, True)
            self._hooks.gates()
        return drained

    def undrain(self, subject: str, session: str) -> drains.Drained | None:
        """Allow new work again; an operator's word for a device also ends its faults.

        Raises:
            StaleTokenError: Another session has drained it, or the quarantine's is another.
        """
        from alloy_agent.errors import StaleTokenError

        with self._lock:
            self._seen()
            self.drains, was = drains.undrained(self.drains, subject, session)
            known = self.health.get(subject)
            if known is not None and (was is None or not session):
                after, refused = health.taken_back(known, session)
                if refused:
                    raise StaleTokenError(f"undrain {subject}: {refused}")
                self.health[subject] = after
            self._save()
            self._judge_all(clock.boottime_s())
            after_known = self.health.get(subject)
        LOG.warning("undrained", extra={"subject": subject or "node", "session": session})
        if known is not None and after_known is not None and known.level is not after_known.level:
            self._tell_health(known, after_known, "", self._now())
        if was is not None:
            self._hooks.drains(was, False)
        self._hooks.gates()
        return was

    def _seen(self) -> Snapshot:
        from alloy_agent.errors import ConfigError

        if self._snapshot is None:
            raise ConfigError("the node has not been seen yet", cure="ask again in a second")
        return self._snapshot

    # --- signals of our own ---

    def derived(self, now_s: float) -> tuple[Signal, ...]:
        """Return headroom as signals of each partition."""
        with self._lock:
            rooms = tuple(self.headrooms.items())
        found = []
        for (subject, generation), room in rooms:
            if generation == 0 and "/" not in subject:
                continue
            spec = SignalSpec(
                name=HEADROOM,
                subject=subject,
                scope=Scope.PARTITION,
                unit="ratio",
                source="window of 60 s",
                refresh_period_s=HEADROOM_EVERY_S,
            )
            known = room.least is not None
            found.append(
                Signal(
                    spec=spec,
                    quality=Quality.VALUE if known else Quality.NOT_SUPPORTED,
                    value=room.least,
                    read_time_s=now_s if known else 0.0,
                    reason="" if known else f"{room.scarcest or 'nothing'} is not known yet",
                )
            )
        return tuple(found)


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


def _add_freshness(
    found: dict[str, gates.Opinion],
    subject: str,
    scope: Scope,
    latest: Mapping[tuple[str, str], Signal],
    now_s: float,
) -> None:
    """Add the freshness gate of a subject, if its source has anything that must be fresh."""
    ages: dict[str, tuple[float | None, float]] = {}
    for name in REQUIRED[scope]:
        signal = latest.get((subject, name))
        if signal is None or signal.quality is Quality.NOT_SUPPORTED:
            continue
        known = signal.value is not None and signal.read_time_s > 0
        age_s = signals.age_s(signal, now_s) if known else None
        ages[name] = (age_s, signals.limit_s(signal.spec))
    if ages:
        found["freshness"] = gates.freshness(ages)
