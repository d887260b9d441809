"""The driver's sysfs: tolerant readers of attributes that move between driver generations.

Each attribute has the places where drivers of different ages keep it. Where none of them is there,
the file of that name is looked for in the device's directory, so that a driver which moved it is
still read; a name that is found twice is nobody's. What was missing or made no sense is told by
name, so that a reader of a report knows what it rests on.

Source: aws-neuron-driver 2.24.7, neuron_sysfs_metrics.c; sysfs user guide of SDK 2.28 to 2.33.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Final

from alloy_agent.model import Quality, Value

BASES: Final = ("devices/virtual/neuron_device", "class/neuron_device")
READ_BYTES: Final = 4096  # one page: no attribute is longer
WALK_DIRECTORIES: Final = 64  # how many directories of a device are looked through for a name
UNREADABLE: Final = 0xDEADBEEF  # what a register reads when the firmware does not answer
AMAZON: Final = "0x1d0f"  # PCI vendor
COUNTER_MAX: Final = (1 << 63) - 1  # above, a counter has gone below zero

# Attribute to its places, newest driver's first where they are known.
PLACES: Final[dict[str, tuple[str, ...]]] = {
    "dev": ("dev",),
    "reset": ("reset",),
    "core_count": ("core_count", "info/core_count"),
    "connected_devices": ("connected_devices", "info/connected_devices"),
    "serial_number": ("info/serial_number", "serial_number"),
    "arch_type": ("info/architecture/arch_type", "architecture/arch_type"),
    "instance_type": ("info/architecture/instance_type", "architecture/instance_type"),
    "device_name": (
        "info/architecture/device_name",
        "info/architecture/device_type",
        "architecture/device_name",
    ),
    "sram_ecc_uncorrected": ("stats/hardware/sram_ecc_uncorrected",),
    "mem_ecc_uncorrected": ("stats/hardware/mem_ecc_uncorrected",),
    "mem_ecc_repairable_uncorrected": ("stats/hardware/mem_ecc_repairable_uncorrected",),
    "sram_ecc_corrected": ("stats/hardware/sram_ecc_corrected",),
    "mem_ecc_corrected": ("stats/hardware/mem_ecc_corrected",),
    "unhealthy_components": ("stats/hardware/health_status/unhealthy_components",),
    "power": ("stats/power/utilization",),
}
_NAME: Final = re.compile(r"neuron(\d{1,3})")
_CORE: Final = re.compile(r"neuron_core(\d{1,3})")


class Reading(Value, frozen=True, kw_only=True):
    """One attribute as read: its text, or why there is none."""

    text: str | None = None
    quality: Quality = Quality.VALUE
    reason: str = ""


def read_attribute(path: str) -> Reading:
    """Return an attribute without the white space around it; never raises for what sysfs does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        return _unread(path, exc)
    try:
        raw = os.read(descriptor, READ_BYTES)
    except OSError as exc:
        return _unread(path, exc)
    finally:
        os.close(descriptor)
    text = raw.decode("utf-8", "replace").strip("\x00 \t\n")
    if not text.replace("\n", "").isprintable():
        return Reading(quality=Quality.NOT_SUPPORTED, reason=f"{path} holds no text")
    return Reading(text=text)


def _unread(path: str, exc: OSError) -> Reading:
    if exc.errno in {errno.EACCES, errno.EPERM}:
        return Reading(quality=Quality.NOT_PERMITTED, reason=f"{path} is for root only")
    return Reading(quality=Quality.NOT_SUPPORTED, reason=f"{path}: {exc.strerror}")


def whole_number(text: str | None) -> int | None:
    """Return a decimal number that a counter can hold; None for anything else."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 20:
        return None
    value = int(text)
    return None if value > COUNTER_MAX or value == UNREADABLE else value


class DeviceTree:
    """The directory of one device. Remembers where each attribute was found."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder = folder
        self.number = number
        self._places: dict[str, str | None] = {}
        self.problems: dict[str, str] = {}  # attribute to what is wrong with it

    def place(self, name: str) -> str | None:
        """Return where an attribute is; None: this driver does not have it."""
        known = self._places.get(name)
        if known is not None and os.path.lexists(known):
            return known
        found = next(
            (
                path
                for place in PLACES.get(name, (name,))
                if os.path.lexists(path := f"{self.folder}/{place}")
            ),
            None,
        )
        if found is None and "/" not in name:
            wanted = PLACES.get(name, (name,))[0].rpartition("/")[2]
            found = self._moved(wanted)
        self._places[name] = found
        return found

    def read(self, name: str) -> Reading:
        """Return an attribute of the device."""
        path = self.place(name)
        if path is None:
            found = Reading(quality=Quality.NOT_SUPPORTED, reason=f"this driver has no {name}")
        else:
            found = read_attribute(path)
        if found.text is None:
            self.problems[name] = found.reason
        else:
            self.problems.pop(name, None)
        return found

    def text(self, name: str) -> str:
        """Return an attribute's text; "" where there is none."""
        return self.read(name).text or ""

    def number_of(self, name: str) -> int | None:
        """Return an attribute as a number; None where it is absent or no number."""
        found = self.read(name)
        value = whole_number(found.text)
        if value is None and found.text is not None:
            self.problems[name] = f"{name} is {found.text[:40]!r}, no number"
        return value

    def cores(self) -> tuple[int, ...]:
        """Return the numbers of the device's physical cores, by their directories."""
        return _numbered(self.folder, _CORE)

    def core_folder(self, core: int) -> str:
        """Return the directory of a physical core."""
        return f"{self.folder}/neuron_core{core}"

    def inode(self) -> int:
        """Return what tells this directory from one of the same name made later; 0: it is gone."""
        try:
            return os.stat(self.folder).st_ino  # noqa: PTH116 - once per observation
        except OSError:
            return 0

    def present(self) -> bool:
        """Whether the driver still has the device."""
        return os.path.isdir(self.folder)  # noqa: PTH112 - once per sample

    def _moved(self, wanted: str) -> str | None:
        """Return the only file of that name in the device's own directories."""
        found: list[str] = []
        waiting = [self.folder]
        for _ in range(WALK_DIRECTORIES):
            if not waiting:
                break
            folder = waiting.pop(0)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if not _CORE.fullmatch(entry.name):
                        waiting.append(entry.path)
                elif entry.name == wanted:
                    found.append(entry.path)
        return found[0] if len(found) == 1 else None


class NeuronTree:
    """Everything that the driver shows below `/sys`."""

    def __init__(self, sys_root: str) -> None:
        self._root = sys_root.rstrip("/")
        self._devices: dict[str, DeviceTree] = {}

    def driver_version(self) -> str:
        """Return the version of the loaded module; "" when it is not loaded or does not say."""
        return read_attribute(f"{self._root}/module/neuron/version").text or ""

    def loaded(self) -> bool:
        """Whether the module is there."""
        return os.path.isdir(f"{self._root}/module/neuron")  # noqa: PTH112

    def base(self) -> str | None:
        """Return the directory with the devices; None: there is none yet."""
        for base in BASES:
            folder = f"{self._root}/{base}"
            if _numbered(folder, _NAME):
                return folder
        return None

    def devices(self) -> tuple[DeviceTree, ...]:
        """Return the devices that are there now, by their numbers."""
        base = self.base()
        if base is None:
            return ()
        found = []
        for number in _numbered(base, _NAME):
            folder = f"{base}/neuron{number}"
            found.append(self._devices.setdefault(folder, DeviceTree(folder, number)))
        return tuple(found)

    def fabric_adapters(self) -> dict[str, int | None]:
        """Return the EFA adapters of the host, each with its NUMA node; None: it has no node."""
        folder = f"{self._root}/class/infiniband"
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - once per driver load
        except OSError:
            return {}
        found = {}
        for name in names:
            if read_attribute(f"{folder}/{name}/device/vendor").text == AMAZON:
                node = read_attribute(f"{folder}/{name}/device/numa_node").text
                found[name] = whole_number(node)
        return found

    def class_attribute(self, name: str) -> Reading:
        """Return an attribute of the whole group, such as `node_id_4`."""
        return read_attribute(f"{self._root}/class/neuron_device/{name}")


def _numbered(folder: str, pattern: re.Pattern[str]) -> tuple[int, ...]:
    return tuple(sorted(set(_numbers(folder, pattern))))


def _numbers(folder: str, pattern: re.Pattern[str]) -> Iterator[int]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - once per observation
    except OSError:
        return
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            yield int(match[1])
