"""`alloy-agent plan`: the ordered steps from what is to what a layout wants; changes nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.cli.output import Column

if TYPE_CHECKING:
    from alloy_agent.daemon.documents import PlanDocument


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("plan", help="show the steps to a layout; change nothing")
    add_file(parser)
    parser.add_argument("--layout", metavar="NAME", help="which layout of the file")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if there are steps")
    parser.set_defaults(run=run)


def add_file(parser: ArgumentParser) -> None:
    """Add the argument that names a layout; `-` is standard input, as other commands have it."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=lambda text: "/dev/stdin" if text == "-" else text,
        help="layout file, mig-parted file, or - for standard input",
    )


def run(arguments: Namespace) -> int:
    """Print the plan."""
    from alloy_agent.cli.sources import open_node, read_layout_text
    from alloy_agent.daemon.api import LayoutRequest

    text = read_layout_text(arguments.file)
    request = LayoutRequest(text=text, file=arguments.file, layout=arguments.layout)
    with open_node(arguments) as node:
        document = node.plan(request)
    if arguments.json:
        output.write_json(document)
    else:
        show(document)
    return 1 if arguments.exit_code and document.steps else 0


def show(document: PlanDocument) -> None:
    """Print a plan for people."""
    from alloy_agent.planner.names import short_names, shortened

    names = short_names(_devices(document))
    if not document.steps:
        output.write(f"layout {document.layout}: nothing to do")
    else:
        columns = (
            Column("#", right=True),
            Column("STEP", flexible=True),
            Column("INTERRUPTS", flexible=True),
            Column("UNDO"),
        )
        rows = [
            (
                str(step.number),
                shortened(step.text, names),
                shortened(
                    "; ".join(f"{i.scope} {i.subject}: {i.why}" for i in step.interrupts), names
                )
                or "-",
                "yes" if step.reversible else "no",
            )
            for step in document.steps
        ]
        output.table(columns, rows)
        output.write(summary(document))
    for line in document.notes:
        output.paragraph(f"note: {shortened(line, names)}", "  ")


def _devices(document: PlanDocument) -> set[str]:
    """Return the devices that a plan speaks of."""
    pieces = (*document.kept, *document.expected)
    return {step.device for step in document.steps} | {p.rpartition("/")[0] for p in pieces}


def summary(document: PlanDocument) -> str:
    """Return one line: how many steps, what is kept, destroyed and interrupted."""
    cost = document.cost
    return (
        f"layout {document.layout}: {count(len(document.steps), 'step')}, "
        f"keeps {count(len(document.kept), 'partition')}, destroys {cost.destroyed}, "
        f"interrupts {count(cost.interrupted_devices, 'device')}"
    )


def count(number: int, noun: str) -> str:
    """Return "1 step" or "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
