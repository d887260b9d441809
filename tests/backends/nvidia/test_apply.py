"""Plans carried out on NVIDIA GPUs, with the agent's own reconciler around the backend."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from alloy_agent.model import Scope, Share, Snapshot
from tests.backends.nvidia.test_backend import A100, H100
from tests.backends.nvidia.test_shares import with_v2_tree
from tests.fakes.direct import Rooms
from tests.fakes.nvml.host import NvidiaHost

ALL = frozenset(Scope)
CHANGES = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)


def text(*lines: str) -> str:
    """Return a layout of every NVIDIA GPU."""
    head = "version: v1\nlayouts:\n  wanted:\n    - match: {vendor: nvidia}\n"
    return head + "".join(f"      {line}\n" for line in lines)


def layouts(board: str) -> dict[str, str]:
    """Return layouts between which a GPU can go, by name."""
    one, three, two = {
        A100: ("1g.5gb", "3g.20gb", "2g.10gb"),
        H100: ("1g.10gb", "3g.40gb", "2g.20gb"),
    }[board]
    return {
        "whole": text("mig: none"),
        "halves": text(f"mig: [{three}, {three}]"),
        "mixed": text(f"mig: [{three}, {two}, {one}]"),
        "shared": text("shared: {production: 1, opportunistic: 1}"),
    }


def looks(snapshot: Snapshot) -> set[tuple[str, tuple[str, ...]]]:
    """Return the modes and pieces of a node, without what changes when a piece is made again."""
    found = {
        (str(device.id), tuple(f"{m.kind}={m.current}/{m.pending}" for m in device.modes))
        for device in snapshot.devices
    }
    for device in snapshot.devices:
        pieces = sorted(str(p.id) for p in snapshot.partitions if p.device == device.id)
        found.add((f"{device.id} pieces", tuple(pieces)))
    return found


def incarnations(rooms: Rooms) -> dict[str, str]:
    """Return what tells each piece from one made again in its place."""
    return {str(piece.id): piece.incarnation for piece in rooms.snapshot().partitions}


def changed(host: NvidiaHost) -> dict[str, int]:
    """Return how often each call that changes something was made."""
    return {call: host.library.counts.get(call, 0) for call in CHANGES}


@pytest.mark.parametrize("board", [A100, H100])
@pytest.mark.parametrize(
    ("before", "after"), [*itertools.permutations(("whole", "halves", "mixed", "shared"), 2)]
)
def test_a_transition_rolls_back_at_each_failing_call(
    board: str, before: str, after: str, tmp_path: Path
) -> None:
    """Whichever change of the driver fails once, the GPUs end as they were, or as was asked.

    Instances that the plan keeps have the same UUID all the while.
    """
    host = NvidiaHost(tmp_path, f"1x{board}")
    with_v2_tree(host)
    with Rooms(host.backend, tmp_path / "store") as rooms:
        wanted = layouts(board)
        rooms.reconciler.apply(rooms.plan(wanted[before]), consent=ALL)
        assert rooms.plan(wanted[before]).steps == ()
        start = looks(rooms.snapshot())
        first, names = changed(host), set(incarnations(rooms))
        assert rooms.reconciler.apply(rooms.plan(wanted[after]), consent=ALL).outcome == "applied"
        stay = sorted(set(incarnations(rooms)) & names)
        made = {call: count - first[call] for call, count in changed(host).items()}
        rooms.reconciler.apply(rooms.plan(wanted[before]), consent=ALL)
        assert looks(rooms.snapshot()) == start
        end = None
        for call in CHANGES:
            for nth in range(1, made[call] + 1):
                uuids = incarnations(rooms)
                key = host.fail(call, nth=nth, times=1, error="unknown")
                report = rooms.reconciler.apply(rooms.plan(wanted[after]), consent=ALL)
                host.machine.remove_fault(key)
                here = looks(rooms.snapshot())
                now = incarnations(rooms)
                assert all(now[name] == uuids[name] for name in stay), (call, nth)
                if report.outcome == "rolled_back":
                    assert here == start, (call, nth)
                else:  # the driver was asked again, and the read-back is what was wanted
                    assert report.outcome == "applied", (call, nth)
                    end = end or here
                    assert here == end
                    rooms.reconciler.apply(rooms.plan(wanted[before]), consent=ALL)
                    assert looks(rooms.snapshot()) == start


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_gpu_takes_the_others_back(failing: int, tmp_path: Path) -> None:
    """Whichever GPU refuses for good, every one is as it was before, and the report says which."""
    host = NvidiaHost(tmp_path, f"3x{H100}")
    with Rooms(host.backend, tmp_path / "store") as rooms:
        start = looks(rooms.snapshot())
        victim = rooms.snapshot().devices[failing]
        call = "nvmlDeviceCreateGpuInstanceWithPlacement"
        host.fail(call, device=f"#{failing}", error="insufficient_resources")
        report = rooms.reconciler.apply(rooms.plan(layouts(H100)["halves"]), consent=ALL)
        assert report.outcome == "rolled_back"
        assert looks(rooms.snapshot()) == start
        failed = [step for step in report.steps if step.state == "failed" and not step.undo]
        assert [step.step.device for step in failed] == [victim.id]


def test_a_busy_share_is_not_taken_for_instances(tmp_path: Path) -> None:
    """A tenant in a share makes the change fail before anything is destroyed."""
    host = NvidiaHost(tmp_path, f"1x{H100}")
    with_v2_tree(host)
    with Rooms(host.backend, tmp_path / "store") as rooms:
        rooms.reconciler.apply(rooms.plan(layouts(H100)["shared"]), consent=ALL)
        pieces = rooms.snapshot().partitions
        assert {piece.share for piece in pieces} == {Share.PRODUCTION, Share.OPPORTUNISTIC}
        procs = next(p.access.cgroup_procs[0] for p in pieces if p.share is Share.OPPORTUNISTIC)
        Path(procs).write_text("4711\n")
        report = rooms.reconciler.apply(rooms.plan(layouts(H100)["halves"]), consent=ALL)
        assert report.outcome == "rolled_back"
        assert {p.id for p in rooms.snapshot().partitions} == {p.id for p in pieces}
