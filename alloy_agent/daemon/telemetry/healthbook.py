"""What is known of each device's health: events, probes and the kernel's log, folded and kept.

    event of a device  ->  fold  \
    snapshot           ->  probe  >  health of the device  ->  told, and kept in the store
    kernel log         ->  fold  /

Rules that stay true in here:

* What was known is read back before anything new is folded; nothing is made well by a restart.
* A change of level is told at once, a code that comes again once a tick with its count of then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from alloy_agent.daemon.telemetry.told import HealthChange
from alloy_agent.errors import StaleTokenError, StoreError
from alloy_agent.host import clock
from alloy_agent.model import Condition, DeviceEvent, DeviceId, Snapshot, Value
from alloy_agent.telemetry import catalogue, drains, health
from alloy_agent.telemetry.kernel_log import KernelLog, fault_of

if TYPE_CHECKING:
    import threading

LOG = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 5.0
META: Final = drains.META
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
Step = Callable[[health.DeviceHealth, health.Now], health.DeviceHealth]


class _Kept(Value, frozen=True, kw_only=True):
    """What survives a restart."""

    health: health.Saved
    drains: drains.Drains = ()
    kernel_sequence: int | None = None


class HealthBook:
    """Health of all devices, and the drains that are kept beside it.

    Args:
        lock: Of the telemetry; what is told is told without it.
        store: Where it is kept; None: nowhere.
        kernel_log: Opens the second witness behind a record; None: there is none.
        on_moved: Judges gates, under the lock; returns whether one has changed.
        on_change: Told of a device's health.
        on_gates: Told that a gate has changed.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it joins
        self,
        lock: threading.RLock,
        store: Any,
        kernel_log: Callable[[int | None], KernelLog] | None,
        on_moved: Callable[[float], bool],
        on_change: Callable[[HealthChange], object],
        on_gates: Callable[[], object],
    ) -> None:
        self._lock = lock
        self._store = store
        self._on_moved = on_moved
        self._on_change = on_change
        self._on_gates = on_gates
        self._boot_id = clock.boot_id()
        self.shadow = False
        self.catalogue = catalogue.load()
        self.devices: dict[str, health.DeviceHealth] = {}
        self.drains: drains.Drains = ()
        self.kernel_unattributed = 0
        self.save_failures = 0
        self._counted: dict[tuple[str, str], None] = {}
        self._saved_s = 0.0
        self._dirty = False
        sequence = self._restore()
        self._kernel = None if kernel_log is None else kernel_log(sequence)

    def now(self) -> health.Now:
        """Return this moment."""
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
        now = self.now()
        same_boot = kept.health.saved.boot_id == now.boot_id
        self.drains = (
            kept.drains if same_boot else drains.over_boot(kept.drains, now.now_s, now.wall_s)
        )
        self.devices = {str(h.device): h for h in health.restored(kept.health, now)}
        return kept.kernel_sequence if same_boot else None

    def keep(self) -> None:
        """Keep everything as it is.

        Raises:
            StoreError: It is not kept.
        """
        if self._store is None:
            return
        kept = _Kept(
            health=health.Saved(
                saved=self.now(),
                devices=tuple(self.devices.values()),
                catalogue=self.catalogue.version,
            ),
            drains=self.drains,
            kernel_sequence=None if self._kernel is None else self._kernel.sequence,
        )
        try:
            self._store.set_meta(META, msgspec.json.encode(kept).decode())
        except StoreError as exc:
            self.save_failures += 1
            LOG.warning("health_not_kept", extra={"reason": str(exc)})
            raise
        self._dirty = False
        self._saved_s = clock.boottime_s()

    def save(self) -> None:
        """Keep everything as it is, or say that it was not; it is tried again while it matters."""
        with contextlib.suppress(StoreError):
            self.keep()

    @contextlib.contextmanager
    def promised(self) -> Iterator[None]:
        """Change drains and health so that they are kept, or not at all.

        Raises:
            StoreError: It could not be kept; nothing has changed, in memory either.
        """
        before = self.drains, dict(self.devices)
        yield
        if (self.drains, self.devices) == before:
            return
        try:
            self.keep()
        except StoreError:
            self.drains, self.devices = before
            raise

    def save_if_due(self, now_s: float) -> None:
        """Keep what has changed, at most every five seconds."""
        if self._dirty and now_s - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def close(self) -> None:
        """Keep what is known; nothing is made well by a stop."""
        self.save()
        if self._kernel is not None:
            self._kernel.close()

    # --- folding ---

    def event(self, event: DeviceEvent) -> None:
        """Fold one event of a device."""
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

    def _change(self, device: str, step: Step, code: str = "") -> None:
        now = self.now()
        with self._lock:
            before = self.devices.get(device) or health.DeviceHealth(device=DeviceId(device))
            after = step(before, now)
            if after is before:
                return
            self.devices[device] = after
            self._dirty = True
            moved = after.level is not before.level
            changed = self._on_moved(now.now_s) if moved else False
        counted = bool(code) and after.counts.get(code) != before.counts.get(code)
        if moved or (counted and after.counts[code] == 1):
            self.tell(before, after, code, now)
        elif counted:
            with self._lock:  # told at the next tick, once for all that came meanwhile
                self._counted[device, code] = None
        if changed:
            self._on_gates()

    def probe(self, snapshot: Snapshot, frozen: frozenset[str]) -> None:
        """Fold what the snapshot shows of each device.

        Args:
            snapshot: Of now.
            frozen: Devices whose energy counter stands still under load.
        """
        faults: dict[str, list[tuple[str, str]]] = {}
        for fault in snapshot.faults:
            if fault.kind in PROBES:
                faults.setdefault(fault.device, []).append((PROBES[fault.kind], fault.reason))
        for device in snapshot.devices:
            with self._lock:
                self.devices.setdefault(device.id, health.DeviceHealth(device=device.id))
            found = dict(faults.get(device.id, ()))
            code = CONDITIONS.get(device.condition)
            if code is not None and not found:
                found[code] = device.condition_reason
            if device.id in frozen:
                found["probe:counter_frozen"] = "the energy counter stands still under load"
            self._probed(device.id, tuple(found.items()))

    def _probed(self, device: str, found: tuple[tuple[str, str], ...]) -> None:
        self._change(device, lambda h, now: health.probe(h, found, self.catalogue, now))

    def listen(self, snapshot: Snapshot) -> None:
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

    def take_back(self, subject: str, session: str) -> health.DeviceHealth | None:
        """End a device's faults by an operator's word; returns its health before.

        Raises:
            StaleTokenError: The quarantine is of another session.
        """
        known = self.devices.get(subject)
        if known is not None:
            after, refused = health.taken_back(known, session)
            if refused:
                raise StaleTokenError(f"undrain {subject}: {refused}")
            self.devices[subject] = after
        return known

    def closed_by(self, device: str) -> str:
        """Return the fault of a device that forbids placement; "" for none."""
        known = self.devices.get(device)
        return "" if known is None or self.shadow else known.closed_by

    # --- telling ---

    def tell_counted(self) -> None:
        """Tell of codes that came again since the last tick, each once with its count of now."""
        if not self._counted:
            return
        with self._lock:
            counted, self._counted = tuple(self._counted), {}
            known = [(self.devices[device], code) for device, code in counted]
        now = self.now()
        for found, code in known:
            self.tell(found, found, code, now)

    def tell(
        self, before: health.DeviceHealth, after: health.DeviceHealth, code: str, now: health.Now
    ) -> None:
        """Tell of a device that was otherwise before, or of a code that was counted."""
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
        self._on_change(change)
