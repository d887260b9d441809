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
    failed,
    named,
    passed,
    size,
)
from alloy_agent.conformance.checks.shapes import (
    ClientFact,
    ComputeFact,
    CoresFact,
    FenceFact,
    GeometryFact,
    MemoryFact,
    ModeFact,
)
from alloy_agent.model import Device, ModeKind, Partition, Scheme, Share, Vendor

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


def _neuron(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.NEURON and partition.share is Share.EXCLUSIVE


def _whole_gpu(partition: Partition, device: Device) -> bool:
    exclusive = partition.share is Share.EXCLUSIVE
    return device.vendor is Vendor.NVIDIA and exclusive and not _mig(partition, device)


def _not_mig(partition: Partition, device: Device) -> bool:
    return device.vendor is not Vendor.CPU and not _mig(partition, device)


def _exclusive(partition: Partition, device: Device) -> bool:
    return device.vendor is not Vendor.CPU and partition.share is Share.EXCLUSIVE


def _idle(case: Case) -> str:
    """Return why there is no tenant to fence; of partitions that others made we cannot know."""
    given = any(
        g.partition == case.partition.id and g.generation == case.partition.generation
        for g in case.intent.grants
    )
    if given or not case.partition.managed:
        return ""
    return "no tenant was given this partition"


def _no_cap(case: Case) -> str:
    return "no memory cap was granted" if case.partition.memory_bytes is None else ""


# --- any accelerator ---------------------------------------------------------------------------


def _fence(case: Case) -> Outcome:
    fence = case.get("partition.device_fence", FenceFact)
    wanted = set(case.partition.access.device_nodes)
    own = named(sorted(fence.own_nodes))
    expected = f"may open {own} and control nodes, and no neighbour may"
    if not fence.in_force:
        return failed(expected, "no device rule is in force")
    if not fence.own_nodes:
        return failed(expected, "its device node is shared with neighbours")
    extra = sorted(set(fence.allowed_nodes) - wanted - CONTROL_NODES)
    if extra:
        return failed(expected, f"may also open {named(extra)}")
    return passed(expected, f"may open {named(sorted(fence.allowed_nodes))}")


def _no_strangers(case: Case) -> Outcome:
    clients = case.get("device.parent_processes", tuple[ClientFact, ...])
    strangers = [f"{c.name or 'process'}[{c.pid}]" for c in clients if not c.monitor]
    expected = "no process on the device outside of its partitions"
    if strangers:
        return failed(expected, named(strangers))
    return passed(expected, f"{len(clients)} monitors" if clients else "none")


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


def _full_compute(case: Case) -> Outcome:
    shown = case.get("partition.compute_instances", ComputeFact)
    expected = f"one compute instance of {shown.slices} slices"
    observed = named([f"{instance.slices} slices" for instance in shown.instances])
    if [instance.slices for instance in shown.instances] == [shown.slices]:
        return passed(expected, observed)
    return failed(expected, observed, "compute instances share the engines of their GPU instance")


# --- AMD ---------------------------------------------------------------------------------------


def _modes(case: Case) -> Outcome:
    shown = case.get("device.modes", dict[str, ModeFact])
    count = len(case.get("device.geometry", tuple[GeometryFact, ...]))
    wanted = {mode.kind.value: mode.current for mode in case.device.modes}
    layout = case.intent.of_device(case.device.id)
    if layout is not None:
        wanted |= {kind.value: mode for kind, mode in layout.modes.items()}
    pieces = sum(p.device == case.device.id for p in case.snapshot.partitions)
    expected = _in_words(wanted, pieces)
    observed = _in_words({kind: mode.current for kind, mode in shown.items()}, count)
    return compare(expected, observed, "modes or count differ from what was meant")


def _in_words(modes: dict[str, str], count: int) -> str:
    return ", ".join(f"{kind} {modes[kind]}" for kind in sorted(modes)) + f", {count} pieces"


def _process_isolation(case: Case) -> Outcome:
    on = case.get("partition.process_isolation", int)
    return compare("on", "on" if on else "off", "local memory may outlive a process")


def _several_pieces(case: Case) -> str:
    whole = case.partition.placement.size == case.device.slices
    return "the piece is the whole device" if whole else ""


def _memory_domains(case: Case) -> Outcome:
    memory = case.get("device.modes", dict[str, ModeFact]).get("memory")
    observed = memory.current if memory else "no memory mode"
    expected = "memory in more than one domain (NPS2 or more)"
    if observed.removeprefix("NPS") in {"1", "no memory mode"}:
        return failed(expected, observed, "all pieces interleave over all of the memory")
    return passed(expected, observed)


# --- Neuron ------------------------------------------------------------------------------------


def _cores(case: Case) -> Outcome:
    shown = case.get("partition.cores", CoresFact)
    granted = set(range(case.partition.placement.start, case.partition.placement.stop))
    expected = f"uses of cores {_numbers(granted)} by this tenant only"
    problems = []
    if set(shown.granted) != granted:
        problems.append(f"the driver grants {_numbers(shown.granted)}")
    if outside := set(shown.used) - granted:
        problems.append(f"uses {_numbers(outside)} outside of the grant")
    problems += [f"process {i.pid} uses {_numbers(i.cores)}" for i in shown.intruders]
    if problems:
        return failed(expected, named(problems))
    return passed(expected, f"{_numbers(shown.used)} in use")


def _numbers(cores: tuple[int, ...] | set[int]) -> str:
    return ",".join(map(str, sorted(cores))) or "none"


def _need(name: str, shape: object, of: str = "partition") -> Need:
    return Need(name=name, shape=shape, of=of)


FENCE = _need("partition.device_fence", FenceFact)
STRANGERS = _need("device.parent_processes", tuple[ClientFact, ...], "device")
GEOMETRY = _need("device.geometry", tuple[GeometryFact, ...], "device")
MODES = _need("device.modes", dict[str, ModeFact], "device")
MEMORY = _need("partition.memory", MemoryFact)

FENCE_CLAIM = "Device rules let the tenant open its own nodes, and let no neighbour open them."
STRANGER_CLAIM = "No process is on the device outside of its partitions."

CHECKS: tuple[Check, ...] = (
    Check(
        id="MIG-01",
        claim="The driver shows the very instance that the partition names.",
        applies=_mig,
        needs=(GEOMETRY,),
        judge=_shown,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="MIG-02",
        claim="One compute instance spans the whole GPU instance.",
        applies=_mig,
        needs=(_need("partition.compute_instances", ComputeFact),),
        judge=_full_compute,
        supports=HARD,
        required_for=HARD,
    ),
    Check(
        id="MIG-03",
        claim=FENCE_CLAIM,
        applies=_mig,
        needs=(FENCE,),
        judge=_fence,
        exempt=_idle,
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
        applies=_amd,
        needs=(MODES, GEOMETRY),
        judge=_modes,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="CPX-02",
        claim="Local memory is cleared between processes (enforce_isolation).",
        applies=_amd,
        needs=(_need("partition.process_isolation", int),),
        judge=_process_isolation,
        exempt=_idle,
        supports=HARD,
        required_for=(),
    ),
    Check(
        id="CPX-03",
        claim=FENCE_CLAIM,
        applies=_amd,
        needs=(FENCE,),
        judge=_fence,
        exempt=_idle,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="CPX-04",
        claim="The memory mode keeps pieces apart.",
        applies=_amd,
        needs=(MODES,),
        judge=_memory_domains,
        exempt=_several_pieces,
        supports=HARD,
        required_for=HARD,
    ),
    Check(
        id="NRN-01",
        claim="The tenant uses the cores it was granted, and nobody else does.",
        applies=_neuron,
        needs=(_need("partition.cores", CoresFact),),
        judge=_cores,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="NRN-02",
        claim=FENCE_CLAIM,
        applies=_neuron,
        needs=(FENCE,),
        judge=_fence,
        exempt=_idle,
        supports=ENFORCED,
        required_for=ENFORCED,
    ),
    Check(
        id="DEV-01",
        claim=FENCE_CLAIM,
        applies=_whole_gpu,
        needs=(FENCE,),
        judge=_fence,
        exempt=_idle,
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
