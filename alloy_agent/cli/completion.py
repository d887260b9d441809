"""`alloy-agent completion`: prints a completion script for a shell."""

from __future__ import annotations

import argparse
from typing import Any

from alloy_agent.cli import output

SHELLS = ("bash", "zsh", "tcsh")
FILE_ARGUMENTS = ("file", "config", "html", "sarif", "dsse", "public_key", "path")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("completion", help="print a completion script")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from alloy_agent.cli.frame import build_parser

    parser = build_parser()
    _complete_files(parser, shtab.FILE, shtab.DIRECTORY)
    output.write(shtab.complete(parser, shell=arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, file: Any, directory: Any) -> None:
    """Mark, in all commands, the arguments that are files or directories."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way
        if isinstance(action.choices, dict):  # the sub-commands by name
            for inner in action.choices.values():
                _complete_files(inner, file, directory)
        elif action.dest in FILE_ARGUMENTS:
            action.complete = file  # type: ignore[attr-defined]
        elif action.dest == "state_dir":
            action.complete = directory  # type: ignore[attr-defined]
