"""The facts that checks of AMD partitions need, read now, each with how it was read.

Beside the names that all backends share:

| name | subject | value |
| --- | --- | --- |
| `amd.cu_plan` | share | `{mask, cus, overlaps}`: what was granted, and whose mask has CUs of it |
| `amd.cu_masks` | share | list, for each process: the mask as granted, as configured, in force |
| `amd.isolation` | device | numbers in `enforce_isolation`, one for each partition |
| `amd.idle_clients` | device | processes that opened KFD and have nothing on any device |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from alloy_agent.backends.amd import fence, mqd
from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.ledger import DeviceEntry
from alloy_agent.backends.amd.masks import parse
from alloy_agent.backends.amd.modes import memory_domains
from alloy_agent.backends.amd.pieces import Sight
from alloy_agent.backends.amd.processes import KfdProcess, comm_of, kfd_processes, unlisted
from alloy_agent.errors import ConfigError
from alloy_agent.host.devicememory import LACKS
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.host.pidspace import initial_namespace
from alloy_agent.host.sharegroups import ShareGroups
from alloy_agent.model import Device, Fact, Json, Partition, Quality, Share

OPENERS_SHOWN: Final = 8
FOREIGN: Final = (
    "the kernel tells pids of the host, and this agent is in a pid namespace of its own "
    "(run it with hostPID: true)"
)
_MASK_NAMES: Final = ("HSA_CU_MASK", "HSA_CU_MASK_SKIP_INIT", "ROC_GLOBAL_CU_MASK")


# by PCI address: what holds the clocks back now, and how that is known; None: nobody tells
Throttling = Callable[[str], tuple[tuple[str, ...], str] | None]


class Tools(NamedTuple):
    """What outlives one reading: answers of the kernel that are kept, and the shares' cgroups."""

    programs: DevicePrograms | None = None
    throttling: Throttling | None = None
    groups: ShareGroups = ShareGroups(None, "")


class Collector:
    """Facts of one reading."""

    def __init__(
        self,
        files: Files,
        roots: Roots,
        now_s: float,
        tools: Tools | None = None,
    ) -> None:
        self._files, self._roots, self._now_s = files, roots, now_s
        self._tools = tools or Tools()
        self._untold = ""  # why nobody can tell who is on the device
        self._found: list[Fact] = []
        self._placed: dict[int, str] = {}  # pids in the cgroups of shares

    def collect(
        self,
        sight: Sight,
        device: Device,
        partitions: tuple[Partition, ...],
        noted: DeviceEntry,
    ) -> tuple[Fact, ...]:
        """Return all facts of one device and its partitions."""
        processes = kfd_processes(self._files, self._roots)
        self._placed = self._places(sight, partitions)
        self._untold = (
            ("" if initial_namespace(self._roots.proc) else FOREIGN)
            or unlisted(self._files, self._roots)
            or _unread(processes)
        )
        self._of_device(sight, device, partitions, processes)
        fences = fence.Fences(self._files, self._roots, self._tools.programs)
        masks = mqd.read(self._files, self._roots, sight.nodes) if noted.shares else None
        for partition in partitions:
            inside = self._apart(members(sight, partition, processes), partition)
            self._of_partition(sight, partition, inside)
            self._fence(partition, inside, fences)
            if partition.share is not Share.EXCLUSIVE:
                self._caps(sight, partition, inside)
                self._plan(partition, partitions)
                self._masks(partition, self._bearers(partition, partitions, inside), masks)
            elif device.modes:
                value = self._amd(sight, partition, noted)
                self._add(partition.id, "amd.partition", value, "sysfs, KFD")
        return tuple(self._found)

    def _places(self, sight: Sight, partitions: tuple[Partition, ...]) -> dict[int, str]:
        """Return, by pid, the share whose cgroup a process is in."""
        groups = self._tools.groups
        return {
            pid: str(partition.id)
            for partition in partitions
            if partition.share is not Share.EXCLUSIVE
            for pid in groups.pids(sight.bus, partition.profile)
        }

    # --- the device ---

    def _of_device(
        self,
        sight: Sight,
        device: Device,
        partitions: tuple[Partition, ...],
        processes: Sequence[KfdProcess],
    ) -> None:
        geometry: list[Json] = [
            {
                "id": piece.id,
                "profile": piece.profile,
                "start": piece.placement.start,
                "size": piece.placement.size,
                "incarnation": piece.incarnation,
            }
            for piece in partitions
        ]
        self._add(device.id, "device.geometry", geometry, "KFD topology")
        modes: dict[str, Json] = {
            mode.kind.value: {"current": mode.current, "pending": mode.pending}
            for mode in device.modes
        }
        self._add(device.id, "device.modes", modes, "current_*_partition; requests as noted")
        clients = list(self._clients(sight, partitions, processes))
        if self._untold:
            self._absent(device.id, "device.clients", self._untold)
        else:
            self._add(device.id, "device.clients", clients, f"{self._roots.kfd}/proc")
        idle: list[Json] = [p.pid for p in processes if p.idle and not p.monitor]
        self._add(device.id, "amd.idle_clients", idle, f"{self._roots.kfd}/proc")
        self._add(device.id, "driver.version", device.driver or "", "/sys/module/amdgpu")
        reason = "no oldest safe driver is known; amd.isolation shows what is in force"
        self._absent(device.id, "driver.floor", reason)
        self._throttling(sight, device)
        isolation = self._isolation(sight)
        if isolation is None:
            self._absent(device.id, "amd.isolation", "the driver has no enforce_isolation")
        else:
            numbers: list[Json] = list(isolation)
            self._add(device.id, "amd.isolation", numbers, "enforce_isolation")

    def _throttling(self, sight: Sight, device: Device) -> None:
        found = None if self._tools.throttling is None else self._tools.throttling(sight.bus)
        if found is None:
            reason = "neither gpu_metrics nor the library tells why clocks are held back"
            self._absent(device.id, "device.throttling", reason)
            return
        reasons, method = found
        listed: list[Json] = [*reasons]
        self._add(device.id, "device.throttling", {"reasons": listed}, method)

    def _clients(
        self, sight: Sight, partitions: tuple[Partition, ...], processes: Sequence[KfdProcess]
    ) -> Iterable[Json]:
        for process in processes:
            for node in sight.nodes:
                if process.uses(node.gpu_id):
                    place = self._place(partitions, node.gpu_id, process)
                    yield {
                        "pid": process.pid,
                        "comm": process.comm,
                        "partition": place,
                        "granted": bool(place),
                        "monitor": process.monitor,
                    }

    def _place(self, partitions: tuple[Partition, ...], gpu_id: int, process: KfdProcess) -> str:
        """Return the partition that a process on a node is in; "": in none."""
        if self._tools.groups.mount is not None and any(
            p.share is not Share.EXCLUSIVE for p in partitions
        ):
            return self._placed.get(process.pid, "")
        return next((str(p.id) for p in partitions if holds(p, gpu_id, process)), "")

    def _isolation(self, sight: Sight) -> list[int] | None:
        text = self._files.text(f"{self._roots.pci(sight.bus)}/enforce_isolation")
        try:
            return None if not text else [int(word) for word in text.split()]
        except ValueError:
            return None

    # --- a partition ---

    def _of_partition(
        self, sight: Sight, partition: Partition, inside: Sequence[KfdProcess]
    ) -> None:
        self._add(partition.id, "partition.exists", True, "KFD topology")
        ids = ids_of(sight, partition)
        used = {p.pid: sum(p.memory_bytes.get(gpu, 0) for gpu in ids) for p in inside}
        listed: list[Json] = [
            {"pid": process.pid, "comm": process.comm, "memory_bytes": used[process.pid]}
            for process in inside
        ]
        where = f"{self._roots.kfd}/proc: queues and vram_*"
        if self._untold:
            self._absent(partition.id, "partition.processes", self._untold)
        else:
            self._add(partition.id, "partition.processes", listed, where)
        own: list[Json] = [n for n in partition.access.device_nodes if n.startswith("/dev/dri/")]
        self._add(partition.id, "partition.own_nodes", own, "drm_render_minor of its KFD node")
        if partition.share is not Share.EXCLUSIVE:
            self._share_memory(sight, partition, sum(used.values()))
            return
        memory: Json = {
            "limit_bytes": partition.memory_bytes,
            "used_bytes": sum(used.values()),
            "enforced_by": "driver",
        }
        self._add(partition.id, "partition.memory", memory, "mem_banks; kfd/proc/*/vram_*")

    def _amd(self, sight: Sight, partition: Partition, noted: DeviceEntry) -> Json:
        isolation = self._isolation(sight)
        number = int(partition.locator["xcp"])
        told = isolation is not None and number < len(isolation)
        return {
            "compute_mode": sight.modes.compute,
            "memory_mode": sight.modes.memory,
            "partitions": sum(node.render_minor is not None for node in sight.nodes),
            "expected_partitions": sight.expected,
            "render_node": f"renderD{partition.locator['render_minor']}",
            "memory_domains": memory_domains(sight.modes.memory),
            "isolation": bool(isolation[number]) if isolation is not None and told else None,
            "cleaned": self._cleaned(sight, number, noted),
        }

    def _cleaned(self, sight: Sight, number: int, noted: DeviceEntry) -> bool | None:
        """Return whether a partition was cleaned since the cut; None: the driver cannot clean."""
        if not self._files.there(f"{self._roots.pci(sight.bus)}/run_cleaner_shader"):
            return None
        return noted.cleaned_cut == noted.cuts and number in noted.cleaned

    def _fence(
        self, partition: Partition, inside: Sequence[KfdProcess], fences: fence.Fences
    ) -> None:
        if not inside:
            reason = "no process is in the partition, so there is no tenant whose rules to read"
            self._absent(partition.id, "cgroup.device_fence", reason)
            return
        if self._untold:
            self._absent(partition.id, "cgroup.device_fence", self._untold)
            return
        by: list[str] = []
        allowed: set[str] = set()
        for process in inside:
            rules = fences.of(process.pid)
            if rules is None:
                why = f": {fences.reason}" if fences.reason else ""
                reason = f"the device rules of pid {process.pid} cannot be read{why}"
                self._absent(partition.id, "cgroup.device_fence", reason)
                return
            by.append(rules.by)
            allowed |= set(rules.allowed)
        names = "" if "" in by else "; ".join(dict.fromkeys(by))
        nodes: list[Json] = [*sorted(allowed)]
        value: Json = {"by": names, "allowed": nodes}
        self._add(partition.id, "cgroup.device_fence", value, fences.method)

    def _caps(self, sight: Sight, partition: Partition, inside: Sequence[KfdProcess]) -> None:
        """Tell what caps the memory of each cgroup that the share's processes are in."""
        memory = self._tools.groups.memory
        if memory is None or memory.region(sight.bus) is None:
            self._absent(partition.id, "cgroup.device_memory", LACKS)
            return
        caps: list[Json] = []
        for path in dict.fromkeys(fence.v2_path(self._files, self._roots, p.pid) for p in inside):
            cap = None if path is None else memory.cap(path, sight.bus)
            if path is None or cap is None:
                reason = "the cgroup of a process in the share cannot be seen"
                self._absent(partition.id, "cgroup.device_memory", reason)
                return
            caps.append(
                {
                    "cgroup": path,
                    "max_bytes": cap.max_bytes,
                    "ceiling_bytes": cap.ceiling_bytes,
                    "current_bytes": cap.current_bytes,
                    "by": "dmem",
                }
            )
        where = "dmem.max of the tenants' cgroups and of those above them"
        self._add(partition.id, "cgroup.device_memory", caps, where)

    def _share_memory(self, sight: Sight, partition: Partition, used_bytes: int) -> None:
        """Tell the cap in force on the share's own cgroup."""
        groups = self._tools.groups
        cap = groups.cap(sight.bus, partition.profile, sight.bus)
        value: Json = {
            "limit_bytes": None if cap is None else cap.max_bytes,
            "used_bytes": used_bytes if cap is None else cap.current_bytes,
            "enforced_by": "none" if cap is None or cap.max_bytes is None else "dmem",
        }
        self._add(partition.id, "partition.memory", value, "dmem.max of the share's cgroup")

    def _apart(self, inside: list[KfdProcess], partition: Partition) -> list[KfdProcess]:
        """Return who is in a share: not those in another share's cgroup."""
        others = self._placed.keys() - {
            pid for pid, share in self._placed.items() if share == partition.id
        }
        return [process for process in inside if process.pid not in others]

    # --- masks ---

    def _plan(self, partition: Partition, partitions: tuple[Partition, ...]) -> None:
        """Tell the mask granted to a share, and which other share's mask has CUs in common."""
        mask = partition.locator.get("cu_mask", "")
        overlaps: list[Json] = [
            other.id
            for other in partitions
            if mask and other.id != partition.id and _common(mask, other.locator.get("cu_mask", ""))
        ]
        plan: Json = {"mask": mask, "cus": partition.compute_units, "overlaps": overlaps}
        self._add(partition.id, "amd.cu_plan", plan, "what the agent granted")

    def _bearers(
        self,
        partition: Partition,
        partitions: tuple[Partition, ...],
        inside: Sequence[KfdProcess],
    ) -> list[KfdProcess]:
        """Return the processes of a share: all but those that bear another share's very mask.

        The device cannot tell shares apart. A process with nobody's mask is held against each.
        """
        mine = partition.locator.get("cu_mask", "")
        others = {p.locator.get("cu_mask", "") for p in partitions if p.id != partition.id} - {mine}
        found = []
        for process in inside:
            environ = environment(self._files, self._roots, process.pid) or {}
            if environ.get("HSA_CU_MASK", "-") not in others:
                found.append(process)
        return found

    def _masks(
        self, partition: Partition, inside: Sequence[KfdProcess], masks: mqd.Masks | None
    ) -> None:
        told: list[Json] = [self._mask(partition, process, masks) for process in inside]
        self._add(
            partition.id, "amd.cu_masks", told, "/proc/PID/environ as at exec; debugfs kfd/mqds"
        )

    def _mask(self, partition: Partition, process: KfdProcess, masks: mqd.Masks | None) -> Json:
        wanted = partition.locator.get("cu_mask", "")
        environ = environment(self._files, self._roots, process.pid)
        configured = None if environ is None else environ.get("HSA_CU_MASK", "")
        problem = ""
        if environ is not None and wanted:
            problem = _slip(environ, wanted)
        words = None if masks is None else masks.of(process.pid)
        return {
            "pid": process.pid,
            "comm": process.comm,
            "wanted": wanted,
            "configured": configured,
            "problem": problem,
            "words": None if words is None else [list(row) for row in words],
            "words_reason": masks.reason if masks is not None and words is None else "",
            "occupancy_cus": max(process.occupancy_cus.values(), default=None),
            "granted_cus": partition.compute_units,
        }

    # --- inside ---

    def _add(self, subject: str, name: str, value: Json, method: str) -> None:
        self._found.append(
            Fact(subject=subject, name=name, value=value, method=method, read_at_s=self._now_s)
        )

    def _absent(self, subject: str, name: str, reason: str) -> None:
        self._found.append(
            Fact(
                subject=subject,
                name=name,
                quality=Quality.NOT_SUPPORTED,
                reason=reason,
                method="sysfs, cgroupfs",
                read_at_s=self._now_s,
            )
        )


def _slip(environ: dict[str, str], wanted: str) -> str:
    """Return which way out of its mask a process's environment takes; empty: none seen."""
    if environ.get("HSA_CU_MASK_SKIP_INIT", "") not in {"", "0"}:
        return "HSA_CU_MASK_SKIP_INIT is set: queues start unmasked"
    configured = environ.get("HSA_CU_MASK")
    if configured is None:
        return "HSA_CU_MASK is not set: the whole device is used"
    try:
        bits = parse(configured)
    except ConfigError as error:
        return f"HSA_CU_MASK is malformed, so it is ignored: {error.message}"
    return "" if bits == parse(wanted) else f"HSA_CU_MASK is {configured[:80]}, not as granted"


def _unread(processes: Sequence[KfdProcess]) -> str:
    """Return which processes may be anywhere, since what they have cannot be read."""
    names = [f"{p.pid} ({p.comm or 'unknown'})" for p in processes if p.unread and not p.monitor]
    return f"what process {', '.join(names[:4])} has on the devices cannot be read" if names else ""


def _common(one: str, two: str) -> bool:
    """Return whether two masks have a CU in common; a share without a mask has all of them."""
    if not two:
        return True
    left, right = parse(one), parse(two)
    return any(left[gpu] & right[gpu] for gpu in left.keys() & right.keys())


def environment(files: Files, roots: Roots, pid: int) -> dict[str, str] | None:
    """Return the mask variables of a process as at its exec; None: they cannot be read."""
    try:
        raw = files.data(f"{roots.proc}/{pid}/environ", 1 << 20)
    except OSError:
        return None
    found = {}
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        text = name.decode("ascii", "replace")
        if text in _MASK_NAMES:
            found[text] = value.decode("utf-8", "backslashreplace")
    return found


def ids_of(sight: Sight, partition: Partition) -> frozenset[int]:
    """Return the KFD ids that belong to a partition; a share has all of its device."""
    if partition.share is not Share.EXCLUSIVE:
        return frozenset(node.gpu_id for node in sight.nodes)
    return frozenset({int(partition.locator["kfd_gpu_id"])})


def holds(partition: Partition, gpu_id: int, process: KfdProcess) -> bool:
    """Whether a process on a node is in this partition, as far as the device tells.

    Processes of several shares cannot be told apart by the device; the first share stands for all.
    """
    del process
    if partition.share is not Share.EXCLUSIVE:
        return True
    return partition.locator.get("kfd_gpu_id") == str(gpu_id)


def members(
    sight: Sight, partition: Partition, processes: Sequence[KfdProcess]
) -> list[KfdProcess]:
    """Return the processes that work in a partition."""
    ids = ids_of(sight, partition)
    return [process for process in processes if any(process.uses(gpu) for gpu in ids)]


def openers(files: Files, roots: Roots, minors: Sequence[int]) -> str:
    """Return who has one of these render nodes or `/dev/kfd` open, for a person."""
    wanted = {f"{roots.dev}/dri/renderD{minor}" for minor in minors} | {f"{roots.dev}/kfd"}
    found = []
    for pid in files.numbered(roots.proc):
        with contextlib.suppress(OSError):
            links = {files.link(f"{roots.proc}/{pid}/fd/{fd}") for fd in _fds(files, roots, pid)}
            if links & wanted:
                found.append(f"pid {pid} ({comm_of(files, roots, pid) or 'unknown'})")
    more = f" and {len(found) - OPENERS_SHOWN} more" if len(found) > OPENERS_SHOWN else ""
    return ", ".join(found[:OPENERS_SHOWN]) + more


def _fds(files: Files, roots: Roots, pid: int) -> list[str]:
    return files.listed(f"{roots.proc}/{pid}/fd")
