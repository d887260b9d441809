"""The launch gate on real processes, with the emulated device and the real kernel mechanisms."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.conformance.gate.pages import (
    HEAD_BYTES,
    ORDER,
    SLOT_BYTES,
    OrderPage,
    StatePage,
    make_state,
)
from alloy_agent.conformance.gate.witness import Witness, symbol_offset
from alloy_agent.conformance.rate import Bucket, GateOrder, ProductionView, admit
from alloy_agent.daemon.shares import thaw_all
from alloy_agent.errors import UnsupportedError
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.host.clock import boottime_s
from tests.rate.conftest import (
    NEIGHBOUR,
    PRODUCTION,
    Bench,
    controlled,
    eventually,
    launched,
)

IS_ROOT = os.geteuid() == 0


# --- the decision in C is the decision in Python -------------------------------------------------

SPAN_NS = st.integers(0, 30_000_000)


@settings(max_examples=300, deadline=None)
@given(
    order=st.builds(
        GateOrder,
        stopped=st.booleans(),
        duty_ratio=st.sampled_from([0.02, 0.5, 1.0]),
        quiet_from_s=st.sampled_from([0.0, 0.005, math.inf]),
        quiet_to_s=st.sampled_from([0.0, 0.006, 0.02]),
        hold_from=st.integers(0, 3),
        hold_to=st.integers(0, 6),
        hold_until_s=st.sampled_from([0.0, 10.002, 11.0]),
        outstanding_s=st.sampled_from([0.0005, 0.001]),
        share_max_ratio=st.sampled_from([0.5, 1.0]),
    ),
    busy=st.booleans(),
    bursts=st.integers(0, 6),
    tokens=st.floats(-0.01, 0.01),
    age_ns=SPAN_NS,
    kernel_ns=st.integers(1, 5_000_000),
    held_ns=st.integers(0, 2_000_000),
)
def test_the_gate_in_c_decides_like_the_gate_in_python(  # noqa: PLR0917
    libraries: tuple[Path, Path],
    order: GateOrder,
    busy: bool,
    bursts: int,
    tokens: float,
    age_ns: int,
    kernel_ns: int,
    held_ns: int,
) -> None:
    """For any order and any state of production both let the same launches pass."""
    gate = ctypes.CDLL(str(libraries[0]))
    gate.alloy_admit.restype = ctypes.c_uint64
    idle_ns = 10_000_000_000
    packed = ORDER.pack(
        *(0, 1, 2, 0, 0, 0),
        *(order.duty_ratio, min(order.quiet_from_s, 1e6), order.quiet_to_s),
        *(order.hold_from, order.hold_to, int(order.hold_until_s * 1e9)),
        *(int(order.outstanding_s * 1e9), order.share_max_ratio, int(order.stopped), 0),
    )
    wait_ns = gate.alloy_admit(
        packed,
        int(busy),
        *(ctypes.c_uint64(n) for n in (idle_ns, bursts)),
        *(ctypes.c_double(tokens) for _ in range(2)),
        *(ctypes.c_uint64(n) for n in (idle_ns + age_ns, kernel_ns, held_ns)),
    )
    now_s = 10.0 + age_ns * 1e-9
    seen = ProductionView(outstanding=busy, idle_since_s=10.0, bursts_done=bursts)
    when_s = admit(
        order,
        seen,
        Bucket(tokens_s=tokens, capped_s=tokens),
        now_s,
        kernel_ns * 1e-9,
        held_ns * 1e-9,
    )
    if when_s == math.inf:
        assert wait_ns == (1 << 64) - 1
    else:
        assert wait_ns * 1e-9 == pytest.approx(when_s - now_s, abs=2e-6)


# --- leases, crashes, forgeries ---------------------------------------------------------------


def test_without_a_lease_nothing_is_launched(bench: Bench) -> None:
    """A fresh order stops the neighbour; a lease lets it run; the lease's end stops it again."""
    bench.device()
    shared = bench.share()
    env = shared.add("n", "opportunistic")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    bench.tenant(NEIGHBOUR, env)
    assert eventually(lambda: any(s.waiting for s in page.slots() or ()))
    time.sleep(0.2)
    assert launched(page) == 0
    with controlled(shared):
        assert eventually(lambda: launched(page) > 10)
    stopped = launched(page)
    time.sleep(0.3)
    assert launched(page) <= stopped + 1
    page.close()


AGENT = """
import sys, threading
from pathlib import Path
from alloy_agent.conformance.gate.device import SharedDevice
shared = SharedDevice("emulated", Path(sys.argv[1]))
print("\\t".join(shared.add("p", "production").values()), flush=True)
print("\\t".join(shared.add("n", "opportunistic").values()), flush=True)
shared.run(threading.Event())
"""
NAMES = ("ROLE", "ORDER", "STATE", "PRODUCTION")


def test_a_killed_agent_stops_the_neighbour_and_never_production(bench: Bench) -> None:
    """After kill -9 of the agent the lease runs out; production goes on undisturbed."""
    bench.device()
    agent = bench.start([sys.executable, "-c", AGENT, str(bench.folder / "share")])
    assert agent.stdout is not None
    envs = [
        {f"ALLOY_GATE_{name}": value for name, value in zip(NAMES, line.split("\t"), strict=True)}
        for line in (agent.stdout.readline().strip() for _ in range(2))
    ]
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in envs]
    bench.tenant(PRODUCTION, envs[0])
    bench.tenant(NEIGHBOUR, envs[1])
    assert eventually(lambda: launched(pages[1]) > 20 and launched(pages[0]) > 100)
    agent.kill()
    agent.wait()
    time.sleep(0.3)
    neighbour, production = launched(pages[1]), launched(pages[0])
    assert eventually(lambda: launched(pages[0]) > production + 200)
    assert launched(pages[1]) <= neighbour + 1
    for page in pages:
        page.close()


def test_a_killed_production_frees_the_device(bench: Bench) -> None:
    """Production dies in the middle of a burst: its slot is dead, the neighbour gets the device."""
    bench.device()
    shared = bench.share()
    ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
    page = StatePage(Path(theirs["ALLOY_GATE_STATE"]))
    with controlled(shared):
        production = bench.tenant(PRODUCTION, ours)
        bench.tenant(NEIGHBOUR, theirs)
        assert eventually(lambda: launched(page) > 10)
        production.kill()
        production.wait()
        before = launched(page)
        assert eventually(lambda: launched(page) > before + 500)
    page.close()


def test_a_vanished_device_hangs_nobody(bench: Bench) -> None:
    """When the device process dies, launches fail and synchronising returns."""
    device = bench.device()
    env = bench.share().add("p", "production")
    program = PRODUCTION.replace("emu.emuSynchronize()", "if emu.emuSynchronize(): sys.exit(9)")
    tenant = bench.tenant(program, env)
    assert tenant.stdout is not None
    assert tenant.stdout.readline() == "burst\n"
    device.kill()
    assert tenant.wait(60) == 9


@pytest.mark.parametrize("damage", [b"\0" * 16, b"", os.urandom(HEAD_BYTES + SLOT_BYTES)])
def test_a_forged_page_costs_the_neighbour_its_lease(bench: Bench, damage: bytes) -> None:
    """A page that makes no sense: no lease, a reason in the status, the agent lives."""
    shared = bench.share()
    shared.add("p", "production")
    env = shared.add("n", "opportunistic")
    path = Path(env["ALLOY_GATE_STATE"])
    path.write_bytes(damage)
    shared.tick()
    status = next(t for t in shared.status().tenants if t.name == "n")
    assert not status.metered
    assert status.trouble
    lease_ns = struct.unpack_from("<Q", Path(env["ALLOY_GATE_ORDER"]).read_bytes(), 24)[0]
    assert lease_ns == 0


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.integers(0, HEAD_BYTES + 2 * SLOT_BYTES))
def test_any_bytes_on_a_page_are_survived(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int
) -> None:
    """Whatever a tenant writes to its page, the reader answers with slots or with nothing."""
    path = tmp_path_factory.mktemp("page") / "state"
    make_state(path, os.getuid(), -1)
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(junk)
    page = StatePage(path)
    for slot in page.slots() or ():
        bursts, _ = page.bursts(slot)
        assert len(bursts) <= 256
    page.close()


def test_forked_children_take_slots_of_their_own(bench: Bench) -> None:
    """Eight processes, three of them killed: slots never move, the sum is the truth."""
    bench.device()
    env = bench.share().add("p", "production")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    program = (
        "import os, sys, ctypes, time\n"
        "emu = ctypes.CDLL(os.environ['ALLOY_EMU_LIBRARY'])\n"
        "for _ in range(7):\n"
        "    if os.fork() == 0: break\n"
        "for _ in range(25): emu.emuLaunchKernel(7, 100)\n"
        "emu.emuSynchronize()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(30)\n"
    )
    bench.tenant(program, env)
    assert eventually(lambda: launched(page) == 200)
    before = {slot.pid: slot.index for slot in page.slots() or ()}
    assert len(before) >= 8
    working = [s.pid for s in page.slots() or () if s.launched]
    for pid in working[1:4]:
        os.kill(pid, signal.SIGKILL)
    for slot in page.slots() or ():
        assert before[slot.pid] == slot.index
    assert launched(page) == 200
    for pid in working[4:]:
        os.kill(pid, signal.SIGKILL)
    page.close()


def test_an_order_is_refused_when_its_time_makes_no_sense(bench: Bench) -> None:
    """A lease of an hour, a wrong magic or a wrong role lets nothing pass."""
    bench.device()
    env = bench.share().add("n", "opportunistic")
    page, order = StatePage(Path(env["ALLOY_GATE_STATE"])), Path(env["ALLOY_GATE_ORDER"])
    bench.tenant(NEIGHBOUR, env)
    assert eventually(lambda: any(s.waiting for s in page.slots() or ()))
    with order.open("r+b") as stream:
        for role, until_s in ((2, boottime_s() + 3600), (1, boottime_s() + 5), (2, 0.0)):
            fresh = order.with_suffix(".other")
            made = OrderPage(fresh, "opportunistic")
            made.write(GateOrder(), until_s)
            made.close()
            content = bytearray(fresh.read_bytes())
            struct.pack_into("<I", content, 12, role)
            stream.seek(0)
            stream.write(content)
            stream.flush()
            time.sleep(0.1)
            assert launched(page) == 0
    page.close()


# --- speed ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_production_keeps_its_speed_on_real_processes(bench: Bench) -> None:
    """Under control production has most of its solo bursts; without, about half of them."""
    bench.device()

    def bursts(gated: bool) -> int:
        shared = bench.share()
        ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
        with controlled(shared):
            neighbour = bench.tenant(NEIGHBOUR, theirs if gated else {}, gated=gated)
            production = bench.tenant(PRODUCTION, ours, seconds=5.0)
            text = production.communicate()[0]
            neighbour.kill()
            neighbour.wait()
        bench.devices.remove(shared)
        return text.count("burst")

    assert bursts(gated=True) > 1.5 * bursts(gated=False)


# --- kernel mechanisms ------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Cgroup]:
    """A cgroup in the v2 tree alone, which ends with the test."""
    topology = detect()
    if not IS_ROOT or topology.unified is None:
        pytest.skip("needs root and a v2 cgroup tree")
    made = Cgroup(topology, f"alloy-test-{uuid4().hex[:12]}")
    folder = Path(topology.unified.folder(made.path))
    folder.mkdir()
    yield made
    made.thaw()
    made.kill()
    assert eventually(lambda: _gone(folder))


def _gone(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def join(group: Cgroup, pid: int) -> Path:
    assert group.topology.unified is not None
    folder = Path(group.topology.unified.folder(group.path))
    (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")
    return folder


@pytest.mark.host
def test_what_was_frozen_is_thawed_by_the_next_agent(group: Cgroup, tmp_path: Path) -> None:
    """The note outlives the agent that froze; the next one thaws before anything else."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    folder = join(group, sleeper.pid)
    first = Freezer(group.topology, tmp_path / "frozen")
    assert first.freeze(group.path)
    assert "frozen 1" in (folder / "cgroup.events").read_text(encoding="ascii")
    second = Freezer(group.topology, tmp_path / "frozen")
    assert second.recover() == (group.path,)
    assert "frozen 0" in (folder / "cgroup.events").read_text(encoding="ascii")
    assert second.recover() == ()
    sleeper.kill()
    sleeper.wait()


DAMAGED = {
    "bytes": b"\xff\xfe",
    "nul": b"a\x00b",
    "outside": b"../../../tmp/elsewhere",
    "inside_out": b"/alloy/../../x",
    "root": b"/",
    "endless": b"a" * 10_000,
    "lines": b"one\ntwo",
}


@pytest.mark.host
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_note_keeps_no_other_one_from_being_obeyed(
    group: Cgroup, tmp_path: Path, damage: str
) -> None:
    """It is set aside and told of once; every other note is thawed, whichever comes first."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        folder = join(group, sleeper.pid)
        root = tmp_path / "share"
        notes = root / "emulated" / "frozen"
        assert Freezer(group.topology, notes).freeze(group.path)
        (notes / "folder.frozen").mkdir()
        (notes / "link.frozen").symlink_to("/etc/hostname")
        os.mkfifo(notes / "pipe.frozen")
        for name in ("0", "z"):
            (notes / f"{name}.frozen").write_bytes(DAMAGED[damage])
        (root / "other" / "keeper.lock").mkdir(parents=True)  # a device that cannot be looked at
        (root / "other" / "frozen").mkdir()
        (root / "other" / "frozen" / "x.frozen").write_bytes(b"a")
        assert thaw_all(root) == (group.path,)
        assert "frozen 0" in (folder / "cgroup.events").read_text(encoding="ascii")
        assert not (notes / "0.frozen").exists()
        assert {path.name for path in notes.glob("[0z].*")} == {"0.damaged", "z.damaged"}
        assert (notes / "0.damaged").read_bytes() == DAMAGED[damage]
        assert thaw_all(root) == ()
    finally:
        group.thaw()
        sleeper.kill()
        sleeper.wait()


@pytest.mark.host
def test_the_freezer_spares_an_mps_server(group: Cgroup, tmp_path: Path) -> None:
    """A cgroup with an MPS server is refused and runs on."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    folder = join(group, sleeper.pid)
    freezer = Freezer(group.topology, tmp_path / "frozen", lambda _pid: "nvidia-cuda-mps-server")
    with pytest.raises(Exception, match="MPS server"):
        freezer.freeze(group.path)
    assert "frozen 0" in (folder / "cgroup.events").read_text(encoding="ascii")
    sleeper.kill()
    sleeper.wait()


@pytest.mark.host
def test_the_kernel_counts_launches_of_a_tenant_without_interposer(
    group: Cgroup, bench: Bench
) -> None:
    """A tenant that unset the preload is counted exactly; its page, which says nothing, is not it.

    A process outside of the cgroup adds nothing.
    """
    bench.device()
    assert group.topology.unified is not None
    folder = Path(group.topology.unified.folder(group.path))
    try:
        witness = Witness(bench.driver, "emuLaunchKernel", folder)
    except UnsupportedError as exc:
        pytest.skip(f"no uprobe events here: {exc}")
    program = (
        "import ctypes, os, sys\nsys.stdin.readline()\n"
        "emu = ctypes.CDLL(os.environ['ALLOY_EMU_LIBRARY'])\n"
        "for _ in range(300): emu.emuLaunchKernel(9, 1)\n"
        "emu.emuSynchronize()\n"
    )
    env = {
        **os.environ,
        "ALLOY_EMU_LIBRARY": str(bench.driver),
        "ALLOY_EMU_SOCKET": str(bench.socket),
    }
    inside, outside = (
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, env=env)
        for _ in range(2)
    )
    join(group, inside.pid)
    for process in (inside, outside):
        process.communicate(b"go\n", timeout=90)
        assert process.returncode == 0
    assert witness.count() == 300
    witness.close()


def test_symbols_are_found_in_elf_files_only(bench: Bench, tmp_path: Path) -> None:
    """An entry begins with the 5-byte NOP; a file that is none, or has no such symbol, is named."""
    offset = symbol_offset(bench.driver, "cuLaunchKernel")
    if os.uname().machine == "x86_64":
        assert bench.driver.read_bytes()[offset : offset + 5] == bytes.fromhex("0f1f440000")
    with pytest.raises(UnsupportedError, match="no dynamic symbol nothing"):
        symbol_offset(bench.driver, "nothing")
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x7fELF\x02" + b"\xff" * 200)
    with pytest.raises(Exception, match="junk"):
        symbol_offset(junk, "x")


def test_sixty_four_tenants_have_pages_and_leases(bench: Bench) -> None:
    """A device takes 64 tenants; each has an order of its own with a lease that lies ahead."""
    shared = bench.share()
    shared.add("p", "production")
    orders = [Path(shared.add(f"n{n}", "opportunistic")["ALLOY_GATE_ORDER"]) for n in range(63)]
    before_ns = int(boottime_s() * 1e9)
    shared.tick()
    assert len(shared.status().tenants) == 64
    for order in orders:
        assert struct.unpack_from("<Q", order.read_bytes(), 24)[0] > before_ns


def test_tenants_swap_their_roles(bench: Bench) -> None:
    """The neighbour becomes production and production a neighbour; the new pages count."""
    bench.device()
    shared = bench.share()
    shared.add("a", "production")
    shared.add("b", "opportunistic")
    shared.remove("a")
    shared.remove("b")
    ours, theirs = shared.add("b", "production"), shared.add("a", "opportunistic")
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)]
    with controlled(shared):
        bench.tenant(PRODUCTION, ours)
        bench.tenant(NEIGHBOUR, theirs)
        assert eventually(lambda: all(launched(page) > 20 for page in pages))
    for page in pages:
        page.close()
