"""The brain as a client sees it: a call, an answer, or one line of why not and what could be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import keepalive
from alloy_agent.proto import placement_pb2 as pl

if TYPE_CHECKING:
    import grpc

TIMEOUT_S = 30.0
UNREACHED = ("failed to connect", "DNS resolution failed", "Socket closed", "connections to all")


class PlacementError(Exception):
    """A call that failed: the gRPC status by name, why, and what would be possible."""

    def __init__(self, code: str, message: str, refusal: pl.PlaceRefusal | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.refusal = refusal

    @property
    def unreachable(self) -> str:
        """Return why nobody could be asked; empty where somebody was."""
        if self.code != "UNAVAILABLE" or self.refusal or not self.message.startswith(UNREACHED):
            return ""
        cause = self.message.rpartition(": ")[2]
        return re.sub(r" \([0-9]+\)$", "", cause).lower()

    @property
    def possible(self) -> tuple[str, ...]:
        """Return what could be instead."""
        return tuple(self.refusal.possible) if self.refusal is not None else ()


class BrainClient:
    """Asks one brain; a context manager.

    Args:
        address: Where it listens.
        files: Authority, certificate and key in PEM files; None: plain text.
    """

    def __init__(self, address: str, files: tuple[str, str, str] | None = None) -> None:
        import grpc

        options: list[tuple[str, Any]] = list(keepalive.client_options())
        if files is None:
            self._channel: grpc.Channel = grpc.insecure_channel(address, options=options)
        else:
            authority, certificate, key = (Path(name).read_bytes() for name in files)
            identity = grpc.ssl_channel_credentials(authority, key, certificate)
            self._channel = grpc.secure_channel(address, identity, options=options)
        from alloy_agent.proto import placement_pb2_grpc

        self._stub = placement_pb2_grpc.PlacementStub(self._channel)

    def __enter__(self) -> BrainClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._channel.close()

    def place(self, request: pl.PlaceRequest, timeout_s: float = TIMEOUT_S) -> pl.PlaceReply:
        """Return the lease of a request.

        Raises:
            PlacementError: There is none, and why.
        """
        reply: pl.PlaceReply = self._call("Place", request, timeout_s)
        return reply

    def release(self, lease: str, tenant: str, reason: str = "") -> pl.ReleaseReply:
        """Give a lease back."""
        request = pl.ReleaseRequest(lease=lease, tenant=tenant, reason=reason)
        reply: pl.ReleaseReply = self._call("Release", request)
        return reply

    def renew(self, request: pl.RenewRequest) -> pl.PlaceReply:
        """Commit or lengthen a lease."""
        reply: pl.PlaceReply = self._call("Renew", request)
        return reply

    def explain(self, *, decision: str = "", lease: str = "", request: str = "") -> pl.Decision:
        """Return a decision record."""
        asked = pl.ExplainRequest(decision=decision, lease=lease, request=request)
        reply: pl.Decision = self._call("Explain", asked)
        return reply

    def nodes(self, node: str = "", *, full: bool = False) -> list[pl.NodeSummary]:
        """Return all nodes, or one."""
        found: list[pl.NodeSummary] = []
        token = ""
        while True:
            asked = pl.ListNodesRequest(node=node, full=full, page_token=token)
            reply: pl.ListNodesReply = self._call("ListNodes", asked)
            found.extend(reply.nodes)
            token = reply.next_page_token
            if not token:
                return found

    def leases(self, tenant: str = "", node: str = "") -> list[pl.LeaseSummary]:
        """Return all living leases, or a tenant's, or a node's."""
        found: list[pl.LeaseSummary] = []
        token = ""
        while True:
            asked = pl.ListLeasesRequest(tenant=tenant, node=node, page_token=token)
            reply: pl.ListLeasesReply = self._call("ListLeases", asked)
            found.extend(reply.leases)
            token = reply.next_page_token
            if not token:
                return found

    def drain(self, node: str, drain: pb.Drain) -> pl.DrainNodeReply:
        """Have a node take nothing new on what the drain names."""
        asked = pl.DrainNodeRequest(node=node, drain=drain)
        reply: pl.DrainNodeReply = self._call("DrainNode", asked)
        return reply

    def undrain(self, node: str, undrain: pb.Undrain) -> pl.DrainNodeReply:
        """Take a drain back."""
        asked = pl.UndrainNodeRequest(node=node, undrain=undrain)
        reply: pl.DrainNodeReply = self._call("UndrainNode", asked)
        return reply

    def watch(self, kinds: tuple[str, ...] = (), node: str = "") -> Any:
        """Return the stream of what changes; iterate it, `cancel()` it."""
        return self._stub.Watch(pl.WatchRequest(node=node, kinds=kinds))

    def _call(self, name: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        import grpc

        try:
            return getattr(self._stub, name)(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _failure(exc) from exc


def _failure(exc: Any) -> PlacementError:
    """Return a failed call as an error with the refusal that its metadata carries."""
    refusal = None
    for key, value in exc.trailing_metadata() or ():
        if key == keepalive.REFUSAL_KEY:
            refusal = pl.PlaceRefusal.FromString(value)
    message = refusal.message if refusal is not None else " ".join(str(exc.details()).split())
    return PlacementError(exc.code().name, message, refusal)
