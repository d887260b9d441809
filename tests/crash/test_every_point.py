"""A process killed at any write or vendor call loses nothing and doubles nothing."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from alloy_agent.errors import BackendError
from alloy_agent.model import PartitionId
from alloy_agent.reconciler.readback import ref
from tests.fakes.bench import BOOT, Machine, Mortal, SimulatedDeath
from tests.fakes.node import Node

START = {"gpu-a": [(0, "4g"), (4, "2g"), (6, "1g")], "gpu-b": [(0, "2g"), (2, "2g")]}
WANTED = {
    "gpu-a": [(0, "4g"), (4, "1g"), (5, "1g"), (6, "1g")],
    "gpu-b": [(0, "4g"), (4, "1g"), (6, "2g")],
}
KEPT = PartitionId("gpu-a/4g@0")


def prepared(folder: Path, path: Path | None = None) -> Machine:
    """Return a machine at START, made by the agent itself."""
    machine = Machine(START, path)
    with Node(machine, folder) as node:
        node.reach(START)
        node.store.raise_token(41)
    return machine


def transition(machine: Machine, folder: Path, mortal: Mortal) -> None:
    """Live one life that wants WANTED, and maybe die in it."""
    node = None
    with contextlib.suppress(SimulatedDeath):
        try:
            node = Node(machine, folder, mortal)
            node.reach(WANTED)
        finally:
            if node is not None:
                node.__exit__()


def check(machine: Machine, folder: Path) -> None:
    """Assert that the node is as wanted and that memory and machine agree."""
    with Node(machine, folder) as node:
        shape = {d: [(start, p, True) for start, p in pieces] for d, pieces in WANTED.items()}
        assert machine.shape() == shape, "not as wanted, or a half-made piece was left"
        assert node.store.unfinished() is None
        living = {piece.id: piece for piece in node.observer.observe().partitions}
        assert node.store.managed() == {p.id: p.incarnation for p in living.values()}
        assert all(p.managed and p.generation >= 1 for p in living.values())
        assert living[KEPT].incarnation == "MIG-1", "a piece that both layouts have was disturbed"
        assert living[KEPT].generation == 1
        assert node.store.highest_token() >= 41
        desired = node.store.desired()
        assert desired is not None
        assert desired.name == "wanted"
        entries = [e for run in node.store.runs() for e in run.entries]
        assert all(entry.state != "intent" for entry in entries)
        made = [piece for entry in entries for piece in entry.made]
        assert len(made) == len(set(made)), "a piece is journalled as made twice"
        assert {ref(piece) for piece in living.values()} <= set(made)


@functools.cache
def moments() -> int:
    """Return at how many moments the transition can die, counted once in a life that does not."""
    with tempfile.TemporaryDirectory() as folder:
        mortal = Mortal()
        transition(prepared(Path(folder)), Path(folder), mortal)
        return mortal.count


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each moment."""
    if "moment" in metafunc.fixturenames:
        metafunc.parametrize("moment", range(1, moments() + 1))


def test_every_moment_of_a_transition_recovers(moment: int, tmp_path: Path) -> None:
    """Killed at any write or vendor call, the next start reaches what was wanted."""
    machine = prepared(tmp_path)
    mortal = Mortal(moment)
    transition(machine, tmp_path, mortal)
    assert mortal.dead, "this moment was never reached"
    transition(machine, tmp_path, Mortal())
    check(machine, tmp_path)


def test_the_transition_is_long(tmp_path: Path) -> None:
    """The moments cover writes, commits, marks and vendor calls alike."""
    mortal = Mortal()
    transition(prepared(tmp_path), tmp_path, mortal)
    kinds = {name.removeprefix("before ").removeprefix("after ") for name in mortal.names}
    assert {"write", "commit", "create_compute", "destroy_instance", "quiesce"} <= kinds
    assert mortal.count > 100


def failing(machine: Machine, folder: Path, mortal: Mortal) -> None:
    """Live one life in which the change fails half way and is rolled back, and maybe die in it."""
    node = None
    with contextlib.suppress(SimulatedDeath):
        try:
            node = Node(machine, folder, mortal)
            plan = node.plan(WANTED)
            machine.fail("create_compute", *[None] * 4, BackendError("insufficient resources"))
            assert node.reconciler.apply(plan).outcome == "rolled_back"
        finally:
            machine.failures.clear()
            if node is not None:
                node.__exit__()


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_death_while_rolling_back_recovers(stride: int, tmp_path: Path) -> None:
    """Killed while rolling back, the next start ends at one layout or the other, whole."""
    mortal = Mortal()
    failing(prepared(tmp_path / "dry"), tmp_path / "dry", mortal)
    assert mortal.count > 150
    back = 0
    for moment in range(1, mortal.count + 1, stride):
        folder = tmp_path / str(moment)
        machine = prepared(folder)
        failing(machine, folder, Mortal(moment))
        with Node(machine, folder) as node:
            node.reconciler.recover()
            assert node.store.unfinished() is None, moment
            living = node.observer.observe().partitions
            assert node.store.managed() == {p.id: p.incarnation for p in living}, moment
            desired = node.store.desired()
            assert desired is not None
            kept = next(p for p in living if p.id == KEPT)
            assert kept.incarnation == "MIG-1", moment
        wanted = {d: [(s, p, True) for s, p in pieces] for d, pieces in WANTED.items()}
        start = {d: [(s, p, True) for s, p in pieces] for d, pieces in START.items()}
        assert machine.shape() in (start, wanted), moment
        back += machine.shape() == start
    assert back > mortal.count // stride // 2


@pytest.mark.parametrize("second", [3, 9, 14, 23, 37])
def test_a_death_while_recovering_recovers_too(second: int, tmp_path: Path) -> None:
    """Killed once in the transition and again while recovering, the third start gets there."""
    total = moments()
    for moment in range(5, total + 1, 11):
        folder = tmp_path / str(moment)
        machine = prepared(folder)
        transition(machine, folder, Mortal(moment))
        transition(machine, folder, Mortal(second))
        transition(machine, folder, Mortal())
        check(machine, folder)


def test_a_node_that_restarts_in_a_transition_gets_there(tmp_path: Path) -> None:
    """When the node restarts, which takes all pieces, the next start builds what was wanted."""
    total = moments()
    for moment in range(3, total + 1, 17):
        folder = tmp_path / str(moment)
        machine = prepared(folder)
        transition(machine, folder, Mortal(moment))
        machine.reboot()
        transition(machine, folder, Mortal())
        with Node(machine, folder) as node:
            living = node.observer.observe().partitions
            assert {p.id for p in living} == {
                f"{d}/{profile}@{start}"
                for d, pieces in WANTED.items()
                for start, profile in pieces
            }
            assert node.store.managed() == {p.id: p.incarnation for p in living}
            kept = next(p for p in living if p.id == KEPT)
            assert kept.generation == 2, "a piece made anew must have the next generation"


LIFE = """
import sys
from pathlib import Path
from tests.crash.test_every_point import START, WANTED
from tests.fakes.bench import Machine, Mortal
from tests.fakes.node import Node

folder, moment = Path(sys.argv[1]), int(sys.argv[2])
machine, mortal = Machine(START, folder / "machine.json"), Mortal(moment, kill=True)
with Node(machine, folder / "state", mortal) as node:
    node.reach(WANTED)
"""


@pytest.mark.parametrize("share", [0.07, 0.21, 0.43, 0.58, 0.76, 0.93])
def test_a_killed_process_recovers(share: float, tmp_path: Path) -> None:
    """A process that gets SIGKILL in the middle leaves files from which the next one gets there."""
    total = moments()
    prepared(tmp_path / "state", tmp_path / "machine.json")
    moment = max(1, int(total * share))
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", LIFE, str(tmp_path), str(moment)],
        cwd=root,
        check=False,
        timeout=120,
    )
    assert killed.returncode == -9
    machine = Machine(START, tmp_path / "machine.json")
    assert machine.state.boot_id == BOOT
    transition(machine, tmp_path / "state", Mortal())
    check(machine, tmp_path / "state")
