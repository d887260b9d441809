"""Device memory of cgroups: the kernel's `dmem` controller, whoever's device it is.

A driver that charges its device's memory to cgroups registers a region for it: `drm/<bus>/vram0`
(amdgpu, Linux 6.14 and later) or `nvidia/<bus>/vidmem`. `dmem.max` of a cgroup is the most that its
processes and those below it may have there; the tenant cannot raise it. What binds a process is the
lowest `dmem.max` between its cgroup and the root.

A cap below what is in use takes nothing away: the kernel only refuses what would come on top.

Source: kernel/cgroup/dmem.c, Linux 6.14 and later; Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import re
from typing import Final

from alloy_agent.errors import BackendError, UnsupportedError
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.model import Value

CONTROLLER: Final = "dmem"
LACKS: Final = "the kernel has no dmem controller (since 6.14), or no driver charges memory to it"
_REGION: Final = re.compile(
    r"(?:drm|nvidia)/(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/(?:vram|vidmem)\S*"
)


class MemoryCap(Value, frozen=True, kw_only=True):
    """What holds for a cgroup on one device; `max_bytes` None: it has no cap of its own.

    `ceiling_bytes` is the lowest cap from it up to the root: what binds.
    """

    max_bytes: int | None
    ceiling_bytes: int | None
    current_bytes: int


def regions(text: str) -> dict[str, int | None]:
    """Return the numbers of a dmem file by region; None for `max` and for what is no number."""
    found: dict[str, int | None] = {}
    for line in text.splitlines():
        name, _, number = line.strip().rpartition(" ")
        if name:
            found[name] = int(number) if number.isdecimal() else None
    return found


def same_bus(region: str, bus: str) -> bool:
    """Whether a region is the memory of the device at a bus address."""
    match = _REGION.fullmatch(region)
    return match is not None and match["bus"][-12:] == bus.lower()[-12:]


class DeviceMemory:
    """The caps on device memory in one v2 tree."""

    def __init__(self, mount: str, fs: CgroupFs | None = None) -> None:
        """Look at a tree.

        Args:
            mount: Where the v2 tree is.
            fs: The file operations.
        """
        self._mount = mount.rstrip("/")
        self._fs = fs or CgroupFs()

    def region(self, bus: str) -> str | None:
        """Return the region that holds a device's memory; None: nobody charges for it here."""
        text = self._fs.read(f"{self._mount}/{CONTROLLER}.capacity")
        return next((name for name in regions(text or "") if same_bus(name, bus)), None)

    def cap(self, folder: str, bus: str) -> MemoryCap | None:
        """Return what holds for a cgroup, by its directory; None: it cannot be told."""
        region = self.region(bus)
        if region is None or not folder.startswith(self._mount):
            return None
        current = regions(self._fs.read(f"{folder}/{CONTROLLER}.current") or "")
        own, place = self._own(folder, region), folder
        ceiling: int | None = None
        while len(place) > len(self._mount):
            here = self._own(place, region)
            if here is not None:
                ceiling = here if ceiling is None else min(ceiling, here)
            place = place.rpartition("/")[0]
        return MemoryCap(
            max_bytes=own, ceiling_bytes=ceiling, current_bytes=current.get(region) or 0
        )

    def _own(self, folder: str, region: str) -> int | None:
        return regions(self._fs.read(f"{folder}/{CONTROLLER}.max") or "").get(region)

    def set_cap(self, folder: str, bus: str, memory_bytes: int | None) -> None:
        """Cap a cgroup (None: lift its cap), and read it back.

        Raises:
            UnsupportedError: Nobody charges for this device's memory here.
            BackendError: The kernel refuses, or shows something else.
        """
        region = self.region(bus)
        if region is None:
            raise UnsupportedError(f"{bus}: {LACKS}", cure="share without a memory cap")
        self._hand_down(folder)
        word = "max" if memory_bytes is None else str(memory_bytes)
        self._fs.write(f"{folder}/{CONTROLLER}.max", f"{region} {word}")
        shown = self._own(folder, region)
        if shown != memory_bytes:
            raise BackendError(
                f"{folder}: the kernel took a device memory cap of {memory_bytes} and shows {shown}"
            )

    def _hand_down(self, folder: str) -> None:
        """Let every cgroup between the root and this one hand the controller to its children."""
        below = folder.removeprefix(self._mount).strip("/").split("/")[:-1]
        place = self._mount
        for name in ("", *below):
            place = f"{place}/{name}" if name else place
            on = (self._fs.read(f"{place}/cgroup.subtree_control") or "").split()
            if CONTROLLER not in on:
                self._fs.write(f"{place}/cgroup.subtree_control", f"+{CONTROLLER}")
