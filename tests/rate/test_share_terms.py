"""Who may be a tenant, and what it may ask for: refused in one line; asking again is no offence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.conformance.keeper.members import Member, member_of
from alloy_agent.conformance.keeper.messages import Join
from alloy_agent.conformance.keeper.process import Keeper
from alloy_agent.conformance.keeper.terms import (
    BUDGET_LEAST,
    BUDGET_MOST,
    check_budget,
    check_process,
)
from alloy_agent.daemon.sharing import join_reply, policy_reply
from alloy_agent.errors import ConfigError
from alloy_agent.host.processes import iter_processes
from alloy_agent.proto import agent_pb2 as pb


@given(st.floats())
def test_any_budget_is_kept_or_refused_with_what_to_give(ratio: float) -> None:
    """No number slips through, not even one that is none, and no line tells of 4e-322 percent."""
    if BUDGET_LEAST <= ratio <= BUDGET_MOST:
        check_budget(ratio)
        return
    with pytest.raises(ConfigError, match="at least") as refused:
        check_budget(ratio)
    assert refused.value.cure == "give at least 0.1% and at most 50%"
    if 0.0 <= ratio < BUDGET_LEAST:
        assert "e-" not in refused.value.message


def test_a_budget_too_small_is_refused_at_every_door() -> None:
    """A rate policy and a join say so before they touch a node."""
    nobody = cast(Any, None)
    policy = pb.SetRatePolicy(device="emulated", loss_budget_ratio=5e-324, enabled=True)
    with pytest.raises(ConfigError, match="too small to be measured"):
        policy_reply(nobody, pb.BrainMessage(id="1", set_rate_policy=policy))
    wish = pb.Join(subject="emulated", tenant="n", share=pb.SHARE_PRODUCTION, pid=os.getppid())
    wish.loss_budget_ratio = 5e-324
    with pytest.raises(ConfigError, match="too small to be measured"):
        join_reply(nobody, nobody, pb.BrainMessage(id="1", join=wish))


@pytest.mark.parametrize("pid", [1, os.getpid()], ids=["init", "itself"])
def test_the_daemon_takes_neither_init_nor_itself(pid: int) -> None:
    """They are refused before a node, a keeper or a cgroup is touched."""
    nobody = cast(Any, None)
    wish = pb.Join(subject="emulated", tenant="n", share=pb.SHARE_PRODUCTION, pid=pid)
    with pytest.raises(ConfigError, match=f"pid {pid} is not a tenant's"):
        join_reply(nobody, nobody, pb.BrainMessage(id="1", join=wish))


def test_which_processes_can_be_nobodys_tenant(tmp_path: Path) -> None:
    """No process, the keeper's own, one of the kernel's; one that is gone is left to others."""
    keeper = Keeper.__new__(Keeper)
    for pid, why in ((0, "no process"), (-1, "no process"), (os.getpid(), "not a tenant's")):
        with pytest.raises(ConfigError, match=why):
            keeper.join(Join(name="n", role="opportunistic", pid=pid))
    for pid in (os.getppid(), 2**22 + 1):
        check_process("n", pid, ())
    threads = [one.pid for one in iter_processes() if one.kernel_thread]
    for pid in threads[:1]:  # a container shows none
        with pytest.raises(ConfigError, match="thread of the kernel"):
            check_process("n", pid, ())


def test_a_join_can_be_asked_again() -> None:
    """The same wish of the same process is answered the same; any other one is refused."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        wish = Join(name="n", role="opportunistic", pid=sleeper.pid)
        keeper = Keeper.__new__(Keeper)
        keeper.__dict__ |= {
            "_members": {"n": member_of(wish)},
            "_given": {"n": {"A": "1"}},
            "_environment": {"B": "2"},
            "_tree": None,
            "_topology": SimpleNamespace(),
        }
        assert keeper._join(wish) == {"A": "1", "B": "2"}
        for other in (
            Join(name="n", role="production", pid=sleeper.pid),
            Join(name="n", role="opportunistic", pid=os.getppid()),
        ):
            with pytest.raises(ConfigError, match="runs already"):
                keeper._join(other)
        earlier = Member(join=wish, start_ticks=1)  # its number is another process's by now
        assert earlier != member_of(wish)
    finally:
        sleeper.kill()
        sleeper.wait()
