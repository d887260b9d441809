"""Killed at any vendor call of a change of simulated silicon, the next start gets there.

The change goes the whole way: layout file, planner, reconciler, fake backend, simulated machine.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.model import Snapshot
from alloy_agent.silicon.refusals import SimulatedCrash
from tests.fakes.direct import Rooms

MIG = "version: v1\nlayouts:\n  only:\n    - match: {{vendor: nvidia}}\n      mig: {0}\n"
CASES: dict[str, tuple[str, str, str]] = {
    "mig": (
        "1xH100-SXM5-80GB",
        MIG.format("[3g.40gb@4, 2g.20gb@0, 1g.10gb@2]"),
        MIG.format("[3g.40gb@4, 1g.10gb@0, 1g.10gb@1, 1g.10gb@2, 1g.10gb@3]"),
    ),
    "mig on": ("1xH100-SXM5-80GB", MIG.format("none"), MIG.format("[4g.40gb@0, 1g.10gb@4]")),
    "mig off": ("1xH100-SXM5-80GB", MIG.format("[4g.40gb@0, 1g.10gb@4]"), MIG.format("none")),
    "shared": (
        "1xH100-SXM5-80GB",
        MIG.format("none"),
        "version: v1\nlayouts:\n  only:\n    - match: {vendor: nvidia}\n"
        "      shared: {production: 1, opportunistic: 1}\n",
    ),
    "compute mode": (
        "1xMI300X",
        "version: v1\nlayouts:\n  only:\n    - match: {vendor: amd}\n      compute: SPX\n",
        "version: v1\nlayouts:\n  only:\n    - match: {vendor: amd}\n      compute: CPX\n",
    ),
}


def backend(name: str, folder: Path) -> FakeBackend:
    return FakeBackend.from_specs([CASES[name][0]], str(folder / "silicon"))


def prepared(name: str, folder: Path) -> None:
    (folder / "silicon").mkdir(parents=True)
    with Rooms(backend(name, folder), folder / "state") as rooms:
        rooms.reach(CASES[name][1])


def live(name: str, folder: Path, crash_at: int | None = None) -> tuple[bool, Snapshot | None, int]:
    """Live one life towards the end of a case; return whether it died, what it saw last, calls."""
    made = backend(name, folder)
    if crash_at is not None:
        made.machine.crash_at(crash_at)
    before = made.machine.calls
    with contextlib.suppress(SimulatedCrash), Rooms(made, folder / "state") as rooms:
        rooms.reach(CASES[name][2])
        calls = made.machine.calls - before
        return False, rooms.snapshot(), calls
    return True, None, 0


@functools.cache
def points(name: str) -> tuple[int, tuple[str, ...]]:
    """Return how many crash points a case has, and the pieces that it ends with."""
    with tempfile.TemporaryDirectory() as folder:
        prepared(name, Path(folder))
        _, snapshot, calls = live(name, Path(folder))
        assert snapshot is not None
        return calls, tuple(piece.id for piece in snapshot.partitions)


@pytest.mark.parametrize("name", CASES)
def test_every_vendor_call_of_a_change_recovers(name: str, tmp_path: Path) -> None:
    """Whatever call the process dies in, the pieces are as wanted, whole, and the agent's own."""
    total, wanted = points(name)
    died_at = []
    for moment in range(1, total + 1):
        folder = tmp_path / str(moment)
        prepared(name, folder)
        died, _, _ = live(name, folder, moment)
        died_at += [moment] if died else []
        _, snapshot, _ = live(name, folder)
        assert snapshot is not None, moment
        assert tuple(piece.id for piece in snapshot.partitions) == wanted, moment
        assert snapshot.faults == (), moment
        with Rooms(backend(name, folder), folder / "state") as rooms:
            assert rooms.store.unfinished() is None
            entries = [e for run in rooms.store.runs() for e in run.entries]
            assert all(e.state not in ("intent", "unknown") for e in entries)
            made = {
                ref.partition for run in rooms.store.runs() for e in run.entries for ref in e.made
            }
            ours = {p.id for p in rooms.snapshot().partitions if p.managed}
            assert ours == made & {p.id for p in snapshot.partitions}
    assert len(died_at) >= 4, "the case has too few moments to die at"
