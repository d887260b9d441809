"""What a host has and lacks for fencing CPUs, each with its cure."""

from __future__ import annotations

import os

from alloy_agent.backends.cpu.topology import Node
from alloy_agent.host.cgroups import CgroupFs, CgroupTopology
from alloy_agent.host.processes import read_bytes
from alloy_agent.host.procevents import missing_privilege
from alloy_agent.model import Diagnosis

KERNEL_MIN = (4, 15)  # cgroup v2 with cpu; cpuset v2 came with 5.0
FREEZE_V2_MIN = (5, 2)


def where(topology: CgroupTopology) -> tuple[str, ...]:
    """Return which hierarchy has each controller that matters, in words."""
    notes = []
    for controller in ("cpuset", "memory"):
        hierarchy = topology.of(controller)
        found = f"v{hierarchy.version} at {hierarchy.mount}" if hierarchy else "absent"
        notes.append(f"{controller}: {found}")
    return tuple(notes)


def diagnose(
    topology: CgroupTopology,
    nodes: tuple[Node, ...],
    root: str,
    proc_root: str,
    fs: CgroupFs,
) -> tuple[Diagnosis, ...]:
    """Return one line for each thing that was looked at."""
    return (
        _root_user(),
        _kernel(proc_root),
        *(_controller(topology, name) for name in ("cpuset", "memory")),
        _writable(topology, root),
        _freezer(topology, proc_root),
        _swap(topology, fs, proc_root),
        _process_events(),
        _cores(nodes),
    )


def _root_user() -> Diagnosis:
    ok = os.geteuid() == 0
    return Diagnosis(
        subject="cpu: privilege",
        ok=ok,
        found="root" if ok else f"uid {os.geteuid()}",
        cure="" if ok else "run as root: cgroups and other users' processes need it",
        required=True,
    )


def kernel_version(proc_root: str) -> tuple[int, int]:
    """Return the kernel's major and minor version; (0, 0) if it cannot be read."""
    text = read_bytes(f"{proc_root}/sys/kernel/osrelease").decode("ascii", "replace")
    parts = text.split("-", maxsplit=1)[0].split(".")
    numbers = [int(p) for p in parts[:2] if p.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _kernel(proc_root: str) -> Diagnosis:
    version = kernel_version(proc_root)
    ok = version >= KERNEL_MIN
    return Diagnosis(
        subject="cpu: kernel",
        ok=ok,
        found=f"{version[0]}.{version[1]}",
        cure="" if ok else f"needs Linux {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or later",
    )


def _controller(topology: CgroupTopology, name: str) -> Diagnosis:
    hierarchy = topology.of(name)
    if hierarchy is not None:
        return Diagnosis(
            subject=f"cpu: {name} controller",
            ok=True,
            found=f"cgroup v{hierarchy.version} at {hierarchy.mount}",
            required=True,
        )
    if name in topology.disabled:
        found, cure = "switched off", f"boot with cgroup_enable={name}"
    elif name in topology.known:
        found = "in the kernel, mounted nowhere"
        cure = f"mount the v2 tree with it, or: mount -t cgroup -o {name} {name} DIRECTORY"
    else:
        option = "CONFIG_CPUSETS" if name == "cpuset" else "CONFIG_MEMCG"
        found, cure = "not in the kernel", f"use a kernel with {option}"
    return Diagnosis(
        subject=f"cpu: {name} controller", ok=False, found=found, cure=cure, required=True
    )


def _writable(topology: CgroupTopology, root: str) -> Diagnosis:
    mounts = [h.mount for name in ("cpuset", "memory") if (h := topology.of(name)) is not None]
    closed = [mount for mount in mounts if not os.access(mount, os.W_OK)]
    partial = [h.mount for h in topology.hierarchies if h.mount in mounts and h.root != "/"]
    cure = ""
    if closed:
        cure = "mount the cgroup trees writable (in a container: privileged, with the host's trees)"
    elif partial:
        cure = "run in the host's cgroup namespace: other tenants are not visible from here"
    found = f"not writable: {', '.join(closed)}" if closed else f"{root} below {', '.join(mounts)}"
    return Diagnosis(
        subject="cpu: cgroup trees", ok=not cure, found=found, cure=cure, required=True
    )


def _freezer(topology: CgroupTopology, proc_root: str) -> Diagnosis:
    if topology.unified is not None and kernel_version(proc_root) >= FREEZE_V2_MIN:
        found = f"cgroup.freeze at {topology.unified.mount}"
        return Diagnosis(subject="cpu: freezer", ok=True, found=found)
    if topology.of("freezer") is not None:
        return Diagnosis(subject="cpu: freezer", ok=True, found="v1 freezer")
    return Diagnosis(
        subject="cpu: freezer",
        ok=False,
        found="neither a v2 tree nor the v1 freezer",
        cure="mount -t cgroup2 none /sys/fs/cgroup/unified",
    )


def _swap(topology: CgroupTopology, fs: CgroupFs, proc_root: str) -> Diagnosis:
    memory = topology.of("memory")
    swaps = max(0, len(read_bytes(f"{proc_root}/swaps").splitlines()) - 1)
    subject = "cpu: swap accounting"
    if memory is None:
        return Diagnosis(subject=subject, ok=False, found="no memory controller", cure="see above")
    counted = memory.version == 2 or fs.exists(f"{memory.mount}/memory.memsw.limit_in_bytes")
    if counted or not swaps:
        found = "counted" if counted else "not counted, and no swap is on"
        return Diagnosis(subject=subject, ok=True, found=found)
    return Diagnosis(
        subject=subject,
        ok=False,
        found=f"not counted, with {swaps} swap areas on: a tenant can swap beyond its cap",
        cure="boot with swapaccount=1, or swapoff -a",
    )


def _process_events() -> Diagnosis:
    reason = missing_privilege()
    return Diagnosis(
        subject="cpu: process events",
        ok=not reason,
        found=reason or "the kernel's process connector is open to the agent",
        cure="run as root with the host's pid and network namespaces; polled until then"
        if reason
        else "",
    )


def _cores(nodes: tuple[Node, ...]) -> Diagnosis:
    lent = sum(len(node.cores) for node in nodes)
    kept = sum(len(node.reserved) for node in nodes)
    return Diagnosis(
        subject="cpu: cores",
        ok=lent > 0,
        found=f"{lent} to lend, {kept} reserved, {len(nodes)} NUMA nodes",
        cure="" if lent else "reserve fewer cores: cpu.reserved_cores",
    )
