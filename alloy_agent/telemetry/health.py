"""Health of a device as a fold over what it, its driver and the kernel log report. Pure.

    event -> seen before by another witness? -> counted -> what the catalogue says -> open faults
    tick  -> companions that did not come, quiet times over, resets validated, quarantine served

Rules that stay true in here:

* Every event is counted, also the second equal one; a second witness of one event is no event.
* Every state has an exit: by time, by a validated reset, by the driver's verdict, by an operator.
* The driver's own verdict (recovery action) comes before the table.
* Application faults never close a device's gate.
* A restart restores, and never makes well; a boot counts as a reset that is still to be validated.
* In shadow mode everything is folded and told, and nothing is closed.

Quarantine damps flapping as routers damp routes: each fault adds a penalty with a half-life; above
`SUPPRESS` the device is out until the penalty has decayed below `REUSE` and the time of its session
is served, which grows with each session and ends with a person.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from alloy_agent.model import DeviceId, PartitionId, Scope, Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from alloy_agent.telemetry.catalogue import Catalogue, FaultClass, FaultRow

HOLD_S: Final = 10.0  # for companions
PAIR_S: Final = 5.0  # between two witnesses of one event
BURST_S: Final = 180.0  # equal codes within it add to the penalty once
SEEN_S: Final = 30.0  # well again for so long
VALIDATE_S: Final = 60.0  # after a reset
HALF_LIFE_S: Final = 6 * 3600.0
SUPPRESS: Final = 2000.0
REUSE: Final = 750.0
PENALTY_MAX: Final = REUSE * 2 ** (24 * 3600 / HALF_LIFE_S)  # decays below REUSE within a day
SERVE_S: Final = (600.0, 3600.0, 6 * 3600.0, 24 * 3600.0)  # then a person
RECENT_MAX: Final = 128

CLOSING: Final = frozenset({"reset", "reboot", "other"})
REBOOTING: Final = frozenset({"reboot", "imex"})

Witness = Literal["driver", "kernel", "probe", "operator"]


class Level(StrEnum):
    """How a device is."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"
    QUARANTINED = "quarantined"


class OpenFault(Value, frozen=True, kw_only=True):
    """A fault that has not ended. `reset_s`: since when a reset waits to be validated."""

    code: str
    fault_class: str
    scope: Scope
    action: str
    clear: str
    title: str
    first_s: float
    last_s: float
    count: int = 1
    clear_after_s: float = 0.0
    partition: PartitionId | None = None
    detail: str = ""
    reset_s: float | None = None
    good_s: float | None = None  # since when the agent finds it well

    @property
    def closes(self) -> bool:
        """Whether nothing may be placed while it is open."""
        return self.fault_class in CLOSING


class Seen(Value, frozen=True, kw_only=True):
    """One event of the recent past."""

    code: str
    time_s: float
    witness: str
    paired: bool = False


class Held(Value, frozen=True, kw_only=True):
    """A code that waits for its companions."""

    code: str
    since_s: float
    partition: PartitionId | None = None
    detail: str = ""


class Quarantine(Value, frozen=True, kw_only=True):
    """A device that is out. `until_s` None: until a person takes it back."""

    session: str
    since_s: float
    until_s: float | None
    cause: str


class DeviceHealth(Value, frozen=True, kw_only=True):
    """What is known of one device's health."""

    device: DeviceId
    faults: tuple[OpenFault, ...] = ()
    held: tuple[Held, ...] = ()
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    recent: tuple[Seen, ...] = ()
    penalty: float = 0.0
    penalty_s: float = 0.0  # when the penalty was that
    bursts: dict[str, float] = msgspec.field(default_factory=dict)
    quarantine: Quarantine | None = None
    sessions: int = 0
    verdict: str = ""  # the driver's, as last told
    witnessed: int = 0  # events that a second witness confirmed

    @property
    def level(self) -> Level:
        """How the device is."""
        if self.quarantine is not None:
            return Level.QUARANTINED
        if any(fault.closes for fault in self.faults):
            return Level.FAILED
        return Level.DEGRADED if self.faults or self.held else Level.OK

    @property
    def reason(self) -> str:
        """Why it is not well, the worst first; "" when it is."""
        for fault in sorted(self.faults, key=lambda f: not f.closes):
            return f"{fault.code}: {fault.title}" + (f": {fault.detail}" if fault.detail else "")
        if self.quarantine is not None:
            return f"quarantined: {self.quarantine.cause}"
        return f"{self.held[0].code}: waiting for what comes with it" if self.held else ""

    @property
    def closed_by(self) -> str:
        """Return what forbids placement; "" when nothing does."""
        closed = self.quarantine is not None or any(fault.closes for fault in self.faults)
        return self.reason if closed else ""

    @property
    def worst(self) -> OpenFault | None:
        """Return the fault that decides; None: there is none."""
        return min(self.faults, key=lambda f: not f.closes, default=None)


class Event(Value, frozen=True, kw_only=True):
    """One thing that somebody reported of a device."""

    code: str
    time_s: float
    witness: Witness = "driver"
    partition: PartitionId | None = None
    detail: str = ""


class Now(Value, frozen=True, kw_only=True):
    """The moment, on both clocks. Wall time only bridges boots."""

    boot_id: str
    now_s: float
    wall_s: float


def _with(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


# --- events ---------------------------------------------------------------------------------------


def fold(health: DeviceHealth, event: Event, catalogue: Catalogue, now: Now) -> DeviceHealth:
    """Return the health after one event."""
    paired = _paired(health, event)
    if paired is not None:
        return paired
    counts = {**health.counts, event.code: health.counts.get(event.code, 0) + 1}
    seen = Seen(code=event.code, time_s=event.time_s, witness=event.witness)
    health = _with(health, counts=counts, recent=(*health.recent, seen)[-RECENT_MAX:])
    row = catalogue.of(event.code)
    health = _release_held(health, event.code, catalogue)
    if row.fault_class == "verdict":
        return _verdict(health, event, row, catalogue, now)
    if row.fault_class == "companion":
        return _hold(health, event, row)
    if row.fault_class == "done":
        return after_reset(health, now.now_s)
    return _classed(health, event, row, row.fault_class, now)


def _paired(health: DeviceHealth, event: Event) -> DeviceHealth | None:
    """Return the health with an event confirmed by its second witness; None: it is a new one."""
    for place, seen in enumerate(health.recent):
        if (
            seen.code == event.code
            and seen.witness != event.witness
            and not seen.paired
            and abs(seen.time_s - event.time_s) <= PAIR_S
        ):
            recent = list(health.recent)
            recent[place] = _with(seen, paired=True)
            confirmed: DeviceHealth = _with(
                health, recent=tuple(recent), witnessed=health.witnessed + 1
            )
            return confirmed
    return None


def _release_held(health: DeviceHealth, code: str, catalogue: Catalogue) -> DeviceHealth:
    """Drop what waited for this code: the code that came says what it was."""
    held = tuple(h for h in health.held if code not in catalogue.of(h.code).companions)
    released: DeviceHealth = health if len(held) == len(health.held) else _with(health, held=held)
    return released


def _hold(health: DeviceHealth, event: Event, row: FaultRow) -> DeviceHealth:
    """Let a code wait, unless a companion came right before it or it waits already."""
    for seen in health.recent:
        if seen.code in row.companions and abs(event.time_s - seen.time_s) <= HOLD_S:
            return health
    if any(held.code == event.code for held in health.held):
        return health
    held = Held(
        code=event.code, since_s=event.time_s, partition=event.partition, detail=event.detail
    )
    waiting: DeviceHealth = _with(health, held=(*health.held, held))
    return waiting


def _verdict(
    health: DeviceHealth, event: Event, row: FaultRow, catalogue: Catalogue, now: Now
) -> DeviceHealth:
    """Take the driver's verdict: it replaces what the table made of the vendor's codes."""
    words = event.detail.split()
    action = catalogue.verdicts.get(words[0], event.detail or "inspect") if words else "inspect"
    health = _with(health, verdict=action)
    if action == "none":
        kept = tuple(f for f in health.faults if f.clear not in ("reset", "verdict"))
        well: DeviceHealth = _with(health, faults=kept)
        return well
    fault_class: FaultClass = "reboot" if action in REBOOTING else "reset"
    told = _with(row, action=action, scope=Scope.NODE if action in REBOOTING else row.scope)
    return _classed(health, event, told, fault_class, now)


def _classed(
    health: DeviceHealth, event: Event, row: FaultRow, fault_class: FaultClass, now: Now
) -> DeviceHealth:
    """Do what a class means."""
    if fault_class == "informational":
        return health
    if fault_class == "application":
        return _repeated(health, event, row)
    health = _opened(health, event, row, fault_class)
    return _punished(health, event.code, row.weight, now)


def _repeated(health: DeviceHealth, event: Event, row: FaultRow) -> DeviceHealth:
    """Open a fault that only asks for a look where an application's code comes too often."""
    rule = row.repeat
    if rule is None:
        return health
    since_s = event.time_s - rule.within_s
    times = sum(seen.code == event.code and seen.time_s >= since_s for seen in health.recent)
    if times < rule.count:
        return health
    look = _with(row, action="diagnose", clear="quiet", clear_after_s=rule.within_s)
    return _opened(health, event, look, "watch")


def _opened(
    health: DeviceHealth, event: Event, row: FaultRow, fault_class: FaultClass
) -> DeviceHealth:
    known = next((f for f in health.faults if f.code == event.code), None)
    fault = OpenFault(
        code=event.code,
        fault_class=fault_class,
        scope=row.scope,
        action=row.action,
        clear=row.clear,
        title=row.title,
        first_s=event.time_s if known is None else known.first_s,
        last_s=event.time_s,
        count=1 if known is None else known.count + 1,
        clear_after_s=row.clear_after_s,
        partition=event.partition,
        detail=event.detail,
    )
    others = tuple(f for f in health.faults if f.code != event.code)
    opened: DeviceHealth = _with(health, faults=(*others, fault))
    return opened


# --- penalty and quarantine -----------------------------------------------------------------------


def penalty_of(health: DeviceHealth, now_s: float) -> float:
    """Return the penalty as it has decayed by now."""
    elapsed_s = max(0.0, now_s - health.penalty_s)
    return float(health.penalty * 2 ** (-elapsed_s / HALF_LIFE_S))


def _punished(health: DeviceHealth, code: str, weight: int, now: Now) -> DeviceHealth:
    last_s = health.bursts.get(code)
    if not weight or (last_s is not None and now.now_s - last_s < BURST_S):
        return health
    bursts = {c: s for c, s in health.bursts.items() if now.now_s - s < BURST_S}
    penalty = min(PENALTY_MAX, penalty_of(health, now.now_s) + weight)
    health = _with(health, penalty=penalty, penalty_s=now.now_s, bursts={**bursts, code: now.now_s})
    if penalty < SUPPRESS or health.quarantine is not None:
        return health
    served = SERVE_S[health.sessions] if health.sessions < len(SERVE_S) else None
    quarantine = Quarantine(
        session=f"{now.boot_id[:8]}-{int(now.now_s * 1e3):x}",
        since_s=now.now_s,
        until_s=None if served is None else now.now_s + served,
        cause=f"{code}, after faults in a row",
    )
    out: DeviceHealth = _with(health, quarantine=quarantine, sessions=health.sessions + 1)
    return out


# --- time, probes, people -------------------------------------------------------------------------


def probe(
    health: DeviceHealth, found: Iterable[tuple[str, str]], catalogue: Catalogue, now: Now
) -> DeviceHealth:
    """Return the health after a look at the device.

    Args:
        health: Before.
        found: Codes of the agent's own observation that hold now, each with its reason.
        catalogue: The table.
        now: The moment.
    """
    holding = dict(found)
    for code, reason in holding.items():
        open_ = next((f for f in health.faults if f.code == code), None)
        if open_ is None:
            event = Event(code=code, time_s=now.now_s, witness="probe", detail=reason)
            health = fold(health, event, catalogue, now)
        elif open_.good_s is not None:
            health = _replaced(health, _with(open_, good_s=None))
    for fault in health.faults:
        if fault.code.startswith("probe:") and fault.code not in holding and fault.good_s is None:
            health = _replaced(health, _with(fault, good_s=now.now_s))
    return tick(health, catalogue, now, well=not any(_bars(code) for code in holding))


def _bars(code: str) -> bool:
    """Whether a probe's code means that the device was not seen to be well."""
    return code != "probe:counter_frozen"


def _replaced(health: DeviceHealth, fault: OpenFault) -> DeviceHealth:
    faults = tuple(fault if f.code == fault.code else f for f in health.faults)
    changed: DeviceHealth = _with(health, faults=faults)
    return changed


def tick(health: DeviceHealth, catalogue: Catalogue, now: Now, *, well: bool) -> DeviceHealth:
    """Return the health after what time alone ends. `well`: the device answers as it should."""
    for held in health.held:
        if now.now_s - held.since_s >= HOLD_S:
            health = _alone(health, held, catalogue, now)
    if not well:
        waiting = tuple(
            f if f.reset_s is None else _with(f, reset_s=now.now_s) for f in health.faults
        )
        health = _with(health, faults=waiting) if waiting != health.faults else health
    ended = tuple(f for f in health.faults if not _is_over(f, now.now_s))
    if len(ended) != len(health.faults):
        health = _with(health, faults=ended)
    return _released(health, now)


def _alone(health: DeviceHealth, held: Held, catalogue: Catalogue, now: Now) -> DeviceHealth:
    """Classify a code whose companions did not come."""
    row = catalogue.of(held.code)
    health = _with(health, held=tuple(h for h in health.held if h is not held))
    event = Event(code=held.code, time_s=held.since_s, partition=held.partition, detail=held.detail)
    return _classed(health, event, row, row.alone, now)


def _is_over(fault: OpenFault, now_s: float) -> bool:
    if fault.clear == "quiet":
        return now_s - fault.last_s >= fault.clear_after_s
    if fault.clear == "seen":
        return fault.good_s is not None and now_s - fault.good_s >= SEEN_S
    return fault.reset_s is not None and now_s - fault.reset_s >= VALIDATE_S


def _released(health: DeviceHealth, now: Now) -> DeviceHealth:
    """End a quarantine that is served, on a device that is well."""
    quarantine = health.quarantine
    if quarantine is None or quarantine.until_s is None or now.now_s < quarantine.until_s:
        return health
    if penalty_of(health, now.now_s) > REUSE or any(f.closes for f in health.faults):
        return health
    back: DeviceHealth = _with(health, quarantine=None)
    return back


def after_reset(health: DeviceHealth, now_s: float) -> DeviceHealth:
    """Return the health after a reset that was done: what it can end waits for validation."""
    faults = tuple(
        _with(f, reset_s=now_s) if f.clear in ("reset", "verdict") else f for f in health.faults
    )
    reset: DeviceHealth = _with(health, faults=faults, held=(), verdict="")
    return reset


def taken_back(health: DeviceHealth, session: str) -> tuple[DeviceHealth, str]:
    """Return the health after an operator vouches for the device, and why not if refused.

    A session that is not the present quarantine's is stale: it speaks of an earlier one.
    """
    quarantine = health.quarantine
    if quarantine is not None and session and session != quarantine.session:
        return health, f"session {session} is not the present one, {quarantine.session}"
    well: DeviceHealth = _with(
        health, faults=(), held=(), quarantine=None, penalty=0.0, bursts={}, verdict=""
    )
    return well, ""


# --- restarts -------------------------------------------------------------------------------------


class Saved(Value, frozen=True, kw_only=True):
    """All devices' health as kept on disk, and when that was."""

    saved: Now
    devices: tuple[DeviceHealth, ...] = ()
    catalogue: str = ""


def restored(saved: Saved, now: Now) -> tuple[DeviceHealth, ...]:
    """Return what was kept, on the clock of this boot; a new boot is a reset to be validated."""
    if saved.saved.boot_id == now.boot_id:
        return saved.devices
    passed_s = max(0.0, now.wall_s - saved.saved.wall_s)
    shift_s = now.now_s - passed_s - saved.saved.now_s
    return tuple(_rebooted(_shifted(health, shift_s), now.now_s) for health in saved.devices)


def _rebooted(health: DeviceHealth, now_s: float) -> DeviceHealth:
    faults = tuple(
        _with(f, reset_s=now_s) if f.clear in ("reset", "reboot", "verdict") else f
        for f in health.faults
    )
    after: DeviceHealth = _with(health, faults=faults, held=(), recent=())
    return after


def _shifted(health: DeviceHealth, by_s: float) -> DeviceHealth:
    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    faults = tuple(
        _with(
            f,
            first_s=f.first_s + by_s,
            last_s=f.last_s + by_s,
            good_s=moved(f.good_s),
            reset_s=moved(f.reset_s),
        )
        for f in health.faults
    )
    quarantine = health.quarantine
    if quarantine is not None:
        quarantine = _with(
            quarantine, since_s=quarantine.since_s + by_s, until_s=moved(quarantine.until_s)
        )
    changed: DeviceHealth = _with(
        health,
        faults=faults,
        quarantine=quarantine,
        penalty_s=health.penalty_s + by_s,
        bursts={code: time_s + by_s for code, time_s in health.bursts.items()},
    )
    return changed
