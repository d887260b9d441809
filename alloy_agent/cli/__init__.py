"""The command line: one file a command, which parses, asks, prints and chooses the exit code.

Rules that stay true in here:

* No decisions: a command asks a `daemon.api.NodeApi` and prints its documents.
* Importing this package costs next to nothing: rooms are imported by the command that needs them.
* Standard output carries the answer, standard error everything else; errors are one line each.
"""

from __future__ import annotations

from alloy_agent.cli.frame import main

__all__ = ["main"]
