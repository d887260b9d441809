"""Whether this process sees the host's processes by the host's pids.

Source: pid_namespaces(7); include/linux/proc_ns.h, PROC_PID_INIT_INO.
"""

from __future__ import annotations

import os
from typing import Final

INITIAL: Final = "pid:[4026531836]"


def initial_namespace(proc_root: str) -> bool:
    """Whether this process is in the host's pid namespace; True where it cannot be told."""
    try:
        return os.readlink(f"{proc_root}/self/ns/pid") == INITIAL  # noqa: PTH115 - a name
    except OSError:
        return True
