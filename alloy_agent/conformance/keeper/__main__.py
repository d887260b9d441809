"""Keeps one shared device."""

from __future__ import annotations

import sys

from alloy_agent.conformance.keeper.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
