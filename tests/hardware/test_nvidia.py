"""The measurements for real hardware, dry over the stand-in: complete, read-only, and in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends.nvidia.test_apply import CHANGES
from tests.backends.nvidia.test_backend import H100, hosted, process
from tests.backends.nvidia.test_shares import with_v2_tree
from tests.fakes.nvml.host import NvidiaHost
from tests.hardware import nvidia

SECTIONS = {
    "id",
    "observation",
    "fabric",
    "facts",
    "processes",
    "memory_limits",
    "costs",
    "gpm",
    "fields",
    "activity",
}


def test_every_section_is_filled_and_nothing_is_changed(tmp_path: Path) -> None:
    """Inventory, renewals, GPM, attribution, limits, events and costs are all there."""
    host, ident = hosted(tmp_path, memory_limits=True)
    with_v2_tree(host)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.run(piece, pid=77)
    process(host, 77, comm="train")
    before = {call: host.library.counts.get(call, 0) for call in CHANGES}
    document = nvidia.measured(host.backend, 0.3, host.root / "proc")
    (gpu,) = document["gpus"]
    assert set(gpu) == SECTIONS
    assert not [name for name in SECTIONS - {"id"} if "refused" in gpu[name]]
    assert gpu["observation"]["partitions"]
    assert gpu["activity"]["open_after_quiesce"] == 0
    assert {row["name"] for row in gpu["fields"]} == set(nvidia.FIELDS.values())
    assert any("median_us" in row for row in gpu["costs"])
    (client,) = gpu["processes"]["processes"]
    assert (client["driver_pid"], client["host_pid"], client["comm"]) == (77, 77, "train")
    told = {row["gap_ms"]: row["values"] for row in gpu["gpm"]["gaps"]}
    assert told[200] == nvidia.GPM_TRIES
    assert document["events"]["waited_s"] > 0
    assert document["stuck"] == 0
    assert {call: host.library.counts.get(call, 0) for call in CHANGES} == before
    assert host.library.open_resources() == 0
    assert json.dumps(document, default=str)


@pytest.mark.slow
def test_a_gpu_that_hangs_costs_its_own_sections_alone(tmp_path: Path) -> None:
    """One section waits for a hung GPU; its others are left out, and the next GPU is measured."""
    host, _ = hosted(tmp_path, f"2x{H100}")
    host.backend.discover()
    key = host.fail("nvmlDeviceGetMigMode", device="#0", action="hang")
    try:
        nvidia_section, nvidia.SECTION_S = nvidia.SECTION_S, 25.0  # type: ignore[misc]
        document = nvidia.measured(host.backend, 0.2, host.root / "proc")
    finally:
        nvidia.SECTION_S = nvidia_section  # type: ignore[misc]
        host.machine.remove_fault(key)
    hung, well = document["gpus"]
    assert "no answer within" in hung["observation"]["refused"]
    assert hung["facts"] == {"refused": "the GPU hangs"}
    assert document["stuck"] >= 1
    assert well["observation"]["partitions"]


def test_there_is_no_time_for_more_than_the_budget(tmp_path: Path) -> None:
    """When the budget is spent every further section says so, and the document is whole."""
    host, _ = hosted(tmp_path)
    host.backend.discover()
    document = nvidia.measured(host.backend, 0.2, host.root / "proc", budget_s=0.0)
    assert "no time" in document["refused"]
    assert nvidia.BUDGET_S + nvidia.SECTION_S < 4 * 60 + 10


def test_without_a_library_the_document_says_why(tmp_path: Path) -> None:
    """Nothing to measure is a document with the reason, and the exit code tells."""
    out = tmp_path / "out.json"
    host = NvidiaHost(tmp_path, f"1x{H100}", no_library=True)
    assert nvidia.main(["--json", str(out)], host.options) == 3
    assert "refused" in json.loads(out.read_text())
