"""`alloy-agent usage`: what tenants had and used, from the journal in the state directory.

It reads files alone, so that it works beside a daemon and without one.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.cli.output import Column
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.telemetry.metering import UsageRow

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("usage", help="show what tenants had and used")
    parser.add_argument("--from", dest="since", metavar="TIME", help="2026-11-30, ...T14:00Z, 24h")
    parser.add_argument("--to", dest="until", metavar="TIME", help="the same; not included")
    parser.add_argument("--format", choices=("table", "json", "focus"), default="table")
    parser.add_argument("--tenant", metavar="NAME", help="only of one tenant")
    parser.add_argument("--closed", action="store_true", help="leave out what still goes on")
    parser.set_defaults(run=run)


def time_of(text: str, option: str, now_s: float) -> float:
    """Return a time in seconds since the epoch: ISO 8601 (UTC if it names no zone), or "24h" ago.

    Raises:
        ConfigError: It is neither.
    """
    ago = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    if ago is not None:
        return now_s - float(ago[1]) * UNITS[ago[2]]
    from datetime import UTC, datetime

    try:
        found = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(
            f"{option} {text}: no time", cure="write 2026-11-30, 2026-11-30T14:00Z or 24h (ago)"
        ) from exc
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def run(arguments: Namespace) -> int:
    """Print the usage of a span of time."""
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.telemetry import export, journal, metering

    now_s = time.time()
    since_s = time_of(arguments.since, "--from", now_s) if arguments.since else 0.0
    until_s = time_of(arguments.until, "--to", now_s) if arguments.until else float("inf")
    if since_s >= until_s:
        raise ConfigError(
            f"--from {arguments.since} --to {arguments.until}: an empty span",
            cure="let --from be before --to",
        )
    settings = settings_of(arguments)
    found = journal.read(settings.state_dir)
    rows = list(found.rows)
    if not arguments.closed:
        rows += [metering.row_of(a, final=False) for a in found.open if a.partition or a.energy_j]
    chosen = export.within(rows, since_s, until_s)
    if arguments.tenant is not None:
        chosen = [row for row in chosen if row.partition and row.tenant == arguments.tenant]
    if found.broken:
        output.note(f"{found.broken} lines of the journal are damaged and left out")
    if arguments.format == "focus":
        for text in export.focus(chosen, settings.node_name):
            output.write(text)
    elif arguments.format == "json":
        import msgspec

        for row in chosen:
            output.write(msgspec.json.encode(export.line(row, settings.node_name)).decode())
    else:
        show(chosen)
    return 0


def show(rows: list[UsageRow]) -> None:
    """Print a table for people, with sums by tenant and what limits the figures."""
    from alloy_agent.telemetry.export import LIMITS

    if not rows:
        output.write("no usage in this span: nobody had a partition, or no daemon ran")
        return
    columns = (
        Column("FROM"),
        Column("TENANT", flexible=True),
        Column("PARTITION", flexible=True),
        Column("HAD", right=True),
        Column("ACTIVE", right=True),
        Column("IDLE", right=True),
        Column("UNSEEN", right=True),
        Column("ENERGY", right=True),
    )
    output.table(columns, [_cells(row) for row in rows])
    output.write("")
    for tenant, (had, active, unseen) in sorted(_sums(rows).items()):
        line = f"{tenant}: had {_span(had)}, active {_span(active)}, unobserved {_span(unseen)}"
        output.paragraph(line, "  ")
    for limit in LIMITS:
        output.paragraph(f"note: {limit}", "  ")


def _cells(row: UsageRow) -> tuple[str, ...]:
    begun = time.strftime("%m-%d %H:%M", time.gmtime(row.start_wall_s))
    energy = "-" if row.energy_j is None else f"~{row.energy_j / 3600:.3g} Wh"
    if not row.partition:
        return begun, "(nobody)", row.device, "-", "-", "-", "-", energy.lstrip("~")
    name = f"{row.partition}#{row.generation}"
    spans = (row.allocated_ns, row.active_ns, row.idle_ns, row.unobserved_ns)
    going = "" if row.final else "+"
    had, *others = (_span(ns) for ns in spans)
    return (begun, row.tenant, name, had + going, *others, energy)


def _span(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.4g} h"


def _sums(rows: list[UsageRow]) -> dict[str, tuple[int, int, int]]:
    sums: dict[str, tuple[int, int, int]] = {}
    for row in rows:
        if row.partition:
            had, active, unseen = sums.get(row.tenant, (0, 0, 0))
            sums[row.tenant] = (
                had + row.allocated_ns,
                active + row.active_ns,
                unseen + row.unobserved_ns,
            )
    return sums
