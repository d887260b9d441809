"""The checks: what passes, what fails, what is unknown, and the tier that follows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.conformance.checks import (
    CHECKS,
    NODE,
    Grant,
    Intent,
    judge,
    worst,
)
from alloy_agent.conformance.checks.residual import TABLE
from alloy_agent.model import (
    TIER_ORDER,
    Condition,
    Fact,
    Judgement,
    Mode,
    ModeKind,
    Partition,
    PartitionId,
    PartitionReport,
    Placement,
    Quality,
    Share,
    Snapshot,
    TenantId,
    Tier,
    Vendor,
    Verdict,
)
from tests.conformance.world import (
    AMD,
    AMD_PIECE,
    CPU,
    CPU_PIECE,
    GIB,
    GPU,
    GPU_PIECE,
    INTENT,
    NEURON_PIECE,
    SNAPSHOT,
    facts,
)


def report_of(
    partition: Partition,
    seen: tuple[Fact, ...] | None = None,
    intent: Intent = INTENT,
    snapshot: Snapshot = SNAPSHOT,
) -> PartitionReport:
    """Return the report of one partition."""
    reports, _ = judge(snapshot, facts() if seen is None else seen, intent)
    return next(report for report in reports if report.partition.id == partition.id)


def verdict_of(report: PartitionReport, check: str) -> Judgement:
    """Return the judgement of one check."""
    return next(judgement for judgement in report.judgements if judgement.check == check)


def with_piece(partition: Partition) -> Snapshot:
    """Return the snapshot with the partition in place of the one with its id, or added."""
    others = tuple(p for p in SNAPSHOT.partitions if p.id != partition.id)
    return msgspec.structs.replace(SNAPSHOT, partitions=(*others, partition))


def test_where_everything_is_right_each_piece_has_its_best_tier() -> None:
    """With all facts in order nothing fails, nothing is unknown, and tiers are at their limits."""
    reports, node = judge(SNAPSHOT, facts(), INTENT)
    assert {r.partition.device: r.tier for r in reports} == {
        "cpu-node0": Tier.ENFORCED,
        "GPU-1": Tier.HARD,
        "amd-1": Tier.HARD,
        "neuron-1": Tier.SOFT,
    }
    assert worst(reports, node) is Verdict.PASS, [
        j for r in reports for j in r.judgements if j.verdict not in {"pass", "not_applicable"}
    ]


MEMBER: dict[str, Any] = {"pid": 10, "comm": "train", "uid": 0, "cpus": [1, 2]}
BROKEN: list[tuple[str, str, str, Any, Partition]] = [
    ("CPU-01", CPU_PIECE.id, "cgroup.cpus_effective", [1], CPU_PIECE),
    ("CPU-01", CPU_PIECE.id, "cgroup.cpus_effective", [1, 2, 3], CPU_PIECE),
    ("CPU-03", CPU_PIECE.id, "cgroup.members", [MEMBER | {"cpus": [0, 1, 2]}], CPU_PIECE),
    (
        "CPU-03",
        CPU_PIECE.id,
        "cgroup.members",
        [MEMBER | {"threads": [{"tid": 12, "cpus": [0]}]}],
        CPU_PIECE,
    ),
    (
        "CPU-04",
        NODE,
        "host.pinned",
        [{"pid": 11, "comm": "intruder", "cpus": [2, 3], "partition": ""}],
        CPU_PIECE,
    ),
    (
        "CGR-01",
        CPU_PIECE.id,
        "cgroup.hierarchies",
        [{"label": "memory", "version": 1, "path": "/alloy/a", "present": False}],
        CPU_PIECE,
    ),
    ("CGR-01", CPU_PIECE.id, "cgroup.hierarchies", [], CPU_PIECE),
    ("CGR-02", CPU_PIECE.id, "cgroup.cpus", [1, 2, 3], CPU_PIECE),
    ("CGR-03", CPU_PIECE.id, "cgroup.members", [MEMBER | {"lacks": ["memory"]}], CPU_PIECE),
    ("CGR-03", CPU_PIECE.id, "cgroup.members", [MEMBER | {"threads_outside": [12]}], CPU_PIECE),
    ("CGR-04", CPU_PIECE.id, "cgroup.members", [], CPU_PIECE),
    (
        "MEM-01",
        CPU_PIECE.id,
        "cgroup.memory_leaves",
        [
            {"path": "/a", "limit_bytes": GIB, "ceiling_bytes": GIB, "processes": 1},
            {"path": "/a/b", "limit_bytes": None, "ceiling_bytes": None, "processes": 1},
        ],
        CPU_PIECE,
    ),
    ("MEM-01", CPU_PIECE.id, "cgroup.memory_leaves", [], CPU_PIECE),
    ("MEM-05", CPU_PIECE.id, "cgroup.memory_used_bytes", 2 * GIB, CPU_PIECE),
    (
        "OWN-01",
        NODE,
        "host.owners",
        [{"name": "slurmd", "evidence": "process 5 slurmd", "rival": True}],
        CPU_PIECE,
    ),
    ("MIG-01", GPU.id, "device.geometry", [], GPU_PIECE),
    ("DEV-02", AMD.id, "device.clients", [{"pid": 9, "comm": "x"}], AMD_PIECE),
    (
        "MIG-04",
        GPU.id,
        "device.clients",
        [{"pid": 9, "comm": "x", "partition": GPU_PIECE.id, "granted": False}],
        GPU_PIECE,
    ),
    ("MIG-03", GPU_PIECE.id, "cgroup.device_fence", {"by": "", "allowed": ["*"]}, GPU_PIECE),
    (
        "MIG-03",
        GPU_PIECE.id,
        "cgroup.device_fence",
        {"by": "rules", "allowed": ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap9"]},
        GPU_PIECE,
    ),
    ("CPX-03", AMD_PIECE.id, "partition.own_nodes", [], AMD_PIECE),
    (
        "MEM-03",
        GPU_PIECE.id,
        "partition.memory",
        {"limit_bytes": 40 * GIB, "used_bytes": 41 * GIB, "enforced_by": "instance"},
        GPU_PIECE,
    ),
    (
        "MEM-02",
        GPU_PIECE.id,
        "partition.memory",
        {"limit_bytes": 40 * GIB, "used_bytes": 1, "enforced_by": "none"},
        GPU_PIECE,
    ),
    (
        "NRN-01",
        NEURON_PIECE.id,
        "neuron.cores",
        {"cores": [0, 1], "lnc": "1", "whole_device": False},
        NEURON_PIECE,
    ),
]


@pytest.mark.parametrize(("check", "subject", "name", "value", "partition"), BROKEN)
def test_each_breach_is_found_and_named(
    check: str, subject: str, name: str, value: Any, partition: Partition
) -> None:
    """A fact that shows a breach fails its check, and the tier drops with that check as reason."""
    report = report_of(partition, facts({(subject, name): value}))
    judgement = verdict_of(report, check)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.expected
    assert judgement.observed
    before = report_of(partition).tier
    assert TIER_ORDER.index(report.tier) > TIER_ORDER.index(before)
    assert "fails" in report.reason


def test_a_shared_compute_instance_is_not_hard() -> None:
    """A GPU instance with two compute instances is enforced, and MIG-02 is named as the reason."""
    shared = {
        "uuid": "MIG-1",
        "instance_slices": 3,
        "compute_instances": 2,
        "compute_slices": 1,
    }
    report = report_of(GPU_PIECE, facts({(GPU_PIECE.id, "mig.instance"): shared}))
    assert report.tier is Tier.ENFORCED
    assert report.reason.startswith("not hard: MIG-02 fails")


def test_nps1_is_not_hard() -> None:
    """CPX pieces that interleave over all memory are at best enforced, and the reason says so."""
    modes = (Mode(kind=ModeKind.COMPUTE, current="CPX"), Mode(kind=ModeKind.MEMORY, current="NPS1"))
    devices = tuple(
        msgspec.structs.replace(d, modes=modes) if d.id == AMD.id else d for d in SNAPSHOT.devices
    )
    shown = {
        "compute_mode": "CPX",
        "memory_mode": "NPS1",
        "partitions": 8,
        "expected_partitions": 8,
        "memory_domains": 1,
    }
    report = report_of(
        AMD_PIECE,
        facts({(AMD_PIECE.id, "amd.partition"): shown}),
        snapshot=msgspec.structs.replace(SNAPSHOT, devices=devices),
    )
    assert report.tier is Tier.ENFORCED
    assert "NPS1" in report.reason


def test_cores_of_two_tenants_overlap() -> None:
    """Two pieces with a common core fail CPU-02 on both sides; a reserved core fails it too."""
    other = msgspec.structs.replace(
        CPU_PIECE,
        id=PartitionId("cpu-node0/2c@1"),
        placement=Placement(start=1, size=2),
        units=(2, 3),
    )
    report = report_of(CPU_PIECE, snapshot=with_piece(other))
    assert verdict_of(report, "CPU-02").verdict is Verdict.FAIL
    assert other.id in verdict_of(report, "CPU-02").observed
    reserved = msgspec.structs.replace(CPU_PIECE, units=(0, 1))
    report = report_of(reserved, snapshot=with_piece(reserved))
    assert "reserved cores 0" in verdict_of(report, "CPU-02").observed


def test_an_unwanted_and_a_missing_piece_are_named() -> None:
    """A piece that the layout does not have fails PART-01; what is missing fails on the device."""
    stray = msgspec.structs.replace(
        CPU_PIECE,
        id=PartitionId("cpu-node0/1c@3"),
        profile="1c",
        placement=Placement(start=3, size=1),
        units=(4,),
        access=CPU_PIECE.access,
    )
    snapshot = msgspec.structs.replace(
        SNAPSHOT, partitions=(*[p for p in SNAPSHOT.partitions if p.id != CPU_PIECE.id], stray)
    )
    reports, node = judge(snapshot, facts(), INTENT)
    report = next(r for r in reports if r.partition.id == stray.id)
    assert verdict_of(report, "PART-01").verdict is Verdict.FAIL
    missing = next(j for j in node if (j.check, j.subject) == ("PART-01", CPU.id))
    assert missing.verdict is Verdict.FAIL
    assert "2c@0+2" in missing.observed


def test_a_changed_memory_cap_is_not_the_wanted_piece() -> None:
    """The wanted piece with another cap than the layout asks for fails PART-01."""
    changed = msgspec.structs.replace(CPU_PIECE, memory_bytes=2 * GIB)
    report = report_of(changed, snapshot=with_piece(changed))
    assert verdict_of(report, "PART-01").verdict is Verdict.FAIL


def test_a_recreated_partition_does_not_pass_as_the_granted_one() -> None:
    """A grant of an earlier generation fails PART-02, whatever else is in order."""
    newer = msgspec.structs.replace(GPU_PIECE, generation=2)
    report = report_of(newer, snapshot=with_piece(newer))
    assert verdict_of(report, "PART-02").verdict is Verdict.FAIL
    assert report.tier is Tier.ADVISORY


def test_two_tenants_in_one_partition_fail() -> None:
    """A partition that two tenants were given is neither hard nor enforced."""
    second = Grant(partition=GPU_PIECE.id, generation=1, tenant=TenantId("other"))
    intent = msgspec.structs.replace(INTENT, grants=(*INTENT.grants, second))
    report = report_of(GPU_PIECE, intent=intent)
    assert verdict_of(report, "PART-03").observed == "acme, other"
    assert report.tier is Tier.SOFT or report.tier is Tier.ADVISORY


def test_partitions_that_others_made_are_judged_without_intent() -> None:
    """Without a layout PART-01 is not applicable; the fence still has to be proved."""
    foreign = msgspec.structs.replace(GPU_PIECE, managed=False, tenant=None)
    report = report_of(foreign, intent=Intent(), snapshot=with_piece(foreign))
    assert verdict_of(report, "PART-01").verdict is Verdict.NOT_APPLICABLE
    assert report.tier is Tier.HARD
    seen = tuple(f for f in facts() if f.name != "cgroup.device_fence")
    report = report_of(foreign, seen, Intent(), with_piece(foreign))
    assert verdict_of(report, "MIG-03").verdict is Verdict.UNKNOWN
    assert report.tier is Tier.ADVISORY


def test_a_rival_manager_of_foreign_partitions_is_no_breach() -> None:
    """Where this agent only looks, the one manager is not a second one; harmless ones are notes."""
    owners = [
        {"name": "device plug-in", "evidence": "socket x", "rival": True},
        {"name": "DCGM", "evidence": "process 3", "rival": False, "note": "reads only"},
    ]
    seen = facts({(NODE, "host.owners"): owners})
    foreign = msgspec.structs.replace(CPU_PIECE, managed=False)
    report = report_of(foreign, seen, Intent(), with_piece(foreign))
    assert verdict_of(report, "OWN-01").verdict is Verdict.PASS
    harmless = facts({(NODE, "host.owners"): owners[1:]})
    assert "DCGM: reads only" in verdict_of(report_of(CPU_PIECE, harmless), "OWN-01").observed


def test_processes_in_a_partition_nobody_was_given_are_named() -> None:
    """PART-04 fails for a process in a managed partition without a grant."""
    intent = msgspec.structs.replace(INTENT, grants=())
    judgement = verdict_of(report_of(CPU_PIECE, intent=intent), "PART-04")
    assert judgement.verdict is Verdict.FAIL
    assert "process 10" in judgement.observed


def test_a_shared_device_proves_nothing_by_its_order() -> None:
    """A share of a device, without evidence of rate control, is advisory: order is no fence."""
    shared = msgspec.structs.replace(
        GPU_PIECE, id=PartitionId("GPU-1/production-0@0"), share=Share.PRODUCTION
    )
    snapshot = msgspec.structs.replace(SNAPSHOT, partitions=(shared,))
    report = report_of(shared, intent=Intent(), snapshot=snapshot)
    assert report.tier is Tier.ADVISORY


def test_an_advisory_partition_never_lets_an_audit_pass() -> None:
    """With nothing in force the audit is unknown, even where no check fails."""
    report = msgspec.structs.replace(report_of(CPU_PIECE), tier=Tier.ADVISORY)
    assert worst([report], []) is Verdict.UNKNOWN


def test_a_device_that_does_not_answer_is_unknown() -> None:
    """A stalled device makes DEV-00 and PART-01 unknown, not pass."""
    devices = tuple(
        msgspec.structs.replace(d, condition=Condition.STALLED, condition_reason="call hangs")
        for d in SNAPSHOT.devices
    )
    reports, node = judge(msgspec.structs.replace(SNAPSHOT, devices=devices), facts(), INTENT)
    assert {j.verdict for j in node if j.check in {"DEV-00", "PART-01"}} == {Verdict.UNKNOWN}
    assert all(verdict_of(r, "PART-01").verdict is Verdict.UNKNOWN for r in reports)


def test_the_chain_is_judged() -> None:
    """REC-01 passes on a whole chain, fails on problems and on lost records, else is unknown."""

    def chain(seen: tuple[Fact, ...]) -> Verdict:
        _, node = judge(SNAPSHOT, seen, INTENT)
        return next(j.verdict for j in node if j.check == "REC-01")

    key = (NODE, "evidence.chain")
    assert chain(facts()) is Verdict.PASS
    assert chain(facts({key: {"records": 5, "problems": 1}})) is Verdict.FAIL
    assert chain(facts({key: {"records": 5, "problems": 0, "lost_records": 2}})) is Verdict.FAIL
    assert chain(facts({key: "nonsense"})) is Verdict.UNKNOWN
    assert chain(tuple(f for f in facts() if f.name != "evidence.chain")) is Verdict.UNKNOWN


def vacant(partition: Partition) -> tuple[Partition, Intent, tuple[Fact, ...]]:
    """Return a partition that nobody was given, what was meant, and facts that show it empty."""
    intent = msgspec.structs.replace(
        INTENT, grants=tuple(g for g in INTENT.grants if g.partition != partition.id)
    )
    seen = facts({(partition.id, "partition.pids"): [], (partition.device, "device.clients"): []})
    seen = tuple(
        fact
        if (fact.subject, fact.name) != (partition.id, "cgroup.device_fence")
        else msgspec.structs.replace(fact, quality=Quality.NOT_SUPPORTED, value=None)
        for fact in seen
    )
    return msgspec.structs.replace(partition, tenant=None), intent, seen


FENCED = [(GPU_PIECE, "MIG-03"), (AMD_PIECE, "CPX-03")]


@pytest.mark.parametrize(("partition", "check"), FENCED)
@pytest.mark.parametrize("managed", [True, False])
def test_a_vacant_partition_has_its_best_tier(
    partition: Partition, check: str, managed: bool
) -> None:
    """With nobody inside the fence is not applicable, and the reason says when it is judged."""
    idle, intent, seen = vacant(msgspec.structs.replace(partition, managed=managed))
    report = report_of(idle, seen, intent, with_piece(idle))
    assert verdict_of(report, check).verdict is Verdict.NOT_APPLICABLE
    assert report.tier is Tier.HARD
    assert f"{check}: nobody is inside; judged as soon as a process enters" in report.reason


@pytest.mark.parametrize(("partition", "check"), FENCED)
def test_whoever_is_there_needs_a_proved_fence(partition: Partition, check: str) -> None:
    """With a grant, a tenant or a process and no evidence the fence is unknown: advisory."""
    idle, intent, seen = vacant(partition)
    taken = msgspec.structs.replace(idle, tenant=TenantId("acme"))
    worked_in = tuple(
        msgspec.structs.replace(fact, value=[77])
        if (fact.subject, fact.name) == (partition.id, "partition.pids")
        else fact
        for fact in seen
    )
    for piece, meant, shown in (
        (idle, INTENT, seen),
        (taken, intent, seen),
        (idle, intent, worked_in),
    ):
        report = report_of(piece, shown, meant, with_piece(piece))
        assert verdict_of(report, check).verdict is Verdict.UNKNOWN
        assert report.tier is Tier.ADVISORY


@pytest.mark.parametrize(("partition", "check"), FENCED)
def test_an_unreadable_list_of_processes_is_no_vacancy(partition: Partition, check: str) -> None:
    """Where the processes cannot be listed the fence is unknown, even if one would pass."""
    idle, intent, seen = vacant(partition)
    key = (partition.id, "partition.pids")
    hidden = tuple(f for f in seen if (f.subject, f.name) != key)
    refused = tuple(
        msgspec.structs.replace(f, quality=Quality.NOT_PERMITTED)
        if (f.subject, f.name) == key
        else f
        for f in facts()
    )
    for shown in (hidden, refused):
        report = report_of(idle, shown, intent, with_piece(idle))
        assert verdict_of(report, check).verdict is Verdict.UNKNOWN
        assert report.tier is Tier.ADVISORY


@given(
    removed=st.sets(st.integers(0, len(facts()) - 1)),
    how=st.sampled_from(["gone", "not_permitted"]),
    which=st.sampled_from([GPU_PIECE, AMD_PIECE, NEURON_PIECE]),
)
def test_less_evidence_never_raises_the_tier_of_a_vacant_partition(
    removed: set[int], how: str, which: Partition
) -> None:
    """A fact that is gone or refused only ever lowers what a partition without tenant has."""
    idle, intent, every = vacant(which)
    snapshot = with_piece(idle)
    before = report_of(idle, every, intent, snapshot)
    seen = tuple(
        f if index not in removed else msgspec.structs.replace(f, quality=Quality.NOT_PERMITTED)
        for index, f in enumerate(every)
        if index not in removed or how != "gone"
    )
    after = report_of(idle, seen, intent, snapshot)
    assert TIER_ORDER.index(after.tier) >= TIER_ORDER.index(before.tier)
    passed = {j.check for j in before.judgements if j.verdict is Verdict.PASS}
    assert {j.check for j in after.judgements if j.verdict is Verdict.PASS} <= passed


@given(removed=st.sets(st.integers(0, len(facts()) - 1)), how=st.sampled_from(["gone", *Quality]))
def test_less_evidence_never_raises_a_tier(removed: set[int], how: str) -> None:
    """Facts that are absent, stale or not permitted only ever lower tiers and verdicts."""
    full = {r.partition.id: r for r in judge(SNAPSHOT, facts(), INTENT)[0]}
    seen = tuple(
        fact if index not in removed else msgspec.structs.replace(fact, quality=Quality(how))
        for index, fact in enumerate(facts())
        if index not in removed or how != "gone"
    )
    for report in judge(SNAPSHOT, seen, INTENT)[0]:
        before = full[report.partition.id]
        assert TIER_ORDER.index(report.tier) >= TIER_ORDER.index(before.tier)
        passed = {j.check for j in before.judgements if j.verdict is Verdict.PASS}
        assert {j.check for j in report.judgements if j.verdict is Verdict.PASS} <= passed


@given(
    index=st.integers(0, len(facts()) - 1),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)
def test_facts_of_any_shape_give_a_verdict(index: int, value: Any) -> None:
    """A collector that reports nonsense makes a verdict unknown or false; nothing raises."""
    seen = list(facts())
    seen[index] = msgspec.structs.replace(seen[index], value=value)
    reports, node = judge(SNAPSHOT, tuple(seen), INTENT)
    assert len(reports) == len(SNAPSHOT.partitions)
    assert node


def test_checks_are_well_formed() -> None:
    """Ids are unique and stable in form; what a tier requires supports it; claims are sentences."""
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids)
    for check in CHECKS:
        assert set(check.required_for) <= set(check.supports)
        assert check.claim[0].isupper()
        assert check.claim.endswith(".")
        assert Tier.ADVISORY not in check.supports


def test_residual_classes_are_listed_by_tier_and_vendor() -> None:
    """Each class names its source; a hard MIG piece still lists TLB, links and power."""
    assert all(entry.what.source and entry.what.text.endswith(".") for entry in TABLE)
    assert len({entry.what.id for entry in TABLE}) == len(TABLE)
    residual = set(report_of(GPU_PIECE).residual)
    assert {"RC-TLB", "RC-MEMBAR", "RC-PCIE", "RC-LINK", "RC-POWER"} <= residual
    assert "RC-BANDWIDTH" not in residual
    assert {"RC-BANDWIDTH", "RC-FAULT"} <= set(report_of(CPU_PIECE).residual)
    for vendor in Vendor:
        for tier in Tier:
            listed = {e.what.id for e in TABLE if tier in e.tiers and vendor in e.vendors}
            weaker = TIER_ORDER[TIER_ORDER.index(tier) + 1 :]
            for other in weaker:
                more = {e.what.id for e in TABLE if other in e.tiers and vendor in e.vendors}
                assert listed <= more
