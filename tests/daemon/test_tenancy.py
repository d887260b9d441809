"""Who is bound to a partition: a process is told by its number and its start together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alloy_agent.daemon.node import _start_ticks
from alloy_agent.daemon.tenancy import is_inside
from alloy_agent.errors import ConfigError
from alloy_agent.host.processes import start_ticks
from alloy_agent.model import PartitionId, TenantId
from alloy_agent.store import Binding

BOOT = "boot-a"


def binding(pid: int | None, started: int | None, boot: str = BOOT) -> Binding:
    """Return a binding of a process."""
    return Binding(
        partition=PartitionId("d/p@0"),
        generation=1,
        tenant=TenantId("t"),
        since_s=1.0,
        boot_id=boot,
        pid=pid,
        start_ticks=started,
    )


def unused_pid() -> int:
    """Return a number that no process can have."""
    return int(Path("/proc/sys/kernel/pid_max").read_text()) + 1


def test_a_number_that_another_process_got_binds_nobody() -> None:
    """After a tenant's end its number may be a stranger's: start and boot tell."""
    mine = os.getpid()
    assert is_inside(binding(mine, start_ticks(mine)), BOOT)
    assert not is_inside(binding(mine, (start_ticks(mine) or 0) - 1), BOOT)
    assert not is_inside(binding(mine, start_ticks(mine), boot="boot-b"), BOOT)


def test_a_process_whose_start_is_not_known_is_nobody() -> None:
    """A binding without a start holds neither for whoever has the number now nor for the dead."""
    assert not is_inside(binding(os.getpid(), None), BOOT)
    assert not is_inside(binding(unused_pid(), None), BOOT)
    assert is_inside(binding(None, None), BOOT)  # of a tenant without a process


def test_a_process_that_has_ended_is_not_bound() -> None:
    """Who asks for a process that is gone is told so, and nobody is bound in its place."""
    with pytest.raises(ConfigError, match="it has ended"):
        _start_ticks(unused_pid())
    assert _start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert _start_ticks(None) is None
