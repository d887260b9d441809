"""`alloy-agent demo`: the whole story on simulated nodes with an embedded brain, in half a minute.

Nothing in it is printed unseen: each claim is the outcome of looking at the brain, the agents or
their evidence, and a claim that does not hold ends the demo with exit code 1.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

DEFAULT = "alloy-demo.html"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="show everything on simulated nodes, with a report")
    parser.add_argument("--html", metavar="PATH", default=DEFAULT, help=f"the report ({DEFAULT})")
    parser.add_argument("--keep", metavar="DIR", help="keep the nodes' state in this directory")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Tell the story and write the report."""
    from pathlib import Path

    from alloy_agent.cli import output
    from alloy_agent.cli.demo import page, stage, story
    from alloy_agent.cli.sources import require_writable, write_file

    target = Path(arguments.html).absolute()
    require_writable(str(target))
    with stage.Stage(arguments.keep) as made, story.teller() as tell:
        told = story.play(made, tell)
    write_file(str(target), page.to_html(told))
    held = sum(claim.holds for claim in told.claims)
    output.write(f"{held} of {len(told.claims)} claims hold; report: {target}")
    return 0 if told.holds else 1
