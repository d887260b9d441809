"""The tenants of a device on disk, so that the next keeper takes up what a dead one had.

The file lies on `/run`, as the pages do: it ends with the boot, and so do the tenants.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from alloy_agent.conformance.gate.pages import no_room
from alloy_agent.conformance.keeper.messages import Join
from alloy_agent.host.processes import start_ticks
from alloy_agent.model import Value

FILE = "members.json"


class Member(Value, frozen=True, kw_only=True):
    """One tenant; the start time tells its process from a later one of that number."""

    join: Join
    start_ticks: int | None


def member_of(join: Join) -> Member:
    """Return the tenant that a living process asks to be."""
    return Member(join=join, start_ticks=start_ticks(join.pid))


def lives(member: Member) -> bool:
    """Whether the process that joined is still there."""
    return member.start_ticks is not None and start_ticks(member.join.pid) == member.start_ticks


def save(folder: Path, members: tuple[Member, ...]) -> None:
    """Put the tenants on disk, whole.

    Raises:
        BackendError: There is no room for them; what was there before stays.
    """
    path = folder / FILE
    fresh = path.with_suffix(".fresh")
    try:
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(members))
        fresh.replace(path)
    except OSError as exc:
        fresh.unlink(missing_ok=True)
        raise no_room(path, exc) from exc


def load(folder: Path) -> tuple[Member, ...]:
    """Return the tenants on disk; a file that cannot be read has none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / FILE).read_bytes(), type=tuple[Member, ...])
    return ()
