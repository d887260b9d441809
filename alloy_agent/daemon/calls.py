"""Programs of the site that the agent calls: without a shell, bounded in time and in output.

A program has until its deadline; then it and what it started are killed. What it says, on either
stream, is read as it comes, and only the end of it is kept, so that one that never stops talking
costs nothing. Whoever it leaves in the background holds nothing up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Final

from alloy_agent.model import Value

KEPT_BYTES: Final = 16 << 10
LINE_LENGTH: Final = 300
LAST_READS: Final = 64  # of KEPT_BYTES each: as much as the largest pipe holds (1 MiB, pipe(7))


class Called(Value, frozen=True, kw_only=True):
    """What became of a call; `code` None: it did not start, or was killed at its deadline."""

    code: int | None
    said: str  # the last of what it wrote, as it came
    failure: str = ""  # why it is no success, in one line; empty: it is one


def call(argv: Sequence[str], deadline_s: float) -> Called:
    """Run a program to its end or to the deadline, and return what became of it."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        return Called(code=None, said="", failure=f"cannot be run: {reason.lower()}")
    assert process.stdout is not None  # noqa: S101 - asked for with PIPE
    with process.stdout as pipe:
        ended, kept = _listen(process, pipe, time.monotonic() + deadline_s)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
    code = process.wait()
    said = kept.decode("utf-8", "replace")
    if not ended:
        return Called(code=None, said=said, failure=f"killed after {deadline_s:g} s")
    return Called(code=code, said=said, failure="" if code == 0 else _failure(code, said))


def _listen(
    process: subprocess.Popen[bytes], pipe: IO[bytes], until_s: float
) -> tuple[bool, bytes]:
    """Return whether the program ended in time, and the last of what it said."""
    kept = bytearray()
    os.set_blocking(pipe.fileno(), False)
    pidfd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            while (left_s := until_s - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left_s)}
                if pipe.fileno() in ready and not _take(pipe, kept):
                    selector.unregister(pipe)  # nobody writes there any more
                if pidfd in ready:
                    for _ in range(LAST_READS):  # what it left in the pipe; others may go on
                        if not _take(pipe, kept):
                            break
                    return True, bytes(kept)
        return False, bytes(kept)
    finally:
        os.close(pidfd)


def _take(pipe: IO[bytes], kept: bytearray) -> bool:
    """Add what can be read at once, and keep the end of it; return whether there was anything."""
    with contextlib.suppress(BlockingIOError):
        chunk = os.read(pipe.fileno(), KEPT_BYTES)
        kept += chunk
        del kept[:-KEPT_BYTES]
        return bool(chunk)
    return False


def _failure(code: int, said: str) -> str:
    how = f"ended with {code}" if code > 0 else f"killed by signal {-code}"
    line = one_line(said)
    return f"{how}: {line}" if line else how


def one_line(text: str) -> str:
    """Return the end of a text as one line of printable characters that fits into a log."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= LINE_LENGTH else "..." + line[-(LINE_LENGTH - 3) :]
