"""The facts that checks of a GPU need; names as every backend reports them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.backends.nvidia import mps
from alloy_agent.backends.nvidia.gpu import Gpu
from alloy_agent.backends.nvidia.instances import Piece
from alloy_agent.backends.nvidia.processes import fence_of, name_of, open_nodes, v2_folder
from alloy_agent.backends.nvidia.shares import Limit, ShareRecord, Shares
from alloy_agent.backends.nvidia.sighting import sighted
from alloy_agent.backends.nvidia.signals import used_bytes
from alloy_agent.backends.nvidia.view import piece_id
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.model import Device, Fact, Json, Partition, Quality, Share

GEOMETRY: Final = "nvmlDeviceGetGpuInstances, nvmlGpuInstanceGetInfo"
PROCESSES: Final = "nvmlDeviceGet{Compute,Graphics,MPSCompute}RunningProcesses"
UNTOLD: Final = "this driver does not tell which processes compute on the GPU"
LIMITS: Final = "nvmlDeviceGetMemoryLimits_v1, or dmem.max of the cgroups"
FENCE: Final = "/proc/<pid>: cgroup, device rules or programs, /dev, capabilities"
# Oldest driver that knows the architecture's MIG. Source: MIG User Guide, "Supported GPUs".
FLOORS: Final[dict[int, str]] = {7: "450.80.02", 9: "525.53", 10: "570.133.20"}

# Why clocks are held back by something that co-tenants share. Source: nvml.h,
# nvmlClocksEventReason*.
THROTTLES: Final[dict[int, str]] = {
    0x4: "software power cap",
    0x8: "hardware slow-down",
    0x10: "sync boost",
    0x20: "software thermal slow-down",
    0x40: "hardware thermal slow-down",
    0x80: "power brake",
}

Process = tuple[int, int | None, int | None]  # pid, GPU instance, bytes


class Facts:
    """Collects the facts of one reading."""

    def __init__(self) -> None:
        self.found: list[Fact] = []
        self._now_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    def add(self, subject: str, name: str, value: Json, method: str) -> None:
        """Add what was seen."""
        self.found.append(
            Fact(subject=subject, name=name, value=value, method=method, read_at_s=self._now_s)
        )

    def absent(
        self,
        subject: str,
        name: str,
        reason: str,
        method: str,
        quality: Quality = Quality.NOT_SUPPORTED,
    ) -> None:
        """Add that there is nothing to see, and why."""
        self.found.append(
            Fact(
                subject=subject,
                name=name,
                quality=quality,
                reason=reason,
                method=method,
                read_at_s=self._now_s,
            )
        )


class Reading(NamedTuple):
    """One GPU as it was read for one set of facts."""

    gpu: Gpu
    seen: Device
    partitions: tuple[Partition, ...]
    pieces: tuple[Piece, ...]
    proc: Path
    shares: Shares
    programs: DevicePrograms
    mps: mps.Asker


def collect(reading: Reading) -> tuple[Fact, ...]:
    """Return all facts of one GPU and its partitions."""
    facts = Facts()
    told = reading.gpu.told_processes()
    in_shares = _in_shares(reading)
    seen = sighted(reading.proc, (pid for pid, _, _ in told or ()), frozenset(in_shares or ()))
    processes = tuple((seen[pid].pid, instance, used) for pid, instance, used in told or ())
    notes = {sight.pid: sight.note for sight in seen.values() if sight.note}
    places = _places(processes, reading, in_shares)
    _device_facts(facts, reading)
    _mps_fact(facts, reading, processes)
    if told is None:
        facts.absent(reading.gpu.id, "device.clients", UNTOLD, PROCESSES)
    else:
        _clients_fact(facts, reading, places, notes)
    for partition in reading.partitions:
        inside = [process for process in processes if places[process[0]] == partition.id]
        piece = next((p for p in reading.pieces if piece_id(reading.gpu, p) == partition.id), None)
        _partition_facts(facts, partition, None if told is None else inside, reading, notes)
        if partition.share is Share.EXCLUSIVE:
            _memory_fact(facts, partition, piece, inside)
        else:
            _share_memory_fact(facts, reading, partition)
        if piece is not None:
            facts.add(partition.id, "mig.instance", _mig(piece), GEOMETRY)
    return tuple(facts.found)


def _places(
    processes: tuple[Process, ...], reading: Reading, shared: dict[int, str] | None
) -> dict[int, str]:
    """Return, by pid, the partition that a process works in; "" is in none."""
    if shared is not None:
        return {pid: shared.get(pid, "") for pid, _, _ in processes}
    by_instance = {p.locator.get("gi"): str(p.id) for p in reading.partitions}
    return {
        pid: by_instance.get(None if instance is None else str(instance), "")
        for pid, instance, _ in processes
    }


def _in_shares(reading: Reading) -> dict[int, str] | None:
    """Return, by pid, the share whose cgroup a process is in; None: the GPU is not shared."""
    records = {record.serial: record for record in reading.shares.of(reading.gpu.id)}
    found: dict[int, str] | None = None
    for partition in reading.partitions:
        record = records.get(partition.locator.get("share", ""))
        if record is not None:
            found = found or {}
            found |= dict.fromkeys(reading.shares.pids(record), str(partition.id))
    return found


def _device_facts(facts: Facts, reading: Reading) -> None:
    gpu, seen = reading.gpu, reading.seen
    geometry: list[Json] = [
        {
            "id": str(partition.id),
            "profile": partition.profile,
            "start": partition.placement.start,
            "size": partition.placement.size,
            "incarnation": partition.incarnation,
        }
        for partition in reading.partitions
    ]
    facts.add(gpu.id, "device.geometry", geometry, GEOMETRY)
    modes: dict[str, Json] = {
        mode.kind.value: {"current": mode.current, "pending": mode.pending} for mode in seen.modes
    }
    facts.add(gpu.id, "device.modes", modes, "nvmlDeviceGetMigMode")
    if seen.driver:
        facts.add(gpu.id, "driver.version", seen.driver, "nvmlSystemGetDriverVersion")
    _unattributed_fact(facts, reading)
    _throttling_fact(facts, gpu)
    architecture = gpu.maybe("nvmlDeviceGetArchitecture")
    floor = FLOORS.get(-1 if architecture is None else int(architecture))
    if floor:
        facts.add(gpu.id, "driver.floor", floor, "table of architectures")
    else:
        reason = "no oldest safe driver is known for this GPU"
        facts.absent(gpu.id, "driver.floor", reason, "table of architectures")


def _unattributed_fact(facts: Facts, reading: Reading) -> None:
    """Add the memory that is used and that no process owns: never given to the nearest tenant."""
    method = f"nvmlDeviceGetMemoryInfo_v2 less {PROCESSES}"
    used = used_bytes(reading.gpu)
    if used is None:
        reason = "this driver does not tell its own reserve from what processes use"
        facts.absent(reading.gpu.id, "device.memory", reason, method)
        return
    owned = sum(bytes_ or 0 for _, _, bytes_ in reading.gpu.processes())
    value: Json = {"used_bytes": used, "unattributed_bytes": max(0, used - owned)}
    facts.add(reading.gpu.id, "device.memory", value, method)


def _throttling_fact(facts: Facts, gpu: Gpu) -> None:
    method = "nvmlDeviceGetCurrentClocksEventReasons"
    reasons = gpu.maybe(method)
    if reasons is None:  # its name before driver R535
        method = "nvmlDeviceGetCurrentClocksThrottleReasons"
        reasons = gpu.maybe(method)
    if reasons is None:
        reason = "this GPU does not tell why its clocks are low"
        facts.absent(gpu.id, "device.throttling", reason, method)
        return
    active: list[Json] = [text for bit, text in THROTTLES.items() if int(reasons) & bit]
    facts.add(gpu.id, "device.throttling", {"reasons": active}, method)


COMPUTE_MODES: Final = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive"}


def _mps_fact(facts: Facts, reading: Reading, processes: tuple[Process, ...]) -> None:
    """Add what an MPS control daemon, if one runs, gives each client: asked of it where it can."""
    control, running = mps.daemons(reading.proc)
    if control is None:
        method = "/proc/<pid>: no nvidia-cuda-mps-control"
        facts.add(reading.gpu.id, "mps.control", {"running": False}, method)
        return
    answer = reading.mps.ask(control)
    asked = isinstance(answer, mps.Answer)
    servers = answer.servers if isinstance(answer, mps.Answer) else ()
    default = answer.thread_percentage if isinstance(answer, mps.Answer) else None
    of_client = {pid: server for server in servers for pid in server.clients or ()}
    known = {server.pid for server in servers} | set(running)
    mode = reading.gpu.maybe("nvmlDeviceGetComputeMode")
    value: Json = {
        "running": True,
        "pid": control.pid,
        "uid": control.uid,
        "asked": asked,
        "reason": "" if isinstance(answer, mps.Answer) else answer,
        "thread_percentage": default if asked else control.thread_percentage,
        "pinned_memory": control.pinned_memory,
        "compute_mode": None if mode is None else COMPUTE_MODES.get(int(mode), f"{int(mode)}"),
        "servers": [*sorted(known)],
        "clients": [
            {
                "pid": pid,
                "thread_percentage": mps.thread_percentage(reading.proc, pid),
                "server": of_client[pid].pid if pid in of_client else None,
                "server_percentage": of_client[pid].thread_percentage if pid in of_client else None,
            }
            for pid, _, _ in processes
            if pid not in known
        ],
    }
    method = "nvidia-cuda-mps-control over the daemon's pipes" if asked else "/proc/<pid>/environ"
    facts.add(reading.gpu.id, "mps.control", value, method)


def _clients_fact(
    facts: Facts, reading: Reading, places: dict[int, str], notes: dict[int, str]
) -> None:
    clients: list[Json] = [
        {
            "pid": pid,
            "comm": name_of(reading.proc, pid),
            "partition": place,
            "granted": bool(place),
            "monitor": False,
            "unseen": notes.get(pid, ""),
        }
        for pid, place in places.items()
    ]
    facts.add(reading.gpu.id, "device.clients", clients, PROCESSES)


def _partition_facts(
    facts: Facts,
    partition: Partition,
    told: list[Process] | None,
    reading: Reading,
    notes: dict[int, str],
) -> None:
    """Add what is seen of a partition; `told` None: the driver does not list its processes."""
    facts.add(partition.id, "partition.exists", True, GEOMETRY)
    inside = told or []
    processes: list[Json] = [
        {
            "pid": pid,
            "comm": name_of(reading.proc, pid),
            "memory_bytes": used,
            "nodes": [str(node) for node in open_nodes(reading.proc, pid)],
            "unseen": notes.get(pid, ""),
        }
        for pid, _, used in inside
    ]
    if told is None:
        facts.absent(partition.id, "partition.processes", UNTOLD, PROCESSES)
    else:
        facts.add(partition.id, "partition.processes", processes, PROCESSES)
    own: list[Json] = list(own_nodes(partition))
    if own or partition.share is not Share.EXCLUSIVE:
        facts.add(partition.id, "partition.own_nodes", own, "mig-minors")
    else:
        reason = "the driver's list of capability nodes cannot be read"
        facts.absent(partition.id, "partition.own_nodes", reason, "mig-minors")
    unseen = next((notes[pid] for pid, _, _ in inside if pid in notes), "")
    if unseen:
        facts.absent(partition.id, "cgroup.device_fence", unseen, FENCE, Quality.NOT_PERMITTED)
        return
    _fence_fact(facts, partition, inside, reading)


def own_nodes(partition: Partition) -> tuple[str, ...]:
    """Return the device nodes that no neighbour may open."""
    nodes = partition.access.device_nodes
    if partition.share is not Share.EXCLUSIVE:
        return ()
    if "gi" in partition.locator:
        return tuple(node for node in nodes if node.startswith("/dev/nvidia-caps/"))
    return tuple(node for node in nodes[:1] if node.removeprefix("/dev/nvidia").isdecimal())


def _fence_fact(
    facts: Facts, partition: Partition, inside: list[Process], reading: Reading
) -> None:
    """Add the weakest fence among the processes inside: one that is not held is none."""
    if not inside:
        reason = "no process is inside, so there is no fence to look at"
        facts.absent(partition.id, "cgroup.device_fence", reason, FENCE)
        return
    fences = [fence_of(reading.proc, pid, reading.programs) for pid, _, _ in inside]
    unknown = next((fence.unknown for fence in fences if fence.unknown), "")
    if unknown:
        facts.absent(partition.id, "cgroup.device_fence", unknown, FENCE, Quality.NOT_PERMITTED)
        return
    held = all(fence.by for fence in fences)
    by = "; ".join(sorted({fence.by for fence in fences})) if held else ""
    names = {node for fence in fences for node in fence.allowed}
    names |= {
        node for pid, _, _ in inside for node in open_nodes(reading.proc, pid)
    }  # open is open
    allowed: list[Json] = ["*"] if "*" in names else [*sorted(names)]
    facts.add(partition.id, "cgroup.device_fence", {"by": by, "allowed": allowed}, FENCE)


def _memory_fact(
    facts: Facts, partition: Partition, piece: Piece | None, inside: list[Process]
) -> None:
    if any(used is None for _, _, used in inside):
        reason = "the driver does not tell the memory of every process"
        facts.absent(partition.id, "partition.memory", reason, PROCESSES)
        return
    value: Json = {
        "limit_bytes": partition.memory_bytes,
        "used_bytes": sum(used or 0 for _, _, used in inside),
        "enforced_by": "instance" if piece is not None else "device",
    }
    facts.add(partition.id, "partition.memory", value, PROCESSES)


def _share_memory_fact(facts: Facts, reading: Reading, partition: Partition) -> None:
    """Add the limits in force on a share's cgroup, and on those that its processes are in."""
    record = reading.shares.find(reading.gpu.id, partition.profile, "")
    limit = None if record is None else reading.shares.limit(reading.gpu, record)
    if record is None or limit is None:
        reason = "neither driver nor kernel caps device memory of cgroups here"
        facts.absent(partition.id, "partition.memory", reason, LIMITS)
        facts.absent(partition.id, "cgroup.device_memory", reason, LIMITS)
        return
    value: Json = {
        "limit_bytes": limit.hard_bytes,
        "used_bytes": limit.used_bytes,
        "enforced_by": "none" if limit.hard_bytes is None else limit.by,
    }
    facts.add(partition.id, "partition.memory", value, LIMITS)
    caps = list(_caps(reading, record, limit))
    facts.add(partition.id, "cgroup.device_memory", caps, LIMITS)


def _caps(reading: Reading, record: ShareRecord, limit: Limit) -> Iterator[Json]:
    """Yield the cap of each cgroup that processes of a share are in."""
    groups, bus = reading.shares.groups, reading.gpu.identity().bus
    own = groups.folder(record.device, record.profile) or ""
    folders = {v2_folder(reading.proc, pid) or own for pid in reading.shares.pids(record)}
    for folder in sorted(folders):
        cap = None if groups.memory is None else groups.memory.cap(folder, bus)
        bounds = [limit.hard_bytes, None if cap is None else cap.ceiling_bytes]
        yield {
            "cgroup": folder.removeprefix(groups.mount or ""),
            "max_bytes": limit.hard_bytes if cap is None else cap.max_bytes,
            "ceiling_bytes": min((b for b in bounds if b is not None), default=None),
            "current_bytes": limit.used_bytes if cap is None else cap.current_bytes,
            "by": limit.by,
        }


def _mig(piece: Piece) -> Json:
    first = piece.compute[0] if piece.compute else None
    return {
        "uuid": "" if first is None else first.uuid,
        "gpu_instance": piece.ident,
        "instance_slices": piece.shape.compute_slices,
        "compute_instances": len(piece.compute),
        "compute_slices": 0 if first is None else first.slices,
    }
