"""CPU-*, CGR-*, MEM-*: where processes may run, in which cgroups, under which caps."""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ANY_IN_FORCE,
    Case,
    Check,
    Need,
    Outcome,
    compare,
    counted,
    cpu_list,
    failed,
    named,
    passed,
    size,
)
from alloy_agent.conformance.checks.shapes import (
    HierarchyFact,
    LeafFact,
    MemberFact,
    PinnedFact,
)
from alloy_agent.model import Device, Partition, Share, Tier, Vendor

CPUS = tuple[int, ...]
PAGE_BYTES = 65_536  # the kernel rounds caps to its page size, 64 KiB at most on supported machines

FOR_CPU = (Tier.ENFORCED, Tier.SOFT)
FOR_CORES = (Tier.ENFORCED,)  # claims about cores that nobody shares


def _is_cpu(_partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.CPU


def _own_cores(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.CPU and partition.share is Share.EXCLUSIVE


def _has_cgroup(partition: Partition, _device: Device) -> bool:
    return bool(partition.access.cgroup_procs)


def _people(number: int) -> str:
    return counted(number, "process", "processes")


def _allowed(case: Case) -> Outcome:
    granted = case.get("cpu.granted", CPUS)
    effective = case.get("cgroup.cpus_effective", CPUS)
    if set(granted) == set(effective):
        return passed(cpu_list(granted), cpu_list(effective))
    missing, extra = set(granted) - set(effective), set(effective) - set(granted)
    reason = f"lacks {cpu_list(missing)}" if missing else ""
    if extra:
        reason += f"{', and ' if reason else ''}has {cpu_list(extra)} that were not granted"
    return failed(cpu_list(granted), cpu_list(effective), reason)


def _disjoint(case: Case) -> Outcome:
    mine = set(case.get("cgroup.cpus_effective", CPUS))
    units = set(case.partition.units)
    clashes = [p.id for p in case.siblings if units & set(p.units)]
    clashes += [p.id for p in case.siblings if p.placement.overlaps(case.partition.placement)]
    reserved = units & set(case.device.reserved_units)
    observed = [f"shares with {name}" for name in dict.fromkeys(clashes)]
    if reserved:
        observed.append(f"holds reserved cores {cpu_list(reserved)}")
    if observed:
        return failed("no core of another tenant or of the system", named(observed))
    return passed("no core of another tenant or of the system", f"CPUs {cpu_list(mine)} alone")


def _inside(case: Case) -> Outcome:
    granted = set(case.get("cpu.granted", CPUS))
    members = case.get("cgroup.members", tuple[MemberFact, ...])
    offenders = [
        f"{m.comm}[{m.pid}] on {cpu_list(m.cpus)}" for m in members if not set(m.cpus) <= granted
    ]
    offenders += [
        f"thread {thread.tid} of {m.comm}[{m.pid}] on {cpu_list(thread.cpus)}"
        for m in members
        for thread in m.threads
        if not set(thread.cpus) <= granted
    ]
    expected = f"every thread within {cpu_list(granted)}"
    if offenders:
        return failed(expected, named(offenders))
    return passed(expected, f"{_people(len(members))} inside, all within")


def _nobody_else(case: Case) -> Outcome:
    mine = set(case.get("cpu.granted", CPUS))
    pinned = case.get("host.pinned", tuple[PinnedFact, ...])
    intruders = [
        f"{p.comm}[{p.pid}] on {cpu_list(p.cpus)}"
        for p in pinned
        if p.partition != case.partition.id and mine & set(p.cpus)
    ]
    expected = "no process from elsewhere is placed on these cores"
    return failed(expected, named(intruders)) if intruders else passed(expected, "none")


def _everywhere(case: Case) -> Outcome:
    needed = case.get("cgroup.hierarchies", tuple[HierarchyFact, ...])
    shown = [f"{h.label or 'unified'} (v{h.version})" for h in needed]
    absent = [f"{h.label or 'unified'} (v{h.version})" for h in needed if not h.present]
    if not needed:
        return failed("a cgroup in each hierarchy", "no hierarchy")
    if absent:
        return failed(f"a cgroup in {named(shown)}", f"absent from {named(absent)}")
    return passed(f"a cgroup in {named(shown)}", f"{needed[0].path} in all of them")


def _whole_members(case: Case) -> Outcome:
    members = case.get("cgroup.members", tuple[MemberFact, ...])
    expected = "every process in all hierarchies of the partition, or in none"
    halves = [f"{m.comm}[{m.pid}] is not in {', '.join(m.lacks)}" for m in members if m.lacks]
    halves += [
        f"{len(m.threads_outside)} threads of {m.comm}[{m.pid}] are in another cgroup"
        for m in members
        if m.threads_outside
    ]
    if halves:
        return failed(expected, named(halves))
    return passed(expected, f"{_people(len(members))}, all whole")


def _bound(case: Case) -> list[int]:
    return [
        grant.pid
        for grant in case.intent.grants
        if grant.partition == case.partition.id
        and grant.generation == case.partition.generation
        and grant.pid is not None
    ]


def _nobody_bound(case: Case) -> str:
    return "" if _bound(case) else "no process was bound to this partition"


def _no_cap(case: Case) -> str:
    return "no memory cap was granted" if case.partition.memory_bytes is None else ""


def _tenant_inside(case: Case) -> Outcome:
    bound = _bound(case)
    alive = set(case.get("host.alive", CPUS))
    inside = {m.pid for m in case.get("cgroup.members", tuple[MemberFact, ...])}
    left = [f"process {pid}" for pid in bound if pid in alive and pid not in inside]
    expected = "every bound process that lives is inside"
    return failed(expected, f"{named(left)} outside") if left else passed(expected, "inside")


def _memory_cap(case: Case) -> Outcome:
    granted = case.partition.memory_bytes or 0
    leaves = case.get("cgroup.memory_leaves", tuple[LeafFact, ...])
    expected = f"{size(granted)} binds every leaf"
    if not leaves:
        return failed(expected, "no memory cgroup")
    loose = [
        f"{leaf.path} is bound by {size(leaf.ceiling_bytes)}"
        for leaf in leaves
        if leaf.ceiling_bytes is None or leaf.ceiling_bytes > granted + PAGE_BYTES
    ]
    if loose:
        return failed(expected, named(loose))
    lowest = min(leaf.ceiling_bytes for leaf in leaves if leaf.ceiling_bytes is not None)
    if lowest < granted - PAGE_BYTES:
        return passed(expected, f"bound by {size(lowest)}, less than granted")
    return passed(expected, f"{size(lowest)} in force on {counted(len(leaves), 'leaf', 'leaves')}")


def _memory_used(case: Case) -> Outcome:
    granted = case.partition.memory_bytes or 0
    used = case.get("cgroup.memory_used_bytes", int)
    expected = f"at most {size(granted)}"
    if used > granted + PAGE_BYTES:
        return failed(expected, size(used))
    return passed(expected, size(used))


def _configured(case: Case) -> Outcome:
    return compare(
        cpu_list(case.get("cpu.granted", CPUS)),
        cpu_list(case.get("cgroup.cpus", CPUS)),
        "the cgroup asks for other CPUs than the partition has",
    )


GRANTED = Need(name="cpu.granted", shape=CPUS)
EFFECTIVE = Need(name="cgroup.cpus_effective", shape=CPUS)
MEMBERS = Need(name="cgroup.members", shape=tuple[MemberFact, ...])

CHECKS: tuple[Check, ...] = (
    Check(
        id="CPU-01",
        claim="The CPUs that the kernel allows equal the grant.",
        applies=_is_cpu,
        needs=(GRANTED, EFFECTIVE),
        judge=_allowed,
        supports=FOR_CPU,
        required_for=FOR_CPU,
    ),
    Check(
        id="CPU-02",
        claim="No core belongs to two tenants, or to a tenant and the system.",
        applies=_own_cores,
        needs=(EFFECTIVE,),
        judge=_disjoint,
        supports=FOR_CORES,
        required_for=FOR_CORES,
    ),
    Check(
        id="CPU-03",
        claim="Every process and thread of the tenant may run on granted CPUs only.",
        applies=_is_cpu,
        needs=(GRANTED, MEMBERS),
        judge=_inside,
        supports=FOR_CPU,
        required_for=FOR_CPU,
    ),
    Check(
        id="CPU-04",
        claim="No process from outside is placed on the partition's cores.",
        applies=_own_cores,
        needs=(GRANTED, Need(name="host.pinned", shape=tuple[PinnedFact, ...], of="node")),
        judge=_nobody_else,
        supports=FOR_CORES,
        required_for=FOR_CORES,
    ),
    Check(
        id="CGR-01",
        claim="The partition's cgroup exists in every hierarchy that fences it.",
        applies=_has_cgroup,
        needs=(Need(name="cgroup.hierarchies", shape=tuple[HierarchyFact, ...]),),
        judge=_everywhere,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="CGR-02",
        claim="The cgroup is configured with the partition's CPUs.",
        applies=_is_cpu,
        needs=(GRANTED, Need(name="cgroup.cpus", shape=CPUS)),
        judge=_configured,
        supports=FOR_CPU,
        required_for=FOR_CPU,
    ),
    Check(
        id="CGR-03",
        claim="Every process is in all of the partition's hierarchies, with all its threads.",
        applies=_has_cgroup,
        needs=(MEMBERS,),
        judge=_whole_members,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="CGR-04",
        claim="Every process that was bound to the partition is inside of it.",
        applies=_has_cgroup,
        needs=(MEMBERS, Need(name="host.alive", shape=CPUS, of="node")),
        judge=_tenant_inside,
        exempt=_nobody_bound,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="MEM-01",
        claim="The memory cap binds every leaf cgroup of the tenant.",
        applies=_is_cpu,
        needs=(Need(name="cgroup.memory_leaves", shape=tuple[LeafFact, ...]),),
        judge=_memory_cap,
        exempt=_no_cap,
        supports=FOR_CPU,
        required_for=FOR_CPU,
    ),
    Check(
        id="MEM-05",
        claim="No more memory is in use than was granted.",
        applies=_is_cpu,
        needs=(Need(name="cgroup.memory_used_bytes", shape=int),),
        judge=_memory_used,
        exempt=_no_cap,
        supports=FOR_CPU,
        required_for=FOR_CPU,
    ),
)
