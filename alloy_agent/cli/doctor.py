"""`alloy-agent doctor`: what this host lacks, each with the cure."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.cli.output import Column

if TYPE_CHECKING:
    from alloy_agent.daemon.documents import DoctorDocument


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="say what this host lacks, with the cure")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Print every diagnosis; exit with 1 if something required is missing."""
    from alloy_agent.cli.sources import open_node

    with open_node(arguments) as node:
        document = node.doctor()
    if arguments.json:
        output.write_json(document)
    else:
        show(document)
    return 0 if document.ok else 1


def show(document: DoctorDocument) -> None:
    """Print the diagnoses for people."""
    columns = (
        Column("SUBJECT", flexible=True),
        Column("STATE"),
        Column("FOUND", flexible=True),
        Column("CURE", flexible=True),
    )
    rows = [
        (d.subject, _state(d.ok, d.required), d.found, "-" if d.ok else d.cure or "-")
        for d in document.diagnoses
    ]
    output.table(columns, rows)
    output.write("this host is ready" if document.ok else "something required is missing")


def _state(ok: bool, required: bool) -> str:
    if ok:
        return "ok"
    return "missing" if required else "limited"
