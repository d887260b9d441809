"""Failures on the wire: an `AlloyError` becomes a `Reply`, and a `Reply` the same error again.

Both ends use the names of the taxonomy in `errors`, so a command behaves the same whether it ran
in this process, in the daemon behind the socket, or for a brain.
"""

from __future__ import annotations

from alloy_agent import errors
from alloy_agent.proto import agent_pb2 as pb

# The most specific class first; what is not listed was tried and failed.
REFUSALS: tuple[tuple[type[errors.AlloyError], pb.Refusal.ValueType], ...] = (
    (errors.LeaseExpiredError, pb.REFUSAL_EXPIRED),
    (errors.StaleTokenError, pb.REFUSAL_STALE_TOKEN),
    (errors.LeaseRefusedError, pb.REFUSAL_CONFLICT),
    (errors.PlanImpossibleError, pb.REFUSAL_NO_CAPACITY),
    (errors.ConfigError, pb.REFUSAL_INVALID),
    (errors.StoreError, pb.REFUSAL_STORE),
    (errors.BrainUnavailableError, pb.REFUSAL_NO_BRAIN),
)


def failure_reply(command_id: str, failure: BaseException) -> pb.Reply:
    """Return the reply that tells of `failure`; an unexpected exception shows its type only."""
    if not isinstance(failure, errors.AlloyError):
        message = f"the agent has a defect: {type(failure).__name__}"
        error = pb.Error(kind="InternalError", message=message, cure="read the agent's log")
        return pb.Reply(command_id=command_id, status=pb.STATUS_FAILED, error=error)
    error = pb.Error(kind=type(failure).__name__, message=failure.message, cure=failure.cure)
    for kind, refusal in REFUSALS:
        if isinstance(failure, kind):
            return pb.Reply(
                command_id=command_id, status=pb.STATUS_REFUSED, refusal=refusal, error=error
            )
    return pb.Reply(command_id=command_id, status=pb.STATUS_FAILED, error=error)


def unknown_command_reply(command_id: str, what: str) -> pb.Reply:
    """Return the reply to something this version does not know or cannot read."""
    error = pb.Error(
        kind="UnsupportedError", message=what, cure="compare the versions of agent and caller"
    )
    return pb.Reply(command_id=command_id, status=pb.STATUS_UNKNOWN_COMMAND, error=error)


def raise_failure(reply: pb.Reply) -> None:
    """Raise what a reply tells of; return when it tells of success.

    Raises:
        AlloyError: The class that was named, where this version has it.
    """
    if reply.status == pb.STATUS_OK:
        return
    kind = getattr(errors, reply.error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AlloyError)):
        kind = errors.AlloyError
    number = reply.status
    status = pb.Status.Name(number) if number in pb.Status.values() else str(number)
    raise kind(reply.error.message or f"answered {status}", cure=reply.error.cure)
