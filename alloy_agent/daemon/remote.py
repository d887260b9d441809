"""The node of a running daemon, asked over its socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from alloy_agent.daemon.addresses import socket_of
from alloy_agent.daemon.api import LayoutRequest, OnProgress, Progress
from alloy_agent.daemon.documents import (
    AccessDocument,
    ApplyDocument,
    DevicesDocument,
    DoctorDocument,
    PlanDocument,
    StatusDocument,
)
from alloy_agent.errors import AlloyError, ConfigError, NotPermittedError
from alloy_agent.model import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from alloy_agent.config import Settings
    from alloy_agent.conformance.keeper.messages import JoinedDocument, ShareDocument
    from alloy_agent.control import ControlClient
    from alloy_agent.daemon.live import TopDocument
    from alloy_agent.daemon.resetting import ResetDocument
    from alloy_agent.model import ApplyReport, AuditResult
    from alloy_agent.proto import agent_pb2 as pb

T = TypeVar("T")


def find_daemon(settings: Settings, *, write: bool) -> RemoteNode | None:
    """Return the daemon of these settings, or None where none answers.

    A user whom the daemon does not serve may still look at devices without it.

    Raises:
        ConfigError: It runs with other simulated silicon than was asked for.
        NotPermittedError: Its socket is closed to this user, who wants to change something.
    """
    from alloy_agent.control import ControlClient

    path = socket_of(settings)
    try:
        client = ControlClient.connect(path)
    except NotPermittedError:
        if write:
            raise
        return None
    if client is None:
        return None
    node = RemoteNode(client)
    if settings.fake:
        _check_fake(node, settings, path)
    return node


def _check_fake(node: RemoteNode, settings: Settings, path: Path) -> None:
    running = node.status().fake
    if tuple(running) != tuple(settings.fake):
        node.close()
        has = ", ".join(running) or "none"
        raise ConfigError(
            f"--fake {', '.join(settings.fake)}: the daemon at {path} has simulated silicon {has}",
            cure="leave --fake out, or give a --state-dir of its own",
        )


class RemoteNode:
    """A `NodeApi` whose answers come from a daemon."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    def devices(self) -> DevicesDocument:
        """Return the daemon's devices document."""
        return _decode(self._client.devices(), DevicesDocument)

    def status(self) -> StatusDocument:
        """Return how the daemon is doing."""
        return _decode(self._client.status(), StatusDocument)

    def plan(self, request: LayoutRequest) -> PlanDocument:
        """Return the daemon's plan."""
        body = self._client.plan(request.text, request.file, request.layout)
        return _decode(body, PlanDocument)

    def recover(self) -> ApplyReport | None:
        """Return None: a daemon does so when it starts."""
        return None

    def apply(self, request: LayoutRequest, on_progress: OnProgress | None = None) -> ApplyDocument:
        """Have the daemon apply a layout."""
        show = None
        if on_progress is not None:

            def show(done: int, total: int, text: str) -> None:
                on_progress(Progress(done=done, total=total, text=text))

        body = self._client.apply(
            request.text,
            request.file,
            request.layout,
            expected={str(key): number for key, number in request.expected.items()},
            disruptive=bool(set(request.consent) - {Scope.PARTITION}),
            on_progress=show,
        )
        return _decode(body, ApplyDocument)

    def access(self, partition: str, tenant: str | None, pid: int | None) -> AccessDocument:
        """Have the daemon bind a tenant."""
        return _decode(self._client.access(partition, tenant or "", pid), AccessDocument)

    def release(self, partition: str, tenant: str) -> int:
        """Have the daemon release a tenant."""
        import msgspec

        document = msgspec.json.decode(self._client.release_access(partition, tenant))
        return int(document["released"])

    def reset(self, device: str) -> ResetDocument:
        """Have the daemon reset a device."""
        from alloy_agent.daemon.resetting import ResetDocument

        return _decode(self._client.reset(device), ResetDocument)

    def audit(self) -> AuditResult:
        """Have the daemon run every check now."""
        from alloy_agent.conformance.report import from_json

        return from_json(self._client.audit())

    def doctor(self) -> DoctorDocument:
        """Return the daemon's diagnoses."""
        return _decode(self._client.query("doctor"), DoctorDocument)

    def top(self) -> TopDocument:
        """Return what the live view shows."""
        from alloy_agent.daemon.live import TopDocument

        return _decode(self._client.query("top"), TopDocument)

    def shares(self) -> ShareDocument:
        """Return how every shared device stands."""
        from alloy_agent.conformance.keeper.messages import ShareDocument

        return _decode(self._client.query("share"), ShareDocument)

    def join(self, wish: pb.Join) -> JoinedDocument:
        """Have a process share a device; return what its command needs."""
        from alloy_agent.conformance.keeper.messages import JoinedDocument

        return _decode(self._client.join(wish), JoinedDocument)

    def rate_policy(self, policy: pb.SetRatePolicy) -> bytes:
        """Set what a shared device goes by; return the document of it."""
        return self._client.rate_policy(policy)

    def watch_top(self, period_s: float) -> Iterator[TopDocument]:
        """Yield what the live view shows, anew each period, over one stream.

        It costs both sides a third of as many questions.
        """
        from alloy_agent.daemon.live import TopDocument

        yield self.top()
        for message in self._client.watch(interval_s=period_s, kinds=("top",)):
            if message.WhichOneof("body") == "reply":
                yield _decode(message.reply.document.json, TopDocument)

    def close(self) -> None:
        """Let go of the daemon."""
        self._client.close()

    def __enter__(self) -> RemoteNode:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _decode(body: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.MsgspecError as exc:
        raise AlloyError(
            f"the daemon's answer is no {type_.__name__} of this version: {exc}",
            cure="restart the daemon after an upgrade",
        ) from exc
