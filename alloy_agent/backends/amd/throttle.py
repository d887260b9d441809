"""Why a device's clocks are held back: the library's word, else what the firmware counted.

The firmware counts how long each limit held since it started, and renews its table every 100 ms; so
two readings are compared, the last one taken at the look before, if that is not long ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.library import Library
from alloy_agent.backends.amd.metrics import READ_MAX, Metrics, held_back, parse
from alloy_agent.errors import BackendError

RENEWED_S: Final = 0.12  # a little more than the firmware needs for a new table
OLD_S: Final = 30.0


class Throttle:
    """Looks at all devices; never called by the sampler, since it may take 120 ms."""

    def __init__(
        self, files: Files, roots: Roots, library: Library, clock: Callable[[], float]
    ) -> None:
        self._files, self._roots, self._library, self._clock = files, roots, library, clock
        self._before: dict[str, tuple[float, Metrics]] = {}

    def look(self, bus: str) -> tuple[tuple[str, ...], str] | None:
        """Return what holds a device's clocks back, and how that is known; None: nobody tells."""
        told = self._library.violations(bus) if self._library.usable else None
        if told is not None:
            return told, "amdsmi_get_violation_status"
        before_s, before = self._before.get(bus, (-OLD_S, None))
        if before is None or self._clock() - before_s > OLD_S:
            before = self._read(bus)
            if before is None or before.get("accumulation_counter") is None:
                return None
            time.sleep(RENEWED_S)
        elif self._clock() - before_s < RENEWED_S:
            time.sleep(RENEWED_S)
        after = self._read(bus)
        if after is None:
            return None
        self._before[bus] = (self._clock(), after)
        found = held_back(before, after)
        return None if found is None else (found, "residencies of gpu_metrics, two readings")

    def _read(self, bus: str) -> Metrics | None:
        try:
            return parse(self._files.data(f"{self._roots.pci(bus)}/gpu_metrics", READ_MAX))
        except (OSError, BackendError):
            return None
