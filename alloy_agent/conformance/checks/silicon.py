"""MIG-*, CPX-*, NRN-*, DEV-*: what the drivers of accelerators show of a partition.

The device-node fence is one claim for all vendors (MIG-03, CPX-03, NRN-02, DEV-01): a container
that may open its neighbour's node is not fenced, whatever its environment says.
"""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ANY_IN_FORCE,
    ENFORCED,
    HARD,
    Case,
    Check,
    Need,
    Outcome,
    compare,
    counted,
    cpu_list,
    failed,
    named,
    not_applicable,
    passed,
    size,
)
from alloy_agent.conformance.checks.shapes import (
    AmdFact,
    ClientFact,
    FenceFact,
    GeometryFact,
    MemoryFact,
    MigFact,
    NeuronFact,
)
from alloy_agent.model import Device, ModeKind, Partition, Scheme, Share, Vendor, Verdict

# Source: NVIDIA container toolkit, control nodes; kfd_chardev.c, one node for all devices; the
# character devices that every OCI runtime allows (OCI runtime specification, default devices).
CONTROL_NODES = frozenset(
    {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/kfd"}
    | {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}
)


def _mig(partition: Partition, device: Device) -> bool:
    on = {mode.current for mode in device.modes if mode.kind is ModeKind.MIG}
    return (
        device.vendor is Vendor.NVIDIA
        and device.scheme is Scheme.INSTANCES
        and on != {"off"}
        and partition.share is Share.EXCLUSIVE
    )


def _amd(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.AMD and partition.share is Share.EXCLUSIVE


def _amd_modes(partition: Partition, device: Device) -> bool:
    return _amd(partition, device) and device.scheme is Scheme.MODES


def _neuron(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.NEURON and partition.share is Share.EXCLUSIVE


def _whole_gpu(partition: Partition, device: Device) -> bool:
    exclusive = partition.share is Share.EXCLUSIVE
    return device.vendor is Vendor.NVIDIA and exclusive and not _mig(partition, device)


def _not_mig(partition: Partition, device: Device) -> bool:
    return device.vendor is not Vendor.CPU and not _mig(partition, device)


def _exclusive(partition: Partition, device: Device) -> bool:
    return device.vendor is not Vendor.CPU and partition.share is Share.EXCLUSIVE


def _no_cap(case: Case) -> str:
    return "no memory cap was granted" if case.partition.memory_bytes is None else ""


# --- any accelerator ---------------------------------------------------------------------------


def _fence(case: Case) -> Outcome:
    fence = case.get("cgroup.device_fence", FenceFact)
    own = case.get("partition.own_nodes", tuple[str, ...])
    together = case.group_nodes if own else ()
    wanted = {*case.partition.access.device_nodes, *own, *together}
    shown = named(sorted(together or own))
    expected = f"may open {shown} and control nodes, and no neighbour may"
    if not fence.by:
        return failed(expected, "no device rule is in force")
    if not own:
        return failed(expected, "its device nodes are shared with neighbours")
    extra = sorted(set(fence.allowed) - wanted - CONTROL_NODES)
    if extra:
        return failed(expected, f"{fence.by} also allows {named(extra)}")
    return passed(expected, f"{fence.by} allows {named(sorted(fence.allowed))}")


def _no_strangers(case: Case) -> Outcome:
    clients = case.get("device.clients", tuple[ClientFact, ...])
    outside = [c for c in clients if not c.monitor and (not c.partition or not c.granted)]
    strangers = [
        f"{c.comm or 'process'}[{c.pid}] in {c.partition or 'no partition'}"
        for c in outside
        if not c.unseen
    ]
    expected = "every process on the device is in a partition that it was granted"
    if strangers:
        return failed(expected, named(strangers))
    if outside:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            expected=expected,
            observed=named(f"pid {c.pid}, not seen here" for c in outside),
            reason=outside[0].unseen,
        )
    return passed(expected, counted(len(clients), "process", "processes"))


def _alone(case: Case) -> Outcome:
    clashes = [p.id for p in case.siblings if p.placement.overlaps(case.partition.placement)]
    place = case.partition.placement
    expected = f"slices {place.start} to {place.stop - 1} alone"
    if clashes:
        return failed(expected, f"shares with {named(clashes)}")
    return passed(expected, "alone")


def _shown(case: Case) -> Outcome:
    pieces = {p.id: p for p in case.get("device.geometry", tuple[GeometryFact, ...])}
    partition, place = case.partition, case.partition.placement
    expected = f"{partition.profile}@{place.start}+{place.size}, {partition.incarnation}"
    piece = pieces.get(partition.id)
    if piece is None:
        return failed(expected, f"not among the {len(pieces)} pieces that the device shows")
    observed = f"{piece.profile}@{piece.start}+{piece.size}, {piece.incarnation}"
    return compare(expected, observed, "another piece is in this place")


def _memory_cap(case: Case) -> Outcome:
    memory = case.get("partition.memory", MemoryFact)
    expected = f"{size(case.partition.memory_bytes)} enforced below the tenant"
    observed = f"{size(memory.limit_bytes)} by {memory.enforced_by}"
    if memory.enforced_by == "none" or memory.limit_bytes != case.partition.memory_bytes:
        return failed(expected, observed)
    return passed(expected, observed)


def _memory_used(case: Case) -> Outcome:
    memory = case.get("partition.memory", MemoryFact)
    expected = f"at most {size(case.partition.memory_bytes)}"
    over = memory.used_bytes > (case.partition.memory_bytes or 0)
    return (failed if over else passed)(expected, size(memory.used_bytes))


# --- NVIDIA ------------------------------------------------------------------------------------


def _same_uuid(case: Case) -> Outcome:
    shown = case.get("mig.instance", MigFact)
    geometry = _shown(case)
    if geometry.verdict is Verdict.FAIL or case.partition.uuid is None:
        return geometry
    expected = f"{geometry.expected}, {case.partition.uuid}"
    return compare(expected, f"{geometry.observed}, {shown.uuid}", "another instance is here")


def _full_compute(case: Case) -> Outcome:
    shown = case.get("mig.instance", MigFact)
    expected = f"one compute instance of {shown.instance_slices} slices"
    observed = f"{shown.compute_instances}, the tenant's of {shown.compute_slices} slices"
    whole = shown.compute_slices == shown.instance_slices > 0
    if shown.compute_instances == 1 and whole:
        return passed(expected, observed)
    return failed(expected, observed, "compute instances share the engines of their GPU instance")


# --- AMD ---------------------------------------------------------------------------------------


def _pieces(number: int) -> str:
    return counted(number, "piece", "pieces")


def _modes(case: Case) -> Outcome:
    shown = case.get("amd.partition", AmdFact)
    wanted = {mode.kind: mode.current for mode in case.device.modes}
    layout = case.intent.of_device(case.device.id)
    if layout is not None:
        wanted |= layout.modes
    compute = wanted.get(ModeKind.COMPUTE, shown.compute_mode)
    memory = wanted.get(ModeKind.MEMORY, shown.memory_mode)
    expected = f"{compute}/{memory}, {_pieces(shown.expected_partitions)}"
    observed = f"{shown.compute_mode}/{shown.memory_mode}, {_pieces(shown.partitions)}"
    waiting = [
        f"{mode.kind} {mode.pending} waits for a {mode.change.value.replace('_', ' ')}"
        for mode in case.device.modes
        if mode.pending not in {None, mode.current}
    ]
    differs = "modes or count differ from what was meant"
    return compare(expected, observed, "; ".join([differs, *waiting]))


def _process_isolation(case: Case) -> Outcome:
    isolation = case.get("amd.partition", AmdFact).isolation
    if isolation is None:
        return Outcome(
            verdict=Verdict.UNKNOWN, expected="on", reason="the driver does not tell the setting"
        )
    if not isolation:
        return not_applicable("enforce_isolation is off, so RC-LDS stays open")
    return passed("on", "on")


def _several_pieces(case: Case) -> str:
    whole = case.partition.placement.size == case.device.slices
    return "the piece is the whole device" if whole else ""


def _memory_domains(case: Case) -> Outcome:
    shown = case.get("amd.partition", AmdFact)
    observed = f"{shown.memory_mode}, {shown.memory_domains} domains"
    expected = "memory in more than one domain (NPS2 or more)"
    if shown.memory_domains <= 1:
        return failed(expected, observed, "all pieces interleave over all of the memory")
    return passed(expected, observed)


# --- Neuron ------------------------------------------------------------------------------------


def _cores(case: Case) -> Outcome:
    shown = case.get("neuron.cores", NeuronFact)
    place = case.partition.placement
    granted = case.partition.units or tuple(range(place.start, place.stop))
    expected = f"cores {cpu_list(granted)}"
    observed = f"cores {cpu_list(shown.cores)}"
    return compare(expected, observed, "the tenant's processes are on other cores than granted")


def _need(name: str, shape: object, of: str = "partition") -> Need:
    return Need(name=name, shape=shape, of=of)


FENCE = (
    _need("cgroup.device_fence", FenceFact),
    _need("partition.own_nodes", tuple[str, ...]),
)
STRANGERS = _need("device.clients", tuple[ClientFact, ...], "device")
GEOMETRY = _need("device.geometry", tuple[GeometryFact, ...], "device")
MIG = _need("mig.instance", MigFact)
AMD = _need("amd.partition", AmdFact)
MEMORY = _need("partition.memory", MemoryFact)

FENCE_CLAIM = "Device rules let the tenant open its own nodes, and let no neighbour open them."
STRANGER_CLAIM = "Every process on the device is in a partition that it was granted."

CHECKS: tuple[Check, ...] = (
    Check(
        id="MIG-01",
        claim="The driver shows the very instance that the partition names.",
        applies=_mig,
        needs=(GEOMETRY, MIG),
        judge=_same_uuid,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="MIG-02",
        claim="One compute instance spans the whole GPU instance.",
        applies=_mig,
        needs=(MIG,),
        judge=_full_compute,
        supports=HARD,
        required_for=HARD,
    ),
    Check(
        id="MIG-03",
        claim=FENCE_CLAIM,
        applies=_mig,
        needs=FENCE,
        judge=_fence,
        about_tenant=True,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="MIG-04",
        claim=STRANGER_CLAIM,
        applies=_mig,
        needs=(STRANGERS,),
        judge=_no_strangers,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="CPX-01",
        claim="Compute mode, memory mode and the number of pieces are as meant.",
        applies=_amd_modes,
        needs=(AMD,),
        judge=_modes,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="CPX-02",
        claim="Local memory is cleared between processes (enforce_isolation).",
        applies=_amd_modes,
        needs=(AMD,),
        judge=_process_isolation,
        about_tenant=True,
        supports=ENFORCED,
        required_for=(),
    ),
    Check(
        id="CPX-03",
        claim=FENCE_CLAIM,
        applies=_amd,
        needs=FENCE,
        judge=_fence,
        about_tenant=True,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="CPX-04",
        claim="The memory mode keeps pieces apart.",
        applies=_amd_modes,
        needs=(AMD,),
        judge=_memory_domains,
        exempt=_several_pieces,
        supports=HARD,
        required_for=HARD,
    ),
    Check(
        id="NRN-01",
        claim="The tenant is bound to the cores it was granted, and uses no other.",
        applies=_neuron,
        needs=(_need("neuron.cores", NeuronFact),),
        judge=_cores,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="NRN-02",
        claim=FENCE_CLAIM,
        applies=_neuron,
        needs=FENCE,
        judge=_fence,
        about_tenant=True,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="DEV-01",
        claim=FENCE_CLAIM,
        applies=_whole_gpu,
        needs=FENCE,
        judge=_fence,
        about_tenant=True,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="DEV-02",
        claim=STRANGER_CLAIM,
        applies=_not_mig,
        needs=(STRANGERS,),
        judge=_no_strangers,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="DEV-03",
        claim="No other partition claims the same slices.",
        applies=_exclusive,
        judge=_alone,
        proves=False,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="MEM-02",
        claim="The device memory cap is in force, below the tenant.",
        applies=_exclusive,
        needs=(MEMORY,),
        judge=_memory_cap,
        exempt=_no_cap,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="MEM-03",
        claim="No more device memory is in use than was granted.",
        applies=_exclusive,
        needs=(MEMORY,),
        judge=_memory_used,
        exempt=_no_cap,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
)
