"""Drain and undrain as commands: what is reached is in the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from alloy_agent.model import Snapshot, Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.telemetry.drains import Drained

if TYPE_CHECKING:
    from alloy_agent.daemon.telemetry import Telemetry


class DrainDocument(Value, frozen=True, kw_only=True):
    """What a drain or undrain did; `drain` None: it was not drained."""

    schema: str = "alloy.drain/v1"
    drained: bool
    drain: Drained | None


def drain_reply(
    telemetry: Telemetry, command: pb.BrainMessage, look: Callable[[], Snapshot]
) -> pb.Reply:
    """Return the answer to a drain or undrain, after it was done.

    What a drain reaches is what `look` finds now, not what was seen a while ago.

    Raises:
        ConfigError: There is nothing of that name.
        StaleTokenError: The session is not the one that holds.
    """
    if command.WhichOneof("body") == "drain":
        wish = command.drain
        document = DrainDocument(
            drained=True, drain=telemetry.drain(wish.subject, wish.session, wish.reason, look())
        )
    else:
        back = command.undrain
        document = DrainDocument(drained=False, drain=telemetry.undrain(back.subject, back.session))
    return pb.Reply(
        command_id=command.id,
        status=pb.STATUS_OK,
        document=pb.Document(schema=document.schema, json=msgspec.json.encode(document)),
    )
