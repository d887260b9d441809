"""What is left of each resource at P95, and the scarcest of them. Pure.

A resource of a partition and one of its device are kept apart: power and temperature are the
device's and are never told as a partition's. What is left for a partition is bounded by both: its
least is over its own resources and over those of its device that no partition has of its own. What
no source measures is absent, and is named.

Headroom is a ratio: 1 minus the P95 of use. Temperature counts as fully left from
`MARGIN_FULL_C` degrees below the device's slow-down threshold, and as gone at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from alloy_agent.model import Value

MARGIN_FULL_C: Final = 20.0
MARGIN_RANGE_C: Final = 128.0


class Resource(NamedTuple):
    """A resource by the signal that tells its use; `limit` is the signal or property to divide by.

    `high` is the window's range: 1 for ratios.
    """

    name: str
    limit: str = ""
    high: float = 1.0


RESOURCES: Final[dict[str, Resource]] = {
    "alloy_partition_compute_active_ratio": Resource("compute"),
    "alloy_partition_memory_used_bytes": Resource("memory", limit="memory"),
    "alloy_partition_memory_bandwidth_active_ratio": Resource("memory_bandwidth"),
    "alloy_partition_link_active_ratio": Resource("link"),
    "alloy_device_compute_active_ratio": Resource("compute"),
    "alloy_device_memory_used_bytes": Resource("memory", limit="memory"),
    "alloy_device_power_watts": Resource("power", limit="alloy_device_power_limit_watts"),
    "alloy_device_link_active_ratio": Resource("link"),
    "alloy_device_temperature_headroom_celsius": Resource("temperature", high=MARGIN_RANGE_C),
}


NAMES: Final = ("compute", "memory", "memory_bandwidth", "link", "power", "temperature")
SHARED: Final = ("power", "temperature", "link")  # of a device; bounds whoever is on it


class Headroom(Value, frozen=True, kw_only=True):
    """What is left at P95: by resource, and the least. None: not covered well enough.

    `scarcest` is "device power" where the device's resource is the least; `absent` are the
    resources that nobody measures.
    """

    ratios: dict[str, float | None]
    least: float | None
    scarcest: str
    absent: tuple[str, ...] = ()


USED_LEVEL: Final = 0.95
LEVELS: Final = {"temperature": 0.05}  # resources whose signal tells what is left


def left(resource: str, level: float | None) -> float | None:
    """Return what is left of one resource, 0 to 1; None where the window says nothing.

    Args:
        resource: Its name.
        level: The quantile `LEVELS` says (else `USED_LEVEL`) of the last minute.
    """
    if level is None:
        return None
    if resource in LEVELS:
        return min(1.0, max(0.0, level / MARGIN_FULL_C))
    return min(1.0, max(0.0, 1.0 - level))


def together(
    ratios: Mapping[str, float | None], device: Mapping[str, float | None] | None = None
) -> Headroom:
    """Return the headroom of one subject; a resource that is not known makes the least unknown.

    Args:
        ratios: What is left of its own resources.
        device: Of a partition: what is left of its device's.
    """
    of_device = {
        name: ratio
        for name, ratio in (device or {}).items()
        if name in SHARED and name not in ratios
    }
    both = {**ratios, **{f"device {name}": ratio for name, ratio in of_device.items()}}
    absent = tuple(name for name in NAMES if name not in ratios and name not in of_device)
    unknown = next((name for name, ratio in both.items() if ratio is None), None)
    if not ratios or unknown is not None:
        return Headroom(ratios=dict(ratios), least=None, scarcest=unknown or "", absent=absent)
    scarcest = min(both, key=lambda name: both[name] or 0.0)
    return Headroom(ratios=dict(ratios), least=both[scarcest], scarcest=scarcest, absent=absent)
