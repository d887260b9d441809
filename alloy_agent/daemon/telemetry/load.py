"""How much of each resource is used: windows by subject, and the headroom that they leave."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from alloy_agent.telemetry import headroom
from alloy_agent.telemetry.headroom import LEVELS, USED_LEVEL
from alloy_agent.telemetry.window import MINUTE_S, SLICES, Quantiles, Windows

HEADROOM: Final = "alloy_partition_headroom_p95_ratio"

Key = tuple[str, int]  # subject, generation (0 for a device)


class Load:
    """Windows and headroom; guarded by whoever owns it."""

    def __init__(self) -> None:
        self.windows: dict[Key, dict[str, Windows]] = {}
        self.headrooms: dict[Key, headroom.Headroom] = {}
        self._settled = -1  # the last slice that was open when windows were settled
        self._short: dict[tuple[Key, str], Quantiles] = {}

    def windows_of(self, key: Key, resource: headroom.Resource) -> Windows:
        """Return the windows of a subject's resource, new ones if there are none."""
        table = self.windows.setdefault(key, {})
        windows = table.get(resource.name)
        if windows is None:
            windows = table[resource.name] = Windows(high=resource.high)
        return windows

    def forget(self, living: Collection[Key]) -> None:
        """Drop what belongs to subjects that are gone or were made anew."""
        for table in (self.windows, self.headrooms):
            for key in [key for key in table if key not in living]:
                del table[key]
        for short in [short for short in self._short if short[0] not in living]:
            del self._short[short]

    def weigh(self, now_s: float) -> None:
        """Work out the headroom of everything; of a partition, within that of its device."""
        left: dict[Key, dict[str, float | None]] = {}
        number = int(now_s // (MINUTE_S / SLICES))
        settle, self._settled = number != self._settled, number
        for key, table in self.windows.items():
            ratios: dict[str, float | None] = {}
            for name, windows in table.items():
                if settle:
                    windows.settle(now_s)
                period_s = windows.period_s or 1.0
                level = windows.minute.level(now_s, period_s, LEVELS.get(name, USED_LEVEL))
                ratios[name] = headroom.left(name, level)
                if level is None:
                    self._short[key, name] = windows.minute.quantiles(now_s, period_s)
                elif self._short:
                    self._short.pop((key, name), None)
            left[key] = ratios
        for key, ratios in left.items():
            device, inside, _ = key[0].partition("/")
            self.headrooms[key] = headroom.together(
                ratios, left.get((device, 0)) if inside else None
            )

    def quantiles(self, now_s: float) -> list[tuple[Key, str, Quantiles]]:
        """Return the quantiles of every window, of the minute and of the quarter hour."""
        found = []
        for key, table in self.windows.items():
            for name, windows in table.items():
                windows.settle(now_s)
                period_s = windows.period_s or 1.0
                found += [
                    (key, name, window.quantiles(now_s, period_s))
                    for window in (windows.minute, windows.quarter)
                ]
        return found

    def coverages(self) -> list[tuple[Key, str, Quantiles]]:
        """Return the minute's quantiles of every window whose coverage is short."""
        return [(key, name, found) for (key, name), found in self._short.items()]
