"""The report of the demo: one file with inline charts, nothing loaded, no script."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloy_agent.cli.demo.story import Told

CSP = "default-src 'none'; style-src 'unsafe-inline'"
COLOURS = ("#2f6fde", "#c2571a", "#1b8a5a", "#8b4bc0", "#a8820b")
TIERS = {"hard": "#1b8a5a", "enforced": "#2f6fde", "soft": "#c2871a", "advisory": "#8b8f98"}
CSS = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d8dce3; --bg: #fff;
  --ok: #15734a; --bad: #b3261e; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #9aa3b2; --line: #343b47;
  --bg: #14181f; --ok: #5cc596; --bad: #ff8a80; --card: #1c222b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.2rem 4rem; background: var(--bg);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p.lead { color: var(--soft); margin: 0 0 1rem; }
.cards { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; } .card b { display: block; font-size: 1.5rem; }
.card span { color: var(--soft); font-size: .85rem; }
ul.claims { list-style: none; padding: 0; margin: 0; }
ul.claims li { border-top: 1px solid var(--line); padding: .45rem 0; overflow-wrap: anywhere; }
ul.claims small { color: var(--soft); display: block; }
.ok { color: var(--ok); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.chart { overflow-x: auto; } svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .mute { fill: var(--soft); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; } th { color: var(--soft); font-weight: 500; }
td:first-child, th:first-child { min-width: 5rem; }
.scroll { overflow-x: auto; }
"""


def to_html(told: Told) -> str:
    """Return the page."""
    held = sum(claim.holds for claim in told.claims)
    verdict = "Every claim holds." if told.holds else "A claim does not hold."
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told.began_wall_s))
    body = "\n".join(
        [
            "<h1>Alloy, from partition to proof</h1>",
            f'<p class="lead">{when}, {told.took_s:.1f} s. Simulated accelerators, real agents, '
            f"brain, leases and evidence. {verdict}</p>",
            _cards(told, held),
            *_claims(told),
            _section("How much of each node is lent", _lines(told)),
            _section("How long a placement took", _bars(told.place_ms)),
            _section("What isolation was proved", _tiers(told)),
            _section("Why the race went as it did", _decision(told)),
            _section("Evidence", _evidence(told)),
            *(f"<p>{escape(note)}</p>" for note in told.notes),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Alloy demo</title><style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _cards(told: Told, held: int) -> str:
    pieces = sum(sum(node["kinds"].values()) for node in told.nodes)
    records = sum(records for _, records, _, _ in told.evidence)
    middle = sorted(told.place_ms)[len(told.place_ms) // 2] if told.place_ms else 0.0
    cards = (
        (f"{held}/{len(told.claims)}", "claims hold"),
        (str(len(told.nodes)), "nodes"),
        (str(pieces), "partitions, each audited"),
        (f"{middle:.1f} ms", "median placement"),
        (f"{records:,}", "evidence records verified"),
    )
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{a}</b><span>{b}</span></div>' for a, b in cards)
        + "</div>"
    )


def _claims(told: Told) -> Iterator[str]:
    """Yield the claims, a section for each chapter."""
    for chapter in dict.fromkeys(claim.chapter for claim in told.claims):
        rows = "".join(
            f'<li><span class="{"ok" if c.holds else "bad"}">{"holds" if c.holds else "does not"}'
            f"</span> {escape(c.text)}<small>{escape(c.seen)}</small></li>"
            for c in told.claims
            if c.chapter == chapter
        )
        yield _section(chapter, f'<ul class="claims">{rows}</ul>')


def _svg(width: int, height: int, inner: str, label: str) -> str:
    return (
        f'<div class="chart"><svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(label)}">{inner}</svg></div>'
    )


def _lines(told: Told) -> str:
    """Return the share of pieces that is lent, a step line for each node."""
    if not told.used:
        return "<p>Nothing was lent.</p>"
    last_s = max(1.0, told.used[-1][0])
    names = sorted({name for _, shares in told.used for name in shares})
    parts = []
    for tick in range(5):
        line = 20 + tick * 45
        parts.append(f'<line class="axis" x1="50" y1="{line}" x2="660" y2="{line}"/>')
        parts.append(f'<text class="mute" x="8" y="{line + 4}">{100 - 25 * tick} %</text>')
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        points, before = [], 200.0
        for when_s, shares in told.used:
            x, y = 50 + 610 * when_s / last_s, 200 - 180 * shares.get(name, 0.0)
            points += [f"{x:.1f},{before:.1f}", f"{x:.1f},{y:.1f}"]
            before = y
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2.5" '
            f'points="{" ".join(points)}"/>'
        )
        parts.append(
            f'<rect x="{50 + 150 * number}" y="232" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(f'<text x="{68 + 150 * number}" y="243">{escape(name)}</text>')
    for second in range(0, int(last_s) + 1, max(1, int(last_s) // 6)):
        x = 50 + 610 * second / last_s
        parts.append(f'<text class="mute" x="{x:.0f}" y="218">{second} s</text>')
    return _svg(680, 250, "".join(parts), "share of partitions that is leased, by node, over time")


def _bars(samples: Sequence[float]) -> str:
    """Return a histogram of milliseconds."""
    if not samples:
        return "<p>Nothing was placed.</p>"
    top = max(5.0, *samples)
    counts = [0] * 24
    for sample in samples:
        counts[min(23, int(24 * sample / top))] += 1
    highest = max(counts)
    bars = "".join(
        f'<rect x="{50 + 25 * n}" y="{150 - 120 * c / highest:.1f}" width="22" '
        f'height="{120 * c / highest:.1f}" fill="{COLOURS[0]}"/>'
        for n, c in enumerate(counts)
    )
    axis = '<line class="axis" x1="50" y1="150" x2="650" y2="150"/>' + "".join(
        f'<text class="mute" x="{50 + 150 * n}" y="168">{top * n / 4:.1f} ms</text>'
        for n in range(5)
    )
    return _svg(720, 175, bars + axis, "how long placements took")


def _tiers(told: Told) -> str:
    """Return a bar for each node, its partitions by tier, and what changed."""
    parts = []
    for number, node in enumerate(told.nodes):
        total = sum(node["tiers"].values())
        x, y = 150.0, 10 + 34 * number
        parts.append(f'<text x="0" y="{y + 16}">{escape(node["node"])}</text>')
        for tier, colour in TIERS.items():
            count = node["tiers"].get(tier, 0)
            width = 500 * count / max(1, total)
            if count:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{colour}"/>'
                    f'<text x="{x + 6:.1f}" y="{y + 16}" style="fill:#fff">{count} {tier}</text>'
                )
            x += width
    chart = _svg(660, 16 + 34 * len(told.nodes), "".join(parts), "tiers of partitions by node")
    rows = [
        (f"{when_s:.1f} s", where, f"{before} to {after}", why)
        for when_s, where, before, after, why in told.tiers
    ]
    shut = [(device, state, why) for device, state, why in told.gates if state != "open"]
    return (
        chart
        + _table(("when", "partition", "tier", "why"), rows)
        + _table(("device", "health gate", "why"), sorted(set(shut)))
    )


def _decision(told: Told) -> str:
    """Return the decision record of the race: the candidates that were nearest, and the gates."""
    if not told.decision:
        return "<p>There was no race.</p>"
    rows = []
    ranked = sorted(
        told.decision["candidates"], key=lambda c: (not c["chosen"], not c["open"], c["node"])
    )
    for one in ranked[:12]:
        shut = "; ".join(
            f"{g['gate']}: {g['reason']}" for g in one["gates"] if g["state"] != "open"
        )
        state = "chosen" if one["chosen"] else "open" if one["open"] else "out"
        rows.append((one["node"], f"{one['device']}/{one['profile']}", state, shut))
    race = told.race
    lead = (
        f"<p>{escape(race['winner'])} won. {escape(race['loser'])} was told: "
        f"{escape(race['why'])}</p>"
    )
    more = len(ranked) - len(rows)
    tail = f"<p>and {more} more candidates in the record</p>" if more > 0 else ""
    return lead + _table(("node", "candidate", "verdict", "gates that are not open"), rows) + tail


def _evidence(told: Told) -> str:
    rows = [
        (node, f"{records:,}", str(heads), "verified" if ok else "NOT verified")
        for node, records, heads, ok in told.evidence
    ]
    return _table(("node", "records", "signed heads", "verdict"), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
