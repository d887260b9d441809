"""Known attack and interference classes that a tier does not close, as data with their sources.

Every report lists those that apply: isolation for quality of service is not isolation for
security, and a reader must see what stays open even where every check passes.
"""

from __future__ import annotations

from alloy_agent.model import (
    Device,
    Partition,
    ResidualClass,
    Scheme,
    Share,
    Tier,
    Value,
    Vendor,
)

ALL_TIERS = frozenset(Tier)
BELOW_HARD = frozenset({Tier.ENFORCED, Tier.SOFT, Tier.ADVISORY})
BELOW_ENFORCED = frozenset({Tier.SOFT, Tier.ADVISORY})
ACCELERATORS = frozenset({Vendor.NVIDIA, Vendor.AMD, Vendor.NEURON})
EVERYONE = frozenset(Vendor)


class OpenClass(Value, frozen=True, kw_only=True):
    """A residual class, and where it stays open."""

    what: ResidualClass
    tiers: frozenset[Tier]
    vendors: frozenset[Vendor]
    linked_only: bool = False  # only where the device has links to others


def _entry(  # noqa: PLR0913 - a row of the table
    ident: str,
    name: str,
    text: str,
    source: str,
    *,
    tiers: frozenset[Tier] = ALL_TIERS,
    vendors: frozenset[Vendor] = ACCELERATORS,
    linked_only: bool = False,
) -> OpenClass:
    return OpenClass(
        what=ResidualClass(id=ident, name=name, text=text, source=source),
        tiers=tiers,
        vendors=vendors,
        linked_only=linked_only,
    )


TABLE: tuple[OpenClass, ...] = (
    _entry(
        "RC-TLB",
        "shared last-level TLB",
        "MIG instances of one GPU share the last-level TLB: a covert channel between them was "
        "shown on A100-class parts. Nothing on the node closes it; keep tenants of one trust "
        "domain on one GPU.",
        "TunneLs for Bootlegging, ACM CCS 2023",
        vendors=frozenset({Vendor.NVIDIA}),
    ),
    _entry(
        "RC-MEMBAR",
        "L2 and memory barriers",
        "Memory barriers show through MIG's L2 partitions: a neighbour's launch pattern, and "
        "from it models and token counts, were inferred.",
        "Behind Bars, USENIX Security 2026",
        vendors=frozenset({Vendor.NVIDIA}),
    ),
    _entry(
        "RC-PCIE",
        "PCIe and uncore contention",
        "Transfers of neighbours below one root port, and traffic through the shared on-chip "
        "fabric, slow each other and can be timed.",
        "PCIe contention fingerprinting, MICRO 2024 (title unverified); arXiv 2508.20274",
    ),
    _entry(
        "RC-LINK",
        "NVLink and xGMI timing",
        "Links between devices are shared: contention and link counters were used as channels, "
        "across virtual machines too.",
        "Beyond the Bridge, arXiv 2404.03877; NVBleed, arXiv 2503.17847",
        linked_only=True,
    ),
    _entry(
        "RC-PEER-L2",
        "prime and probe over peer access",
        "With peer access a tenant can observe the L2 of another device over the link.",
        "Spy in the GPU-box, arXiv 2203.15981",
        vendors=frozenset({Vendor.NVIDIA}),
        linked_only=True,
    ),
    _entry(
        "RC-POWER",
        "power, clocks and temperature",
        "Partitions of one package share its power budget and clocks: load of one lowers the "
        "clocks of all, which is interference and a channel.",
        "MIG power interference, arXiv 2604.08451; IChannels, arXiv 2106.05050",
        vendors=EVERYONE,
    ),
    _entry(
        "RC-RESIDUE",
        "residue in memory",
        "Device memory, registers and caches may keep data of the tenant before; vendors say "
        "little on scrubbing when a partition is handed over.",
        "EraseMe, GLSVLSI 2019, and works cited there",
    ),
    _entry(
        "RC-LDS",
        "local memory not cleared (LeftoverLocals)",
        "Local data share may keep values of the kernel before, readable by the next one; "
        "closed only where the driver clears it between processes.",
        "Trail of Bits, LeftoverLocals, 2024; CVE-2023-4969",
        vendors=frozenset({Vendor.AMD}),
    ),
    _entry(
        "RC-BANDWIDTH",
        "shared caches and memory bandwidth",
        "Caches and memory bandwidth are shared without a limit: neighbours slow each other "
        "and can be observed by their cache use.",
        "Naghibijouybari et al., MICRO 2017 (covert channels on GPUs); docs/audit.md, tiers",
        tiers=BELOW_HARD,
        vendors=EVERYONE,
    ),
    _entry(
        "RC-FAULT",
        "shared faults",
        "A fault, a reset or a hang of the device hits every tenant on it.",
        "docs/audit.md, tiers",
        tiers=BELOW_HARD,
        vendors=EVERYONE,
    ),
    _entry(
        "RC-RESET",
        "a reset takes every partition",
        "A reset of the device ends the work of all its partitions, and one of a hive that of "
        "every device in it; any tenant whose work hangs the device can be the cause.",
        "kernel amdgpu_reset.c; ROCm amd-smi, `amdsmi_reset_gpu`",
        vendors=frozenset({Vendor.AMD}),
    ),
    _entry(
        "RC-SCHED",
        "contention in shared contexts",
        "Time slicing, shared servers and masks share functional units and schedulers; covert "
        "channels of several Mbit/s were shown.",
        "Naghibijouybari et al., MICRO 2017",
        tiers=BELOW_ENFORCED,
        vendors=EVERYONE,
    ),
    _entry(
        "RC-ENV",
        "limits that the tenant can lift",
        "Environment variables and masks are set in the tenant's process, which may change them.",
        "nvidia-container-runtime issue 27; gpu-operator issue 1502; ROCm and Neuron runtimes",
        tiers=BELOW_ENFORCED,
    ),
    _entry(
        "RC-NRN-OPS",
        "Neuron: calls that ask nobody's leave",
        "Whoever holds a Neuron device node may reset any of its cores, copy and free any memory "
        "handle, and print into the kernel log; the driver checks none of it against an owner. "
        "Three memory-safety faults of such calls are fixed from driver 2.26.5 on, a race between "
        "resets of cores from 2.28 on.",
        "aws-neuron-driver 2.24.7, neuron_cdev.c, neuron_mc_handle.c; release notes 2.26.5, 2.28",
        tiers=BELOW_ENFORCED,
        vendors=frozenset({Vendor.NEURON}),
    ),
    _entry(
        "RC-NRN-MARKS",
        "Neuron: one registry of reserved cores for the host",
        "A holder of any Neuron node may reserve cores of devices that it was not given, so that "
        "their tenants cannot start; the reservation ends with the holder. No driver version "
        "closes this; tenants of one trust domain on one host do.",
        "aws-neuron-driver 2.24.7, neuron_crwl.c (read, not tried on hardware)",
        vendors=frozenset({Vendor.NEURON}),
        linked_only=True,
    ),
    _entry(
        "RC-NRN-PEER",
        "Neuron: DMA to peers over NeuronLink",
        "DMA descriptors are checked for host addresses only. Whether a link carries them into "
        "the memory of a device that the tenant was not given is not known.",
        "aws-neuron-driver 2.24.7, neuron_dma.c (read, not tried on hardware)",
        vendors=frozenset({Vendor.NEURON}),
        linked_only=True,
    ),
    _entry(
        "RC-NRN-SYSFS",
        "Neuron: counters of all devices are visible",
        "The driver's sysfs tree is the host's in every container: a tenant reads the use of "
        "devices that it was not given.",
        "optimum-neuron issue 544; aws-neuron-driver 2.28 (world-readable attributes)",
        vendors=frozenset({Vendor.NEURON}),
        linked_only=True,
    ),
    _entry(
        "RC-GATE",
        "launch gate as a channel",
        "Where launches are let through only while production is idle, the gate itself tells a "
        "neighbour when production works.",
        "docs/audit.md, rate control",
        tiers=BELOW_ENFORCED,
    ),
    _entry(
        "RC-NODE",
        "control nodes of the host",
        "Tenants share the driver's control nodes and the kernel: a flaw in either reaches across "
        "partitions.",
        "docs/audit.md: device rules fence nodes, not the driver behind them",
    ),
    _entry(
        "RC-SMT-UNCORE",
        "shared last-level cache, memory controller and kernel",
        "Core sets of one package share the last-level cache, the memory controllers and the "
        "kernel; cache and bandwidth allocation is not in force.",
        "IChannels, arXiv 2106.05050; docs/audit.md, tiers",
        vendors=frozenset({Vendor.CPU}),
    ),
    _entry(
        "RC-HOST-SCHED",
        "unpinned host processes",
        "Processes of the host that are not confined themselves may be scheduled on a tenant's "
        "cores for short times; confine the system to its reserve to close this.",
        "cpuset(7): a cpuset confines its own members and nobody else",
        vendors=frozenset({Vendor.CPU}),
    ),
)


def residual_classes(tier: Tier, partition: Partition, device: Device) -> tuple[ResidualClass, ...]:
    """Return what stays open for one partition at the tier it has.

    A share keeps every class of the soft tier: what caps its memory caps nothing else.
    """
    tiers = {tier} if partition.share is Share.EXCLUSIVE else {tier, Tier.SOFT}
    linked = any(link.kind in {"nvlink", "xgmi", "neuronlink"} for link in device.links)
    alone = device.scheme is Scheme.WHOLE or partition.placement.size == device.slices
    return tuple(
        entry.what
        for entry in TABLE
        if tiers & entry.tiers
        and device.vendor in entry.vendors
        and (linked or not entry.linked_only)
        and not (alone and tier is Tier.HARD and entry.what.id in {"RC-TLB", "RC-MEMBAR"})
    )
