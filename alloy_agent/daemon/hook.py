"""The operator's program that is told of drains, where neither Kubernetes nor Slurm is."""

from __future__ import annotations

import logging
import subprocess
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from alloy_agent.telemetry.drains import Drained

LOG = logging.getLogger(__name__)

DEADLINE_S: Final = 30.0


def arguments_of(program: str, drained: Drained, *, begins: bool) -> list[str]:
    """Return the command line: HOOK drain|undrain SCOPE SUBJECT SESSION REASON."""
    verb = "drain" if begins else "undrain"
    subject = drained.subject or "node"
    return [program, verb, drained.scope.value, subject, drained.session, drained.reason]


def call_hook(program: str, drained: Drained, *, begins: bool) -> threading.Thread:
    """Run the program on a thread of its own, without a shell; what fails is logged."""
    line = arguments_of(program, drained, begins=begins)

    def run() -> None:
        try:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            LOG.error("hook_failed", extra={"program": program, "reason": str(exc)})  # noqa: TRY400
            return
        if done.returncode:
            fields = {"program": program, "code": done.returncode, "said": done.stderr[-500:]}
            LOG.error("hook_failed", extra=fields)

    thread = threading.Thread(target=run, name="hook", daemon=True)
    thread.start()
    return thread
