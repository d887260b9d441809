"""Gates: may work be placed on a device or a partition now? Open, closed or unknown, and why. Pure.

Health, freshness, thermal, topology and headroom are judged apart; the gate of a subject is the
worst of its gates. A gate whose signal a source does not have is not set up for that subject at
all: it is neither open nor a reason against a whole vendor.

Rules that stay true in here:

* Closing is immediate. Re-opening needs a margin, and the margin to hold for a dwell.
* Missing or old values never close and never open: the gate is unknown. Unknown stops new
  placements and nothing else; only health drains.
* An unknown in between does not shorten the dwell of a gate that was closed, nor does a time in
  which nobody looked: a dwell that a suspend fell into begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from alloy_agent.model import Condition, Device, DeviceFault, Value

DWELL_S: Final = 10.0
AT_ONCE: Final = frozenset({"drain"})  # a person's word needs no dwell


class GateState(StrEnum):
    """Whether work may be placed."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


class GateLimits(Value, frozen=True, kw_only=True):
    """When gates close and open again.

    Thermal limits are degrees below the device's own slow-down threshold, headroom is the ratio
    that P95 leaves of the scarcest resource.
    """

    thermal_close_c: float = 3.0
    thermal_open_c: float = 8.0
    headroom_close_ratio: float = 0.05
    headroom_open_ratio: float = 0.10
    dwell_s: float = DWELL_S


class Opinion(Value, frozen=True, kw_only=True):
    """What one gate sees now, before hysteresis. `near`: not enough margin to open again."""

    state: GateState
    reason: str = ""
    age_s: float = 0.0  # of the oldest value that decided
    near: bool = False


class Gate(Value, frozen=True, kw_only=True):
    """One gate of one subject. `latched` while it was closed and has not earned to open again."""

    gate: str
    state: GateState
    reason: str
    since_s: float
    age_s: float = 0.0
    latched: bool = False
    good_since_s: float | None = None
    judged_s: float = 0.0  # while it waits to open again


OPEN: Final = Opinion(state=GateState.OPEN)


def step(gate: str, before: Gate | None, now: Opinion, now_s: float, dwell_s: float) -> Gate:
    """Return a gate after an opinion."""
    latched = before is not None and before.latched
    if now.state is GateState.CLOSED:
        return _moved(gate, before, GateState.CLOSED, now, now_s, latched=True)
    if not latched:
        return _moved(gate, before, now.state, now, now_s, latched=False)
    good = now.state is GateState.OPEN and not now.near
    good_since_s = None
    if good and before is not None:
        watched = now_s - before.judged_s <= dwell_s
        good_since_s = before.good_since_s if watched else None
        good_since_s = now_s if good_since_s is None else good_since_s
        if now_s - good_since_s >= dwell_s:
            return _moved(gate, before, GateState.OPEN, now, now_s, latched=False)
    if now.state is GateState.UNKNOWN:
        return _moved(gate, before, GateState.UNKNOWN, now, now_s, latched=True)
    reason = "back within limits, waiting for it to last" if good else "too close to its limit"
    waiting = msgspec.structs.replace(now, reason=reason)
    held = _moved(gate, before, GateState.CLOSED, waiting, now_s, latched=True)
    return msgspec.structs.replace(held, good_since_s=good_since_s, judged_s=now_s)


def _moved(  # noqa: PLR0913, PLR0917 - the fields of a gate
    gate: str, before: Gate | None, state: GateState, now: Opinion, now_s: float, latched: bool
) -> Gate:
    same = before is not None and before.state is state
    return Gate(
        gate=gate,
        state=state,
        reason=now.reason,
        since_s=before.since_s if same and before is not None else now_s,
        age_s=now.age_s,
        latched=latched,
    )


# --- opinions -------------------------------------------------------------------------------------


def health(closed_by: str, unknown: str = "") -> Opinion:
    """Return what health says: `closed_by` names the fault that forbids placement."""
    if closed_by:
        return Opinion(state=GateState.CLOSED, reason=closed_by)
    return Opinion(state=GateState.UNKNOWN, reason=unknown) if unknown else OPEN


def freshness(ages: Mapping[str, tuple[float | None, float]]) -> Opinion:
    """Return what the ages of required signals say.

    Args:
        ages: By signal: its age (None: no value at all) and the age from which it is stale.
    """
    oldest_s = max((age for age, _ in ages.values() if age is not None), default=0.0)
    for name, (age, limit) in sorted(ages.items()):
        if age is None:
            return Opinion(state=GateState.UNKNOWN, reason=f"{name}: no value", age_s=oldest_s)
        if age > limit:
            reason = f"{name}: {age:.1f} s old, over {limit:.1f} s"
            return Opinion(state=GateState.UNKNOWN, reason=reason, age_s=oldest_s)
    return Opinion(state=GateState.OPEN, age_s=oldest_s)


def thermal(margin_c: float | None, age_s: float, limits: GateLimits) -> Opinion:
    """Return what the temperature margin says; None: it is not fresh."""
    if margin_c is None:
        return Opinion(state=GateState.UNKNOWN, reason="no fresh temperature", age_s=age_s)
    if margin_c < limits.thermal_close_c:
        reason = f"{margin_c:.1f} degrees to the limit, under {limits.thermal_close_c:g}"
        return Opinion(state=GateState.CLOSED, reason=reason, age_s=age_s)
    near = margin_c < limits.thermal_open_c
    return Opinion(state=GateState.OPEN, age_s=age_s, near=near)


def headroom(ratio: float | None, resource: str, age_s: float, limits: GateLimits) -> Opinion:
    """Return what P95 headroom of the scarcest resource says; None: not covered well enough."""
    if ratio is None:
        reason = f"P95 of {resource or 'the load'} is not known yet"
        return Opinion(state=GateState.UNKNOWN, reason=reason, age_s=age_s)
    if ratio < limits.headroom_close_ratio:
        reason = f"{resource}: {ratio:.1%} left at P95, under {limits.headroom_close_ratio:.0%}"
        return Opinion(state=GateState.CLOSED, reason=reason, age_s=age_s)
    near = ratio < limits.headroom_open_ratio
    return Opinion(state=GateState.OPEN, age_s=age_s, near=near)


def topology(device: Device | None, faults: Sequence[DeviceFault], age_s: float) -> Opinion:
    """Return whether the shape that was observed can be relied on."""
    if device is None:
        return Opinion(state=GateState.UNKNOWN, reason="its device was not observed", age_s=age_s)
    if device.condition in (Condition.STALLED, Condition.NOT_PERMITTED):
        reason = f"the shape is as last seen: {device.condition_reason or device.condition}"
        return Opinion(state=GateState.UNKNOWN, reason=reason, age_s=age_s)
    for mode in device.modes:
        if mode.pending:
            reason = f"{mode.kind} is {mode.current} and becomes {mode.pending}"
            return Opinion(state=GateState.CLOSED, reason=reason, age_s=age_s)
    for fault in faults:
        if fault.kind in SHAPE_FAULTS:
            return Opinion(state=GateState.CLOSED, reason=fault.reason, age_s=age_s)
    return Opinion(state=GateState.OPEN, age_s=age_s)


SHAPE_FAULTS: Final = frozenset({"partition_count_mismatch", "half_made"})


# --- together -------------------------------------------------------------------------------------

_BAD_FIRST: Final = {GateState.CLOSED: 0, GateState.UNKNOWN: 1, GateState.OPEN: 2}


def worst(gates: Sequence[Gate]) -> Gate | None:
    """Return the gate that decides: a closed one, else an unknown one, else the first."""
    return min(gates, key=lambda gate: _BAD_FIRST[gate.state], default=None)


def judge(
    before: Mapping[str, Gate],
    opinions: Mapping[str, Opinion],
    now_s: float,
    dwell_s: float = DWELL_S,
) -> dict[str, Gate]:
    """Return all gates of one subject after one round of opinions."""
    return {
        name: step(name, before.get(name), opinion, now_s, 0.0 if name in AT_ONCE else dwell_s)
        for name, opinion in opinions.items()
    }
