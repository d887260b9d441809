"""Where fields are in the driver's tables: derived from the order and widths of their members.

The tables below are facts of public headers: members in order, as (name, bytes of one, how many).
Offsets follow from C's natural alignment, and are compared with what the backend reads.

Source: `drivers/gpu/drm/amd/include/kgd_pp_interface.h`, Linux 6.12.117 (1.3 to 1.5) and
ROCm/amdgpu 0ce779bf9fda (1.6 to 1.8); `v9_structs.h` and `kfd_mqd_manager_v9.c`, Linux 6.12.117;
constants there: NUM_HBM_INSTANCES 4, NUM_XGMI_LINKS 8, MAX_GFX_CLKS 8, MAX_CLKS 4, NUM_VCN 4,
NUM_JPEG_ENG 32, NUM_JPEG_ENG_V1 40, MAX_XCC 8, NUM_XCP 8. The members of `amdsmi`'s structures are
those of `amdsmi.h` 26.0 as the wrapper 7.0.2 has them.
"""

from __future__ import annotations

import struct
from typing import Final

import pytest

from alloy_agent.backends.amd import mqd
from alloy_agent.backends.amd.metrics import LAYOUTS

Member = tuple[str, int, int]

HEADER: Final[tuple[Member, ...]] = (("header", 2, 2),)
HOT: Final[tuple[Member, ...]] = (
    ("temperature_hotspot", 2, 1),
    ("temperature_mem", 2, 1),
    ("temperature_vrsoc", 2, 1),
    ("current_socket_power", 2, 1),
    ("average_gfx_activity", 2, 1),
    ("average_umc_activity", 2, 1),
)
CLOCKED: Final[tuple[Member, ...]] = (
    ("energy_accumulator", 8, 1),
    ("system_clock_counter", 8, 1),
)
RESIDENCY: Final[tuple[Member, ...]] = (
    ("accumulation_counter", 4, 1),
    ("prochot_residency_acc", 4, 1),
    ("ppt_residency_acc", 4, 1),
    ("socket_thm_residency_acc", 4, 1),
    ("vr_thm_residency_acc", 4, 1),
    ("hbm_thm_residency_acc", 4, 1),
)
LINKS: Final[tuple[Member, ...]] = (
    ("gfxclk_lock_status", 4, 1),
    ("pcie_and_xgmi_link", 2, 4),
    ("gfx_activity_acc", 4, 1),
    ("mem_activity_acc", 4, 1),
    ("pcie_counters", 8, 5),
)
NAKS: Final[tuple[Member, ...]] = (("pcie_naks", 4, 2),)
DATA: Final[tuple[Member, ...]] = (("xgmi_data_acc", 8, 16),)
STATUS: Final[tuple[Member, ...]] = (("xgmi_link_status", 2, 8), ("padding", 2, 1))
CLOCKS: Final[tuple[Member, ...]] = (
    ("firmware_timestamp", 8, 1),
    ("current_gfxclk", 2, 8),
    ("current_other_clocks", 2, 12),
    ("current_uclk", 2, 1),
)
LAST: Final[tuple[Member, ...]] = (("pcie_lc_perf_other_end_recovery", 4, 1),)


def xcp(jpeg: int, counters: int) -> tuple[Member, ...]:
    """Return the members of one element of `xcp_stats`."""
    return (
        ("gfx_busy_inst", 4, 8),
        ("jpeg_busy", 2, jpeg),
        ("vcn_busy", 2, 4),
        ("gfx_busy_acc", 8, 8),
        ("limit_counters", 8, 8 * counters),
    )


V1_3: Final[tuple[Member, ...]] = (
    ("temperature_edge", 2, 1),
    ("temperature_hotspot", 2, 1),
    ("temperature_mem", 2, 1),
    ("temperature_vr", 2, 3),
    ("average_gfx_activity", 2, 1),
    ("average_umc_activity", 2, 1),
    ("average_mm_activity", 2, 1),
    ("average_socket_power", 2, 1),
    *CLOCKED,
    ("clocks", 2, 14),
    ("throttle_status", 4, 1),
    ("fan_and_link", 2, 3),
    ("padding", 2, 1),
    ("gfx_activity_acc", 4, 1),
    ("mem_activity_acc", 4, 1),
    ("temperature_hbm", 2, 4),
    ("firmware_timestamp", 8, 1),
    ("voltages", 2, 3),
    ("padding1", 2, 1),
    ("indep_throttle_status", 8, 1),
)
THROTTLE: Final[tuple[Member, ...]] = (("throttle_status", 4, 1),)
END: Final[tuple[Member, ...]] = (("padding", 2, 1),)
PARTITIONS: Final[tuple[Member, ...]] = (("num_partition", 2, 1),)
WIDE: Final[tuple[Member, ...]] = (("mem_max_bandwidth", 8, 1),)
VCN: Final[tuple[Member, ...]] = (("vcn_activity", 2, 4),)
JPEG: Final[tuple[Member, ...]] = (("jpeg_activity", 2, 32),)
LATE: Final = (*HOT, *WIDE, *CLOCKED, *RESIDENCY, *LINKS, *NAKS, *DATA, *STATUS, *CLOCKS)

# revision: members before `xcp_stats`, and the elements of it that kernels have had
TABLES: Final[dict[int, tuple[tuple[Member, ...], tuple[tuple[Member, ...], ...]]]] = {
    3: (V1_3, ()),
    4: ((*HOT, *VCN, *CLOCKED, *THROTTLE, *LINKS, *DATA, *CLOCKS, *END), ()),
    5: ((*HOT, *VCN, *JPEG, *CLOCKED, *THROTTLE, *LINKS, *NAKS, *DATA, *CLOCKS, *END), ()),
    6: (
        (*HOT, *CLOCKED, *RESIDENCY, *LINKS, *NAKS, *DATA, *CLOCKS, *PARTITIONS),
        (xcp(32, 0),),
    ),
    7: ((*LATE, *PARTITIONS), (xcp(32, 1),)),
    8: ((*LATE, *PARTITIONS), (xcp(40, 3), xcp(40, 4))),
}


def laid_out(members: tuple[Member, ...]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Return offset and width of each member, the end, and the alignment, as C lays them out."""
    found, at, widest = {}, 0, 1
    for name, width, count in members:
        if not count:
            continue
        at = -(-at // width) * width
        found[name] = (at, width)
        at += width * count
        widest = max(widest, width)
    return found, at, widest


@pytest.mark.parametrize("revision", sorted(LAYOUTS))
def test_every_offset_follows_from_the_headers_members(revision: int) -> None:
    """Each field that is read is where C puts it, as wide as it is there."""
    members, _ = TABLES[revision]
    derived, _, _ = laid_out((*HEADER, *members))
    for name, (kind, at) in LAYOUTS[revision].fields.items():
        assert (at, struct.calcsize(f"<{kind}")) == derived[name], name


@pytest.mark.parametrize("revision", sorted(LAYOUTS))
def test_every_length_follows_from_the_headers_members(revision: int) -> None:
    """Lengths of the table, and place, length and counters of its partitions, are C's."""
    members, elements = TABLES[revision]
    layout = LAYOUTS[revision]
    _, end, widest = laid_out((*HEADER, *members))
    if not elements:
        assert layout.sizes == (-(-end // widest) * widest,)
        return
    start = -(-end // 8) * 8
    sizes, steps = [], []
    for element in elements:
        inner, length, _ = laid_out(element)
        assert layout.busy_acc_at == inner["gfx_busy_acc"][0]
        step = -(-length // 8) * 8
        steps.append(step)
        sizes.append(-(-(start + 8 * step + 4) // 8) * 8)
    assert (layout.xcp_at, layout.xcp_sizes, layout.sizes) == (start, tuple(steps), tuple(sizes))


def test_the_queue_descriptor_is_the_kernels() -> None:
    """`v9_mqd` has 512 words; the mask words are 23, 24, 26 and 27, with the ring size between."""
    assert mqd.MQD_BYTES == 512 * 4
    assert tuple(word * 4 for word in (23, 24, 26, 27)) == mqd.WORDS_AT
