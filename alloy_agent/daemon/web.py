"""The daemon's HTTP side: `/metrics`, `/healthz`, `/readyz`, on loopback unless told otherwise.

`/healthz` answers whether the agent's own loops turn; a sick device never makes it red, since
restarting the agent would not heal a device. `/readyz` is red until the node has been seen once.
Each request has a thread of its own, of which there is a bounded number, and a deadline: for each
read and write, and for the connection as a whole, so that a client that sends a byte now and then
is ended too. When all are taken, the one that has lasted longest gives way, so that clients that
send or read slowly, by mistake or on purpose, hold nobody up: a probe is always answered.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from alloy_agent.config import MetricsSettings
from alloy_agent.errors import ConfigError
from alloy_agent.telemetry.metrics import CONTENT_TYPE, OPENMETRICS_TYPE

LOG = logging.getLogger(__name__)

REQUEST_DEADLINE_S = 10.0
CONNECTION_S = 15.0  # from the first byte to the last, however lively it is
MAX_REQUESTS = 16
LOOK_AT_STOP_S = 0.5
PATIENCE_S = 0.1  # a page takes milliseconds; what lasted longer may have to give way


class Answer(NamedTuple):
    """One page: status, body and its type."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class Pages(NamedTuple):
    """What is served: `health` and `ready` return None when well, else the reason."""

    metrics: Callable[[], bytes]
    health: Callable[[], str | None]
    ready: Callable[[], str | None]
    openmetrics: Callable[[], bytes] | None = None
    dcgm: Callable[[], bytes] | None = None


def answer(
    pages: Pages, path: str, authorization: str, token: bytes | None, accept: str = ""
) -> Answer:
    """Return the page for a request path."""
    route = path.split("?", 1)[0]
    if route == "/metrics" or (route == "/metrics/dcgm" and pages.dcgm is not None):
        if token is not None and not hmac.compare_digest(
            authorization.encode("utf-8", "replace"), b"Bearer " + token
        ):
            return Answer(401, b"a bearer token is needed\n")
        if route == "/metrics/dcgm" and pages.dcgm is not None:
            return Answer(200, pages.dcgm(), CONTENT_TYPE)
        if pages.openmetrics is not None and "application/openmetrics-text" in accept:
            return Answer(200, pages.openmetrics(), OPENMETRICS_TYPE)
        return Answer(200, pages.metrics(), CONTENT_TYPE)
    if route in ("/healthz", "/readyz"):
        reason = (pages.health if route == "/healthz" else pages.ready)()
        return Answer(200, b"ok\n") if reason is None else Answer(503, f"{reason}\n".encode())
    return Answer(404, b"try /metrics, /healthz or /readyz\n")


class _Server(ThreadingHTTPServer):
    """A threading server with a bound on requests at once."""

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], pages: Pages, token: bytes | None) -> None:
        self.pages = pages
        self.token = token
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.open: dict[int, tuple[float, Any]] = {}  # by descriptor, the oldest first
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a thread; when too many are being served, the oldest gives its place."""
        if not self.slots.acquire(blocking=False):
            self._end_oldest()
            if not self.slots.acquire(timeout=PATIENCE_S):
                self.shutdown_request(request)
                return
        self.open[request.fileno()] = (time.monotonic(), request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections that have lasted too long; called by the serving loop."""
        if self.open:
            begun_s = time.monotonic() - CONNECTION_S
            for since_s, request in tuple(self.open.values()):
                if since_s < begun_s:
                    _cut(request)

    def _end_oldest(self) -> None:
        """Cut the connection that has lasted longest, if it lasts longer than any scrape."""
        oldest = min(tuple(self.open.values()), key=lambda one: one[0], default=None)
        if oldest is None or time.monotonic() - oldest[0] < PATIENCE_S:
            return
        _cut(oldest[1])

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one request and give its slot back."""
        number = request.fileno()
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.open.pop(number, None)
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request as an event; the client is gone or misbehaved."""
        LOG.debug("http_request_failed", extra={"reason": str(sys.exc_info()[1])})


def _cut(request: Any) -> None:
    """End a connection from outside; its thread wakes and ends by itself."""
    with contextlib.suppress(OSError):
        # Below TLS, whose state belongs to that thread.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_DEADLINE_S
    server_version = "alloy-agent"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page."""
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._send(with_body=False)

    def _send(self, *, with_body: bool) -> None:
        server = self.server
        page = answer(
            server.pages,
            self.path,
            self.headers.get("Authorization", ""),
            server.token,
            self.headers.get("Accept", ""),
        )
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Log at DEBUG; a scrape is no event."""
        LOG.debug("http_request", extra={"line": format % args})


class WebServer:
    """The HTTP listener and its thread."""

    def __init__(self, settings: MetricsSettings, pages: Pages) -> None:
        """Bind the address.

        Raises:
            ConfigError: It is taken, not ours, or a file named with it cannot be read.
        """
        host, _, port = settings.address.rpartition(":")
        host = host.strip("[]")
        kind = _Server6 if ":" in host else _Server
        token = _token(settings.token_file)
        try:
            self._server = kind((host, int(port)), pages, token)
        except OSError as exc:
            raise ConfigError(
                f"metrics.address {settings.address}: {(exc.strerror or str(exc)).lower()}",
                cure="choose another metrics.address, or set metrics.enabled: false",
            ) from exc
        self._scheme = "http"
        if settings.tls_certificate_file and settings.tls_key_file:
            self._secure(
                settings.tls_certificate_file, settings.tls_key_file, settings.client_ca_file
            )
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_AT_STOP_S,), name="http", daemon=True
        )

    def _secure(self, certificate: str, key: str, client_ca: str | None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as exc:
            self._server.server_close()
            raise ConfigError(
                f"metrics.tls_certificate_file {certificate}: {exc}", cure="give a PEM pair"
            ) from exc
        if client_ca is not None:
            try:
                context.load_verify_locations(client_ca)
            except (OSError, ssl.SSLError) as exc:
                self._server.server_close()
                raise ConfigError(
                    f"metrics.client_ca_file {client_ca}: {exc}", cure="give a PEM file"
                ) from exc
            context.verify_mode = ssl.CERT_REQUIRED
        # The handshake happens on the request's thread: a silent client must not stop accept.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._scheme = "https"

    @property
    def url(self) -> str:
        """Where it is served, with the port that was really bound."""
        address = self._server.server_address
        host = str(address[0])
        name = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{name}:{address[1]}"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the listener."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=2.0)
        self._server.server_close()


def _token(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as exc:
        raise ConfigError(
            f"metrics.token_file {path}: {(exc.strerror or str(exc)).lower()}",
            cure="make it readable",
        ) from exc
    if not token:
        raise ConfigError(f"metrics.token_file {path}: empty", cure="write a token into it")
    return token
