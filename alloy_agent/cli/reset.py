"""`alloy-agent reset`: reset a device that nobody is on, and prove that it happened.

Refused while a lease, a claim, a tenant or a process has the device: `drain --wait` comes first.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reset",
        help="reset a device that nobody is on",
        description="Reset a device through its driver and prove that it is ready again. Drain it "
        "first: 'alloy-agent drain DEVICE --wait 600'.",
    )
    parser.add_argument("device", metavar="DEVICE", help="its id, as 'devices' lists it")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Reset the device; the error says why not where that is so."""
    import msgspec

    from alloy_agent.cli import output
    from alloy_agent.cli.sources import open_node, require_root

    require_root("reset")
    with open_node(arguments, write=True) as node:
        document = node.reset(arguments.device)
    if arguments.json:
        output.write_json(msgspec.to_builtins(document))
    else:
        output.write(f"{document.device} was reset and is ready again ({document.took_s:.1f} s)")
        output.flush()
    return 0
