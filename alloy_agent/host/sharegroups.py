"""The cgroups of a device's shares in the v2 tree: who is in which, and each one's memory cap."""

from __future__ import annotations

import contextlib

from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.host.devicememory import DeviceMemory, MemoryCap


class ShareGroups:
    """One cgroup for each share: `<top>/<device>/<share>`; none where there is no v2 tree."""

    def __init__(self, mount: str | None, top: str, fs: CgroupFs | None = None) -> None:
        """Join a tree.

        Args:
            mount: Where the v2 tree is; None: there is none.
            top: Name of the cgroup that holds those of all devices.
            fs: The file operations.
        """
        self.mount = mount
        self._top, self._fs = top, fs or CgroupFs()
        self.memory = None if mount is None else DeviceMemory(mount, self._fs)

    def path(self, device: str, share: str) -> str | None:
        """Return a share's cgroup by its path within the tree."""
        return None if self.mount is None else f"/{self._top}/{device}/{share}"

    def folder(self, device: str, share: str) -> str | None:
        """Return the directory of a share's cgroup."""
        path = self.path(device, share)
        return None if path is None else f"{self.mount}{path}"

    def procs(self, device: str, share: str) -> tuple[str, ...]:
        """Return the file that a tenant's pid is written to, if there is one."""
        folder = self.folder(device, share)
        return () if folder is None else (f"{folder}/cgroup.procs",)

    def pids(self, device: str, share: str) -> tuple[int, ...]:
        """Return the processes in a share's cgroup and in those below it."""
        folder = self.folder(device, share)
        return () if folder is None else tuple(sorted(set(self._inside(folder))))

    def _inside(self, folder: str) -> list[int]:
        text = self._fs.read(f"{folder}/cgroup.procs") or ""
        found = [int(word) for word in text.split() if word.isdecimal()]
        for child in self._fs.children(folder):
            found += self._inside(f"{folder}/{child}")
        return found

    def make(self, device: str, share: str) -> None:
        """Make a share's cgroup.

        Raises:
            BackendError: The kernel refuses.
        """
        folder = self.folder(device, share)
        if folder is not None:
            above = folder.rpartition("/")[0]
            for place in (above.rpartition("/")[0], above, folder):
                self._fs.make(place)

    def remove(self, device: str, share: str) -> None:
        """Remove a share's cgroup; those above it stay while they hold others."""
        folder = self.folder(device, share)
        with contextlib.suppress(BackendError, DeviceBusyError):
            while folder is not None and folder != self.mount:
                self._fs.remove(folder)
                folder = folder.rpartition("/")[0]

    def cap(self, device: str, share: str, bus: str) -> MemoryCap | None:
        """Return what holds for a share's cgroup; None: it cannot be told."""
        folder = self.folder(device, share)
        if folder is None or self.memory is None or not self._fs.exists(folder):
            return None
        return self.memory.cap(folder, bus)

    def can_cap(self, bus: str) -> bool:
        """Whether the kernel can cap a cgroup's memory of this device."""
        return self.memory is not None and self.memory.region(bus) is not None
