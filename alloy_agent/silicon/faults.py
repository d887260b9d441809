"""Scripted faults: which call of which device fails, how, when and how often; and crash points.

A crash point is a moment at which the process may die: before every call, and after every call that
changed something (the device has done it, the caller never hears). `CrashPoints` numbers them from
1 on, per process, so that a test can die at each of them in turn.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn

from alloy_agent.silicon import refusals
from alloy_agent.silicon.state import DeviceState, Fault, FaultState, MachineState

HANG_POLL_S: Final = 0.02

ERRORS: Final[dict[str, type[refusals.RefusalError]]] = {
    "insufficient_resources": refusals.InsufficientResourcesError,
    "in_use": refusals.InUseError,
    "reset_required": refusals.ResetRequiredError,
    "invalid_argument": refusals.InvalidArgumentError,
    "not_supported": refusals.NotSupportedError,
    "not_permitted": refusals.NotPermittedError,
    "not_found": refusals.NotFoundError,
    "lost": refusals.LostError,
    "unknown": refusals.UnknownFailureError,
}


def matches(fault: Fault, call: str, device: DeviceState | None, when: str) -> bool:
    """Return whether the fault speaks of this call; calls of the node match device `*` only."""
    if fault.when != when or not fnmatch.fnmatchcase(call, fault.call):
        return False
    if fault.device == "*":
        return True
    if device is None:
        return False
    if fault.device.startswith("#"):
        return fault.device[1:] == str(device.index)
    return fnmatch.fnmatchcase(device.id, fault.device)


def due(state: MachineState, call: str, device: DeviceState | None, when: str) -> list[FaultState]:
    """Count this call against all faults; return those that strike."""
    struck = []
    for entry in state.faults:
        if not matches(entry.fault, call, device, when):
            continue
        entry.met += 1
        spent = entry.fault.times and entry.struck >= entry.fault.times
        if entry.met >= entry.fault.nth and not spent:
            entry.struck += 1
            struck.append(entry)
    return struck


def strike(entry: FaultState, call: str, subject: str, still_there: Callable[[int], bool]) -> None:
    """Carry out one fault.

    Args:
        entry: The fault.
        call: Name of the call, for the message.
        subject: The device's id, for the message.
        still_there: Tells whether the fault with this key is still scripted; a hang ends when not.

    Raises:
        RefusalError: As scripted.
        SimulatedCrash: As scripted.
    """
    fault = entry.fault
    if fault.action == "hang":
        while still_there(entry.key):
            time.sleep(HANG_POLL_S)
    elif fault.action == "slow":
        time.sleep(fault.delay_s)
    elif fault.action == "error":
        raise ERRORS[fault.error](f"{call} on {subject}: scripted {fault.error}", code=fault.code)
    else:
        die(fault.action, f"{call} on {subject}")


def die(how: str, where: str) -> NoReturn:
    """End this process the way a test asked for, or raise `SimulatedCrash` in it."""
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sigsegv":
        ctypes.string_at(0)
    raise refusals.SimulatedCrash(f"died in {where}")
