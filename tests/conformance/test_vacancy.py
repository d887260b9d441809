"""Every backend's word for an empty partition leads to one verdict, and so does a mute one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.backends.base import Backend
from alloy_agent.backends.fake import open_backend
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import Intent, judge
from alloy_agent.model import Fact, ModeKind, PartitionReport, SetMode, Snapshot, Tier, Verdict
from tests.fakes.amd_tree import tree_of
from tests.fakes.neuron import FakeNeuronHost
from tests.fakes.nvml.host import NvidiaHost


def reports_of(backend: Backend) -> tuple[PartitionReport, ...]:
    """Return what the audit says of the first device, of which nobody was given anything."""
    device = backend.discover()[0]
    seen = backend.observe(device)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(seen.device,),
        partitions=seen.partitions,
    )
    facts = backend.facts(device)
    alone = Fact(subject="node", name="host.owners", value=[])
    return judge(snapshot, (*pids_of(facts), *facts, alone), Intent())[0]


def switch(backend: Backend, kind: ModeKind, current: str, wanted: str) -> None:
    """Switch the first device."""
    device = backend.discover()[0]
    backend.apply(SetMode(device=device, kind=kind, current=current, wanted=wanted))


def nvidia(folder: Path, *pieces: str, **traits: Any) -> NvidiaHost:
    """Return a node with one H100, cut or whole."""
    host = NvidiaHost(folder, "1xH100", **traits)
    (device,) = host.backend.discover()
    if pieces:
        host.mig(device)
        host.make(device, *pieces)
    return host


def simulated(folder: Path, spec: str) -> Backend:
    """Return a simulated node."""
    return open_backend({"specs": [spec], "state_dir": str(folder / "fake")})


BACKENDS: dict[str, Any] = {
    "nvidia whole": lambda folder: nvidia(folder).backend,
    "nvidia mig": lambda folder: nvidia(folder, "3g.40gb@0", "3g.40gb@4").backend,
    "amd whole": lambda folder: tree_of("1xMI300X", folder).backend(),
    "amd cut": lambda folder: _cut(tree_of("1xMI300X", folder).backend()),
    "simulated nvidia whole": lambda folder: simulated(folder, "1xH100"),
    "simulated amd whole": lambda folder: simulated(folder, "1xMI300X"),
}


def _cut(backend: Backend) -> Backend:
    switch(backend, ModeKind.COMPUTE, "SPX", "CPX")
    return backend


@pytest.mark.parametrize("name", BACKENDS)
def test_an_empty_partition_is_not_advisory(name: str, tmp_path: Path) -> None:
    """Nothing of it is unknown or fails, it has a tier, and the fence is still to be judged."""
    reports = reports_of(BACKENDS[name](tmp_path))
    assert reports
    for report in reports:
        bad = [j for j in report.judgements if j.verdict in {Verdict.FAIL, Verdict.UNKNOWN}]
        assert not bad
        assert report.tier is (Tier.ENFORCED if name == "amd cut" else Tier.HARD)
        assert "nobody is inside; judged as soon as a process enters" in report.reason


def test_an_idle_neuron_device_has_its_best_tier(tmp_path: Path) -> None:
    """Every idle grant of Neuron cores reaches the limit that its way of cutting has."""
    from tests.backends.neuron.test_backend import grant

    backend = FakeNeuronHost(tmp_path, "trn1.2xlarge").open()
    try:
        device = backend.discover()[0]
        grant(backend, device, 0, backend.observe(device).device.slices)
        (report,) = reports_of(backend)
        assert report.tier is Tier.HARD
        assert "NRN-02: nobody is inside" in report.reason
    finally:
        backend.close()


def test_a_driver_that_lists_no_processes_shows_no_idleness(tmp_path: Path) -> None:
    """Without the driver's list of compute processes the fence is unknown, not inapplicable."""
    missing = ["nvmlDeviceGetComputeRunningProcesses*"]
    (report,) = reports_of(nvidia(tmp_path, missing=missing).backend)
    assert report.tier is Tier.ADVISORY
    verdicts = {j.check: j.verdict for j in report.judgements}
    assert verdicts["DEV-01"] is Verdict.UNKNOWN
    assert verdicts["DEV-02"] is Verdict.UNKNOWN


def test_a_kfd_that_hides_its_processes_shows_no_idleness(tmp_path: Path) -> None:
    """Without KFD's directory of processes the fence is unknown, and nobody is called alone."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    shutil.rmtree(tmp_path / "sys/class/kfd/kfd/proc")
    (report,) = reports_of(backend)
    assert report.tier is Tier.ADVISORY
    verdicts = {j.check: j.verdict for j in report.judgements}
    assert verdicts["CPX-03"] is Verdict.UNKNOWN
    assert verdicts["DEV-02"] is Verdict.UNKNOWN


def test_a_process_whose_memory_cannot_be_read_may_be_anywhere(tmp_path: Path) -> None:
    """One KFD process that does not tell what it has leaves every partition's fence unknown."""
    backend = _cut(tree_of("1xMI300X", tmp_path).backend())
    (tmp_path / "sys/class/kfd/kfd/proc/777/vram_1").mkdir(parents=True)  # no number to read
    reports = reports_of(backend)
    assert {report.tier for report in reports} == {Tier.ADVISORY}
    reasons = {j.reason for r in reports for j in r.judgements if j.check == "CPX-03"}
    assert reasons == {
        "partition.pids could not be read: what process 777 (unknown) has on the devices"
        " cannot be read"
    }
