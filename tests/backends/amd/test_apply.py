"""Plans carried out on AMD accelerators, with the agent's own reconciler around the backend."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from alloy_agent.backends.amd.masks import parse
from alloy_agent.errors import AlloyError, BackendError
from alloy_agent.model import ModeKind, Scheme, Scope, SetMode, Share
from alloy_agent.silicon.state import Fault
from tests.backends.amd.test_backend import pairs
from tests.fakes.amd_tree import Tree, tree_of
from tests.fakes.direct import Rooms
from tests.fakes.dmem import DmemTree

CPX = "version: v1\nlayouts:\n  cpx:\n    - match: {vendor: amd}\n      compute: CPX\n"
BOTH = CPX + "      memory: NPS4\n"
ALL = frozenset(Scope)


def computes(tree: Tree) -> list[str]:
    """Return the compute mode of each device of the machine."""
    return [state.compute_mode for state in tree.machine.state.devices]


def test_a_layout_reaches_every_device(tmp_path: Path) -> None:
    """All devices are cut as asked, and a second apply finds nothing to do."""
    tree = tree_of("3xMI300X", tmp_path)
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        report = rooms.reconciler.apply(rooms.plan(CPX))
        assert (report.outcome, computes(tree)) == ("applied", ["CPX"] * 3)
        assert rooms.plan(CPX).steps == ()
        assert len(rooms.snapshot().partitions) == 24


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_step_takes_all_others_back(failing: int, tmp_path: Path) -> None:
    """Whichever device refuses for good, every one is as it was before."""
    tree = tree_of("3xMI300X", tmp_path)
    tree.machine.add_fault(
        Fault(call="amd.set_compute_mode", device=f"#{failing}", error="unknown", times=1)
    )
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        report = rooms.reconciler.apply(rooms.plan(CPX))
        assert report.outcome == "rolled_back"
        assert computes(tree) == ["SPX"] * 3
        assert [step.state for step in report.steps if not step.undo].count("failed") == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_step_done_without_an_answer_is_taken_back_too(failing: int, tmp_path: Path) -> None:
    """The device took the mode and the call failed all the same: the read-back decides."""
    tree = tree_of("3xMI300X", tmp_path)
    tree.machine.add_fault(
        Fault(
            call="amd.set_compute_mode",
            device=f"#{failing}",
            error="unknown",
            when="after",
            times=1,
        )
    )
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        report = rooms.reconciler.apply(rooms.plan(CPX))
        expected = {"applied": ["CPX"] * 3, "rolled_back": ["SPX"] * 3}
        assert computes(tree) == expected[report.outcome]


def text_of(compute: str, memory: str) -> str:
    """Return the layout that asks for a pair of modes on every device."""
    head = "version: v1\nlayouts:\n  wanted:\n    - match: {vendor: amd}\n"
    return f"{head}      compute: {compute}\n      memory: {memory}\n"


def settle(tree: Tree, rooms: Rooms, pair: tuple[str, str]) -> None:
    """Bring the node into a pair of modes, over a load of the driver where it needs one."""
    compute, memory = pair
    for state in tree.machine.state.devices:
        if state.memory_mode != memory:
            tree.machine.amd(state.id).request_memory_mode(memory)
    if any(state.memory_mode != memory for state in tree.machine.state.devices):
        tree.machine.driver_reload()
        tree.machine.edit(lambda state: setattr(state, "boot", state.boot + 1))
    for state in tree.machine.state.devices:
        if state.compute_mode != compute:
            tree.machine.amd(state.id).set_compute_mode(compute)
    tree.refresh()
    assert rooms.snapshot().devices


def shown(rooms: Rooms) -> set[tuple[str, str | None, str | None]]:
    """Return the modes that the devices show, with what is pending of the memory mode."""
    found = set()
    for device in rooms.snapshot().devices:
        modes = {mode.kind: mode for mode in device.modes}
        memory = modes.get(ModeKind.MEMORY)
        found.add(
            (
                modes[ModeKind.COMPUTE].current,
                memory.current if memory else None,
                memory.pending if memory else None,
            )
        )
    return found


LONG = pytest.mark.slow
WAYS = [
    *(pytest.param(board, "before") for board in ("MI300A", "MI300X", "MI308X")),
    *(pytest.param(board, "after") for board in ("MI300A", "MI308X")),
    *(pytest.param(board, "before", marks=LONG) for board in ("MI325X", "MI355X")),
    *(pytest.param(board, "after", marks=LONG) for board in ("MI300X", "MI325X", "MI355X")),
]


@pytest.mark.parametrize(("board", "when"), WAYS)
def test_every_pair_of_modes_rolls_back_at_each_failing_step(
    board: str, when: Literal["before", "after"], tmp_path: Path
) -> None:
    """From each pair to each other, whichever device's step fails, the node is as it was.

    A step that was done although its call failed may count as done: then the layout holds whole.
    """
    tree, rolled = tree_of(f"2x{board}", tmp_path), 0
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        for before, after in itertools.permutations(pairs(board), 2):
            settle(tree, rooms, before)
            wanted = text_of(*after)
            planned = [planned.step for planned in rooms.plan(wanted).steps]
            steps = [step for step in planned if isinstance(step, SetMode)]
            assert steps
            assert shown(rooms) == {(*before, None)}
            for step in steps:
                if step.device != steps[0].device and step.kind is ModeKind.MEMORY:
                    continue  # one request stands for the hive
                number = [d.id for d in rooms.snapshot().devices].index(step.device)
                call = f"amd.set_{step.kind.value}_mode"
                place = f"#{number}"
                key = tree.machine.add_fault(
                    Fault(call=call, device=place, error="unknown", when=when, times=1)
                )
                report = rooms.reconciler.apply(rooms.plan(wanted), consent=ALL)
                tree.machine.remove_fault(key)
                outcome = (before, after, step, report.outcome)
                if report.outcome == "rolled_back":
                    rolled += 1
                    assert shown(rooms) == {(*before, None)}, outcome
                else:
                    met = any(step.state == "failed" for step in report.steps)
                    assert when == "after" or not met, outcome
                    assert report.outcome in {"applied", "pending"}, outcome
                    take_back(rooms)
                    settle(tree, rooms, before)
        assert when == "after" or rolled >= len(pairs(board))


def take_back(rooms: Rooms) -> None:
    """Ask for the memory mode that holds wherever another one is pending, as an operator would."""
    for device in rooms.snapshot().devices:
        for mode in device.modes:
            if mode.kind is ModeKind.MEMORY and mode.pending is not None:
                undo = SetMode(
                    device=device.id, kind=mode.kind, current=mode.pending, wanted=mode.current
                )
                rooms.worker.backend.apply(undo)


@pytest.mark.parametrize("board", ["MI210", "MI250"])
def test_boards_without_modes_refuse_every_mode(board: str, tmp_path: Path) -> None:
    """Each function of these boards is one device without modes: a layout is refused unharmed."""
    tree = tree_of(f"2x{board}", tmp_path)
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        devices = rooms.snapshot().devices
        assert {device.scheme for device in devices} == {Scheme.WHOLE}
        assert len(rooms.snapshot().partitions) == len(devices)
        with pytest.raises(AlloyError, match="compute"):
            rooms.plan(CPX)
        assert len(rooms.snapshot().partitions) == len(devices)


# --- shares ---


REGIONS = {f"drm/0000:{bus}:00.0/vram0": 192 << 30 for bus in ("05", "15")}


def shares(**keys: str | int) -> str:
    """Return the layout that shares every device."""
    counts = {"production": 1, "opportunistic": 2}
    wanted = ", ".join(f"{key}: {value}" for key, value in {**counts, **keys}.items())
    head = "version: v1\nlayouts:\n  lent:\n    - match: {vendor: amd}\n      shared:"
    return f"{head} {{{wanted}}}\n"


def masks(rooms: Rooms) -> list[frozenset[int]]:
    """Return the CUs of each share, by its mask."""
    pieces = rooms.snapshot().partitions
    return [parse(piece.access.environment["HSA_CU_MASK"])[0] for piece in pieces]


def test_a_layout_asks_for_cu_masks_and_memory_caps(tmp_path: Path) -> None:
    """The layout's masks and caps are in force on every device, and a second apply does nothing."""
    tree = tree_of("2xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", REGIONS)
    wanted = shares(cu_mask=6, production_memory="96GiB", opportunistic_memory="24GiB")
    with Rooms(tree.backend(cgroups=kernel), tmp_path / "store") as rooms:
        assert rooms.reconciler.apply(rooms.plan(wanted)).outcome == "applied"
        assert sorted(map(len, masks(rooms))) == [6 * 8] * 4 + [26 * 8] * 2
        caps = [piece.memory_bytes for piece in rooms.snapshot().partitions]
        assert sorted(cap or 0 for cap in caps) == [24 << 30] * 4 + [96 << 30] * 2
        assert rooms.plan(wanted).steps == ()


def test_another_mask_is_another_share_and_another_cap_is_not(tmp_path: Path) -> None:
    """A changed cap keeps the share; a changed mask makes every share of the device anew."""
    tree = tree_of("1xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", REGIONS)
    with Rooms(tree.backend(cgroups=kernel), tmp_path / "store") as rooms:
        rooms.reconciler.apply(rooms.plan(shares(cu_mask=6, opportunistic_memory="24GiB")))
        first = {piece.id: piece.incarnation for piece in rooms.snapshot().partitions}
        rooms.reconciler.apply(rooms.plan(shares(cu_mask=6, opportunistic_memory="16GiB")))
        assert {p.id: p.incarnation for p in rooms.snapshot().partitions} == first
        report = rooms.reconciler.apply(rooms.plan(shares(cu_mask=8, opportunistic_memory="16GiB")))
        assert report.outcome == "applied"
        pieces = rooms.snapshot().partitions
        assert {piece.id for piece in pieces} == first.keys()
        assert all(piece.incarnation != first[piece.id] for piece in pieces)
        assert sorted(map(len, masks(rooms))) == [8 * 8] * 2 + [22 * 8]


def test_a_cap_that_somebody_changed_is_set_again(tmp_path: Path) -> None:
    """A share whose cap was lifted from outside is shown as altered, and an apply repairs it."""
    tree = tree_of("1xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", REGIONS)
    wanted = shares(production_memory="96GiB", opportunistic_memory="24GiB")
    with Rooms(tree.backend(cgroups=kernel), tmp_path / "store") as rooms:
        rooms.reconciler.apply(rooms.plan(wanted))
        piece = next(p for p in rooms.snapshot().partitions if p.share is Share.PRODUCTION)
        folder = Path(piece.access.cgroup_procs[0]).parent
        region = next(iter(REGIONS))
        kernel.write(f"{folder}/dmem.max", f"{region} max")
        lifted = next(p for p in rooms.snapshot().partitions if p.id == piece.id)
        assert "has none as memory cap" in lifted.altered
        assert len(rooms.plan(wanted).steps) == 1
        assert rooms.reconciler.apply(rooms.plan(wanted)).outcome == "applied"
        assert f"{region} {96 << 30}" in (folder / "dmem.max").read_text()
        assert not [p for p in rooms.snapshot().partitions if p.altered]


@pytest.mark.parametrize("failing", range(1, 7))
def test_shares_roll_back_at_each_failing_write(failing: int, tmp_path: Path) -> None:
    """Whichever write of a cgroup fails, no share, cap or cgroup of the attempt is left."""
    tree = tree_of("1xMI300X", tmp_path)

    class Failing(DmemTree):
        left = failing

        def write(self, path: str, text: str) -> None:
            self.left -= 1
            if self.left == 0:
                raise BackendError(f"writing {path}: Input/output error")
            super().write(path, text)

    kernel = Failing(tmp_path / "cg2", REGIONS)
    wanted = shares(production_memory="96GiB", opportunistic_memory="24GiB")
    with Rooms(tree.backend(cgroups=kernel), tmp_path / "store") as rooms:
        report = rooms.reconciler.apply(rooms.plan(wanted))
        if kernel.left > 0:  # fewer writes than that: nothing failed
            assert report.outcome == "applied"
            return
        assert report.outcome == "rolled_back"
        assert {piece.share for piece in rooms.snapshot().partitions} == {Share.EXCLUSIVE}
        assert kernel.children(str(kernel.mount)) == ()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"cu_mask": 19}, "leave production none"),
        ({"cu_mask": 37, "opportunistic": 64}, "cannot be shared more finely"),
        ({"production_memory": "200GiB"}, "more than"),
        ({"opportunistic_memory": "1MiB"}, "too few"),
        ({"opportunistic_memory": "lots"}, "lots"),
    ],
)
def test_impossible_shares_are_refused_with_their_line(
    keys: dict[str, str | int], why: str, tmp_path: Path
) -> None:
    """A mask or cap that cannot be is refused before anything is touched, naming file and line."""
    tree = tree_of("1xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", REGIONS)
    with (
        Rooms(tree.backend(cgroups=kernel), tmp_path / "store") as rooms,
        pytest.raises(AlloyError, match=rf"layout\.yaml:5.*{why}"),
    ):
        rooms.plan(shares(**keys))


def test_a_cap_that_this_host_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Without dmem a capped share is refused when the layout is read, with the cure."""
    tree = tree_of("1xMI300X", tmp_path)
    with (
        Rooms(tree.backend(), tmp_path / "store") as rooms,
        pytest.raises(AlloyError, match="nothing on this host caps"),
    ):
        rooms.plan(shares(production_memory="8GiB"))


# --- over a boot ---


def test_both_modes_wait_for_the_driver_and_hold_after_it(tmp_path: Path) -> None:
    """CPX with NPS4: the request is pending, says so, and after the reload the layout holds."""
    tree = tree_of("2xMI300X", tmp_path)
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        report = rooms.reconciler.apply(rooms.plan(BOTH), consent=ALL)
        assert report.outcome == "pending"
        assert report.pending
        again = rooms.reconciler.apply(rooms.plan(BOTH), consent=ALL)
        assert again.outcome in {"pending", "unchanged"}
        tree.machine.driver_reload()
        tree.machine.edit(lambda state: setattr(state, "boot", state.boot + 1))
    with Rooms(tree.backend(), tmp_path / "store2") as rooms:
        for device in rooms.snapshot().devices:
            modes = {mode.kind: (mode.current, mode.pending) for mode in device.modes}
            assert modes[ModeKind.MEMORY] == ("NPS4", None)
            assert modes[ModeKind.COMPUTE] == ("CPX", None)
        assert rooms.plan(BOTH).steps == ()


def test_a_desired_mode_is_asserted_again_after_a_boot(tmp_path: Path) -> None:
    """A boot falls back to SPX; what the daemon does at start cuts the devices again."""
    tree = tree_of("2xMI300X", tmp_path)
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        rooms.reach(CPX)
    tree.machine.reboot()
    assert computes(tree) == ["SPX"] * 2
    with Rooms(tree.backend(), tmp_path / "store") as rooms:
        rooms.reach(CPX)
        assert computes(tree) == ["CPX"] * 2


def test_the_command_line_shows_a_node_through_a_real_worker(tmp_path: Path) -> None:
    """Settings that name other roots bring the backend up in a process of its own."""
    tree = tree_of("2xMI300X", tmp_path)
    tree.machine.amd(tree.machine.state.devices[0].id).set_compute_mode("CPX")
    tree.refresh()
    config = tmp_path / "agent.yaml"
    roots = ", ".join(
        f"{name}_root: {tmp_path / folder}"
        for name, folder in (("sys", "sys"), ("proc", "proc"), ("dev", "dev"), ("debug", "debug"))
    )
    config.write_text(
        f"state_dir: {tmp_path / 'agent'}\n"
        "backends: {cpu: off, nvidia: off, neuron: off}\n"
        f"amd: {{library: off, {roots}}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "alloy_agent", "devices", "--json"],
        env={**os.environ, "ALLOY_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    document = json.loads(done.stdout)
    assert [device["id"] for device in document["devices"]] == [
        "amd-0000:05:00.0",
        "amd-0000:15:00.0",
    ]
    assert [len(device["partitions"]) for device in document["devices"]] == [8, 1]
