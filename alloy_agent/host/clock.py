"""Boot id and clocks: ages come from `CLOCK_BOOTTIME`, wall time only labels records."""

from __future__ import annotations

import time
from pathlib import Path

from alloy_agent.errors import BackendError


def boot_id(proc_root: str | Path = "/proc") -> str:
    """Return the kernel's id of this boot, lower case with dashes.

    Raises:
        BackendError: The file cannot be read; without it no duration can be compared over a
            restart.
    """
    path = Path(proc_root) / "sys/kernel/random/boot_id"
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, UnicodeDecodeError) as exc:
        raise BackendError(f"boot id in {path}: {exc}", cure="mount the host's /proc") from exc


def boottime_s() -> float:
    """Return seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_s() -> float:
    """Return seconds since the epoch, for labels only."""
    return time.time()


def monotonic_offset_s() -> float:
    """Return what to add to a `CLOCK_MONOTONIC` time of now to get `CLOCK_BOOTTIME`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
