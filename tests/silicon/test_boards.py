"""Tables of boards agree with the vendors' documents and with themselves."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from alloy_agent.silicon.amd import fits
from alloy_agent.silicon.boards import (
    AMD_BOARDS,
    BOARDS,
    NEURON_INSTANCES,
    NVIDIA_BOARDS,
    AmdBoard,
    NeuronInstance,
    NvidiaBoard,
)
from alloy_agent.silicon.boards.amd import MODES_BY_XCCS, partitions_of

EIGHT = [board for board in NVIDIA_BOARDS if board.memory_slices == 8]
IDS = {board.name: board.name for board in NVIDIA_BOARDS}

# MIG User Guide and node dumps: name, id, maximum, SMs, MiB.
A100_40 = (
    ("1g.5gb", 19, 7, 14, 4864),
    ("1g.5gb+me", 20, 1, 14, 4864),
    ("1g.10gb", 15, 4, 14, 9984),
    ("2g.10gb", 14, 3, 28, 9984),
    ("3g.20gb", 9, 2, 42, 20096),
    ("4g.20gb", 5, 1, 56, 20096),
    ("7g.40gb", 0, 1, 98, 40320),
)
H100_80 = (
    ("1g.10gb", 19, 7, 16, 9984),
    ("1g.10gb+me", 20, 1, 16, 9984),
    ("1g.20gb", 15, 4, 26, 20096),
    ("2g.20gb", 14, 3, 32, 20096),
    ("3g.40gb", 9, 2, 60, 40448),
    ("4g.40gb", 5, 1, 64, 40448),
    ("7g.80gb", 0, 1, 132, 81152),
)
B200_180 = (
    ("1g.23gb", 19, 7, 18, 20992),
    ("1g.23gb+me", 20, 1, 18, 20992),
    ("1g.45gb", 15, 4, 30, 45312),
    ("2g.45gb", 14, 3, 36, 45312),
    ("3g.90gb", 9, 2, 70, 91136),
    ("4g.90gb", 5, 1, 72, 91136),
    ("7g.180gb", 0, 1, 148, 182784),
)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("A100-SXM4-40GB", A100_40), ("H100-SXM5-80GB", H100_80), ("B200-180GB", B200_180)],
)
def test_profiles_are_the_documents(
    name: str, rows: tuple[tuple[str, int, int, int, int], ...]
) -> None:
    """Names, ids, counts, SMs and memory are those of the vendor's table."""
    board = BOARDS[name]
    assert isinstance(board, NvidiaBoard)
    assert rows == tuple(
        (p.name, p.vendor_id, p.max_count, p.sms, p.memory_mib) for p in board.profiles
    )


@pytest.mark.parametrize("board", EIGHT, ids=lambda board: board.name)
def test_parts_with_eight_slices_share_ids_and_placements(board: NvidiaBoard) -> None:
    """Ids and placements are the same on every part with eight memory slices."""
    assert [(p.vendor_id, p.enum, p.size, p.starts) for p in board.profiles] == [
        (19, 0x0, 1, (0, 1, 2, 3, 4, 5, 6)),
        (20, 0x7, 1, (0, 1, 2, 3, 4, 5, 6)),
        (15, 0x9, 2, (0, 2, 4, 6)),
        (14, 0x1, 2, (0, 2, 4)),
        (9, 0x2, 4, (0, 4)),
        (5, 0x3, 4, (0,)),
        (0, 0x4, 8, (0,)),
    ]


@pytest.mark.parametrize("board", NVIDIA_BOARDS, ids=lambda board: board.name)
def test_profiles_fit_their_board(board: NvidiaBoard) -> None:
    """No placement leaves the board, no profile is larger than it, ids are unique."""
    assert len({p.vendor_id for p in board.profiles}) == len(board.profiles)
    assert len({p.enum for p in board.profiles}) == len(board.profiles)
    for shape in board.profiles:
        assert all(start + shape.size <= board.memory_slices for start in shape.starts)
        assert shape.max_count <= len(shape.starts)
        assert shape.max_count * shape.sms <= board.sms
        assert shape.max_count * shape.memory_mib <= board.memory_mib
        assert shape.compute_slices <= board.compute_slices


@pytest.mark.parametrize("board", EIGHT, ids=lambda board: board.name)
def test_no_legal_set_of_instances_needs_more_engines_than_there_are(board: NvidiaBoard) -> None:
    """Whatever fits by placement fits by SMs, memory, copy engines and decoders too."""
    total = next(p for p in board.profiles if p.size == board.memory_slices)
    assert total.engines is not None
    plain = [p for p in board.profiles if not p.attributes and p is not total]
    for count in range(1, 8):
        for chosen in combinations_with_replacement(plain, count):
            if sum(p.size for p in chosen) > 8 or sum(p.compute_slices for p in chosen) > 7:
                continue
            assert sum(p.sms for p in chosen) <= board.sms
            assert sum(p.memory_mib for p in chosen) <= board.memory_mib
            engines = [p.engines or (0, 0, 0, 0) for p in chosen]
            assert sum(e[0] for e in engines) <= total.engines[0]
            assert sum(e[1] for e in engines) <= total.engines[1]


def test_two_large_instances_do_not_add_up_to_the_chip() -> None:
    """SMs are not linear in slices: two 3g of an H100 have 120 of 132, a double-memory 1g 26."""
    board = BOARDS["H100-SXM5-80GB"]
    assert isinstance(board, NvidiaBoard)
    three, double = board.profile("3g.40gb"), board.profile("1g.20gb")
    assert three is not None
    assert double is not None
    assert (2 * three.sms, board.sms, double.sms) == (120, 132, 26)


@pytest.mark.parametrize("board", AMD_BOARDS, ids=lambda board: board.name)
def test_amd_modes_divide_the_xcds(board: AmdBoard) -> None:
    """Each compute mode cuts the XCDs evenly, and is one that the kernel has for that many."""
    for mode in board.compute_modes:
        assert board.xcds % partitions_of(mode, board.xcds) == 0
        assert mode in MODES_BY_XCCS[board.xcds]
    assert board.memory_modes[0] == "NPS1"


def test_amd_boards_are_the_documents() -> None:
    """XCDs and CUs of the accelerators are the vendor's."""
    cus = {board.name: (board.xcds, board.xcds * board.cus_per_xcd) for board in AMD_BOARDS}
    assert cus == {
        "MI210": (1, 104),
        "MI250": (1, 104),
        "MI300A": (6, 228),
        "MI300X": (8, 304),
        "MI308X": (4, 80),
        "MI325X": (8, 304),
        "MI355X": (8, 256),
    }


@pytest.mark.parametrize(
    ("mode", "memory"),
    [
        ("SPX", {"NPS1"}),
        ("DPX", {"NPS1", "NPS2"}),
        ("QPX", {"NPS1", "NPS4"}),
        ("CPX", {"NPS1", "NPS4"}),
    ],
)
def test_compute_modes_work_in_the_kernels_memory_modes(mode: str, memory: set[str]) -> None:
    """A compute mode is valid in the memory modes of the kernel's table, and in no other."""
    board = BOARDS["MI300X"]
    assert isinstance(board, AmdBoard)
    assert {m for m in board.memory_modes if fits(board, mode, m)} == memory


@pytest.mark.parametrize("instance", NEURON_INSTANCES, ids=lambda board: board.name)
def test_neuron_topology_is_symmetric(instance: NeuronInstance) -> None:
    """Every table has one entry a device, links go both ways, addresses are unique."""
    for table in (instance.neighbours, instance.numa, instance.bdfs):
        assert len(table) == instance.devices
    assert len(set(instance.bdfs)) == instance.devices
    for device, peers in enumerate(instance.neighbours):
        assert device not in peers
        assert all(device in instance.neighbours[peer] for peer in peers)
    for order in instance.logical_to_physical:
        assert sorted(order) == list(range(instance.cores))


def test_trn2_torus_is_the_drivers() -> None:
    """Devices of a torus have the neighbours that the driver's table lists."""
    instance = BOARDS["trn2.48xlarge"]
    assert isinstance(instance, NeuronInstance)
    assert [set(peers) for peers in instance.neighbours[:6]] == [
        {12, 3, 4, 1},
        {13, 0, 5, 2},
        {14, 1, 6, 3},
        {15, 2, 7, 0},
        {0, 7, 8, 5},
        {1, 4, 9, 6},
    ]
    assert instance.numa == (1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1)


def test_inf2_is_a_line_or_a_ring() -> None:
    """Six devices form a line whose ends have one neighbour; twelve form a ring."""
    line, ring = BOARDS["inf2.24xlarge"], BOARDS["inf2.48xlarge"]
    assert isinstance(line, NeuronInstance)
    assert isinstance(ring, NeuronInstance)
    assert [len(peers) for peers in line.neighbours] == [1, 2, 2, 2, 2, 1]
    assert {len(peers) for peers in ring.neighbours} == {2}
    assert set(ring.neighbours[0]) == {11, 1}
