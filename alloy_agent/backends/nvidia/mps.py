"""The MPS control daemon of this host, if one runs: what it was told to give each client.

A client takes the lower of its server's and its own percentage, and fixes it when it makes its
context (Source: MPS documentation, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE). Values are read from the
processes' environment, so that what counts is the value, not that a variable is present.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.backends.nvidia.processes import name_of, pids

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
_COMM_MAX: Final = 15  # the kernel cuts names there; control and server then read the same
PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PINNED: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class Control(NamedTuple):
    """The control daemon; None where it was not told, so that nothing is limited."""

    pid: int
    thread_percentage: float | None
    pinned_memory: str | None


def daemons(proc: Path) -> tuple[Control | None, tuple[int, ...]]:
    """Return the control daemon, if any, and the pids of its servers."""
    control, servers = None, []
    for pid in pids(proc):
        if name_of(proc, pid) != CONTROL[:_COMM_MAX]:
            continue
        command = _command(proc, pid)
        if SERVER in command:
            servers.append(pid)
        elif CONTROL in command:
            environment = _environment(proc, pid)
            control = Control(pid, _percentage(environment), environment.get(PINNED))
    return control, tuple(servers)


def thread_percentage(proc: Path, pid: int) -> float | None:
    """Return what a client limits itself to; None: it does not, or cannot be looked at."""
    return _percentage(_environment(proc, pid))


def _percentage(environment: dict[str, str]) -> float | None:
    try:
        value = float(environment[PERCENTAGE])
    except (KeyError, ValueError):
        return None
    return value if 0 < value <= 100 else None


def _command(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _environment(proc: Path, pid: int) -> dict[str, str]:
    try:
        raw = (proc / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
