"""What the audit says of AMD partitions and shares, from a generated node to the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alloy_agent.backends.amd import AmdBackend
from alloy_agent.backends.amd.mqd import MQD_BYTES, WORDS_AT
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import Grant, Intent, judge
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    DeviceId,
    DeviceLayout,
    Fact,
    Judgement,
    Layout,
    ModeKind,
    PartitionReport,
    PartitionSpec,
    Placement,
    SetMode,
    Share,
    Snapshot,
    TenantId,
    Tier,
    Verdict,
)
from alloy_agent.silicon.state import Client
from tests.fakes.amd_tree import Tree, tree_of
from tests.fakes.dmem import DmemTree
from tests.fakes.shared import host_facts

ONES = 0xFFFFFFFF


def audited(backend: AmdBackend, intent: Intent | None = None) -> tuple[PartitionReport, ...]:
    """Return the reports of the first device."""
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
    alone = Fact(subject="node", name="host.owners", value=[], method="this test")
    facts = backend.facts(device)
    told = tuple(fact for piece in seen.partitions for fact in host_facts(piece))
    return judge(snapshot, (*pids_of(facts), *facts, alone, *told), intent)[0]


def judgements(report: PartitionReport) -> dict[str, Judgement]:
    """Return a report's judgements by check."""
    return {judgement.check: judgement for judgement in report.judgements}


def cut(tmp_path: Path, mode: str, **options: Any) -> tuple[Tree, AmdBackend]:
    """Return a device in a compute mode."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(**options)
    device = backend.discover()[0]
    if mode != "SPX":
        backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted=mode))
    return tree, backend


def tenant(tree: Tree, pid: int, instance: int | None = None, **more: Any) -> None:
    """Run a process on the first device."""
    device = tree.machine.state.devices[0].id
    tree.machine.start_process(Client(pid=pid, device=device, instance=instance, **more))


def test_a_fenced_tenant_in_a_partition_is_enforced(tmp_path: Path) -> None:
    """CPX in NPS1, own node alone: enforced, and the report says what stays open."""
    tree, backend = cut(tmp_path, "CPX")
    for number in range(8):
        tenant(tree, 100 + number, number)
    reports = audited(backend)
    assert {report.tier for report in reports} == {Tier.ENFORCED}
    assert "bandwidth" in reports[0].reason
    open_classes = set(reports[0].residual)
    assert {"RC-LDS", "RC-POWER", "RC-BANDWIDTH", "RC-RESET"} <= open_classes


def test_qpx_with_nps4_can_be_hard_and_cpx_cannot(tmp_path: Path) -> None:
    """Own memory partitions lift QPX to hard; in CPX two partitions share one."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(process_isolation=True)
    device = backend.discover()[0]
    backend.apply(SetMode(device=device, kind=ModeKind.MEMORY, current="NPS1", wanted="NPS4"))
    tree.machine.reboot()
    assert backend.observe(device).partitions[0].profile == "CPX"
    for number in range(8):
        tenant(tree, 100 + number, number)
    assert {report.tier for report in audited(backend)} == {Tier.ENFORCED}
    for number in range(8):
        tree.machine.stop_process(100 + number)
    backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="CPX", wanted="QPX"))
    for number in range(4):
        tenant(tree, 200 + number, number)
    reports = audited(backend)
    assert {report.tier for report in reports} == {Tier.HARD}
    assert judgements(reports[0])["CPX-02"].verdict is Verdict.PASS
    assert "RC-RESET" in reports[0].residual


def test_a_tenant_that_may_open_its_neighbours_node_is_not_fenced(tmp_path: Path) -> None:
    """One rule too many fails CPX-03 of that partition, naming the node."""
    tree, backend = cut(tmp_path, "CPX")
    minors = {
        piece.number: piece.render_minor
        for piece in tree.machine.amd_partitions(tree.machine.state.devices[0])
    }
    tree.rules[100] = ["c 234:0 rw", f"c 226:{minors[0]} rw", f"c 226:{minors[1]} rw"]
    tenant(tree, 100, 0)
    first = judgements(audited(backend)[0])["CPX-03"]
    assert first.verdict is Verdict.FAIL
    assert f"renderD{minors[1]}" in first.observed


def test_without_any_rule_nothing_is_fenced(tmp_path: Path) -> None:
    """A privileged container, or none: CPX-03 fails."""
    tree, backend = cut(tmp_path, "CPX")
    tree.rules[100] = ["a *:* rwm"]
    tenant(tree, 100, 0)
    assert judgements(audited(backend)[0])["CPX-03"].verdict is Verdict.FAIL


def test_modes_other_than_meant_fail(tmp_path: Path) -> None:
    """CPX-01 compares modes and the number of live partitions with the layout."""
    _, backend = cut(tmp_path, "CPX")
    device = backend.discover()[0]
    meant = DeviceLayout(
        device=device, modes={ModeKind.COMPUTE: "CPX", ModeKind.MEMORY: "NPS4"}, partitions=None
    )
    intent = Intent(layout=Layout(name="l", devices=(meant,)))
    judged = judgements(audited(backend, intent)[0])["CPX-01"]
    assert judged.verdict is Verdict.FAIL
    assert judged.expected.startswith("CPX/NPS4")


def test_a_process_of_nobody_is_found(tmp_path: Path) -> None:
    """KFD-01: with grants known, a process in a partition that nobody was granted fails it."""
    tree, backend = cut(tmp_path, "CPX")
    for number in range(2):
        tenant(tree, 100 + number, number)
    pieces = backend.observe(backend.discover()[0]).partitions
    grant = Grant(partition=pieces[0].id, generation=0, tenant=TenantId("a"))
    reports = audited(backend, Intent(grants=(grant,)))
    verdicts = [judgements(report)["KFD-01"].verdict for report in reports[:3]]
    assert verdicts == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert "python3[101]" in judgements(reports[1])["KFD-01"].observed
    nobody = judgements(audited(backend)[1])["KFD-01"]
    assert nobody.verdict is Verdict.NOT_APPLICABLE


# --- masks ---


def masked(tmp_path: Path) -> tuple[Tree, AmdBackend, str]:
    """Return a device with one masked opportunistic share, and the mask it was granted."""
    tree, backend = cut(tmp_path, "SPX", opportunistic_cus=6)
    device = backend.discover()[0]
    backend.apply(
        Create(
            device=device,
            spec=PartitionSpec(
                device=device,
                profile="opportunistic-0",
                size=8,
                placement=Placement(start=0, size=8),
                share=Share.OPPORTUNISTIC,
            ),
        )
    )
    piece = backend.observe(device).partitions[0]
    return tree, backend, piece.access.environment["HSA_CU_MASK"]


def dump(words: dict[int, int]) -> str:
    """Return one queue descriptor as debugfs prints it."""
    values = [words.get(at, 0) for at in range(0, MQD_BYTES, 4)]
    return "".join(
        f"    {at * 4:08x}: {' '.join(f'{v:08x}' for v in values[at : at + 8])}\n"
        for at in range(0, len(values), 8)
    )


def queues_of(tree: Tree, pid: int, word: int) -> None:
    """Let the kernel show one queue of a process with a mask word."""
    gpu = tree.machine.amd_partitions(tree.machine.state.devices[0])[0].kfd_gpu_id
    text = f"Process {pid} PASID 0x8001:\n  Compute queue on device {gpu:x}\n"
    tree.mqds = text + dump(dict.fromkeys(WORDS_AT, word)) * 8
    tree.touch()


def test_a_masked_tenant_is_soft_and_never_more(tmp_path: Path) -> None:
    """Everything in order: soft, with the tenant's freedom to leave among what stays open."""
    tree, backend, mask = masked(tmp_path)
    tree.environs[50] = {"HSA_CU_MASK": mask}
    tenant(tree, 50, load_ratio=0.05)
    queues_of(tree, 50, 0x003F)
    report = audited(backend)[0]
    found = judgements(report)
    for check in ("CU-01", "CU-02", "CU-03", "CU-04"):
        assert found[check].verdict is Verdict.PASS, found[check]
    assert report.tier is Tier.SOFT
    assert "RC-ENV" in report.residual


@pytest.mark.parametrize(
    ("environ", "word", "cause"),
    [
        ({}, 0x3F, "not set"),
        ({"HSA_CU_MASK": "0:0-37;;"}, 0x3F, "malformed"),
        ({"HSA_CU_MASK": "granted", "HSA_CU_MASK_SKIP_INIT": "1"}, 0x3F, "unmasked"),
        ({"HSA_CU_MASK": "granted"}, ONES, "lets in every CU"),
        ({"HSA_CU_MASK": "0:0-303"}, 0x3F, "not as granted"),
    ],
)
def test_each_way_out_of_a_mask_is_flagged(
    environ: dict[str, str], word: int, cause: str, tmp_path: Path
) -> None:
    """Unset, malformed, skipped, replaced, or a queue without one: a failure that says which."""
    tree, backend, mask = masked(tmp_path)
    tree.environs[50] = {k: mask if v == "granted" else v for k, v in environ.items()}
    tenant(tree, 50)
    queues_of(tree, 50, word)
    report = audited(backend)[0]
    judged = judgements(report)["CU-01"]
    assert judged.verdict is Verdict.FAIL
    assert cause in judged.observed
    assert report.tier is Tier.ADVISORY


def test_each_share_is_judged_by_those_who_bear_its_mask(tmp_path: Path) -> None:
    """Two masked shares with a process each are both in order; a third process spoils both."""
    tree, backend, mask = masked(tmp_path)
    device = backend.discover()[0]
    spec = PartitionSpec(
        device=device,
        profile="opportunistic-1",
        size=8,
        placement=Placement(start=0, size=8),
        share=Share.OPPORTUNISTIC,
        ordinal=1,
    )
    backend.apply(Create(device=device, spec=spec))
    other = backend.observe(device).partitions[1].access.environment["HSA_CU_MASK"]
    tree.environs |= {50: {"HSA_CU_MASK": mask}, 51: {"HSA_CU_MASK": other}}
    for pid in (50, 51):
        tenant(tree, pid, load_ratio=0.05)
    reports = audited(backend)
    assert [judgements(r)["CU-01"].verdict for r in reports] == [Verdict.PASS] * 2
    assert [judgements(r)["CU-04"].verdict for r in reports] == [Verdict.PASS] * 2
    tree.environs[52] = {}
    tenant(tree, 52, load_ratio=0.05)
    assert [judgements(r)["CU-01"].verdict for r in audited(backend)] == [Verdict.FAIL] * 2


def test_without_debugfs_a_mask_in_force_is_unknown(tmp_path: Path) -> None:
    """What cannot be verified is unknown, and the environment alone keeps it soft."""
    tree, backend, mask = masked(tmp_path)
    tree.environs[50] = {"HSA_CU_MASK": mask}
    tenant(tree, 50, load_ratio=0.05)
    found = judgements(audited(backend)[0])
    assert found["CU-02"].verdict is Verdict.UNKNOWN
    assert "mqds" in found["CU-02"].reason
    assert found["CU-01"].verdict is Verdict.PASS


def test_work_on_more_cus_than_granted_is_a_witness(tmp_path: Path) -> None:
    """Occupancy above the grant is told as suspicion, never as proof of compliance."""
    tree, backend, mask = masked(tmp_path)
    tree.environs[50] = {"HSA_CU_MASK": mask}
    tenant(tree, 50, load_ratio=1.0)
    judged = judgements(audited(backend)[0])["CU-03"]
    assert judged.verdict is Verdict.UNKNOWN
    assert "304 of 48" in judged.reason


def test_an_unreadable_environment_is_unknown(tmp_path: Path) -> None:
    """A process whose environment cannot be read is no pass."""
    tree, backend, _ = masked(tmp_path)
    tenant(tree, 50, load_ratio=0.05)
    assert judgements(audited(backend)[0])["CU-01"].verdict is Verdict.UNKNOWN


# --- memory caps of cgroups ---

REGION = "drm/0000:05:00.0/vram0"
GIB = 1 << 30


def spec_of(device: DeviceId, share: Share, memory_bytes: int | None) -> PartitionSpec:
    """Return the first share of a sort, with a cap."""
    return PartitionSpec(
        device=device,
        profile=f"{share}-0",
        size=8,
        placement=Placement(start=0, size=8),
        memory_bytes=memory_bytes,
        share=share,
    )


def capped(tmp_path: Path) -> tuple[Tree, AmdBackend, DmemTree]:
    """Return a node whose kernel charges device memory, with two capped shares."""
    tree = tree_of("1xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", {REGION: 192 * GIB})
    backend = tree.backend(cgroups=kernel)
    device = backend.discover()[0]
    for share, cap in ((Share.PRODUCTION, 96), (Share.OPPORTUNISTIC, 24)):
        backend.apply(Create(device=device, spec=spec_of(device, share, cap * GIB)))
    return tree, backend, kernel


def enter(tree: Tree, backend: AmdBackend, kernel: DmemTree, pid: int, number: int) -> Path:
    """Run a process in the cgroup of a share; return that cgroup."""
    piece = backend.observe(backend.discover()[0]).partitions[number]
    group = Path(piece.access.cgroup_procs[0]).parent
    kernel.enter(group, pid)
    tree.places[pid] = f"/{group.relative_to(kernel.mount)}"
    tenant(tree, pid)
    return group


def test_a_capped_share_is_enforced_by_dmem(tmp_path: Path) -> None:
    """The cap is set when the share is made and read back; tenants inside it make it enforced."""
    tree, backend, kernel = capped(tmp_path)
    for number, pid in enumerate((50, 51)):
        enter(tree, backend, kernel, pid, number)
    for report, cap in zip(audited(backend), (96, 24), strict=True):
        found = judgements(report)
        assert found["MEM-04"].verdict is Verdict.PASS
        assert found["MEM-06"].verdict is Verdict.PASS
        assert report.partition.memory_bytes == cap * GIB
        assert report.tier is Tier.ENFORCED
        assert "RC-SCHED" in report.residual


def test_a_cap_that_somebody_lifted_is_not_in_force(tmp_path: Path) -> None:
    """Lifted from outside, the share is neither enforced nor soft; the other one is untouched."""
    tree, backend, kernel = capped(tmp_path)
    group = enter(tree, backend, kernel, 50, 0)
    enter(tree, backend, kernel, 51, 1)
    kernel.write(f"{group}/dmem.max", f"{REGION} max")
    lifted, other = audited(backend)
    found = judgements(lifted)
    assert found["MEM-04"].verdict is Verdict.FAIL
    assert found["MEM-06"].verdict is Verdict.FAIL
    assert lifted.tier is Tier.ADVISORY
    assert other.tier is Tier.ENFORCED


def test_a_tenant_outside_of_its_share_is_a_stranger(tmp_path: Path) -> None:
    """A process on the device in no share's cgroup is capped by nothing and found."""
    tree, backend, kernel = capped(tmp_path)
    enter(tree, backend, kernel, 50, 0)
    tenant(tree, 60)
    report = audited(backend)[0]
    assert judgements(report)["DEV-02"].verdict is Verdict.FAIL
    assert report.tier is not Tier.ENFORCED


def test_caps_change_in_place_and_shares_in_use_stay(tmp_path: Path) -> None:
    """A cap is changed without touching who is inside; an occupied share is not removed."""
    tree, backend, kernel = capped(tmp_path)
    device = backend.discover()[0]
    group = enter(tree, backend, kernel, 50, 0)
    piece = backend.observe(device).partitions[0]
    backend.apply(Configure(device=device, partition=piece, memory_bytes=48 * GIB))
    assert f"{REGION} {48 * GIB}" in (group / "dmem.max").read_text()
    assert backend.observe(device).partitions[0].incarnation == piece.incarnation
    with pytest.raises(DeviceBusyError, match="pid 50"):
        backend.apply(Destroy(device=device, partition=piece))
    (group / "cgroup.procs").write_text("")
    backend.apply(Destroy(device=device, partition=piece))
    assert not group.exists()


def test_a_share_whose_cap_does_not_hold_is_not_made(tmp_path: Path) -> None:
    """A kernel that keeps no cap, or has none, makes the share fail, and nothing of it is left."""
    tree = tree_of("1xMI300X", tmp_path)
    kernel = DmemTree(tmp_path / "cg2", {REGION: 192 * GIB})
    kernel.deaf = True
    backend = tree.backend(cgroups=kernel)
    device = backend.discover()[0]
    with pytest.raises(BackendError, match="shows"):
        backend.apply(Create(device=device, spec=spec_of(device, Share.PRODUCTION, GIB)))
    assert backend.observe(device).partitions[0].share is Share.EXCLUSIVE
    assert kernel.children(str(kernel.mount)) == ()
    assert "shared-capped" in ways_of(backend)
    (kernel.mount / "dmem.capacity").write_text("")
    with pytest.raises(UnsupportedError, match="dmem"):
        backend.apply(Create(device=device, spec=spec_of(device, Share.PRODUCTION, GIB)))
    assert "shared-capped" not in ways_of(backend)


def ways_of(backend: AmdBackend) -> set[str]:
    """Return the ways for which the first device states a limit."""
    device = backend.observe(backend.discover()[0]).device
    return {limit.way for limit in device.tier_limits}


# --- clean partitions ---


def test_partitions_are_cleaned_after_each_cut_and_judged(tmp_path: Path) -> None:
    """With isolation asked for, every partition is cleaned after a cut; a cut by others is not."""
    tree, backend = cut(tmp_path, "CPX", process_isolation=True)
    device = backend.discover()[0]
    assert tree.cleaned == [(device, number) for number in range(8)]
    assert {judgements(r)["CPX-05"].verdict for r in audited(backend)} == {Verdict.PASS}
    gpu = tree.machine.amd(tree.machine.state.devices[0].id)
    gpu.set_compute_mode("DPX")
    gpu.set_isolation([1, 1])
    assert {judgements(r)["CPX-05"].verdict for r in audited(backend)} == {Verdict.FAIL}


def test_without_a_cleaner_or_the_wish_the_residue_stays_open(tmp_path: Path) -> None:
    """A driver that cannot clean, and an operator who did not ask, are no failure."""
    tree, backend = cut(tmp_path, "DPX")
    assert tree.cleaned == []
    report = audited(backend)[0]
    assert judgements(report)["CPX-05"].verdict is Verdict.NOT_APPLICABLE
    assert "RC-LDS" in report.residual
    tree.odd.cleaner = False
    (tree.pci(backend.discover()[0]) / "run_cleaner_shader").unlink()
    assert "cannot clean" in judgements(audited(backend)[0])["CPX-05"].reason


def test_in_a_pid_namespace_of_its_own_the_agent_cannot_tell_tenants(tmp_path: Path) -> None:
    """Pids of KFD are the host's: elsewhere they would name others, so all of them are unknown."""
    tree, backend = cut(tmp_path, "DPX")
    tenant(tree, 50, instance=0)
    tree.refresh()
    place = tmp_path / "proc/self/ns"
    place.mkdir(parents=True)
    (place / "pid").symlink_to("pid:[4026532999]")
    found = judgements(audited(backend)[0])
    assert found["CPX-03"].verdict is Verdict.UNKNOWN
    assert "hostPID" in found["DEV-02"].reason
    assert found["DEV-02"].verdict is Verdict.UNKNOWN
    lines = {line.subject: line for line in backend.diagnose()}
    assert "hostPID" in lines["pid namespace"].cure
