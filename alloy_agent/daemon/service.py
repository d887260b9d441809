"""The daemon's node as the local socket and the brain ask it: JSON documents in bytes.

Implements `control.NodeApi`. Commands come on threads of their own; `Node` orders what changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.daemon.api import LayoutRequest, Progress
from alloy_agent.errors import ConfigError
from alloy_agent.model import PartitionId, Scope

if TYPE_CHECKING:
    from alloy_agent.control import OnProgress
    from alloy_agent.daemon.documents import StatusDocument
    from alloy_agent.daemon.live import TopDocument
    from alloy_agent.daemon.node import Node
    from alloy_agent.model import AuditResult
    from alloy_agent.proto import agent_pb2 as pb


TOP_MIN_S: Final = 0.1
TOP_MAX_S: Final = 10.0


class NodeService:
    """The commands of a running daemon.

    Args:
        node: What answers.
        status: Returns how the daemon is doing.
        audit: Runs every check now, through the daemon's auditor.
        metrics: Returns the metrics page.
        watch: Yields what happens, for `NodeAgent.Watch`.
        handle: Does a command that changes only the books.
        top: Returns what the live view shows.
        touched: Told that the node has changed, so that the loops look at once.
    """

    def __init__(  # noqa: PLR0913 - one for each thing that commands reach
        self,
        node: Node,
        *,
        status: Callable[[], StatusDocument],
        audit: Callable[[], AuditResult],
        metrics: Callable[[], bytes],
        touched: Callable[[], None],
        watch: Callable[[threading.Event, float, tuple[str, ...]], Iterator[pb.AgentMessage]],
        handle: Callable[[pb.BrainMessage], pb.Reply] | None = None,
        top: Callable[[], TopDocument] | None = None,
    ) -> None:
        self._node = node
        self._status = status
        self._audit = audit
        self._metrics = metrics
        self._touched = touched
        self._watch = watch
        self._handle = handle
        self._top = top

    def devices(self) -> bytes:
        """Return the devices document."""
        return msgspec.json.encode(self._node.devices())

    def status(self) -> bytes:
        """Return the status document."""
        return msgspec.json.encode(self._status())

    def document(self, name: str, options: Mapping[str, str]) -> bytes:
        """Return another document by name.

        Raises:
            ConfigError: There is no such document.
        """
        del options
        if name == "doctor":
            return msgspec.json.encode(self._node.doctor())
        if name == "top" and self._top is not None:
            return msgspec.json.encode(self._top())
        if name == "share":
            from alloy_agent.daemon.sharing import share_document

            return msgspec.json.encode(share_document(self._node.shared.views()))
        if name == "metrics":
            text = self._metrics().decode()
            return msgspec.json.encode({"schema": "alloy.metrics/v1", "text": text})
        raise ConfigError(
            f"document {name}: this agent has none of that name",
            cure="ask for devices, status, top, share, doctor or metrics",
        )

    def plan(self, layout: str, source: str, name: str | None) -> bytes:
        """Return the plan document; changes nothing."""
        request = LayoutRequest(text=layout, file=source or "layout", layout=name)
        return msgspec.json.encode(self._node.plan(request))

    def apply(  # noqa: PLR0913 - the interface of `control.NodeApi`
        self,
        layout: str,
        source: str,
        name: str | None,
        *,
        expected: Mapping[str, int],
        disruptive: bool,
        on_progress: OnProgress,
    ) -> bytes:
        """Apply a layout and return the apply document.

        Whoever asks agrees to interrupt partitions; with `disruptive`, anything that the plan
        names.
        """
        request = LayoutRequest(
            text=layout,
            file=source or "layout",
            layout=name,
            expected={PartitionId(key): number for key, number in expected.items()},
            consent=tuple(Scope) if disruptive else (Scope.PARTITION,),
        )

        def tell(step: Progress) -> None:
            on_progress(step.done, step.total, step.text)

        try:
            return msgspec.json.encode(self._node.apply(request, tell))
        finally:
            self._touched()

    def audit(self, subjects: tuple[str, ...], checks: tuple[str, ...]) -> bytes:
        """Run the checks once and return the audit document."""
        from alloy_agent.conformance.report import to_json

        return to_json(_part(self._audit(), subjects, checks)).encode()

    def access(self, partition: str, tenant: str, pid: int | None) -> bytes:
        """Bind a tenant to a partition; return the access document."""
        document = self._node.access(partition, tenant or None, pid)
        self._touched()
        return msgspec.json.encode(document)

    def reset(self, device: str) -> bytes:
        """Reset a device; return the reset document."""
        try:
            return msgspec.json.encode(self._node.reset(device))
        finally:
            self._touched()

    def release_access(self, partition: str, tenant: str) -> bytes:
        """Take a tenant's binding back; return how many there were."""
        released = self._node.release(partition, tenant)
        self._touched()
        return msgspec.json.encode({"schema": "alloy.release/v1", "released": released})

    def handle(self, command: pb.BrainMessage) -> pb.Reply:
        """Do what changes only this node's books."""
        if self._handle is None:
            from alloy_agent.proto.failures import unknown_command_reply

            return unknown_command_reply(command.id, "a command that needs a brain's lease book")
        return self._handle(command)

    def watch(
        self, stop: threading.Event, interval_s: float, kinds: tuple[str, ...]
    ) -> Iterator[pb.AgentMessage]:
        """Yield what happens until `stop` is set.

        Who wants "top" alone gets the live document as a reply each `interval_s`.
        """
        if kinds == ("top",) and self._top is not None:
            return self._watch_top(stop, interval_s)
        return self._watch(stop, interval_s, kinds)

    def _watch_top(self, stop: threading.Event, interval_s: float) -> Iterator[pb.AgentMessage]:
        from alloy_agent.proto import agent_pb2 as pb

        period_s = min(max(interval_s or 1.0, TOP_MIN_S), TOP_MAX_S)
        due_s = time.monotonic()
        while not stop.is_set():
            document = pb.Document(schema="alloy.top/v1", json=self.document("top", {}))
            yield pb.AgentMessage(reply=pb.Reply(status=pb.STATUS_OK, document=document))
            due_s = max(due_s + period_s, time.monotonic())
            stop.wait(max(0.0, due_s - time.monotonic()))


def _part(result: AuditResult, subjects: tuple[str, ...], checks: tuple[str, ...]) -> AuditResult:
    """Return an audit with the wanted subjects and checks only; its verdict stays the node's."""
    if not subjects and not checks:
        return result
    reports = tuple(
        msgspec.structs.replace(
            report,
            judgements=tuple(j for j in report.judgements if not checks or j.check in checks),
        )
        for report in result.partitions
        if not subjects or report.partition.id in subjects or report.partition.device in subjects
    )
    judgements = tuple(j for j in result.node_judgements if not checks or j.check in checks)
    return msgspec.structs.replace(result, partitions=reports, node_judgements=judgements)
