"""The telemetry of a running node: its parts, joined by one lock and one tick.

Rules that stay true in here:

* Nothing here reads a device: frames come from the shared memory, shapes from snapshots.
* What was known of health and open accounts is read back at the start, before the first tick.
* One lock around the state; what others are told is told outside of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.daemon.telemetry import shown
from alloy_agent.daemon.telemetry.frames import Frames
from alloy_agent.daemon.telemetry.gatebook import GateBook, Grounds
from alloy_agent.daemon.telemetry.healthbook import HealthBook
from alloy_agent.daemon.telemetry.load import Load
from alloy_agent.daemon.telemetry.newest import Newest
from alloy_agent.errors import StoreError
from alloy_agent.host import clock
from alloy_agent.telemetry import drains
from alloy_agent.telemetry.journal import UsageJournal
from alloy_agent.telemetry.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

    from alloy_agent.daemon.telemetry.load import Key
    from alloy_agent.daemon.telemetry.told import Hooks
    from alloy_agent.model import DeviceEvent, Snapshot
    from alloy_agent.telemetry import headroom, health, signals
    from alloy_agent.telemetry.drains import Drained, Drains
    from alloy_agent.telemetry.exposition import Family
    from alloy_agent.telemetry.gates import Gate
    from alloy_agent.telemetry.kernel_log import KernelLog
    from alloy_agent.telemetry.window import Quantiles, Windows
    from alloy_agent.uplink.fast import GateRow
    from alloy_agent.worker import Worker

LOG = logging.getLogger(__name__)
TAKE_EVERY_S: Final = 2.9  # with every third tick of 1 s; a page keeps 6.4 s


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
        self.workers = workers
        self._hooks = hooks
        self.lock = threading.RLock()
        self.load = Load()
        self.ledger = Ledger(
            None if state_dir is None else UsageJournal(state_dir), on_row=hooks.usage
        )
        self._frames = Frames(self.load, self.ledger)
        self._newest = Newest(workers)
        self._gates = GateBook()
        self.book = HealthBook(self.lock, store, kernel_log, self._judge, hooks.health, hooks.gates)
        self.book.shadow = shadow
        self._snapshot: Snapshot | None = None
        self._held: tuple[object, ...] = ()
        self._taken_s = 0.0

    # --- what is known ---

    @property
    def shadow(self) -> bool:
        """Whether health closes nothing."""
        return self.book.shadow

    @shadow.setter
    def shadow(self, shadow: bool) -> None:
        self.book.shadow = shadow

    @property
    def health(self) -> dict[str, health.DeviceHealth]:
        """Return the health of each device."""
        return self.book.devices

    @property
    def drains(self) -> Drains:
        """Return what is drained by somebody's word."""
        return self.book.drains

    @property
    def gates(self) -> dict[str, dict[str, Gate]]:
        """Return every gate, by subject and name."""
        return self._gates.gates

    @property
    def windows(self) -> dict[Key, dict[str, Windows]]:
        """Return the windows of each subject, by resource."""
        return self.load.windows

    @property
    def headrooms(self) -> dict[Key, headroom.Headroom]:
        """Return the headroom of each subject."""
        return self.load.headrooms

    @property
    def counters(self) -> dict[tuple[str, str], signals.Count]:
        """Return device counters as told onwards."""
        return self._frames.counters

    def close(self) -> None:
        """Keep what is known; nothing is made well by a stop."""
        with self.lock:
            now = self.book.now()
            with contextlib.suppress(StoreError):
                self.ledger.close(now.boot_id, now.now_s, now.wall_s)
            self.book.close()

    # --- events and ticks ---

    def event(self, event: DeviceEvent) -> None:
        """Fold one event of a device, and judge its gates at once."""
        self.book.event(event)

    def tick(self, snapshot: Snapshot, leases: Mapping[str, str]) -> None:
        """Take what is new since the last tick and judge everything.

        Raises:
            StoreError: Usage could not be kept; it is tried again at the next tick.
        """
        now = self.book.now()
        self._end_drains(now.now_s)
        with self.lock:
            others = self._turn_to(snapshot)
            take = others or now.now_s - self._taken_s >= TAKE_EVERY_S
            failure = None
            if others:
                failure = _failure_of(
                    lambda: self.ledger.saw(snapshot, leases, now.now_s, now.wall_s)
                )
                self._held = () if failure else self._held  # it is tried again
            if take:
                self._taken_s = now.now_s
                self._frames.take(self.workers, snapshot)
            frozen = frozenset(
                str(device.id)
                for device in snapshot.devices
                if self._frames.energy_stands_still(device, now.now_s)
            )
        self.book.probe(snapshot, frozen)
        self.book.listen(snapshot)
        self.book.tell_counted()
        with self.lock:
            if take:
                self.load.weigh(now.now_s)
                failure = failure or _failure_of(
                    lambda: self.ledger.tick(now.boot_id, now.now_s, now.wall_s)
                )
            changed = self._judge(now.now_s)
            self.book.save_if_due(now.now_s)
        if changed:
            self._hooks.gates()
        if failure is not None:
            raise failure

    def _turn_to(self, snapshot: Snapshot) -> bool:
        """Turn to a new snapshot; return whether somebody has come or gone.

        If so, the frames until now are taken first, for whoever they belong to: accounts are
        closed behind them.
        """
        before, self._snapshot = self._snapshot, snapshot
        held = (
            tuple([(p.id, p.generation, p.tenant, p.occupants) for p in snapshot.partitions]),
            tuple([device.id for device in snapshot.devices]),
        )
        if held == self._held:
            return False
        if before is not None:
            self._frames.take(self.workers, before)
        self._held = held
        self._forget(snapshot)
        return True

    def _forget(self, snapshot: Snapshot) -> None:
        """Drop what belongs to partitions that are gone or were made anew."""
        living = frozenset((str(p.id), p.generation) for p in snapshot.partitions)
        living |= {(str(d.id), 0) for d in snapshot.devices}
        subjects = frozenset(subject for subject, _ in living)
        self.load.forget(living)
        self._frames.forget(subjects)
        self._gates.forget(subjects)

    def _judge(self, now_s: float) -> bool:
        """Judge every gate; return whether one is otherwise than before."""
        snapshot = self._snapshot
        if snapshot is None:
            return False
        self._newest.take(now_s)
        held = self.book.drains

        def drained(subject: str) -> str:
            return drains.why(held, subject, snapshot) if held else ""

        grounds = Grounds(snapshot, now_s, self.book.closed_by, drained, self.headrooms)
        return self._gates.judge(self._newest, grounds)

    # --- drains ---

    def draining(self) -> frozenset[str]:
        """Return the devices and partitions that take nothing new by somebody's word."""
        with self.lock:
            snapshot = self._snapshot
            if snapshot is None or not self.drains:
                return frozenset()
            subjects = [str(d.id) for d in snapshot.devices]
            subjects += [str(p.id) for p in snapshot.partitions]
            return frozenset(s for s in subjects if drains.why(self.drains, s, snapshot))

    def _end_drains(self, now_s: float) -> None:
        """Take back what was drained for a time that is over; the gates follow in this tick."""
        with self.lock:
            self.book.drains, ended = drains.lapsed(self.drains, now_s)
            if ended:
                self.book.save()
        for drain in ended:
            fields = {"subject": drain.subject or "node", "session": drain.session}
            LOG.warning("drain_ended", extra=fields)
            self._hooks.drains(drain, False)

    def drain(
        self, subject: str, session: str, reason: str, snapshot: Snapshot, ttl_s: float = 0.0
    ) -> Drained:
        """Take nothing new on a subject, for a time or until told; returns what that reaches.

        Raises:
            ConfigError: There is nothing of that name.
            StaleTokenError: Another session has drained it.
            StoreError: It cannot be kept, so it is not done.
        """
        with self.lock:
            self._snapshot = snapshot
            before = self.drains
            with self.book.promised():
                self.book.drains, drained = drains.drained(
                    before, subject, session, reason, snapshot, clock.boottime_s(), ttl_s
                )
            self._judge(clock.boottime_s())
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

    def undrain(self, subject: str, session: str, snapshot: Snapshot) -> Drained | None:
        """Allow new work again; an operator's word for a device also ends its faults.

        Raises:
            ConfigError: There is nothing of that name.
            StaleTokenError: Another session has drained it, or the quarantine's is another.
            StoreError: It cannot be kept, so it is not done.
        """
        with self.lock:
            if subject not in self.health:  # of a device that is gone, too
                subject = drains.meant("undrain", self.drains, subject, snapshot)
            left, was = drains.undrained(self.drains, subject, session)
            known = self.health.get(subject)
            with self.book.promised():
                if known is not None and (was is None or not session):
                    self.book.take_back(subject, session)
                self.book.drains = left
            self._judge(clock.boottime_s())
            after = self.health.get(subject)
        LOG.warning("undrained", extra={"subject": subject or "node", "session": session})
        if known is not None and after is not None and known.level is not after.level:
            self.book.tell(known, after, "", self.book.now())
        if was is not None:
            self._hooks.drains(was, False)
        self._hooks.gates()
        return was

    def _seen(self) -> Snapshot:
        from alloy_agent.errors import ConfigError

        if self._snapshot is None:
            raise ConfigError("the node has not been seen yet", cure="ask again in a second")
        return self._snapshot

    # --- for those who look ---

    def quantiles(self, now_s: float) -> list[tuple[Key, str, Quantiles]]:
        """Return the quantiles of every window, of the minute and of the quarter hour."""
        with self.lock:
            return self.load.quantiles(now_s)

    def deciding(self) -> dict[str, Gate]:
        """Return the gate that decides for each device and partition."""
        with self.lock:
            return self._gates.deciding()

    def gate_rows(self) -> Mapping[str, GateRow]:
        """Return the gates of each subject together, as the wire has them."""
        with self.lock:
            return self._gates.rows()

    def collectors(self) -> tuple[tuple[str, Callable[[], Iterable[Family]]], ...]:
        """Return what the metrics page shows of telemetry, by name."""
        return shown.collectors(self)

    def sampler_words(self) -> dict[str, str]:
        """Return in few words how each worker samples."""
        return shown.sampler_words(self.workers)


def _failure_of(step: Callable[[], None]) -> StoreError | None:
    """Do a step of metering; return how the store failed it."""
    try:
        step()
    except StoreError as exc:
        return exc
    return None
