"""Who holds a device node, as the kernel shows it: descriptors by device number, never by name.

A container may rename a node or make one of its own; the number of the device behind a descriptor
stays. A descriptor that is open for writing only is a control one: it carries core reservations
and attaches nothing. A mapping outlives its descriptor.

Source: aws-neuron-driver 2.24.7, neuron_cdev.c (open modes); proc_pid_fd(5), proc_pid_fdinfo(5),
proc_pid_maps(5); cgroup-v1/devices.rst.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from alloy_agent.backends.neuron.topology import parse_cores
from alloy_agent.host.cgroupfs import CgroupTopology
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.host.processes import list_pids, printable, read_bytes, read_process
from alloy_agent.model import Value

VISIBLE_CORES: Final = "NEURON_RT_VISIBLE_CORES"
TAG: Final = "NEURON_PROCESS_TAG"
LNC_NAMES: Final = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
KEPT: Final = (b"NEURON_", b"AWS_NEURON_")


class NodeNumbers(Protocol):
    """Tells the device number behind a path."""

    def rdev(self, path: str) -> int | None:
        """Return the number of the character device that a path leads to, or None."""
        ...


class KernelNumbers:
    """Device numbers as the kernel tells them; nothing is opened."""

    def rdev(self, path: str) -> int | None:
        """Return the number of the character device that a path leads to, or None."""
        try:
            info = os.stat(path)  # noqa: PTH116 - once per descriptor
        except OSError:
            return None
        return info.st_rdev if stat.S_ISCHR(info.st_mode) else None


class Holder(Value, frozen=True, kw_only=True):
    """A process that holds device nodes.

    Attributes:
        pid: Of the host's namespace, with `start_ticks` for good.
        data: Numbers of the devices that it is attached to.
        control: Numbers of the devices on which it has a control descriptor.
        variables: The Neuron variables that it was started with; None: not readable.
        cgroups: As the kernel shows them.
    """

    pid: int
    start_ticks: int
    comm: str
    data: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    mapped: tuple[int, ...] = ()
    variables: dict[str, str] | None = None
    cgroups: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it

    @property
    def devices(self) -> frozenset[int]:
        """All devices that it holds in any way."""
        return frozenset((*self.data, *self.control, *self.mapped))

    def configured_cores(self) -> tuple[int, ...] | None:
        """Return the cores that it was told to use; None: not told, or not legibly."""
        text = (self.variables or {}).get(VISIBLE_CORES)
        if not text:
            return None
        try:
            return parse_cores(text)
        except ValueError:
            return None

    def configured_lnc(self) -> str | None:
        """Return the logical core configuration that it was told to use."""
        for name in LNC_NAMES:
            if self.variables and name in self.variables:
                return self.variables[name]
        return None

    def named(self) -> str:
        """Return the process as a person reads it."""
        return f"pid {self.pid} ({self.comm or 'gone'})"


class Scan(Value, frozen=True, kw_only=True):
    """One look at all processes."""

    holders: tuple[Holder, ...] = ()
    unreadable: int = 0  # processes whose descriptors are not ours to see

    def of(self, number: int) -> tuple[Holder, ...]:
        """Return who holds one device."""
        return tuple(holder for holder in self.holders if number in holder.devices)


class Scanner:
    """Looks through `/proc`. Callers that ask at one moment share one look."""

    def __init__(self, proc_root: str, numbers: NodeNumbers) -> None:
        self._proc, self._numbers = proc_root.rstrip("/"), numbers
        self._lock = threading.Lock()
        self._last: tuple[float, bool, Mapping[int, int], Scan] | None = None

    def scan(self, nodes: Mapping[int, int], *, deep: bool = False, age_s: float = 0.0) -> Scan:
        """Return who holds the nodes: by a look that begins after this call, or shortly before.

        Args:
            nodes: Device number to number of the Neuron device.
            deep: Also look for mappings that outlived their descriptor.
            age_s: How old a look may be.
        """
        asked_s = time.monotonic() - age_s
        with self._lock:
            if self._last is not None:
                began_s, was_deep, of, scan = self._last
                if began_s >= asked_s and was_deep >= deep and of == nodes:
                    return scan
            began_s = time.monotonic()
            scan = self._look(nodes, deep=deep)
            self._last = (began_s, deep, dict(nodes), scan)
            return scan

    def _look(self, nodes: Mapping[int, int], *, deep: bool) -> Scan:
        found, unreadable = [], 0
        for pid in list_pids(self._proc):
            data, control, readable = self._descriptors(pid, nodes)
            mapped = self._mappings(pid, nodes) if deep else ()
            unreadable += not readable
            if data or control or mapped:
                holder = self._holder(pid, data, control, mapped)
                if holder is not None:
                    found.append(holder)
        return Scan(holders=tuple(found), unreadable=unreadable)

    def _descriptors(
        self, pid: int, nodes: Mapping[int, int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return the devices attached to, those controlled, and whether we could see."""
        folder = f"{self._proc}/{pid}/fd"
        data: set[int] = set()
        control: set[int] = set()
        try:
            names = os.listdir(folder)  # noqa: PTH208 - for each process
        except PermissionError:
            return (), (), False
        except OSError:
            return (), (), True
        for name in names:
            rdev = self._numbers.rdev(f"{folder}/{name}")
            number = None if rdev is None else nodes.get(rdev)
            if number is None:
                continue
            (control if self._write_only(pid, name) else data).add(number)
        return tuple(sorted(data)), tuple(sorted(control)), True

    def _write_only(self, pid: int, descriptor: str) -> bool:
        raw = read_bytes(f"{self._proc}/{pid}/fdinfo/{descriptor}")
        for line in raw.splitlines():
            if line.startswith(b"flags:"):
                try:
                    return int(line[6:], 8) & os.O_ACCMODE == os.O_WRONLY
                except ValueError:
                    return False
        return False

    def _mappings(self, pid: int, nodes: Mapping[int, int]) -> tuple[int, ...]:
        """Return the devices of which a mapping is left; found by the names of the mapped nodes."""
        found = set()
        for line in read_bytes(f"{self._proc}/{pid}/maps").splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(b"/dev/neuron"):
                name = fields[5].removeprefix(b"/dev/neuron").split(b" ")[0]
                if name.isdigit() and int(name) in nodes.values():
                    found.add(int(name))
        return tuple(sorted(found))

    def _holder(
        self,
        pid: int,
        data: tuple[int, ...],
        control: tuple[int, ...],
        mapped: tuple[int, ...],
    ) -> Holder | None:
        process = read_process(pid, self._proc)
        if process is None:
            return None
        return Holder(
            pid=pid,
            start_ticks=process.start_ticks,
            comm=process.comm,
            data=data,
            control=control,
            mapped=mapped,
            variables=self._variables(pid),
            cgroups=process.cgroups,
        )

    def _variables(self, pid: int) -> dict[str, str] | None:
        path = f"{self._proc}/{pid}/environ"
        if not os.access(path, os.R_OK):
            return None
        found = {}
        for entry in read_bytes(path).split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name.startswith(KEPT):
                found[printable(name)] = printable(value[:4096])
        return found


# --- device rules ------------------------------------------------------------------------------


class Fence(Value, frozen=True, kw_only=True):
    """What device rules let a process open: `by` "" is no fence; None was not to be seen."""

    by: str
    allowed: tuple[int, ...] = ()  # numbers of Neuron devices
    everything: bool = False


OPEN: Final = Fence(by="", everything=True)


def device_fence(
    cgroups: Mapping[str, str],
    topology: CgroupTopology,
    nodes: Mapping[int, int],
    programs: DevicePrograms | None = None,
) -> Fence | str:
    """Return the device rules of a process, or why they cannot be seen.

    The v1 controller shows its rules as text. Those of v2 are programs in the kernel: which are in
    effect is asked of it, and what they allow of a child in the tenant's cgroup.
    """
    hierarchy = topology.of("devices")
    path = cgroups.get("devices")
    if hierarchy is None or path is None:
        return _of_programs(cgroups, topology, nodes, programs)
    file = f"{hierarchy.folder(path)}/devices.list"
    raw = read_bytes(file)
    if not raw.strip():
        return f"{file} cannot be read"
    rules = tuple(_rules(raw))
    if any(rule == ("a", None, None) for rule in rules):
        made = _of_programs(cgroups, topology, nodes, programs)
        return made if isinstance(made, Fence) and made.by else OPEN
    allowed = {
        number for rdev, number in nodes.items() if any(_covers(rule, rdev) for rule in rules)
    }
    return Fence(by=f"devices cgroup {path}", allowed=tuple(sorted(allowed)))


def _of_programs(
    cgroups: Mapping[str, str],
    topology: CgroupTopology,
    nodes: Mapping[int, int],
    programs: DevicePrograms | None,
) -> Fence | str:
    """Return what the device programs of a v2 cgroup allow, or why that cannot be told."""
    unified, path = topology.unified, cgroups.get("")
    if unified is None or path is None or ".." in path.split("/"):
        return "the process is in no cgroup whose device rules or programs can be seen"
    names = {f"/dev/neuron{number}": number for number in nodes.values()}
    folder = unified.folder(path.removeprefix(unified.root.rstrip("/")))
    rules = (programs or DevicePrograms()).rules_of(folder, names)
    if isinstance(rules, str):
        return rules
    if not rules.by:
        return OPEN
    return Fence(by=rules.by, allowed=tuple(sorted(names[node] for node in rules.allowed)))


Rule = tuple[str, int | None, int | None]


def _rules(raw: bytes) -> Iterator[Rule]:
    """Yield kind, major and minor of each rule that lets a node be opened; None is any."""
    for line in raw.decode("ascii", "replace").splitlines():
        fields = line.split()
        if len(fields) != 3:
            continue
        kind, numbers, access = fields
        major, colon, minor = numbers.partition(":")
        if not colon or not set(access) & {"r", "w"}:
            continue
        yield kind, _or_any(major), _or_any(minor)


def _or_any(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _covers(rule: Rule, rdev: int) -> bool:
    kind, major, minor = rule
    return (
        kind in {"a", "c"} and major in {None, os.major(rdev)} and minor in {None, os.minor(rdev)}
    )
