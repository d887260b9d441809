"""One condition of the node: whether an accelerator on it is unhealthy. Pure.

Others (node-problem-detector, NVSentinel) write conditions of other types; each type has one
writer. Like theirs, ours is True when something is wrong, has a reason in one word, is renewed
every five minutes, and has a way back. What stood there before a start is kept until the node was
seen.
"""

from __future__ import annotations

from typing import Any, Final

from alloy_agent.model import Value

TYPE: Final = "AlloyAcceleratorUnhealthy"
HEARTBEAT_S: Final = 300.0
MESSAGE_BYTES: Final = 1024


class Told(Value, frozen=True, kw_only=True):
    """What the API server was told last, and when."""

    message: str
    at_s: float
    since: str


def condition_of(
    sick: dict[str, str], told: Told | None, now_s: float, now: str
) -> tuple[dict[str, Any], Told] | None:
    """Return the condition to write and what is then told, or None where nothing is due.

    Args:
        sick: The reason by device; empty when all are well.
        told: What was told last.
        now_s: On a clock that only grows.
        now: The time as Kubernetes writes it.
    """
    message = "; ".join(f"{device}: {why}" for device, why in sorted(sick.items()))
    message = message.encode()[:MESSAGE_BYTES].decode("utf-8", "ignore")
    if told is not None and told.message == message and now_s - told.at_s < HEARTBEAT_S:
        return None
    turned = told is None or bool(told.message) != bool(message)
    since = now if turned or told is None else told.since
    condition = {
        "type": TYPE,
        "status": "True" if message else "False",
        "reason": "DeviceUnhealthy" if message else "DevicesHealthy",
        "message": message or "all accelerators are healthy",
        "lastHeartbeatTime": now,
        "lastTransitionTime": since,
    }
    return condition, Told(message=message, at_s=now_s, since=since)
