"""`alloy-agent run`: the daemon, in the foreground; a service manager keeps it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("run", help="run the daemon: keep the layout, audit, serve")
    parser.add_argument("--config", metavar="PATH", dest="run_config", help="settings file (YAML)")
    parser.add_argument(
        "--standalone", action="store_true", help="embed the reference brain in this process"
    )
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Run until told to stop."""
    from alloy_agent.cli.sources import require_root, settings_of
    from alloy_agent.daemon.loops import Daemon

    require_root("run")
    if arguments.run_config:
        arguments.config = arguments.run_config
    settings = settings_of(arguments)
    daemon = Daemon(
        settings, reread=lambda: settings_of(arguments), standalone=arguments.standalone
    )
    return daemon.run()
