"""Where a PCI device hangs, from the kernel's own tree of devices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ADDRESS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
DEFAULT_SYS: Final = Path("/sys")


def pcie_root(bus: str, sys: Path = DEFAULT_SYS) -> str | None:
    """Return the root complex above a device, like `pci0000:00`, or None where the kernel has none.

    Two devices of one root reach each other without crossing the processor's own fabric.

    Args:
        bus: Address of the device, like `0000:1a:00.0`.
        sys: Where sysfs is mounted.

    Source: Linux sysfs, `/sys/bus/pci/devices/<address>` is a link to
    `/sys/devices/<root>/.../<address>`.
    """
    if not ADDRESS.fullmatch(bus):
        return None
    try:
        real = (sys / "bus/pci/devices" / bus).resolve(strict=True)
        way = real.relative_to((sys / "devices").resolve())
    except (OSError, ValueError, RuntimeError):
        return None
    first = way.parts[0] if way.parts else ""
    return first if way.name == bus and ROOT.fullmatch(first) else None
