"""One cgroup held in several hierarchies at once: CPUs, memory cap, processes, freezing.

A `Cgroup` is one path in every hierarchy that it needs: the cpuset one, the memory one, and the v2
tree where there is one (it freezes, kills and counts even where it is bare); without a v2 tree the
v1 freezer and cpuacct ones. The order of writes makes `kill -9` harmless:

* `create` writes `cpuset.cpus` last of all, so a cgroup without CPUs of its own, or one that a
  hierarchy lacks, is half made. `create` completes it, `remove` removes it; both can be repeated.
* `remove` takes the cpuset directory away first: what is left then is half made again.
* v1: `cpuset.mems` and `cpuset.cpus` of every ancestor before those of the leaf, before processes.
* v2: a controller is delegated along the path from the top; no process may sit in an inner cgroup.
* No operation but `kill` ever ends a process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable

from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.host.cgroupfs import (
    CgroupFs,
    CgroupTopology,
    Hierarchy,
    detect,
)
from alloy_agent.host.cpulist import format_cpu_list, parse_cpu_list
from alloy_agent.host.processes import printable, read_bytes
from alloy_agent.model import Value

__all__ = ["Cgroup", "CgroupFs", "CgroupState", "CgroupTopology", "Hierarchy", "detect", "holders"]

NO_LIMIT_V1 = 1 << 62  # v1 shows "no limit" as PAGE_COUNTER_MAX bytes, just below 2**63
BUSY_RETRY_S = 2.0  # an exited task leaves its cgroup a moment after its parent saw it end
FREEZE_DEADLINE_S = 2.0
FREEZE_ATTEMPTS = 5


class CgroupState(Value, frozen=True, kw_only=True):
    """What the kernel says of a cgroup now.

    `lacks` says why it is half made; empty for a whole one. `memory_limit_bytes` is the cap of the
    cgroup itself, `memory_ceiling_bytes` the lowest of it and all its ancestors; None: no limit.
    `swap_open` says that swap comes on top of a memory cap, which `set_memory` does not allow.
    `partition` is the v2 cpuset partition type, or "exclusive"/"shared" from v1's `cpu_exclusive`.
    """

    path: str
    lacks: tuple[str, ...]
    cpus: tuple[int, ...]
    cpus_effective: tuple[int, ...]
    mems_effective: tuple[int, ...]
    memory_limit_bytes: int | None
    memory_ceiling_bytes: int | None
    memory_used_bytes: int | None
    swap_limit_bytes: int | None
    swap_open: bool
    partition: str
    inodes: dict[str, int]


class Cgroup:
    """A cgroup by its path below the mounts, in every hierarchy that a fenced tenant needs."""

    def __init__(self, topology: CgroupTopology, path: str, fs: CgroupFs | None = None) -> None:
        self.topology = topology
        self.path = path.strip("/")
        self._fs = CgroupFs() if fs is None else fs
        self.cpuset = topology.of("cpuset")
        self.memory = topology.of("memory")
        chosen = [self.memory, topology.unified]
        if topology.unified is None:
            chosen += [topology.of("freezer"), topology.of("cpuacct")]
        chosen.append(self.cpuset)  # last: its directory is what makes a cgroup whole
        unique = {h.label: h for h in chosen if h is not None and h != self.cpuset}
        self.hierarchies = (*unique.values(), *((self.cpuset,) if self.cpuset else ()))

    # --- making and removing -----------------------------------------------------------------

    def create(
        self, cpus: Iterable[int], mems: Iterable[int], memory_bytes: int | None = None
    ) -> None:
        """Make the cgroup with these CPUs, memory nodes and cap, or complete a half-made one.

        Raises:
            UnsupportedError: The host has no cpuset (or no memory) controller.
            BackendError: The kernel refused, or does not show what was written.
        """
        self._need("cpuset")
        if memory_bytes is not None:
            self._need("memory")
        for hierarchy in self.hierarchies:
            self._make_path(hierarchy)
        if self.memory is not None:
            self.set_memory(memory_bytes)
        self.set_cpus(cpus, mems)

    def set_cpus(self, cpus: Iterable[int], mems: Iterable[int]) -> None:
        """Give it these CPUs and memory nodes; whoever is inside moves along.

        Raises:
            BackendError: The kernel refused, or does not show what was written.
        """
        wanted, nodes = tuple(sorted(cpus)), tuple(sorted(mems))
        folder = self._need("cpuset").folder(self.path)
        self._fs.write(f"{folder}/cpuset.mems", format_cpu_list(nodes))
        self._fs.write(f"{folder}/cpuset.cpus", format_cpu_list(wanted))
        state = self.state()
        if state.cpus_effective != wanted or state.mems_effective != nodes:
            raise BackendError(
                f"cgroup {self.path}: the kernel gives CPUs"
                f" {format_cpu_list(state.cpus_effective) or 'none'} on nodes"
                f" {format_cpu_list(state.mems_effective) or 'none'} instead of"
                f" {format_cpu_list(wanted)} on {format_cpu_list(nodes)}",
                cure="look for an ancestor cgroup that is narrower, or for CPUs that are offline",
            )

    def remove(self, proc_root: str = "/proc") -> None:
        """Remove the cgroup, empty children included, from all hierarchies; absent is done.

        Raises:
            DeviceBusyError: Processes are in it; they are named, and nothing is changed.
        """
        self._refuse_occupied(proc_root)
        for hierarchy in reversed(self.hierarchies):
            self._remove_tree(hierarchy.folder(self.path), proc_root)

    def prune_parents(self) -> None:
        """Remove the ancestors that are empty now; those that are in use stay."""
        parent = self.path.rpartition("/")[0]
        while parent:
            for hierarchy in self.hierarchies:
                with contextlib.suppress(BackendError):
                    self._fs.remove(hierarchy.folder(parent))
            parent = parent.rpartition("/")[0]

    def set_memory(self, memory_bytes: int | None) -> None:
        """Set the memory cap (None: no cap), with no swap beyond it where swap is accounted for.

        Raises:
            DeviceBusyError: More is in use and cannot be reclaimed.
        """
        hierarchy = self._need("memory")
        folder, used = hierarchy.folder(self.path), self._memory_used(hierarchy)
        if memory_bytes is None:
            self._lift_memory(folder, hierarchy.version)
            return
        if used is not None and used > memory_bytes:
            raise DeviceBusyError(
                f"cgroup {self.path} uses {used} bytes, more than the cap of {memory_bytes} asked",
                cure="let its tenant free memory, or ask for a higher cap",
            )
        if hierarchy.version == 2:
            self._fs.write(f"{folder}/memory.max", str(memory_bytes))
            if self._fs.exists(f"{folder}/memory.swap.max"):
                self._fs.write(f"{folder}/memory.swap.max", "0")
            return
        limit, both = f"{folder}/memory.limit_in_bytes", f"{folder}/memory.memsw.limit_in_bytes"
        files = [limit, both] if self._fs.exists(both) else [limit]
        # memory and swap together may never be below memory alone: raise that one first
        if self._number(both, default=NO_LIMIT_V1) < memory_bytes:
            files.reverse()
        for file in files:
            self._fs.write(file, str(memory_bytes))

    def _lift_memory(self, folder: str, version: int) -> None:
        values = (
            (("memory.swap.max", "max"), ("memory.max", "max"))
            if version == 2
            else (("memory.memsw.limit_in_bytes", "-1"), ("memory.limit_in_bytes", "-1"))
        )
        for name, value in values:
            if self._fs.exists(f"{folder}/{name}"):
                self._fs.write(f"{folder}/{name}", value)

    def set_exclusive(self) -> None:
        """Make it a v2 partition root: the kernel takes its CPUs from everyone outside of it.

        Needs `cpuset.cpus.exclusive` (Linux 6.7), by which no ancestor must be a partition root.

        Raises:
            UnsupportedError: cpuset is on v1, or the kernel is older.
            BackendError: The kernel calls the partition invalid, with its reason; it is undone.
        """
        cpuset = self._need("cpuset")
        folder = cpuset.folder(self.path)
        if not self._fs.exists(f"{folder}/cpuset.cpus.exclusive"):
            raise UnsupportedError(
                "exclusive CPUs need cpuset on cgroup v2 and Linux 6.7",
                cure="boot with the v2 tree, or do without confine_system",
            )
        cpus = self._list("cpuset.cpus", "cpuset.cpus")
        parents = self.path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            file = f"{cpuset.folder('/'.join(parents[:depth]))}/cpuset.cpus.exclusive"
            before = parse_cpu_list(self._fs.read(file) or "")
            self._fs.write(file, format_cpu_list({*before, *cpus}))
        self._fs.write(f"{folder}/cpuset.cpus.exclusive", format_cpu_list(cpus))
        self._fs.write(f"{folder}/cpuset.cpus.partition", "root")
        shown = self._fs.read(f"{folder}/cpuset.cpus.partition")
        if shown != "root":
            self._fs.write(f"{folder}/cpuset.cpus.partition", "member")
            raise BackendError(f"cgroup {self.path}: exclusive CPUs refused: {shown}")

    # --- reading -----------------------------------------------------------------------------

    def present(self) -> bool:
        """Return whether any hierarchy has it."""
        return any(self._fs.exists(h.folder(self.path)) for h in self.hierarchies)

    def state(self) -> CgroupState:
        """Return what the kernel says of it now."""
        lacks = [
            f"no directory in the {h.label or 'v2'} hierarchy"
            for h in self.hierarchies
            if not self._fs.exists(h.folder(self.path))
        ]
        cpus = self._list("cpuset.cpus", "cpuset.cpus")
        if self.cpuset is None:
            lacks.append("no cpuset controller")
        elif not cpus and self._fs.exists(self.cpuset.folder(self.path)):
            lacks.append("no CPUs set")
        inodes = {
            h.label or "v2": number
            for h in self.hierarchies
            if (number := self._fs.inode(h.folder(self.path))) is not None
        }
        return CgroupState(
            path=self.path,
            lacks=tuple(lacks),
            cpus=cpus,
            cpus_effective=self._list("cpuset.effective_cpus", "cpuset.cpus.effective"),
            mems_effective=self._list("cpuset.effective_mems", "cpuset.mems.effective"),
            memory_limit_bytes=self._limit("memory.limit_in_bytes", "memory.max"),
            memory_ceiling_bytes=self._ceiling(),
            memory_used_bytes=self._memory_used(self.memory) if self.memory else None,
            swap_limit_bytes=self._limit("memory.memsw.limit_in_bytes", "memory.swap.max"),
            swap_open=self._swap_open(),
            partition=self._partition_type(),
            inodes=inodes,
        )

    def pids(self) -> tuple[int, ...]:
        """Return the processes in it or below it in any hierarchy, ascending."""
        return tuple(sorted(set().union(*self.pids_by_hierarchy().values())))

    def pids_by_hierarchy(self) -> dict[str, frozenset[int]]:
        """Return, for each hierarchy (label, "v2"), the processes in it or below it there."""
        return {
            h.label or "v2": frozenset(self._tree_pids(h.folder(self.path)))
            for h in self.hierarchies
        }

    def tids(self) -> tuple[int, ...]:
        """Return the threads that the cpuset hierarchy has in it or below it, ascending."""
        if self.cpuset is None:
            return ()
        name = "cgroup.threads" if self.cpuset.version == 2 else "tasks"
        return tuple(sorted(self._tree_pids(self.cpuset.folder(self.path), name)))

    def procs_files(self) -> tuple[str, ...]:
        """Return the `cgroup.procs` files to write a pid to; the cpuset one comes last."""
        return tuple(f"{h.folder(self.path)}/cgroup.procs" for h in self.hierarchies)

    # --- processes ---------------------------------------------------------------------------

    def move(self, pid: int) -> None:
        """Move a process with all its threads into it, in every hierarchy."""
        for file in self.procs_files():
            self._fs.write(file, str(pid))

    def freeze(self, deadline_s: float = FREEZE_DEADLINE_S) -> None:
        """Stop every process in it and return when the kernel says so.

        Raises:
            UnsupportedError: Neither a v2 tree nor a v1 freezer.
            BackendError: It did not stop in time; it runs again then.
        """
        tree = self.topology.unified
        if tree is not None and self._fs.exists(f"{tree.folder(self.path)}/cgroup.freeze"):
            self._freeze_v2(tree.folder(self.path), deadline_s)
            return
        self._freeze_v1(self._need("freezer").folder(self.path), deadline_s)

    def thaw(self) -> None:
        """Let every process in it run again."""
        tree = self.topology.unified
        if tree is not None and self._fs.exists(f"{tree.folder(self.path)}/cgroup.freeze"):
            folder = tree.folder(self.path)
            self._fs.write(f"{folder}/cgroup.freeze", "0")
            if not self._wait_event(folder, "frozen 0", FREEZE_DEADLINE_S):
                raise BackendError(f"cgroup {self.path} still says it is frozen after a thaw")
            return
        self._fs.write(f"{self._need('freezer').folder(self.path)}/freezer.state", "THAWED")

    def kill(self, deadline_s: float = FREEZE_DEADLINE_S) -> None:
        """End every process in it with SIGKILL and return when none is left.

        Raises:
            DeviceBusyError: Some remain after the deadline.
        """
        end = time.monotonic() + deadline_s
        tree = self.topology.unified
        whole = tree is not None and self._fs.exists(f"{tree.folder(self.path)}/cgroup.kill")
        if tree is not None and whole:
            self._fs.write(f"{tree.folder(self.path)}/cgroup.kill", "1")
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise DeviceBusyError(f"cgroup {self.path} still has {holders(pids)} after SIGKILL")
            time.sleep(0.005)

    # --- inside ------------------------------------------------------------------------------

    def _need(self, controller: str) -> Hierarchy:
        hierarchy = self.topology.of(controller)
        if hierarchy is None:
            off = controller in self.topology.disabled
            cure = (
                f"take cgroup_disable={controller} off the kernel command line"
                if off
                else f"mount the v2 tree with it, or v1: mount -t cgroup -o {controller}"
            )
            raise UnsupportedError(f"no {controller} controller on this host", cure=cure)
        return hierarchy

    def _make_path(self, hierarchy: Hierarchy) -> None:
        parent = ""
        for part in self.path.split("/"):
            if hierarchy.version == 2:
                self._delegate(hierarchy, parent)
            child = f"{parent}/{part}"
            self._fs.make(hierarchy.folder(child))
            inner = child.strip("/") != self.path
            if inner and hierarchy.version == 1 and "cpuset" in hierarchy.controllers:
                self._inherit_cpuset(hierarchy, parent, child)
            parent = child

    def _inherit_cpuset(self, hierarchy: Hierarchy, parent: str, child: str) -> None:
        """Give an inner v1 cpuset all of its parent; it starts empty and holds nobody."""
        above, below = hierarchy.folder(parent), hierarchy.folder(child)
        for name, effective in (
            ("cpuset.mems", "cpuset.effective_mems"),
            ("cpuset.cpus", "cpuset.effective_cpus"),
        ):
            wanted = self._fs.read(f"{above}/{effective}") or ""
            if self._fs.read(f"{below}/{name}") != wanted:
                self._fs.write(f"{below}/{name}", wanted)

    def _delegate(self, hierarchy: Hierarchy, path: str) -> None:
        """Hand the controllers down to the children of a v2 cgroup."""
        folder = hierarchy.folder(path)
        on = (self._fs.read(f"{folder}/cgroup.subtree_control") or "").split()
        offered = (self._fs.read(f"{folder}/cgroup.controllers") or "").split()
        wanted = [
            c for c in ("cpuset", "memory", "cpu") if c in hierarchy.controllers and c in offered
        ]
        missing = [c for c in wanted if c not in on]
        if not missing:
            return
        try:
            self._fs.write(f"{folder}/cgroup.subtree_control", " ".join(f"+{c}" for c in missing))
        except DeviceBusyError as exc:
            pids = self._numbers_in(f"{folder}/cgroup.procs")
            raise DeviceBusyError(
                f"cgroup {path or '/'} cannot hand {', '.join(missing)} down while it has"
                f" {holders(pids)}",
                cure="move them into a cgroup of their own",
            ) from exc

    def _refuse_occupied(self, proc_root: str) -> None:
        """Raise if anyone stays in it; one that is just exiting gets a moment."""
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_after_delay,
            wait_exponential,
        )

        retry = Retrying(
            retry=retry_if_exception_type(DeviceBusyError),
            stop=stop_after_delay(0.2),
            wait=wait_exponential(multiplier=0.005, max=0.05),
            reraise=True,
        )
        retry(self._raise_if_occupied, proc_root)

    def _raise_if_occupied(self, proc_root: str) -> None:
        pids = set(self.pids()) | set(self.tids())
        if pids:
            raise DeviceBusyError(
                f"cgroup {self.path} has {holders(sorted(pids), proc_root)}",
                cure="stop them, or move them to another cgroup",
            )

    def _remove_tree(self, folder: str, proc_root: str) -> None:
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_after_delay,
            wait_exponential,
        )

        for child in self._fs.children(folder):
            self._remove_tree(f"{folder}/{child}", proc_root)
        retry = Retrying(
            retry=retry_if_exception_type(DeviceBusyError),
            stop=stop_after_delay(BUSY_RETRY_S),
            wait=wait_exponential(multiplier=0.002, max=0.1),
            reraise=True,
        )
        try:
            retry(self._fs.remove, folder)
        except DeviceBusyError as exc:
            pids = self._tree_pids(folder)
            raise DeviceBusyError(
                f"cgroup {folder} is in use by {holders(sorted(pids), proc_root)}",
                cure="stop them, or move them to another cgroup",
            ) from exc

    def _tree_pids(self, folder: str, name: str = "cgroup.procs") -> set[int]:
        pids = set(self._numbers_in(f"{folder}/{name}"))
        for child in self._fs.children(folder):
            pids |= self._tree_pids(f"{folder}/{child}", name)
        return pids

    def _numbers_in(self, path: str) -> tuple[int, ...]:
        """Return the numbers of a `cgroup.procs`; 0 stands for one outside of our pid namespace."""
        return tuple(int(n) for n in (self._fs.read(path) or "").split() if n.isdigit())

    def _file(self, hierarchy: Hierarchy | None, v1: str, v2: str) -> str | None:
        if hierarchy is None:
            return None
        name = v2 if hierarchy.version == 2 else v1
        return self._fs.read(f"{hierarchy.folder(self.path)}/{name}")

    def _list(self, v1: str, v2: str) -> tuple[int, ...]:
        text = self._file(self.cpuset, v1, v2) or ""
        try:
            return parse_cpu_list(text)
        except ValueError as exc:
            raise BackendError(f"cgroup {self.path}: {v1 if v1 == v2 else v2}: {exc}") from exc

    def _limit(self, v1: str, v2: str) -> int | None:
        return _bytes(self._file(self.memory, v1, v2))

    def _swap_open(self) -> bool:
        cap = self._limit("memory.limit_in_bytes", "memory.max")
        text = self._file(self.memory, "memory.memsw.limit_in_bytes", "memory.swap.max")
        if cap is None or text is None or self.memory is None:  # no cap, or swap is not counted
            return False
        swap = _bytes(text)
        return swap is None or swap > (cap if self.memory.version == 1 else 0)

    def _memory_used(self, hierarchy: Hierarchy) -> int | None:
        return _bytes(self._file(hierarchy, "memory.usage_in_bytes", "memory.current"))

    def _number(self, path: str, default: int) -> int:
        value = _bytes(self._fs.read(path))
        return default if value is None else value

    def _ceiling(self) -> int | None:
        if self.memory is None:
            return None
        limits: list[int] = []
        path = self.path
        name = "memory.max" if self.memory.version == 2 else "memory.limit_in_bytes"
        while path:
            value = _bytes(self._fs.read(f"{self.memory.folder(path)}/{name}"))
            if value is not None:
                limits.append(value)
            path = path.rpartition("/")[0]
        return min(limits, default=None)

    def _partition_type(self) -> str:
        text = self._file(self.cpuset, "cpuset.cpu_exclusive", "cpuset.cpus.partition")
        if text is None:
            return ""
        return {"0": "shared", "1": "exclusive"}.get(text, text)

    def _freeze_v2(self, folder: str, deadline_s: float) -> None:
        self._fs.write(f"{folder}/cgroup.freeze", "1")
        if self._wait_event(folder, "frozen 1", deadline_s):
            return
        self._fs.write(f"{folder}/cgroup.freeze", "0")
        raise BackendError(
            f"cgroup {self.path} did not freeze within {deadline_s:g} s and runs again",
            cure=f"look for a process in uninterruptible sleep: {holders(self.pids())}",
        )

    def _wait_event(self, folder: str, line: str, deadline_s: float) -> bool:
        """Wait until `cgroup.events` has a line; the kernel wakes the poll when it changes."""
        end = time.monotonic() + deadline_s
        poll = select.poll()
        descriptor = os.open(f"{folder}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            poll.register(descriptor, select.POLLPRI)
            while True:
                text = os.pread(descriptor, 4096, 0).decode("ascii", "replace")
                if line in text.splitlines():
                    return True
                rest_s = end - time.monotonic()
                if rest_s <= 0:
                    return False
                poll.poll(min(rest_s, 0.05) * 1000)
        finally:
            os.close(descriptor)

    def _freeze_v1(self, folder: str, deadline_s: float) -> None:
        """Freeze with bounded retries: a fork during the freeze can leave it half way for ever."""
        for _attempt in range(FREEZE_ATTEMPTS):
            self._fs.write(f"{folder}/freezer.state", "FROZEN")
            end = time.monotonic() + deadline_s / FREEZE_ATTEMPTS
            while time.monotonic() < end:
                if self._fs.read(f"{folder}/freezer.state") == "FROZEN":
                    return
                time.sleep(0.001)
            self._fs.write(f"{folder}/freezer.state", "THAWED")  # lets the fork finish
        raise BackendError(
            f"cgroup {self.path} did not freeze in {FREEZE_ATTEMPTS} attempts and runs again",
            cure=f"look for a process in uninterruptible sleep: {holders(self.pids())}",
        )


def holders(pids: Iterable[int], proc_root: str = "/proc", most: int = 8) -> str:
    """Return processes as one clause a person reads: `812 (python3), 813 (sh) and 4 more`."""
    everyone = tuple(pids)
    if not everyone:
        return "no process"
    named = []
    for pid in everyone[:most]:
        comm = printable(read_bytes(f"{proc_root}/{pid}/comm").rstrip(b"\n"))
        named.append(f"{pid} ({comm or 'gone'})" if pid else "one of another pid namespace")
    more = f" and {len(everyone) - most} more" if len(everyone) > most else ""
    return f"process{'es' if len(everyone) > 1 else ''} {', '.join(named)}{more}"


def _bytes(text: str | None) -> int | None:
    if text is None or not text.isdigit():  # absent, or "max"
        return None
    return None if int(text) >= NO_LIMIT_V1 else int(text)
