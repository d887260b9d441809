"""The kubelet plug-in: two unix sockets, one that registers and one that serves.

The kubelet finds `<registry>/<driver>-reg.sock`, asks who we are, and from then on calls the
service socket. Removing the registration socket is what ends the registration.

Rules that stay true in here:

* Serve first, register after; when stopping, unregister first, then finish the calls in hand.
* `GetInfo` answers from memory: the kubelet gives it one second.
* A call waits for obstacles up to its own deadline less a margin, rather than fail early.
* Every claim of a request gets an answer of its own, an error where it must be; a defect in one is
  never silence for the others.
* With `instance` (a pod's UID) both sockets carry it, so that an old and a new agent can stand
  beside each other during an update.

Source: kubelet plug-in registration and DRA gRPC v1 and v1beta1; deadlines as measured on
Kubernetes 1.36.2 (45 s a call, 30 s until a lost driver's slices are removed).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from alloy_agent.errors import AlloyError, ConfigError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.preparing import Answer
from alloy_agent.model import Value
from alloy_agent.proto import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)

LOG = logging.getLogger(__name__)

VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)
SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path less its end
CALL_S: Final = 40.0  # when the kubelet gives no deadline; it waits 45 s
MARGIN_S: Final = 4.0
INFO_S: Final = 1.0  # that the kubelet gives to GetInfo
THREADS: Final = 16
HEALTH_PERIOD_S: Final = 10.0  # the kubelet takes silence of 30 s for unknown
HEALTH_TIMEOUT_S: Final = 30
MESSAGE_BYTES: Final = 1024


class PluginPaths(Value, frozen=True, kw_only=True):
    """Where the kubelet looks and where it calls; the same inside and outside of a container."""

    registry: str = "/var/lib/kubelet/plugins_registry"
    plugins: str = "/var/lib/kubelet/plugins"
    instance: str = ""

    def registration(self, driver: str) -> Path:
        """Return the registration socket."""
        middle = f"-{self.instance}" if self.instance else ""
        return Path(self.registry) / f"{driver}{middle}-reg.sock"

    def service(self, driver: str) -> Path:
        """Return the service socket."""
        name = f"dra-{self.instance}.sock" if self.instance else "dra.sock"
        return Path(self.plugins) / driver / name


class DeviceHealth(Value, frozen=True, kw_only=True):
    """How one published device is doing; `healthy` None: nobody knows."""

    pool: str
    device: str
    healthy: bool | None
    message: str = ""


class ClaimHandler(Protocol):
    """Who does what the kubelet asks."""

    def prepare(self, ref: ClaimRef, deadline_s: float) -> tuple[Answer, ...]:
        """Prepare one claim."""
        ...

    def unprepare(self, ref: ClaimRef, deadline_s: float) -> None:
        """Unprepare one claim."""
        ...


class DraPlugin:
    """Both sockets of the plug-in.

    Args:
        driver: Our name.
        paths: Where the sockets are.
        on_failure: Told of a claim that could not be prepared, with the reason.
        on_registered: Told when the kubelet has taken (or refused) the registration.
    """

    def __init__(
        self,
        driver: str,
        paths: PluginPaths,
        on_failure: Callable[[ClaimRef, str], None] = lambda _ref, _reason: None,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.driver = driver
        self.paths = paths
        self.registered = threading.Event()
        self._on_failure = on_failure
        self._on_registered = on_registered
        self._attached = threading.Event()
        self._handler: ClaimHandler | None = None
        self._health: tuple[DeviceHealth, ...] = ()
        self._health_changed = threading.Condition()
        self._stopping = False
        self._servers: list[grpc.Server] = []

    # --- life ---

    def start(self) -> None:
        """Serve, then register.

        Raises:
            ConfigError: A socket cannot be made where it belongs.
        """
        service, registration = self._socket_paths()
        self._servers.append(self._serve(service, self._add_services))
        try:
            self._servers.append(self._serve(registration, self._add_registration))
        except ConfigError:
            self.stop()
            raise
        LOG.info("plugin_serving", extra={"service": str(service), "register": str(registration)})

    def attach(self, handler: ClaimHandler) -> None:
        """Answer calls from now on; those that came before have waited."""
        self._handler = handler
        self._attached.set()

    def stop(self, grace_s: float = 10.0) -> None:
        """Unregister, let calls in hand end, and remove the sockets. Harmless when repeated."""
        service, registration = self._socket_paths()
        registration.unlink(missing_ok=True)
        with self._health_changed:
            self._stopping = True
            self._health_changed.notify_all()
        for server in reversed(self._servers):
            server.stop(grace_s).wait(grace_s + 1.0)
        self._servers.clear()
        service.unlink(missing_ok=True)

    def _socket_paths(self) -> tuple[Path, Path]:
        return self.paths.service(self.driver), self.paths.registration(self.driver)

    def _serve(self, path: Path, add: Callable[[grpc.Server], None]) -> grpc.Server:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket {path}: longer than {SOCKET_PATH_BYTES} bytes",
                cure="use a shorter driver name or kubelet directory",
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of an agent that was killed
            server = grpc.server(futures.ThreadPoolExecutor(THREADS, thread_name_prefix="dra"))
            add(server)
            # Bound under a hidden name first: the kubelet acts on what it sees, and must not see a
            # socket that nobody can reach yet.
            hidden = path.with_name(f".{path.name}")
            hidden.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{hidden}")
            server.start()
            hidden.chmod(0o600)
            hidden.rename(path)
        except (OSError, RuntimeError) as exc:
            raise ConfigError(
                f"kubelet plug-in socket {path}: {exc}",
                cure="mount the kubelet's directories at the same path, writable, and run as root",
            ) from exc
        return server

    def _add_registration(self, server: grpc.Server) -> None:
        registration_pb2_grpc.add_RegistrationServicer_to_server(_Registration(self), server)

    def _add_services(self, server: grpc.Server) -> None:
        # One class serves both versions, so it can derive from neither's generated base.
        claims: tuple[Any, Any] = (_Service(self, dra_v1_pb2), _Service(self, dra_v1beta1_pb2))
        health: tuple[Any, Any] = (
            _Health(self, dra_health_v1_pb2),
            _Health(self, dra_health_v1alpha1_pb2),
        )
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(claims[0], server)
        dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(claims[1], server)
        dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health[0], server)
        dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health[1], server)

    # --- registration ---

    def answers(self) -> str:
        """Return why this plug-in does not answer on its own registration socket, or nothing."""
        path = self.paths.registration(self.driver)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            try:
                info = registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                    registration_pb2.InfoRequest(), timeout=INFO_S
                )
            except grpc.RpcError as exc:
                return f"{path}: {exc.code().name}"
        return "" if info.name == self.driver else f"{path}: answers as {info.name}"

    def info(self) -> registration_pb2.PluginInfo:
        """Return who we are."""
        return registration_pb2.PluginInfo(
            type="DRAPlugin",
            name=self.driver,
            endpoint=str(self.paths.service(self.driver)),
            supported_versions=VERSIONS,
        )

    def notified(self, taken: bool, error: str) -> None:
        """Note what the kubelet made of the registration."""
        if taken:
            LOG.info("plugin_registered", extra={"driver": self.driver})
            self.registered.set()
            self._on_registered()
        else:
            LOG.error("plugin_refused", extra={"driver": self.driver, "reason": error})
            self.registered.clear()

    # --- claims ---

    def prepare(self, ref: ClaimRef, deadline_s: float) -> tuple[Answer, ...]:
        """Prepare one claim; tell of a failure.

        Raises:
            AlloyError: Why not.
        """
        try:
            return self._ready(ref, deadline_s).prepare(ref, deadline_s)
        except AlloyError as exc:
            self._on_failure(ref, str(exc))
            raise

    def unprepare(self, ref: ClaimRef, deadline_s: float) -> None:
        """Unprepare one claim.

        Raises:
            AlloyError: Why not.
        """
        self._ready(ref, deadline_s).unprepare(ref, deadline_s)

    def _ready(self, ref: ClaimRef, deadline_s: float) -> ClaimHandler:
        self._attached.wait(max(0.0, deadline_s - time.monotonic()))
        if self._handler is None:
            raise ConfigError(
                f"{ref}: the agent has not started yet, or another one has not ended",
                cure="wait; the kubelet tries again",
            )
        return self._handler

    # --- health ---

    def tell_health(self, devices: tuple[DeviceHealth, ...]) -> None:
        """Take over how all published devices are doing; listeners are told when it changed."""
        with self._health_changed:
            if devices != self._health:
                self._health = devices
                self._health_changed.notify_all()

    def health_stream(self, gone: Callable[[], bool]) -> Iterator[tuple[DeviceHealth, ...]]:
        """Yield the full list at once, on each change, and every ten seconds."""
        last: tuple[DeviceHealth, ...] | None = None
        while not self._stopping and not gone():
            with self._health_changed:
                if last == self._health:
                    self._health_changed.wait(HEALTH_PERIOD_S)
                last = self._health
            if self._stopping or gone():
                return
            yield last
            with self._health_changed:
                if last == self._health:
                    self._health_changed.wait(HEALTH_PERIOD_S)
                last = None


class _Registration(registration_pb2_grpc.RegistrationServicer):
    def __init__(self, plugin: DraPlugin) -> None:
        self._plugin = plugin

    def GetInfo(self, request: Any, context: Any) -> registration_pb2.PluginInfo:  # noqa: N802
        del request, context
        return self._plugin.info()

    def NotifyRegistrationStatus(  # noqa: N802
        self, request: registration_pb2.RegistrationStatus, context: Any
    ) -> registration_pb2.RegistrationStatusResponse:
        del context
        self._plugin.notified(request.plugin_registered, request.error)
        return registration_pb2.RegistrationStatusResponse()


class _Service:
    """Both versions of the service: they differ in one field."""

    def __init__(self, plugin: DraPlugin, messages: Any) -> None:
        self._plugin = plugin
        self._pb = messages

    def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = self._pb.NodePrepareResourcesResponse()
        deadline_s = _deadline(context)
        for ref, claim in self._each(request):
            answer = response.claims[ref.uid]
            try:
                devices = [self._device(one) for one in self._plugin.prepare(claim, deadline_s)]
                answer.devices.extend(devices)
            except AlloyError as exc:
                answer.error = str(exc)
            except Exception as exc:
                LOG.exception("prepare_defect", extra={"claim": ref.uid})
                answer.error = f"a defect in the agent: {type(exc).__name__}: {exc}"
        return response

    def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = self._pb.NodeUnprepareResourcesResponse()
        deadline_s = _deadline(context)
        for ref, claim in self._each(request):
            answer = response.claims[ref.uid]
            answer.SetInParent()  # without it the key is absent, and the claim counts as skipped
            try:
                self._plugin.unprepare(claim, deadline_s)
            except AlloyError as exc:
                answer.error = str(exc)
            except Exception as exc:
                LOG.exception("unprepare_defect", extra={"claim": ref.uid})
                answer.error = f"a defect in the agent: {type(exc).__name__}: {exc}"
        return response

    @staticmethod
    def _each(request: Any) -> Iterator[tuple[Any, ClaimRef]]:
        for one in request.claims:
            yield one, ClaimRef(uid=one.uid, namespace=one.namespace, name=one.name)

    def _device(self, answer: Answer) -> Any:
        made = self._pb.Device(
            request_names=[answer.request],
            pool_name=answer.pool,
            device_name=answer.device,
            cdi_device_ids=answer.cdi_ids,
        )
        if answer.share_id is not None and hasattr(made, "share_id"):
            made.share_id = answer.share_id
        return made


class _Health:
    def __init__(self, plugin: DraPlugin, messages: Any) -> None:
        self._plugin = plugin
        self._pb = messages

    def NodeWatchResources(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        del request
        for devices in self._plugin.health_stream(lambda: not context.is_active()):
            now_s = int(time.time())
            yield self._pb.NodeWatchResourcesResponse(
                devices=[self._device(one, now_s) for one in devices]
            )

    def _device(self, one: DeviceHealth, now_s: int) -> Any:
        words = {True: self._pb.HEALTHY, False: self._pb.UNHEALTHY, None: self._pb.UNKNOWN}
        return self._pb.DeviceHealth(
            device=self._pb.DeviceIdentifier(pool_name=one.pool, device_name=one.device),
            health=words[one.healthy],
            last_updated_time=now_s,
            health_check_timeout_seconds=HEALTH_TIMEOUT_S,
            message=one.message[:MESSAGE_BYTES],
        )


def _deadline(context: Any) -> float:
    """Return until when a call may last, on the monotonic clock."""
    left_s = CALL_S + MARGIN_S
    with contextlib.suppress(TypeError, AttributeError):
        left_s = min(left_s, float(context.time_remaining()))
    return time.monotonic() + max(left_s - MARGIN_S, left_s / 2)
