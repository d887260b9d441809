"""What is read from the vendor's programs, the kernel log and documents, and what follows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent.backends.neuron import monitor as monitoring
from alloy_agent.backends.neuron.access import Run, access_of
from alloy_agent.backends.neuron.health import (
    ADVICE,
    ErrorClass,
    Hang,
    judge_claim,
    judge_hangs,
    moved,
    parse_line,
)
from alloy_agent.backends.neuron.holders import Holder, Scanner, device_fence
from alloy_agent.backends.neuron.listing import Lister, parse_listing
from alloy_agent.backends.neuron.monitor import Monitor, parse_report
from alloy_agent.backends.neuron.occupancy import Source, occupants
from alloy_agent.backends.neuron.signals import parse_cycles, parse_power
from alloy_agent.backends.neuron.topology import (
    check_group,
    core_order,
    find_instance,
    group_sizes,
    is_linked,
    parse_cores,
)
from alloy_agent.backends.neuron.tree import NeuronTree, read_attribute, whole_number
from alloy_agent.errors import PlanImpossibleError
from alloy_agent.host.cgroupfs import detect
from alloy_agent.model import Quality
from alloy_agent.silicon.boards.neuron import NEURON_INSTANCES
from alloy_agent.telemetry.catalogue import load
from tests.fakes.neuron import MAJOR, FakeNeuronHost, TreeNumbers

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "facts" / "neuron"
INSTANCES = {instance.name: instance for instance in NEURON_INSTANCES}
WAIT_S = 15.0


def sample(name: str) -> bytes:
    """Return a sample document that is kept beside the repository, or skip and say so."""
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"no sample document {path}")
    return path.read_bytes()


def eventually(what: Callable[[], bool]) -> bool:
    """Return whether something becomes true within a generous time."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return what()


# --- neuron-ls -----------------------------------------------------------------------------------


def test_a_listing_is_read_whatever_its_version() -> None:
    """With or without domain, NUMA as text, null links, missing keys: what is there is taken."""
    listing = parse_listing(
        b'[{"neuron_device": 1, "bdf": "CC:00.0", "numa_node": "-1", "connected_to": null,'
        b' "nc_count": 4, "logical_neuroncore_config": 2, "memory_size": 103079215104,'
        b' "neuron_processes": [{"pid": 9, "command": "python3 ..."}, {"pid": "x"}, 3]},'
        b' {"neuron_device": 0, "bdf": "0000:b5:00.0", "numa_node": "1", "connected_to": [1]},'
        b' {"neuron_device": 0}, {"bdf": "x"}, 7]'
    )
    one, zero = listing.of(1), listing.of(0)
    assert one is not None
    assert zero is not None
    assert (one.bus, one.numa, one.connected_to, one.lnc) == ("0000:cc:00.0", None, None, 2)
    assert [p.pid for p in one.processes] == [9]
    assert (zero.bus, zero.numa, zero.connected_to) == ("0000:b5:00.0", 1, (1,))
    assert "3 entries" in listing.problem


@pytest.mark.parametrize(
    ("name", "count", "peers"),
    [
        ("inf2.48xlarge", 12, 2),
        ("trn1.2xlarge", 1, 0),
        ("trn1.32xlarge", 16, 4),
        ("trn2.48xlarge", 16, 4),
    ],
)
def test_sample_listings_agree_with_the_tables(name: str, count: int, peers: int) -> None:
    """Devices, links and cores of the sample documents are those of the instance tables."""
    listing = parse_listing(sample(f"neuron-ls.{name}.json"))
    board = INSTANCES[name]
    assert (len(listing.devices), listing.problem) == (count, "")
    for device in listing.devices:
        assert set(device.connected_to or ()) == set(board.neighbours[device.number])
        assert len(device.connected_to or ()) == peers
        assert device.cores == board.cores // board.lnc[0]
        assert device.memory_bytes == board.memory_bytes


def test_a_tool_that_fails_hangs_or_lies_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to fail is a reason, and the program is not run again at once."""
    host = FakeNeuronHost(tmp_path, "inf2.8xlarge")
    deadline = "alloy_agent.backends.neuron.listing.DEADLINE_S"
    for behaviour, words in (("fail", "driver"), ("garbage", "no JSON"), ("hang", "0.5 s")):
        host.behave("ls", behaviour)
        lister = Lister(str(host.tools))
        monkeypatch.setattr(deadline, 0.5 if behaviour == "hang" else WAIT_S)
        assert words in lister.listing((0,)).problem
        monkeypatch.setattr(deadline, WAIT_S)
        host.behave("ls", "")
        assert lister.listing((0,)).devices == ()  # backs off
        assert lister.listing((0, 1)).devices  # devices changed: asked again
    assert "no " in Lister(str(tmp_path / "nowhere")).listing((0,)).problem


def test_tools_of_the_next_generation_are_asked_in_their_own_words(tmp_path: Path) -> None:
    """Where the old option is refused, the new one is tried, and kept; its document is read."""
    host = FakeNeuronHost(tmp_path, "inf2.24xlarge")
    host.behave("ls", "new")
    lister = Lister(str(host.tools))
    assert len(lister.listing(tuple(range(6))).devices) == 6
    assert "--output-format" in lister._words
    host.behave("ls", "")
    assert len(lister.listing((0,)).devices) == 6  # and back, after the tools were put back


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                (
                    "neuron_device",
                    "bdf",
                    "neuron_processes",
                    "pid",
                    "neuron_runtime_data",
                    "report",
                    "neuroncore_counters",
                    "neuroncores_in_use",
                    "neuroncore_utilization",
                    "memory_used",
                    "execution_stats",
                    "latency_stats",
                    "device_latency",
                    "p50",
                    "system_data",
                    "0",
                )
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(document=JSON, cut=st.integers(0, 200))
def test_no_document_breaks_the_readers(document: Any, cut: int) -> None:
    """Any JSON, whole or cut, is read as far as it makes sense, and nothing raises."""
    raw = json.dumps(document).encode()
    for text in (raw, raw[:cut]):
        parse_listing(text)
        parse_report(text)


@settings(deadline=None, max_examples=150)
@given(raw=st.binary(max_size=300))
def test_no_bytes_break_the_readers(raw: bytes) -> None:
    """Any bytes are no report, no listing, no claim, no table: never an exception."""
    parse_listing(raw)
    parse_report(raw)
    text = raw.decode("utf-8", "replace")
    parse_line(f"NEURON_HW_ERR={text}")
    parse_cycles(text)
    parse_power(text, 0.0)
    whole_number(text)


# --- neuron-monitor ------------------------------------------------------------------------------


def test_a_report_tells_who_is_on_which_core() -> None:
    """Cores, memory, counts and percentiles of each process, with nulls where nothing ran."""
    report = parse_report(sample("neuron-monitor.trn1.32xlarge.1.json"))
    assert report is not None
    first = report.runtimes[0]
    assert (first.pid, first.tag) == (40112, "train-a")
    assert sorted(first.cores) == list(range(8))
    assert first.cores[0] == pytest.approx(0.8747)
    assert (first.completed, first.failed) == (24, 0)
    assert first.latency_p99_s == pytest.approx(0.046137)
    assert first.host_memory_bytes == 7516192768
    idle = parse_report(sample("neuron-monitor.idle.trn1.2xlarge.json"))
    assert idle is not None
    assert idle.runtimes == ()
    lines = sample("neuron-monitor.trn1.32xlarge.ndjson").splitlines()
    assert all(parse_report(line) is not None for line in lines)
    second = parse_report(lines[1])
    assert second is not None
    silent = [r for r in second.runtimes if r.latency_p50_s is None]
    assert silent
    assert any(h.mem_ecc_uncorrected for h in second.hardware if h.number == 9)


def test_absurd_reports_give_no_absurd_numbers() -> None:
    """Ratios stay within 0 to 1, negative counts are none, errors of groups are kept."""
    report = parse_report(
        json.dumps(
            {
                "neuron_runtime_data": [
                    {
                        "pid": 7,
                        "error": "partial",
                        "report": {
                            "neuroncore_counters": {
                                "neuroncores_in_use": {
                                    "0": {"neuroncore_utilization": 1e9},
                                    "1": {"neuroncore_utilization": -3},
                                    "x": {},
                                },
                                "error": "stale",
                            },
                            "execution_stats": {
                                "execution_summary": {"completed": -1, "timed_out": 2},
                                "latency_stats": {"device_latency": None},
                            },
                        },
                    },
                    {"pid": 0},
                    {"pid": True},
                ]
            }
        ).encode()
    )
    assert report is not None
    (runtime,) = report.runtimes
    assert runtime.cores == {0: 1.0, 1: 0.0}
    assert (runtime.completed, runtime.failed, runtime.latency_p50_s) == (None, 2, None)
    assert runtime.problems == ("partial", "stale")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[FakeNeuronHost, Monitor]]:
    """A host and a monitor over its program, ended after the test."""
    host = FakeNeuronHost(tmp_path, "trn1.2xlarge")
    monitor = Monitor(str(host.tools), 1.0)
    yield host, monitor
    monitor.close()
    assert not monitor.health().running


def test_one_child_serves_all_and_ends_with_the_agent(
    child: tuple[FakeNeuronHost, Monitor],
) -> None:
    """Started twice there is one child; its reports come; it is gone after the close."""
    host, monitor = child
    assert monitor.start()
    assert monitor.start()
    assert monitor.latest(wait_s=WAIT_S) is not None
    assert eventually(lambda: monitor.health().reports >= 2)
    assert host.monitor_starts() == 1
    host.start(4711, 0, (1,))
    assert eventually(lambda: (r := monitor.latest()) is not None and r.of(4711) is not None)


@pytest.mark.parametrize("behaviour", ["exit", "half"])
def test_a_child_that_ends_is_started_again_later(
    child: tuple[FakeNeuronHost, Monitor], behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, or dies within a line: that is dropped, and the next child comes after a pause."""
    host, monitor = child
    monkeypatch.setattr(monitoring, "BACK_OFF_FIRST_S", 0.05)
    host.behave("monitor", behaviour)
    monitor.start()
    assert eventually(lambda: monitor.health().restarts >= 2)
    assert monitor.latest() is None
    assert "ended" in monitor.health().problem
    assert (monitor.health().dropped_lines > 0) == (behaviour == "half")
    assert host.monitor_starts() < 10
    host.behave("monitor", "")
    assert monitor.latest(wait_s=WAIT_S) is not None or eventually(
        lambda: monitor.latest() is not None
    )
    assert monitor.health().problem == ""


def test_a_silent_child_is_given_up(
    child: tuple[FakeNeuronHost, Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stops talking is ended and started again; its last report is not taken for now."""
    host, monitor = child
    monkeypatch.setattr(monitoring, "BACK_OFF_FIRST_S", 0.05)
    monkeypatch.setattr(monitoring, "SILENT_MIN_S", 0.5)
    monkeypatch.setattr(monitoring, "SILENT_PERIODS", 0.5)
    monitor.start()
    assert monitor.latest(wait_s=WAIT_S) is not None
    host.behave("monitor", "stop")
    assert eventually(lambda: "silent" in monitor.health().problem)
    assert monitor.latest() is None


def test_a_flood_is_held_back(child: tuple[FakeNeuronHost, Monitor]) -> None:
    """A child that prints without end costs a few reports a second and no more."""
    host, monitor = child
    host.behave("monitor", "flood")
    monitor.start()
    assert monitor.latest(wait_s=WAIT_S) is not None
    before = time.monotonic()
    reports = monitor.health().reports
    time.sleep(1.5)
    took_s = time.monotonic() - before
    got = monitor.health().reports - reports
    assert got <= monitoring.PARSED_PER_S * (took_s + 2)
    assert monitor.health().skipped_lines > 0
    assert monitor.health().running


@pytest.mark.parametrize("behaviour", ["garbage", "long"])
def test_lines_that_are_no_reports_are_dropped(
    child: tuple[FakeNeuronHost, Monitor], behaviour: str
) -> None:
    """Garbage and endless lines are counted and thrown away; the reports between them arrive."""
    host, monitor = child
    host.behave("monitor", behaviour)
    monitor.start()
    assert monitor.latest(wait_s=WAIT_S) is not None
    assert eventually(lambda: monitor.health().dropped_lines >= 1)
    assert monitor.health().running


# --- topology ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn2.48xlarge"])
def test_a_torus_groups_one_a_row_two_rows_or_all(name: str) -> None:
    """1, 4, 8 and 16 devices work for collectives, from the first of a row on; nothing else."""
    torus, everyone = INSTANCES[name], range(16)
    leads = {number: group_sizes(torus, number, everyone) for number in everyone}
    assert leads[0] == (1, 4, 8, 16)
    assert leads[8] == (1, 4, 8)
    assert leads[4] == leads[12] == (1, 4)
    assert {leads[number] for number in everyone if number % 4} == {(1,)}
    check_group(torus, (4, 5, 6, 7))
    with pytest.raises(PlanImpossibleError, match="2, 3, 4, 5") as raised:
        check_group(torus, (2, 3, 4, 5))
    assert "0-3; 4-7; 8-11; 12-15" in raised.value.cure


def test_a_ring_groups_any_run_that_can_be_named_as_one() -> None:
    """On a ring every run works; one over its end cannot be named, and a missing device ends it."""
    ring = INSTANCES["inf2.48xlarge"]
    assert group_sizes(ring, 0, range(12)) == tuple(range(1, 13))
    assert group_sizes(ring, 11, range(12)) == (1,)
    assert group_sizes(ring, 2, {0, 2, 3, 5}) == (1, 2)
    assert group_sizes(None, 0, range(5)) == ()


def test_instances_are_found_and_links_never_denied() -> None:
    """By type, else by what is there; what is not known counts as linked."""
    assert find_instance("trn2u.48xlarge", "Trainium2", 16) is INSTANCES["trn2.48xlarge"]
    assert find_instance("", "Inferentia2", 6) is INSTANCES["inf2.24xlarge"]
    assert find_instance("", "Inferentia2", 5) is None
    assert find_instance("trn1.32xlarge", "Inferentia2", 12) is INSTANCES["inf2.48xlarge"]
    assert is_linked(None, 0, (), 2)
    assert not is_linked(None, 0, (), 1)
    assert is_linked(INSTANCES["trn1.32xlarge"], 3, (), 15)
    assert not is_linked(INSTANCES["trn2.3xlarge"], 0, (), 1)


def test_core_orders_are_permutations() -> None:
    """Every device of trn2 has all of its cores once, whatever its place in an UltraServer."""
    board = INSTANCES["trn2.48xlarge"]
    for number in range(16):
        for node in ("-1", "0", "1", "2", "3", ""):
            order = core_order(board, number, node)
            assert order is not None
            assert sorted(order) == list(range(8))
    assert core_order(board, 0, "busy") is None


@pytest.mark.parametrize(
    ("text", "cores"),
    [("3", (3,)), ("3-6", (3, 4, 5, 6)), ("3,4,5", (3, 4, 5)), ("3-5,6", (3, 4, 5, 6))],
)
def test_visible_cores_are_read_as_the_runtime_reads_them(
    text: str, cores: tuple[int, ...]
) -> None:
    """All documented forms."""
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "3,5,6", "6-3", "5,4", "a", "1-", "-1", "1--2", "0-999999"])
def test_visible_cores_with_holes_or_nonsense_are_refused(text: str) -> None:
    """Holes, falling order and text are no run."""
    with pytest.raises(ValueError, match=r"core|range|run"):
        parse_cores(text)


# --- access --------------------------------------------------------------------------------------


def run(number: int, start: int = 0, size: int = 2, lnc: int = 1) -> Run:
    """Return a run of a device with two logical cores."""
    return Run(number=number, start=start, size=size, lnc=lnc, device_cores=2)


def test_neighbouring_devices_are_one_set() -> None:
    """Four whole devices are one run of cores, four nodes and one meeting point."""
    access = access_of([run(n) for n in range(4, 8)], "t", has_lnc=False, ports_from=61000)
    assert access.environment["NEURON_RT_VISIBLE_CORES"] == "8-15"
    assert access.device_nodes == tuple(f"/dev/neuron{n}" for n in range(4, 8))
    inside = access_of(
        [run(n) for n in range(4, 8)], "t", has_lnc=False, ports_from=61000, counted_from=4
    )
    assert inside.environment["NEURON_RT_VISIBLE_CORES"] == "0-7"


def test_a_set_with_a_hole_or_two_configurations_is_refused() -> None:
    """The runtime takes one run under one configuration; anything else is refused at plan time."""
    with pytest.raises(PlanImpossibleError, match="hole"):
        access_of([run(0), run(2)], "t", has_lnc=False, ports_from=61000)
    with pytest.raises(PlanImpossibleError, match="hole"):
        access_of([run(0, size=1), run(1)], "t", has_lnc=False, ports_from=61000)
    with pytest.raises(PlanImpossibleError, match="different logical core"):
        access_of([run(0, lnc=1), run(1, lnc=2)], "t", has_lnc=True, ports_from=61000)


def test_meeting_points_of_two_runs_differ() -> None:
    """No two runs of a node share the port of their collectives."""
    ports = [
        access_of([run(n, s)], "t", has_lnc=False, ports_from=61000).environment[
            "NEURON_RT_ROOT_COMM_ID"
        ]
        for n in range(16)
        for s in range(8)
    ]
    assert len(set(ports)) == len(ports)


# --- health --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", list(ErrorClass))
def test_every_class_is_in_the_fault_catalogue(error: ErrorClass) -> None:
    """Codes are those that the agent's catalogue knows, and each has its advice."""
    assert load().of(f"neuron:{error}").title != load().of("neuron:no_such_thing").title
    assert ADVICE[error].text


def test_a_claim_names_its_device() -> None:
    """Device, core and serial are taken from the line; other lines are nobody's."""
    claim = parse_line(
        "neuron: nd3 NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=3 nc-id=1 "
        "serial-num=9af5434815c8bd80 action=REPLACE"
    )
    assert claim is not None
    assert (claim.error, claim.device, claim.core) == (ErrorClass.SRAM, 3, 1)
    assert claim.serial == "9af5434815c8bd80"
    short = parse_line("neuron:nd7 NEURON_HW_ERR=DMA_ERROR")
    assert short is not None
    assert short.device == 7
    assert parse_line("neuron: all is well") is None
    assert parse_line("NEURON_HW_ERR=NO_SUCH_ERROR") is None


def test_only_a_counter_that_grows_bears_a_claim_out() -> None:
    """Equal, falling and absent counters confirm nothing."""
    claim = parse_line("nd0 NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR")
    assert claim is not None
    name = "mem_ecc_uncorrected"
    for before, after in (
        ({}, {name: 3}),
        ({name: 3}, {name: 3}),
        ({name: 3}, {name: 0}),
        ({}, {}),
    ):
        judged = judge_claim(claim, before, after)
        assert (judged.confirmed, judged.advice.action) == (False, "observe")
    assert judge_claim(claim, {name: 0}, {name: 1}).advice.action == "replace"


def test_a_repairable_error_waits_until_the_device_is_idle() -> None:
    """It is repaired by a reload: drained at idle, never replaced."""
    ((error, _),) = moved(
        {"mem_ecc_repairable_uncorrected": 0}, {"mem_ecc_repairable_uncorrected": 1}
    )
    assert error is ErrorClass.HBM_REPAIRABLE
    assert ADVICE[error].action == "drain_at_idle"


def test_hangs_are_the_links_once_they_repeat_under_different_tenants() -> None:
    """One tenant's hangs stay the workload's; old ones are forgotten."""
    assert judge_hangs([], 0.0).text == "no hang"
    same = [Hang(time_s=float(t), tenant="a") for t in range(5)]
    assert judge_hangs(same, 10.0).action == "observe"
    mixed = [*same[:2], Hang(time_s=3.0, tenant="b")]
    assert judge_hangs(mixed, 10.0).action == "replace"
    assert judge_hangs(mixed, 200_000.0).text == "no hang"


# --- the tree and holders ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number", "cores", "driver"),
    [
        ("sysfs.trn1.device0.driver-2.24.tsv", 0, 2, "2.24.7.0"),
        ("sysfs.trn2.device4.driver-2.30.tsv", 4, 8, "2.30.2.0"),
    ],
)
def test_sample_trees_of_two_drivers_are_read(
    tmp_path: Path, name: str, number: int, cores: int, driver: str
) -> None:
    """Trees as two driver generations make them give identity, links, counters and power."""
    for line in sample(name).decode().splitlines():
        if line.startswith("#"):
            continue
        path, _mode, content = line.split("\t")
        target = tmp_path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content.replace("\\n", "\n"))
    tree = NeuronTree(str(tmp_path / "sys"))
    assert tree.driver_version() == driver
    (device,) = tree.devices()
    assert (device.number, device.number_of("core_count")) == (number, cores)
    assert device.cores() == tuple(range(cores))
    assert len(device.text("serial_number")) == 16
    assert len(device.text("connected_devices").split(",")) == 4
    assert device.number_of("mem_ecc_uncorrected") == 0
    assert parse_power(device.text("power"), 0.0).value == pytest.approx(0.4802)
    cycles = read_attribute(f"{device.core_folder(0)}/stats/tensor_engine/pe_cntrs").text
    assert parse_cycles(cycles) is not None
    has_corrected = device.number_of("mem_ecc_corrected") is not None
    assert has_corrected == (driver > "2.30")


def test_an_attribute_is_read_or_says_why(tmp_path: Path) -> None:
    """Absent, a link to elsewhere, or no text: a reason and never an exception."""
    (tmp_path / "good").write_text("7\n")
    (tmp_path / "odd").write_bytes(b"\x01\x02")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    assert read_attribute(str(tmp_path / "good")).text == "7"
    for name in ("odd", "link", "none", "."):
        found = read_attribute(str(tmp_path / name))
        assert (found.text, found.quality) == (None, Quality.NOT_SUPPORTED)
        assert found.reason


def test_control_and_data_descriptors_are_told_apart(tmp_path: Path) -> None:
    """Write-only carries reservations, anything else attaches; numbers count, names do not."""
    host = FakeNeuronHost(tmp_path, "inf2.24xlarge")
    host.start(100, 2, (0,), modes=(os.O_WRONLY,))
    host.start(101, 3, (0,), modes=(os.O_RDWR, os.O_RDONLY))
    (host.dev / "other").write_text(f"{MAJOR}:4")
    host.start(102, 4, (0,), node="other", modes=(os.O_RDWR,))
    nodes = {os.makedev(MAJOR, n): n for n in range(6)}
    scan = Scanner(str(host.proc), TreeNumbers(host.dev)).scan(nodes)
    shown = {h.pid: (h.data, h.control) for h in scan.holders}
    assert shown == {100: ((), (2,)), 101: ((3,), ()), 102: ((4,), ())}
    assert scan.unreadable == 0


@pytest.mark.parametrize(
    ("rules", "everything", "allowed"),
    [
        (["a *:* rwm"], True, ()),
        ([f"c {MAJOR}:3 rw", "c 1:3 rwm"], False, (3,)),
        ([f"c {MAJOR}:* rwm"], False, (2, 3)),
        ([f"c {MAJOR}:3 m", f"b {MAJOR}:2 rw", "junk", "c x:y"], False, ()),
    ],
)
def test_device_rules_are_read_as_the_kernel_applies_them(
    tmp_path: Path, rules: list[str], everything: bool, allowed: tuple[int, ...]
) -> None:
    """Any, one number, a whole major; a rule that only makes nodes lets nobody open one."""
    host = FakeNeuronHost(tmp_path, "inf2.8xlarge")
    host.devices_cgroup("/t", rules)
    nodes = {os.makedev(MAJOR, n): n for n in (2, 3)}
    fence = device_fence({"devices": "/t"}, detect(host.proc), nodes)
    assert not isinstance(fence, str)
    assert (fence.everything, fence.allowed) == (everything, allowed)
    assert isinstance(device_fence({"devices": "/gone"}, detect(host.proc), nodes), str)


def test_cores_of_a_container_count_from_its_first_device() -> None:
    """Variables that count from the granted device on are read so, where that is set."""
    holder = Holder(
        pid=1,
        start_ticks=1,
        comm="x",
        data=(2, 3),
        variables={"NEURON_RT_VISIBLE_CORES": "2-3"},
    )
    (there,) = occupants(3, 2, [holder], None, relative=True)
    assert (there.cores, there.source) == ((0, 1), Source.ENVIRONMENT)
    (there,) = occupants(3, 2, [holder], None)
    assert there.cores == ()
