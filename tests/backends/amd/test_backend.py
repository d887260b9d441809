"""The AMD backend on generated nodes: what it finds, what it changes, and what it survives."""

from __future__ import annotations

import errno
import itertools
import lzma
import shutil
import tarfile
import threading
import time
from pathlib import Path

import pytest

from alloy_agent.backends import BackendSpec, backend_specs, open_backend
from alloy_agent.backends.amd import AmdBackend
from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.modes import compatible, read_modes
from alloy_agent.backends.amd.topology import read_topology
from alloy_agent.backends.base import SignalSink
from alloy_agent.config import AmdSettings, BackendSettings, Settings
from alloy_agent.errors import (
    BackendError,
    ConfigError,
    DeviceBusyError,
    DeviceLostError,
    InvariantError,
    UnsupportedError,
)
from alloy_agent.model import (
    Condition,
    Create,
    DeviceId,
    ModeChange,
    ModeKind,
    PartitionSpec,
    Placement,
    Quality,
    Scheme,
    Scope,
    SetMode,
    Share,
    SignalSpec,
    Tier,
)
from alloy_agent.silicon.amd import fits
from alloy_agent.silicon.boards import BOARDS, AmdBoard
from alloy_agent.silicon.state import Client, Fault
from tests.fakes.amd_tree import Oddities, tree_of

RECORDED = Path(__file__).parents[4] / "shared" / "data" / "amd" / "topo-mi300-cpx.tar.xz"
GIB = 1 << 30


def set_mode(backend: AmdBackend, device: DeviceId, kind: ModeKind, wanted: str) -> None:
    """Switch one mode."""
    backend.apply(SetMode(device=device, kind=kind, current="", wanted=wanted))


def modes(backend: AmdBackend, device: DeviceId) -> dict[ModeKind, str]:
    """Return the modes that hold."""
    return {mode.kind: mode.current for mode in backend.observe(device).device.modes}


def sampled(
    backend: AmdBackend, device: DeviceId
) -> dict[tuple[str, str], tuple[float, Quality, SignalSpec]]:
    """Return one sample by subject and name."""
    specs = backend.signal_specs(device)
    slots: dict[int, tuple[float, Quality]] = {}

    class Sink(SignalSink):
        def put(
            self,
            slot: int,
            value: float,
            quality: Quality = Quality.VALUE,
            source_time_s: float | None = None,
        ) -> None:
            del source_time_s
            slots[slot] = value, quality

    backend.sample(device, Sink())
    return {(s.subject, s.name): (*slots[n], s) for n, s in enumerate(specs)}


# --- what is found ---


@pytest.mark.parametrize("mode", ["SPX", "DPX", "QPX", "CPX"])
def test_every_partition_of_eight_devices_is_found(mode: str, tmp_path: Path) -> None:
    """8 devices in each mode give 8 times its partitions, in the observation and in telemetry."""
    tree = tree_of("8xMI300X", tmp_path)
    for state in tree.machine.state.devices:
        if mode != "SPX":
            tree.machine.amd(state.id).set_compute_mode(mode)
    backend = tree.backend()
    count = {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}[mode]
    found = [backend.observe(device) for device in backend.discover()]
    assert [len(seen.partitions) for seen in found] == [count] * 8
    ids = {piece.id for seen in found for piece in seen.partitions}
    assert len(ids) == 8 * count
    told = backend.signal_specs(found[0].device.id)
    assert {s.subject for s in told} >= {piece.id for piece in found[0].partitions}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("function", [True, False])
@pytest.mark.parametrize("separator", ["_", "."])
def test_spelling_and_encoding_do_not_matter(
    same: bool, function: bool, separator: str, tmp_path: Path
) -> None:
    """Either platform name, partition encoding and unique id gives one and the same inventory."""
    odd = Oddities(separator=separator, function_partition=function, same_unique_id=same)
    tree = tree_of("2xMI300X", tmp_path, odd)
    for state in tree.machine.state.devices:
        tree.machine.amd(state.id).set_compute_mode("CPX")
    backend = tree.backend()
    assert backend.discover() == ("amd-0000:05:00.0", "amd-0000:15:00.0")
    seen = backend.observe(backend.discover()[1])
    assert [p.placement.start for p in seen.partitions] == list(range(8))
    assert seen.partitions[3].id == "amd-0000:15:00.0/CPX@3"
    assert seen.device.fault_note == ""


def test_domains_above_zero_are_kept_apart(tmp_path: Path) -> None:
    """The PCI domain is part of the identity."""
    tree = tree_of("2xMI300X", tmp_path, Oddities(domain=3))
    assert tree.backend().discover()[0] == "amd-0003:05:00.0"


def test_sixty_three_of_sixty_four_partitions(tmp_path: Path) -> None:
    """A partition without a DRM minor is missed out loud; the other 63 are there."""
    tree = tree_of("8xMI300X", tmp_path, display_card=True)
    for state in tree.machine.state.devices:
        tree.machine.amd(state.id).set_compute_mode("CPX")
    backend = tree.backend()
    found = [backend.observe(device) for device in backend.discover()]
    assert sum(len(seen.partitions) for seen in found) == 63
    short = [seen for seen in found if seen.device.fault_note]
    assert [seen.device.fault_note for seen in short] == ["7 of 8 partitions live"]
    assert short[0].faults[0].kind == "partition_count_mismatch"
    assert short[0].device.slices == 8


def test_a_switch_to_sixty_three_is_taken_as_it_is(tmp_path: Path) -> None:
    """Where minors are spent the switch succeeds and the shortage is a fault, no failed step."""
    tree = tree_of("8xMI300X", tmp_path, display_card=True)
    backend = tree.backend()
    last = backend.discover()[-1]
    set_mode(backend, last, ModeKind.COMPUTE, "CPX")
    assert backend.observe(last).device.fault_note == "7 of 8 partitions live"


def test_memory_of_partitions_is_their_own_bank(tmp_path: Path) -> None:
    """In DPX both report half, though the primary's total is the whole device."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    whole = backend.observe(device).device.memory_bytes
    set_mode(backend, device, ModeKind.COMPUTE, "DPX")
    seen = backend.observe(device)
    assert whole is not None
    assert [piece.memory_bytes for piece in seen.partitions] == [whole // 2] * 2
    assert seen.device.memory_bytes == whole


@pytest.mark.parametrize(
    "board", ["MI210", "MI250", "MI300A", "MI300X", "MI308X", "MI325X", "MI355X"]
)
def test_each_board_tells_its_own_modes(board: str, tmp_path: Path) -> None:
    """Modes, profiles and limits come from the files; a board without modes is one whole piece."""
    tree = tree_of(f"1x{board}", tmp_path)
    backend = tree.backend()
    seen = backend.observe(backend.discover()[0])
    table = BOARDS[board]
    assert isinstance(table, AmdBoard)
    assert seen.device.model == board
    assert seen.device.slices == table.xcds
    assert tuple(p.name for p in seen.device.profiles) == table.compute_modes
    assert seen.device.compute_units == table.xcds * table.cus_per_xcd
    if not table.compute_modes:
        assert seen.device.scheme is Scheme.WHOLE
        assert seen.device.modes == ()
        assert seen.partitions[0].profile == "whole"


def test_limits_say_what_each_pair_of_modes_can_be(tmp_path: Path) -> None:
    """In NPS1, and in CPX with NPS4, partitions share memory bandwidth: enforced at best."""
    backend = tree_of("1xMI300X", tmp_path).backend()
    limits = {
        limit.way: limit for limit in backend.observe(backend.discover()[0]).device.tier_limits
    }
    assert limits["cpx/nps4"].tier is Tier.ENFORCED
    assert limits["qpx/nps4"].tier is Tier.HARD
    assert limits["dpx/nps1"].tier is Tier.ENFORCED
    assert limits["shared"].tier is Tier.SOFT


def test_a_recorded_topology_is_read(tmp_path: Path) -> None:
    """A real node that came up with 63 of 64: 8 devices, and it is the last that lacks one."""
    if not RECORDED.is_file():
        pytest.skip(f"the recorded topology is not at {RECORDED}")
    with lzma.open(RECORDED) as packed, tarfile.open(fileobj=packed) as archive:
        archive.extractall(tmp_path, filter="data")
    kfd = tmp_path / "sys/class/kfd/kfd"
    kfd.mkdir(parents=True)
    (tmp_path / "testdata/topo-mi300-cpx/topology").rename(kfd / "topology")
    topology = read_topology(Files(), Roots(sys=str(tmp_path / "sys")))
    devices = topology.devices()
    assert [len(nodes) for nodes in devices.values()] == [8] * 7 + [7]
    assert all(n.partition == place for nodes in devices.values() for place, n in enumerate(nodes))
    assert all(node.cus == 38 for nodes in devices.values() for node in nodes)


def test_a_tree_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """A switch in the middle of a reading never yields a mixture of before and after."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    gpu = tree.machine.amd(tree.machine.state.devices[0].id)
    pending = iter(["CPX", "SPX", "DPX"])

    def switch(path: str) -> None:
        if path.endswith("/nodes/2/properties"):
            mode = next(pending, None)
            if mode is not None:
                gpu.set_compute_mode(mode)

    tree.odd.on_read = switch
    tree.touch()
    seen = backend.observe(device)
    assert [piece.profile for piece in seen.partitions] == ["DPX"] * 2


def test_a_tree_that_never_rests_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """After a few readings the backend says that the topology keeps changing."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    tree.touch()
    flip = itertools.cycle(["DPX", "SPX"])
    gpu = tree.machine.amd(tree.machine.state.devices[0].id)
    tree.odd.on_read = lambda path: (
        gpu.set_compute_mode(next(flip)) if path.endswith("/nodes/0/properties") else None
    )
    with pytest.raises(BackendError, match="changed"):
        backend.observe(device)


def test_a_node_without_io_links_is_no_trouble(tmp_path: Path) -> None:
    """The window in which the vendor's library crashes is read through."""
    tree = tree_of("2xMI210", tmp_path)
    backend = tree.backend()
    for path in (tree.sys / "class/kfd/kfd/topology/nodes").glob("*/io_links"):
        shutil.rmtree(path)
    assert len(backend.discover()) == 2
    assert backend.observe(backend.discover()[0]).partitions


def test_an_unchanged_topology_is_read_once(tmp_path: Path) -> None:
    """Looking again at 64 partitions costs a few files, not thousands."""
    tree = tree_of("8xMI300X", tmp_path)
    for state in tree.machine.state.devices:
        tree.machine.amd(state.id).set_compute_mode("CPX")
    backend = tree.backend()
    devices = backend.discover()
    backend.observe(devices[0])
    tree.files.opened.clear()
    for device in devices:
        backend.observe(device)
    assert not [path for path in tree.files.opened if "/io_links" in path]
    assert len(tree.files.opened) < 60 * len(devices)
    tree.machine.amd(tree.machine.state.devices[3].id).set_compute_mode("QPX")
    assert len(backend.observe(devices[3]).partitions) == 4


# --- changes ---


def pairs(board: str) -> list[tuple[str, str]]:
    """Return every pair of modes that a board can be in."""
    table = BOARDS[board]
    assert isinstance(table, AmdBoard)
    return [
        (compute, memory)
        for memory in table.memory_modes
        for compute in table.compute_modes
        if fits(table, compute, memory)
    ]


@pytest.mark.parametrize(
    "board",
    [
        "MI300A",
        "MI300X",
        "MI308X",
        *(pytest.param(board, marks=pytest.mark.slow) for board in ("MI325X", "MI355X")),
    ],
)
def test_every_pair_of_modes_is_reached_and_left(board: str, tmp_path: Path) -> None:
    """From each pair to each other of a board: compute at once, memory at the next reload."""
    tree = tree_of(f"1x{board}", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    ways = itertools.permutations(pairs(board), 2)
    for before, after in ways:
        for compute, memory in (before, after):
            if modes(backend, device)[ModeKind.MEMORY] != memory:
                set_mode(backend, device, ModeKind.MEMORY, memory)
                pending = backend.observe(device).device.modes[1]
                assert (pending.pending, pending.change) == (memory, ModeChange.DRIVER_RELOAD)
                backend.quiesce(device)
                tree.machine.reboot()
                backend.resume(device)
            if modes(backend, device)[ModeKind.COMPUTE] != compute:
                set_mode(backend, device, ModeKind.COMPUTE, compute)
            here = modes(backend, device)
            assert (here[ModeKind.COMPUTE], here[ModeKind.MEMORY]) == (compute, memory)
            assert backend.observe(device).faults == ()


def test_a_mode_that_does_not_fit_is_refused_in_the_drivers_words(tmp_path: Path) -> None:
    """Older drivers list what they will refuse: EINVAL becomes one line with a cure."""
    tree = tree_of("1xMI300X", tmp_path, Oddities(lists_by_xcc=True))
    backend = tree.backend()
    device = backend.discover()[0]
    set_mode(backend, device, ModeKind.MEMORY, "NPS4")
    tree.machine.reboot()
    assert modes(backend, device)[ModeKind.COMPUTE] == "CPX"
    before = backend.observe(device)
    with pytest.raises(BackendError, match="refuses SPX") as raised:
        set_mode(backend, device, ModeKind.COMPUTE, "SPX")
    assert "CPX/NPS4" in raised.value.cure
    assert backend.observe(device) == before


def test_a_memory_mode_is_asked_of_the_whole_hive(tmp_path: Path) -> None:
    """All members show it as pending, with the hive's scope; the reload makes it hold."""
    tree = tree_of("4xMI300X", tmp_path)
    backend = tree.backend()
    devices = backend.discover()
    set_mode(backend, devices[0], ModeKind.MEMORY, "NPS4")
    for device in devices:
        memory = backend.observe(device).device.modes[1]
        assert (memory.current, memory.pending, memory.scope) == ("NPS1", "NPS4", Scope.HIVE)
    assert tree.backend().observe(devices[3]).device.modes[1].pending == "NPS4"
    tree.machine.driver_reload()
    tree.machine.edit(lambda state: setattr(state, "boot", state.boot + 1))
    memory = tree.backend().observe(devices[2]).device.modes[1]
    assert (memory.current, memory.pending) == ("NPS4", None)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_refusal_by_one_member_takes_the_request_back(nth: int, tmp_path: Path) -> None:
    """A hive is asked as a whole or not at all, whichever member refuses."""
    tree = tree_of("4xMI300X", tmp_path)
    backend = tree.backend()
    devices = backend.discover()
    tree.machine.add_fault(
        Fault(call="amd.set_memory_mode", error="not_permitted", nth=nth, times=1)
    )
    with pytest.raises(BackendError):
        set_mode(backend, devices[0], ModeKind.MEMORY, "NPS4")
    assert {s.memory_requested for s in tree.machine.state.devices} == {None}
    assert {backend.observe(d).device.modes[1].pending for d in devices} == {None}


def test_a_request_is_taken_back_by_asking_for_what_holds(tmp_path: Path) -> None:
    """The undo of a request is a request: nothing is pending after it."""
    tree = tree_of("2xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    set_mode(backend, device, ModeKind.MEMORY, "NPS4")
    set_mode(backend, device, ModeKind.MEMORY, "NPS1")
    assert backend.observe(device).device.modes[1].pending is None
    assert {s.memory_requested for s in tree.machine.state.devices} == {None}


def test_a_device_that_is_busy_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Processes that ended still count for a while: the write is made again."""
    tree = tree_of("1xMI300X", tmp_path, Oddities(busy_writes=2))
    backend = tree.backend(busy_wait_s=3.0)
    device = backend.discover()[0]
    set_mode(backend, device, ModeKind.COMPUTE, "CPX")
    assert len(backend.observe(device).partitions) == 8


@pytest.mark.parametrize("scope", ["device", "node"])
def test_a_busy_device_names_its_holders(scope: str, tmp_path: Path) -> None:
    """A foreign holder is named by pid and name, be it a tenant here or, on 6.12, elsewhere."""
    tree = tree_of("2xMI300X", tmp_path, kfd_busy_scope=scope)
    backend = tree.backend()
    first, second = (state.id for state in tree.machine.state.devices)
    target = second if scope == "node" else first
    tree.machine.start_process(Client(pid=777, device=target, name="gpuagent", monitor=True))
    with pytest.raises(DeviceBusyError, match=r"pid 777 \(gpuagent\)"):
        set_mode(backend, backend.discover()[0], ModeKind.COMPUTE, "CPX")
    assert modes(backend, backend.discover()[0])[ModeKind.COMPUTE] == "SPX"


def test_our_own_telemetry_never_blocks_a_switch(tmp_path: Path) -> None:
    """The tree refuses while any descriptor of ours is on the device; the switch works at once."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(busy_wait_s=0.0)
    device = backend.discover()[0]
    for mode in ("CPX", "DPX", "SPX") * 3:
        sampled(backend, device)
        assert backend.open_count(device) == 1
        backend.quiesce(device)
        set_mode(backend, device, ModeKind.COMPUTE, mode)
        backend.resume(device)
    assert sampled(backend, device)[device, "alloy_device_power_watts"][1] is Quality.VALUE


def test_a_mode_that_stays_unknown_fails_and_says_so(tmp_path: Path) -> None:
    """A driver that ends in an unknown mode is no success, whatever the write returned."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(settle_wait_s=0.1)
    device = backend.discover()[0]
    wrote = tree.files.write

    def write(path: str, text: str) -> None:
        wrote(path, text)
        tree.odd.unknown_reads = 1000

    tree.files.write = write  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="shows UNKNOWN"):
        set_mode(backend, device, ModeKind.COMPUTE, "CPX")
    seen = backend.observe(device)
    assert seen.device.condition is Condition.FAILED
    assert seen.faults[0].kind == "mode_unknown"
    tree.odd.unknown_reads = 0
    assert backend.observe(device).device.condition is Condition.OK


def test_a_mode_that_reads_unknown_for_a_moment_is_read_again(tmp_path: Path) -> None:
    """UNKNOWN during a switch is no state to report."""
    tree = tree_of("1xMI300X", tmp_path, Oddities(unknown_reads=1))
    backend = tree.backend()
    seen = backend.observe(backend.discover()[0])
    assert seen.device.condition is Condition.OK
    assert seen.partitions[0].profile == "SPX"


def test_partitions_that_stay_away_make_the_switch_fail(tmp_path: Path) -> None:
    """The return code said success, the count says otherwise: the step fails."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(settle_wait_s=0.1)
    device = backend.discover()[0]
    nodes = tree.sys / "class/kfd/kfd/topology/nodes"
    render = tree.render

    def lossy() -> None:
        render()
        for path in nodes.glob("9/*"):
            if path.is_file():
                path.unlink()
                path.write_text("0\n")

    tree.render = lossy  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="only 7 of 8"):
        set_mode(backend, device, ModeKind.COMPUTE, "CPX")


def test_isolation_is_set_again_after_every_switch(tmp_path: Path) -> None:
    """A switch clears it; with the setting it holds for as many partitions as there are then."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(process_isolation=True)
    device = backend.discover()[0]
    for mode, count in (("CPX", 8), ("DPX", 2)):
        set_mode(backend, device, ModeKind.COMPUTE, mode)
        assert tree.machine.state.devices[0].isolation == [1] * count
    facts = {(f.subject, f.name): f.value for f in backend.facts(device)}
    assert facts[device, "amd.isolation"] == [1, 1]


def test_isolation_that_is_refused_is_seen_in_the_facts(tmp_path: Path) -> None:
    """The switch stands; the audit shows that isolation is not in force."""
    tree = tree_of("1xMI300X", tmp_path)
    tree.machine.add_fault(Fault(call="amd.set_isolation", error="invalid_argument"))
    backend = tree.backend(process_isolation=True)
    device = backend.discover()[0]
    set_mode(backend, device, ModeKind.COMPUTE, "DPX")
    facts = {(f.subject, f.name): f.value for f in backend.facts(device)}
    assert facts[device, "amd.isolation"] == [0, 0]


def test_partitions_keep_their_names_over_a_switch_and_back(tmp_path: Path) -> None:
    """Location names a piece; incarnations never come back, after a restart of the agent too."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    seen = set()
    for _ in range(4):
        set_mode(backend, device, ModeKind.COMPUTE, "CPX")
        pieces = backend.observe(device).partitions
        assert tree.backend().observe(device).partitions == pieces
        assert pieces[2].id == f"{device}/CPX@2"
        assert pieces[2].incarnation not in seen
        seen.add(pieces[2].incarnation)
        backend = tree.backend()
        set_mode(backend, device, ModeKind.COMPUTE, "SPX")


def test_someone_elses_switch_is_noticed(tmp_path: Path) -> None:
    """A switch by another tool makes new incarnations, and columns of the old pieces go stale."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    before = backend.observe(device).partitions
    tree.machine.amd(tree.machine.state.devices[0].id).set_compute_mode("CPX")
    after = backend.observe(device).partitions
    tree.machine.amd(tree.machine.state.devices[0].id).set_compute_mode("SPX")
    again = backend.observe(device).partitions
    assert len({p.incarnation for p in (*before, *after, *again)}) == 10


def test_a_failed_switch_leaves_the_incarnation(tmp_path: Path) -> None:
    """Pieces that were not made anew are the same pieces."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    before = backend.observe(device).partitions
    tree.machine.add_fault(Fault(call="amd.set_compute_mode", error="unknown", times=1))
    with pytest.raises(BackendError):
        set_mode(backend, device, ModeKind.COMPUTE, "CPX")
    assert backend.observe(device).partitions == before


def test_exclusive_pieces_are_not_made_one_by_one(tmp_path: Path) -> None:
    """Create of a partition names the cure."""
    backend = tree_of("1xMI300X", tmp_path).backend()
    device = backend.discover()[0]
    spec = PartitionSpec(device=device, profile="CPX", size=1, placement=Placement(start=0, size=1))
    with pytest.raises(UnsupportedError, match="set the compute mode"):
        backend.apply(Create(device=device, spec=spec))


# --- hostile and sick ---


def test_names_in_any_bytes_and_two_thousand_processes(tmp_path: Path) -> None:
    """No name and no number of processes blinds the agent; every name is printable."""
    tree = tree_of("1xMI300X", tmp_path)
    device = tree.machine.state.devices[0].id

    def crowd(state: object) -> None:
        for number in range(2000):
            state.clients.append(  # type: ignore[attr-defined]
                Client(pid=10000 + number, device=device, memory_bytes=1 << 20, load_ratio=0.0)
            )

    tree.comms[10007] = b"\xff\xfe\x1b[31m"
    tree.machine.edit(crowd)
    backend = tree.backend()
    facts = {(f.subject, f.name): f.value for f in backend.facts(backend.discover()[0])}
    clients = facts[backend.discover()[0], "device.clients"]
    assert isinstance(clients, list)
    assert len(clients) == 2000
    names = {entry["pid"]: entry["comm"] for entry in clients if isinstance(entry, dict)}
    assert str(names[10007]).isprintable()
    used = sampled(backend, backend.discover()[0])
    piece = backend.observe(backend.discover()[0]).partitions[0].id
    assert used[piece, "alloy_partition_memory_used_bytes"][0] == 2000 * (1 << 20)


def test_a_process_that_only_opened_kfd_is_no_client(tmp_path: Path) -> None:
    """A process without queue and memory uses no partition, and is told apart."""
    tree = tree_of("1xMI300X", tmp_path)
    device = tree.machine.state.devices[0].id
    tree.machine.start_process(Client(pid=31, device=device, monitor=True))
    backend = tree.backend()
    facts = {(f.subject, f.name): f.value for f in backend.facts(backend.discover()[0])}
    assert facts[backend.discover()[0], "device.clients"] == []
    assert facts[backend.discover()[0], "amd.idle_clients"] == [31]


def test_a_hung_device_does_not_blind_the_others(tmp_path: Path) -> None:
    """A read that never returns holds its own device's thread only."""
    tree = tree_of("2xMI300X", tmp_path)
    backend = tree.backend()
    first, second = backend.discover()
    key = tree.machine.add_fault(Fault(call="amd.read", device="#0", action="hang"))
    stuck = threading.Thread(target=lambda: backend.observe(first), daemon=True)
    stuck.start()
    try:
        assert backend.observe(second).partitions
        assert sampled(backend, second)
        backend.wait_events(0.0)
        tree.machine.inject_event(tree.machine.state.devices[1].id, "ras:umc_ue")
        assert "ras:umc" in {event.code for event in backend.wait_events(5.0)}
        assert stuck.is_alive()
    finally:
        tree.machine.remove_fault(key)
        stuck.join(10.0)
    assert not stuck.is_alive()


def test_a_lost_device_comes_back(tmp_path: Path) -> None:
    """Lost is an error of its own, the id stays listed, and a device that is back is observed."""
    tree = tree_of("2xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    tree.machine.inject_event(tree.machine.state.devices[0].id, "xid:79")
    with pytest.raises(DeviceLostError):
        backend.observe(device)
    assert device in backend.discover()
    tree.machine.edit(lambda state: setattr(state.devices[0], "lost", False))
    assert backend.observe(device).partitions


def test_uncorrected_errors_are_events_once_and_a_fault_while_they_last(tmp_path: Path) -> None:
    """Each block's new errors are one event with their number; the device shows the fault."""
    tree = tree_of("2xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    backend.wait_events(0.0)
    tree.errors["sdma"] = {"ue": 2, "ce": 5, "de": 1}
    tree.touch()
    events = backend.wait_events(1.0)
    here = [(e.code, e.detail) for e in events if e.device == device]
    assert ("ras:sdma", "2 more, 2 in all") in here
    assert ("ras:sdma_ce", "5 more, 5 in all") in here
    assert list(backend.wait_events(0.0)) == []
    assert "ras_sdma" in {fault.kind for fault in backend.observe(device).faults}
    values = sampled(backend, device)
    assert values[device, "alloy_device_ecc_uncorrected_total"][0] == 2.0


def test_bad_pages_are_faults_by_their_state(tmp_path: Path) -> None:
    """Pending pages and unreservable ones are different faults; reserved ones are none."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    pages = tree.pci(device) / "ras/gpu_vram_bad_pages"
    pages.write_text("0x1 : 0x1000 : R\n0x2 : 0x1000 : P\n0x3 : 0x1000 : F\n")
    kinds = [fault.kind for fault in backend.observe(device).faults]
    assert kinds == ["bad_pages_pending", "bad_pages_unreservable"]


# --- telemetry ---


def test_device_wide_values_stay_on_the_device(tmp_path: Path) -> None:
    """In DPX power is told once; partitions have no column for it, and activity of their own."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    set_mode(backend, device, ModeKind.COMPUTE, "DPX")
    machine_id = tree.machine.state.devices[0].id
    tree.machine.start_process(Client(pid=5, device=machine_id, instance=1, load_ratio=1.0))
    values = sampled(backend, device)
    power = [key for key in values if key[1] == "alloy_device_power_watts"]
    assert power == [(device, "alloy_device_power_watts")]
    zero, one = (piece.id for piece in backend.observe(device).partitions)
    active = "alloy_partition_compute_active_ratio"
    assert values[zero, active][:2] == (0.0, Quality.VALUE)
    assert values[one, active][0] > 0.5


@pytest.mark.parametrize("revision", [3, 4, 5])
def test_without_rows_of_partitions_activity_is_not_supported(
    revision: int, tmp_path: Path
) -> None:
    """The device's activity never stands in for a partition's."""
    tree = tree_of("1xMI300X", tmp_path, Oddities(metrics=revision))
    backend = tree.backend()
    device = backend.discover()[0]
    values = sampled(backend, device)
    piece = backend.observe(device).partitions[0].id
    quality = values[piece, "alloy_partition_compute_active_ratio"][1]
    assert quality is Quality.NOT_SUPPORTED
    assert values[device, "alloy_device_power_watts"][1] is Quality.VALUE


@pytest.mark.parametrize("revision", [3, 4, 5, 6, 7, 8])
def test_a_table_cut_short_gives_no_value_at_all(revision: int, tmp_path: Path) -> None:
    """Nothing is read as zero from a file that ends early."""
    tree = tree_of("1xMI300X", tmp_path, Oddities(metrics=revision, metrics_cut=40))
    backend = tree.backend()
    device = backend.discover()[0]
    values = sampled(backend, device)
    for name in ("power_watts", "energy_joules_total", "temperature_headroom_celsius"):
        assert values[device, f"alloy_device_{name}"][1] is Quality.NOT_SUPPORTED


def test_sampling_opens_nothing_forbidden_and_no_file_too_often(tmp_path: Path) -> None:
    """VRAM use is read once a second at most, by one reader; debugfs switches never."""
    tree = tree_of("1xMI300X", tmp_path)
    now = [100.0]
    backend = AmdBackend(tree.options(), files=tree.files, clock=lambda: now[0])
    device = backend.discover()[0]
    sampled(backend, device)
    tree.files.opened.clear()
    for _ in range(30):
        now[0] += 0.1
        sampled(backend, device)
    opened = [path.rpartition("/")[2] for path in tree.files.opened]
    assert 1 <= opened.count("mem_info_vram_used") <= 4
    backend.facts(device)
    backend.diagnose()
    assert not {"hang_hws", "mem_limit"} & {p.rpartition("/")[2] for p in tree.files.opened}
    with pytest.raises(InvariantError):
        Files().data("/sys/kernel/debug/kfd/hang_hws")


def test_a_sample_costs_little(tmp_path: Path) -> None:
    """A sample reads one table and one counter; it neither sleeps nor lists directories."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    device = backend.discover()[0]
    sampled(backend, device)
    slept: list[float] = []
    real = time.sleep
    time.sleep = slept.append  # type: ignore[assignment]
    try:
        tree.files.opened.clear()
        sink_specs = backend.signal_specs(device)
        tree.files.opened.clear()

        class Sink(SignalSink):
            def put(self, *_values: object, **_named: object) -> None:
                return

        backend.sample(device, Sink())
    finally:
        time.sleep = real
    assert sink_specs
    assert slept == []
    assert len(tree.files.opened) <= 12


# --- shares ---


def test_shares_of_a_device_are_masked_apart(tmp_path: Path) -> None:
    """With the setting, production and opportunistic tenants get masks without a CU in common."""
    from alloy_agent.backends.amd.masks import parse

    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(opportunistic_cus=6, opportunistic_slots=2)
    device = backend.discover()[0]
    whole = Placement(start=0, size=8)
    for share, ordinal in (("production", 0), ("opportunistic", 0), ("opportunistic", 1)):
        spec = PartitionSpec(
            device=device,
            profile=f"{share}-{ordinal}",
            size=8,
            placement=whole,
            share=Share(share),
            ordinal=ordinal,
        )
        backend.apply(Create(device=device, spec=spec))
    pieces = backend.observe(device).partitions
    masks = [parse(piece.access.environment["HSA_CU_MASK"])[0] for piece in pieces]
    assert [len(mask) for mask in masks] == [26 * 8, 6 * 8, 6 * 8]
    assert all(not one & two for one, two in itertools.combinations(masks, 2))
    assert "HSA_CU_MASK_SKIP_INIT" in pieces[0].access.unset
    again = spec.__class__(
        device=device, profile="o", size=8, placement=whole, share=Share.OPPORTUNISTIC, ordinal=2
    )
    with pytest.raises(ConfigError, match="slot"):
        backend.apply(Create(device=device, spec=again))


# --- settings ---


def test_the_backend_runs_where_its_driver_is_or_settings_say(tmp_path: Path) -> None:
    """A module, a topology or a root of one's own brings it up; off and absence do not."""

    def names(settings: Settings) -> list[str]:
        return [spec.name for spec in backend_specs(settings, str(tmp_path))]

    off = BackendSettings(cpu="off", amd="off")  # type: ignore[arg-type]
    assert "amd" not in names(Settings())
    assert "amd" in names(Settings(amd=AmdSettings(sys_root="/elsewhere")))
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert "amd" in names(Settings())
    assert names(Settings(backends=off)) == []


def test_it_opens_from_a_specification(tmp_path: Path) -> None:
    """Options are plain JSON; an unknown one is a settings error."""
    tree = tree_of("2xMI300X", tmp_path)
    options = {
        "sys_root": str(tree.sys),
        "proc_root": str(tmp_path / "proc"),
        "library": "off",
        "state_dir": str(tmp_path / "state"),
    }
    backend = open_backend(BackendSpec(name="amd", options=options))  # type: ignore[arg-type]
    assert len(backend.discover()) == 2
    assert len(backend.observe(backend.discover()[0]).device.links) == 2
    with pytest.raises(ConfigError, match="amd"):
        open_backend(BackendSpec(name="amd", options={"colour": "red"}))


def test_a_driver_without_compute_has_no_devices(tmp_path: Path) -> None:
    """A display driver without KFD is no error of discovery; doctor says what is missing."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b\n")
    options = {"sys_root": str(tmp_path / "sys"), "proc_root": str(tmp_path / "proc")}
    backend = open_backend(BackendSpec(name="amd", options={**options, "library": "off"}))
    assert backend.discover() == ()
    line = next(line for line in backend.diagnose() if line.subject == "amdgpu compute driver")
    assert not line.ok
    assert line.cure


def test_modes_are_read_as_drivers_spell_them(tmp_path: Path) -> None:
    """Case, blanks and unknown words do not matter; what is not supported is no mode."""
    for name, text in (
        ("current_compute_partition", " spx \n"),
        ("available_compute_partition", "SPX, cpx,XPX DPX\n"),
        ("current_memory_partition", "nps1\n"),
    ):
        (tmp_path / name).write_text(text)
    found = read_modes(Files(), str(tmp_path))
    assert (found.compute, found.computes) == ("SPX", ("SPX", "DPX", "CPX"))
    assert found.memories == ("NPS1",)
    (tmp_path / "current_compute_partition").write_text("Not supported\n")
    assert read_modes(Files(), str(tmp_path)).computes == ()
    assert compatible("CPX", "NPS4")
    assert not compatible("SPX", "NPS4")


def test_a_write_that_the_host_forbids_is_said_to_be(tmp_path: Path) -> None:
    """A read-only sysfs is a missing permission, not a busy device."""
    from alloy_agent.backends.amd.files import meaning
    from alloy_agent.errors import NotPermittedError

    assert meaning(OSError(errno.EROFS, "Read-only file system")) is NotPermittedError
    assert meaning(OSError(errno.EBUSY, "busy")) is DeviceBusyError
    assert meaning(OSError(errno.EIO, "Input/output error")) is BackendError
