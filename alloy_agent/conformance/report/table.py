"""One audit result for a terminal: at most 100 columns, coloured only where somebody looks.

Long device ids are cut short as far as they stay unique; `exec` takes them as they are shown. What
fails in the same way in several places is told once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from alloy_agent.conformance.checks.tiers import BEST
from alloy_agent.conformance.report.documents import all_judgements, time_of
from alloy_agent.model import AuditResult, Judgement, PartitionReport, Tier, Verdict
from alloy_agent.planner.names import short_names, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100
COLOURS = {
    "pass": "green",
    "fail": "bold red",
    "unknown": "yellow",
    "not_applicable": "dim",
    "hard": "green",
    "enforced": "cyan",
    "soft": "yellow",
    "advisory": "magenta",
}
WORDS = {Verdict.NOT_APPLICABLE: "n/a"}
SUBJECTS_SHOWN = 6


def to_table(result: AuditResult, *, colour: bool | None = None, width: int = WIDTH) -> str:
    """Return the result as text: partitions with their tiers, then all that does not pass.

    Args:
        result: What to show.
        colour: Whether to colour; None: if standard output is a terminal.
        width: Columns, at most 100.
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(
        file=stream,
        width=min(width, WIDTH),
        force_terminal=sys.stdout.isatty() if colour is None else colour,
        color_system="standard" if (sys.stdout.isatty() if colour is None else colour) else None,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    _head(console, result)
    names = short_names(device.id for device in result.devices)
    if result.partitions:
        _partitions(console, result.partitions, names)
    else:
        console.print("no partitions")
    _problems(console, result, names)
    _passes(console, result)
    _residual(console, result)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _styled(word: str, key: str | None = None) -> Text:
    from rich.text import Text

    return Text(_safe(word), style=COLOURS.get(key or word, ""))


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(_safe(text))


def _safe(text: str) -> str:
    """Return the text without characters that would steer a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _head(console: Console, result: AuditResult) -> None:
    from rich.text import Text

    line = Text.assemble(
        _safe(f"audit of {result.node}: "),
        _styled(result.verdict.value.upper(), result.verdict.value),
    )
    line.append(f"  {time_of(result.taken_wall_s)}  {result.mode}")
    console.print(line)
    if result.evidence_sequence is not None:  # in full: `evidence verify --head` takes no less
        console.print(f"head {result.evidence_sequence}:{result.evidence_hash}", soft_wrap=True)


def _partitions(
    console: Console, reports: Iterable[PartitionReport], names: dict[str, str]
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    table.add_column("partition", overflow="fold", max_width=38)
    table.add_column("tenant", overflow="fold", max_width=14)
    table.add_column("tier", no_wrap=True)
    table.add_column("why not better", overflow="fold")
    for report in reports:
        name = shortened(report.partition.id, names)
        name += " (simulated)" if report.simulated else ""
        table.add_row(
            _plain(name),
            _plain(report.partition.tenant or "-"),
            _styled(report.tier.value),
            _plain(shortened(report.reason.removeprefix(BEST), names)),
        )
    console.print(table)


def _problems(console: Console, result: AuditResult, names: dict[str, str]) -> None:
    from rich.text import Text

    alike: dict[tuple[object, ...], list[Judgement]] = {}
    for judgement, _ in all_judgements(result):
        if judgement.verdict in {Verdict.FAIL, Verdict.UNKNOWN}:
            key = (judgement.check, judgement.claim, judgement.verdict, *_details(judgement))
            alike.setdefault(key, []).append(judgement)
    groups = sorted(alike.values(), key=lambda g: (g[0].verdict is not Verdict.FAIL, g[0].check))
    for group in groups:
        first = group[0]
        subjects = [shortened(judgement.subject, names) for judgement in group]
        head = Text.assemble(
            _styled(first.verdict.value.upper(), first.verdict.value),
            _safe(f" {first.check} {_several(subjects)}: {first.claim}"),
        )
        console.print()
        console.print(head)
        for label, text in _details(first):
            console.print(_plain(f"  {label:<9} {shortened(text, names)}"))


def _several(subjects: list[str]) -> str:
    more = len(subjects) - SUBJECTS_SHOWN
    shown = ", ".join(subjects[:SUBJECTS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _details(judgement: Judgement) -> list[tuple[str, str]]:
    details = [
        ("expected", judgement.expected),
        ("observed", judgement.observed),
        ("because", judgement.reason),
        ("method", judgement.method),
    ]
    return [(label, text) for label, text in details if text]


def _passes(console: Console, result: AuditResult) -> None:
    from rich.text import Text

    counts = dict.fromkeys(Verdict, 0)
    for judgement, _ in all_judgements(result):
        counts[judgement.verdict] += 1
    line = Text("\nverdicts: ")
    words = [f"{counts[v]} {WORDS.get(v, v.value)}" for v in Verdict]
    line.append(", ".join(words))
    # These alone keep an audit from passing, even where no verdict is a fail or unknown.
    unproved = sum(report.tier is Tier.ADVISORY for report in result.partitions)
    if unproved:
        noun = "partition" if unproved == 1 else "partitions"
        line.append(f"; {unproved} {noun} with nothing proved (advisory)")
    console.print(line)


def _residual(console: Console, result: AuditResult) -> None:
    if not result.residual_classes:
        return
    names = ", ".join(f"{c.id} ({c.name})" for c in result.residual_classes)
    console.print(_plain(f"still open, whatever passes: {names}"))
    console.print(_plain("partitioning for quality of service is not isolation for security"))
