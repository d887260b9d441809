"""Pure decisions about a worker that died: how long to wait, and which device to blame.

A crash is blamed on one device when the trace of the fatal signal names the thread that was inside
a call on it. Without such a witness (the library called `exit`, the whole process hung) every
device that was inside a call is a suspect, and only what is common to consecutive crashes is
blamed. A worker that was killed from outside blames nobody, and a device already known to be
stalled is no suspect: it sits inside its call all the time.
"""

from __future__ import annotations

from typing import Final

import msgspec

from alloy_agent.model import DeviceId, Value

BASE_S: Final = 0.1
CAP_S: Final = 30.0
HEALTHY_AFTER_S: Final = 30.0  # a worker that lived this long starts its back-off anew
MAX_EXPONENT: Final = 16


def backoff_s(failures: int, chance: float, base_s: float = BASE_S, cap_s: float = CAP_S) -> float:
    """Return how long to wait before start number `failures + 1`: exponential, with full jitter.

    Args:
        failures: Starts in a row that ended in a death; the first restart comes at once.
        chance: A random number from 0 to 1.
        base_s: Longest wait after the second failure.
        cap_s: Longest wait of all.
    """
    if failures <= 1:
        return 0.0
    return chance * float(min(cap_s, base_s * 2 ** min(failures - 2, MAX_EXPONENT)))


class Blame(Value, frozen=True, kw_only=True):
    """What earlier crashes say about the devices of one backend."""

    strikes: dict[DeviceId, int] = msgspec.field(default_factory=dict)
    suspects: frozenset[DeviceId] | None = None  # common to all crashes without a witness so far
    crashes_without_witness: int = 0
    quarantined: tuple[DeviceId, ...] = ()


class Crash(Value, frozen=True, kw_only=True):
    """How a worker died: the device that the trace names, and all that were inside a call."""

    witness: DeviceId | None = None
    inside: frozenset[DeviceId] = frozenset()
    killed_from_outside: bool = False


def blame(before: Blame, crash: Crash, limit: int = 2) -> Blame:
    """Return `before` with one more crash; a device with `limit` strikes is quarantined.

    When `limit` crashes without a witness leave several suspects, one more is waited for, and then
    all that are common are quarantined: a group too large loses less than a worker that never stays
    up.
    """
    if crash.killed_from_outside:
        return before
    if crash.witness is not None:
        return _strike(before, frozenset({crash.witness}), limit)
    inside = crash.inside - set(before.quarantined)
    if not inside:
        return before
    common = inside if before.suspects is None else before.suspects & inside
    if not common:  # another cause; count from here
        return _with(before, suspects=inside, crashes=1)
    crashes = before.crashes_without_witness + 1
    if crashes >= limit and (len(common) == 1 or crashes > limit):
        return _quarantine(_with(before, suspects=None, crashes=0), common)
    return _with(before, suspects=common, crashes=crashes)


def forgive(before: Blame, device: DeviceId) -> Blame:
    """Return `before` without anything against `device`, which is said to be well again."""
    return Blame(
        strikes={d: n for d, n in before.strikes.items() if d != device},
        suspects=None if before.suspects is None else before.suspects - {device},
        crashes_without_witness=before.crashes_without_witness,
        quarantined=tuple(d for d in before.quarantined if d != device),
    )


def _with(before: Blame, suspects: frozenset[DeviceId] | None, crashes: int) -> Blame:
    return Blame(
        strikes=before.strikes,
        suspects=suspects,
        crashes_without_witness=crashes,
        quarantined=before.quarantined,
    )


def _strike(before: Blame, devices: frozenset[DeviceId], limit: int) -> Blame:
    strikes = dict(before.strikes)
    for device in devices:
        strikes[device] = strikes.get(device, 0) + 1
    struck = Blame(
        strikes=strikes,
        suspects=before.suspects,
        crashes_without_witness=before.crashes_without_witness,
        quarantined=before.quarantined,
    )
    return _quarantine(struck, frozenset(d for d in devices if strikes[d] >= limit))


def _quarantine(before: Blame, devices: frozenset[DeviceId]) -> Blame:
    return Blame(
        strikes=before.strikes,
        suspects=before.suspects,
        crashes_without_witness=before.crashes_without_witness,
        quarantined=tuple(sorted({*before.quarantined, *devices})),
    )
