"""AMD Instinct boards.

Source: kernel `drivers/gpu/drm/amd/amdgpu/aqua_vanjaram.c` (modes by number of XCCs), recorded
topologies in ROCm/k8s-device-plugin `testdata/`, and AMD's partition.md. Numbers marked "guess" are
recalled and unverified. Memory modes are what `available_memory_partition` offers.
"""

from __future__ import annotations

from typing import Final

from alloy_agent.silicon.boards.shapes import AmdBoard

_KERNEL: Final = "torvalds/linux amdgpu aqua_vanjaram.c; ROCm/k8s-device-plugin testdata"

# Which memory modes each compute mode works in. Source: aqua_vanjaram.c.
COMPATIBLE_MEMORY: Final[dict[str, tuple[str, ...]]] = {
    "SPX": ("NPS1",),
    "DPX": ("NPS1", "NPS2"),
    "TPX": ("NPS1", "NPS4"),
    "QPX": ("NPS1", "NPS4"),
    "CPX": ("NPS1", "NPS4"),
}

# Modes by number of XCCs. Source: aqua_vanjaram.c.
MODES_BY_XCCS: Final[dict[int, tuple[str, ...]]] = {
    8: ("SPX", "DPX", "QPX", "CPX"),
    6: ("SPX", "TPX", "CPX"),
    4: ("SPX", "DPX", "CPX"),
    2: ("SPX", "CPX"),
    1: ("SPX", "CPX"),
}


def partitions_of(mode: str, xcds: int) -> int:
    """Return into how many partitions a compute mode cuts a device with that many XCDs."""
    return {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": xcds}[mode]


def memory_partitions_of(mode: str) -> int:
    """Return the number of memory partitions of `NPS<n>`."""
    return int(mode.removeprefix("NPS"))


MI210: Final = AmdBoard(
    name="MI210",
    product="AMD Instinct MI210",
    gfx="gfx90a",
    gfx_target_version=90010,
    device_id=0x740F,
    xcds=1,
    cus_per_xcd=104,
    memory_mib=65520,  # guess: 64 GiB
    power_idle_w=40.0,
    power_cap_w=300.0,
    xgmi_bytes_per_s=50_000_000_000,
    source="ROCm/k8s-device-plugin testdata/topo-mi210-xgmi-pcie",
)

# One of the two dies of a card: each is a PCI function, a KFD node and a render node of its own.
MI250: Final = AmdBoard(
    name="MI250",
    product="AMD Instinct MI250",
    gfx="gfx90a",
    gfx_target_version=90010,
    device_id=0x740C,  # guess
    xcds=1,
    cus_per_xcd=104,  # guess
    memory_mib=65520,  # guess: 64 GiB of each die
    power_idle_w=45.0,
    power_cap_w=560.0,
    xgmi_bytes_per_s=50_000_000_000,
    source="AMD Instinct MI250 data sheet: 2 dies of 104 CUs and 64 GB; not compared with a device",
)

MI300A: Final = AmdBoard(
    name="MI300A",
    product="AMD Instinct MI300A",
    gfx="gfx942",
    gfx_target_version=90402,
    device_id=0x74A0,
    xcds=6,
    cus_per_xcd=38,
    memory_mib=131072,
    compute_modes=MODES_BY_XCCS[6],
    memory_modes=("NPS1",),
    apu=True,
    power_idle_w=100.0,
    power_cap_w=550.0,
    xgmi_bytes_per_s=64_000_000_000,
    source=_KERNEL,
)

MI300X: Final = AmdBoard(
    name="MI300X",
    product="AMD Instinct MI300X OAM",
    gfx="gfx942",
    gfx_target_version=90402,
    device_id=0x74A1,
    xcds=8,
    cus_per_xcd=38,
    memory_mib=196592,
    compute_modes=MODES_BY_XCCS[8],
    memory_modes=("NPS1", "NPS2", "NPS4"),
    power_idle_w=130.0,
    power_cap_w=750.0,
    xgmi_bytes_per_s=64_000_000_000,
    source=_KERNEL,
)

MI308X: Final = AmdBoard(
    name="MI308X",
    product="AMD Instinct MI308X",
    gfx="gfx942",
    gfx_target_version=90402,
    device_id=0x74A2,
    xcds=4,
    cus_per_xcd=20,
    memory_mib=196592,  # guess: 192 GB as MI300X
    compute_modes=MODES_BY_XCCS[4],
    memory_modes=("NPS1",),
    power_idle_w=110.0,
    power_cap_w=650.0,
    xgmi_bytes_per_s=64_000_000_000,
    source="ROCm/k8s-device-plugin testdata/topology-parsing-mi308; kernel rule for 4 XCCs",
)

MI325X: Final = AmdBoard(
    name="MI325X",
    product="AMD Instinct MI325X OAM",
    gfx="gfx942",
    gfx_target_version=90402,
    device_id=0x74A5,  # guess
    xcds=8,
    cus_per_xcd=38,
    memory_mib=262128,  # guess: 256 GiB less what MI300X keeps back
    compute_modes=MODES_BY_XCCS[8],
    memory_modes=("NPS1", "NPS2", "NPS4"),
    power_idle_w=140.0,
    power_cap_w=1000.0,
    xgmi_bytes_per_s=64_000_000_000,
    source=_KERNEL,
)

MI355X: Final = AmdBoard(
    name="MI355X",
    product="AMD Instinct MI355X OAM",
    gfx="gfx950",
    gfx_target_version=90500,
    device_id=0x75A3,
    xcds=8,
    cus_per_xcd=32,
    memory_mib=294896,  # guess: 288 GiB less what MI300X keeps back
    compute_modes=MODES_BY_XCCS[8],
    memory_modes=("NPS1", "NPS2"),  # guess
    power_idle_w=160.0,
    power_cap_w=1400.0,
    xgmi_bytes_per_s=76_800_000_000,
    source=_KERNEL,
)

AMD_BOARDS: Final = (MI210, MI250, MI300A, MI300X, MI308X, MI325X, MI355X)
