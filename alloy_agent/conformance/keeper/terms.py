"""What a tenant may ask for: which process it may be, and how little production may lose."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from alloy_agent.errors import ConfigError
from alloy_agent.host.processes import PF_KTHREAD, parse_stat, read_bytes

BUDGET_LEAST: Final = 0.001  # windows tell no smaller loss from noise
BUDGET_MOST: Final = 0.5


def check_budget(ratio: float | None) -> None:
    """Refuse a loss budget that cannot be kept.

    Raises:
        ConfigError: It is too small, too large or no number.
    """
    if ratio is None or BUDGET_LEAST <= ratio <= BUDGET_MOST:
        return
    little = 0.0 < ratio < BUDGET_LEAST
    raise ConfigError(
        "loss budget above 0 % and too small to be measured"
        if little and ratio < 1e-6
        else f"loss budget {100 * ratio:g} %",
        cure=f"give at least {BUDGET_LEAST:.1%} and at most {BUDGET_MOST:.0%}",
    )


def check_process(tenant: str, pid: int, ours: Container[int]) -> None:
    """Refuse a process that can be nobody's tenant; one that is gone is another matter.

    Args:
        tenant: Its name, for the error.
        pid: The process.
        ours: Processes of the agent.

    Raises:
        ConfigError: It is no process, one of the kernel's, or one of the agent's.
    """
    why = ""
    if pid <= 0:
        why = "is no process"
    elif pid in ours:
        why = "is not a tenant's"
    else:
        try:
            if parse_stat(read_bytes(f"/proc/{pid}/stat")).flags & PF_KTHREAD:
                why = "is a thread of the kernel"
        except (OSError, ValueError):
            return
    if why:
        raise ConfigError(
            f"tenant {tenant}: pid {pid} {why}", cure="give the process that is to run there"
        )
