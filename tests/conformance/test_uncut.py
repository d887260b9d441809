"""A layout that asks for no cut is kept by the whole device that is there then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alloy_agent.backends.base import Backend
from alloy_agent.backends.fake import open_backend
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import Intent, judge, worst
from alloy_agent.layout import choose, read_layout
from alloy_agent.model import Fact, ModeKind, PartitionReport, SetMode, Snapshot, Tier, Verdict

NATIVE = "version: v1\nlayouts:\n  one:\n    - match: {{vendor: {vendor}}}\n      {keys}\n"
MIG_PARTED = "version: v1\nmig-configs:\n  one:\n    - devices: all\n      mig-enabled: false\n"
UNCUT: dict[str, tuple[str, str]] = {
    "mig none": ("1xH100", NATIVE.format(vendor="nvidia", keys="mig: none")),
    "mig-parted": ("1xH100", MIG_PARTED),
    "SPX": ("1xMI300X", NATIVE.format(vendor="amd", keys="compute: SPX")),
    "Neuron cores": ("trn2.3xlarge", NATIVE.format(vendor="neuron", keys="cores: []")),
}


def audited(backend: Backend, layout: str) -> tuple[Verdict, dict[str, PartitionReport]]:
    """Return the verdict on a simulated node that shall be as a file says, and its partitions."""
    seen = [backend.observe(device) for device in backend.discover()]
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=tuple(one.device for one in seen),
        partitions=tuple(piece for one in seen for piece in one.partitions),
    )
    wanted = choose(read_layout(layout, "layout.yaml"), None, snapshot.devices)
    told = [fact for one in seen for fact in backend.facts(one.device.id)]
    more: tuple[Any, ...] = (
        Fact(subject="node", name="host.owners", value=[]),
        Fact(subject="node", name="evidence.chain", value={"records": 1, "problems": 0}),
    )
    book = (*pids_of(told), *told, *more)
    reports, node = judge(snapshot, book, Intent(layout=wanted))
    return worst(reports, node), {report.partition.id: report for report in reports}


def opened(folder: Path, spec: str) -> Backend:
    """Return a simulated node."""
    return open_backend({"specs": [spec], "state_dir": str(folder)})


@pytest.mark.parametrize("name", UNCUT)
def test_an_uncut_device_is_what_its_layout_asks_for(name: str, tmp_path: Path) -> None:
    """No piece is a stray one, each keeps its best tier, and the audit passes."""
    spec, layout = UNCUT[name]
    verdict, reports = audited(opened(tmp_path, spec), layout)
    assert verdict is Verdict.PASS
    assert len(reports) == (0 if name == "Neuron cores" else 1)
    for report in reports.values():
        placed = next(j for j in report.judgements if j.check == "PART-01")
        assert placed.verdict is Verdict.PASS
        assert report.tier is Tier.HARD


@pytest.mark.parametrize("mig", ["[]", "[1g.10gb]"])
def test_an_uncut_device_is_not_what_a_cut_one_shall_be(mig: str, tmp_path: Path) -> None:
    """Where MIG is asked for, the whole device is no wanted piece."""
    layout = NATIVE.format(vendor="nvidia", keys=f"mig: {mig}")
    verdict, reports = audited(opened(tmp_path, "1xH100"), layout)
    assert verdict is Verdict.FAIL
    (report,) = reports.values()
    placed = next(j for j in report.judgements if j.check == "PART-01")
    assert placed.verdict is Verdict.FAIL


def test_a_cut_device_is_not_what_an_uncut_one_shall_be(tmp_path: Path) -> None:
    """An instance that somebody makes on a device that shall be whole is a stray one."""
    backend = opened(tmp_path, "1xH100")
    (device,) = backend.discover()
    backend.apply(SetMode(device=device, kind=ModeKind.MIG, current="off", wanted="on"))
    verdict, _reports = audited(backend, UNCUT["mig none"][1])
    assert verdict is Verdict.FAIL


SHARED = NATIVE.format(vendor="nvidia", keys="shared: {production: 1, opportunistic: 1}")


def test_a_shared_device_in_which_nobody_is_says_so(tmp_path: Path) -> None:
    """Empty shares prove nothing, and their reason names what a tenant will show."""
    from alloy_agent.planner import plan

    backend = opened(tmp_path, "1xH100")
    (device,) = backend.discover()
    seen = backend.observe(device)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(seen.device,),
        partitions=seen.partitions,
    )
    layout = choose(read_layout(SHARED, "layout.yaml"), None, snapshot.devices)
    for planned in plan(layout, snapshot).steps:
        backend.apply(planned.step)
    verdict, reports = audited(backend, SHARED)
    assert verdict is Verdict.UNKNOWN
    assert len(reports) == 2
    for report in reports.values():
        assert report.tier is Tier.ADVISORY
        assert "RATE-01, RATE-02: nobody is inside; judged as soon as a process" in report.reason
