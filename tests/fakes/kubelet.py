"""A kubelet, as far as a DRA driver meets one: registration, calls, health, and how it forgets.

It watches the registration directory, dials what appears there, asks `GetInfo` within one second,
takes the first version it knows, and tells the outcome. Calls go to the newest connected endpoint,
with the kubelet's own deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from alloy_agent.proto import (
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)

CALL_S = 45.0
INFO_S = 1.0
KNOWN = ("v1.DRAPlugin", "v1beta1.DRAPlugin")


class Endpoint:
    """One registered plug-in."""

    def __init__(self, socket: Path, info: registration_pb2.PluginInfo, version: str) -> None:
        self.socket = socket
        self.info = info
        self.version = version
        self.channel = grpc.insecure_channel(f"unix:{info.endpoint}")
        if version == "v1.DRAPlugin":
            self.messages: Any = dra_v1_pb2
            self.stub: Any = dra_v1_pb2_grpc.DRAPluginStub(self.channel)
        else:
            self.messages = dra_v1beta1_pb2
            self.stub = dra_v1beta1_pb2_grpc.DRAPluginStub(self.channel)


class FakeKubelet:
    """Use as a context manager; `versions` are those that this kubelet knows."""

    def __init__(self, root: Path, versions: tuple[str, ...] = KNOWN) -> None:
        self.registry = root / "plugins_registry"
        self.plugins = root / "plugins"
        self.registry.mkdir(parents=True, exist_ok=True)
        self.endpoints: list[Endpoint] = []
        self.refused: dict[str, str] = {}
        self._versions = versions
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FakeKubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away without telling anyone, as a kubelet does."""
        self._stop.set()
        self._thread.join(10)
        for endpoint in self.endpoints:
            endpoint.channel.close()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            found = {
                path
                for path in self.registry.iterdir()
                if path.is_socket() and not path.name.startswith(".")
            }
            known = {endpoint.socket for endpoint in self.endpoints}
            for path in sorted(found - known):
                with contextlib.suppress(grpc.RpcError):
                    self._register(path)
            for endpoint in [e for e in self.endpoints if e.socket not in found]:
                endpoint.channel.close()
                with self._changed:
                    self.endpoints.remove(endpoint)
                    self._changed.notify_all()

    def _register(self, path: Path) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = registration_pb2_grpc.RegistrationStub(channel)
            info = stub.GetInfo(registration_pb2.InfoRequest(), timeout=INFO_S)
            error = ""
            version = next((v for v in info.supported_versions if v in self._versions), "")
            if info.type != "DRAPlugin" or not version:
                error = f"no known version among {list(info.supported_versions)}"
            if any(e.info.endpoint == info.endpoint for e in self.endpoints):
                error = f"endpoint {info.endpoint} is in use"
            status = registration_pb2.RegistrationStatus(plugin_registered=not error, error=error)
            stub.NotifyRegistrationStatus(status, timeout=5)
        with self._changed:
            if error:
                self.refused[path.name] = error
            else:
                self.endpoints.append(Endpoint(path, info, version))
            self._changed.notify_all()

    def wait(self, count: int = 1, timeout_s: float = 20.0) -> Endpoint:
        """Return the newest endpoint once so many are registered."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self.endpoints) != count:
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"{len(self.endpoints)} of {count} plug-ins registered"
                self._changed.wait(left_s)
        return self.endpoints[-1] if self.endpoints else None  # type: ignore[return-value]

    def prepare(self, *claims: tuple[str, str, str], timeout_s: float = CALL_S) -> dict[str, Any]:
        """Call prepare for (uid, namespace, name) claims; return the answers by uid."""
        endpoint = self.wait(max(1, len(self.endpoints)))
        messages = endpoint.messages
        request = messages.NodePrepareResourcesRequest(
            claims=[messages.Claim(uid=u, namespace=s, name=n) for u, s, n in claims]
        )
        response = endpoint.stub.NodePrepareResources(request, timeout=timeout_s)
        return self._answers(claims, response)

    def unprepare(self, *claims: tuple[str, str, str], timeout_s: float = CALL_S) -> dict[str, Any]:
        """Call unprepare; return the answers by uid."""
        endpoint = self.wait(max(1, len(self.endpoints)))
        messages = endpoint.messages
        request = messages.NodeUnprepareResourcesRequest(
            claims=[messages.Claim(uid=u, namespace=s, name=n) for u, s, n in claims]
        )
        response = endpoint.stub.NodeUnprepareResources(request, timeout=timeout_s)
        return self._answers(claims, response)

    @staticmethod
    def _answers(claims: tuple[tuple[str, str, str], ...], response: Any) -> dict[str, Any]:
        """Return the answers; an unknown or a missing uid fails the pod."""
        assert set(response.claims) == {uid for uid, _, _ in claims}
        return dict(response.claims)

    def health(self) -> Iterator[Any]:
        """Open the health stream of the newest endpoint."""
        stub = dra_health_v1alpha1_pb2_grpc.DRAResourceHealthStub(self.wait().channel)
        request = dra_health_v1alpha1_pb2.NodeWatchResourcesRequest()
        yield from stub.NodeWatchResources(request, timeout=60)
