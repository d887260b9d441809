"""How the runs of this agent began and ended: why it was restarted is remembered, and told.

A run notes its start and, where it can, its end. One that was killed can not; then the service
manager's last act for it (`ExecStopPost=alloy-agent run --ended`) writes down what the manager
knows: watchdog, signal, exit code. A run that nobody closed is closed by the next one.

Rules that stay true in here:

* The file is a memory, never a condition: what cannot be read is begun anew, what cannot be written
  is logged, and the agent starts all the same.
* A run that has an end keeps it.

Source: systemd.exec(5), 252, `$SERVICE_RESULT`, `$EXIT_CODE`, `$EXIT_STATUS`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent import __version__
from alloy_agent.errors import StoreError
from alloy_agent.host import clock
from alloy_agent.model import Value

LOG = logging.getLogger(__name__)

FILE: Final = "starts.json"
KEPT: Final = 32
UNSEEN: Final = "ended without a word: killed, or the machine lost power"
NEW_BOOT: Final = "the machine was booted anew"


class Start(Value, frozen=True, kw_only=True):
    """One run of the daemon. `ended` is empty while it lasts."""

    boot_id: str
    pid: int
    version: str
    started_wall_s: float
    ended: str = ""
    asked: bool = False  # whether somebody wanted the end
    ended_wall_s: float = 0.0


class _File(Value, frozen=True, kw_only=True):
    schema: str = "alloy.starts/v1"
    starts: tuple[Start, ...] = ()


def read(state_dir: Path) -> tuple[Start, ...]:
    """Return the runs on record, oldest first; nothing where there is no readable record."""
    try:
        return msgspec.json.decode((state_dir / FILE).read_bytes(), type=_File).starts
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        LOG.warning("starts_damaged", extra={"path": str(state_dir / FILE), "reason": str(exc)})
        return ()


def begin(state_dir: Path) -> tuple[Start, ...]:
    """Note that a run begins, and close the one before; return all runs, this one last."""
    now_s, boot = time.time(), clock.boot_id()
    past = read(state_dir)
    if past and not past[-1].ended:
        why = UNSEEN if past[-1].boot_id == boot else NEW_BOOT
        past = (*past[:-1], _closed(past[-1], why, asked=False, now_s=now_s))
    this = Start(boot_id=boot, pid=os.getpid(), version=__version__, started_wall_s=now_s)
    return _write(state_dir, (*past, this))


def end(state_dir: Path, why: str, *, asked: bool) -> None:
    """Note how the last run ended, unless that is known already."""
    past = read(state_dir)
    if past and not past[-1].ended:
        _write(state_dir, (*past[:-1], _closed(past[-1], why, asked=asked, now_s=time.time())))


def told_by_manager(environ: Mapping[str, str]) -> str:
    """Return the end of a run in the service manager's words, or nothing where it says nothing."""
    result = environ.get("SERVICE_RESULT", "")
    if not result:
        return ""
    code, status = environ.get("EXIT_CODE", ""), environ.get("EXIT_STATUS", "")
    how = {
        "exited": f"exit code {status}",
        "killed": f"killed by SIG{status}",
        "dumped": f"killed by SIG{status}, with a core dump",
    }.get(code, "")
    return f"{result}: {how}" if how else result


def unasked(starts: Sequence[Start]) -> tuple[Start, ...]:
    """Return the runs of this boot that ended though nobody had asked for it."""
    boot = clock.boot_id()
    return tuple(one for one in starts if one.boot_id == boot and one.ended and not one.asked)


def summary(starts: Sequence[Start]) -> str:
    """Return one line on restarts since the machine's start; empty when there was none."""
    found = unasked(starts)
    if not found:
        return ""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found[-1].ended_wall_s))
    times = "once" if len(found) == 1 else f"{len(found)} times"
    return f"restarted {times} since boot, last {when}: {found[-1].ended}"


def _closed(start: Start, why: str, *, asked: bool, now_s: float) -> Start:
    return msgspec.structs.replace(start, ended=why, asked=asked, ended_wall_s=now_s)


def _write(state_dir: Path, starts: tuple[Start, ...]) -> tuple[Start, ...]:
    from alloy_agent.store.files import replace_file

    kept = starts[-KEPT:]
    try:
        replace_file(state_dir / FILE, msgspec.json.encode(_File(starts=kept)) + b"\n")
    except StoreError as exc:
        LOG.warning("start_not_noted", extra={"reason": str(exc)})
    return kept
