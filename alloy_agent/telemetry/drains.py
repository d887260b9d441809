"""What takes no new work by somebody's word: drains, each with its scope and session. Pure.

A drain stops new placements and leaves running work alone. Its subject is a partition, a device, a
hive or the node (empty), and it always says what else it takes down. Who takes it back must name
the session that holds; a stale one changes nothing.
"""

from __future__ import annotations

from alloy_agent.errors import ConfigError, StaleTokenError
from alloy_agent.model import Scope, Snapshot, Value


class Drained(Value, frozen=True, kw_only=True):
    """One drain. `takes` are the partitions it reaches, each with its tenant where it has one."""

    subject: str
    scope: Scope
    session: str
    reason: str
    since_s: float
    since_wall_s: float
    takes: tuple[str, ...] = ()


Drains = tuple[Drained, ...]


def scope_of(subject: str, snapshot: Snapshot) -> Scope:
    """Return what a subject is.

    Raises:
        ConfigError: There is nothing of that name.
    """
    if not subject:
        return Scope.NODE
    if any(device.id == subject for device in snapshot.devices):
        return Scope.DEVICE
    if any(partition.id == subject for partition in snapshot.partitions):
        return Scope.PARTITION
    if any(device.hive == subject for device in snapshot.devices):
        return Scope.HIVE
    raise ConfigError(
        f"drain {subject}: no device, partition or hive of that name",
        cure="see 'alloy-agent devices'; an empty subject is the node",
    )


def reached(subject: str, scope: Scope, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the ids of the partitions that a drain of a subject reaches."""
    devices = {
        device.id
        for device in snapshot.devices
        if scope is Scope.NODE
        or (scope is Scope.DEVICE and device.id == subject)
        or (scope is Scope.HIVE and device.hive == subject)
    }
    return tuple(
        str(partition.id)
        for partition in snapshot.partitions
        if partition.device in devices or (scope is Scope.PARTITION and partition.id == subject)
    )


def drained(  # noqa: PLR0913, PLR0917 - the fields of a drain
    drains: Drains, subject: str, session: str, reason: str, snapshot: Snapshot, now_s: float
) -> tuple[Drains, Drained]:
    """Return the drains with one more, and that one; the same again changes nothing.

    Raises:
        ConfigError: There is nothing of that name.
        StaleTokenError: It is drained already, by another session.
    """
    held = next((d for d in drains if d.subject == subject), None)
    if held is not None:
        if session and held.session != session:
            raise StaleTokenError(
                f"drain {subject or 'node'}: session {held.session} has drained it, not {session}",
                cure="undrain that session first",
            )
        return drains, held
    scope = scope_of(subject, snapshot)
    tenants = {str(p.id): p.tenant for p in snapshot.partitions}
    takes = tuple(
        f"{partition} (tenant {tenants[partition]})" if tenants[partition] else partition
        for partition in reached(subject, scope, snapshot)
    )
    new = Drained(
        subject=subject,
        scope=scope,
        session=session or f"{snapshot.boot_id[:8]}-{int(now_s * 1e3):x}",
        reason=reason or "drained",
        since_s=now_s,
        since_wall_s=snapshot.taken_wall_s + (now_s - snapshot.taken_at_s),
        takes=takes,
    )
    return (*drains, new), new


def undrained(drains: Drains, subject: str, session: str) -> tuple[Drains, Drained | None]:
    """Return the drains without one, and that one; None: it was not drained.

    Raises:
        StaleTokenError: Another session has drained it.
    """
    held = next((d for d in drains if d.subject == subject), None)
    if held is None:
        return drains, None
    if session and session != held.session:
        raise StaleTokenError(
            f"undrain {subject or 'node'}: session {session} is not the one that drained it",
            cure=f"name session {held.session}",
        )
    return tuple(d for d in drains if d is not held), held


def why(drains: Drains, subject: str, snapshot: Snapshot) -> str:
    """Return why a partition or device takes nothing new; "" when it may."""
    for drain in drains:
        if drain.subject == subject or drain.scope is Scope.NODE:
            return f"drained ({drain.session}): {drain.reason}"
        if drain.scope in (Scope.DEVICE, Scope.HIVE) and (
            subject in reached(drain.subject, drain.scope, snapshot)
            or any(d.id == subject and d.hive == drain.subject for d in snapshot.devices)
        ):
            return f"drained with its {drain.scope} ({drain.session}): {drain.reason}"
    return ""
