"""A REST client of the few verbs that the agent uses, over the standard library.

The official client costs 45 MB and 0.4 s; five verbs on four resources do not need it.

Rules that stay true in here:

* Every request has a deadline. 429 and 5xx are tried again a few times, with the server's delay.
* The token is read anew for each request: the kubelet rotates it.
* A connection is used again while it is fresh: a handshake costs more than a request. One that the
  server has closed meanwhile is replaced without a word; watches have their own.
* What comes back is untrusted: size bounded, JSON or an error.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from alloy_agent.errors import AlloyError, ConfigError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.slices import API_VERSION, Document
from alloy_agent.model import Value

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
BODY_BYTES: Final = 32 << 20
TRIES: Final = 4
DELAY_S: Final = 0.2
DELAY_MAX_S: Final = 5.0
IDLE_S: Final = 10.0  # shorter than any server or balancer keeps an idle connection
IDLE_MAX: Final = 2
AGAIN: Final = frozenset({429, 500, 502, 503, 504})
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"


class ApiError(AlloyError):
    """The API server refused, or did not answer (`status` 0)."""

    def __init__(self, message: str, *, status: int = 0, cure: str = "") -> None:
        super().__init__(message, cure=cure)
        self.status = status


class ApiAccess(Value, frozen=True, kw_only=True):
    """How the API server is reached."""

    server: str
    ca_file: str | None = None
    token_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    timeout_s: float = 10.0


def in_cluster(environ: Mapping[str, str], account: str = ACCOUNT) -> ApiAccess | None:
    """Return how a pod reaches its API server, or None outside of one."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return None
    shown = f"[{host}]" if ":" in host else host
    return ApiAccess(
        server=f"https://{shown}:{port}", ca_file=f"{account}/ca.crt", token_file=f"{account}/token"
    )


class ApiClient:
    """Requests to one API server, from any thread."""

    def __init__(self, access: ApiAccess) -> None:
        self._access = access
        parts = urllib.parse.urlsplit(access.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"API server {access.server!r} is no http(s) address",
                cure="write it like https://10.0.0.1:6443",
            )
        if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(
                f"API server {access.server}: plain text beyond loopback", cure="use https"
            )
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []  # the newest is last

    def close(self) -> None:
        """Let go of idle connections; requests make new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def __del__(self) -> None:
        """Close what is idle."""
        if hasattr(self, "_idle"):
            self.close()

    # --- claims, nodes, events ---

    def resource_claim(self, namespace: str, name: str) -> Document | None:
        """Return a claim, or None where there is none."""
        space, claim = urllib.parse.quote(namespace, safe=""), urllib.parse.quote(name, safe="")
        return self._found(f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims/{claim}")

    def node(self, name: str) -> Document | None:
        """Return a node, or None where there is none."""
        return self._found(f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}")

    def _found(self, path: str) -> Document | None:
        try:
            return self.request("GET", path)
        except ApiError as exc:
            if exc.status == 404:
                return None
            raise

    def claim_event(self, ref: ClaimRef, reason: str, message: str, *, reporter: str) -> None:
        """Put a warning on a claim, for whoever asks why a pod does not start."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{ref.name[:200]}.", "namespace": ref.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": "ResourceClaim",
                "namespace": ref.namespace,
                "name": ref.name,
                "uid": ref.uid,
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning",
            "source": {"component": reporter},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        space = urllib.parse.quote(ref.namespace, safe="")
        self.request("POST", f"/api/v1/namespaces/{space}/events", event)

    def claim_devices(self, ref: ClaimRef, driver: str, entries: list[Document]) -> bool:
        """Make these a driver's entries of a claim's status; others' entries stay.

        Returns:
            False where that claim is not there (any more), or was replaced by another of its name.
        """
        space, name = (urllib.parse.quote(text, safe="") for text in (ref.namespace, ref.name))
        query = urllib.parse.urlencode({"fieldManager": driver, "force": "true"})
        path = f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims/{name}/status?{query}"
        body: Document = {
            "apiVersion": API_VERSION,
            "kind": "ResourceClaim",
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
            "status": {"devices": entries} if entries else {},
        }
        try:
            self.request("PATCH", path, body, kind="application/apply-patch+yaml")
        except ApiError as exc:
            if exc.status == 404 or (exc.status == 422 and "metadata.uid" in str(exc)):
                return False
            raise
        return True

    def node_condition(self, node: str, condition: Document) -> None:
        """Set one condition of a node; others' conditions stay."""
        path = f"/api/v1/nodes/{urllib.parse.quote(node, safe='')}/status"
        patch = {"status": {"conditions": [condition]}}
        self.request("PATCH", path, patch, kind="application/strategic-merge-patch+json")

    # --- slices ---

    def slices(self, driver: str, node: str) -> tuple[list[Document], str]:
        """Return a driver's slices of a node, and the version of the list."""
        answer = self.request("GET", f"{SLICES}?{self._selector(driver, node)}")
        items = answer.get("items") or []
        return items, str((answer.get("metadata") or {}).get("resourceVersion", ""))

    def create_slice(self, document: Document) -> Document:
        """Create a slice; return it as the server has it."""
        return self.request("POST", SLICES, document)

    def update_slice(self, document: Document) -> Document:
        """Replace a slice at the version it was read; return it as the server has it."""
        return self.request("PUT", f"{SLICES}/{document['metadata']['name']}", document)

    def delete_slice(self, document: Document) -> None:
        """Delete a slice; one that is gone already is fine."""
        try:
            self.request("DELETE", f"{SLICES}/{document['metadata']['name']}")
        except ApiError as exc:
            if exc.status != 404:
                raise

    def watch_slices(
        self, driver: str, node: str, version: str, timeout_s: float
    ) -> Iterator[Document]:
        """Yield changes of a driver's slices after a version, until the server ends it.

        Raises:
            ApiError: 410 when the version is too old: list again.
        """
        query = (
            f"{self._selector(driver, node)}&watch=1&allowWatchBookmarks=true"
            f"&resourceVersion={version}&timeoutSeconds={int(timeout_s)}"
        )
        connection = self._connect(timeout_s + self._access.timeout_s)
        try:
            connection.request("GET", f"{SLICES}?{query}", headers=self._headers())
            response = connection.getresponse()
            if response.status >= 300:
                raise self._refusal("GET", SLICES, response.status, response.read(4096))
            for line in response:
                event = _json(line)
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    raise ApiError(f"watch: {status.get('message')}", status=status.get("code", 0))
                yield event
        except (OSError, http.client.HTTPException) as exc:
            raise self._silence("GET", SLICES, exc) from exc
        finally:
            connection.close()

    @staticmethod
    def _selector(driver: str, node: str) -> str:
        fields = f"spec.driver={driver},spec.nodeName={node}"
        return urllib.parse.urlencode({"fieldSelector": fields})

    # --- requests ---

    def request(
        self, method: str, path: str, body: Document | None = None, kind: str = "application/json"
    ) -> Document:
        """Return the answer to one request.

        Raises:
            ApiError: Refused, or no answer after a few tries.
        """
        wait_s = DELAY_S
        for attempt in range(TRIES):
            try:
                return self._once(method, path, body, kind)
            except ApiError as exc:
                last = attempt == TRIES - 1
                if last or (exc.status not in AGAIN and exc.status != 0):
                    raise
                time.sleep(min(getattr(exc, "after_s", 0.0) or wait_s, DELAY_MAX_S))
                wait_s = min(wait_s * 2, DELAY_MAX_S)
        raise ApiError(f"{method} {path}: no answer")

    def _once(self, method: str, path: str, body: Document | None, kind: str) -> Document:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers()
        if data is not None:
            headers["Content-Type"] = kind
        connection = self._fresh()
        try:
            if connection is not None:
                try:
                    connection.request(method, path, body=data, headers=headers)
                    response = connection.getresponse()
                except (ConnectionError, http.client.BadStatusLine, ssl.SSLEOFError):
                    connection.close()  # the server had closed it while it was idle
                    connection = None
            if connection is None:
                connection = self._connect(self._access.timeout_s)
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
            content = response.read(BODY_BYTES)
            if response.isclosed() and not response.will_close:
                self._keep(connection)
                connection = None
            if response.status >= 300:
                error = self._refusal(method, path, response.status, content)
                after = response.getheader("Retry-After") or ""
                error.after_s = float(after) if after.isdigit() else 0.0  # type: ignore[attr-defined]
                raise error
            return _json(content)
        except (OSError, http.client.HTTPException) as exc:
            raise self._silence(method, path, exc) from exc
        finally:
            if connection is not None:
                connection.close()

    def _fresh(self) -> http.client.HTTPConnection | None:
        """Return an idle connection that the server should not have closed yet, or None."""
        now_s = time.monotonic()
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is None:
            return None
        since_s, connection = found
        if now_s - since_s < IDLE_S:
            return connection
        connection.close()
        self.close()  # the others are older
        return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_MAX:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if not self._tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        access = self._access
        try:
            context = ssl.create_default_context(cafile=access.ca_file)
            if access.certificate_file is not None:
                context.load_cert_chain(access.certificate_file, access.key_file)
        except (OSError, ssl.SSLError) as exc:
            raise ApiError(
                f"API server: its CA or our certificate cannot be read: {exc}",
                cure="mount a service account, or set kubernetes.ca_file",
            ) from exc
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=timeout_s, context=context
        )

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "alloy-agent"}
        if self._access.token_file is not None:
            try:
                token = Path(self._access.token_file).read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as exc:
                raise ApiError(
                    f"token {self._access.token_file}: {exc}", cure="mount a service account"
                ) from exc
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _refusal(self, method: str, path: str, status: int, content: bytes) -> ApiError:
        try:
            reason = str(json.loads(content).get("message", ""))
        except (ValueError, AttributeError, RecursionError):
            reason = content[:200].decode("utf-8", "replace")
        cure = "see the RBAC rules in deploy/" if status in (401, 403) else ""
        return ApiError(
            f"API server: {method} {path.split('?', maxsplit=1)[0]}: {status} {reason}".strip(),
            status=status,
            cure=cure,
        )

    def _silence(self, method: str, path: str, exc: Exception) -> ApiError:
        return ApiError(
            f"API server {self._access.server}: {method} {path.split('?', maxsplit=1)[0]}: {exc}",
            cure="see whether the node reaches the API server; what is prepared stays so",
        )


def _json(content: bytes) -> Document:
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ApiError(f"API server: its answer is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ApiError("API server: its answer is no object")
    return found
