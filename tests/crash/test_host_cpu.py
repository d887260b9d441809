"""Killed at any file operation on real cgroups, the next start gets there and leaves no orphan.

Each life is a process of its own that gets SIGKILL right before or right after its n-th change of a
cgroup tree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.backends.cpu import CpuBackend
from alloy_agent.host.cgroups import Cgroup, CgroupFs, detect
from tests.fakes.direct import Rooms

pytestmark = pytest.mark.host

LAYOUT = "version: v1\nlayouts:\n  only:\n    - match: {{vendor: cpu, numa: 0}}\n{0}"
TWO = LAYOUT.format("      cores: [1, 1]\n      memory: [64MiB, 96MiB]\n")
ONE = LAYOUT.format("      cores: [2]\n      memory: [128MiB]\n")
NONE = LAYOUT.format("      cores: []\n")
CAPS = LAYOUT.format("      cores: [1, 1]\n      memory: [96MiB, 64MiB]\n")


class DeadlyFs(CgroupFs):
    """Counts the changes of cgroup trees, and kills its process at one of them."""

    def __init__(self, dies_at: int = 0) -> None:
        self.count = 0
        self._dies_at = dies_at

    def _point(self) -> None:
        self.count += 1
        if self.count == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self, folder: str) -> bool:
        self._point()
        done = super().make(folder)
        self._point()
        return done

    def remove(self, folder: str) -> bool:
        self._point()
        done = super().remove(folder)
        self._point()
        return done

    def write(self, path: str, text: str) -> None:
        self._point()
        super().write(path, text)
        self._point()


class Host:
    """The real host with a cgroup of this test's own, and an agent's state."""

    def __init__(self, folder: Path) -> None:
        self.root = f"alloy-test-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.counts = itertools.count()

    def fresh(self) -> None:
        """Forget the state, as on another node."""
        self.folder = self.folder.with_name(f"state-{next(self.counts)}")

    def rooms(self, fs: CgroupFs | None = None) -> Rooms:
        """Return an agent's rooms, of this process."""
        backend = CpuBackend(
            reserved_cores=(), cgroup_root=self.root, memory_reserve_bytes=0, fs=fs
        )
        return Rooms(backend, self.folder)

    def cgroups(self) -> set[str]:
        """Return every cgroup below this test's root, in all hierarchies."""
        found = set()
        for hierarchy in detect().hierarchies:
            top = Path(hierarchy.folder(self.root))
            found |= {str(p.relative_to(top)) for p in top.rglob("*") if p.is_dir()}
        return found

    def live(self, text: str, dies_at: int) -> int:
        """Live one life in a process of its own; return the signal that ended it, or 0."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                with self.rooms(DeadlyFs(dies_at)) as rooms:
                    rooms.reach(text)
                code = 0
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the life failed"
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def count(self, text: str) -> int:
        """Return how many moments the way to a layout has."""
        fs = DeadlyFs()
        with self.rooms(fs) as rooms:
            rooms.reach(text)
        return fs.count

    def clear(self) -> None:
        """Remove all of it."""
        topology = detect()
        for name in sorted(self.cgroups(), key=len, reverse=True):
            with contextlib.suppress(Exception):
                Cgroup(topology, f"{self.root}/{name}").remove()
        for hierarchy in topology.hierarchies:
            with contextlib.suppress(OSError):
                Path(hierarchy.folder(self.root)).rmdir()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs, to move pieces between them")
    made = Host(tmp_path / "state")
    yield made
    made.clear()
    assert made.cgroups() == set()


def shape(rooms: Rooms) -> list[tuple[str, int | None]]:
    """Return the pieces that are there, with their caps."""
    return [(p.id, p.memory_bytes) for p in rooms.snapshot().partitions]


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        pytest.param(NONE, TWO, id="make", marks=pytest.mark.slow),
        pytest.param(TWO, ONE, id="merge"),
        pytest.param(ONE, TWO, id="split", marks=pytest.mark.slow),
        pytest.param(TWO, NONE, id="clear"),
        pytest.param(TWO, CAPS, id="caps"),
    ],
)
def test_sigkill_at_every_change_of_a_cgroup_recovers(host: Host, start: str, wanted: str) -> None:
    """Killed at any mkdir, write or rmdir, the next start has the wanted pieces and no other."""
    with host.rooms() as rooms:
        rooms.reach(start)
    total = host.count(wanted)
    with host.rooms() as rooms:
        goal, cgroups = shape(rooms), host.cgroups()
    died = 0
    for moment in range(1, total + 1):
        host.fresh()
        with host.rooms() as rooms:
            clear_and_reach(rooms, start)
        died += host.live(wanted, moment) == signal.SIGKILL
        with host.rooms() as rooms:
            rooms.reach(wanted)
            snapshot = rooms.snapshot()
            assert shape(rooms) == goal, f"killed at change {moment} of {total}"
            assert snapshot.faults == (), f"killed at change {moment} of {total}"
            assert host.cgroups() == cgroups, f"an orphan after change {moment} of {total}"
            assert all(p.managed for p in snapshot.partitions)
            assert rooms.store.managed() == {p.id: p.incarnation for p in snapshot.partitions}
            assert rooms.store.unfinished() is None
    assert died == total


def clear_and_reach(rooms: Rooms, text: str) -> None:
    """Start over with pieces of this state's own making."""
    rooms.reach(NONE)
    rooms.reach(text)


@pytest.mark.slow
def test_a_kill_while_recovering_recovers_too(host: Host) -> None:
    """Killed in a change and at every moment of its recovery, the third start gets there."""
    with host.rooms() as rooms:
        rooms.reach(TWO)
    first = host.count(ONE) // 2
    for second in itertools.count(1):
        host.fresh()
        with host.rooms() as rooms:
            clear_and_reach(rooms, TWO)
        assert host.live(ONE, first) == signal.SIGKILL
        ended = host.live(ONE, second)
        with host.rooms() as rooms:
            rooms.reach(ONE)
            assert [p.placement.size for p in rooms.snapshot().partitions] == [2]
            assert rooms.snapshot().faults == ()
        if ended == 0:
            break
    assert second > 5


def test_a_tenant_that_lives_is_never_moved_or_lost(host: Host) -> None:
    """A piece with a process in it is refused as busy, and everything stays as it was."""
    with host.rooms() as rooms:
        rooms.reach(TWO)
        before = rooms.snapshot().partitions
        tenant = spawn(before[0].access.cgroup_procs)
        try:
            report = rooms.reconciler.apply(rooms.plan(ONE))
            assert report.outcome == "rolled_back"
            assert str(tenant) in report.error
            after = rooms.snapshot().partitions
            assert after[0] == before[0], "the tenant's own piece was touched"
            assert [p.id for p in after] == [p.id for p in before]
            os.kill(tenant, 0)
        finally:
            os.kill(tenant, signal.SIGKILL)
            os.waitpid(tenant, 0)


def test_foreign_cgroups_outlive_a_start(host: Host) -> None:
    """With an empty journal a start changes no cgroup, whoever made what is there."""
    with host.rooms() as rooms:
        rooms.reach(TWO)
        left = rooms.snapshot().partitions
    host.fresh()
    fs = DeadlyFs()
    with host.rooms(fs) as rooms:
        assert rooms.reconciler.recover() is None
        found = rooms.snapshot().partitions
        assert [(p.id, p.incarnation) for p in found] == [(p.id, p.incarnation) for p in left]
        assert not any(p.managed for p in found)
    assert fs.count == 0


def spawn(procs: tuple[str, ...]) -> int:
    """Start a process inside of a partition and return its pid."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.pause()
        os._exit(0)
    for path in procs:
        Path(path).write_text(str(pid))
    return pid
