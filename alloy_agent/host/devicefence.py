"""A tenant's fence of device nodes, by the v1 `devices` controller.

A cgroup of its own for each partition and generation, in which the kernel refuses to open any
device but the partition's nodes and the few that every program needs. Who is inside keeps it, and
so do its children; nobody but root can leave it or change it.

The order of writes makes `kill -9` harmless: all is denied before anything is allowed, and nobody
enters before the rules read back as meant. What a crash leaves is an empty cgroup, which the next
`raise_fence` completes and `sweep` removes.

On a host without this controller device rules are programs in the kernel that the container
runtime loads: then this agent sets none, and says so.

Source: Documentation/admin-guide/cgroup-v1/devices.rst; security/device_cgroup.c, Linux 6.18.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.host.cgroupfs import CgroupFs, CgroupTopology, Hierarchy
from alloy_agent.host.clock import wall_s
from alloy_agent.model import Value

TOP: Final = "alloy-tenants"
# Source: OCI runtime specification, default devices; pseudo terminals are what a shell needs.
EVERYONE: Final[dict[str, str]] = {
    "1:3": "/dev/null",
    "1:5": "/dev/zero",
    "1:7": "/dev/full",
    "1:8": "/dev/random",
    "1:9": "/dev/urandom",
    "5:0": "/dev/tty",
    "5:2": "/dev/ptmx",
    "136:*": "/dev/pts",
}
SPARE_S: Final = 10.0
RUNTIMES_TASK: Final = (
    "no device rules are set here: this host has no v1 devices controller, so the fence is the"
    " container runtime's job and the tier follows from what is seen of it"
)
_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Rules(Value, frozen=True, kw_only=True):
    """What a cgroup lets its processes open; `everything`: there is no fence."""

    numbers: frozenset[str]  # "major:minor" of character devices; "major:*"
    everything: bool = False


def fence_path(partition: str, generation: int) -> str:
    """Return the cgroup path of a partition's tenants, the same for all who ask."""
    digest = hashlib.sha256(partition.encode()).hexdigest()[:12]
    return f"{TOP}/{_NAME.sub('-', partition)[:120]}-{digest}-{generation}"


def number_of(node: str) -> str | None:
    """Return "major:minor" of a character device; None: there is no such node."""
    try:
        info = os.stat(node)  # noqa: PTH116 - nothing is opened
    except OSError:
        return None
    if not stat.S_ISCHR(info.st_mode):
        return None
    return f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"


def raise_fence(
    topology: CgroupTopology, path: str, nodes: Iterable[str], fs: CgroupFs | None = None
) -> str:
    """Make the cgroup with exactly these nodes open; return its `cgroup.procs` file.

    Nodes that do not exist are left out: there is nothing to open.

    Raises:
        BackendError: The kernel refused, or does not show what was written.
    """
    files = fs or CgroupFs()
    hierarchy = topology.of("devices")
    if hierarchy is None or hierarchy.version != 1:
        raise BackendError(RUNTIMES_TASK, cure="start the tenant through a container runtime")
    folder = hierarchy.folder(path)
    wanted = frozenset({n for node in nodes if (n := number_of(node))} | EVERYONE.keys())
    for _attempt in range(3):  # a sweep may take the empty cgroup away between two steps
        files.make(hierarchy.folder(path.rpartition("/")[0]))
        try:
            files.make(folder)
            _write(files, folder, wanted)
        except BackendError:
            if files.exists(folder):
                raise
            continue
        break
    shown = read_rules(hierarchy, path, files)
    if shown is None or shown.everything or shown.numbers != wanted:
        raise BackendError(
            f"{folder}: the kernel shows other device rules than were written",
            cure="look who else writes to it, and whether the agent's own cgroup is fenced",
        )
    return f"{folder}/cgroup.procs"


def _write(files: CgroupFs, folder: str, wanted: frozenset[str]) -> None:
    shown = parse_rules(files.read(f"{folder}/devices.list") or "")
    if not shown.everything and shown.numbers == wanted:
        return  # whoever is inside is not disturbed
    if shown.everything:
        files.write(f"{folder}/devices.deny", "a")
        shown = Rules(numbers=frozenset())
    for number in sorted(shown.numbers - wanted):
        files.write(f"{folder}/devices.deny", f"c {number} rwm")
    for number in sorted(wanted - shown.numbers):
        files.write(f"{folder}/devices.allow", f"c {number} rw")


def parse_rules(text: str) -> Rules:
    """Return the rules of a `devices.list`; block devices are nobody's here."""
    numbers = set()
    for line in text.splitlines():
        fields = line.split()
        if len(fields) != 3 or not set(fields[2]) & {"r", "w"}:
            continue
        if fields[0] == "a" or fields[1].startswith("*"):
            return Rules(numbers=frozenset(), everything=True)
        if fields[0] == "c":
            numbers.add(fields[1])
    return Rules(numbers=frozenset(numbers))


def read_rules(hierarchy: Hierarchy, path: str, fs: CgroupFs | None = None) -> Rules | None:
    """Return the rules in force in a cgroup; None: they cannot be read."""
    text = (fs or CgroupFs()).read(f"{hierarchy.folder(path)}/devices.list")
    return None if text is None else parse_rules(text)


def named(rules: Rules, nodes: Iterable[str]) -> tuple[str, ...]:
    """Return what rules allow as paths of nodes, as numbers where no node is known."""
    if rules.everything:
        return ("*",)
    found: dict[str, str] = {}
    for node in nodes:
        number = number_of(node)
        if number is not None:
            found.setdefault(number, node)
    allowed = set()
    for number in rules.numbers - EVERYONE.keys():
        major, _, minor = number.partition(":")
        if minor == "*":
            allowed |= {node for key, node in found.items() if key.startswith(f"{major}:")}
            allowed.add(f"/dev/char/{number}")
        else:
            allowed.add(found.get(number, f"/dev/char/{number}"))
    return tuple(sorted(allowed))


def verify_inside(topology: CgroupTopology, path: str, cgroups: dict[str, str]) -> str:
    """Return why a process with these cgroups is not behind a fence; "" when it is."""
    hierarchy = topology.of("devices")
    if hierarchy is None:
        return RUNTIMES_TASK
    if cgroups.get("devices") != hierarchy.visible(path):
        return f"the process is in {cgroups.get('devices')}, not in {hierarchy.visible(path)}"
    rules = read_rules(hierarchy, path)
    return "its device rules allow everything" if rules is None or rules.everything else ""


def inside(topology: CgroupTopology) -> dict[str, tuple[int, ...]]:
    """Return the pids behind each fence that stands."""
    hierarchy = topology.of("devices")
    if hierarchy is None or hierarchy.version != 1:
        return {}
    return {path: _pids(hierarchy, path) for path in _fences(hierarchy)}


def _pids(hierarchy: Hierarchy, path: str) -> tuple[int, ...]:
    text = CgroupFs().read(f"{hierarchy.folder(path)}/cgroup.procs") or ""
    return tuple(int(word) for word in text.split())


def sweep(
    topology: CgroupTopology,
    kept: Iterable[str],
    fs: CgroupFs | None = None,
    spare_s: float = SPARE_S,
) -> int:
    """Remove the fences that nobody is inside of; return how many went.

    Those to keep stay, and so do young ones: somebody may be about to enter.
    """
    files = fs or CgroupFs()
    hierarchy = topology.of("devices")
    if hierarchy is None or hierarchy.version != 1:
        return 0
    keep, removed = frozenset(kept), 0
    for path in _fences(hierarchy):
        folder = hierarchy.folder(path)
        if path in keep or _age_s(folder) < spare_s or files.read(f"{folder}/cgroup.procs"):
            continue
        with contextlib.suppress(DeviceBusyError, BackendError):  # entered meanwhile: it stays
            removed += files.remove(folder)
    with contextlib.suppress(DeviceBusyError, BackendError):
        files.remove(hierarchy.folder(TOP))
    return removed


def _age_s(folder: str) -> float:
    """Return how old a cgroup is at least; its times are those of its making or of a later look."""
    try:
        return wall_s() - os.stat(folder).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0


def _fences(hierarchy: Hierarchy) -> Iterator[str]:
    for name in CgroupFs().children(hierarchy.folder(TOP)):
        yield f"{TOP}/{name}"
