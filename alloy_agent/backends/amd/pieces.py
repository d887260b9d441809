"""Devices and partitions as nouns, from what one reading of the topology and the modes showed."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.ledger import DeviceEntry, ShareEntry
from alloy_agent.backends.amd.modes import (
    PRODUCTS,
    UNKNOWN,
    Modes,
    compatible,
    divides,
    memory_domains,
    pieces_of,
    xccs_of,
)
from alloy_agent.backends.amd.topology import LINK_KINDS, KfdNode, Topology
from alloy_agent.host.sharegroups import ShareGroups
from alloy_agent.model import (
    Access,
    Condition,
    Device,
    DeviceFault,
    DeviceId,
    Link,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    PartitionId,
    Placement,
    Profile,
    Scheme,
    Scope,
    Tier,
    TierLimit,
    Value,
    Vendor,
)

WHOLE: Final = "whole"
PREFIX: Final = "amd-"
LAST_LEGACY_MINOR: Final = 191  # DRM's range of render minors before it could grow

_WHOLE_LIMIT: Final = TierLimit(
    way="whole", tier=Tier.HARD, reason="a whole device behind its own render node"
)
_SHARED_LIMIT: Final = TierLimit(
    way="shared",
    tier=Tier.SOFT,
    reason="tenants share the device; CU masks and rates are in the tenants' own hands",
)
_CAPPED_LIMIT: Final = TierLimit(
    way="shared-capped",
    tier=Tier.ENFORCED,
    reason="device memory is capped by the kernel (dmem); compute is as at soft",
)


class Sight(Value, frozen=True, kw_only=True):
    """One device as one reading showed it."""

    id: DeviceId
    bus: str
    index: int
    epoch: str  # changes when the driver binds the device anew
    modes: Modes
    nodes: tuple[KfdNode, ...]
    topology: Topology
    peers: dict[int, str]  # KFD node number to device, of all GPUs

    @property
    def xccs(self) -> int:
        """XCCs of the whole device."""
        return xccs_of(self.modes, self.nodes)

    @property
    def expected(self) -> int:
        """How many partitions the mode should make."""
        if self.modes.compute == UNKNOWN:
            return len(self.nodes)
        return pieces_of(self.modes.compute, self.xccs) if self.modes.compute else 1

    @property
    def hive(self) -> int:
        """Number of the xGMI hive; 0: none."""
        return self.nodes[0].hive if self.nodes else 0

    @property
    def looks(self) -> str:
        """Everything that changes when the device is cut anew."""
        ids = ",".join(f"{node.partition}:{node.gpu_id}" for node in self.nodes)
        return f"{self.epoch}/{self.modes.compute}/{self.modes.memory}/{ids}"

    @property
    def settled(self) -> bool:
        """Whether this is a state to judge by, not the middle of a switch."""
        return UNKNOWN not in {self.modes.compute, self.modes.memory} and bool(self.nodes)


def with_caps(device: Device) -> Device:
    """Return a device whose shares' memory the kernel can cap."""
    return replace(device, tier_limits=(*device.tier_limits, _CAPPED_LIMIT))


def device_of(files: Files, roots: Roots, sight: Sight, noted: DeviceEntry, driver: str) -> Device:
    """Return the device as a noun."""
    pci = roots.pci(sight.bus)
    first = sight.nodes[0] if sight.nodes else None
    number = first.device_id if first else files.number(f"{pci}/device", 16) or 0
    each = [node.memory_bytes for node in sight.nodes if node.memory_bytes is not None]
    memory = sum(each) * sight.expected // len(each) if each else None
    cus = max((node.cus for node in sight.nodes), default=0) * sight.expected
    numa = files.number(f"{pci}/numa_node")
    serial = files.text(f"{pci}/unique_id")
    note = _missing(sight)
    return Device(
        id=sight.id,
        vendor=Vendor.AMD,
        model=_model(files, pci, number),
        backend="amd",
        scheme=Scheme.MODES if sight.modes.computes else Scheme.WHOLE,
        slices=sight.xccs,
        slice_name="XCD",
        index=sight.index,
        condition=Condition.OK if sight.settled else Condition.FAILED,
        condition_reason="" if sight.settled else _unsettled(sight),
        bus=sight.bus,
        pci_id=f"0x{number:04x}1002",
        serial=f"0x{serial}" if serial else None,
        numa_node=numa if numa is not None and numa >= 0 else None,
        hive=f"0x{sight.hive:016x}" if sight.hive else None,
        driver=driver or None,
        memory_bytes=memory,
        compute_units=cus or None,
        profiles=_profiles(sight, memory, cus),
        modes=_modes(sight, noted),
        links=_links(sight, numa),
        tier_limits=_limits(sight),
        fault_note=note,
    )


def _model(files: Files, pci: str, number: int) -> str:
    known = PRODUCTS[number][0] if number in PRODUCTS else ""
    if known and "/" not in known:
        return known
    told = files.text(f"{pci}/product_name") or ""
    if known:  # two products have this number: the card's own name decides
        return next((word for word in told.split() if word in known.split("/")), known)
    return told or f"AMD Instinct 0x{number:04x}"


def _unsettled(sight: Sight) -> str:
    if not sight.nodes:
        return "the driver shows no compute node of it"
    return "its mode reads UNKNOWN: a switch is under way, or one has failed"


def _missing(sight: Sight) -> str:
    live, expected = len(sight.nodes), sight.expected
    return "" if live == expected else f"{live} of {expected} partitions live"


def faults_of(sight: Sight, device: Device) -> tuple[DeviceFault, ...]:
    """Return what is wrong with the device now."""
    found = []
    if device.condition is not Condition.OK:
        found.append(("mode_unknown" if sight.nodes else "no_compute_node", _unsettled(sight)))
    elif device.fault_note:
        live = {node.partition for node in sight.nodes}
        gone = [str(number) for number in range(sight.expected) if number not in live]
        reason = (
            f"{device.fault_note}: partition {', '.join(gone)} has no compute node; "
            "usually no DRM minor was left for it"
        )
        found.append(("partition_count_mismatch", reason))
    modes = sight.modes
    if modes.compute and not compatible(modes.compute, modes.memory):
        reason = f"{modes.compute} in {modes.memory} is no pair that the driver knows"
        found.append(("modes_implausible", reason))
    return tuple(DeviceFault(device=sight.id, kind=kind, reason=why) for kind, why in found)


def _profiles(sight: Sight, memory: int | None, cus: int) -> tuple[Profile, ...]:
    found = []
    for mode in sight.modes.computes:
        count = pieces_of(mode, sight.xccs)
        if not divides(mode, sight.xccs):
            continue
        size = sight.xccs // count
        found.append(
            Profile(
                name=mode,
                size=size,
                starts=tuple(range(0, sight.xccs, size)),
                max_count=count,
                memory_bytes=None if memory is None else memory // count,
                compute_units=cus // count or None,
            )
        )
    return tuple(found)


def _modes(sight: Sight, noted: DeviceEntry) -> tuple[Mode, ...]:
    modes = sight.modes
    if not modes.computes:
        return ()
    compute = Mode(
        kind=ModeKind.COMPUTE, current=modes.compute, available=_with(modes.computes, modes.compute)
    )
    if not modes.memory:
        return (compute,)
    asked = noted.memory_requested if noted.requested_epoch == sight.epoch else ""
    memory = Mode(
        kind=ModeKind.MEMORY,
        current=modes.memory,
        pending=asked if asked and asked != modes.memory else None,
        available=_with(modes.memories, modes.memory),
        change=ModeChange.DRIVER_RELOAD,
        scope=Scope.HIVE if sight.hive else Scope.DEVICE,
    )
    return compute, memory


def _with(modes: tuple[str, ...], current: str) -> tuple[str, ...]:
    return modes if current in modes else (*modes, current)


def _limits(sight: Sight) -> tuple[TierLimit, ...]:
    """Return a limit for every pair of modes: hard where no two partitions share memory."""
    limits = [_WHOLE_LIMIT]
    for compute in sight.modes.computes:
        count = pieces_of(compute, sight.xccs)
        for memory in sight.modes.memories:
            if count == 1 or not compatible(compute, memory):
                continue
            sharing = -(-count // memory_domains(memory))
            hard = sharing <= 1
            limits.append(
                TierLimit(
                    way=f"{compute}/{memory}".lower(),
                    tier=Tier.HARD if hard else Tier.ENFORCED,
                    reason="own XCDs, own render node, own memory partition"
                    if hard
                    else f"{sharing} partitions share one memory partition's bandwidth",
                )
            )
    return (*limits, _SHARED_LIMIT)


def _links(sight: Sight, numa: int | None) -> tuple[Link, ...]:
    found: dict[tuple[str, str], int | None] = {}
    for node in sight.nodes:
        for link in node.links:
            peer = sight.peers.get(link.to)
            kind = LINK_KINDS.get(link.kind)
            if peer is None or peer == sight.id or kind is None:
                continue
            best = found.get((peer, kind))
            here = link.max_bandwidth_bytes_per_s
            found[peer, kind] = max(best, here) if best and here else best or here
    links = [Link(peer=f"numa:{numa}", kind="numa")] if numa is not None and numa >= 0 else []
    links += [
        Link(peer=peer, kind=kind, bandwidth_bytes_per_s=bandwidth, hops=1)
        for (peer, kind), bandwidth in sorted(found.items())
    ]
    return tuple(links)


def partitions_of(sight: Sight, roots: Roots, boot: str, cuts: int) -> tuple[Partition, ...]:
    """Return the live partitions. One without a render node cannot be entered: it is none."""
    mode = sight.modes.compute or WHOLE
    size = max(1, sight.xccs // max(1, sight.expected))
    return tuple(
        Partition(
            id=PartitionId(f"{sight.id}/{mode}@{node.partition * size}"),
            device=sight.id,
            profile=mode,
            placement=Placement(start=node.partition * size, size=size),
            incarnation=f"{boot[:8]}.{cuts}.{node.partition}",
            memory_bytes=node.memory_bytes,
            compute_units=node.cus or None,
            locator={
                "xcp": str(node.partition),
                "render_minor": str(node.render_minor),
                "kfd_gpu_id": str(node.gpu_id),
                "kfd_node": str(node.number),
            },
            access=access_of(roots, (node,)),
        )
        for node in sight.nodes
        if node.render_minor is not None and mode != UNKNOWN
    )


def access_of(roots: Roots, nodes: tuple[KfdNode, ...], cu_mask: str = "") -> Access:
    """Return what a tenant needs to be on these nodes.

    Behind its device rules a tenant sees its own nodes alone, which ROCm numbers from 0.
    """
    minors = [node.render_minor for node in nodes if node.render_minor is not None]
    environment = {"ROCR_VISIBLE_DEVICES": ",".join(str(n) for n in range(len(minors)))}
    if cu_mask:
        environment["HSA_CU_MASK"] = cu_mask
    paths = tuple(f"/dev/dri/renderD{minor}" for minor in minors)
    return Access(
        device_nodes=("/dev/kfd", *paths),
        environment=environment,
        unset=("HSA_CU_MASK_SKIP_INIT", "ROC_GLOBAL_CU_MASK", "HIP_VISIBLE_DEVICES"),
    )


def shares_of(
    sight: Sight, roots: Roots, boot: str, shares: list[ShareEntry], groups: ShareGroups
) -> tuple[Partition, ...]:
    """Return the shares of the whole device."""
    return tuple(
        Partition(
            id=PartitionId(f"{sight.id}/{entry.profile}@0"),
            device=sight.id,
            profile=entry.profile,
            placement=Placement(start=0, size=sight.xccs),
            incarnation=f"{boot[:8]}.share-{entry.serial}",
            memory_bytes=entry.memory_bytes,
            compute_units=entry.cus or None,
            share=entry.share,
            ordinal=entry.ordinal,
            cu_mask=entry.choice,
            altered=_altered(entry, groups, sight.bus),
            locator={"share": str(entry.serial), "cu_mask": entry.cu_mask},
            access=replace(
                access_of(roots, sight.nodes, entry.cu_mask),
                cgroup_procs=groups.procs(sight.bus, entry.profile),
            ),
        )
        for entry in shares
    )


def _altered(entry: ShareEntry, groups: ShareGroups, bus: str) -> str:
    """Return in which way a share's memory cap is not what was granted; "" if it is."""
    if entry.memory_bytes is None:
        return ""
    cap = groups.cap(bus, entry.profile, bus)
    if cap is not None and cap.max_bytes == entry.memory_bytes:
        return ""
    shown = "none" if cap is None or cap.max_bytes is None else f"{cap.max_bytes} bytes"
    return f"has {shown} as memory cap in force, granted were {entry.memory_bytes} bytes"
