"""The table of checks, and the pure judgement of a node: facts in, verdicts and tiers out.

Partitions that others made are judged like our own. Where nobody told this agent what a device
shall look like, PART-01 is not applicable (there is no intent to compare with) and takes no part
in the tier; everything that is in force on the partition still has to be proved, and what cannot
be seen stays unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from alloy_agent.conformance.checks import (
    amd,
    containers,
    geometry,
    memory,
    neuron,
    nvidia,
    placement,
    sharing,
    silicon,
)
from alloy_agent.conformance.checks.base import NODE, Case, Check, FactBook, Grant, Intent, run
from alloy_agent.conformance.checks.node import judge_node
from alloy_agent.conformance.checks.residual import TABLE, residual_classes
from alloy_agent.conformance.checks.tiers import limit_of, reachable, tier_of
from alloy_agent.model import (
    Device,
    Fact,
    Judgement,
    Partition,
    PartitionId,
    PartitionReport,
    ResidualClass,
    Snapshot,
    Tier,
    Verdict,
)

__all__ = [
    "CHECKS",
    "NODE",
    "Check",
    "FactBook",
    "Grant",
    "Intent",
    "judge",
    "judge_partition",
    "residual_table",
    "worst",
]

CHECKS: tuple[Check, ...] = (
    *geometry.CHECKS,
    *placement.CHECKS,
    *silicon.CHECKS,
    *amd.CHECKS,
    *nvidia.CHECKS,
    *memory.CHECKS,
    *neuron.CHECKS,
    *sharing.CHECKS,
    *containers.CHECKS,
)


def judge(
    snapshot: Snapshot,
    facts: Iterable[Fact] | FactBook,
    intent: Intent | None = None,
    only: Collection[PartitionId] | None = None,
) -> tuple[tuple[PartitionReport, ...], tuple[Judgement, ...]]:
    """Return the report of each partition and the judgements about the node as a whole.

    Args:
        snapshot: The node as observed.
        facts: What collectors saw.
        intent: What ought to be; None: nobody said.
        only: Judge these partitions alone; None: all.
    """
    book = facts if isinstance(facts, FactBook) else FactBook(facts)
    meant = intent or Intent()
    devices = {device.id: device for device in snapshot.devices}
    reports = tuple(
        judge_partition(partition, devices[partition.device], snapshot, book, meant)
        for partition in snapshot.partitions
        if partition.device in devices and (only is None or partition.id in only)
    )
    return reports, judge_node(snapshot, book, meant)


def judge_partition(
    partition: Partition, device: Device, snapshot: Snapshot, book: FactBook, intent: Intent
) -> PartitionReport:
    """Return one partition's verdicts, the tier that follows, and what stays open at that tier."""
    case = Case(partition=partition, device=device, snapshot=snapshot, intent=intent)
    limit = limit_of(partition, device)
    judgements = tuple(
        run(check, case, book)
        for check in CHECKS
        if check.applies(partition, device) and reachable(check, limit.tier)
    )
    tier, reason = tier_of(CHECKS, judgements, limit)
    return PartitionReport(
        partition=partition,
        tier=tier,
        reason=reason,
        simulated=device.simulated,
        judgements=judgements,
        residual=tuple(entry.id for entry in residual_classes(tier, partition, device)),
    )


def residual_table(reports: Iterable[PartitionReport]) -> tuple[ResidualClass, ...]:
    """Return each residual class that any of the reports names, in the table's order."""
    named = {ident for report in reports for ident in report.residual}
    return tuple(entry.what for entry in TABLE if entry.what.id in named)


def worst(reports: Iterable[PartitionReport], judgements: Iterable[Judgement]) -> Verdict:
    """Return the verdict of an audit: fail, else unknown, else pass.

    A partition with nothing in force (advisory) never lets an audit pass.
    """
    listed = tuple(reports)
    verdicts = {j.verdict for report in listed for j in report.judgements}
    verdicts |= {j.verdict for j in judgements}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.UNKNOWN in verdicts or any(report.tier is Tier.ADVISORY for report in listed):
        return Verdict.UNKNOWN
    return Verdict.PASS
