"""How soon the agent's threads run when every core is busy."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

RAISED_NICE: Final = -10
SWITCH_INTERVAL_S: Final = 0.001  # a thread that has news waits so long for one that computes


def go_first() -> None:
    """Let this process go before others where that is permitted; to be called before threads.

    Threads take their niceness from the one that starts them, those of gRPC too. Everything the
    control process does is short; what it hears of is late by as much as it has to wait.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, RAISED_NICE)


def take_turns() -> None:
    """Have threads of this process hand over to one another after a millisecond at the latest."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
