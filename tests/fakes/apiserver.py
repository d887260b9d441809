"""An API server of a few resources: versions, conflicts, watches, selectors, faults on demand.

`strip` names fields that it drops silently, as a server does whose feature is off. `fail` takes
statuses for the next requests; 0 closes the connection without a word.
"""

from __future__ import annotations

import copy
import json
import threading
import time
import urllib.parse
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Document = dict[str, Any]


class FakeApiServer:
    """Use as a context manager; `url` is where it listens."""

    def __init__(self) -> None:
        self.objects: dict[str, Document] = {}  # by path
        self.fail: deque[tuple[str, int]] = deque()  # (method or "", status)
        self.strip: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.events: list[Document] = []
        self.version = 100
        self._log: list[tuple[int, str, Document]] = []
        self._changed = threading.Condition()
        self._closed = False
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeApiServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    # --- state ---

    def put(self, path: str, document: Document) -> Document:
        """Create or replace an object behind everyone's back."""
        with self._changed:
            self.version += 1
            kind = "MODIFIED" if path in self.objects else "ADDED"
            metadata = document.setdefault("metadata", {})
            metadata["resourceVersion"] = str(self.version)
            metadata.setdefault("name", path.rsplit("/", 1)[-1])
            metadata.setdefault("uid", f"uid-{self.version}")
            self._drop(document)
            self.objects[path] = document
            self._log.append((self.version, kind, copy.deepcopy(document)))
            self._changed.notify_all()
            return document

    def delete(self, path: str) -> None:
        """Delete an object behind everyone's back."""
        with self._changed:
            document = self.objects.pop(path)
            self.version += 1
            self._log.append((self.version, "DELETED", document))
            self._changed.notify_all()

    def under(self, prefix: str) -> dict[str, Document]:
        """Return the objects of a collection by path."""
        with self._changed:
            return {p: copy.deepcopy(d) for p, d in self.objects.items() if p.startswith(prefix)}

    def _drop(self, document: Document) -> None:
        for field in self.strip:
            document.get("spec", {}).pop(field, None)
            for device in document.get("spec", {}).get("devices") or ():
                device.pop(field, None)

    def since(self, version: int, timeout_s: float) -> tuple[list[tuple[int, str, Document]], bool]:
        """Return the changes after a version, once there are any; and whether this is the end."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                found = [entry for entry in self._log if entry[0] > version]
                left = until - time.monotonic()
                if found or left <= 0:
                    return found, left <= 0
                self._changed.wait(min(left, 1.0))
        return [], True


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def _body(self) -> Document:
        length = int(self.headers.get("Content-Length") or 0)
        body: Document = json.loads(self.rfile.read(length) or b"{}")
        return body

    def _answer(self, status: int, document: Document, **headers: str) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"kind": "Status", "code": status, "message": message})

    def _faulty(self, method: str) -> bool:
        fake = self.server_of
        fake.requests.append((method, self.path))
        if not fake.fail or fake.fail[0][0] not in ("", method):
            return False
        _, status = fake.fail.popleft()
        if status == 0:
            self.close_connection = True
        else:
            document = {"kind": "Status", "code": status, "message": f"scripted {status}"}
            self._answer(status, document, Retry_After="0")
        return True

    def do_GET(self) -> None:
        """Get, list or watch."""
        if self._faulty("GET"):
            return
        fake = self.server_of
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        if query.get("watch"):
            self._watch(url.path, query)
            return
        with fake._changed:
            found = copy.deepcopy(fake.objects.get(url.path))
            version = fake.version
        if found is not None:
            self._answer(200, found)
        elif url.path.endswith("s") and "/resourceslices" in url.path:
            items = [d for d in fake.under(url.path + "/").values() if _fits(d, query)]
            self._answer(200, {"metadata": {"resourceVersion": str(version)}, "items": items})
        else:
            self._refuse(404, "not found")

    def _watch(self, path: str, query: dict[str, str]) -> None:
        fake = self.server_of
        version, until = (
            int(query["resourceVersion"]),
            time.monotonic() + int(query.get("timeoutSeconds", "60")),
        )
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while True:
            changes, end = fake.since(version, until - time.monotonic())
            for number, kind, document in changes:
                version = number
                if _fits(document, query):
                    line = json.dumps({"type": kind, "object": document}).encode() + b"\n"
                    try:
                        self.wfile.write(line)
                        self.wfile.flush()
                    except OSError:
                        return
            if end:
                return

    def do_POST(self) -> None:
        """Create."""
        body = self._body()
        if self._faulty("POST"):
            return
        fake = self.server_of
        if self.path.endswith("/events"):
            fake.events.append(body)
            self._answer(201, body)
            return
        metadata = body["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{fake.version + 1:05x}"
        metadata["name"] = name
        path = f"{self.path}/{name}"
        if path in fake.objects:
            self._refuse(409, f"{name} exists")
        else:
            self._answer(201, fake.put(path, body))

    def do_PUT(self) -> None:
        """Replace, at the version that was read."""
        body = self._body()
        if self._faulty("PUT"):
            return
        fake = self.server_of
        there = fake.objects.get(self.path)
        if there is None:
            self._refuse(404, "not found")
        elif body["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
            self._refuse(409, "the object has been modified")
        else:
            self._answer(200, fake.put(self.path, body))

    def do_PATCH(self) -> None:
        """Merge a node's conditions by type, or apply a driver's entries of a claim's status."""
        body = self._body()
        if self._faulty("PATCH"):
            return
        url = urllib.parse.urlsplit(self.path)
        path = url.path.removesuffix("/status")
        fake = self.server_of
        if path not in fake.objects:
            self._refuse(404, "not found")
            return
        there = copy.deepcopy(fake.objects[path])
        if "/resourceclaims/" in path:
            (driver,) = urllib.parse.parse_qs(url.query)["fieldManager"]
            self._apply_devices(path, there, body, driver)
            return
        conditions = {c["type"]: c for c in there.setdefault("status", {}).get("conditions", ())}
        conditions |= {c["type"]: c for c in body["status"]["conditions"]}
        there["status"]["conditions"] = list(conditions.values())
        self._answer(200, fake.put(path, there))

    def _apply_devices(self, path: str, there: Document, body: Document, driver: str) -> None:
        if body["metadata"].get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
            self._refuse(422, "metadata.uid: Invalid value: field is immutable")
            return
        status = there.setdefault("status", {})
        devices = (status.get("allocation") or {}).get("devices") or {}
        given = {(r["driver"], r["pool"], r["device"]) for r in devices.get("results", ())}
        entries = body["status"].get("devices", [])
        if any((e["driver"], e["pool"], e["device"]) not in given for e in entries):
            self._refuse(422, "must be an allocated device in the claim")
            return
        others = [e for e in status.get("devices", ()) if e["driver"] != driver]
        if status.get("devices", []) != others + entries:
            status["devices"] = others + entries
            fake = self.server_of
            there = fake.put(path, there)
        self._answer(200, there)

    def do_DELETE(self) -> None:
        """Delete."""
        if self._faulty("DELETE"):
            return
        if self.path not in self.server_of.objects:
            self._refuse(404, "not found")
            return
        self.server_of.delete(self.path)
        self._answer(200, {"kind": "Status", "status": "Success"})


def _fits(document: Document, query: dict[str, str]) -> bool:
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        way, _, value = term.partition("=")
        node: Any = document
        for key in way.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if node != value:
            return False
    return True
