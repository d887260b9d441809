"""What the telemetry tells, and whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from alloy_agent.model import Scope, Value
from alloy_agent.telemetry import drains, health

if TYPE_CHECKING:
    from alloy_agent.telemetry.metering import UsageRow


class HealthChange(Value, frozen=True, kw_only=True):
    """A device that is otherwise than before, or a fault that was counted on it."""

    device: str
    before: health.Level
    after: health.Level
    cause: str
    code: str
    count: int
    scope: Scope
    action: str
    session: str
    time_s: float
    wall_s: float
    shadow: bool = False


class Hooks(NamedTuple):
    """Whom the telemetry tells."""

    health: Callable[[HealthChange], object]
    gates: Callable[[], object]
    usage: Callable[[UsageRow], object]
    drains: Callable[[drains.Drained, bool], object]  # and whether it begins
