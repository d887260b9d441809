"""One agent of the demo as a process: the daemon, for any user, since its silicon is simulated."""

from __future__ import annotations

import sys
from pathlib import Path


def main(path: str) -> int:
    """Run the daemon on a settings file until told to stop."""
    from alloy_agent.config import read_settings
    from alloy_agent.daemon.loops import Daemon

    settings = read_settings(Path(path))
    return Daemon(settings, reread=lambda: read_settings(Path(path))).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
