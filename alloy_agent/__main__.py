"""`python -m alloy_agent` is `alloy-agent`."""

from __future__ import annotations

import sys

from alloy_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
