"""The frame of the command line: global options, dispatch, and one line for every failure.

Exit codes: 0 done; 1 the answer is no (a step failed, a check failed, a record is bad, something
required is missing); 2 refused before anything was touched (usage, input, permission, state); 3 a
verdict is unknown; 70 a defect of the agent; 74 the answer could not be written; 130 interrupted.
`exec` exits as its command does, or
125 when it cannot start it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from alloy_agent import __version__
from alloy_agent.cli import (
    apply,
    audit,
    completion,
    demo,
    devices,
    doctor,
    drain,
    evidence,
    execute,
    output,
    plan,
    reset,
    run,
    share,
    slurm,
    top,
    usage,
)
from alloy_agent.errors import (
    AlloyError,
    ApplyError,
    ConsentError,
    DaemonGoneError,
    StalePlanError,
)

NEGATIVE = 1
REFUSED = 2
DEFECT = 70  # EX_SOFTWARE of sysexits.h
NOT_WRITTEN = 74  # EX_IOERR of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

COMMANDS = (
    devices,
    plan,
    apply,
    execute,
    audit,
    evidence,
    run,
    share,
    top,
    usage,
    slurm,
    drain,
    reset,
    doctor,
    demo,
    completion,
)


GLOBALS = (
    "--version",
    "--fake",
    "--state-dir",
    "--config",
    "--log-level",
    "--log-format",
    "--debug",
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the cause, then where to read on."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return what was given; words that nobody takes are refused with what was meant."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}{_meant(found, left)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(REFUSED, f"alloy-agent: {_one_line(message)}: see '{self.prog} --help'\n")


def _meant(found: argparse.Namespace, left: Sequence[str]) -> str:
    """Return a hint for arguments that stand in the wrong place, or nothing."""
    names = (word.partition("=")[0] for word in left)
    name = next((name for name in names if name in GLOBALS), "")
    if name:
        return f": {name} stands before the command: alloy-agent {name} ... {found.command} ..."
    starts = found.command == "exec" or getattr(found, "action", "") == "run"
    return ": write the command to start behind '--'" if starts else ""


def add_globals(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the command; an absent one leaves it to the settings."""
    parser.add_argument("--version", action="version", version=f"alloy-agent {__version__}")
    parser.add_argument(
        "--fake",
        action="append",
        metavar="SPEC",
        help="add simulated silicon: 8xH100-SXM5-80GB, mixed, a YAML file; may be repeated",
    )
    parser.add_argument("--state-dir", metavar="DIR", help="where state is kept (/var/lib/alloy)")
    parser.add_argument("--config", metavar="PATH", help="settings file (YAML)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", choices=("json", "console"))
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = Parser(
        prog="alloy-agent",
        description="Partition, measure, audit and lend the accelerators of this node.",
        allow_abbrev=False,
    )
    add_globals(parser)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for module in COMMANDS:
        module.add(commands)
    return parser


def _close_output() -> None:
    """Point standard output at nowhere, so that leaving does not raise a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str) -> str:
    """Return a text as one line that any terminal takes; arguments may be any bytes."""
    line = output.printable(" ".join(text.split()))
    return line.encode("utf-8", "backslashreplace").decode()


def _say(line: str) -> None:
    print(f"alloy-agent: {_one_line(line)}", file=sys.stderr)


def _refused(error: AlloyError, command: str) -> int:
    """Print an expected failure and return its exit code."""
    _say(str(error))
    if command == "exec":
        return execute.CANNOT_START
    if isinstance(error, StalePlanError | ConsentError):
        return REFUSED
    begun = isinstance(error, DaemonGoneError) and command == "apply"
    return NEGATIVE if begun or isinstance(error, ApplyError) else REFUSED


def _guarded(call: Callable[[], int], command: str, debug: bool) -> int:
    """Return what a command returns, with every failure turned into one line and a code."""
    try:
        code = call()
        output.flush()
    except BrokenPipeError:
        _close_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except output.OutputError as exc:
        _close_output()
        _say(str(exc))
        return NOT_WRITTEN
    except AlloyError as exc:
        if debug:
            raise
        return _refused(exc, command)
    except Exception as exc:
        if debug:
            raise
        _say(
            f"defect in '{command}': {type(exc).__name__}: {exc}: repeat with --debug and report it"
        )
        return DEFECT
    return code


def split_tail(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and the tenant's command line behind `--` of `exec` or `share`."""
    if not {"exec", "share"} & set(argv) or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    output.open_streams()
    head, tail = split_tail(list(sys.argv[1:] if argv is None else argv))
    arguments = build_parser().parse_args(head)
    arguments.tail = tail
    return _guarded(lambda: int(arguments.run(arguments)), arguments.command, arguments.debug)
