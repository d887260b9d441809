"""Plans carried out on AMD accelerators, with the agent's own reconciler around the backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alloy_agent.model import ModeKind, Scope
from alloy_agent.silicon.state import Fault
from tests.fakes.amd_tree import Tree, tree_of
from tests.fakes.direct import Rooms

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
