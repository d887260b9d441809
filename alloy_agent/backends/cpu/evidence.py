"""Facts of the host's partitions, read from cgroup trees and `/proc`; the package lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alloy_agent.errors import BackendError
from alloy_agent.host.cgroups import Cgroup, CgroupFs, CgroupTopology
from alloy_agent.host.clock import boottime_s
from alloy_agent.host.processes import ProcessInfo, iter_processes, read_process
from alloy_agent.model import DeviceId, Fact, Json, Partition, Quality

NAMES_MAX = 16  # processes named in a list that may have thousands


class _Outsiders(NamedTuple):
    pinned: list[Json]
    ran: list[Json]
    allowed: list[str]


class FactReader:
    """Reads facts; remembers each outsider's CPU time, to tell who ran since the last look."""

    def __init__(self, proc_root: str, fs: CgroupFs) -> None:
        self._proc, self._fs = proc_root, fs
        self._ticks: dict[DeviceId, dict[tuple[int, int], int]] = {}

    def read(
        self,
        device: DeviceId,
        topology: CgroupTopology,
        partitions: Sequence[Partition],
        granted: Mapping[str, tuple[int, ...]],
    ) -> tuple[Fact, ...]:
        """Return the facts of one device and its partitions.

        Args:
            device: The NUMA node.
            topology: Where the controllers are.
            partitions: What is there, as observed now.
            granted: The CPUs that each partition's name grants.
        """
        now_s = boottime_s()
        facts: list[Fact] = [_hierarchies(device, topology, now_s)]
        everyone = list(iter_processes(self._proc, threads=True)) if partitions else []
        facts += [self._parents(device, topology, p) for p in partitions[:1]]
        for partition in partitions:
            handle = Cgroup(topology, partition.locator["cgroup"], self._fs)
            try:
                found = self._partition(partition, handle, granted.get(partition.id, ()), everyone)
            except BackendError as exc:
                found = (
                    Fact(
                        subject=partition.id,
                        name="cgroup.cpus_effective",
                        quality=Quality.STALE,
                        reason=str(exc),
                        read_at_s=now_s,
                    ),
                )
            facts += found
        if partitions:
            self._ticks[device] = {(p.pid, p.start_ticks): p.cpu_ticks for p in everyone}
        return tuple(facts)

    def _partition(
        self,
        partition: Partition,
        handle: Cgroup,
        granted: tuple[int, ...],
        everyone: Sequence[ProcessInfo],
    ) -> tuple[Fact, ...]:
        state = handle.state()
        make = _Maker(partition.id, boottime_s())
        processes = self._processes(handle)
        members = [_member(p, handle) for p in processes]
        inside = {pid for held in handle.pids_by_hierarchy().values() for pid in held}
        outside = self._outsiders(partition.device, granted, inside, everyone)
        cpuset, memory = handle.cpuset, handle.memory
        folder = cpuset.folder(handle.path) if cpuset else ""
        caps = memory.folder(handle.path) if memory else ""
        effective = (
            "cpuset.cpus.effective" if cpuset and cpuset.version == 2 else "cpuset.effective_cpus"
        )
        return (
            make("cpu.granted", list(granted), f"name of {folder}"),
            make(
                "cgroup.hierarchies",
                [
                    {
                        "label": h.label,
                        "version": h.version,
                        "path": h.visible(handle.path),
                        "present": self._fs.exists(h.folder(handle.path)),
                    }
                    for h in handle.hierarchies
                ],
                "directories",
            ),
            make("cgroup.cpus", list(state.cpus), f"{folder}/cpuset.cpus"),
            make("cgroup.cpus_effective", list(state.cpus_effective), f"{folder}/{effective}"),
            make("cgroup.mems_effective", list(state.mems_effective), f"{folder}/cpuset mems"),
            make("cgroup.exclusive", state.partition, folder),
            make("cgroup.memory_limit_bytes", state.memory_limit_bytes, caps),
            make("cgroup.swap_limit_bytes", state.swap_limit_bytes, caps),
            make("cgroup.memory_used_bytes", state.memory_used_bytes, caps),
            make("cgroup.memory_leaves", self._leaves(handle), caps),
            make("cgroup.members", members, "cgroup.procs of each hierarchy and /proc/PID"),
            make(
                "partition.processes",
                [
                    {
                        "pid": process.pid,
                        "start_ticks": process.start_ticks,
                        "comm": process.comm,
                        "uid": process.uid,
                    }
                    for process in processes
                ],
                "cgroup.procs of each hierarchy and /proc/PID/stat",
            ),
            make("cpu.outsiders_pinned", outside.pinned, "/proc/PID[/task/TID]/status"),
            make("cpu.outsiders_ran", outside.ran, "/proc/PID/stat field 39, at sampling moments"),
            make(
                "cpu.outsiders_allowed",
                {"count": len(outside.allowed), "names": list(outside.allowed[:NAMES_MAX])},
                "/proc/PID/status",
            ),
        )

    def _leaves(self, handle: Cgroup) -> list[Json]:
        """Return every leaf below the partition in the memory hierarchy, with what binds it."""
        if handle.memory is None:
            return []
        leaves: list[Json] = []
        stack = [handle.path]
        while stack:
            path = stack.pop()
            folder = handle.memory.folder(path)
            children = self._fs.children(folder)
            stack += [f"{path}/{child}" for child in children]
            if children:
                continue
            leaf = Cgroup(handle.topology, path, self._fs).state()
            procs = (self._fs.read(f"{folder}/cgroup.procs") or "").split()
            leaves.append(
                {
                    "path": handle.memory.visible(path),
                    "limit_bytes": leaf.memory_limit_bytes,
                    "ceiling_bytes": leaf.memory_ceiling_bytes,
                    "processes": len(procs),
                }
            )
        return leaves

    def _processes(self, handle: Cgroup) -> list[ProcessInfo]:
        """Return the processes that are in any hierarchy of a partition and still live."""
        found = (read_process(pid, self._proc, threads=True) for pid in handle.pids() if pid)
        return [p for p in found if p is not None and p.state not in {"Z", "X"}]

    def _parents(self, device: DeviceId, topology: CgroupTopology, partition: Partition) -> Fact:
        """Return who sits in the device's own cgroup: beside all partitions, with all its cores."""
        path = partition.locator["cgroup"].rpartition("/")[0]
        pids: set[int] = set()
        handle = Cgroup(topology, path, self._fs)
        for hierarchy in handle.hierarchies:
            text = self._fs.read(f"{hierarchy.folder(path)}/cgroup.procs") or ""
            pids.update(int(pid) for pid in text.split() if pid.isdigit())
        value: list[Json] = [{"pid": pid} for pid in sorted(pids)]
        return _Maker(device, boottime_s())(
            "device.parent_processes", value, f"cgroup.procs of {path}"
        )

    def _outsiders(
        self,
        device: DeviceId,
        cpus: tuple[int, ...],
        inside: set[int],
        everyone: Sequence[ProcessInfo],
    ) -> _Outsiders:
        """Sort the processes of elsewhere by what they have to do with these CPUs."""
        wanted = set(cpus)
        default = _default_affinity(everyone)
        before = self._ticks.get(device, {})
        pinned: list[Json] = []
        ran: list[Json] = []
        allowed: list[str] = []
        for process in everyone:
            if process.kernel_thread or process.pid in inside or process.state in {"Z", "X"}:
                continue
            for tid, may, last in _threads_of(process):
                if not wanted & set(may):
                    continue
                where: dict[str, Json] = {
                    "pid": process.pid,
                    "tid": tid,
                    "comm": process.comm,
                    "cpus": list(may),
                    "cgroup": process.cgroups.get("cpuset", process.cgroups.get("", "")),
                }
                if not default <= set(may):
                    pinned.append(dict(where))
                elif tid == process.pid:
                    allowed.append(process.comm)
                if last in wanted:
                    past = before.get((process.pid, process.start_ticks))
                    active = None if past is None else process.cpu_ticks > past
                    ran.append({**where, "cpu": last, "active": active})
        return _Outsiders(pinned, ran[: NAMES_MAX * 4], sorted(allowed))


class _Maker:
    """Makes the facts of one subject, read at one moment."""

    def __init__(self, subject: str, now_s: float) -> None:
        self._subject, self._now_s = subject, now_s

    def __call__(self, name: str, value: Json, method: str) -> Fact:
        return Fact(
            subject=self._subject,
            name=name,
            value=value,
            method=method,
            resolution="at the moment of reading",
            read_at_s=self._now_s,
        )


def _threads_of(process: ProcessInfo) -> list[tuple[int, tuple[int, ...], int]]:
    """Return each thread of a process as tid, allowed CPUs and last CPU."""
    leader = (process.pid, process.cpus_allowed, process.last_cpu)
    return [leader, *((t.tid, t.cpus_allowed, t.last_cpu) for t in process.threads)]


def _member(process: ProcessInfo, handle: Cgroup) -> Json:
    """Return a process of a partition with the hierarchies and threads that are not with it."""
    lacks: list[Json] = []
    for hierarchy in handle.hierarchies:
        key = "" if hierarchy.version == 2 else hierarchy.controllers[0]
        top, path = hierarchy.visible(handle.path), process.cgroups.get(key, "")
        if path != top and not path.startswith(f"{top}/"):
            lacks.append(hierarchy.label or "unified")
    leader = process.cgroups.get("cpuset", process.cgroups.get(""))
    strays: list[Json] = [
        {"tid": t.tid, "cpus": list(t.cpus_allowed)}
        for t in process.threads
        if t.cpus_allowed != process.cpus_allowed
    ]
    elsewhere: list[Json] = [
        t.tid for t in process.threads if t.cgroups.get("cpuset", t.cgroups.get("")) != leader
    ]
    return {
        "pid": process.pid,
        "comm": process.comm,
        "uid": process.uid,
        "cpus": list(process.cpus_allowed),
        "lacks": lacks,
        "threads": strays,
        "threads_outside": elsewhere,
    }


def _default_affinity(everyone: Sequence[ProcessInfo]) -> set[int]:
    """Return the CPUs a process of this host gets when nobody placed it: those of process 1."""
    first = next((p for p in everyone if p.pid == 1), None)
    if first is not None:
        return set(first.cpus_allowed)
    return {cpu for process in everyone for cpu in process.cpus_allowed}


def _hierarchies(device: DeviceId, topology: CgroupTopology, now_s: float) -> Fact:
    value: dict[str, Json] = {"mode": topology.mode}
    for name in ("cpuset", "memory"):
        hierarchy = topology.of(name)
        value[name] = f"v{hierarchy.version} at {hierarchy.mount}" if hierarchy else None
    return _Maker(device, now_s)("cpu.hierarchies", value, "/proc/cgroups, /proc/self/mountinfo")
