"""What takes no new work by somebody's word: drains, each with its scope and session. Pure.

A drain stops new placements and leaves running work alone. Its subject is a partition, a device, a
hive or the node (empty), and it always says what else it takes down. Who takes it back must name
the session that holds; a stale one changes nothing. A drain may end by itself: that time runs on
the boot clock, and over a boot on the wall clock, which is all there is then.
"""

from __future__ import annotations

from typing import Final

import msgspec

from alloy_agent.errors import ConfigError, StaleTokenError
from alloy_agent.model import Scope, Snapshot, Value
from alloy_agent.planner.names import find_subject

META: Final = "health"  # where the store keeps them, beside the health of devices


class Drained(Value, frozen=True, kw_only=True):
    """One drain. `takes` are the partitions it reaches, each with its tenant where it has one.

    `until_s` is when it ends by itself; 0: when it is taken back.
    """

    subject: str
    scope: Scope
    session: str
    reason: str
    since_s: float
    since_wall_s: float
    takes: tuple[str, ...] = ()
    until_s: float = 0.0
    until_wall_s: float = 0.0

    @property
    def key(self) -> tuple[str, str, float]:
        """What tells this drain from an earlier one of the same subject and session."""
        return self.subject, self.session, self.since_wall_s


Drains = tuple[Drained, ...]


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
    drains: Drains,
    subject: str,
    session: str,
    reason: str,
    snapshot: Snapshot,
    now_s: float,
    ttl_s: float = 0.0,
) -> tuple[Drains, Drained]:
    """Return the drains with one more, and that one; the same again moves its end alone.

    Args:
        drains: What holds already.
        subject: A partition, a device, a hive, as much of its name as is unique, or empty for the
            node.
        session: Whose drain it is; empty: a new one is made up.
        reason: For people.
        snapshot: Where the subject is looked for.
        now_s: The boot clock.
        ttl_s: How long it holds; 0: until it is taken back.

    Raises:
        ConfigError: There is nothing of that name.
        StaleTokenError: It is drained already, by another session.
    """
    scope, subject = _meant("drain", drains, subject, snapshot)
    held = next((d for d in drains if d.subject == subject), None)
    if held is not None:
        if session and held.session != session:
            raise StaleTokenError(
                f"drain {subject or 'node'}: session {held.session} has drained it, not {session}",
                cure="undrain that session first",
            )
        ends = _ends(snapshot, now_s, ttl_s)
        if not ttl_s and not held.until_s:
            return drains, held
        moved = msgspec.structs.replace(held, until_s=ends[0], until_wall_s=ends[1])
        return tuple(moved if d is held else d for d in drains), moved
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
        since_wall_s=_wall(snapshot, now_s),
        takes=takes,
    )
    until_s, until_wall_s = _ends(snapshot, now_s, ttl_s)
    new = msgspec.structs.replace(new, until_s=until_s, until_wall_s=until_wall_s)
    return (*drains, new), new


def _wall(snapshot: Snapshot, now_s: float) -> float:
    return snapshot.taken_wall_s + (now_s - snapshot.taken_at_s)


def _ends(snapshot: Snapshot, now_s: float, ttl_s: float) -> tuple[float, float]:
    """Return when a drain that holds for so long ends, on both clocks."""
    return (now_s + ttl_s, _wall(snapshot, now_s) + ttl_s) if ttl_s > 0 else (0.0, 0.0)


def lapsed(drains: Drains, now_s: float) -> tuple[Drains, Drains]:
    """Return the drains that hold still, and those that have ended by themselves."""
    ended = tuple(d for d in drains if 0 < d.until_s <= now_s)
    return (tuple(d for d in drains if d not in ended), ended) if ended else (drains, ())


def over_boot(drains: Drains, now_s: float, wall_s: float) -> Drains:
    """Return drains kept by an earlier boot, with their ends on the clock of this one."""
    return tuple(
        msgspec.structs.replace(d, until_s=now_s + max(0.0, d.until_wall_s - wall_s))
        if d.until_s
        else d
        for d in drains
    )


def meant(verb: str, drains: Drains, subject: str, snapshot: Snapshot) -> str:
    """Return the whole name of what a person means to drain or undrain.

    What is drained is known by its whole name also when the node has it no more.

    Raises:
        ConfigError: There is nothing of that name, or several begin with it.
    """
    return _meant(verb, drains, subject, snapshot)[1]


def _meant(verb: str, drains: Drains, subject: str, snapshot: Snapshot) -> tuple[Scope, str]:
    held = next((d for d in drains if d.subject == subject), None)
    if held is not None:
        return held.scope, held.subject
    try:
        return find_subject(subject, snapshot.devices, snapshot.partitions)
    except ConfigError as exc:
        raise ConfigError(f"{verb} {exc.message}", cure=exc.cure) from exc


def undrained(drains: Drains, subject: str, session: str) -> tuple[Drains, Drained | None]:
    """Return the drains without one (named in full), and that one; None: it was not drained.

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


def over(drains: Drains, subject: str, snapshot: Snapshot) -> Drained | None:
    """Return the drain by which a partition or device takes nothing new; None: it may.

    An empty subject asks for the node as a whole.
    """
    for drain in drains:
        if drain.subject == subject or drain.scope is Scope.NODE:
            return drain
        if drain.scope in (Scope.DEVICE, Scope.HIVE) and (
            subject in reached(drain.subject, drain.scope, snapshot)
            or any(d.id == subject and d.hive == drain.subject for d in snapshot.devices)
        ):
            return drain
    return None


def why(drains: Drains, subject: str, snapshot: Snapshot) -> str:
    """Return why a partition or device takes nothing new; "" when it may."""
    drain = over(drains, subject, snapshot)
    if drain is None:
        return ""
    own = drain.subject == subject or drain.scope is Scope.NODE
    where = "" if own else f" with its {drain.scope}"
    return f"drained{where} ({drain.session}): {drain.reason}"


def reached_by(drain: Drained, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the devices and partitions of now that a drain reaches."""
    if drain.scope is Scope.PARTITION:
        return (drain.subject,)
    devices = tuple(
        str(d.id)
        for d in snapshot.devices
        if drain.scope is Scope.NODE or drain.subject in (d.id, d.hive)
    )
    return (*devices, *reached(drain.subject, drain.scope, snapshot))


class _Saved(msgspec.Struct):
    boot_id: str


class _Health(msgspec.Struct):
    saved: _Saved


class _Kept(msgspec.Struct):
    """Of what is kept under `META`, as much as drains need."""

    health: _Health
    drains: Drains = ()


def kept(text: str | None, boot_id: str, now_s: float, wall_s: float) -> Drains:
    """Return the drains that hold by what the store keeps; none where that cannot be read.

    A daemon begins anew then too, and says so.
    """
    if not text:
        return ()
    try:
        found = msgspec.json.decode(text, type=_Kept)
    except msgspec.MsgspecError:
        return ()
    same_boot = found.health.saved.boot_id == boot_id
    held = found.drains if same_boot else over_boot(found.drains, now_s, wall_s)
    return lapsed(held, now_s)[0]
