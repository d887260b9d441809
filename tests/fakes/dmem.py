"""A cgroup v2 tree with the `dmem` controller, in a folder: what the kernel offers and refuses.

A cgroup has the controller's files only while its parent hands the controller down. A limit is
written for one region at a time; unknown regions and numbers that are none are invalid; what is in
use is not taken away by a lower limit. Source: kernel/cgroup/dmem.c.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from alloy_agent.host.cgroupfs import CgroupFs, refused

PAGE_MAX = 1 << 63


class DmemTree(CgroupFs):
    """The tree and the file operations on it. `deaf`: takes limits and keeps none."""

    def __init__(self, mount: Path, regions: dict[str, int]) -> None:
        self.mount, self.regions = mount, regions
        self.deaf = False
        self.writes: list[tuple[str, str]] = []
        mount.mkdir(parents=True, exist_ok=True)
        (mount / "cgroup.controllers").write_text("cpu memory dmem\n")
        (mount / "cgroup.subtree_control").write_text("\n")
        (mount / "cgroup.procs").write_text("")
        capacity = "".join(f"{name} {size}\n" for name, size in regions.items())
        (mount / "dmem.capacity").write_text(capacity)

    def make(self, folder: str) -> bool:
        if not super().make(folder):
            return False
        place = Path(folder)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            (place / name).write_text("")
        self._populate(place)
        return True

    def remove(self, folder: str) -> bool:
        place = Path(folder)
        if not place.exists():
            return False
        if self.children(folder) or (place / "cgroup.procs").read_text().split():
            raise refused(OSError(errno.EBUSY, "Device or resource busy"), f"removing {folder}")
        shutil.rmtree(place)
        return True

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        self.writes.append((str(file.relative_to(self.mount)), text))
        try:
            if file.name == "cgroup.subtree_control":
                self._hand_down(file.parent, text)
            elif file.name == "dmem.max":
                self._limit(file, text)
            else:
                super().write(path, text)
        except OSError as error:
            raise refused(error, f"writing {text!r} to {path}") from error

    def use(self, folder: Path, region: str, used: int) -> None:
        """Let a cgroup have memory in use, counted in those above it too."""
        for place in (folder, *folder.parents):
            if (place / "dmem.current").exists():
                self._put(place / "dmem.current", region, str(used))

    def enter(self, folder: Path, pid: int) -> None:
        """Put a process into a cgroup."""
        with (folder / "cgroup.procs").open("a") as procs:
            procs.write(f"{pid}\n")

    def _hand_down(self, folder: Path, text: str) -> None:
        if folder != self.mount and (folder / "cgroup.procs").read_text().split():
            raise OSError(errno.EBUSY, "Device or resource busy")
        names = set((folder / "cgroup.subtree_control").read_text().split())
        for word in text.split():
            name = word.lstrip("+-")
            if not (folder / "dmem.max").exists() and folder != self.mount:
                raise OSError(errno.ENOENT, "No such file or directory")
            names = names | {name} if word.startswith("+") else names - {name}
        (folder / "cgroup.subtree_control").write_text(" ".join(sorted(names)) + "\n")
        for child in self.children(str(folder)):
            self._populate(folder / child)

    def _populate(self, folder: Path) -> None:
        handed = (folder.parent / "cgroup.subtree_control").read_text().split()
        if "dmem" in handed and not (folder / "dmem.max").exists():
            (folder / "dmem.max").write_text("".join(f"{name} max\n" for name in self.regions))
            (folder / "dmem.current").write_text("".join(f"{name} 0\n" for name in self.regions))

    def _limit(self, file: Path, text: str) -> None:
        if not file.exists():
            raise OSError(errno.ENOENT, "No such file or directory")
        region, _, word = text.strip().partition(" ")
        if region not in self.regions or not (word == "max" or word.isdecimal()):
            raise OSError(errno.EINVAL, "Invalid argument")
        if not self.deaf:
            self._put(file, region, "max" if word == "max" else word)

    def _put(self, file: Path, region: str, word: str) -> None:
        lines = [line.rpartition(" ") for line in file.read_text().splitlines()]
        told = {name: value for name, _, value in lines} | {region: word}
        file.write_text("".join(f"{name} {value}\n" for name, value in told.items()))
