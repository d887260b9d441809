"""One shared device: reads the tenants' pages, decides, writes orders, freezes as the last resort.

Rules that stay true in here:

* Orders carry a lease that is renewed every 20 ms and lasts 50 ms: an agent that dies, hangs or
  is stopped closes every neighbour's gate; production is never held by anything.
* A burst counts as clean only if the neighbours' own pages prove that nothing of theirs was
  outstanding; a lost entry of theirs makes it contended.
* A neighbour whose page makes no sense gets no lease, and is frozen where it has a cgroup.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.conformance.baseline import Burst
from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.conformance.gate.living import Living
from alloy_agent.conformance.gate.pages import (
    Completions,
    OrderPage,
    Slot,
    StatePage,
    make_state,
)
from alloy_agent.conformance.rate import (
    GateOrder,
    RateLimits,
    RateSample,
    RateState,
    Stage,
    order_of,
    shares,
    tick,
)
from alloy_agent.conformance.sequential import (
    AuditLimits,
    AuditState,
    Window,
    calibrate,
    judge_share,
    watch,
)
from alloy_agent.errors import AlloyError, ConfigError
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Value

LEASE_S: Final = 0.05
RENEW_S: Final = 0.02
TICK_S: Final = 0.1
REMEMBERED_S: Final = 5.0
SPANS_MOST: Final = 4096  # busy spans that are remembered of a tenant; more of them are merged
BURSTS_HZ: Final = 50_000.0  # a page that tells of more busy periods a second is made up
BURSTS_SPARE: Final = 20_000.0  # all rings of a page at once, as on the first look, are fewer
CLOCK_S: Final = 1.0  # between a process's first look at its clock and its slot
UNTOLD_S: Final = 0.1  # work may go on for so long after a launch whose end is not told
WINDOW_S: Final = 1.0


class TenantStatus(Value, frozen=True, kw_only=True):
    """One tenant of a shared device, for people and documents."""

    name: str
    role: str
    weight: float
    processes: int
    launched: int
    device_s: float
    waiting: int
    waited_s: float
    frozen: bool
    metered: bool
    trouble: str = ""
    leased: bool = False  # its gate had a lease at the last renewal
    completions: str = ""  # how it is known that its launches are done


class ShareStatus(Value, frozen=True, kw_only=True):
    """How a shared device stands."""

    device: str
    stage: str
    opening: float
    loss_ratio: float | None
    lent_ratio: float
    answer: str
    reason: str
    mean_ratio: float | None
    lower_ratio: float | None
    upper_ratio: float | None
    ticks: int
    overruns: int
    tenants: tuple[TenantStatus, ...]
    e_value: float = 0.0
    windows: int = 0
    skipped: int = 0  # windows that were not judged
    budget_ratio: float = 0.02
    throttled: str = ""  # why windows are not comparable now
    held: str = ""  # why no neighbour gets a lease
    control: str = "gate"  # "share": production's completions are unknown, a small fixed share


@dataclass
class _Tenant:
    name: str
    role: str
    weight: float
    cgroup: str
    state: StatePage
    order: OrderPage | None
    living: Living
    slots: tuple[Slot, ...] = ()
    busy: list[tuple[float, float]] = field(default_factory=list)
    trouble: str = ""
    made_up: str = ""  # why nothing on its page is believed any more
    spare: float = BURSTS_SPARE  # busy periods that it may tell of before that is too many
    spared_s: float = 0.0
    leased: bool = False
    added_s: float = 0.0  # its pages are younger than that; 0 where they were adopted


class SharedDevice:
    """The controller's shell for one device. Not for use by several threads at once."""

    def __init__(
        self,
        device: str,
        folder: Path,
        limits: RateLimits | None = None,
        freezer: Freezer | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.device = device
        self.limits = limits or RateLimits()
        self.state = RateState(heard_s=clock())
        self.audit, self.audit_limits = AuditState(), AuditLimits()
        self.throttled = ""  # power, heat or clocks hold the device back: nothing is judged
        self.held = ""  # an operator or a brain holds the neighbours
        self._folder, self._freezer, self._clock = folder, freezer, clock
        self._tenants: dict[str, _Tenant] = {}
        self._order = GateOrder(stopped=True)
        self._dead_slots = 0
        self._ticks = self._overruns = 0
        self._window_s, self._judged = 0.0, (0.0, 0.0, 0)
        self._lent: list[tuple[float, float]] = []
        self._window: list[tuple[Burst, float | None]] = []
        self._clean: list[float] = []  # slowdowns of clean bursts that no window is made of yet
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)

    def add(  # noqa: PLR0913 - what a tenant is
        self,
        name: str,
        role: str,
        *,
        weight: float = 1.0,
        cgroup: str = "",
        uid: int | None = None,
        pid: int = 0,
        group: Path | None = None,
        adopt: bool = False,
    ) -> dict[str, str]:
        """Make a tenant's pages and return the environment that leads it to them.

        `pid` and `group` (the cgroup's folder) tell whose the processes on its page are; `adopt`
        takes up the pages of a tenant that an earlier agent left running.

        Raises:
            ConfigError: The role is none, or the device has a production tenant already.
        """
        if role not in {"production", "opportunistic"} or weight <= 0.0:
            raise ConfigError(f"{name}: role {role!r} with weight {weight} is none")
        if name in self._tenants:
            self.remove(name)
        producers = [t.name for t in self._tenants.values() if t.role == "production"]
        if role == "production" and producers:
            raise ConfigError(
                f"{self.device} has production tenant {producers[0]} already",
                cure="end it first, or add this one as opportunistic",
            )
        state, order = self._folder / f"{name}.state", self._folder / f"{name}.order"
        if not adopt:
            make_state(state, os.getuid() if uid is None else uid, -1)
        try:
            page = OrderPage(order, role, adopt=adopt)
        except AlloyError:
            if not adopt:
                state.unlink()
            raise
        living = Living(state, pid, group)
        tenant = _Tenant(name, role, weight, cgroup, StatePage(state), page, living)
        tenant.added_s = 0.0 if adopt else self._clock()
        self._tenants[name] = tenant
        if role == "production" and not adopt:
            self._lead_to(state)
        return {
            "ALLOY_GATE_ROLE": role,
            "ALLOY_GATE_ORDER": str(order),
            "ALLOY_GATE_STATE": str(state),
            "ALLOY_GATE_PRODUCTION": str(self._folder / "production"),
        }

    def remove(self, name: str) -> None:
        """Forget a tenant; its gate, if anything still waits at it, stays shut."""
        tenant = self._tenants.pop(name)
        if tenant.order is not None:
            tenant.order.revoke()
            tenant.order.close()
        if self._freezer is not None and tenant.cgroup in self._freezer.frozen:
            self._freezer.thaw(tenant.cgroup)
        tenant.state.close()
        if tenant.role == "production":
            self._learn_anew()
        for suffix in ("state", "order"):
            (self._folder / f"{name}.{suffix}").unlink(missing_ok=True)

    def _learn_anew(self) -> None:
        """Forget what was learnt of a production tenant: nothing of it holds for the next one."""
        self.state, self.audit = RateState(heard_s=self._clock()), AuditState()
        self._window, self._clean = [], []
        self._dead_slots = 0

    def _lead_to(self, state: Path) -> None:
        """Hard-link production's page to the one name that neighbours look for."""
        common = self._folder / "production"
        common.unlink(missing_ok=True)
        common.hardlink_to(state)

    def renew(self) -> None:
        """Extend the lease of every neighbour that is well."""
        until_s = self._clock() + LEASE_S
        hungry = {
            t.name: t.weight
            for t in self._neighbours()
            if any(s.waiting or s.outstanding for s in t.slots)
        }
        split = shares(self._order, hungry)
        for tenant in self._neighbours():
            if tenant.order is None:
                continue
            order = split.get(tenant.name, self._order)
            tenant.leased = not (tenant.trouble or self.held or order.stopped)
            if tenant.trouble or self.held:
                tenant.order.revoke()
            else:
                tenant.order.write(order, until_s, self._dead_slots)

    def tick(self) -> RateState:
        """Look, decide, write orders; return the state."""
        now_s = self._clock()
        lost = self._read_neighbours(now_s)
        sample = self._sample(now_s, lost)
        before = self.state
        self.state = tick(before, sample, self.limits)
        self._order = order_of(self.state, self.limits)
        if self.state.stage is Stage.IDLE and not sample.alive:
            self._order = GateOrder(outstanding_s=self.limits.outstanding_s)
        self._audit(before, sample)
        self._backstop()
        self.renew()
        self._ticks += 1
        return self.state

    def run(self, stop: threading.Event) -> None:
        """Renew every 20 ms and tick every 100 ms until told to stop."""
        due_s = self._clock()
        while not stop.is_set():
            now_s = self._clock()
            if now_s >= due_s:
                self._overruns += now_s - due_s > TICK_S
                self.tick()
                due_s = max(due_s + TICK_S, now_s)
            else:
                self.renew()
            stop.wait(RENEW_S)
        self.close()

    def leave(self) -> None:
        """Shut the gates and thaw, and leave the pages to the next agent, which adopts them."""
        for tenant in self._tenants.values():
            if tenant.order is not None:
                tenant.order.revoke()
                tenant.order.close()
            tenant.state.close()
        self._tenants.clear()
        if self._freezer is not None:
            self._freezer.close()

    def close(self) -> None:
        """Shut the gates and thaw; production goes on."""
        for name in list(self._tenants):
            self.remove(name)
        if self._freezer is not None:
            self._freezer.close()

    def status(self) -> ShareStatus:
        """Return how the device stands."""
        found = judge_share(self.audit, self.audit_limits)
        return ShareStatus(
            device=self.device,
            stage=self.state.stage.value,
            opening=self.state.opening,
            loss_ratio=self.state.loss_ratio,
            lent_ratio=self._lent_ratio(),
            answer=found.answer.value,
            reason=found.reason,
            mean_ratio=found.mean_ratio,
            lower_ratio=found.lower_ratio,
            upper_ratio=found.upper_ratio,
            ticks=self._ticks,
            overruns=self._overruns,
            tenants=tuple(self._status_of(t) for t in self._tenants.values()),
            e_value=found.e_value,
            windows=found.windows,
            skipped=found.skipped,
            budget_ratio=self.limits.budget_ratio,
            throttled=self.throttled,
            held=self.held,
            control="share" if self.state.stage is Stage.UNMETERED else "gate",
        )

    # --- reading -----------------------------------------------------------------------------

    def _neighbours(self) -> list[_Tenant]:
        return [t for t in self._tenants.values() if t.role == "opportunistic"]

    def _producer(self) -> _Tenant | None:
        return next((t for t in self._tenants.values() if t.role == "production"), None)

    def _read_neighbours(self, now_s: float) -> bool:
        """Fetch when neighbours were busy; return whether some of it was lost."""
        lost = False
        for tenant in self._neighbours():
            slots = tenant.state.slots()
            if slots is None:
                tenant.trouble, lost = "its page makes no sense", True
                continue
            tenant.slots = slots
            tenant.living.look()
            tenant.trouble = tenant.trouble or _clock_trouble(tenant, now_s)
            lost = self._busy_of(tenant, now_s) or lost
        sound = [t for t in self._neighbours() if not t.trouble]
        total_s = sum(s.device_s for t in sound for s in t.slots)
        self._lent = [(t, d) for t, d in self._lent if t > now_s - 10.0] + [(now_s, total_s)]
        return lost

    def _busy_of(self, tenant: _Tenant, now_s: float) -> bool:
        """Fetch when a neighbour was busy; return whether some of it was lost."""
        lost = False
        if tenant.state.grown():
            tenant.made_up = tenant.made_up or "its page was made longer"
        for slot in tenant.slots:
            bursts, missed = self._fetch(tenant, slot)
            lost = lost or missed
            untold_s = 0.0 if _told(slot) else UNTOLD_S
            tenant.busy += [(b.started_s, b.ended_s + untold_s) for b in bursts]
            if slot.outstanding and tenant.living.has(slot.pid):
                tenant.busy.append((min(slot.busy_since_s, now_s), now_s))
        tenant.busy = merged(
            [span for span in tenant.busy if span[1] > now_s - REMEMBERED_S], SPANS_MOST
        )
        tenant.trouble = tenant.trouble or tenant.made_up
        return lost

    def _fetch(self, tenant: _Tenant, slot: Slot) -> tuple[tuple[Burst, ...], bool]:
        """Return a slot's new busy periods that make sense, and whether there are others.

        Of a page that was found out once nothing more is believed, nor time spent on it.
        """
        if tenant.made_up:
            return (), True
        bursts, missed = tenant.state.bursts(slot)
        now_s = self._clock()
        spare = tenant.spare + (now_s - tenant.spared_s) * BURSTS_HZ
        tenant.spare, tenant.spared_s = min(spare, BURSTS_SPARE) - len(bursts), now_s
        first_s, last_s = slot.attached_ns * 1e-9 - CLOCK_S, now_s + CLOCK_S
        sound = tuple(b for b in bursts if first_s <= b.idle_since_s and b.ended_s <= last_s)
        if len(sound) < len(bursts):
            tenant.made_up = f"process {slot.pid} tells of work at another time than it lives"
        elif tenant.spare < 0.0:
            tenant.made_up = "its page tells of more busy periods than a device can have"
        return sound, missed > 0 or len(sound) < len(bursts)

    def _sample(self, now_s: float, lost: bool) -> RateSample:
        producer = self._producer()
        slots = producer.state.slots() if producer is not None else ()
        if producer is None or slots is None:
            alive = False
            if producer is not None:
                producer.living.look()
                alive = any(producer.living.has(s.pid) for s in producer.slots)
            return RateSample(now_s=now_s, alive=alive, comparable=not self.throttled)
        producer.slots = slots
        producer.state.mend()
        producer.living.look()
        producer.trouble = _clock_trouble(producer, now_s)
        living = [s for s in slots if producer.living.has(s.pid)]
        self._dead_slots = sum(1 << s.index for s in slots if s not in living)
        bursts = []
        spans = sorted((s for t in self._neighbours() for s in t.busy), key=itemgetter(1))
        ends = [end for _, end in spans]
        for slot in living:
            fetched, missed = self._fetch(producer, slot)
            bursts += [_marked(b, lost or missed, spans, ends) for b in fetched]
        producer.trouble = producer.trouble or producer.made_up
        return RateSample(
            now_s=now_s,
            bursts=tuple(sorted(bursts, key=lambda b: b.ended_s)),
            bursts_done=sum(s.bursts for s in slots),
            outstanding=any(s.outstanding for s in living),
            alive=bool(living),
            heard_s=now_s,
            comparable=not self.throttled,
            metered=all(_told(s) for s in living) and not producer.trouble,
        )

    # --- acting ------------------------------------------------------------------------------

    def _backstop(self) -> None:
        if self._freezer is None:
            return
        for tenant in self._neighbours():
            if not tenant.cgroup:
                continue
            with contextlib.suppress(AlloyError, OSError):  # OSError: no room for the note
                if self.state.freeze or tenant.trouble:
                    self._freezer.freeze(tenant.cgroup)
                elif tenant.cgroup in self._freezer.frozen:
                    self._freezer.thaw(tenant.cgroup)

    def _audit(self, before: RateState, sample: RateSample) -> None:
        """Judge one-second windows against the baseline of before."""
        from alloy_agent.conformance.baseline import expected_busy_s

        self._window += [(b, expected_busy_s(before.baseline, b)) for b in sample.bursts]
        if sample.now_s - self._window_s < WINDOW_S:
            return
        judged = [(b, e) for b, e in self._window if e is not None and e > 0.0]
        self._window, self._window_s = [], sample.now_s
        # a hold leaves two or three clean bursts: they add up over windows
        self._clean += [b.busy_s / e - 1.0 for b, e in judged if not b.contended]
        if len(self._clean) >= 3:
            self.audit = calibrate(self.audit, (sum(self._clean) / len(self._clean),))
            self._clean = []
        slowdown = None
        if judged:
            slowdown = sum(b.busy_s for b, _ in judged) / sum(e for _, e in judged) - 1.0
        demand = any(s.waiting or s.outstanding for t in self._neighbours() for s in t.slots)
        window = Window(
            slowdown_ratio=slowdown if sample.metered else None,
            bursts=len(judged),
            demand=demand,
            comparable=sample.comparable,
            why=self._why_unjudged(sample),
        )
        self.audit = watch(self.audit, window, self.audit_limits)

    def _why_unjudged(self, sample: RateSample) -> str:
        if not sample.metered:
            producer = self._producer()
            untold = "production's library does not tell when its launches are done"
            return (producer.trouble if producer is not None else "") or untold
        return f"not comparable: {self.throttled}" if self.throttled else ""

    def _lent_ratio(self) -> float:
        if len(self._lent) < 2 or self._lent[-1][0] <= self._lent[0][0]:
            return 0.0
        took_s = self._lent[-1][0] - self._lent[0][0]
        # what tenants say of themselves: no more than there is
        return max(0.0, min(1.0, (self._lent[-1][1] - self._lent[0][1]) / took_s))

    def _status_of(self, tenant: _Tenant) -> TenantStatus:
        living = [s for s in tenant.slots if tenant.living.has(s.pid)]
        return TenantStatus(
            name=tenant.name,
            role=tenant.role,
            weight=tenant.weight,
            processes=len(living),
            launched=sum(s.launched for s in tenant.slots),
            device_s=sum(s.device_s for s in tenant.slots),
            waiting=sum(s.waiting for s in living),
            waited_s=sum(s.waited_s for s in tenant.slots),
            frozen=self._freezer is not None and tenant.cgroup in self._freezer.frozen,
            metered=bool(living) and not tenant.trouble,
            trouble=tenant.trouble,
            leased=tenant.leased,
            completions=_least(living),
        )


def _clock_trouble(tenant: _Tenant, now_s: float) -> str:
    """Return why a page's times cannot be compared with ours, or nothing."""
    for slot in tenant.slots:
        if not slot.attached_ns and not slot.launched:
            continue  # it is taking its place just now
        if not tenant.added_s - CLOCK_S <= slot.attached_ns * 1e-9 <= now_s + CLOCK_S:
            return f"process {slot.pid} has a boot clock of its own (a time namespace?)"
    return ""


def merged(spans: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return spans sorted, joined where they touch, and across gaps while there are too many."""
    gap_s = 0.0
    while True:
        found: list[tuple[float, float]] = []
        for begin_s, end_s in sorted(spans):
            if found and begin_s <= found[-1][1] + gap_s:
                found[-1] = (found[-1][0], max(found[-1][1], end_s))
            else:
                found.append((begin_s, end_s))
        if len(found) <= most:
            return found
        gap_s, spans = max(2.0 * gap_s, 1e-5), found


def _told(slot: Slot) -> bool:
    """Whether a process learns when its launches are done."""
    return slot.completions is not Completions.NONE


def _least(slots: Sequence[Slot]) -> str:
    """Return the weakest way by which these processes learn of completions."""
    used = [s.completions for s in slots if s.completions is not Completions.UNSEEN]
    return min(used).name.lower() if used else ""


def _marked(burst: Burst, lost: bool, spans: list[tuple[float, float]], ends: list[float]) -> Burst:
    """Return a burst with how neighbours' busy spans, sorted by their ends, lie over it."""
    late = spans[bisect_right(ends, burst.idle_since_s) :]
    touching = [(begin, end) for begin, end in late if begin < burst.ended_s]
    within_s = sum(
        max(0.0, min(end, burst.ended_s) - max(begin, burst.started_s)) for begin, end in touching
    )
    return msgspec.structs.replace(
        burst, contended=lost or bool(touching), overlap_s=None if lost else within_s
    )
