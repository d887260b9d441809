"""Resetting a device on an operator's word: refused while anybody has it, proved afterwards."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from alloy_agent.errors import BackendError, ConfigError, DeviceBusyError
from alloy_agent.model import DeviceId, Reset, Value

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
        DeviceBusyError: A lease, a claim, a tenant or a process has it; nothing was done.
        BackendError: It failed, or this backend resets nothing.
    """
    from alloy_agent.host import clock

    snapshot = node.observe()
    device = next((d for d in snapshot.devices if d.id == name), None)
    if device is None:
        known = ", ".join(d.id for d in snapshot.devices[:8]) or "none"
        raise ConfigError(f"reset {name}: no such device", cure=f"devices here are {known}")
    _refuse_held(node, device.id, snapshot)
    worker = next(w for w in node.workers if w.name == device.backend)
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
        raise DeviceBusyError(
            f"reset {device}: {why}",
            cure=f"drain it first: alloy-agent drain {device} --wait 600",
        )
