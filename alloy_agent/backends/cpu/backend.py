"""`CpuBackend`: what can be asked of the host's CPU, and the one step at a time that changes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.cpu import doctor
from alloy_agent.backends.cpu.confine import Confinement
from alloy_agent.backends.cpu.evidence import FactReader
from alloy_agent.backends.cpu.pieces import (
    PieceName,
    cores_of,
    cpus_of,
    granted_placement,
    parse_name,
    run_of,
    touched,
)
from alloy_agent.backends.cpu.signals import SignalReader
from alloy_agent.backends.cpu.topology import Node, model_name, read_nodes
from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    UnsupportedError,
)
from alloy_agent.host.cgroups import Cgroup, CgroupFs, CgroupState, CgroupTopology, detect
from alloy_agent.host.clock import boot_id, boottime_s
from alloy_agent.host.cpulist import format_cpu_list
from alloy_agent.host.processes import printable
from alloy_agent.host.watch import WATCHES_MAX, CgroupWatch, ChangeKind
from alloy_agent.model import (
    Access,
    Capabilities,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceEvent,
    DeviceFault,
    DeviceId,
    Diagnosis,
    Fact,
    Link,
    Observation,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Profile,
    Scheme,
    Share,
    SignalSpec,
    Step,
    Tier,
    TierLimit,
    Vendor,
)

PREFIX = "cpu-node"
ENFORCED_REASON = (
    "the kernel fences cores and memory; last-level cache, memory bandwidth and the kernel itself"
    " are shared, so it is not hard"
)
SHARED_REASON = (
    "tenants of one set of cores share them under the scheduler's and the gate's control"
)
UNSET = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # would name CPUs of outside
WATCH_RENEW_S = 30.0  # made and removed cgroups renew it at once; this is for what was lost
MEMBERS = frozenset({"cgroup.procs", "cgroup.threads", "tasks", "cgroup.events"})
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class CpuBackend:
    """The host's CPU, one device for each NUMA node.

    Args:
        reserved_cores: CPUs whose whole cores stay with the system.
        cgroup_root: The cgroup below which everything is made, in each hierarchy.
        memory_reserve_bytes: Memory of each node that no caps may add up into.
        confine_system: Keep everyone else off granted cores, as far as the kernel can.
        proc_root: Where procfs is.
        sys_root: Where sysfs is.
        host_root: Put before the mount points that the kernel names.
        fs: The operations on cgroup trees.
    """

    name = "cpu"

    def __init__(  # noqa: PLR0913 - one for each setting, by name only
        self,
        *,
        reserved_cores: Sequence[int] = (0,),
        cgroup_root: str = "alloy",
        memory_reserve_bytes: int = 1 << 30,
        confine_system: bool = False,
        proc_root: str = "/proc",
        sys_root: str = "/sys",
        host_root: str = "",
        fs: CgroupFs | None = None,
    ) -> None:
        self._reserved = tuple(reserved_cores)
        self._root = cgroup_root.strip("/")
        self._reserve_bytes = memory_reserve_bytes
        self._proc, self._sys, self._host = proc_root, sys_root, host_root
        self._fs = CgroupFs() if fs is None else fs
        self._confinement = Confinement(self._root, confine_system, proc_root, self._fs)
        self._signals = SignalReader(proc_root, sys_root)
        self._facts = FactReader(proc_root, self._fs)
        self._held: set[DeviceId] = set()
        self._seen: dict[DeviceId, int] = {}
        self._watch: CgroupWatch | None = None
        self._watch_until_s = 0.0
        self._lock = threading.Lock()

    # --- observing ---------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """Return what can be done here."""
        topology = self._topology()
        able = topology.of("cpuset") is not None and topology.of("memory") is not None
        return Capabilities(
            backend=self.name,
            vendors=(Vendor.CPU,),
            library="cgroup",
            library_version=topology.mode,
            can_partition=able,
            can_share=able,
            has_events=True,
            notes=doctor.where(topology),
        )

    def discover(self) -> tuple[DeviceId, ...]:
        """Return one id for each NUMA node with CPUs; one that lost its last CPU stays listed.

        Raises:
            BackendError: sysfs shows no CPU at all.
        """
        nodes = self._nodes()
        if not nodes:
            raise BackendError(f"no CPUs in {self._sys}/devices/system/cpu", cure="mount sysfs")
        self._seen |= {device_id(node): node.number for node in nodes}
        return tuple(sorted(self._seen, key=self._seen.__getitem__))

    def observe(self, device: DeviceId) -> Observation:
        """Return the node, the partitions that the kernel has in force, and what is amiss."""
        node = self._node(device)
        topology = self._topology()
        partitions: list[Partition] = []
        faults: list[DeviceFault] = []
        for name in self._names(topology, device):
            state = self._cgroup(topology, device, name).state()
            partition, problems = self._partition(topology, node, name, state)
            faults += [
                DeviceFault(device=device, kind=kind, reason=reason) for kind, reason in problems
            ]
            if partition is not None:
                partitions.append(partition)
        partitions.sort(key=lambda p: (p.placement, p.id))
        return Observation(
            device=self._device(node, topology),
            partitions=tuple(partitions),
            faults=tuple(faults),
        )

    def _device(self, node: Node, topology: CgroupTopology) -> Device:
        able = topology.of("cpuset") is not None and topology.of("memory") is not None
        tier = Tier.ENFORCED if able else Tier.ADVISORY
        reason = ENFORCED_REASON if able else "the kernel has no cpuset or no memory controller"
        count = len(node.cores)
        return Device(
            id=device_id(node),
            vendor=Vendor.CPU,
            model=model_name(self._proc),
            backend=self.name,
            scheme=Scheme.CORES,
            slices=count,
            slice_name="core",
            index=node.number,
            numa_node=node.number,
            driver=f"cgroup {topology.mode}",
            memory_bytes=node.memory_bytes,
            compute_units=count,
            units=tuple(core.first for core in node.cores),
            reserved_units=tuple(core.first for core in node.reserved),
            profiles=self._profiles(node),
            links=tuple(
                Link(peer=f"numa:{peer}", kind="numa", hops=distance)
                for peer, distance in node.distances.items()
                if peer != node.number
            ),
            tier_limits=(
                TierLimit(way="cores", tier=tier, reason=reason),
                TierLimit(way="shared", tier=Tier.SOFT if able else tier, reason=SHARED_REASON),
            ),
            fault_note="" if count else "all cores are reserved for the system",
        )

    def _profiles(self, node: Node) -> tuple[Profile, ...]:
        count, lendable = len(node.cores), self._lendable_bytes(node)
        return tuple(
            Profile(
                name=f"{size}c",
                size=size,
                starts=tuple(range(count - size + 1)),
                max_count=count // size,
                memory_bytes=None if lendable is None else lendable * size // count >> 21 << 21,
                compute_units=size,
            )
            for size in range(1, count + 1)
        )

    def _partition(
        self, topology: CgroupTopology, node: Node, name: str, state: CgroupState
    ) -> tuple[Partition | None, list[tuple[str, str]]]:
        """Return a cgroup as a partition, if it is one, and what is wrong with it."""
        shown = f"{device_id(node)}/{printable(name.encode(errors='surrogateescape'))}"
        if state.lacks:
            return None, [("half_made", f"cgroup {shown}: {', '.join(state.lacks)}")]
        piece = parse_name(name)
        granted = granted_placement(piece, node) if piece is not None else None
        real = run_of(state.cpus_effective, node)
        placement = granted or real
        cpus = format_cpu_list(state.cpus_effective) or "none"
        if placement is None:
            return None, [("foreign_cgroup", f"cgroup {shown} holds CPUs {cpus}, no run of cores")]
        altered = _alterations(state, node, granted, real)
        problems = [("altered", f"cgroup {shown} {how}") for how in altered]
        if piece is None:
            problems = [("foreign_cgroup", f"cgroup {shown} is not of the agent's naming")]
        cores = touched(state.cpus_effective, node)
        shared = piece is not None and piece.size is None
        profile = piece.profile if piece is not None and shared else f"{placement.size}c"
        partition = Partition(
            id=PartitionId(shown),
            device=device_id(node),
            profile=profile,
            placement=placement,
            incarnation=self._incarnation(state),
            memory_bytes=state.memory_limit_bytes,
            compute_units=len(cores),
            units=tuple(core.first for core in cores),
            share=piece.share if piece is not None else Share.EXCLUSIVE,
            ordinal=piece.ordinal if piece is not None else 0,
            altered=" and ".join(altered) if granted is not None else "",
            locator={"cgroup": state.path},
            access=self._access(topology, state, shown, len(cores)),
        )
        return partition, problems

    def _access(
        self, topology: CgroupTopology, state: CgroupState, partition: str, cores: int
    ) -> Access:
        handle = Cgroup(topology, state.path, self._fs)
        environment = {
            "ALLOY_PARTITION": partition,
            "ALLOY_CPUS": format_cpu_list(state.cpus_effective),
            **dict.fromkeys(THREADS, str(cores)),
        }
        return Access(cgroup_procs=handle.procs_files(), environment=environment, unset=UNSET)

    def _incarnation(self, state: CgroupState) -> str:
        """Return what differs once the cgroup is made anew: boot and inodes of its directories."""
        inodes = ",".join(f"{label}={number}" for label, number in sorted(state.inodes.items()))
        return f"{boot_id(self._proc)}:{inodes}"

    # --- changing ----------------------------------------------------------------------------

    def apply(self, step: Step) -> None:
        """Do one step on one node's cgroups."""
        node = self._node(step.device)
        topology = self._topology()
        with self._lock:
            self._clear_half_made(topology, step)
            match step:
                case Create():
                    self._create(topology, node, step.spec)
                case Destroy():
                    self._destroy(topology, step.partition)
                case Configure():
                    self._configure(topology, node, step.partition, step.memory_bytes)
                case _:
                    raise UnsupportedError(f"{step.device} has no mode {step.kind}")
            if not isinstance(step, Configure) or step.partition.altered:
                self._confinement.follow(topology, self._nodes(), self._granted(topology))

    def _create(self, topology: CgroupTopology, node: Node, spec: PartitionSpec) -> None:
        name = self._name_of(spec)
        shown = f"{spec.device}/{name}"
        piece = parse_name(name)
        place = granted_placement(piece, node) if piece is not None else None
        if place is None or spec.placement != place:
            raise BackendError(
                f"{shown} is no run of the {len(node.cores)} cores of {spec.device}",
                cure="choose a profile and a start that the device lists",
            )
        others = [p for p in self.observe(spec.device).partitions if p.id != shown]
        cores = cores_of(place, node)
        firsts = {core.first for core in cores}
        for other in others:
            alone = Share.EXCLUSIVE in (other.share, spec.share)
            if alone and (other.placement.overlaps(place) or firsts & set(other.units)):
                raise DeviceBusyError(
                    f"{shown} needs cores that {other.id} has", cure=f"destroy {other.id} first"
                )
        self._refuse_overcommit(node, others, shown, spec.memory_bytes)
        handle = self._cgroup(topology, spec.device, name)
        state = handle.state()
        if not state.lacks and state.cpus_effective == cpus_of(cores):
            raise DeviceBusyError(f"{shown} is there already", cure=f"destroy {shown} first")
        handle.create(cpus_of(cores), (node.number,), spec.memory_bytes)

    def _destroy(self, topology: CgroupTopology, partition: Partition) -> None:
        handle = self._handle_of(topology, partition)
        if partition.incarnation and handle.present():
            now = self._incarnation(handle.state())
            if now != partition.incarnation and not handle.state().lacks:
                raise BackendError(
                    f"{partition.id} was made anew since it was observed ({now})",
                    cure="plan again",
                )
        handle.remove(self._proc)
        handle.prune_parents()

    def _configure(
        self, topology: CgroupTopology, node: Node, partition: Partition, memory_bytes: int | None
    ) -> None:
        handle = self._handle_of(topology, partition)
        state = handle.state()
        if state.lacks:
            raise BackendError(f"{partition.id} is not there whole", cure="plan again")
        place = self._granted_place(partition, node)
        if place is not None and _alterations(
            state, node, place, run_of(state.cpus_effective, node)
        ):
            handle.set_cpus(cpus_of(cores_of(place, node)), (node.number,))
        others = [p for p in self.observe(partition.device).partitions if p.id != partition.id]
        self._refuse_overcommit(node, others, partition.id, memory_bytes)
        handle.set_memory(memory_bytes)

    def _refuse_overcommit(
        self, node: Node, others: Sequence[Partition], shown: str, memory_bytes: int | None
    ) -> None:
        lendable = self._lendable_bytes(node)
        if memory_bytes is None or lendable is None:
            return
        taken = sum(p.memory_bytes or 0 for p in others)
        if taken + memory_bytes > lendable:
            raise DeviceBusyError(
                f"{shown} asks for {memory_bytes} bytes, and {device_id(node)} has"
                f" {max(0, lendable - taken)} of {lendable} left beside its reserve",
                cure="ask for less, or lower another partition's cap first",
            )

    def _clear_half_made(self, topology: CgroupTopology, step: Step) -> None:
        """Remove what steps that were cut short left on the device, but for this step's own."""
        own = ""
        if isinstance(step, Create):
            own = self._name_of(step.spec)
        elif isinstance(step, Destroy):
            own = self._path_of(step.partition).rpartition("/")[2]
        for name in self._names(topology, step.device):
            if name == own or parse_name(name) is None:
                continue
            handle = self._cgroup(topology, step.device, name)
            if handle.state().lacks and not handle.pids():
                handle.remove(self._proc)

    # --- handles, signals, events ------------------------------------------------------------

    def quiesce(self, device: DeviceId) -> None:
        """Close what is open on the node's cgroups."""
        self._held.add(device)
        self._signals.release(device)

    def resume(self, device: DeviceId) -> None:
        """Allow to open them again."""
        self._held.discard(device)

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns of the node and of its partitions of this moment."""
        node = self._node(device)
        partitions = self.observe(device).partitions
        return self._signals.specs(device, node, self._topology(), partitions)

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Read the node's signals once, through descriptors that stay open.

        Raises:
            DeviceLostError: It has no columns, since it is not there.
        """
        if device in self._held:
            return
        if not self._signals.sample(device, sink):
            self._node(device)

    def open_count(self, device: DeviceId) -> int:
        """Return how many descriptors are open on a node's signals."""
        return self._signals.open_count(device)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return changes of the cgroup trees: made, removed, CPUs or caps or members written."""
        topology = self._topology()
        if self._watch is None:
            self._watch = CgroupWatch()
            self._watch_until_s = 0.0
        if boottime_s() >= self._watch_until_s:
            self._watch.watch(self._watched(topology))
            self._watch_until_s = boottime_s() + WATCH_RENEW_S
        events: dict[DeviceEvent, None] = {}
        for change in self._watch.wait(timeout_s):
            if change.kind is not ChangeKind.WRITTEN:
                self._watch_until_s = 0.0
            for event in self._events(topology, change.kind, change.folder, change.name):
                events[event] = None
        return tuple(events)

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what the checks of the node need, read now."""
        node = self._node(device)
        topology = self._topology()
        granted: dict[str, tuple[int, ...]] = {}
        partitions = self.observe(device).partitions
        for partition in partitions:
            place = self._granted_place(partition, node)
            granted[partition.id] = cpus_of(cores_of(place, node)) if place else ()
        found = self._facts.read(device, topology, partitions, granted)
        return (*found, self._confinement.fact(device, topology, self._granted(topology)))

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return what this host has and lacks for fencing CPUs."""
        return doctor.diagnose(self._topology(), self._nodes(), self._root, self._proc, self._fs)

    def close(self) -> None:
        """Close every descriptor."""
        self._signals.close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # --- inside ------------------------------------------------------------------------------

    def _topology(self) -> CgroupTopology:
        return detect(self._proc, self._host)

    def _nodes(self) -> tuple[Node, ...]:
        return read_nodes(self._sys, self._proc, self._reserved)

    def _node(self, device: DeviceId) -> Node:
        for node in self._nodes():
            if device_id(node) == device:
                return node
        raise DeviceLostError(f"{device}: no such NUMA node with CPUs online")

    def _cgroup(self, topology: CgroupTopology, device: DeviceId, name: str) -> Cgroup:
        return Cgroup(topology, f"{self._root}/{device}/{name}", self._fs)

    def _names(self, topology: CgroupTopology, device: DeviceId) -> tuple[str, ...]:
        folder = Cgroup(topology, f"{self._root}/{device}", self._fs)
        names = {
            name for h in folder.hierarchies for name in self._fs.children(h.folder(folder.path))
        }
        return tuple(sorted(names))

    def _name_of(self, spec: PartitionSpec) -> str:
        if spec.placement is None:
            raise BackendError(f"{spec.device}/{spec.profile}: no placement", cure="plan again")
        return f"{spec.profile}@{spec.placement.start}"

    def _path_of(self, partition: Partition) -> str:
        """Return the cgroup of a partition, of one that was only planned too."""
        default = f"{self._root}/{partition.id}"
        path = partition.locator.get("cgroup", default)
        prefix = f"{self._root}/{partition.device}/"
        if not path.startswith(prefix) or "/" in path[len(prefix) :] or path.endswith(".."):
            raise BackendError(f"{partition.id}: {path} is not below {prefix}", cure="plan again")
        return path

    def _handle_of(self, topology: CgroupTopology, partition: Partition) -> Cgroup:
        return Cgroup(topology, self._path_of(partition), self._fs)

    def _lendable_bytes(self, node: Node) -> int | None:
        if node.memory_bytes is None:
            return None
        return max(0, node.memory_bytes - self._reserve_bytes)

    def _granted_place(self, partition: Partition, node: Node) -> Placement | None:
        piece: PieceName | None = parse_name(self._path_of(partition).rpartition("/")[2])
        return granted_placement(piece, node) if piece is not None else None

    def _granted(self, topology: CgroupTopology) -> tuple[int, ...]:
        """Return all CPUs that the kernel gives to partitions, of all nodes."""
        cpus: set[int] = set()
        for node in self._nodes():
            for name in self._names(topology, device_id(node)):
                cpus.update(self._cgroup(topology, device_id(node), name).state().cpus)
        return tuple(sorted(cpus))

    def _watched(self, topology: CgroupTopology) -> list[str]:
        """Return every directory of the trees that fence, outermost first.

        A process that leaves a partition is a write to the cgroup that it goes to, wherever.
        """
        folders: list[str] = []
        level = [h.mount for h in Cgroup(topology, self._root, self._fs).hierarchies]
        while level and len(folders) < WATCHES_MAX:
            folders += level
            level = [f"{up}/{name}" for up in level for name in self._fs.children(up)]
        events = [f"{folder}/cgroup.events" for folder in folders if f"/{self._root}/" in folder]
        return [*(file for file in events if self._fs.exists(file)), *folders]

    def _events(
        self, topology: CgroupTopology, kind: ChangeKind, folder: str, name: str
    ) -> list[DeviceEvent]:
        """Return what a change means: to one partition, to all devices, or nothing."""
        if kind is ChangeKind.LOST:
            return [_event(device, "geometry", kind, "", "") for device in self._ids()]
        file = f"{folder}/{name}" if name else folder
        what = _meaning(kind, file.rpartition("/")[2])
        for hierarchy in topology.hierarchies:
            root = hierarchy.folder(self._root)
            if file != root and not file.startswith(f"{root}/"):
                continue
            device, _, rest = file[len(root) + 1 :].partition("/")
            piece = rest.partition("/")[0]
            devices = [d for d in self._ids() if d == device] or self._ids()
            return [_event(d, what or "geometry", kind, piece, file) for d in devices]
        if not what:  # somebody else's cgroup was made, removed or tuned
            return []
        return [_event(device, what, kind, "", file) for device in self._ids()]

    def _ids(self) -> list[DeviceId]:
        return [device_id(node) for node in self._nodes()]


def _alterations(
    state: CgroupState, node: Node, granted: Placement | None, real: Placement | None
) -> list[str]:
    """Return in which ways the kernel's CPUs, memory nodes and swap are not as they were made."""
    found = []
    if real != granted:
        wanted = format_cpu_list(cpus_of(cores_of(granted, node))) if granted else "no cores"
        holds = format_cpu_list(state.cpus_effective) or "none"
        found.append(f"was granted CPUs {wanted} and holds {holds}")
    if state.mems_effective != (node.number,):
        mems = format_cpu_list(state.mems_effective) or "none"
        found.append(f"takes memory from nodes {mems}")
    if state.swap_open:
        found.append("may swap beyond its memory cap")
    return found


def _meaning(kind: ChangeKind, name: str) -> str:
    """Return the kind of event that a write to a control file is, "" for one of no concern."""
    if kind is not ChangeKind.WRITTEN:
        return ""
    if name in MEMBERS:
        return "process"
    return "geometry" if name.startswith("cpuset.") else ""


def _event(device: DeviceId, what: str, kind: ChangeKind, piece: str, file: str) -> DeviceEvent:
    return DeviceEvent(
        device=device,
        kind=what,
        code=f"cgroup:{kind}",
        partition=PartitionId(f"{device}/{piece}") if piece else None,
        time_s=boottime_s(),
        detail=file,
    )


def device_id(node: Node) -> DeviceId:
    """Return the id of the device that a NUMA node is."""
    return DeviceId(f"{PREFIX}{node.number}")
