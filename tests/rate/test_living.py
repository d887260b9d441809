"""Whose processes a page's numbers are: real pid namespaces, cgroups and strangers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from alloy_agent.conformance.gate.living import Living, pids_below
from alloy_agent.conformance.gate.pages import ORDER, StatePage
from alloy_agent.conformance.rate import Stage
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.host.clock import boottime_s
from tests.rate.conftest import LOAD, Bench, controlled, eventually

pytestmark = [pytest.mark.host]

APART = ("/usr/bin/unshare", "--pid", "--fork", "--kill-child")
ENTER = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"
UNUSED = (1 << 22) - 1  # a pid that nobody has
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
BUSY = (
    LOAD
    + """
print(os.getpid(), flush=True)
while True:
    emu.emuLaunchKernel(7, 1000)
"""
)


@pytest.fixture
def group() -> Iterator[Path]:
    """The folder of a cgroup in the v2 tree, which ends with the test."""
    topology = detect()
    if os.geteuid() or topology.unified is None:
        pytest.skip("needs root and a v2 cgroup tree")
    made = Cgroup(topology, f"alloy-test-{uuid4().hex[:12]}")
    folder = Path(topology.unified.folder(made.path))
    folder.mkdir()
    yield folder
    made.kill()
    assert eventually(lambda: _gone(folder))


def _gone(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)  # noqa: PTH106 - a cgroup's files cannot be removed
        except OSError:
            return not folder.exists()
    return True


def start(bench: Bench, argv: list[str], group: Path | None, env: dict[str, str]) -> int:
    """Start a program, in a cgroup where one is given; return what it calls itself."""
    enter = [sys.executable, "-c", ENTER, str(group / "cgroup.procs")] if group else []
    process = bench.start([*enter, *argv], env)
    assert process.stdout is not None
    return int(process.stdout.readline())


def environment(bench: Bench, ours: dict[str, str]) -> dict[str, str]:
    return {
        "ALLOY_EMU_LIBRARY": str(bench.driver),
        "ALLOY_EMU_SOCKET": str(bench.socket),
        "LD_PRELOAD": str(bench.gate),
        **ours,
    }


def dead(order: Path) -> int:
    """Return the slots of production that a neighbour is told to take for dead."""
    return int(ORDER.unpack_from(order.read_bytes())[-1])


def launching(page: StatePage) -> int:
    """Return the slots that launched something, as bits."""
    return sum(1 << slot.index for slot in page.slots() or () if slot.launched)


@pytest.mark.parametrize("placed", [True, False])
def test_production_in_a_pid_namespace_is_alive(bench: Bench, group: Path, placed: bool) -> None:
    """Production that calls itself process 1 holds its neighbours until it is killed."""
    bench.device()
    shared = bench.share()
    place = group if placed else None
    ours = shared.add("p", "production", pid=0 if placed else os.getpid(), group=place)
    theirs = shared.add("n", "opportunistic")
    order, page = Path(theirs["ALLOY_GATE_ORDER"]), StatePage(Path(ours["ALLOY_GATE_STATE"]))
    program = [*APART, sys.executable, "-c", BUSY, "600"]
    with controlled(shared):
        assert start(bench, program, place, environment(bench, ours)) < 10
        assert eventually(lambda: launching(page) > 0)
        used, seen_s = launching(page), boottime_s()
        assert eventually(lambda: shared.state.heard_s > seen_s + 0.2)
        assert not dead(order) & used
        assert shared.state.stage is not Stage.IDLE
        assert shared.status().tenants[0].processes >= 1
        bench.started[-1].kill()
        bench.started[-1].wait()
        assert eventually(lambda: dead(order) & used == used)
    page.close()


def test_a_stranger_with_the_number_does_not_count(bench: Bench, group: Path) -> None:
    """A living process that is none of the tenant's is not taken for a slot's owner."""
    mine = start(bench, [sys.executable, "-c", SLEEP], group, {})
    stranger = start(bench, [sys.executable, "-c", SLEEP], None, {})
    living = Living(bench.folder / "p.state", 0, group)
    living.look()
    assert living.has(mine)
    assert not living.has(stranger)


def test_what_cannot_be_told_counts_as_alive_while_anybody_is_there(
    bench: Bench, group: Path
) -> None:
    """A number that nobody seems to have counts only as long as a process may hide behind it."""
    start(bench, [*APART, sys.executable, "-c", SLEEP], None, {})
    living = Living(bench.folder / "p.state", bench.started[-1].pid, None)
    living.look()
    assert living.has(UNUSED)
    bench.started[-1].kill()
    bench.started[-1].wait()
    living.look()
    assert not living.has(UNUSED)


def test_processes_of_cgroups_below_are_found_and_the_walk_ends(bench: Bench, group: Path) -> None:
    """What hides three cgroups below is found; of too many cgroups it is said that they are."""
    deep = group / "a" / "b" / "c"
    deep.mkdir(parents=True)
    mine = start(bench, [sys.executable, "-c", SLEEP], deep, {})
    assert pids_below(group) == (frozenset({mine}), True)
    assert not pids_below(group, folders_most=2)[1]
