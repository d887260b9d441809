"""A generated host: proc, sys and cgroup trees in a folder, with the kernel's own refusals.

Stands in for hosts that are not at hand (pure v2, pure v1). It is not kinder than the kernel: a v1
cpuset without CPUs takes no process, a child cpuset has no more than its parent, a v2 cgroup with
delegated controllers takes no process, an occupied cgroup is not removed, a limit above its
memory-and-swap limit is invalid.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from alloy_agent.host.cgroupfs import refused
from alloy_agent.host.cgroups import CgroupFs
from alloy_agent.host.cpulist import format_cpu_list, parse_cpu_list

NO_LIMIT = str((1 << 63) - 4096)
CGROUPS = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n"


class CrashError(BaseException):
    """The agent was killed here."""


class FakeKernel(CgroupFs):
    """Cgroup trees with behaviour. `crash_at`: dies before the n-th change, counted from 1."""

    def __init__(self, mounts: dict[str, int], controllers: dict[str, tuple[str, ...]]) -> None:
        self.mounts = mounts  # mount point to version
        self.controllers = controllers
        self.crash_at = 0
        self.changes = 0
        self.freezing_reads = 0  # how often a v1 freezer still says FREEZING
        self.frozen_by_v2 = True  # whether a v2 freeze succeeds
        self.memory_used: dict[str, int] = {}
        self.partition_answer = "root"
        self._inode = 0
        self._inodes: dict[str, int] = {}

    # --- what CgroupFs offers --------------------------------------------------------------

    def make(self, folder: str) -> bool:
        self._change()
        path = Path(folder)
        if path.exists():
            return False
        if not path.parent.exists():
            raise refused(OSError(errno.ENOENT, "No such file"), f"making cgroup {folder}")
        path.mkdir()
        self._inode += 1
        self._inodes[folder] = self._inode
        self.populate(folder)
        return True

    def remove(self, folder: str) -> bool:
        self._change()
        path = Path(folder)
        if not path.exists():
            return False
        if self.children(folder) or self._procs(folder):
            raise refused(OSError(errno.EBUSY, "Device or resource busy"), f"removing {folder}")
        shutil.rmtree(path)
        return True

    def write(self, path: str, text: str) -> None:
        self._change()
        file = Path(path)
        if not file.exists():
            raise refused(OSError(errno.ENOENT, "No such file"), f"writing {path}")
        handler = getattr(self, "_on_" + file.name.replace(".", "_"), None)
        try:
            shown = handler(str(file.parent), text) if handler else text
        except OSError as exc:
            raise refused(exc, f"writing {text!r} to {path}") from exc
        if shown is not None:
            file.write_text(shown + "\n")

    def inode(self, folder: str) -> int | None:
        return self._inodes.get(folder, 1) if self.exists(folder) else None

    def read(self, path: str) -> str | None:
        if path.endswith("/freezer.state") and self.freezing_reads > 0:
            self.freezing_reads -= 1
            return "FREEZING"
        for name in ("memory.usage_in_bytes", "memory.current"):
            if path.endswith(f"/{name}") and Path(path).exists():
                return str(self.memory_used.get(str(Path(path).parent), 0))
        return super().read(path)

    # --- files -----------------------------------------------------------------------------

    def populate(self, folder: str, root: bool = False) -> None:
        """Put a new cgroup's files in place."""
        mount = self._mount(folder)
        if self.mounts[mount] == 1:
            self._populate_v1(folder, self.controllers[mount], root)
            return
        offered = self.controllers[mount] if root else self._delegated(str(Path(folder).parent))
        base = {
            "cgroup.procs": "",
            "cgroup.threads": "",
            "cgroup.controllers": " ".join(offered),
            "cgroup.subtree_control": "",
        }
        if not root:
            base |= {
                "cgroup.events": "populated 0\nfrozen 0",
                "cgroup.freeze": "0",
                "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0",
            }
        _put(folder, base)
        self._populate_v2(folder, offered, root)

    def place(self, folder: str, pid: int) -> None:
        """Put a process somewhere without the kernel's questions."""
        file = Path(folder) / "cgroup.procs"
        file.write_text(file.read_text() + f"{pid}\n")
        tasks = Path(folder) / "tasks"
        if tasks.exists():
            tasks.write_text(tasks.read_text() + f"{pid}\n")

    def end(self, pid: int) -> None:
        """Let a process end: it is in no cgroup any more."""
        for mount in self.mounts:
            for name in ("cgroup.procs", "tasks"):
                for file in Path(mount).rglob(name):
                    left = [number for number in file.read_text().split() if number != str(pid)]
                    file.write_text("".join(f"{number}\n" for number in left))

    def _populate_v1(self, folder: str, controllers: tuple[str, ...], root: bool) -> None:
        files = {"cgroup.procs": "", "tasks": ""}
        if "cpuset" in controllers:
            every = self._effective(str(Path(folder).parent), "cpus") if not root else "0-7"
            nodes = self._effective(str(Path(folder).parent), "mems") if not root else "0-1"
            files |= {
                "cpuset.cpus": every if root else "",
                "cpuset.mems": nodes if root else "",
                "cpuset.effective_cpus": every,
                "cpuset.effective_mems": nodes,
                "cpuset.cpu_exclusive": "0",
            }
        if "memory" in controllers:
            files |= {
                "memory.limit_in_bytes": NO_LIMIT,
                "memory.memsw.limit_in_bytes": NO_LIMIT,
                "memory.usage_in_bytes": "0",
            }
        if "freezer" in controllers and not root:
            files["freezer.state"] = "THAWED"
        if "cpuacct" in controllers:
            files["cpuacct.usage"] = "0"
        _put(folder, files)

    def _populate_v2(self, folder: str, controllers: tuple[str, ...], root: bool) -> None:
        above = str(Path(folder).parent)
        if "cpuset" in controllers:
            files = {
                "cpuset.cpus.effective": "0-7" if root else self._effective(above, "cpus"),
                "cpuset.mems.effective": "0-1" if root else self._effective(above, "mems"),
            }
            if not root:
                files |= {
                    "cpuset.cpus": "",
                    "cpuset.mems": "",
                    "cpuset.cpus.exclusive": "",
                    "cpuset.cpus.partition": "member",
                }
            _put(folder, files)
        if "memory" in controllers and not root:
            _put(
                folder,
                {"memory.max": "max", "memory.swap.max": "max", "memory.current": "0"},
            )

    def _mount(self, folder: str) -> str:
        return max((m for m in self.mounts if folder.startswith(m)), key=len)

    def _delegated(self, folder: str) -> tuple[str, ...]:
        return tuple((super().read(f"{folder}/cgroup.subtree_control") or "").split())

    def _effective(self, folder: str, kind: str) -> str:
        v2 = self.mounts[self._mount(folder)] == 2
        name = f"cpuset.{kind}.effective" if v2 else f"cpuset.effective_{kind}"
        return super().read(f"{folder}/{name}") or ""

    def _procs(self, folder: str) -> list[str]:
        return (super().read(f"{folder}/cgroup.procs") or "").split()

    def _change(self) -> None:
        self.changes += 1
        if self.changes == self.crash_at:
            raise CrashError

    # --- what the kernel does on a write -----------------------------------------------------

    def _on_cpuset_cpus(self, folder: str, text: str) -> str:
        return self._cpuset(folder, text, "cpus")

    def _on_cpuset_mems(self, folder: str, text: str) -> str:
        return self._cpuset(folder, text, "mems")

    def _cpuset(self, folder: str, text: str, kind: str) -> str:
        wanted = set(parse_cpu_list(text))
        above = str(Path(folder).parent)
        if self.mounts[self._mount(folder)] == 1:
            parents = set(parse_cpu_list(super().read(f"{above}/cpuset.{kind}") or ""))
            if not wanted <= parents:
                raise OSError(errno.EACCES, "Permission denied")
            if not wanted and self._procs(folder):
                raise OSError(errno.ENOSPC, "No space left on device")
            effective = f"cpuset.effective_{kind}"
        else:
            parents = set(parse_cpu_list(self._effective(above, kind)))
            effective = f"cpuset.{kind}.effective"
        shown = (wanted & parents) or parents
        (Path(folder) / effective).write_text(format_cpu_list(shown) + "\n")
        return format_cpu_list(wanted)

    def _on_cgroup_procs(self, folder: str, text: str) -> None:
        mount = self._mount(folder)
        if self.mounts[mount] == 2:
            if folder != mount and self._delegated(folder):
                raise OSError(errno.EBUSY, "Device or resource busy")
        elif "cpuset" in self.controllers[mount]:
            cpus = super().read(f"{folder}/cpuset.cpus")
            if not cpus or not super().read(f"{folder}/cpuset.mems"):
                raise OSError(errno.ENOSPC, "No space left on device")
        for file in Path(mount).rglob("cgroup.procs"):
            left = [pid for pid in file.read_text().split() if pid != text]
            file.write_text("".join(f"{pid}\n" for pid in left))
            tasks = file.parent / "tasks"
            if tasks.exists():
                tasks.write_text(file.read_text())
        self.place(folder, int(text))

    def _on_cgroup_subtree_control(self, folder: str, text: str) -> str:
        offered = (super().read(f"{folder}/cgroup.controllers") or "").split()
        on = list(self._delegated(folder))
        if folder != self._mount(folder) and self._procs(folder):
            raise OSError(errno.EBUSY, "Device or resource busy")
        for word in text.split():
            if word[1:] not in offered:
                raise OSError(errno.ENOENT, "No such file or directory")
            on.append(word[1:])
        new = tuple(c for c in on if c not in self._delegated(folder))
        for child in self.children(folder):
            self._populate_v2(f"{folder}/{child}", new, root=False)
            (Path(folder) / child / "cgroup.controllers").write_text(" ".join(on) + "\n")
        return " ".join(on)

    def _on_memory_limit_in_bytes(self, folder: str, text: str) -> str:
        if text == "-1":
            return NO_LIMIT
        both = int(super().read(f"{folder}/memory.memsw.limit_in_bytes") or NO_LIMIT)
        if int(text) > both:
            raise OSError(errno.EINVAL, "Invalid argument")
        return str(int(text) // 4096 * 4096)

    def _on_memory_memsw_limit_in_bytes(self, folder: str, text: str) -> str:
        if text == "-1":
            return NO_LIMIT
        limit = int(super().read(f"{folder}/memory.limit_in_bytes") or "0")
        if int(text) < limit:
            raise OSError(errno.EINVAL, "Invalid argument")
        return str(int(text) // 4096 * 4096)

    def _on_memory_max(self, _folder: str, text: str) -> str:
        return text if text == "max" else str(int(text) // 4096 * 4096)

    def _on_cgroup_freeze(self, folder: str, text: str) -> str:
        if text == "0" or self.frozen_by_v2:
            (Path(folder) / "cgroup.events").write_text(f"populated 1\nfrozen {text}\n")
        return text

    def _on_cpuset_cpus_partition(self, folder: str, text: str) -> str:
        return self.partition_answer if text == "root" else text


def _put(folder: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (Path(folder) / name).write_text(f"{text}\n" if text else "")


class FakeHost:
    """Paths of a generated host with 2 NUMA nodes of 4 CPUs in 2 cores with SMT each.

    Node 0 has CPUs 0, 1, 4, 5 (cores 0+4, 1+5), node 1 has CPUs 2, 3, 6, 7.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.root = folder
        self.kind = kind
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.kernel = self._cgroups(kind)
        self._system()

    def options(self) -> dict[str, object]:
        """Return the arguments that make a backend look at this host."""
        return {
            "proc_root": str(self.proc),
            "sys_root": str(self.sys),
            "host_root": str(self.root),
            "fs": self.kernel,
        }

    def mount(self, controller: str) -> str:
        """Return the mount that has a controller ("" for the v2 tree)."""
        for mount, controllers in self.kernel.controllers.items():
            v2 = self.kernel.mounts[mount] == 2
            if controller in controllers or (not controller and v2):
                return mount
        raise KeyError(controller)

    def process(
        self,
        pid: int,
        *,
        comm: str = "tenant",
        cpus: str = "0-7",
        cgroup: str = "/",
        last_cpu: int = 0,
        flags: int = 0,
    ) -> None:
        """Put one process into the generated proc tree."""
        folder = self.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        zeros = ["0"] * 44
        fields = ["S", "1", *zeros]
        fields[6], fields[11], fields[12] = str(flags), "5", "5"
        fields[17], fields[19], fields[36] = "1", str(1000 + pid), str(last_cpu)
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (folder / "status").write_text(
            f"Name:\t{comm}\nUid:\t1000\t1000\t1000\t1000\nCpus_allowed_list:\t{cpus}\n"
        )
        (folder / "comm").write_text(f"{comm}\n")
        lines = []
        for number, (mount, version) in enumerate(self.kernel.mounts.items()):
            name = "" if version == 2 else ",".join(self.kernel.controllers[mount])
            lines.append(f"{0 if version == 2 else number + 1}:{name}:{cgroup}")
        (folder / "cgroup").write_text("\n".join(lines) + "\n")

    def _cgroups(self, kind: str) -> FakeKernel:
        base = f"{self.root}/sys/fs/cgroup"
        v1 = {
            f"{base}/cpuset": ("cpuset",),
            f"{base}/memory": ("memory",),
            f"{base}/freezer": ("freezer",),
            f"{base}/cpuacct": ("cpuacct",),
        }
        trees: dict[str, tuple[str, ...]]
        if kind == "v2":
            trees, versions = {base: ("cpuset", "cpu", "memory")}, {base: 2}
        else:
            trees, versions = dict(v1), dict.fromkeys(v1, 1)
            if kind == "hybrid":
                trees[f"{base}/unified"] = ()
                versions[f"{base}/unified"] = 2
        kernel = FakeKernel(versions, trees)
        for mount in trees:
            Path(mount).mkdir(parents=True)
            kernel.populate(mount, root=True)
        self._mountinfo(kernel)
        return kernel

    def _mountinfo(self, kernel: FakeKernel) -> None:
        (self.proc / "self").mkdir(parents=True)
        lines = ["22 1 0:20 / /proc rw - proc proc rw"]
        for number, (mount, version) in enumerate(kernel.mounts.items(), start=30):
            inside = mount.removeprefix(str(self.root))
            options = ",".join(("rw", *kernel.controllers[mount])) if version == 1 else "rw"
            kind = "cgroup" if version == 1 else "cgroup2"
            lines.append(f"{number} 22 0:{number} / {inside} rw,nosuid - {kind} {kind} {options}")
        (self.proc / "self/mountinfo").write_text("\n".join(lines) + "\n")
        names = ("cpuset", "cpu", "cpuacct", "memory", "freezer")
        rows = [f"{name}\t{i}\t1\t1" for i, name in enumerate(names)] + ["pids\t0\t1\t0"]
        (self.proc / "cgroups").write_text(CGROUPS + "\n".join(rows) + "\n")

    def _system(self) -> None:
        boot = self.proc / "sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
        (self.proc / "sys/kernel/osrelease").write_text("6.8.0-generic\n")
        (self.proc / "swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n")
        (self.proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Test CPU 8\n")
        stat = "".join(f"cpu{n} 100 0 100 800 0 0 0 0 0 0\n" for n in range(8))
        (self.proc / "stat").write_text(f"cpu 800 0 800 6400 0 0 0 0 0 0\n{stat}intr 1\n")
        cpu = self.sys / "devices/system/cpu"
        node = self.sys / "devices/system/node"
        for number in range(8):
            topology = cpu / f"cpu{number}/topology"
            topology.mkdir(parents=True)
            first = number % 4
            (topology / "core_cpus_list").write_text(f"{first},{first + 4}\n")
        (cpu / "online").write_text("0-7\n")
        node.mkdir(parents=True)
        (node / "online").write_text("0-1\n")
        for number, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
            folder = node / f"node{number}"
            folder.mkdir()
            (folder / "cpulist").write_text(cpus + "\n")
            (folder / "distance").write_text("10 21\n" if number == 0 else "21 10\n")
            (folder / "meminfo").write_text(
                f"Node {number} MemTotal: 16777216 kB\nNode {number} MemFree: 8388608 kB\n"
                f"Node {number} FilePages: 4194304 kB\n"
            )
