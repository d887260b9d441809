"""Resetting a device on an operator's word: refused while anybody has it, proved afterwards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from alloy_agent.daemon.addresses import command_line
from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.model import DeviceId, Reset, Value
from alloy_agent.planner.names import find_device

if TYPE_CHECKING:
    from alloy_agent.daemon.node import Node
    from alloy_agent.model import Snapshot

LOG = logging.getLogger(__name__)
DEADLINE_S = 180.0  # a driver's tries, each of 30 s, and its recovery


class ResetDocument(Value, frozen=True, kw_only=True):
    """A reset that was done and proved."""

    schema: str = "alloy.reset/v1"
    device: DeviceId
    took_s: float


def reset_device(node: Node, name: str) -> ResetDocument:
    """Reset a device and return once it is proved to be ready again.

    The caller sees to it that nothing else changes the node meanwhile.

    Raises:
        ConfigError: There is no such device.
        UnsupportedError: This device is never reset; nothing was done.
        DeviceBusyError: A lease, a claim, a tenant or a process has it; nothing was done.
        BackendError: It failed.
    """
    from alloy_agent.host import clock

    snapshot = node.observe()
    device = find_device(name, snapshot.devices)
    worker = next(w for w in node.workers if w.name == device.backend)
    worker.apply(Reset(device=device.id, only_ask=True), DEADLINE_S)  # before anyone is sent away
    _refuse_held(node, device.id, snapshot)
    LOG.warning("reset_begins", extra={"device": device.id})
    began_s = clock.boottime_s()
    worker.quiesce(device.id)
    try:
        worker.apply(Reset(device=device.id), DEADLINE_S)
    except BackendError as exc:
        LOG.error("reset_failed", extra={"device": device.id, "reason": str(exc)})  # noqa: TRY400
        raise
    finally:
        worker.resume(device.id)
    worker.release(device.id)  # a quarantine ends with the reset that it asked for
    took_s = clock.boottime_s() - began_s
    LOG.warning("reset_done", extra={"device": device.id, "took_s": round(took_s, 1)})
    return ResetDocument(device=device.id, took_s=took_s)


def _refuse_held(node: Node, device: DeviceId, snapshot: Snapshot) -> None:
    pieces = tuple(p for p in snapshot.partitions if p.device == device)
    held = dict.fromkeys(node.tenancy.leased(pieces), "held by a lease")
    held |= dict.fromkeys(node.tenancy.claimed(pieces), "held by a claim of Kubernetes")
    ids = {p.id for p in pieces}
    held |= {p: "a process is inside" for p in node.occupied() if p in ids}
    held |= {p.id: f"tenant {p.tenant} is in it" for p in pieces if p.tenant is not None}
    if held:
        why = "; ".join(f"{name}: {cause}" for name, cause in sorted(held.items())[:4])
        drain = ("drain", str(device), "--wait", "600")
        raise DeviceBusyError(
            f"reset {device}: {why}",
            cure=f"drain it first: {command_line(node.settings, *drain)}",
        )
