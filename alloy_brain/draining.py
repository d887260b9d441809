"""Drains that are asked of the brain and done by the node, which has the last word on its scope.

The brain keeps no book of them: a node tells what is drained with its state, after a restart of
either too, and the gates `draining` and `node_draining` read that.
"""

from __future__ import annotations

import secrets
from typing import Any

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain.broker import Broker, RefusedError
from alloy_brain.link import LinkDownError


async def drain(broker: Broker, request: pl.DrainNodeRequest) -> pl.DrainNodeReply:
    """Return what a node drained.

    Raises:
        RefusedError: There is no such node, it cannot be reached, or it refused.
    """
    _check(broker, request.node)
    return await _ask(broker, request.node, pb.BrainMessage(drain=request.drain))


async def undrain(broker: Broker, request: pl.UndrainNodeRequest) -> pl.DrainNodeReply:
    """Return what a node takes again.

    Raises:
        RefusedError: There is no such node, it cannot be reached, or it refused.
    """
    _check(broker, request.node)
    return await _ask(broker, request.node, pb.BrainMessage(undrain=request.undrain))


def _check(broker: Broker, node: str) -> None:
    if node not in broker.fleet.nodes:
        known = ", ".join(sorted(broker.fleet.nodes)[:4]) or "none"
        raise _refused("NOT_FOUND", pb.REFUSAL_NOT_FOUND, f"node {node[:64]}: known are {known}")


async def _ask(broker: Broker, node: str, message: pb.BrainMessage) -> pl.DrainNodeReply:
    message.id = f"drain/{secrets.token_hex(8)}"
    try:
        reply = await broker.ask(node, message)
    except LinkDownError as exc:
        raise _refused("UNAVAILABLE", pb.REFUSAL_UNSPECIFIED, str(exc)) from exc
    if reply.status != pb.STATUS_OK:
        why = reply.error.message or pb.Refusal.Name(reply.refusal)
        cure = f": {reply.error.cure}" if reply.error.cure else ""
        raise _refused("FAILED_PRECONDITION", reply.refusal, f"node {node}: {why}{cure}")
    return pl.DrainNodeReply(node=node, document=reply.document)


def _refused(code: str, reason: Any, message: str) -> RefusedError:
    return RefusedError(code, pl.PlaceRefusal(reason=reason, message=message))
