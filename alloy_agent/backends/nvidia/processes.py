"""Which processes hold which NVIDIA device nodes, and what their fence lets them open.

Read from `/proc` and the cgroup trees: open descriptors, the device rules of cgroup v1, the device
programs of v2 (`host.deviceprograms`), the device nodes that a container's own `/dev` holds and the
capabilities that would let it make others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.host.cgroupfs import detect
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.host.deviceprograms import programs as in_effect
from alloy_agent.host.processes import parse_cgroups, read_bytes

_CAP_SYS_ADMIN: Final = 21  # Source: linux/capability.h
_CAP_MKNOD: Final = 27
_PREFIX: Final = "/dev/nvidia"


class Fence(NamedTuple):
    """What a process may open: the rule in force ("" for none), the nodes; why it is unknown."""

    by: str
    allowed: tuple[str, ...]
    unknown: str = ""


def openers(proc: Path, node: str) -> dict[int, str]:
    """Return the processes that have a device node open, with their names; never raises."""
    found: dict[int, str] = {}
    own = os.getpid()
    for entry in pids(proc):
        if entry != own and node in open_nodes(proc, entry):
            found[entry] = name_of(proc, entry)
    return found


def open_nodes(proc: Path, pid: int) -> tuple[str, ...]:
    """Return the NVIDIA nodes that a process has open; empty if it cannot be looked at."""
    found = set()
    try:
        with os.scandir(proc / str(pid) / "fd") as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)  # noqa: PTH115 - thousands of descriptors
                except OSError:
                    continue
                if target.startswith(_PREFIX):
                    found.add(target)
    except OSError:
        return ()
    return tuple(sorted(found))


def name_of(proc: Path, pid: int) -> str:
    """Return a process's short name, or "" when it has gone."""
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def pids(proc: Path) -> list[int]:
    """Return the processes of this host; empty if they cannot be listed."""
    try:
        with os.scandir(proc) as entries:
            return sorted(int(entry.name) for entry in entries if entry.name.isdecimal())
    except OSError:
        return []


def fence_of(proc: Path, pid: int, programs: DevicePrograms | None = None) -> Fence:
    """Return what keeps a process within its device nodes, as far as it can be read.

    Args:
        proc: Where procfs is.
        pid: The process.
        programs: Asks what device programs of cgroups allow, and keeps the answers.
    """
    rules = _v1_rules(proc, pid)
    if rules is not None:
        return _from_rules(rules, proc)
    made = _from_programs(proc, pid, programs or DevicePrograms())
    if made is not None:
        return made
    own = _namespace(proc, pid)
    if own is None:
        return Fence("", (), f"process {pid} cannot be looked at")
    return Fence("", ("*",)) if own == _namespace(proc, 1) else _from_namespace(proc, pid)


def _from_programs(proc: Path, pid: int, programs: DevicePrograms) -> Fence | None:
    """Return the fence that device programs of cgroup v2 make; None: they make none."""
    folder = v2_folder(proc, pid)
    if folder is None or not in_effect(folder):
        return None
    rules = programs.rules_of(folder, sorted(_nodes_by_number(proc.parent / "dev").values()))
    if isinstance(rules, str):
        return Fence("", (), rules)
    return Fence(rules.by, rules.allowed) if rules.by else None


def v2_folder(proc: Path, pid: int) -> str | None:
    """Return the directory of a process in the cgroup v2 tree; None: there is none to be seen."""
    root = proc.parent
    unified = detect(proc, "" if root == Path("/") else root).unified
    path = parse_cgroups(read_bytes(f"{proc}/{pid}/cgroup")).get("")
    if unified is None or path is None or ".." in path.split("/"):
        return None
    return unified.folder(path.removeprefix(unified.root.rstrip("/")))


def _from_namespace(proc: Path, pid: int) -> Fence:
    """Return the fence of a process that has a `/dev` of its own."""
    capabilities = _capabilities(proc, pid)
    if capabilities is None:
        return Fence("", (), f"capabilities of process {pid} cannot be read")
    if capabilities >> _CAP_SYS_ADMIN & 1 or capabilities >> _CAP_MKNOD & 1:
        return Fence("", ("*",))
    nodes = _nodes_in(proc / str(pid) / "root/dev")
    if nodes is None:
        return Fence("", (), f"/dev of process {pid} cannot be read")
    return Fence("its own /dev, without CAP_MKNOD and CAP_SYS_ADMIN", nodes)


def _v1_rules(proc: Path, pid: int) -> list[str] | None:
    """Return the device rules of a cgroup v1 controller; None where that is not in force."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "devices" in controllers.split(","):
            mount = proc.parent / "sys/fs/cgroup/devices"
            try:
                rules = (mount / path.lstrip("/") / "devices.list").read_text().splitlines()
            except OSError:
                return None
            return None if "a *:* rwm" in rules else rules
    return None


def _from_rules(rules: list[str], proc: Path) -> Fence:
    """Return the fence that v1 rules make, in names of nodes of this host."""
    allowed = set()
    nodes = _nodes_by_number(proc.parent / "dev")
    for rule in rules:
        kind, _, rest = rule.partition(" ")
        number = rest.split(" ")[0]
        if kind != "c":
            continue
        if number in nodes:
            allowed.add(nodes[number])
        elif number.endswith(":*"):
            major = number[:-1]
            allowed |= {name for key, name in nodes.items() if key.startswith(major)}
    return Fence("cgroup v1 devices", tuple(sorted(allowed)))


def _nodes_by_number(dev: Path) -> dict[str, str]:
    found = {}
    for folder in (dev, dev / "nvidia-caps"):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.name.startswith("nvidia"):
                        continue
                    info = entry.stat(follow_symlinks=False)
                    if info.st_rdev:
                        key = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
                        inner = Path(entry.path).relative_to(dev)
                        found[key] = f"/dev/{inner}"
        except OSError:
            continue
    return found


def _nodes_in(dev: Path) -> tuple[str, ...] | None:
    found = []
    for folder, prefix in ((dev, "/dev/"), (dev / "nvidia-caps", "/dev/nvidia-caps/")):
        try:
            with os.scandir(folder) as entries:
                found += [
                    prefix + entry.name
                    for entry in entries
                    if entry.name.startswith("nvidia") and entry.name != "nvidia-caps"
                ]
        except FileNotFoundError:
            if folder == dev:
                return None
        except OSError:
            return None
    return tuple(sorted(found))


def _namespace(proc: Path, pid: int) -> str | None:
    try:
        return os.readlink(proc / str(pid) / "ns/mnt")  # noqa: PTH115 - no path, a name
    except OSError:
        return None


def _capabilities(proc: Path, pid: int) -> int | None:
    try:
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    except (OSError, ValueError, IndexError):
        return None
    return None
