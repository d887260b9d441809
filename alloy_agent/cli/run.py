"""`alloy-agent run`: the daemon, in the foreground; a service manager keeps it."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alloy_agent.config import Settings


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("run", help="run the daemon: keep the layout, audit, serve")
    parser.add_argument("--config", metavar="PATH", dest="run_config", help="settings file (YAML)")
    parser.add_argument(
        "--standalone", action="store_true", help="embed the reference brain in this process"
    )
    parser.add_argument(
        "--ended", action="store_true", help="note how the run before ended, for service managers"
    )
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Run until told to stop."""
    from alloy_agent.cli.sources import require_root, settings_of
    from alloy_agent.daemon.loops import AGAIN, Daemon

    require_root("run")
    if arguments.run_config:
        arguments.config = arguments.run_config
    settings = settings_of(arguments)
    if arguments.ended:
        return _note_end(settings)
    while True:
        daemon = Daemon(
            settings, reread=lambda: settings_of(arguments), standalone=arguments.standalone
        )
        code = daemon.run()
        if code != AGAIN:
            return code
        settings = settings_of(arguments)


def _note_end(settings: Settings) -> int:
    """Write down what the service manager says of the run that is over, and leave."""
    from alloy_agent.daemon import starts

    told = starts.told_by_manager(os.environ)
    if told:
        starts.end(Path(settings.state_dir), told, asked=told.startswith("success"))
    return 0
