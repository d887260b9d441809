"""`confine_system`: everyone else off the granted CPUs, as far as the kernel can, and undone after.

Off unless the operator turns it on, since it touches processes that are not the agent's.

* cpuset on v2: each partition becomes a partition root, so the kernel itself takes its CPUs away
  from all other cgroups. Nobody is moved.
* cpuset on v1: processes of the root cpuset move to `<root>/system`, which has all CPUs but the
  granted ones. Kernel threads stay, and so do processes that someone pinned (their affinity says
  more than the default) or put into a cpuset of their own: the audit names those. With the last
  partition, or with the setting off again, they move back and the cgroup goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from alloy_agent.backends.cpu.topology import Node
from alloy_agent.errors import BackendError
from alloy_agent.host.cgroups import Cgroup, CgroupFs, CgroupTopology, Hierarchy
from alloy_agent.host.clock import boottime_s
from alloy_agent.host.cpulist import format_cpu_list, parse_cpu_list
from alloy_agent.host.processes import iter_processes
from alloy_agent.model import DeviceId, Fact, Json

SYSTEM = "system"


class Confinement:
    """Keeps the rest of the host off granted CPUs, or sees to it that it is no longer kept off."""

    def __init__(self, root: str, wanted: bool, proc_root: str, fs: CgroupFs) -> None:
        self._root, self._wanted, self._proc, self._fs = root, wanted, proc_root, fs

    def follow(
        self, topology: CgroupTopology, nodes: Sequence[Node], granted: tuple[int, ...]
    ) -> None:
        """Make the confinement fit what is granted now. It can be repeated after a crash.

        Raises:
            BackendError: The kernel refused; partitions stay as they are.
        """
        cpuset = topology.of("cpuset")
        if cpuset is None:
            return
        if cpuset.version == 2:
            if self._wanted:
                self._exclude(topology, cpuset)
            return
        left = sorted({cpu for node in nodes for cpu in node.cpus} - set(granted))
        if self._wanted and granted and left:
            self._gather(cpuset, left)
        else:
            self._release(cpuset)

    def fact(self, device: DeviceId, topology: CgroupTopology, granted: tuple[int, ...]) -> Fact:
        """Return whether others are kept off, by what, and how many are not."""
        cpuset = topology.of("cpuset")
        value: dict[str, Json] = {"wanted": self._wanted, "in_force": False, "by": "", "cpus": []}
        method = ""
        if cpuset is not None and cpuset.version == 1:
            folder = cpuset.folder(f"{self._root}/{SYSTEM}")
            cpus = parse_cpu_list(self._fs.read(f"{folder}/cpuset.effective_cpus") or "")
            value["cpus"] = list(cpus)
            value["by"] = "cpuset v1"
            value["in_force"] = bool(cpus) and not set(cpus) & set(granted)
            method = f"{folder}/cpuset.effective_cpus"
        elif cpuset is not None:
            types = [
                self._fs.read(f"{cpuset.folder(path)}/cpuset.cpus.partition")
                for path in self._partitions(cpuset)
            ]
            value["by"] = "cpuset v2 partitions"
            value["in_force"] = bool(types) and all(t in {"root", "isolated"} for t in types)
            method = "cpuset.cpus.partition of each partition"
        return Fact(
            subject=device,
            name="cpu.confined",
            value=value,
            method=method,
            resolution="at the moment of reading",
            read_at_s=boottime_s(),
        )

    def _partitions(self, cpuset: Hierarchy) -> list[str]:
        return [
            f"{self._root}/{device}/{name}"
            for device in self._fs.children(cpuset.folder(self._root))
            if device != SYSTEM
            for name in self._fs.children(cpuset.folder(f"{self._root}/{device}"))
        ]

    def _exclude(self, topology: CgroupTopology, cpuset: Hierarchy) -> None:
        for path in self._partitions(cpuset):
            shown = self._fs.read(f"{cpuset.folder(path)}/cpuset.cpus.partition")
            if shown not in {"root", "isolated"}:
                Cgroup(topology, path, self._fs).set_exclusive()

    def _gather(self, cpuset: Hierarchy, left: Sequence[int]) -> None:
        folder = cpuset.folder(f"{self._root}/{SYSTEM}")
        self._fs.make(folder)
        nodes = self._fs.read(f"{cpuset.mount}/cpuset.effective_mems") or ""
        self._fs.write(f"{folder}/cpuset.mems", nodes)
        self._fs.write(f"{folder}/cpuset.cpus", format_cpu_list(left))
        everything = parse_cpu_list(self._fs.read(f"{cpuset.mount}/cpuset.effective_cpus") or "")
        for process in iter_processes(self._proc):
            at_root = process.cgroups.get("cpuset") == (cpuset.root.rstrip("/") or "/")
            unpinned = set(process.cpus_allowed) >= set(everything)
            if at_root and unpinned and not process.kernel_thread:
                with contextlib.suppress(
                    BackendError
                ):  # gone, or the kernel will not have it moved
                    self._fs.write(f"{folder}/cgroup.procs", str(process.pid))

    def _release(self, cpuset: Hierarchy) -> None:
        folder = cpuset.folder(f"{self._root}/{SYSTEM}")
        if not self._fs.exists(folder):
            return
        for _round in range(8):  # those that forked meanwhile are still there
            pids = (self._fs.read(f"{folder}/cgroup.procs") or "").split()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(BackendError):
                    self._fs.write(f"{cpuset.mount}/cgroup.procs", pid)
        self._fs.remove(folder)
        with contextlib.suppress(BackendError):
            self._fs.remove(cpuset.folder(self._root))
