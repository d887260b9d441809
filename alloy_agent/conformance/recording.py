"""From results to what is kept: findings where a verdict or tier changed, evidence, last verdicts.

Last verdicts live in the store, so that a restart repeats no finding. Evidence that the disk
refuses does not stop the audit: the result is returned all the same, and the next one says that
records were lost (REC-01).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Protocol

import msgspec

from alloy_agent.conformance.checks import NODE
from alloy_agent.conformance.checks.shapes import ChainFact
from alloy_agent.conformance.evidence import Entry, EvidenceLog, VerifyReport, verify
from alloy_agent.errors import AlloyError, StoreError
from alloy_agent.host import clock
from alloy_agent.model import (
    TIER_ORDER,
    AuditResult,
    Fact,
    Finding,
    Judgement,
    PartitionReport,
    Quality,
    Tier,
    Verdict,
)
from alloy_agent.store.records import LastVerdict

LOG = logging.getLogger(__name__)

TIER = "TIER"  # the "check" under which the tier of a partition is kept
LOOKED_BYTES = 4 << 20  # a newest file up to this size is verified by an audit itself, in 50 ms
SUMMARY_PERIOD_S = 60.0

Key = tuple[str, str]


class VerdictStore(Protocol):
    """Where last verdicts are kept over restarts."""

    def last_verdicts(self) -> dict[Key, LastVerdict]:
        """Return the last verdict by (check, subject)."""
        ...

    def set_last_verdicts(
        self, verdicts: Iterable[LastVerdict], forgotten: Iterable[Key] = ()
    ) -> None:
        """Keep verdicts, and forget those of subjects that are gone."""
        ...


class Recorder:
    """Compares each result with the last one, and keeps what changed."""

    def __init__(self, store: VerdictStore | None, evidence: EvidenceLog | None) -> None:
        self._store = store
        self._evidence = evidence
        self._last = dict(store.last_verdicts()) if store else {}
        self._summary_at_s = float("-inf")

    def record(self, result: AuditResult, *, whole: bool = True) -> tuple[Finding, ...]:
        """Keep what changed against the last result and return the findings.

        Args:
            result: What was judged.
            whole: It covers every partition, so that one it lacks is gone.
        """
        now = {(v.check, v.subject): v for v in _verdicts(result)}
        changed = [v for key, v in now.items() if _differs(self._last.get(key), v)]
        gone = [key for key in self._last if key not in now] if whole else []
        findings = tuple(
            finding
            for verdict in changed
            if (finding := self._finding(verdict, result)) is not None
        )
        self._write(result, changed, gone)
        for key in gone:
            del self._last[key]
        self._last.update(((v.check, v.subject), v) for v in changed)
        return findings

    def _finding(self, verdict: LastVerdict, result: AuditResult) -> Finding | None:
        before = self._last.get((verdict.check, verdict.subject))
        if before is None and verdict.verdict in {Verdict.PASS, Verdict.NOT_APPLICABLE}:
            return None  # new, and nothing wrong with it
        judgement = _judgement_of(result, verdict)
        return Finding(
            check=verdict.check,
            subject=verdict.subject,
            before=before.verdict if before else None,
            after=verdict.verdict,
            tier_before=before.tier if before else None,
            tier_after=verdict.tier,
            expected=judgement.expected if judgement else "",
            observed=judgement.observed or judgement.reason if judgement else verdict.observed,
            time_s=result.taken_at_s,
            time_wall_s=result.taken_wall_s,
        )

    def _write(
        self, result: AuditResult, changed: Sequence[LastVerdict], gone: Sequence[Key]
    ) -> None:
        due = result.taken_at_s - self._summary_at_s >= SUMMARY_PERIOD_S
        if self._evidence is not None and (changed or gone or due):
            entries = [*_changes(result, changed), *_departures(gone), _summary(result)]
            try:
                self._evidence.append(entries)
                self._summary_at_s = result.taken_at_s
            except StoreError as exc:
                LOG.error("evidence_not_written", extra={"reason": str(exc)})  # noqa: TRY400
        if self._store is not None and (changed or gone):
            try:
                self._store.set_last_verdicts(changed, gone)
            except StoreError as exc:
                LOG.error("verdicts_not_kept", extra={"reason": str(exc)})  # noqa: TRY400


def chain_fact(evidence: EvidenceLog | None, whole: VerifyReport | None = None) -> Fact:
    """Return how the evidence chain stands.

    Args:
        evidence: The log; None: nothing is being recorded.
        whole: A verification of the entire chain, if there was one lately.
    """
    if evidence is None:
        return Fact(
            subject=NODE,
            name="evidence.chain",
            quality=Quality.NOT_SUPPORTED,
            reason="no evidence is being recorded",
        )
    report, method = whole, "whole chain verified"
    if report is None:
        method = "newest file verified; `alloy-agent evidence verify` looks at all"
        try:
            if evidence.newest_file.stat().st_size <= LOOKED_BYTES:
                report = verify(evidence.newest_file, evidence.public_key_pem, live=True)
            else:
                method = "last record verified when the log was opened"
        except (OSError, AlloyError) as exc:
            return Fact(
                subject=NODE,
                name="evidence.chain",
                quality=Quality.NOT_PERMITTED,
                reason=str(exc),
                method=method,
            )
    problems = report.problems if report else ()
    fact = ChainFact(
        records=evidence.head.sequence,
        problems=len(problems),
        first_problem=problems[0].text if problems else "",
        lost_records=evidence.lost_records,
    )
    return Fact(
        subject=NODE,
        name="evidence.chain",
        value=msgspec.to_builtins(fact),
        method=method,
        resolution="every record, by hash and signed head",
        read_at_s=clock.boottime_s(),
    )


def _verdicts(result: AuditResult) -> Iterator[LastVerdict]:
    for judgement in _judgements(result):
        yield LastVerdict(
            check=judgement.check,
            subject=judgement.subject,
            verdict=judgement.verdict,
            observed=judgement.observed,
            since_wall_s=result.taken_wall_s,
        )
    for report in result.partitions:
        yield LastVerdict(
            check=TIER,
            subject=report.partition.id,
            verdict=Verdict.UNKNOWN if report.tier is Tier.ADVISORY else Verdict.PASS,
            tier=report.tier,
            observed=report.reason,
            since_wall_s=result.taken_wall_s,
        )


def _judgements(result: AuditResult) -> Iterator[Judgement]:
    for report in result.partitions:
        yield from report.judgements
    yield from result.node_judgements


def _judgement_of(result: AuditResult, verdict: LastVerdict) -> Judgement | None:
    return next(
        (
            judgement
            for judgement in _judgements(result)
            if (judgement.check, judgement.subject) == (verdict.check, verdict.subject)
        ),
        None,
    )


def _differs(before: LastVerdict | None, after: LastVerdict) -> bool:
    return before is None or (before.verdict, before.tier) != (after.verdict, after.tier)


def _changes(result: AuditResult, changed: Iterable[LastVerdict]) -> Iterator[Entry]:
    reports = {report.partition.id: report for report in result.partitions}
    for verdict in changed:
        report = next((r for i, r in reports.items() if i == verdict.subject), None)
        if verdict.check == TIER and report is not None:
            yield _tier_entry(report)
            continue
        judgement = _judgement_of(result, verdict)
        if judgement is not None:
            yield _judgement_entry(judgement, report)


def _judgement_entry(judgement: Judgement, report: PartitionReport | None) -> Entry:
    partition = report.partition if report else None
    return Entry(
        kind="judgement",
        subject=judgement.subject,
        check=judgement.check,
        verdict=judgement.verdict.value,
        expected=judgement.expected,
        observed=judgement.observed,
        method=judgement.method,
        resolution=judgement.resolution,
        reason=judgement.reason,
        tenant=(partition.tenant or "") if partition else "",
        data={
            "generation": partition.generation if partition else None,
            "incarnation": partition.incarnation if partition else None,
            "simulated": report.simulated if report else None,
        },
    )


def _tier_entry(report: PartitionReport) -> Entry:
    return Entry(
        kind="tier",
        subject=report.partition.id,
        verdict=report.tier.value,
        reason=report.reason,
        tenant=report.partition.tenant or "",
        data={
            "generation": report.partition.generation,
            "simulated": report.simulated,
            "residual": tuple(report.residual),
        },
    )


def _departures(gone: Iterable[Key]) -> Iterator[Entry]:
    for check, subject in gone:
        if check == TIER:
            yield Entry(kind="tier", subject=subject, verdict="gone", reason="no longer there")


def _summary(result: AuditResult) -> Entry:
    verdicts = [judgement.verdict for judgement in _judgements(result)]
    tiers = [report.tier for report in result.partitions]
    content = msgspec.json.encode(
        [result.partitions, result.node_judgements], order="deterministic"
    )
    return Entry(
        kind="audit",
        subject=result.node,
        verdict=result.verdict.value,
        method=result.mode,
        data={
            "sequence": result.sequence,
            "digest": sha256(content).hexdigest(),
            **{f"verdict.{v.value}": verdicts.count(v) for v in Verdict},
            **{f"tier.{t.value}": tiers.count(t) for t in TIER_ORDER},
        },
    )
