"""What people and brains write into commands: bounded and in one line before anyone acts on it.

Such words are stored, logged, handed to keepers and put on screens; each of those has a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.proto import agent_pb2 as pb

SESSION_LENGTH: Final = 256
REASON_LENGTH: Final = 2048


def check_words(command: pb.BrainMessage) -> None:
    """Refuse sessions that no one can name again and reasons without end; put reasons in a line.

    Raises:
        ConfigError: A session or a reason is too long, or a session cannot be shown.
    """
    kind = command.WhichOneof("body")
    if kind is None:
        return
    body = getattr(command, kind)
    fields = body.DESCRIPTOR.fields_by_name
    if "session" in fields:
        session = body.session
        if len(session) > SESSION_LENGTH or not session.isprintable():
            raise ConfigError(
                f"{kind}: session {session[:32]!r} of {len(session)} characters is no name",
                cure=f"use at most {SESSION_LENGTH} characters that can be shown",
            )
    if "reason" in fields:
        reason = body.reason
        if len(reason) > REASON_LENGTH:
            raise ConfigError(
                f"{kind}: a reason of {len(reason)} characters",
                cure=f"give at most {REASON_LENGTH}",
            )
        if not reason.isprintable():
            shown = "".join(letter if letter.isprintable() else " " for letter in reason)
            body.reason = " ".join(shown.split())
