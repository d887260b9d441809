"""NVIDIA boards with their GPU instance profiles.

Source of ids, placements, SM and engine counts: the MIG User Guide (v580, "Supported MIG
Profiles", docs.nvidia.com/datacenter/tesla/mig-user-guide) and profile dumps of p4d, p5 and p6-b200
nodes in the Go package `nvidiadra`. Memory differs by some 100 MiB between drivers: compare with
tolerance. Idle and cap power, PCI ids and total memory are the vendor's data-sheet figures.
"""

from __future__ import annotations

from typing import Final

from alloy_agent.silicon.boards.shapes import InstanceShape, NvidiaBoard

_GUIDE: Final = "MIG User Guide v580, Supported MIG Profiles"

# (id, enum, compute slices, size, starts, max): the same for every part with 8 memory slices.
_SEVENTHS: Final = (
    (19, 0x0, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
    (20, 0x7, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    (15, 0x9, 1, 2, (0, 2, 4, 6), 4),
    (14, 0x1, 2, 2, (0, 2, 4), 3),
    (9, 0x2, 3, 4, (0, 4), 2),
    (5, 0x3, 4, 4, (0,), 1),
    (0, 0x4, 7, 8, (0,), 1),
)

# Copy engines, decoders, JPEG units, optical flow units, in the order of `_SEVENTHS`.
_ENGINES_A100: Final = (
    (1, 0, 0, 0),
    (1, 1, 1, 1),
    (1, 1, 0, 0),
    (2, 1, 0, 0),
    (3, 2, 0, 0),
    (4, 2, 0, 0),
    (7, 5, 1, 1),
)
_ENGINES_H100: Final = (
    (1, 1, 1, 0),
    (1, 1, 1, 1),
    (1, 1, 1, 0),
    (2, 2, 2, 0),
    (3, 3, 3, 0),
    (4, 4, 4, 0),
    (8, 7, 7, 1),
)
_ENGINES_B200: Final = (
    (2, 1, 1, 0),
    (2, 1, 1, 1),
    (2, 1, 1, 0),
    (4, 2, 2, 0),
    (6, 3, 3, 0),
    (8, 4, 4, 0),
    (16, 7, 7, 1),
)


def _sevenths(
    names: str, sms: tuple[int, ...], mib: tuple[int, ...], engines: tuple[tuple[int, ...], ...]
) -> tuple[InstanceShape, ...]:
    """Return the seven profiles of a part with 8 memory slices."""
    rows = zip(names.split(), _SEVENTHS, sms, mib, engines, strict=True)
    return tuple(
        InstanceShape(
            name=name,
            vendor_id=shape[0],
            enum=shape[1],
            compute_slices=shape[2],
            size=shape[3],
            starts=shape[4],
            max_count=shape[5],
            sms=sm,
            memory_mib=memory,
            engines=(engine[0], engine[1], engine[2], engine[3]),
        )
        for name, shape, sm, memory, engine in rows
    )


_A100_80: Final = _sevenths(
    "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
    (14, 14, 14, 28, 42, 56, 98),
    (9728, 9728, 19968, 19968, 40192, 40192, 80640),
    _ENGINES_A100,
)

A100_SXM4_40GB: Final = NvidiaBoard(
    name="A100-SXM4-40GB",
    aliases=("A100-40GB", "A100-40"),
    product="NVIDIA A100-SXM4-40GB",
    architecture="ampere",
    pci_id=0x20B010DE,
    sms=108,
    memory_mib=40960,
    memory_slices=8,
    compute_slices=7,
    profiles=_sevenths(
        "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
        (14, 14, 14, 28, 42, 56, 98),
        (4864, 4864, 9984, 9984, 20096, 20096, 40320),
        _ENGINES_A100,
    ),
    driver_floor="450.80.02",
    power_idle_w=52.0,
    power_cap_w=400.0,
    nvlinks=12,
    nvlink_bytes_per_s=25_000_000_000,
    source=_GUIDE,
)

A100_SXM4_80GB: Final = NvidiaBoard(
    name="A100-SXM4-80GB",
    aliases=("A100-80GB", "A100-80", "A100"),
    product="NVIDIA A100-SXM4-80GB",
    architecture="ampere",
    pci_id=0x20B210DE,
    sms=108,
    memory_mib=81920,
    memory_slices=8,
    compute_slices=7,
    profiles=_A100_80,
    driver_floor="450.80.02",
    power_idle_w=60.0,
    power_cap_w=400.0,
    nvlinks=12,
    nvlink_bytes_per_s=25_000_000_000,
    source=_GUIDE,
)

A100_PCIE_80GB: Final = NvidiaBoard(
    name="A100-PCIE-80GB",
    product="NVIDIA A100 80GB PCIe",
    architecture="ampere",
    pci_id=0x20B510DE,
    sms=108,
    memory_mib=81920,
    memory_slices=8,
    compute_slices=7,
    profiles=_A100_80,
    driver_floor="450.80.02",
    power_idle_w=45.0,
    power_cap_w=300.0,
    source=_GUIDE,
)

# Names and counts from the guide; ids, memory and SMs recalled from it, not checked on a device.
A30_24GB: Final = NvidiaBoard(
    name="A30-24GB",
    aliases=("A30",),
    product="NVIDIA A30",
    architecture="ampere",
    pci_id=0x20B710DE,
    sms=56,
    memory_mib=24576,
    memory_slices=4,
    compute_slices=4,
    profiles=(
        InstanceShape(
            name="1g.6gb",
            vendor_id=14,
            enum=0x0,
            compute_slices=1,
            size=1,
            starts=(0, 1, 2, 3),
            max_count=4,
            sms=14,
            memory_mib=5952,
        ),
        InstanceShape(
            name="1g.6gb+me",
            vendor_id=21,
            enum=0x7,
            compute_slices=1,
            size=1,
            starts=(0, 1, 2, 3),
            max_count=1,
            sms=14,
            memory_mib=5952,
        ),
        InstanceShape(
            name="2g.12gb",
            vendor_id=5,
            enum=0x1,
            compute_slices=2,
            size=2,
            starts=(0, 2),
            max_count=2,
            sms=28,
            memory_mib=12032,
        ),
        InstanceShape(
            name="2g.12gb+me",
            vendor_id=6,
            enum=0x8,
            compute_slices=2,
            size=2,
            starts=(0, 2),
            max_count=1,
            sms=28,
            memory_mib=12032,
        ),
        InstanceShape(
            name="4g.24gb",
            vendor_id=0,
            enum=0x3,
            compute_slices=4,
            size=4,
            starts=(0,),
            max_count=1,
            sms=56,
            memory_mib=24064,
        ),
    ),
    driver_floor="460.32.03",
    power_idle_w=30.0,
    power_cap_w=165.0,
    source=_GUIDE,
)

H100_SXM5_80GB: Final = NvidiaBoard(
    name="H100-SXM5-80GB",
    aliases=("H100-80GB", "H100-SXM-80GB", "H100"),
    product="NVIDIA H100 80GB HBM3",
    architecture="hopper",
    pci_id=0x233010DE,
    sms=132,
    memory_mib=81559,
    memory_slices=8,
    compute_slices=7,
    profiles=_sevenths(
        "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
        (16, 16, 26, 32, 60, 64, 132),
        (9984, 9984, 20096, 20096, 40448, 40448, 81152),
        _ENGINES_H100,
    ),
    driver_floor="525.85.12",
    power_idle_w=70.0,
    power_cap_w=700.0,
    nvlinks=18,
    nvlink_bytes_per_s=25_000_000_000,
    source=_GUIDE,
)

H200_SXM_141GB: Final = NvidiaBoard(
    name="H200-SXM-141GB",
    aliases=("H200-141GB", "H200-SXM5-141GB", "H200"),
    product="NVIDIA H200",
    architecture="hopper",
    pci_id=0x233510DE,
    sms=132,
    memory_mib=143771,
    memory_slices=8,
    compute_slices=7,
    profiles=_sevenths(
        "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
        (16, 16, 26, 32, 60, 64, 132),
        (16384, 16384, 33280, 33280, 71424, 71424, 143360),
        _ENGINES_H100,
    ),
    driver_floor="550.90.07",
    power_idle_w=75.0,
    power_cap_w=700.0,
    nvlinks=18,
    nvlink_bytes_per_s=25_000_000_000,
    source=_GUIDE,
)

B200_180GB: Final = NvidiaBoard(
    name="B200-180GB",
    aliases=("B200-SXM-180GB", "B200"),
    product="NVIDIA B200",
    architecture="blackwell",
    pci_id=0x290110DE,
    sms=148,
    memory_mib=183359,
    memory_slices=8,
    compute_slices=7,
    profiles=_sevenths(
        "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
        (18, 18, 30, 36, 70, 72, 148),
        (20992, 20992, 45312, 45312, 91136, 91136, 182784),
        _ENGINES_B200,
    ),
    driver_floor="570.133.20",
    power_idle_w=140.0,
    power_cap_w=1000.0,
    nvlinks=18,
    nvlink_bytes_per_s=50_000_000_000,
    source=_GUIDE,
)

NVIDIA_BOARDS: Final = (
    A100_SXM4_40GB,
    A100_SXM4_80GB,
    A100_PCIE_80GB,
    A30_24GB,
    H100_SXM5_80GB,
    H200_SXM_141GB,
    B200_180GB,
)
