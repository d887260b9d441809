"""Drains: their scope, what they take down, and sessions that are stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alloy_agent.daemon.hook import call_hook
from alloy_agent.errors import ConfigError, StaleTokenError
from alloy_agent.model import Scope
from alloy_agent.telemetry import drains
from tests.telemetry.world import device, piece, snapshot

NODE = snapshot(
    piece("GPU-0/1g@0"),
    piece("GPU-0/1g@1", tenant=None),
    piece("GPU-1/1g@0", tenant="bolt"),
    devices=(device(hive="h"), device("GPU-1", hive="h"), device("GPU-2")),
)


@pytest.mark.parametrize(
    ("subject", "scope", "takes"),
    [
        ("", Scope.NODE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1", "GPU-1/1g@0 (tenant bolt)")),
        ("GPU-0", Scope.DEVICE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1")),
        ("h", Scope.HIVE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1", "GPU-1/1g@0 (tenant bolt)")),
        ("GPU-0/1g@1", Scope.PARTITION, ("GPU-0/1g@1",)),
        ("GPU-2", Scope.DEVICE, ()),
    ],
)
def test_a_drain_names_its_scope_and_what_it_takes(
    subject: str, scope: Scope, takes: tuple[str, ...]
) -> None:
    """Partition, device, hive and node: each with the partitions and tenants that it reaches."""
    _, made = drains.drained((), subject, "s1", "work", NODE, 5.0)
    assert (made.scope, made.takes) == (scope, takes)


def test_a_drain_reaches_down_and_not_up_or_sideways() -> None:
    """A drained device closes its partitions; a drained partition leaves its device open."""
    held, _ = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0)
    assert drains.why(held, "GPU-0/1g@1", NODE)
    assert not drains.why(held, "GPU-1/1g@0", NODE)
    held, _ = drains.drained((), "GPU-0/1g@0", "s1", "work", NODE, 5.0)
    assert not drains.why(held, "GPU-0", NODE)
    assert not drains.why(held, "GPU-0/1g@1", NODE)
    held, _ = drains.drained((), "h", "s1", "work", NODE, 5.0)
    assert drains.why(held, "GPU-1", NODE)
    assert not drains.why(held, "GPU-2", NODE)


def test_sessions() -> None:
    """The same again is nothing; another session can neither drain nor take back."""
    held, made = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0)
    assert drains.drained(held, "GPU-0", "s1", "work", NODE, 9.0) == (held, made)
    with pytest.raises(StaleTokenError):
        drains.drained(held, "GPU-0", "s2", "work", NODE, 9.0)
    with pytest.raises(StaleTokenError):
        drains.undrained(held, "GPU-0", "s0")
    assert drains.undrained(held, "GPU-0", "s1") == ((), made)
    assert drains.undrained((), "GPU-0", "s1") == ((), None)


def test_what_is_not_there_cannot_be_drained() -> None:
    """An unknown subject is refused by name."""
    with pytest.raises(ConfigError, match="GPU-9"):
        drains.drained((), "GPU-9", "", "", NODE, 5.0)


def test_the_hook_is_told_without_a_shell(tmp_path: Path) -> None:
    """The operator's program gets verb, scope, subject, session and reason as they are."""
    out, program = tmp_path / "out", tmp_path / "hook"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {out}\n')
    program.chmod(0o700)
    _, made = drains.drained((), "GPU-0", "s1", "a; rm -rf $HOME", NODE, 5.0)
    call_hook(str(program), made, begins=True).join(30)
    assert out.read_text().splitlines() == ["drain", "device", "GPU-0", "s1", "a; rm -rf $HOME"]
    call_hook(os.devnull, made, begins=False).join(30)  # cannot be run: logged, nothing more
