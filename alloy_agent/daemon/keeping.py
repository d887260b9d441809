"""Whether the daemon may bring the node back to its layout by itself. Pure.

The operator agreed to a layout once; keeping it is no new agreement to hurt anyone. So the keeper
makes again what has vanished, and stops short of what a person should look at.

Rules that stay true in here:

* A partition that the agent did not make is never destroyed.
* A partition with a tenant is never interrupted; nor is a hive or the node.
* A mode that waits for a reset or a reload is not asked for again.
* After a failure the waits grow, up to a bound; a layout or a geometry that changed starts afresh.
"""

from __future__ import annotations

from alloy_agent.model import (
    Destroy,
    Layout,
    Plan,
    Scope,
    SetMode,
    Snapshot,
    Step,
    Value,
)

WAIT_FIRST_S = 1.0
WAIT_LONGEST_S = 300.0


class Keeping(Value, frozen=True, kw_only=True):
    """What the keeper remembers between ticks; `reason` says why it does nothing, "" if well."""

    reason: str = ""
    failures: int = 0
    not_before_s: float = 0.0
    seen: str = ""  # digest of layout and geometry that the failures belong to


def hindrance(plan: Plan, snapshot: Snapshot) -> str:
    """Return why these steps must not be done without a person, or "" when they may."""
    for planned in plan.steps:
        reason = _forbidden(planned.step, snapshot)
        if reason:
            return reason
        for interrupt in planned.interrupts:
            if interrupt.scope in (Scope.HIVE, Scope.NODE):
                return f"step {planned.number} interrupts {interrupt.scope} {interrupt.subject}"
    return ""


def _forbidden(step: Step, snapshot: Snapshot) -> str:
    if isinstance(step, Destroy):
        return _cannot_destroy(step, snapshot)
    if isinstance(step, SetMode):
        return _cannot_switch(step, snapshot)
    return ""


def _cannot_destroy(step: Destroy, snapshot: Snapshot) -> str:
    found = next((p for p in snapshot.partitions if p.id == step.partition.id), step.partition)
    if not found.managed:
        return f"{found.id} was made by somebody else and is in the way"
    if found.tenant is not None:
        return f"{found.id} is in the way and tenant {found.tenant} is in it"
    return ""


def _cannot_switch(step: SetMode, snapshot: Snapshot) -> str:
    for device in snapshot.devices:
        if device.id != step.device:
            continue
        for mode in device.modes:
            if mode.kind is step.kind and mode.pending == step.wanted:
                return f"{step.kind} of {device.id} waits for a {mode.change}".replace("_", " ")
    for partition in snapshot.partitions:
        if partition.device == step.device and partition.tenant is not None:
            return f"{step.kind} of {step.device} is wrong and tenant {partition.tenant} is on it"
    return ""


def geometry(snapshot: Snapshot) -> tuple[str, ...]:
    """Return what a layout is about: which pieces, modes and devices there are."""
    pieces = sorted(
        f"{p.id}#{p.incarnation}:{p.memory_bytes}:{p.altered}" for p in snapshot.partitions
    )
    modes = sorted(f"{d.id}:{m.kind}={m.current}" for d in snapshot.devices for m in d.modes)
    devices = sorted(f"{d.id}:{d.condition}" for d in snapshot.devices)
    return (*devices, *modes, *pieces)


def situation(layout: Layout, snapshot: Snapshot) -> str:
    """Return a text that differs whenever layout or geometry do."""
    return "|".join((layout.digest or layout.name, *geometry(snapshot)))


def after_failure(keeping: Keeping, reason: str, seen: str, now_s: float) -> Keeping:
    """Return what to remember after an attempt failed: wait twice as long as before."""
    failures = keeping.failures + 1 if keeping.seen == seen else 1
    wait_s = min(WAIT_LONGEST_S, WAIT_FIRST_S * 2.0 ** min(failures - 1, 16))
    return Keeping(reason=reason, failures=failures, not_before_s=now_s + wait_s, seen=seen)


def waits(keeping: Keeping, seen: str, now_s: float) -> bool:
    """Whether an earlier failure in the same situation still asks for patience."""
    return keeping.failures > 0 and keeping.seen == seen and now_s < keeping.not_before_s
