"""What the host itself shows of partitions: cgroups, processes, owners; read from the kernel.

The backend that made a partition is not asked what it did: caps, CPUs and members come from
cgroupfs and `/proc`, by the paths that the partition gives for joining it. So a partition that
others made is seen like our own.

Rules that stay true in here:

* Nothing raises for a process or a cgroup that goes away meanwhile.
* A fact that cannot be read says so (`Quality`), with the reason.
* One pass over `/proc` serves all partitions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from alloy_agent.conformance import fences
from alloy_agent.conformance.checks.base import NODE
from alloy_agent.conformance.checks.shapes import (
    HierarchyFact,
    LeafFact,
    MemberFact,
    PinnedFact,
    StrayThread,
)
from alloy_agent.conformance.owners import find_owners
from alloy_agent.errors import AlloyError
from alloy_agent.host.cgroupfs import CgroupFs, CgroupTopology, Hierarchy, detect
from alloy_agent.host.cgroups import Cgroup
from alloy_agent.host.clock import boottime_s
from alloy_agent.host.cpulist import parse_cpu_list
from alloy_agent.host.devicefence import inside
from alloy_agent.host.processes import (
    ProcessInfo,
    iter_processes,
    list_pids,
    read_bytes,
    read_process,
)
from alloy_agent.model import Device, Fact, Partition, PartitionId, Quality, Snapshot, Value, Vendor

PROCS = "/cgroup.procs"
DEEPEST = 8  # levels below a partition's cgroup that are walked for leaves


class Home(Value, frozen=True, kw_only=True):
    """Where a partition's processes belong: its cgroup path and the hierarchies that have it."""

    partition: Partition
    path: str
    hierarchies: tuple[Hierarchy, ...]

    def place_in(self, process_cgroups: dict[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the labels of the hierarchies in which a process is inside, and is not."""
        inside: list[str] = []
        outside: list[str] = []
        for hierarchy in self.hierarchies:
            key = "" if hierarchy.version == 2 else hierarchy.controllers[0]
            top = hierarchy.visible(self.path)
            path = process_cgroups.get(key, "")
            label = hierarchy.label or "unified"
            (inside if path == top or path.startswith(f"{top}/") else outside).append(label)
        return tuple(inside), tuple(outside)


class HostView:
    """The host as one pass over it showed, from which facts of any partition are made."""

    def __init__(
        self,
        snapshot: Snapshot,
        proc_root: str = "/proc",
        host_root: str = "",
        deep: bool = True,
    ) -> None:
        """Look once.

        Args:
            snapshot: Which partitions there are.
            proc_root: Where procfs is.
            host_root: Where the host's root file system is seen.
            deep: Also read the threads of processes outside of partitions.
        """
        self._snapshot = snapshot
        self._proc_root, self._host_root = proc_root, host_root
        self._deep = deep
        self.topology = detect(proc_root, host_root)
        self.homes = homes(snapshot.partitions, self.topology)
        self.cpus = host_cpus(self.topology, host_root)
        self._fences = fences.fences_of(snapshot)
        devices = {device.id: device for device in snapshot.devices}
        self.granted = {
            home.partition.id: granted_cpus(home.partition, device, host_root)
            for home in self.homes
            if (device := devices.get(home.partition.device)) and device.vendor is Vendor.CPU
        }
        self.processes: dict[int, ProcessInfo] = {}
        self._kernel: set[int] = set()
        for process in iter_processes(proc_root, threads=deep):
            if process.kernel_thread:
                self._kernel.add(process.pid)
            else:
                self.processes[process.pid] = process
        self._seen = self._cheap_look()
        self.taken_at_s = boottime_s()

    def refresh(self, pids: Iterable[int]) -> None:
        """Read some processes again; those that are gone are forgotten."""
        for pid in pids:
            process = read_process(pid, self._proc_root, threads=True)
            if process is None or process.kernel_thread:
                self.processes.pop(pid, None)
                self._kernel.discard(pid)
                if process is not None:
                    self._kernel.add(pid)
            else:
                self.processes[pid] = process
        self.taken_at_s = boottime_s()

    def stale(self) -> set[int]:
        """Return the pids that came, went, moved or changed affinity since the last look.

        Costs one listing of `/proc`, a system call for each process and a file for each cgroup:
        cheap enough for every poll, where reading all of `/proc` is not.
        """
        before, self._seen = self._seen, self._cheap_look()
        changed = before.keys() ^ self._seen.keys()
        return changed | {pid for pid in self._seen if before.get(pid) != self._seen[pid]}

    def _cheap_look(self) -> dict[int, tuple[object, ...]]:
        """Return, for each process, its affinity and the cgroups of partitions it is in."""
        places: dict[int, list[str]] = {}
        for home in self.homes:
            for label, pids in Cgroup(self.topology, home.path).pids_by_hierarchy().items():
                for pid in pids:
                    places.setdefault(pid, []).append(f"{label}:{home.partition.id}")
        for path, tenants in inside(self.topology).items():
            for pid in tenants:
                places.setdefault(pid, []).append(path)
        return {
            pid: (_affinities(pid, threads=pid in places), *places.get(pid, ()))
            for pid in list_pids(self._proc_root)
            if pid not in self._kernel
        }

    def home_of(self, process: ProcessInfo) -> tuple[Home, ...]:
        """Return the partitions in any hierarchy of which a process is; one, if all is well."""
        return tuple(home for home in self.homes if home.place_in(process.cgroups)[0])

    def places_of(self, process: ProcessInfo) -> set[PartitionId]:
        """Return the partitions that a process is in, or behind whose device fence it is."""
        found = {home.partition.id for home in self.home_of(process)}
        fenced = fences.partition_of(process, self._fences, self.topology)
        return found if fenced is None else {*found, fenced}

    def tenants(self) -> dict[PartitionId, fences.Tenants]:
        """Return who is behind the device fences that stand, by partition."""
        behind: dict[PartitionId, list[int]] = {}
        for pid, process in list(self.processes.items()):
            fenced = fences.partition_of(process, self._fences, self.topology)
            if fenced is not None:
                behind.setdefault(fenced, []).append(pid)
        return {
            partition.id: fences.tenants_of(
                partition, behind[partition.id], self._snapshot, self.topology, self._proc_root
            )
            for partition in self._snapshot.partitions
            if partition.id in behind
        }

    # --- facts --------------------------------------------------------------------------------

    def node_facts(self) -> tuple[Fact, ...]:
        """Return the facts of the node as a whole."""
        cpus = self.cpus
        inside = frozenset(pid for pid, p in self.processes.items() if self.home_of(p))
        owners = find_owners(self.processes.values(), inside, self._host_root, self._proc_root)
        depth = "threads included" if self._deep else "process leaders"
        pinned = tuple(self._pinned(frozenset(cpus)))
        return (
            self._fact(NODE, "host.alive", sorted(self.processes), "/proc"),
            self._fact(NODE, "host.cpus", list(cpus), "cpuset of the root cgroup"),
            self._fact(NODE, "host.pinned", pinned, f"/proc/PID/status: affinity, {depth}"),
            self._fact(NODE, "host.owners", owners, "processes of root; kubelet's sockets"),
            self._fact(
                NODE,
                "host.cgroup_mode",
                {
                    "mode": self.topology.mode,
                    "cpuset": _version(self.topology.of("cpuset")),
                    "memory": _version(self.topology.of("memory")),
                },
                "/proc/self/mountinfo",
            ),
        )

    def partition_facts(self, partition: Partition, device: Device) -> tuple[Fact, ...]:
        """Return the facts of one partition that has cgroups; none for one that has not."""
        home = next((h for h in self.homes if h.partition.id == partition.id), None)
        if home is None:
            return ()
        return tuple(self._of_home(home, device))

    def _of_home(self, home: Home, device: Device) -> Iterator[Fact]:
        subject = home.partition.id
        members = tuple(self._members(home))
        yield self._fact(
            subject, "cgroup.members", members, "/proc/PID/cgroup, /proc/PID/task: every thread"
        )
        yield self._fact(
            subject, "cgroup.hierarchies", tuple(_presence(home)), "directories of cgroupfs"
        )
        yield self._fact(subject, "partition.pids", [m.pid for m in members], "/proc/PID/cgroup")
        if device.vendor is not Vendor.CPU:
            return
        granted = self.granted.get(subject, ())
        yield self._fact(
            subject, "cpu.granted", list(granted), "cores of the placement, siblings from sysfs"
        )
        try:
            yield from self._of_kernel(home)
        except AlloyError as exc:
            yield Fact(
                subject=subject,
                name="cgroup.cpus_effective",
                quality=Quality.NOT_SUPPORTED,
                reason=str(exc),
                read_at_s=boottime_s(),
            )

    def _of_kernel(self, home: Home) -> Iterator[Fact]:
        subject = home.partition.id
        group = Cgroup(self.topology, home.path)
        state = group.state()
        cpuset, memory = self.topology.of("cpuset"), self.topology.of("memory")
        if cpuset is not None:
            where = f"{cpuset.folder(home.path)}/cpuset.* (v{cpuset.version})"
            yield self._fact(subject, "cgroup.cpus", list(state.cpus), where)
            yield self._fact(subject, "cgroup.cpus_effective", list(state.cpus_effective), where)
        if memory is None:
            return
        where = f"{memory.folder(home.path)}: caps up to the root (v{memory.version})"
        leaves = tuple(self._leaves(home, memory))
        yield self._fact(subject, "cgroup.memory_leaves", leaves, where)
        if state.memory_used_bytes is not None:
            yield self._fact(subject, "cgroup.memory_used_bytes", state.memory_used_bytes, where)

    def _leaves(self, home: Home, memory: Hierarchy) -> Iterator[LeafFact]:
        for path in leaf_paths(memory, home.path):
            state = Cgroup(self.topology, path).state()
            procs = read_bytes(memory.folder(path) + PROCS).split()
            yield LeafFact(
                path=f"/{path}",
                limit_bytes=state.memory_limit_bytes,
                ceiling_bytes=state.memory_ceiling_bytes,
                processes=len(procs),
            )

    def _members(self, home: Home) -> Iterator[MemberFact]:
        for process in list(self.processes.values()):
            inside, lacks = home.place_in(process.cgroups)
            if not inside:
                continue
            threads = process.threads
            if process.thread_count > 1 and not threads:
                again = read_process(process.pid, self._proc_root, threads=True)
                threads = again.threads if again else ()
            yield MemberFact(
                pid=process.pid,
                comm=process.comm,
                uid=process.uid,
                cpus=process.cpus_allowed,
                lacks=lacks,
                threads=tuple(
                    StrayThread(tid=t.tid, cpus=t.cpus_allowed)
                    for t in threads
                    if t.cpus_allowed != process.cpus_allowed
                ),
                threads_outside=tuple(
                    t.tid for t in threads if home.place_in(t.cgroups)[0] != inside
                ),
            )

    def _pinned(self, host: frozenset[int]) -> Iterator[PinnedFact]:
        for process in self.processes.values():
            masks = {process.cpus_allowed, *(t.cpus_allowed for t in process.threads)}
            narrow = {cpu for mask in masks if set(mask) & host != host for cpu in mask}
            if not narrow:
                continue
            homes_of = self.home_of(process)
            yield PinnedFact(
                pid=process.pid,
                comm=process.comm,
                cpus=tuple(sorted(narrow)),
                partition=homes_of[0].partition.id if homes_of else "",
            )

    def _fact(self, subject: str, name: str, value: Any, method: str) -> Fact:
        return Fact(
            subject=subject,
            name=name,
            value=msgspec.to_builtins(value),
            method=method,
            resolution="read at the time of the audit",
            read_at_s=self.taken_at_s,
        )


def collect_host(
    snapshot: Snapshot, proc_root: str = "/proc", host_root: str = "", deep: bool = True
) -> tuple[Fact, ...]:
    """Return every fact that the host shows of the node and of partitions with cgroups."""
    view = HostView(snapshot, proc_root, host_root, deep)
    devices = {device.id: device for device in snapshot.devices}
    facts = list(view.node_facts())
    for partition in snapshot.partitions:
        device = devices.get(partition.device)
        if device is not None:
            facts += view.partition_facts(partition, device)
    return tuple(facts)


def homes(partitions: Sequence[Partition], topology: CgroupTopology) -> tuple[Home, ...]:
    """Return where the processes of each partition belong; partitions without cgroups have none."""
    found = []
    for partition in partitions:
        placed: dict[str, Hierarchy] = {}
        path = ""
        for file in partition.access.cgroup_procs:
            match = _locate(file, topology)
            if match is not None:
                placed[match[0].label] = match[0]
                path = match[1]
        if placed:
            found.append(Home(partition=partition, path=path, hierarchies=tuple(placed.values())))
    return tuple(found)


def _locate(file: str, topology: CgroupTopology) -> tuple[Hierarchy, str] | None:
    """Return the hierarchy and the cgroup path of a `cgroup.procs` file."""
    fitting = [h for h in topology.hierarchies if file.startswith(f"{h.mount}/")]
    if not fitting or not file.endswith(PROCS):
        return None
    nearest = max(fitting, key=lambda h: len(h.mount))
    return nearest, file[len(nearest.mount) : -len(PROCS)].strip("/")


def leaf_paths(hierarchy: Hierarchy, path: str, fs: CgroupFs | None = None) -> tuple[str, ...]:
    """Return the leaf cgroups at or below a path, to a bounded depth."""
    files = fs or CgroupFs()
    found: list[str] = []
    open_paths = [(path, 0)]
    while open_paths:
        current, depth = open_paths.pop()
        children = files.children(hierarchy.folder(current)) if depth < DEEPEST else ()
        if children:
            open_paths += [(f"{current}/{Path(child).name}", depth + 1) for child in children]
        elif files.exists(hierarchy.folder(current)):
            found.append(current)
    return tuple(sorted(found))


def granted_cpus(partition: Partition, device: Device, host_root: str = "") -> tuple[int, ...]:
    """Return the CPUs of a placement: the cores it names, with their online siblings."""
    place = partition.placement
    units = device.units[place.start : place.stop] if device.units else ()
    firsts = units or tuple(range(place.start, place.stop))
    cpus: set[int] = set()
    for first in firsts:
        base = f"{host_root}/sys/devices/system/cpu/cpu{first}/topology"
        listed = read_bytes(f"{base}/core_cpus_list") or read_bytes(f"{base}/thread_siblings_list")
        cpus |= {first, *_cpus(listed)}
    return tuple(sorted(cpus))


def host_cpus(topology: CgroupTopology, host_root: str = "") -> tuple[int, ...]:
    """Return the CPUs that the host gives to a process nobody confined."""
    cpuset = topology.of("cpuset")
    names = ("cpuset.effective_cpus", "cpuset.cpus.effective", "cpuset.cpus")
    for name in names if cpuset else ():
        cpus = _cpus(read_bytes(f"{cpuset.folder('')}/{name}")) if cpuset else ()
        if cpus:
            return cpus
    return _cpus(read_bytes(f"{host_root}/sys/devices/system/cpu/online"))


def _affinities(pid: int, *, threads: bool) -> frozenset[frozenset[int]]:
    """Return the CPU sets that a process's threads may use (its leader's alone unless asked)."""
    tids = [pid]
    if threads:
        with contextlib.suppress(OSError, ValueError):
            tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    found: set[frozenset[int]] = set()
    for tid in tids:
        with contextlib.suppress(OSError):  # gone meanwhile
            found.add(frozenset(os.sched_getaffinity(tid)))
    return frozenset(found)


def _cpus(raw: bytes) -> tuple[int, ...]:
    try:
        return parse_cpu_list(raw.decode("ascii").strip())
    except ValueError:
        return ()


def _presence(home: Home) -> Iterator[HierarchyFact]:
    files = CgroupFs()
    for hierarchy in home.hierarchies:
        yield HierarchyFact(
            label=hierarchy.label,
            version=hierarchy.version,
            path=f"/{home.path}",
            present=files.exists(hierarchy.folder(home.path)),
        )


def _version(hierarchy: Hierarchy | None) -> int | None:
    return hierarchy.version if hierarchy else None
