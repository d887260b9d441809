"""`alloy-agent apply`: makes a layout so, with the consent of whoever it interrupts."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output, plan
from alloy_agent.errors import ApplyError, ConfigError

if TYPE_CHECKING:
    from alloy_agent.daemon.documents import ApplyDocument, PlanDocument


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("apply", help="make a layout so; verify it; roll back on failure")
    plan.add_file(parser)
    parser.add_argument("--layout", metavar="NAME", help="which layout of the file")
    parser.add_argument("--yes", action="store_true", help="do not ask before interrupting anyone")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.add_argument(
        "--disruptive", action="store_true", help="allow steps that interrupt a hive or the node"
    )
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Plan, ask where somebody is interrupted, apply exactly that plan, print what came of it."""
    from alloy_agent.cli.sources import open_node, read_layout_text, require_root
    from alloy_agent.daemon.api import LayoutRequest
    from alloy_agent.daemon.documents import interrupted

    text = read_layout_text(arguments.file)
    require_root("apply")
    request = LayoutRequest(text=text, file=arguments.file, layout=arguments.layout)
    with open_node(arguments, write=True) as node:
        earlier = node.recover()  # first, since it changes what there is to plan from
        if earlier is not None:
            output.note(f"an apply of layout {earlier.layout} was cut off: now {earlier.outcome}")
        planned = node.plan(request)
        consent(planned, arguments)
        agreed = LayoutRequest(
            text=text,
            file=arguments.file,
            layout=arguments.layout,
            expected=planned.expected,
            consent=tuple(dict.fromkeys(i.scope for i in interrupted(planned.steps))),
        )
        with output.progress(f"applying {planned.layout}") as on_progress:
            document = node.apply(agreed, on_progress)
    if arguments.json:
        output.write_json(document)
    else:
        show(document)
    return _exit_code(document)


def _exit_code(document: ApplyDocument) -> int:
    if document.reached:
        return 0
    report = document.report
    raise ApplyError(report.error or f"layout {report.layout}: {report.outcome}")


def consent(planned: PlanDocument, arguments: Namespace) -> None:
    """Return if the plan interrupts nobody, or whoever runs it agrees.

    Raises:
        ConfigError: It reaches a hive or the node without `--disruptive`; or it interrupts somebody
            and nobody said yes.
    """
    from alloy_agent.cli.sources import is_piped
    from alloy_agent.daemon.documents import disruptive, interrupted

    wide = disruptive(planned.steps)
    if wide and not arguments.disruptive:
        reach = next(i for s in wide for i in s.interrupts if i.scope in ("hive", "node"))
        raise ConfigError(
            f"layout {planned.layout}: step {wide[0].number} ({wide[0].text}) interrupts "
            f"{reach.scope} {reach.subject}: {reach.why}",
            cure="allow it with --disruptive",
        )
    hit = interrupted(planned.steps)
    if not hit or arguments.yes:
        return
    names = ", ".join(f"{i.scope} {i.subject}" for i in hit[:3])
    more = f" and {len(hit) - 3} more" if len(hit) > 3 else ""
    if is_piped() or arguments.json:
        raise ConfigError(
            f"layout {planned.layout}: interrupts {names}{more}, and no terminal is here to ask",
            cure="look at it with 'alloy-agent plan', then repeat with --yes",
        )
    plan.show(planned)
    if not output.ask(f"This interrupts {names}{more}. Apply?"):
        raise ConfigError(f"layout {planned.layout}: not applied, as answered", cure="")


def show(document: ApplyDocument) -> None:
    """Print what was done, for people."""
    report = document.report
    if report.outcome == "unchanged":
        output.write(f"layout {report.layout}: already so, nothing done")
    elif document.reached:
        done = sum(step.state == "done" for step in report.steps)
        steps = plan.count(done, "step")
        output.write(f"layout {report.layout}: {report.outcome}, {steps} done and read back")
    else:
        output.write(f"layout {report.layout}: {report.outcome}")
    for line in report.pending:
        output.paragraph(f"  pending: {line}", "    ")
    for line in report.remaining:
        output.paragraph(f"  remains: {line}", "    ")
    for line in document.notes:
        output.paragraph(f"note: {line}", "  ")
