"""What the kubelet's gRPC probes ask: is the agent alive, is it ready.

The kubelet probes TCP ports only, and the plug-in's own sockets are of another kind and speak of
claims. So one small server of the standard health protocol listens on a port, answers two names,
and knows nothing else: who reaches it learns two words.

    liveness   the plug-in answers on its own registration socket, and the agent's loops turn
    readiness  the kubelet has taken the registration

Rules that stay true in here:

* Devices, API server and brain never make it red: a restart of the agent would heal none of them.
* An agent that waits for an older one to end, as during an update, is alive and ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, Final

from alloy_agent.errors import ConfigError

LOG = logging.getLogger(__name__)

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
THREADS: Final = 2
CALLS: Final = 8  # at once; more are turned away


class ProbeServer:
    """The health protocol on one TCP address.

    Args:
        address: Host and port; port 0 takes a free one.
        checks: By name, says why not, or nothing. The empty name is all of them.
    """

    def __init__(self, address: str, checks: Mapping[str, Callable[[], str]]) -> None:
        self.address = address
        self._checks = checks
        self._server: Any = None

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address cannot be had.
        """
        import grpc
        from grpc_health.v1 import health_pb2_grpc

        host, _, number = self.address.rpartition(":")
        if not host or not number.isdecimal() or int(number) > 65535:
            raise ConfigError(
                f"kubernetes.probe_address {self.address!r} is no address and port",
                cure="write it like 0.0.0.0:9465 or [::]:9465",
            )
        server = grpc.server(
            futures.ThreadPoolExecutor(THREADS, thread_name_prefix="probes"),
            maximum_concurrent_rpcs=CALLS,
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4096)),
        )
        health_pb2_grpc.add_HealthServicer_to_server(_servicer(self.judge), server)
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError as exc:
            raise ConfigError(
                f"kubernetes.probe_address {self.address}: {exc}",
                cure="choose an address of this host and a port that nobody has",
            ) from exc
        server.start()
        self.address = f"{host}:{port}"
        self._server = server
        LOG.info("serving", extra={"what": "probes", "addresses": [self.address]})

    def stop(self) -> None:
        """Listen no more. Harmless when it never began."""
        if self._server is not None:
            self._server.stop(0).wait(1.0)
            self._server = None

    def judge(self, name: str) -> str | None:
        """Return why a check fails, "" when it does not, None when there is no such check."""
        if name and name not in self._checks:
            return None
        reasons = [check() for key, check in self._checks.items() if name in ("", key)]
        return "; ".join(reason for reason in reasons if reason)


def _servicer(judge: Callable[[str], str | None]) -> Any:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    class Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
        """Answers `Check`; nobody watches."""

        def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
            """Answer one probe."""
            reason = judge(request.service)
            if reason is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such check")
            if reason:
                LOG.warning("probe_failed", extra={"check": request.service, "reason": reason})
            words = health_pb2.HealthCheckResponse
            return words(status=words.NOT_SERVING if reason else words.SERVING)

    return Servicer()
