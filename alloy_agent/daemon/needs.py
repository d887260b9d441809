"""What the agent itself needs of a host, as diagnoses; the backends add what their vendor needs.

Every diagnosis is a function of a `Place`, so that tests show it hosts that lack things. Nothing is
changed by looking.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alloy_agent.errors import AlloyError
from alloy_agent.model import Diagnosis, Value

if TYPE_CHECKING:
    from alloy_agent.config import DrainSettings

PYTHON_MIN = (3, 11)
KERNEL_MIN = (
    5,
    10,
)  # oldest long-term kernel with cgroup.kill-less v2 and pidfds that is still shipped
SLURM_S = 10.0
LIBRARIES = ("grpcio", "cryptography", "msgspec", "psutil", "pyroute2", "prometheus-client")

CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_SYS_NICE": 23}  # linux/capability.h
CAPABILITY_USES = {
    "CAP_SYS_ADMIN": "partitions and control groups",
    "CAP_NET_ADMIN": "process events",
    "CAP_SYS_NICE": "the sampler's priority",
}


class Place(Value, frozen=True, kw_only=True):
    """The host as `doctor` looks at it."""

    state_dir: str
    socket_path: str
    proc_root: str = "/proc"
    euid: int = 0
    python: tuple[int, int] = (3, 11)


def this_place(state_dir: str, socket_path: str) -> Place:
    """Return the host that this process is on."""
    return Place(
        state_dir=state_dir,
        socket_path=socket_path,
        euid=os.geteuid(),
        python=(sys.version_info[0], sys.version_info[1]),
    )


def diagnose(place: Place) -> tuple[Diagnosis, ...]:
    """Return all of the agent's own needs. Never raises."""
    return tuple(_guarded(look, place) for look in LOOKS)


def _guarded(look: Callable[[Place], Diagnosis], place: Place) -> Diagnosis:
    """Return a look's diagnosis; a look that fails is itself one."""
    try:
        return look(place)
    except (OSError, ValueError, AlloyError) as exc:
        name = look.__name__.replace("_", " ")
        return Diagnosis(subject=name, ok=False, found=f"cannot be looked at: {exc}")


def python(place: Place) -> Diagnosis:
    """Whether the interpreter is new enough."""
    found = ".".join(map(str, place.python))
    return Diagnosis(
        subject="python",
        ok=place.python >= PYTHON_MIN,
        found=found,
        cure=f"install Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or later",
        required=True,
    )


def permissions(place: Place) -> Diagnosis:
    """Whether this user may change devices; looking works without."""
    return Diagnosis(
        subject="permissions",
        ok=place.euid == 0,
        found="root" if place.euid == 0 else f"user {place.euid}",
        cure="run as root: apply, exec and run need it",
        required=True,
    )


def capabilities(place: Place) -> Diagnosis:
    """Whether the capabilities are there that containers often lack."""
    status = (Path(place.proc_root) / "self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    effective = int(line.split()[1], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
    uses = ", ".join(f"{name} ({CAPABILITY_USES[name]})" for name in missing)
    return Diagnosis(
        subject="capabilities",
        ok=not missing,
        found=f"missing {uses}" if missing else "all that are used",
        cure="run privileged, or add them to the service or container",
    )


def state_directory(place: Place) -> Diagnosis:
    """Whether the state directory can be written, or made."""
    path = Path(place.state_dir)
    existing = next(p for p in (path, *path.parents) if p.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    free_mib = _free_bytes(existing) >> 20
    enough = free_mib >= 64
    found = f"{path}: {free_mib} MiB free" if writable else f"{path}: cannot be written"
    return Diagnosis(
        subject="state directory",
        ok=writable and enough,
        found=found + ("" if existing == path else ", not made yet"),
        cure="make it writable for root with 64 MiB free, or give --state-dir",
        required=True,
    )


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def socket_directory(place: Place) -> Diagnosis:
    """Whether the daemon's socket can be made where it belongs."""
    path = Path(place.socket_path)
    existing = next(p for p in path.parents if p.exists())
    return Diagnosis(
        subject="control socket",
        ok=os.access(existing, os.W_OK | os.X_OK),
        found=f"{path}: " + ("there" if path.exists() else "no daemon has made it"),
        cure="run as root, or set socket_path",
    )


def kernel(place: Place) -> Diagnosis:
    """Whether the kernel is new enough."""
    release = (Path(place.proc_root) / "sys/kernel/osrelease").read_text(encoding="utf-8").strip()
    parts = release.split(".")
    number = (int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()) or 0))
    return Diagnosis(
        subject="kernel",
        ok=number >= KERNEL_MIN,
        found=release,
        cure=f"use Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or later",
        required=True,
    )


def control_groups(place: Place) -> Diagnosis:
    """Which hierarchy has the controllers that partitions and tenants need."""
    from alloy_agent.host.cgroups import detect

    topology = detect(place.proc_root)
    wanted = ("cpuset", "memory")
    found = {name: topology.of(name) for name in wanted}
    missing = [name for name, hierarchy in found.items() if hierarchy is None]
    shown = ", ".join(
        f"{name} v{hierarchy.version} at {hierarchy.mount}"
        for name, hierarchy in found.items()
        if hierarchy is not None
    )
    return Diagnosis(
        subject="control groups",
        ok=not missing,
        found=f"{topology.mode}: {shown}" if not missing else f"no {' and no '.join(missing)}",
        cure="mount the controllers, or boot with cgroup_enable=cpuset,memory",
        required=True,
    )


def process_events(place: Place) -> Diagnosis:
    """Whether the kernel tells of processes as they come and go, or has to be polled."""
    config = place.euid == 0 and _initial_pid_namespace(place)
    return Diagnosis(
        subject="process events",
        ok=config,
        found="process connector" if config else "not available here: processes are polled",
        cure="run as root in the host's pid and network namespaces",
    )


def _initial_pid_namespace(place: Place) -> bool:
    # Source: include/linux/proc_ns.h, PROC_PID_INIT_INO; the connector serves that namespace alone.
    link = (Path(place.proc_root) / "self/ns/pid").readlink()
    return str(link) == "pid:[4026531836]"


def pressure(place: Place) -> Diagnosis:
    """Whether the kernel reports pressure stall information."""
    there = (Path(place.proc_root) / "pressure/cpu").exists()
    return Diagnosis(
        subject="pressure information",
        ok=there,
        found="/proc/pressure" if there else "not there",
        cure="boot with psi=1; without it contention is not measured",
    )


def clocks(place: Place) -> Diagnosis:
    """Whether this boot has an id, without which no time can be compared over a restart."""
    from alloy_agent.host.clock import boot_id

    return Diagnosis(subject="boot id", ok=True, found=boot_id(place.proc_root), required=True)


def libraries(place: Place) -> Diagnosis:
    """Which versions of the agent's libraries are installed."""
    del place
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return Diagnosis(
        subject="libraries",
        ok=not missing,
        found=", ".join(found) if not missing else f"missing {', '.join(missing)}",
        cure="install the alloy-agent package with its dependencies",
        required=True,
    )


def outlets(drain: DrainSettings, slurm_node: str) -> tuple[Diagnosis, ...]:
    """Return whether those who are to be told of drains can be told. Never raises."""
    found = []
    if drain.slurm:
        found.append(_slurm(drain, slurm_node))
    if drain.hook:
        ok = os.access(drain.hook[0], os.X_OK) and Path(drain.hook[0]).is_file()
        found.append(
            Diagnosis(
                subject="drain hook",
                ok=ok,
                found=drain.hook[0] + ("" if ok else ": no program that can be run"),
                cure="install it and make it executable, or change drain.hook",
                required=True,
            )
        )
    return tuple(found)


def _slurm(drain: DrainSettings, node: str) -> Diagnosis:
    """Whether `scontrol` is there, and knows this node."""
    from alloy_agent.daemon.slurm import Slurm

    cure = "install the Slurm client (slurm-client), or set drain.scontrol"
    ok, found = False, f"{drain.scontrol}: not there"
    if os.access(drain.scontrol, os.X_OK):
        cure = "set drain.slurm_node to this node's NodeName, and let scontrol reach slurmctld"
        try:
            shown = Slurm(drain.scontrol, node, min(drain.deadline_s, SLURM_S)).look()
            ok, found = True, f"node {node} is {'+'.join(sorted(shown.state)).lower()}"
        except AlloyError as exc:
            found = str(exc)
    return Diagnosis(subject="slurm", ok=ok, found=found, cure=cure, required=True)


def restarts(place: Place) -> Diagnosis:
    """Whether the daemon has kept running since the machine's start, and why not."""
    from alloy_agent.daemon import starts

    told = starts.summary(starts.read(Path(place.state_dir)))
    return Diagnosis(
        subject="restarts",
        ok=not told,
        found=told or "none that nobody asked for",
        cure="journalctl -u alloy-agent -b; a report to the maintainers if it is a defect",
    )


LOOKS: tuple[Callable[[Place], Diagnosis], ...] = (
    python,
    libraries,
    permissions,
    capabilities,
    kernel,
    clocks,
    state_directory,
    socket_directory,
    control_groups,
    process_events,
    pressure,
    restarts,
)
