"""`alloy-agent audit`: every check once, or continuously; exits 0 pass, 1 a fail, 3 an unknown."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output

if TYPE_CHECKING:
    from alloy_agent.daemon.api import NodeApi
    from alloy_agent.model import AuditResult

WATCH_PERIOD_S = 1.0


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("audit", help="prove what isolation is in force now")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.add_argument("--html", metavar="PATH", help="write a page that needs nothing else")
    parser.add_argument("--sarif", metavar="PATH", help="write findings as SARIF")
    parser.add_argument("--dsse", metavar="PATH", help="write a signed in-toto statement")
    parser.add_argument("--watch", action="store_true", help="go on, and print what changes")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Audit, write the reports asked for, print the result."""
    from alloy_agent.cli.sources import open_node

    with open_node(arguments, write=True, lenient=True) as node:
        result = node.audit()
        write_reports(result, arguments)
        show(result, arguments)
        if arguments.watch:
            return watch(node, result, arguments)
    from alloy_agent.conformance.auditor import exit_code

    return exit_code(result.verdict)


def write_reports(result: AuditResult, arguments: Namespace) -> None:
    """Write the report files that were asked for."""
    if not (arguments.html or arguments.sarif or arguments.dsse):
        return  # reading the settings again costs more than a check of a whole device
    from pathlib import Path

    from alloy_agent.cli.sources import settings_of, write_file
    from alloy_agent.conformance import report

    state = Path(settings_of(arguments).state_dir)
    if arguments.html:
        history = report.history_of(state / "evidence")
        write_file(arguments.html, report.to_html(result, history))
    if arguments.sarif:
        write_file(arguments.sarif, report.to_sarif(result))
    if arguments.dsse:
        from alloy_agent.conformance.evidence import SigningKey

        key = SigningKey.load_or_create(state / "keys")
        write_file(arguments.dsse, report.to_dsse(result, key))


def show(result: AuditResult, arguments: Namespace) -> None:
    """Print one result."""
    from alloy_agent.conformance import report

    if arguments.json:
        output.write(report.to_json(result))
    else:
        coloured = output.is_coloured()
        output.write(report.to_table(result, colour=coloured, width=output.width()))


def watch(node: NodeApi, result: AuditResult, arguments: Namespace) -> int:
    """Print a new result whenever a verdict or a tier changes, until interrupted."""
    from alloy_agent.daemon.documents import verdicts_of

    last = verdicts_of(result)
    while True:
        output.flush()
        time.sleep(WATCH_PERIOD_S)
        result = node.audit()
        now = verdicts_of(result)
        if now == last:
            continue
        if arguments.json:
            show(result, arguments)
        else:
            for key in sorted(now.keys() | last.keys()):
                before, after = last.get(key, "-"), now.get(key, "gone")
                if before != after:
                    output.write(
                        f"{time.strftime('%H:%M:%S')} {key[0]} {key[1]}: {before} -> {after}"
                    )
        last = now
