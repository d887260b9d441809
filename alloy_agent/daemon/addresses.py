"""Where the daemon of given settings is reached."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloy_agent.config import Settings


def socket_of(settings: Settings) -> Path:
    """Return where the daemon of these settings listens.

    An agent with a state directory of its own has its socket there, so that two agents with two
    states never answer for one another.
    """
    defaults = type(settings)()
    if settings.socket_path == defaults.socket_path and settings.state_dir != defaults.state_dir:
        return Path(settings.state_dir) / "agent.sock"
    return Path(settings.socket_path)


def share_root(settings: Settings) -> Path:
    """Return the folder in which shared devices have their pages and keepers."""
    return socket_of(settings).absolute().parent / "share"


def command_line(settings: Settings, *words: str) -> str:
    """Return a command for people to type that reaches this agent, by its state directory.

    `run` also names the simulated silicon.
    """
    given = []
    if settings.state_dir != type(settings)().state_dir:
        given = ["--state-dir", settings.state_dir]
    if words[:1] == ("run",):
        given += [word for fake in settings.fake for word in ("--fake", fake)]
    return shlex.join(("alloy-agent", *given, *words))


def may_answer(settings: Settings) -> bool:
    """Whether a socket is there at all; says no within microseconds, and loads nothing for it."""
    try:
        return socket_of(settings).exists()
    except OSError:  # a folder that is closed to this user, a path that is too long
        return False
