"""The shapes of facts that hold more than one number, shared by collectors and checks.

Facts of a partition that has cgroups (`collect.py` reads them from the kernel, whoever made the
partition):

| fact | shape |
| --- | --- |
| `cgroup.hierarchies` | tuple of `HierarchyFact`: where it should be, and whether it is there |
| `cgroup.cpus`, `cgroup.cpus_effective` | CPUs as configured and as in force |
| `cgroup.memory_leaves` | tuple of `LeafFact`: every leaf with the cap that binds it |
| `cgroup.memory_used_bytes` | bytes charged now |
| `cgroup.members` | tuple of `MemberFact`: every process in any of its hierarchies |

Facts of the node: `host.cpus` (CPUs that the host gives to anyone), `host.pinned` (tuple of
`PinnedFact`), `host.owners` (tuple of `OwnerFact`), `evidence.chain` (`ChainFact`).

Facts of an accelerator, under these names in every backend that has the primitive:
`device.geometry` (tuple of `GeometryFact`), `device.clients` (tuple of `ClientFact`). Of its
partitions: `partition.processes` (list of `{pid, ...}`), `partition.own_nodes` (nodes that no
neighbour may open), `cgroup.device_fence` (`FenceFact`), `partition.memory` (`MemoryFact`),
`mig.instance` (`MigFact`), `amd.partition` (`AmdFact`), `neuron.cores` (`NeuronFact`). Of shares:
`cgroup.device_memory` (tuple of `CapFact`); of an AMD device's: `amd.cu_plan` (`MaskPlanFact`),
`amd.cu_masks` (tuple of `MaskFact`).
"""

from __future__ import annotations

import msgspec

from alloy_agent.model import Vendor


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of fact shapes: a collector may tell more than a check reads."""


class HierarchyFact(Shape, frozen=True, kw_only=True):
    """One cgroup hierarchy that a partition needs."""

    label: str
    version: int
    path: str
    present: bool


class LeafFact(Shape, frozen=True, kw_only=True):
    """A leaf of the memory hierarchy; `ceiling_bytes` is the lowest cap from it to the root."""

    path: str
    limit_bytes: int | None
    ceiling_bytes: int | None
    processes: int


class StrayThread(Shape, frozen=True, kw_only=True):
    """A thread and the CPUs it may use, where they differ from its leader's."""

    tid: int
    cpus: tuple[int, ...]


class MemberFact(Shape, frozen=True, kw_only=True):
    """A process in at least one hierarchy of a partition; it is not in those it `lacks`."""

    pid: int
    comm: str
    uid: int = -1
    cpus: tuple[int, ...]
    lacks: tuple[str, ...] = ()
    threads: tuple[StrayThread, ...] = ()
    threads_outside: tuple[int, ...] = ()  # threads in another cpuset cgroup than the leader's


class PinnedFact(Shape, frozen=True, kw_only=True):
    """A process that may use only some of the host's CPUs; `partition` "" is in none."""

    pid: int
    comm: str
    cpus: tuple[int, ...]
    partition: str = ""


class OwnerFact(Shape, frozen=True, kw_only=True):
    """A program that manages devices here; a `rival` hands out or re-cuts what we manage."""

    name: str
    evidence: str
    vendors: tuple[Vendor, ...] = ()
    rival: bool = True
    note: str = ""


class ChainFact(Shape, frozen=True, kw_only=True):
    """How the evidence chain stands."""

    records: int
    problems: int
    first_problem: str = ""
    lost_records: int = 0


class ContainerFact(Shape, frozen=True, kw_only=True):
    """One container of a claim: what it has beside and below its grant; empty: exactly its grant.

    `others` are nodes of other drivers, not ours to judge; `unread` is what nobody could see.
    """

    pid: int
    container: str
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class FenceFact(Shape, frozen=True, kw_only=True):
    """What device rules let the tenant open; `by` names the rule, "" is no fence."""

    by: str
    allowed: tuple[str, ...]  # absolute paths; "*": any


class MemoryFact(Shape, frozen=True, kw_only=True):
    """Cap and use of device memory; `enforced_by` is instance, driver, dmem, device or none."""

    limit_bytes: int | None
    used_bytes: int
    enforced_by: str


class MigFact(Shape, frozen=True, kw_only=True):
    """One GPU instance as the driver shows it."""

    uuid: str
    instance_slices: int  # compute slices of the GPU instance
    compute_instances: int  # how many compute instances are in it
    compute_slices: int  # compute slices of the tenant's compute instance


class AmdFact(Shape, frozen=True, kw_only=True):
    """The modes that hold, and what they make of the device and of one piece."""

    compute_mode: str
    memory_mode: str
    partitions: int
    expected_partitions: int
    render_node: str = ""
    memory_domains: int = 0
    isolation: bool | None = None
    cleaned: bool | None = None  # by the cleaner shader since the device was cut


class MaskPlanFact(Shape, frozen=True, kw_only=True):
    """The CU mask that a share was granted; `overlaps` names shares with CUs in common."""

    mask: str
    cus: int | None = None
    overlaps: tuple[str, ...] = ()


class MaskFact(Shape, frozen=True, kw_only=True):
    """The mask of one process: as its environment had it, and as its queues have it.

    `words` has one row for each XCC of each queue, None where the kernel does not tell;
    `occupancy_cus` is how many CUs had work at one moment.
    """

    pid: int
    comm: str = ""
    problem: str = ""
    configured: str | None = None
    words: tuple[tuple[int, ...], ...] | None = None
    words_reason: str = ""
    occupancy_cus: int | None = None
    granted_cus: int | None = None


class CapFact(Shape, frozen=True, kw_only=True):
    """The device memory cap of a cgroup with tenants inside; `ceiling_bytes` is what binds it."""

    cgroup: str
    max_bytes: int | None = None
    ceiling_bytes: int | None = None
    current_bytes: int | None = None
    by: str = ""  # "dmem" or "driver"


class NeuronFact(Shape, frozen=True, kw_only=True):
    """The cores that a tenant is bound to or uses, and whether its nodes are its own."""

    cores: tuple[int, ...]
    lnc: str
    whole_device: bool
    device_nodes: tuple[str, ...] = ()


class GeometryFact(Shape, frozen=True, kw_only=True):
    """One piece as the device shows it."""

    id: str
    profile: str
    start: int
    size: int
    incarnation: str


class ClientFact(Shape, frozen=True, kw_only=True):
    """A process on a device; `granted`: it is where its tenant may be.

    `unseen` says why the driver's pid is no process that this host shows; "" where it is one.
    """

    pid: int
    comm: str = ""
    partition: str = ""
    granted: bool = True
    unseen: str = ""
    monitor: bool = False  # only reads counters
    cores: tuple[int, ...] = ()  # Neuron: physical cores that it is on, as far as told
    cores_from: str = ""  # what tells its cores; "nothing" or "environment ..." is no proof
