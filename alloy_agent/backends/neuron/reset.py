"""Resetting one device through the driver, and proving that it happened.

The driver takes a write to `reset` as done in any case. It acts only while nobody has the node
open, and in its own time. So holders are looked for first, and afterwards the counters of the
cores and the device's state say whether anything was done, and how it went.

Source: aws-neuron-driver 2.24.7: neuron_cdev.c (`reset` attribute: 0 resetting, 1 ready, 2 invalid;
ignored while the node is open), neuron_reset.c (`reset_fail_count` on each core of the device).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from alloy_agent.backends.neuron.tree import DeviceTree, Reading, read_attribute, whole_number
from alloy_agent.errors import BackendError, DeviceBusyError, NotPermittedError, UnsupportedError
from alloy_agent.model import Value

READY: Final = "1"
INVALID: Final = "2"
POLL_S: Final = 0.1
STARTS_WITHIN_S: Final = 10.0  # a device that is idle starts at once; this is for a busy host
DONE_WITHIN_S: Final = 120.0  # the driver gives each try 30 s
RELOAD: Final = "reload the driver (rmmod neuron; modprobe neuron), else replace the instance"


class _Count(Value, frozen=True, kw_only=True):
    """The cores' counters of resets asked for and failed; None: the driver does not tell."""

    asked: tuple[int | None, ...]
    failed: tuple[int | None, ...]


def reset_file(tree: DeviceTree) -> str:
    """Return the file by which the driver resets a device.

    Raises:
        UnsupportedError: This driver has none.
    """
    path = tree.place("reset")
    if path is None:
        raise UnsupportedError(f"neuron{tree.number}: this driver has no reset", cure=RELOAD)
    return path


def reset_device(
    tree: DeviceTree,
    cores: int,
    holders: Callable[[], tuple[str, ...]],
    *,
    starts_within_s: float = STARTS_WITHIN_S,
    done_within_s: float = DONE_WITHIN_S,
) -> None:
    """Reset a device and return once it is proved to be ready again.

    Args:
        tree: The device.
        cores: How many physical cores it has.
        holders: Returns who has its node open, by name.
        starts_within_s: How long the driver may take to begin.
        done_within_s: How long it may take in all.

    Raises:
        DeviceBusyError: Somebody has the node open; nothing was done, or the driver ignored it.
        BackendError: It failed, or whether it happened cannot be told.
    """
    path = reset_file(tree)
    _refuse_holders(tree, holders)
    before, began_s = _count(tree, cores), time.monotonic()
    _write(path)
    seen = False
    while True:
        state, now = tree.read("reset"), _count(tree, cores)
        seen = seen or _began(before, now) or _text(state) not in {READY, INVALID}
        waited_s = time.monotonic() - began_s
        if seen and _text(state) in {READY, INVALID}:
            break
        if not seen and waited_s > starts_within_s:
            _refuse_holders(tree, holders)
            raise BackendError(
                f"neuron{tree.number}: the driver did not begin a reset within "
                f"{starts_within_s:g} s ({_silent(before)})",
                cure="see dmesg; the driver ignores a reset while anybody has the node open",
            )
        if waited_s > done_within_s:
            raise BackendError(
                f"neuron{tree.number}: still resetting after {done_within_s:g} s", cure=RELOAD
            )
        time.sleep(POLL_S)
    if _text(state) == INVALID or _failures(before, now):
        raise BackendError(f"neuron{tree.number}: the reset has failed", cure=RELOAD)


def _refuse_holders(tree: DeviceTree, holders: Callable[[], tuple[str, ...]]) -> None:
    found = holders()
    if found:
        raise DeviceBusyError(
            f"neuron{tree.number}: its node is open in {', '.join(found[:8])}",
            cure="end them; the driver ignores a reset while anybody has the node open",
        )


def _write(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)
    except PermissionError as exc:
        raise NotPermittedError(f"{path}: no permission to reset", cure="run as root") from exc
    except OSError as exc:
        raise BackendError(f"{path}: {exc.strerror}", cure="see dmesg") from exc


def _text(reading: Reading) -> str:
    return reading.text or ""


def _count(tree: DeviceTree, cores: int) -> _Count:
    def of(name: str) -> tuple[int | None, ...]:
        folders = (tree.core_folder(core) for core in range(cores))
        return tuple(
            whole_number(read_attribute(f"{folder}/stats/other_info/{name}/total").text)
            for folder in folders
        )

    return _Count(asked=of("reset_req_count"), failed=of("reset_fail_count"))


def _began(before: _Count, now: _Count) -> bool:
    """Whether a reset was asked of every core that tells; none tells: not known."""
    pairs = [
        (old, new)
        for old, new in zip(before.asked, now.asked, strict=True)
        if old is not None and new is not None
    ]
    return bool(pairs) and all(new > old for old, new in pairs)


def _failures(before: _Count, now: _Count) -> bool:
    return any(
        old is not None and new is not None and new > old
        for old, new in zip(before.failed, now.failed, strict=True)
    )


def _silent(before: _Count) -> str:
    told = any(value is not None for value in before.asked)
    return "no core counted one" if told else "its cores count no resets"
