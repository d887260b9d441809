"""One audit result as a page that an auditor can read: one file, nothing loaded, light and dark.

Every value is escaped: process names and tenants are chosen by others. There is no script in the
page, and its content security policy allows none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from alloy_agent.conformance.report.documents import time_of
from alloy_agent.conformance.report.history import Event
from alloy_agent.conformance.report.shares import shares_section
from alloy_agent.model import (
    TIER_ORDER,
    AuditResult,
    Device,
    Judgement,
    Partition,
    PartitionReport,
    ResidualClass,
    Tier,
    Verdict,
)

VERDICT_WORDS = {
    "pass": "pass",
    "fail": "fail",
    "unknown": "unknown",
    "not_applicable": "not applicable",
}
SUMMARY = {
    Verdict.PASS: "Every check that applies passes.",
    Verdict.FAIL: "At least one check fails.",
    Verdict.UNKNOWN: "Nothing fails, but something could not be proved.",
    Verdict.NOT_APPLICABLE: "No check applies.",
}
TIER_TEXT = {
    Tier.HARD: "memory, compute and faults are separated by the device",
    Tier.ENFORCED: "a kernel or driver limit that the tenant cannot raise",
    Tier.SOFT: "best effort, verified from outside where the kernel allows",
    Tier.ADVISORY: "nothing is proved to be in force",
}
CSP = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(result: AuditResult, history: Sequence[Event] = ()) -> str:
    """Return the page.

    Args:
        result: What to show.
        history: Changes from the evidence chain, newest first.
    """
    body = "\n".join(
        [
            _header(result),
            _summary(result),
            _partitions(result),
            shares_section(result.shares),
            _node(result),
            _residual(result.residual_classes),
            _history(history),
            _how_to_verify(result),
        ]
    )
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Isolation audit of {_e(result.node)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _e(value: object) -> str:
    return escape(str(value), quote=True)


def _badge(word: str, text: str | None = None) -> str:
    shown = text or VERDICT_WORDS.get(word, word)
    return f'<span class="badge {_e(word)}">{_e(shown)}</span>'


def _header(result: AuditResult) -> str:
    head = (
        f"record {result.evidence_sequence}, <code>{_e(result.evidence_hash)}</code>"
        if result.evidence_sequence is not None
        else "nothing was recorded"
    )
    return (
        f"<header><h1>Isolation audit of {_e(result.node)}</h1>"
        f'<p class="verdict">{_badge(result.verdict.value)} {_e(SUMMARY[result.verdict])}</p>'
        "<dl>"
        f"<dt>Taken</dt><dd>{_e(time_of(result.taken_wall_s))}, "
        f"{_e(_mode(result))}, snapshot {result.sequence}</dd>"
        f"<dt>Boot</dt><dd><code>{_e(result.boot_id)}</code></dd>"
        f"<dt>Agent</dt><dd>{_e(result.agent_version)}</dd>"
        f"<dt>Evidence</dt><dd>{head}</dd>"
        "</dl></header>"
    )


def _mode(result: AuditResult) -> str:
    words = {
        "once": "one look",
        "events": "continuously, driven by kernel events",
        "polling": "continuously, by polling (no process events on this host)",
    }
    return words[result.mode]


def _summary(result: AuditResult) -> str:
    counts = "".join(
        f"<li>{_badge(tier.value)} {sum(r.tier is tier for r in result.partitions)} "
        f"<small>{_e(TIER_TEXT[tier])}</small></li>"
        for tier in TIER_ORDER
    )
    simulated = any(report.simulated for report in result.partitions)
    note = (
        '<p class="note">Some devices are simulated. What is said of them is true of a simulation '
        "and proves nothing about hardware.</p>"
        if simulated
        else ""
    )
    rows = "".join(_summary_row(report) for report in result.partitions)
    table = (
        '<div class="wide"><table class="summary"><thead><tr><th>Partition</th><th>Tenant</th>'
        f"<th>Tier</th><th>Why not better</th></tr></thead><tbody>{rows}</tbody></table></div>"
        if rows
        else "<p>There are no partitions on this node.</p>"
    )
    return (
        f"<section><h2>Summary</h2>{note}"
        f'<ul class="tiers">{counts}</ul>{table}'
        "<p>A tier is computed from what was observed, never declared: it is the highest one whose "
        "required checks all pass now, within what this kind of piece can reach.</p></section>"
    )


def _summary_row(report: PartitionReport) -> str:
    partition = report.partition
    return (
        f'<tr><td><a href="#{_anchor(partition.id)}"><code>{_e(partition.id)}</code></a></td>'
        f"<td>{_e(partition.tenant or '—')}</td><td>{_badge(report.tier.value)}</td>"
        f"<td>{_e(report.reason)}</td></tr>"
    )


def _anchor(ident: str) -> str:
    return "p-" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}" for c in ident)


def _partitions(result: AuditResult) -> str:
    devices = {device.id: device for device in result.devices}
    return "\n".join(_partition(r, devices.get(r.partition.device)) for r in result.partitions)


def _partition(report: PartitionReport, device: Device | None) -> str:
    partition = report.partition
    model = f"{device.model} ({device.vendor.value})" if device else partition.device
    marks = _badge("simulated") if report.simulated else ""
    origin = "made by this agent" if partition.managed else "made by others"
    residual = ", ".join(
        f'<a href="#{_anchor(ident)}">{_e(ident)}</a>' for ident in report.residual
    )
    return (
        f'<section id="{_anchor(partition.id)}"><h2><code>{_e(partition.id)}</code> '
        f"{_badge(report.tier.value)} {marks}</h2>"
        f"<p><strong>{_e(report.tier.value)}</strong>: {_e(report.reason)}.</p>"
        f'<p class="meta">{_e(model)} · {_e(partition.profile)} · '
        f"{_place(partition)} · "
        f"generation {partition.generation} · "
        f"tenant {_e(partition.tenant or 'none')} · {origin}</p>"
        f"{_judgements(report.judgements)}"
        f"<p>Still open at this tier: {residual or 'none listed'}.</p></section>"
    )


def _place(partition: Partition) -> str:
    first, last = partition.placement.start, partition.placement.stop - 1
    return f"slice {first}" if first == last else f"slices {first} to {last}"


def _judgements(judgements: Iterable[Judgement]) -> str:
    order = {Verdict.FAIL: 0, Verdict.UNKNOWN: 1, Verdict.PASS: 2, Verdict.NOT_APPLICABLE: 3}
    rows = "".join(
        _judgement(judgement)
        for judgement in sorted(judgements, key=lambda j: (order[j.verdict], j.check, j.subject))
    )
    return (
        '<div class="wide"><table class="checks"><thead><tr><th>Check</th><th>Claim</th>'
        "<th>Expected</th><th>Observed</th><th>How it looked</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _judgement(judgement: Judgement) -> str:
    reason = f'<p class="reason">{_e(judgement.reason)}</p>' if judgement.reason else ""
    return (
        f"<tr><td>{_e(judgement.check)}<br>{_badge(judgement.verdict.value)}</td>"
        f"<td>{_e(judgement.claim)}</td><td>{_e(judgement.expected or '—')}</td>"
        f"<td>{_e(judgement.observed or '—')}{reason}</td>"
        f"<td><small>{_e(judgement.method)}<br>{_e(judgement.resolution)}</small></td></tr>"
    )


def _node(result: AuditResult) -> str:
    if not result.node_judgements:
        return ""
    rows = "".join(_node_row(judgement) for judgement in result.node_judgements)
    return (
        '<section><h2>Node and devices</h2><div class="wide"><table class="checks"><thead><tr>'
        "<th>Check</th><th>Subject and claim</th><th>Expected</th><th>Observed</th>"
        f"<th>How it looked</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _node_row(judgement: Judgement) -> str:
    reason = f'<p class="reason">{_e(judgement.reason)}</p>' if judgement.reason else ""
    return (
        f"<tr><td>{_e(judgement.check)}<br>{_badge(judgement.verdict.value)}</td>"
        f"<td><code>{_e(judgement.subject)}</code><br>{_e(judgement.claim)}</td>"
        f"<td>{_e(judgement.expected or '—')}</td><td>{_e(judgement.observed or '—')}{reason}</td>"
        f"<td><small>{_e(judgement.method)}<br>{_e(judgement.resolution)}</small></td></tr>"
    )


def _residual(classes: Sequence[ResidualClass]) -> str:
    if not classes:
        return ""
    items = "".join(
        f'<dt id="{_anchor(c.id)}">{_e(c.id)} · {_e(c.name)}</dt><dd>{_e(c.text)} '
        f"<small>Source: {_e(c.source)}</small></dd>"
        for c in classes
    )
    return (
        "<section><h2>What stays open</h2><p>Partitioning for quality of service is not isolation "
        "for security. These attack and interference classes are known and are not closed by the "
        "tiers above, even where every check passes.</p>"
        f'<dl class="residual">{items}</dl></section>'
    )


def _history(history: Sequence[Event]) -> str:
    if not history:
        return (
            "<section><h2>History</h2><p>No history was given to this report; the evidence files "
            "hold it.</p></section>"
        )
    rows = "".join(_event(event) for event in history)
    return (
        '<section><h2>History</h2><div class="wide"><table><thead><tr><th>Record</th><th>Time</th>'
        f"<th>What</th><th>Verdict</th><th>Text</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def _event(event: Event) -> str:
    what = " ".join(_what(event))
    return (
        f"<tr><td>{event.sequence}</td><td>{_e(time_of(event.wall_s))}</td><td>{what}</td>"
        f"<td>{_badge(event.verdict) if event.verdict else ''}</td><td>{_e(event.text)}</td></tr>"
    )


def _what(event: Event) -> Iterator[str]:
    yield _e(event.check or event.kind)
    if event.subject:
        yield f"<code>{_e(event.subject)}</code>"


def _how_to_verify(result: AuditResult) -> str:
    head = (
        f" --head {result.evidence_sequence}:{_e(result.evidence_hash)}"
        if result.evidence_sequence is not None
        else ""
    )
    return (
        "<section><h2>How to verify this</h2><p>The verdicts above are in the node's evidence "
        "chain: plain text, hashed record by record, with signed heads. Copy the evidence folder "
        "and the node's public key (<code>keys/evidence.pub.pem</code>) to any machine, where no "
        "agent needs to run, and check both, and that the chain reaches the record named "
        "here:</p>"
        f"<pre>alloy-agent evidence verify evidence/ --public-key evidence.pub.pem{head}</pre>"
        "<p>The command names each changed, missing, reordered or truncated record; it exits "
        "with 1 if there is any. This page itself is not signed; the DSSE envelope of an audit "
        "(<code>alloy-agent audit --dsse</code>) is.</p></section>"
    )
