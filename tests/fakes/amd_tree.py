"""A sysfs, KFD and debugfs tree of AMD accelerators, generated from a simulated machine.

`TreeFiles` is the file system that the backend is given. The files are real, below a directory;
behind them stands a `Machine`: a write to a mode file is its vendor call with its refusals, a
change of the machine re-makes the files, a lost device has none. Scripted faults strike under the
call names `amd.read` and `amd.write`, and those that the machine's own calls have.

`Oddities` are what recorded machines have been seen to do.
"""

from __future__ import annotations

import errno
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from alloy_agent.backends.amd import AmdBackend, AmdOptions
from alloy_agent.backends.amd.files import Files
from alloy_agent.backends.amd.library import Library, Tried
from alloy_agent.backends.amd.metrics import LAYOUTS
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.silicon import refusals, signals
from alloy_agent.silicon.amd import XcdPartition, fits
from alloy_agent.silicon.boards import AmdBoard
from alloy_agent.silicon.boards.amd import partitions_of
from alloy_agent.silicon.boards.shapes import MIB
from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.spec import parse_specs
from alloy_agent.silicon.state import Client, DeviceState

KFD_MAJOR = 234
ERRNO = {
    refusals.InUseError: errno.EBUSY,
    refusals.InvalidArgumentError: errno.EINVAL,
    refusals.NotSupportedError: errno.EOPNOTSUPP,
    refusals.NotPermittedError: errno.EACCES,
    refusals.NotFoundError: errno.ENOENT,
    refusals.LostError: errno.ENODEV,
}
ONES = {"H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}


@dataclass
class Oddities:
    """What this machine's driver does unlike others.

    Attributes:
        function_partition: Partition number in the function bits, not in bits 31:28.
        separator: Of platform devices, `amdgpu_xcp_1` or `amdgpu_xcp.1`.
        domain: PCI domain of all devices.
        same_unique_id: All partitions of a device share one unique id.
        lists_by_xcc: `available_compute_partition` ignores the memory mode (kernel 6.12).
        metrics: Revision of `gpu_metrics`.
        metrics_cut: Bytes cut off the end of it.
        absent: Names of metrics that read all ones.
        unknown_reads: How many reads of the compute mode say UNKNOWN after a switch.
        busy_writes: How many mode writes are refused as busy before one is taken.
        gpu_ids: Whether nodes have a `gpu_id` file.
        v1_rules: Whether tenants are in a v1 devices cgroup.
        cleaner: Whether the driver can run its cleaner shader on demand.
        on_read: Called with each path before it is read.
    """

    function_partition: bool = False
    separator: str = "_"
    domain: int = 0
    same_unique_id: bool = False
    lists_by_xcc: bool = False
    metrics: int = 7
    metrics_cut: int = 0
    absent: frozenset[str] = frozenset()
    unknown_reads: int = 0
    busy_writes: int = 0
    gpu_ids: bool = True
    v1_rules: bool = True
    cleaner: bool = True
    on_read: Callable[[str], None] | None = None


@dataclass
class Tree:
    """One generated node: its machine, its files, and the backend's options for them."""

    machine: Machine
    root: Path
    odd: Oddities = field(default_factory=Oddities)
    comms: dict[int, bytes] = field(default_factory=dict)
    environs: dict[int, dict[str, str]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)  # v2 cgroups of processes
    cleaned: list[tuple[str, int]] = field(default_factory=list)  # device and partition, in order
    rules: dict[int, list[str]] = field(default_factory=dict)
    mqds: str | None = None
    errors: dict[str, dict[str, int]] = field(default_factory=dict)  # block to ce, ue, de

    def __post_init__(self) -> None:
        self.files = TreeFiles(self)
        self._version: tuple[int, int] | None = None
        self._shown = b""
        self._touched = 0
        self._renders = 0
        self._had: dict[Path, bytes] = {}
        self._had_folders: set[Path] = set()
        self.lock = threading.RLock()  # held while files are re-made or read
        self.render()

    @property
    def sys(self) -> Path:
        """Where sysfs is."""
        return self.root / "sys"

    def touch(self) -> None:
        """Render anew at the next look, after an edit of this object."""
        self._touched += 1

    def options(self, **more: object) -> AmdOptions:
        """Return the options of a backend on this node."""
        values: dict[str, object] = {
            "state_dir": str(self.root / "state"),
            "sys_root": str(self.root / "sys"),
            "proc_root": str(self.root / "proc"),
            "dev_root": str(self.root / "dev"),
            "debug_root": str(self.root / "debug"),
            "busy_wait_s": 0.1,
            "settle_wait_s": 0.5,
            "library": "off",
        }
        return AmdOptions(**(values | more))  # type: ignore[arg-type]

    def backend(
        self, library: Library | None = None, cgroups: CgroupFs | None = None, **more: object
    ) -> AmdBackend:
        """Return a backend on this node."""
        none = Library(lambda: Tried(trouble="none in this test"))
        options = self.options(**more)
        return AmdBackend(options, files=self.files, library=library or none, cgroups=cgroups)

    def pci(self, device: str) -> Path:
        """Return the PCI directory of a device by its id in the backend."""
        return self.sys / "bus/pci/devices" / device.removeprefix("amd-")

    def id_of(self, state: DeviceState) -> str:
        """Return the backend's id of a machine's device."""
        return f"amd-{self.bus(state)}"

    def bus(self, state: DeviceState) -> str:
        """Return its PCI address in this tree."""
        return f"{self.odd.domain:04x}:{state.bus.partition(':')[2]}"

    def device_at(self, path: str) -> DeviceState | None:
        """Return the device whose PCI directory a path is in."""
        _, found, rest = path.partition("/bus/pci/devices/")
        bus = rest.partition("/")[0]
        return next((d for d in self.machine.state.devices if found and self.bus(d) == bus), None)

    # --- rendering ---

    def refresh(self) -> None:
        """Render anew if the machine or this object changed."""
        self.machine.refresh()
        if self._version == (self.machine.version, self._touched):
            return
        with self.lock:
            if self._shown == self._visible():
                self._version = self.machine.version, self._touched
            else:
                self.render()

    def _visible(self) -> bytes:
        """Return what of the machine the files show; scripted faults and events are not."""
        state = self.machine.state
        return msgspec.msgpack.encode((state.devices, state.clients, state.boot, self._touched))

    def render(self) -> None:
        """Write every file as the machine stands."""
        self._version = (self.machine.version, self._touched)
        self._shown = self._visible()
        self._renders += 1
        self._wanted: dict[Path, bytes] = {}
        self._folders: set[Path] = set()
        kfd = self.sys / "class/kfd/kfd"
        proc = self.root / "proc"
        self._put(proc / "sys/kernel/random/boot_id", f"fake-boot-{self.machine.state.boot}")
        self._put(proc / "sys/kernel/osrelease", "6.18.0-fake")
        self._put(proc / "self/mountinfo", "".join(self._mounts()))
        self._put(kfd / "dev", f"{KFD_MAJOR}:0")
        self._put(self.root / "dev/kfd", "")
        self._put(self.sys / "module/amdgpu/version", self.machine.state.devices[0].driver)
        self._put(kfd / "topology/generation_id", str(1 + self._renders))
        number = self._cpus(kfd)
        for state in self.machine.state.devices:
            number = self._device(kfd, state, number)
        self._links(kfd)
        self._processes(kfd)
        if self.mqds is not None:
            self._put(self.root / "debug/kfd/mqds", self.mqds)
        self._sync()

    def _put(self, path: Path, content: str | bytes) -> None:
        """Want a file to be there after this rendering."""
        self._wanted[path] = content if isinstance(content, bytes) else content.encode()

    def _folder(self, path: Path) -> None:
        """Want a directory to be there, empty or not."""
        self._folders.add(path)

    def _sync(self) -> None:
        """Bring the disk from what was wanted before to what is wanted now: few files differ."""
        folders = self._folders | {p for path in self._wanted for p in path.parents}
        for path in self._had_folders - folders:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._had.keys() - self._wanted.keys():
            path.unlink(missing_ok=True)
        for path in self._folders - self._had_folders:
            path.mkdir(parents=True, exist_ok=True)
        for path, raw in self._wanted.items():
            if self._had.get(path) != raw:
                put(path, raw)
        self._had, self._had_folders = self._wanted, folders

    def _mounts(self) -> list[str]:
        lines = [f"30 1 0:30 / {self.root}/cg2 rw - cgroup2 cgroup2 rw\n"]
        if self.odd.v1_rules:
            lines.append(f"31 1 0:31 / {self.root}/cg1 rw - cgroup cgroup rw,devices\n")
        return lines

    def _cpus(self, kfd: Path) -> int:
        for number in range(2):
            node = kfd / f"topology/nodes/{number}"
            self._put(node / "gpu_id", "0")
            self._put(node / "properties", "cpu_cores_count 64\nsimd_count 0\n")
        return 2

    def _device(self, kfd: Path, state: DeviceState, number: int) -> int:
        pci = self.sys / "bus/pci/devices" / self.bus(state)
        if state.lost:
            return number
        board = self.machine.amd(state.id).board
        self._primary(pci, state, board)
        live = self.machine.amd_partitions(state)
        for piece in live:
            if piece.render_minor is None:
                continue
            self._node(kfd / f"topology/nodes/{number}", state, board, piece)
            name = f"renderD{piece.render_minor}"
            self._put(self.root / "dev/dri" / name, "")
            self._put(self.sys / "class/drm" / name / "dev", f"226:{piece.render_minor}")
            if piece.number:
                platform = f"amdgpu_xcp{self.odd.separator}{number}"
                self._put(self.sys / "devices/platform" / platform / "drm" / name / "dev", "226:0")
            number += 1
        return number

    def _primary(self, pci: Path, state: DeviceState, board: AmdBoard) -> None:
        self._folder(pci / "drm")
        self._put(pci / "device", f"0x{board.device_id:04x}")
        self._put(pci / "numa_node", str(state.numa))
        self._put(pci / "product_name", board.product)
        self._put(pci / "unique_id", state.serial.removeprefix("0x"))
        self._put(pci / "mem_info_vram_total", str(board.memory_mib * MIB))
        used = sum(client.memory_bytes for client in self.machine.clients(state.id))
        self._put(pci / "mem_info_vram_used", str(used))
        self._put(pci / "hwmon/hwmon7/power1_cap", str(int(board.power_cap_w * 1e6)))
        self._put(pci / "hwmon/hwmon7/temp2_crit", str(int(board.temperature_limit_c * 1e3)))
        self._put(pci / "hwmon/hwmon7/temp1_input", "0")
        self._put(pci / "gpu_metrics", "")
        for block, counts in (
            {"umc": {"ue": state.ecc_uncorrected, "ce": 0}} | self.errors
        ).items():
            lines = "".join(f"{kind}: {count}\n" for kind, count in counts.items())
            self._put(pci / f"ras/{block}_err_count", lines)
        if not board.compute_modes:
            self._put(pci / "current_compute_partition", "Not supported")
            return
        offered = board.compute_modes
        if not self.odd.lists_by_xcc:
            offered = tuple(m for m in offered if fits(board, m, state.memory_mode))
            self._put(
                pci / "compute_partition_config/supported_xcp_configs",
                ", ".join(board.compute_modes),
            )
        self._put(pci / "available_compute_partition", ", ".join(offered))
        self._put(pci / "current_compute_partition", state.compute_mode)
        self._put(pci / "current_memory_partition", state.memory_mode)
        self._put(pci / "available_memory_partition", ", ".join(board.memory_modes))
        self._put(pci / "enforce_isolation", " ".join(str(value) for value in state.isolation))
        if self.odd.cleaner:
            self._put(pci / "run_cleaner_shader", "")

    def _node(self, node: Path, state: DeviceState, board: AmdBoard, piece: XcdPartition) -> None:
        _, bus, rest = state.bus.split(":")
        location = int(bus, 16) << 8 | int(rest.partition(".")[0], 16) << 3
        location |= piece.number if self.odd.function_partition else piece.number << 28
        unique = int(state.serial, 16) + (0 if self.odd.same_unique_id else piece.number)
        xccs = piece.xcds
        if self.odd.gpu_ids:
            self._put(node / "gpu_id", str(piece.kfd_gpu_id))
        properties = {
            "simd_count": piece.cus * 4,
            "simd_per_cu": 4,
            "array_count": 4 * xccs,
            "cu_per_simd_array": 10,
            "gfx_target_version": board.gfx_target_version,
            "vendor_id": 4098,
            "device_id": board.device_id,
            "location_id": location,
            "domain": self.odd.domain,
            "drm_render_minor": piece.render_minor,
            "hive_id": int(state.hive, 16) if state.hive else 0,
            "unique_id": unique,
            "num_xcc": xccs,
        }
        self._put(node / "properties", "".join(f"{k} {v}\n" for k, v in properties.items()))
        self._put(
            node / "mem_banks/0/properties",
            f"heap_type 1\nsize_in_bytes {piece.memory_bytes}\nflags 0\nwidth 8192\n",
        )
        self._folder(node / "io_links")

    def _links(self, kfd: Path) -> None:
        """Link GPU nodes of a hive: within a device all, over devices like with like.

        The kernel lists every pair; a part of them keeps large trees quick to make.
        """
        nodes: dict[int, tuple[str, int, int]] = {}
        for path, raw in list(self._wanted.items()):
            if path.name != "properties" or path.parents[1].name != "nodes":
                continue
            words = dict(line.split() for line in raw.decode().splitlines() if line)
            if int(words.get("hive_id", 0)):
                where = int(words["location_id"])
                place, part = where & 0xFFF8, where >> 28 | where & 7
                nodes[int(path.parent.name)] = (words["hive_id"], place, part)
        for number, (hive, place, part) in nodes.items():
            index = 0
            for other, (hive2, place2, part2) in nodes.items():
                if other == number or hive2 != hive or (place != place2 and part != part2):
                    continue
                weight = 13 if place == place2 else 15
                self._put(
                    kfd / f"topology/nodes/{number}/io_links/{index}/properties",
                    f"type 11\nnode_from {number}\nnode_to {other}\nweight {weight}\n"
                    "max_bandwidth 64000\n",
                )
                index += 1

    def _processes(self, kfd: Path) -> None:
        self._folder(kfd / "proc")
        for client in self.machine.state.clients:
            state = self.machine.device(client.device)
            if state.lost:
                continue
            self._process(kfd / "proc" / str(client.pid), client, state)

    def _process(self, base: Path, client: Client, state: DeviceState) -> None:
        live = self.machine.amd_partitions(state)
        piece = live[min(client.instance or 0, len(live) - 1)]
        self._folder(base / "queues")
        if not client.monitor:
            self._put(base / f"queues/{client.pid % 100}/gpuid", str(piece.kfd_gpu_id))
            self._put(base / f"vram_{piece.kfd_gpu_id}", str(client.memory_bytes))
            busy = int(client.load_ratio * piece.cus)
            self._put(base / f"stats_{piece.kfd_gpu_id}/cu_occupancy", str(busy))
        proc = self.root / "proc" / str(client.pid)
        self._put(proc / "comm", self.comms.get(client.pid, client.name.encode()) + b"\n")
        environ = self.environs.get(client.pid)
        if environ is not None:
            self._put(proc / "environ", "\0".join(f"{k}={v}" for k, v in environ.items()))
        place = self.places.get(client.pid, f"/tenant-{client.pid}")
        self._put(proc / "cgroup", f"5:devices:/tenant-{client.pid}\n0::{place}\n")
        rules = self.rules.get(client.pid)
        if rules is None:
            rules = [f"c {KFD_MAJOR}:0 rw", f"c 226:{piece.render_minor} rw"]
        if self.odd.v1_rules and state.fenced:
            self._put(self.root / f"cg1/tenant-{client.pid}/devices.list", "\n".join(rules))
        elif self.odd.v1_rules:
            self._put(self.root / f"cg1/tenant-{client.pid}/devices.list", "a *:* rwm")

    def metrics(self, state: DeviceState) -> bytes:
        """Return the `gpu_metrics` table of a device at this moment."""
        layout = LAYOUTS[self.odd.metrics]
        raw = bytearray(b"\xff" * layout.sizes[-1])
        struct.pack_into("<HBB", raw, 0, layout.sizes[-1], 1, self.odd.metrics)
        now_s = self.machine.now_s()
        model = self.machine.power_model(state)
        values = {
            "temperature_hotspot": int(model.limit_c - model.headroom_c(now_s)),
            "temperature_mem": 45,
            "current_socket_power": int(model.power_w(now_s)),
            "average_socket_power": int(model.power_w(now_s)),
            "average_gfx_activity": 100,
            "average_umc_activity": 20,
            "energy_accumulator": int(model.energy_at(now_s) * 65536),
            "system_clock_counter": int(now_s * 1e9),
            "firmware_timestamp": int(now_s * 1e8),
            "accumulation_counter": int(now_s * 1000) & 0xFFFFFFFF,
            "ppt_residency_acc": int(model.throttle_at(now_s) * 1000) & 0xFFFFFFFF,
            "num_partition": partitions_of(state.compute_mode, 8) if state.compute_mode else 1,
        }
        for name, (kind, at) in layout.fields.items():
            if name in values and name not in self.odd.absent:
                struct.pack_into(f"<{kind}", raw, at, values[name])
        if layout.xcp_sizes and "gfx_busy_inst" not in self.odd.absent:
            self._busy(raw, state, layout.xcp_at, layout.xcp_sizes[-1], layout.busy_acc_at)
        return bytes(raw[: len(raw) - self.odd.metrics_cut])

    def _busy(self, raw: bytearray, state: DeviceState, at: int, step: int, acc_at: int) -> None:
        now_s = self.machine.now_s()
        for piece in self.machine.amd_partitions(state):
            load = sum(
                client.load_ratio
                for client in self.machine.clients(state.id)
                if (client.instance or 0) == piece.number and not client.monitor
            )
            key = f"{state.id}/{piece.number}"
            busy = signals.wave(self.machine.state.seed, key, load).at(now_s)
            for xcc in range(piece.xcds):
                start = at + step * piece.number
                struct.pack_into("<I", raw, start + 4 * xcc, int(busy * 100))
                struct.pack_into("<Q", raw, start + acc_at + 8 * xcc, int(busy * now_s))


class TreeFiles(Files):
    """The tree as the backend reads and writes it. `opened` keeps every path, in order."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.opened: list[str] = []
        self.handles: dict[int, str] = {}

    def data(self, path: str, limit: int = 65536) -> bytes:
        """Return a file's bytes as the machine has them now."""
        self._enter("amd.read", path)
        if path.endswith("/gpu_metrics"):
            return self._metrics(path)[:limit]
        odd = self._tree.odd
        if path.endswith("/current_compute_partition") and odd.unknown_reads > 0:
            odd.unknown_reads -= 1
            return b"UNKNOWN\n"
        with self._tree.lock:
            return super().data(path, limit)

    def open(self, path: str) -> int:
        """Return a descriptor; the file's content is made at each read."""
        self._enter("amd.read", path)
        with self._tree.lock:
            handle = super().open(path)
        self.handles[handle] = path
        return handle

    def again(self, handle: int, limit: int) -> bytes:
        """Return the present content."""
        path = self.handles[handle]
        self._enter("amd.read", path)
        return self._metrics(path)[:limit]

    def close(self, handle: int) -> None:
        """Close a descriptor."""
        del self.handles[handle]
        super().close(handle)

    def write(self, path: str, text: str) -> None:
        """Make the vendor call that a file stands for."""
        state = self._enter("amd.write", path)
        if state is None:
            raise OSError(errno.EACCES, "Permission denied", path)
        gpu = self._tree.machine.amd(state.id)
        name = path.rpartition("/")[2]
        with refused():
            if name == "current_compute_partition":
                self._busy(state)
                gpu.set_compute_mode(text)
            elif name == "current_memory_partition":
                gpu.request_memory_mode(text)
            elif name == "enforce_isolation":
                gpu.set_isolation([int(word) for word in text.split()])
            elif name == "run_cleaner_shader" and self._tree.odd.cleaner:
                if int(text) >= len(self._tree.machine.amd_partitions(state)):
                    raise OSError(errno.EINVAL, "Invalid argument", path)
                self._tree.cleaned.append((self._tree.id_of(state), int(text)))
            else:
                raise OSError(errno.EACCES, "Permission denied", path)

    def _busy(self, state: DeviceState) -> None:
        """Refuse while this very process has a descriptor on the device, as on a real node."""
        odd = self._tree.odd
        bus = self._tree.bus(state)
        if odd.busy_writes > 0 or any(f"/{bus}/" in path for path in self.handles.values()):
            odd.busy_writes = max(0, odd.busy_writes - 1)
            raise OSError(errno.EBUSY, "Device or resource busy")

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        self._enter("amd.read", path)
        with self._tree.lock:
            return super().names(path)

    def mark(self, path: str) -> int:
        """Return an inode that a restart of the driver changes, as the kernel's does."""
        self._enter("amd.read", path)
        with self._tree.lock:
            inode = super().mark(path)
        return inode + (self._tree.machine.state.boot << 40) if path.endswith("/drm") else inode

    def _enter(self, call: str, path: str) -> DeviceState | None:
        tree = self._tree
        if tree.odd.on_read is not None:
            tree.odd.on_read(path)
        self.opened.append(path)
        state = tree.device_at(path)
        with refused():
            if state is not None and tree.machine.state.faults:
                tree.machine.enter(call, state.id)
        tree.refresh()
        if state is not None and tree.machine.device(state.id).lost:
            raise OSError(errno.ENODEV, "No such device", path)
        return state

    def _metrics(self, path: str) -> bytes:
        state = self._tree.device_at(path)
        if state is None:
            raise OSError(errno.ENOENT, "No such file or directory", path)
        return self._tree.metrics(self._tree.machine.device(state.id))


class refused:  # noqa: N801 - used like a function
    """Raises a machine's refusal as the errno that the kernel gives."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, refusals.RefusalError):
            number = ERRNO.get(type(error), errno.EIO)
            raise OSError(number, str(error)) from error


def put(path: Path, content: str | bytes) -> None:
    """Write a file, and its directories."""
    raw = content if isinstance(content, bytes) else content.encode()
    try:
        path.write_bytes(raw)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def tree_of(
    spec: str | list[str], root: Path, odd: Oddities | None = None, **settings: object
) -> Tree:
    """Return a generated node of the boards that `--fake` options describe."""
    specs = [spec] if isinstance(spec, str) else spec
    machine = open_machine(parse_specs(specs), root / "machine")

    def change(state: object) -> None:
        for name, value in settings.items():
            setattr(state, name, value)

    if settings:
        machine.edit(change)
    return Tree(machine, root, odd or Oddities())
