"""A host with Neuron devices, generated from simulated silicon: `/sys`, `/dev`, `/proc`, tools.

The tree has the driver's own paths and formats, of either generation; `neuron-ls` and
`neuron-monitor` are real programs that print what the machine shows now. A node in `/dev` is a
file with its number in it, since making character devices needs privileges; `TreeNumbers` reads
it where the kernel would be asked.

Source: aws-neuron-driver 2.24.7 and the sysfs user guide (paths, formats, file modes); Neuron
tools documentation (documents of the two programs).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alloy_agent.backends.neuron import NeuronBackend, NeuronOptions
from alloy_agent.model import Partition
from alloy_agent.silicon.boards import BOARDS, NeuronInstance
from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.neuron import physical_cores
from alloy_agent.silicon.spec import parse_specs
from alloy_agent.silicon.state import Client, DeviceState

MAJOR = 248
BOOT_ID = "6f1d3f0e-7a55-4c1c-9a50-2f1f7d9b3c11"
MEMORY_CATEGORIES = (
    "model_code",
    "tensors",
    "constants",
    "runtime_memory",
    "collectives",
    "uncategorized",
)
STATUS_NAMES = (
    "success",
    "failure",
    "timeout",
    "exec_bad_input",
    "hw_error",
    "execute_completed_with_error",
    "execute_failed_to_queue",
    "hw_collectives_error",
    "hw_hbm_ue_error",
    "hw_nc_ue_error",
    "hw_dma_abort_error",
    "hw_repairable_hbm_ue_error",
)

LS_PROGRAM = """#!{python} -ISE
import pathlib, sys, time
folder = pathlib.Path({folder!r})
behaviour = (folder / "ls.behaviour").read_text()
new = behaviour == "new"
if sys.argv[1:] not in ([["--output-format", "json"]] if new else [["--json-output"], ["-j"]]):
    print("unknown option"); sys.exit(1)
if new:
    listed = (folder / "ls.json").read_text()
    print('{{"instance": {{"type": "x"}}, "devices": ' + listed + "}}"); sys.exit(0)
if behaviour == "hang":
    time.sleep(60)
if behaviour == "fail":
    print("Failed to talk to the driver", file=sys.stderr); sys.exit(1)
if behaviour == "garbage":
    print('[{{"neuron_device": '); sys.exit(0)
sys.stdout.write((folder / "ls.json").read_text())
"""

MONITOR_PROGRAM = """#!{python} -ISE
import json, pathlib, sys, time
folder = pathlib.Path({folder!r})
assert sys.argv[1] == "-c"
settings = json.loads(pathlib.Path(sys.argv[2]).read_text())
period_s = float(settings["period"].removesuffix("s")) * {speed}
with (folder / "monitor.starts").open("a") as starts:
    starts.write("x")
while True:
    behaviour = (folder / "monitor.behaviour").read_text()
    line = (folder / "monitor.json").read_text()
    if behaviour == "exit":
        sys.exit(3)
    if behaviour == "stop":
        time.sleep(60)
    if behaviour == "half":
        sys.stdout.write(line[: len(line) // 2]); sys.stdout.flush(); sys.exit(0)
    if behaviour == "flood":
        sys.stdout.write((line + "\\n") * 200); sys.stdout.flush(); continue
    if behaviour == "long":
        sys.stdout.write("x" * 5_000_000 + "\\n")
    if behaviour == "garbage":
        sys.stdout.write("{{not json\\n[]\\n\\xff\\n")
    sys.stdout.write(line + "\\n"); sys.stdout.flush()
    time.sleep(period_s)
"""


class TreeNumbers:
    """Device numbers of a generated tree: the text of the file that a link leads to."""

    def __init__(self, dev: Path) -> None:
        self._dev = str(dev)

    def rdev(self, path: str) -> int | None:
        """Return the number behind a path within the generated `/dev`, or None."""
        target = os.path.realpath(path)
        if not target.startswith(self._dev + "/"):
            return None
        try:
            major, minor = Path(target).read_text().split(":")
        except (OSError, ValueError):
            return None
        return os.makedev(int(major), int(minor))


class FakeNeuronHost:
    """One instance with its trees, programs and processes."""

    def __init__(self, root: Path, instance: str, *, driver: str = "2.30.2.0", tools: bool = True):
        """Generate the host.

        Args:
            root: Below which everything is.
            instance: A name of the board tables.
            driver: Version; below 2.28 some files are for root and newer ones are not there.
            tools: Whether the vendor's programs are installed.
        """
        self.root, self.driver = root, driver
        self.machine = open_machine(parse_specs([instance]))
        board = BOARDS[self.machine.state.devices[0].board]
        assert isinstance(board, NeuronInstance)
        self.board = board
        self.sys, self.dev, self.proc = root / "sys", root / "dev", root / "proc"
        self.tools, self.state_dir = root / "tools", root / "state"
        self.kernel_log = root / "kmsg"
        self._environ: dict[int, dict[str, str]] = {}
        self._reported: dict[int, dict[str, Any]] = {}
        for folder in (self.sys, self.dev, self.proc, self.tools):
            folder.mkdir(parents=True)
        self.kernel_log.write_text("")
        self.set_product_name(board.name)
        _proc_files(self.proc)
        self.load_driver()
        if tools:
            self.install_tools()
        self.sync()

    # --- the backend over it ---

    def options(self, **more: Any) -> NeuronOptions:
        """Return the backend's options for this host."""
        given: dict[str, Any] = {
            "state_dir": str(self.state_dir),
            "sys_root": str(self.sys),
            "proc_root": str(self.proc),
            "tools_dir": str(self.tools),
            "default_lnc_file": str(self.root / "logical_nc_config"),
            "product_name_file": str(self.root / "product_name"),
            "kernel_log": str(self.kernel_log),
        }
        return NeuronOptions(**(given | more))

    def open(self, **more: Any) -> NeuronBackend:
        """Return a backend on this host."""
        return NeuronBackend(self.options(**more), TreeNumbers(self.dev))

    # --- the driver's tree ---

    @property
    def devices(self) -> list[DeviceState]:
        """The devices of the simulated machine."""
        return self.machine.state.devices

    def number(self, device: DeviceState) -> int:
        """Return N of /dev/neuronN."""
        return self.machine.neuron_number(device)

    def folder(self, number: int) -> Path:
        """Return the sysfs directory of a device."""
        return self.sys / f"devices/virtual/neuron_device/neuron{number}"

    def core(self, number: int, core: int) -> Path:
        """Return the sysfs directory of a physical core."""
        return self.folder(number) / f"neuron_core{core}"

    def set_product_name(self, text: str) -> None:
        """Let the firmware tell an instance type."""
        (self.root / "product_name").write_text(text + "\n")

    def load_driver(self) -> None:
        """Let the module come up with all of its devices."""
        _write(self.sys / "module/neuron/version", f"{self.driver}\n")
        for device in self.devices:
            self._device_tree(device)

    def unload_driver(self) -> None:
        """Take the module and its devices away."""
        shutil.rmtree(self.sys / "module", ignore_errors=True)
        shutil.rmtree(self.sys / "devices", ignore_errors=True)

    def lose(self, device_id: str) -> None:
        """Let a device vanish from sysfs and /dev."""
        number = self.number(self.machine.device(device_id))
        shutil.rmtree(self.folder(number))
        (self.dev / f"neuron{number}").unlink()

    def _device_tree(self, device: DeviceState) -> None:
        number, folder = self.number(device), self.folder(self.number(device))
        new = _version(self.driver) >= (2, 28)
        peers = ", ".join(map(str, self.board.neighbours[number]))
        mode = 0o444 if new else 0o400
        _write(self.dev / f"neuron{number}", f"{MAJOR}:{number}")
        _write(folder / "dev", f"{MAJOR}:{number}\n")
        _write(folder / "connected_devices", peers + "\n", mode)
        _write(folder / "core_count", str(self.board.cores), mode)
        _write(folder / "reset", "1\n", 0o600)
        _write(folder / "info/serial_number", device.serial + "\n")
        architecture = folder / "info/architecture"
        _write(architecture / "arch_type", self.board.arch + "\n")
        _write(architecture / "instance_type", self.board.instance_type + "\n")
        _write(architecture / "device_name", self.board.product + "\n")
        hardware = folder / "stats/hardware"
        for name in ("sram", "mem", "mem_repairable"):
            kind, _, rest = name.partition("_")
            _write(hardware / f"{kind}_ecc_{rest + '_' if rest else ''}uncorrected", "0\n")
        if _version(self.driver) >= (2, 30):
            for name in ("sram_ecc_corrected", "mem_ecc_corrected"):
                _write(hardware / name, "0\n")
            _write(hardware / "health_status/unhealthy_components", "\n")
        _write(
            folder / "stats/power/utilization", "POWER_STATUS_VALID,1796017200,11.20,63.75,48.02\n"
        )
        for name in ("tensors", "dma_buffers"):
            _counter(folder / f"stats/memory_usage/host_mem/{name}", 0)
        for core in range(self.board.cores):
            self._core_tree(self.core(number, core))

    def _core_tree(self, folder: Path) -> None:
        _write(folder / "info/architecture/arch_type", self.board.core_arch + "\n")
        for name in STATUS_NAMES:
            _counter(folder / f"stats/status/{name}", 0)
        for name in ("inference_count", "reset_req_count", "reset_fail_count"):
            _counter(folder / f"stats/other_info/{name}", 0)
        memory = folder / "stats/memory_usage/device_mem"
        _counter(memory, 0)
        for name in MEMORY_CATEGORIES:
            _counter(memory / name, 0)
        self.set_cycles(folder, busy=0, idle=1000)

    def set_cycles(self, folder: Path, *, busy: int, idle: int) -> None:
        """Set the cycle counters of a core's four row groups."""
        rows = "".join(f"{row},{busy},0,{idle}\n" for row in range(4))
        _write(
            folder / "stats/tensor_engine/pe_cntrs", f"xrow_grp,mm_active,wl_active,idle\n{rows}"
        )

    def set_status(self, number: int, core: int, name: str, total: int) -> None:
        """Set one of a core's status counters."""
        _counter(self.core(number, core) / f"stats/status/{name}", total)

    def set_memory(self, number: int, core: int, used_bytes: int) -> None:
        """Set the device memory in use by a core; `present` is only the last change."""
        memory = self.core(number, core) / "stats/memory_usage/device_mem"
        _counter(memory, used_bytes)
        _counter(memory / "tensors", used_bytes)

    # --- resets ---

    @contextlib.contextmanager
    def driver_that_resets(
        self, *, fails: bool = False, silent: bool = False, hangs: bool = False
    ) -> Iterator[None]:
        """Act on writes to `reset` meanwhile, in the driver's own time.

        Args:
            fails: The device does not come back.
            silent: Nothing is done, as while somebody has the node open.
            hangs: It stays in the middle.
        """
        over = threading.Event()
        files = {self.number(d): self.folder(self.number(d)) / "reset" for d in self.devices}
        written = {number: file.stat().st_mtime_ns for number, file in files.items()}

        def serve() -> None:
            while not over.wait(0.005):
                for number, file in files.items():
                    changed = file.stat().st_mtime_ns
                    if changed == written[number]:
                        continue
                    held = self.machine.holders(self._device(number).id)
                    if not (silent or held):
                        self._reset(number, over, fails=fails, hangs=hangs)
                    written[number] = file.stat().st_mtime_ns

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _reset(self, number: int, over: threading.Event, *, fails: bool, hangs: bool) -> None:
        file = self.folder(number) / "reset"
        for core in range(self.board.cores):
            self._bump(number, core, "reset_req_count")
        _write(file, "0\n", 0o600)
        over.wait(60.0 if hangs else 0.4)
        if fails:
            for core in range(self.board.cores):
                self._bump(number, core, "reset_fail_count")
        _write(file, "2\n" if fails else "1\n", 0o600)

    def _bump(self, number: int, core: int, name: str) -> None:
        folder = self.core(number, core) / f"stats/other_info/{name}"
        if folder.exists():  # no driver counts what it does not tell
            _counter(folder, int((folder / "total").read_text()) + 1)

    def _device(self, number: int) -> DeviceState:
        return next(d for d in self.devices if self.number(d) == number)

    # --- processes ---

    def start(
        self,
        pid: int,
        number: int,
        cores: Iterable[int] = (),
        *,
        environ: Mapping[str, str] | None = None,
        modes: tuple[int, ...] = (os.O_WRONLY, os.O_RDWR),
        comm: str = "python3",
        cgroup: str = "/",
        reported: bool = True,
        node: str = "",
        memory_bytes: int = 1 << 30,
    ) -> None:
        """Let a process hold a device.

        Args:
            pid: Its number.
            number: Of the device.
            cores: Logical cores within the device that it really uses.
            environ: What it was started with.
            modes: How it has the node open; control descriptors are write-only.
            comm: Its name.
            cgroup: Its devices cgroup.
            reported: Whether the tools show it.
            node: Name of its descriptors' target, where that is not the device's own node.
            memory_bytes: Device memory that it holds.
        """
        device = next(d for d in self.devices if self.number(d) == number)
        client = Client(
            pid=pid, device=device.id, name=comm, cores=tuple(cores), memory_bytes=memory_bytes
        )
        self.machine.start_process(client)
        self._environ[pid] = dict(environ or {})
        target = self.dev / (node or f"neuron{number}")
        folder = self.proc / str(pid)
        if not folder.exists():
            _process(folder, pid, comm, cgroup)
        first = len(list((folder / "fd").iterdir())) + 3
        for offset, flags in enumerate(modes):
            (folder / "fd" / str(first + offset)).symlink_to(target)
            _write(folder / f"fdinfo/{first + offset}", f"pos:\t0\nflags:\t0{flags:o}\n")
        text = "".join(f"{name}={value}\0" for name, value in self._environ[pid].items())
        _write(folder / "environ", text)
        if reported:
            per_device = self.board.cores // device.lnc
            self._reported.setdefault(pid, {})["cores"] = {
                *self._reported.get(pid, {}).get("cores", ()),
                *(number * per_device + core for core in cores),
            }
        for core in cores:
            for unit in physical_cores(self.board, device, core, 1):
                self.set_memory(number, unit, memory_bytes // max(1, len(tuple(cores))))
        self.sync()

    def enter(self, partition: Partition, pid: int = 4242, **more: Any) -> None:
        """Start a tenant's process as its access says: its node, its variables, its cores."""
        number = int(partition.access.device_nodes[0].removeprefix("/dev/neuron"))
        place = partition.placement
        self.start(
            pid,
            number,
            more.pop("cores", range(place.start, place.stop)),
            environ=more.pop("environ", partition.access.environment),
            **more,
        )

    def end(self, pid: int) -> None:
        """End a process: its descriptors, its memory and its reports go."""
        for client in [c for c in self.machine.state.clients if c.pid == pid]:
            device = self.machine.device(client.device)
            for core in client.cores:
                for unit in physical_cores(self.board, device, core, 1):
                    self.set_memory(self.number(device), unit, 0)
        self.machine.stop_process(pid)
        self._reported.pop(pid, None)
        shutil.rmtree(self.proc / str(pid), ignore_errors=True)
        self.sync()

    def devices_cgroup(self, path: str, rules: Iterable[str]) -> None:
        """Make a v1 devices cgroup with the given rules in `devices.list`."""
        _write(self.root / f"cgroup/devices{path}/devices.list", "\n".join(rules) + "\n")

    # --- the programs ---

    def install_tools(self) -> None:
        """Install `neuron-ls` and `neuron-monitor`."""
        for name, program in (("neuron-ls", LS_PROGRAM), ("neuron-monitor", MONITOR_PROGRAM)):
            text = program.format(python=sys.executable, folder=str(self.tools), speed=0.05)
            _write(self.tools / name, text, 0o755)
            self.behave(name.removeprefix("neuron-"), "")

    def behave(self, tool: str, how: str) -> None:
        """Let a program misbehave from now on: hang, fail, stop, exit, half, flood, garbage."""
        _write(self.tools / f"{tool}.behaviour", how)

    def monitor_starts(self) -> int:
        """Return how often the monitor was started."""
        file = self.tools / "monitor.starts"
        return len(file.read_text()) if file.exists() else 0

    def sync(self) -> None:
        """Write what the two programs print now."""
        listed = [self._listed(device) for device in self.devices]
        _write(self.tools / "ls.json", json.dumps(listed))
        _write(self.tools / "monitor.json", json.dumps(self._report()))

    def _listed(self, device: DeviceState) -> dict[str, Any]:
        number, lnc = self.number(device), device.lnc
        cores = self.board.cores // lnc
        entry: dict[str, Any] = {
            "neuron_device": number,
            "bdf": device.bus,
            "cpu_affinity": "0-7",
            "numa_node": str(device.numa),
            "connected_to": list(self.board.neighbours[number]) or None,
            "nc_count": cores,
            "memory_size": self.board.memory_bytes,
            "neuroncore_ids": list(range(number * cores, (number + 1) * cores)),
            "neuron_processes": [
                {"pid": c.pid, "command": c.name, "neuron_runtime_version": "2.32"}
                for c in self.machine.clients(device.id)
                if c.pid in self._reported
            ],
        }
        if len(self.board.lnc) > 1:
            entry["logical_neuroncore_config"] = lnc
        return entry

    def _report(self) -> dict[str, Any]:
        runtimes = [
            {
                "pid": pid,
                "address": "",
                "neuron_runtime_tag": self._environ.get(pid, {}).get("NEURON_PROCESS_TAG", ""),
                "error": "",
                "report": _runtime_report(sorted(told.get("cores", ()))),
            }
            for pid, told in self._reported.items()
        ]
        return {
            "neuron_runtime_data": runtimes,
            "system_data": {"neuron_hw_counters": {"period": 5.0, "neuron_devices": []}},
            "instance_info": {"instance_type": self.board.name, "error": ""},
            "neuron_hardware_info": {
                "neuron_device_count": len(self.devices),
                "logical_neuroncore_config": self.devices[0].lnc,
                "error": "",
            },
        }


def _runtime_report(cores: list[int]) -> dict[str, Any]:
    latency = {"p0": 0.01, "p50": 0.02, "p99": 0.05, "p100": 0.06}
    return {
        "neuroncore_counters": {
            "period": 1.0,
            "neuroncores_in_use": {
                str(core): {"neuroncore_utilization": 75.0, "flops": 10**12} for core in cores
            },
            "error": "",
        },
        "execution_stats": {
            "period": 1.0,
            "error_summary": {"generic": 0, "hardware": 0},
            "execution_summary": {"completed": 24, "timed_out": 0},
            "latency_stats": {"total_latency": latency, "device_latency": latency},
            "error": "",
        },
        "memory_used": {
            "period": 1.0,
            "neuron_runtime_used_bytes": {
                "host": 1 << 20,
                "neuron_device": len(cores) << 20,
                "usage_breakdown": {
                    "neuroncore_memory_usage": {str(core): {"tensors": 1 << 20} for core in cores}
                },
            },
            "error": "",
        },
    }


def _proc_files(proc: Path) -> None:
    _write(proc / "sys/kernel/random/boot_id", BOOT_ID + "\n")
    mount = proc.parent / "cgroup/devices"
    _write(mount / "devices.list", "a *:* rwm\n")
    _write(
        proc / "self/mountinfo",
        f"30 24 0:26 / {mount} rw,nosuid - cgroup cgroup rw,devices\n",
    )
    _write(proc / "cgroups", "#subsys_name\thierarchy\tnum_cgroups\tenabled\ndevices\t5\t1\t1\n")
    _process(proc / "1", 1, "init", "/")


def _process(folder: Path, pid: int, comm: str, cgroup: str) -> None:
    (folder / "fd").mkdir(parents=True)
    fields = ["0"] * 50
    fields[0], fields[1] = "S", "1"
    fields[19] = str(pid * 7)
    _write(folder / "stat", f"{pid} ({comm}) {' '.join(fields)}\n")
    _write(folder / "status", f"Name:\t{comm}\nUid:\t0\t0\t0\t0\nCpus_allowed_list:\t0-1\n")
    _write(folder / "comm", comm + "\n")
    _write(folder / "cgroup", f"5:devices:{cgroup}\n")
    _write(folder / "maps", "")
    _write(folder / "environ", "")


def _counter(folder: Path, total: int) -> None:
    """Set a counter; `present` is the last change, which readers must not take for the use."""
    _write(folder / "total", f"{total}\n")
    if total:
        _write(folder / "present", "1\n")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file whole, as sysfs shows one value at a time."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if mode != 0o644:
            path.chmod(mode)
        return
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    aside.chmod(stat.S_IMODE(mode))
    aside.replace(path)
