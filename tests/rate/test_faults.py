"""Misfortune and malice, with real processes: what stops, what goes on, what cannot be hidden."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from alloy_agent.conformance.gate.build import SOURCE
from alloy_agent.conformance.gate.device import SharedDevice, TenantStatus
from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.conformance.gate.pages import (
    HEAD_BYTES,
    MAGIC,
    ORDER_BYTES,
    SLOT_BYTES,
    SLOTS,
    STATE_BYTES,
    StatePage,
)
from alloy_agent.conformance.gate.witness import Witness
from alloy_agent.errors import BackendError, UnsupportedError
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.host.clock import boottime_s
from tests.rate.conftest import (
    DIES_WITH_US,
    LOAD,
    NEIGHBOUR,
    Bench,
    controlled,
    eventually,
    launched,
)

IS_ROOT = os.geteuid() == 0
PATIENT = """
import ctypes, os, sys, time
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"])
while True:
    for _ in range(5):
        if emu.emuLaunchKernel(7, 300):
            print("refused", flush=True)
            time.sleep(0.05)
    emu.emuSynchronize()
    time.sleep(0.002)
"""


def stopped_at(page: StatePage) -> int:
    """Return the count of a neighbour whose gate has looked again and again and let nothing pass.

    Its heartbeat proves that the gate was asked; the lease ran out long before the second look.
    """

    def beats_s() -> float:
        return max((slot.heartbeat_s for slot in page.slots() or ()), default=0.0)

    begun_s = boottime_s()
    assert eventually(lambda: beats_s() > begun_s + 0.3)
    count, since_s = launched(page), beats_s()
    assert eventually(lambda: beats_s() > since_s + 0.3)
    assert launched(page) == count
    return count


def progresses(page: StatePage, by: int) -> bool:
    """Return whether a page's processes, old ones and new ones, launch so often from now on."""

    def counts() -> dict[tuple[int, int], int]:
        return {(slot.index, slot.attached_ns): slot.launched for slot in page.slots() or ()}

    base = counts()
    return eventually(lambda: sum(n - base.get(k, 0) for k, n in counts().items()) >= by)


def contexts(bench: Bench) -> dict[int, int]:
    """Return what the device says itself: how many launches each process has completed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(str(bench.socket))
        asks.send(b"?")
        answer = json.loads(asks.recv(1 << 16))
    return {entry["pid"]: entry["completed"] for entry in answer["contexts"]}


# --- deaths --------------------------------------------------------------------------------------

AGENT = """
import json, sys, threading
from pathlib import Path
from alloy_agent.conformance.gate.device import SharedDevice
from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.host.cgroups import detect
folder, group = Path(sys.argv[1]), sys.argv[2]
freezer = Freezer(detect(), folder / "frozen") if group else None
if freezer:
    freezer.recover()
shared = SharedDevice("emulated", folder, freezer=freezer)
adopt = len(sys.argv) > 3
print(json.dumps(shared.add("p", "production", adopt=adopt)), flush=True)
print(json.dumps(shared.add("n", "opportunistic", cgroup=group, adopt=adopt)), flush=True)
shared.run(threading.Event())
"""


def start_agent(
    bench: Bench, group: str = "", *adopt: str
) -> tuple[subprocess.Popen[str], dict[str, str], dict[str, str]]:
    agent = bench.start([sys.executable, "-c", AGENT, str(bench.folder / "share"), group, *adopt])
    assert agent.stdout is not None
    ours, theirs = (json.loads(agent.stdout.readline()) for _ in range(2))
    return agent, ours, theirs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_random_moments(bench: Bench, seed: int) -> None:
    """Agent, tenants and device die in any order: no lease, no launch; production never waits."""
    chance = random.Random(seed)  # noqa: S311
    bench.device()
    agent, ours, theirs = start_agent(bench)
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)]
    production, neighbour = bench.tenant(PATIENT, ours), bench.tenant(NEIGHBOUR, theirs)
    for _ in range(4):
        assert progresses(pages[0], 50)
        assert progresses(pages[1], 5)
        time.sleep(chance.uniform(0.0, 0.2))
        victim = chance.choice(("agent", "production", "neighbour"))
        if victim == "agent":
            agent.kill()
            agent.wait()
            stopped_at(pages[1])
            assert progresses(pages[0], 50)
            agent, _, _ = start_agent(bench, "", "adopt")
        elif victim == "production":
            production.kill()
            production.wait()
            assert progresses(pages[1], 20)
            production = bench.tenant(PATIENT, ours)
        else:
            neighbour.kill()
            neighbour.wait()
            neighbour = bench.tenant(NEIGHBOUR, theirs)
        assert progresses(pages[1], 5)
    for page in pages:
        page.close()


def test_a_device_that_vanishes_is_told_to_both_tenants(bench: Bench) -> None:
    """Launches fail at once, nobody hangs, and the gate holds nothing of it as outstanding."""
    device = bench.device()
    shared = bench.share()
    ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)]
    with controlled(shared):
        tenants = [bench.tenant(PATIENT, env) for env in (ours, theirs)]
        assert eventually(lambda: all(launched(page) > 20 for page in pages))
        device.kill()
        device.wait()
        for tenant in tenants:
            assert tenant.stdout is not None
            assert tenant.stdout.readline() == "refused\n"
        assert eventually(
            lambda: all(not slot.outstanding for page in pages for slot in page.slots() or ())
        )
    for page in pages:
        page.close()


def test_children_end_with_a_parent_that_is_killed() -> None:
    """What a test starts dies with it, even by kill -9: nothing of a broken run stays behind."""
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([*{DIES_WITH_US!r}, 'sleep', '600'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [*DIES_WITH_US, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert eventually(lambda: (child / "comm").read_text() == "sleep\n")
        parent.kill()

    def gone() -> bool:
        try:
            return " Z " in (child / "stat").read_text(encoding="ascii")
        except OSError:
            return True

    assert eventually(gone)


# --- pages ---------------------------------------------------------------------------------------

FLOOD = """
import mmap, os, random, sys
chance = random.Random(int(sys.argv[2]))
with open(os.environ["ALLOY_GATE_STATE"], "r+b") as file:
    page = mmap.mmap(file.fileno(), 0)
print("flooding", flush=True)
while True:
    at = chance.randrange(16, len(page) - 4096)
    page[at:at + 4096] = chance.randbytes(4096)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_flooded_page_costs_its_tenant_alone(bench: Bench, seed: int) -> None:
    """A tenant that writes noise over its page as fast as it can: agent and production go on."""
    bench.device()
    shared = bench.share()
    ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
    page = StatePage(Path(ours["ALLOY_GATE_STATE"]))
    bench.tenant(PATIENT, ours)
    flood = bench.start([sys.executable, "-c", FLOOD, "0", str(seed)], theirs)
    assert flood.stdout is not None
    assert flood.stdout.readline() == "flooding\n"
    for _ in range(100):
        shared.tick()
        assert 0.0 <= shared.status().lent_ratio <= 1.0
        json.dumps(msgspec.to_builtins(shared.status()))
    assert progresses(page, 100)
    page.close()


def test_noise_in_an_order_lets_nothing_pass(bench: Bench) -> None:
    """Three hundred damaged orders: the neighbour waits through all of them and crashes at none."""
    bench.device()
    shared = bench.share()
    shared.add("p", "production")
    env = shared.add("n", "opportunistic")
    page, order = StatePage(Path(env["ALLOY_GATE_STATE"])), Path(env["ALLOY_GATE_ORDER"])
    neighbour = bench.tenant(NEIGHBOUR, env)
    assert eventually(lambda: any(slot.waiting for slot in page.slots() or ()))
    chance = random.Random(5)  # noqa: S311
    with order.open("r+b") as stream:
        for _ in range(300):
            stream.seek(0)
            stream.write(chance.randbytes(ORDER_BYTES))
            stream.flush()
        stream.seek(0)
        stream.write(bytes(ORDER_BYTES))  # nothing of an order, and an even sequence
    assert stopped_at(page) == 0
    assert neighbour.poll() is None
    page.close()


def test_a_process_without_a_slot_does_not_pass(bench: Bench) -> None:
    """The 65th process of a tenant cannot be seen, so it waits until one of the others has gone."""
    bench.device()
    shared = bench.share()
    env = shared.add("n", "opportunistic")
    path = Path(env["ALLOY_GATE_STATE"])
    sleeper = bench.start(["sleep", "600"])
    assert eventually(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
    with path.open("r+b") as stream:
        for index in range(SLOTS):
            stream.seek(HEAD_BYTES + index * SLOT_BYTES)
            stream.write(struct.pack("<2IQ", sleeper.pid, 1, int(boottime_s() * 1e9)))
    page = StatePage(path)
    with controlled(shared):
        neighbour = bench.tenant(NEIGHBOUR, env)
        assert eventually(lambda: bench.driver.name in _maps(neighbour.pid))
        time.sleep(0.3)
        assert launched(page) == 0
        assert neighbour.pid not in contexts(bench)
        sleeper.kill()
        sleeper.wait()
        assert eventually(lambda: launched(page) > 5)
    page.close()


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


# --- ways around the gate ------------------------------------------------------------------------

STATIC_MAIN = """
#include <stdio.h>
long emuLaunchKernel(); long emuSynchronize();
int main() {
  for (int i = 0; i < 50; i++) if (emuLaunchKernel(9, 100, 0,0,0,0,0,0,0,0,0,0,0,0)) return 1;
  if (emuSynchronize()) return 2;
  puts("done"); fflush(stdout); getchar(); return 0;
}
"""


@pytest.mark.host
def test_a_static_program_is_seen_by_the_device_alone(
    bench: Bench, tmp_path: Path, group: Cgroup
) -> None:
    """No page, no library, no uprobe shows it; the device's own list of processes does."""
    bench.device()
    env = bench.share().add("n", "opportunistic")
    source, program = tmp_path / "main.c", tmp_path / "static"
    source.write_text(STATIC_MAIN, encoding="ascii")
    command = ["/usr/bin/cc", "-w", "-static", "-DALLOY_EMULATED", str(SOURCE), str(source)]
    subprocess.run([*command, "-o", str(program), "-lpthread", "-lm"], check=True, stderr=-3)
    try:
        witness = Witness(bench.driver, "emuLaunchKernel", _folder(group))
    except UnsupportedError as exc:
        pytest.skip(f"no uprobe events here: {exc}")
    settings = {**env, "ALLOY_EMU_SOCKET": str(bench.socket), "LD_PRELOAD": str(bench.gate)}
    tenant = bench.start([str(program)], settings, stdin=subprocess.PIPE)
    _join(group, tenant.pid)
    assert tenant.stdout is not None
    assert tenant.stdout.readline() == "done\n"
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    assert (launched(page), witness.count()) == (0, 0)
    assert contexts(bench)[tenant.pid] == 50
    assert "liballoyemu" not in _maps(tenant.pid)
    witness.close()
    page.close()


def test_the_library_under_another_path_is_gated(bench: Bench, tmp_path: Path) -> None:
    """A copy under a name of the tenant's own choice, and a second context by it, pass the gate."""
    bench.device()
    shared = bench.share()
    env = shared.add("n", "opportunistic")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    copy = tmp_path / "anything.so"
    copy.write_bytes(bench.driver.read_bytes())
    program = LOAD + (
        "other = ctypes.CDLL(sys.argv[2])\n"
        "for n in range(20):\n    (emu, other)[n % 2].emuLaunchKernel(9, 100)\n"
        "emu.emuSynchronize(), other.emuSynchronize()\n"
        "print('done', flush=True)\nsys.stdin.readline()\n"
    )
    paths = {
        "ALLOY_EMU_LIBRARY": str(bench.driver),
        "ALLOY_EMU_SOCKET": str(bench.socket),
        "LD_PRELOAD": str(bench.gate),
    }
    argv = [sys.executable, "-c", program, "0", str(copy)]
    tenant = bench.start(argv, {**env, **paths}, stdin=subprocess.PIPE)
    stopped_at(page)
    assert launched(page) == 0
    with controlled(shared):
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == "done\n"
    assert launched(page) == 20
    page.close()


def test_a_storm_of_signals_loses_no_launch(bench: Bench) -> None:
    """Interrupted every half millisecond, at the gate and in the library: every launch counts."""
    bench.device()
    shared = bench.share()
    ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)]
    program = LOAD + (
        "import signal\nseen = 0\n"
        "def count(*_):\n    global seen\n    seen += 1\n"
        "signal.signal(signal.SIGALRM, count)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)\n"
        "for _ in range(200):\n    assert emu.emuLaunchKernel(9, 200) == 0\n"
        "emu.emuSynchronize()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(seen, flush=True)\ntime.sleep(600)\n"
    )
    with controlled(shared):
        tenants = [bench.tenant(program, env) for env in (ours, theirs)]
        for tenant in tenants:
            assert tenant.stdout is not None
            assert int(tenant.stdout.readline()) > 0
        assert [launched(page) for page in pages] == [200, 200]
    for page in pages:
        page.close()


# --- clocks --------------------------------------------------------------------------------------

STEP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static int calls;
int clock_gettime(clockid_t clock, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int bad = real(clock, t);
  if (clock == CLOCK_REALTIME) t->tv_sec += calls++ % 2 ? 3600 : -3600;
  return bad;
}
"""


def test_steps_of_the_wall_clock_change_nothing(bench: Bench, tmp_path: Path) -> None:
    """Agent and tenants whose wall clock jumps by hours at each look work as ever."""
    source, steps = tmp_path / "steps.c", tmp_path / "steps.so"
    source.write_text(STEP, encoding="ascii")
    command = ["/usr/bin/cc", "-w", "-shared", "-fPIC", str(source), "-o", str(steps), "-ldl"]
    subprocess.run(command, check=True)
    bench.device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(steps))
        agent, ours, theirs = start_agent(bench)
    pages = [StatePage(Path(env["ALLOY_GATE_STATE"])) for env in (ours, theirs)]
    both = {"LD_PRELOAD": f"{bench.gate} {steps}"}
    bench.tenant(PATIENT, {**ours, **both})
    bench.tenant(NEIGHBOUR, {**theirs, **both})
    assert eventually(lambda: launched(pages[0]) > 100 and launched(pages[1]) > 20)
    agent.kill()
    agent.wait()
    stopped_at(pages[1])
    for page in pages:
        page.close()


@pytest.mark.host
@pytest.mark.parametrize("offset_s", [-7200, 7200])
def test_a_tenant_with_a_boot_clock_of_its_own_gets_no_lease(bench: Bench, offset_s: int) -> None:
    """In a time namespace the lease means nothing: nothing passes, and the page says why."""
    if not IS_ROOT:
        pytest.skip("needs root")
    bench.device()
    shared = bench.share()
    env = shared.add("n", "opportunistic")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    inside = ["unshare", "--time", "--fork", "--boottime", str(offset_s)]
    command = [*inside, *DIES_WITH_US, sys.executable, "-c", NEIGHBOUR, "600"]
    paths = {
        "ALLOY_EMU_LIBRARY": str(bench.driver),
        "ALLOY_EMU_SOCKET": str(bench.socket),
        "LD_PRELOAD": str(bench.gate),
    }
    with controlled(shared):
        bench.start(command, {**env, **paths})
        assert eventually(lambda: any(slot.waiting for slot in page.slots() or ()))
        time.sleep(0.3)
        assert launched(page) == 0
        assert eventually(lambda: "clock" in _status(shared, "n").trouble)
    page.close()


def _status(shared: SharedDevice, name: str) -> TenantStatus:
    return next(tenant for tenant in shared.status().tenants if tenant.name == name)


# --- the backstop --------------------------------------------------------------------------------


def _folder(group: Cgroup) -> Path:
    assert group.topology.unified is not None
    return Path(group.topology.unified.folder(group.path))


def _join(group: Cgroup, pid: int) -> None:
    (_folder(group) / "cgroup.procs").write_text(str(pid), encoding="ascii")


@pytest.fixture
def group() -> Iterator[Cgroup]:
    """A cgroup in the v2 tree alone, which ends with the test."""
    topology = detect()
    if not IS_ROOT or topology.unified is None:
        pytest.skip("needs root and a v2 cgroup tree")
    made = Cgroup(topology, f"alloy-test-{uuid4().hex[:12]}")
    _folder(made).mkdir()
    yield made
    made.thaw()
    made.kill()
    assert eventually(lambda: _gone(_folder(made)))


def _gone(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@pytest.mark.host
def test_a_forged_page_freezes_its_cgroup_and_no_death_leaves_it_frozen(
    bench: Bench, group: Cgroup
) -> None:
    """The forger stands still while an agent lives; the agent's successor lets it run, gated."""
    bench.device()
    agent, ours, theirs = start_agent(bench, group.path)
    bench.tenant(PATIENT, ours)
    neighbour = bench.tenant(NEIGHBOUR, theirs)
    _join(group, neighbour.pid)
    path = Path(theirs["ALLOY_GATE_STATE"])
    page = StatePage(path)
    events = _folder(group) / "cgroup.events"
    assert eventually(lambda: launched(page) > 5)
    with path.open("r+b") as stream:
        stream.write(b"nonsense")
    assert eventually(lambda: "frozen 1" in events.read_text(encoding="ascii"))
    agent.kill()
    agent.wait()
    freezer = Freezer(group.topology, bench.folder / "share" / "frozen")
    assert freezer.recover() == (group.path,)
    assert "frozen 0" in events.read_text(encoding="ascii")
    with path.open("r+b") as stream:
        stream.write(struct.pack("<Q", MAGIC))  # so that the page can be read again
    stopped_at(page)
    page.close()


FORKS = """
import os, sys, time
print("forking", flush=True)
for n in range(400):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.002)
        os._exit(0)
    if n % 8 == 7:
        while True:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                break
time.sleep(600)
"""


@pytest.fixture
def old_group() -> Iterator[Cgroup]:
    """A cgroup of the v1 freezer."""
    topology = detect()
    freezer = topology.of("freezer")
    if not IS_ROOT or freezer is None or freezer.version != 1:
        pytest.skip("needs root and a v1 freezer")
    only = msgspec.structs.replace(topology, hierarchies=(freezer,))
    made = Cgroup(only, f"alloy-test-{uuid4().hex[:12]}")
    folder = Path(freezer.folder(made.path))
    folder.mkdir()
    yield made
    made.thaw()
    for _ in range(2):
        for pid in made.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: _gone(folder))


@pytest.mark.host
def test_the_old_freezer_is_bounded_against_forks(old_group: Cgroup, bench: Bench) -> None:
    """Eight hundred forks in a row: each attempt ends, frozen or thawed, and never in between."""
    freezer = old_group.topology.of("freezer")
    assert freezer is not None
    state = Path(freezer.folder(old_group.path), "freezer.state")
    bomb = bench.start([sys.executable, "-c", FORKS])
    Path(freezer.folder(old_group.path), "cgroup.procs").write_text(str(bomb.pid), encoding="ascii")
    assert bomb.stdout is not None
    assert bomb.stdout.readline() == "forking\n"
    for _ in range(20):
        try:
            old_group.freeze(0.5)
        except BackendError:
            assert state.read_text(encoding="ascii") == "THAWED\n"
            continue
        assert state.read_text(encoding="ascii") == "FROZEN\n"
        old_group.thaw()
        assert eventually(lambda: state.read_text(encoding="ascii") == "THAWED\n")
    assert bomb.poll() is None


def test_the_state_page_has_room_for_what_the_gate_says() -> None:
    """The layout of both sides is one: 64 slots of 256 bursts behind a page of head."""
    assert HEAD_BYTES + SLOTS * SLOT_BYTES == STATE_BYTES


def test_a_tenant_that_does_not_read_is_told_its_last_count(bench: Bench) -> None:
    """Two thousand completions while nobody reads: messages are lost, the last count is not."""
    bench.device()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tenant:
        tenant.settimeout(60.0)
        tenant.connect(str(bench.socket))
        for _ in range(2000):
            tenant.send(struct.pack("<2I", 1, 1))
            time.sleep(0.0002)  # so that they complete one by one
        count = 0
        while count < 2000:
            (count,) = struct.unpack("<Q", tenant.recv(64))
    assert count == 2000
