"""Conditions of the node: whether an accelerator on it is unhealthy, or drained. Pure.

Others (node-problem-detector, NVSentinel) write conditions of other types; each type has one
writer. Like theirs, ours is True when something is wrong, has a reason in one word, is renewed
every five minutes, and has a way back. What stood there before a start is kept until the node was
seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from alloy_agent.model import Value

HEARTBEAT_S: Final = 300.0
MESSAGE_BYTES: Final = 1024


class Kind(NamedTuple):
    """One type of condition, and its words where something is wrong and where nothing is."""

    type: str
    bad: str
    good: str
    well: str


UNHEALTHY: Final = Kind(
    "AlloyAcceleratorUnhealthy",
    "DeviceUnhealthy",
    "DevicesHealthy",
    "all accelerators are healthy",
)
DRAINED: Final = Kind(
    "AlloyAcceleratorDrained", "Drained", "NothingDrained", "no accelerator is drained"
)


class Told(Value, frozen=True, kw_only=True):
    """What the API server was told last, and when."""

    message: str
    at_s: float
    since: str


def condition_of(
    sick: Mapping[str, str], told: Told | None, now_s: float, now: str, kind: Kind = UNHEALTHY
) -> tuple[dict[str, Any], Told] | None:
    """Return the condition to write and what is then told, or None where nothing is due.

    Args:
        sick: The reason by device; empty when all are well (or nothing is drained).
        told: What was told last.
        now_s: On a clock that only grows.
        now: The time as Kubernetes writes it.
        kind: Which condition.
    """
    message = "; ".join(f"{device}: {why}" for device, why in sorted(sick.items()))
    message = message.encode()[:MESSAGE_BYTES].decode("utf-8", "ignore")
    if told is not None and told.message == message and now_s - told.at_s < HEARTBEAT_S:
        return None
    turned = told is None or bool(told.message) != bool(message)
    since = now if turned or told is None else told.since
    condition = {
        "type": kind.type,
        "status": "True" if message else "False",
        "reason": kind.bad if message else kind.good,
        "message": message or kind.well,
        "lastHeartbeatTime": now,
        "lastTransitionTime": since,
    }
    return condition, Told(message=message, at_s=now_s, since=since)
