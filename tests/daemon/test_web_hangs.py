"""Scrapers that hang in every way there is: others are served, each is ended, nothing is left."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alloy_agent.config import MetricsSettings
from alloy_agent.daemon import web
from alloy_agent.daemon.web import MAX_REQUESTS, Pages, WebServer
from tests.daemon.harness import wait_for
from tests.daemon.test_web import get

PAGE = b"# a page that fills every buffer on the way\n" * 500_000
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """Give a server of a large page whose patience is short."""
    monkeypatch.setattr(web, "CONNECTION_S", 1.0)
    pages = Pages(lambda: PAGE, lambda: None, lambda: None)
    server = WebServer(MetricsSettings(address="127.0.0.1:0"), pages)
    server.start()
    yield server
    server.stop()


def connect(server: WebServer) -> socket.socket:
    """Return a connection."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answered(server: WebServer, path: str = "/healthz") -> str:
    """Return a page; empty where the connection was cut: prober and scraper come again."""
    try:
        status, text = get(server, path)
    except (OSError, http.client.HTTPException):
        return ""
    assert status == 200
    return text


def silent(_client: socket.socket) -> None:
    """Say nothing."""


def half(client: socket.socket) -> None:
    """Send half of a request."""
    client.sendall(REQUEST[:20])


def reads_nothing(client: socket.socket) -> None:
    """Ask, and read nothing of the answer."""
    client.sendall(REQUEST)


def drips(client: socket.socket) -> None:
    """Send a byte of a request now and then, for as long as there is somebody."""

    def run() -> None:
        with contextlib.suppress(OSError):
            for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 3000:
                client.sendall(bytes((byte,)))
                time.sleep(0.05)

    threading.Thread(target=run, daemon=True).start()


def sips(client: socket.socket) -> None:
    """Read a byte of the answer now and then."""
    client.sendall(REQUEST)

    def run() -> None:
        with contextlib.suppress(OSError):
            while client.recv(1):
                time.sleep(0.05)

    threading.Thread(target=run, daemon=True).start()


WAYS = (silent, half, reads_nothing, drips, sips)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_hangs_is_ended_and_others_are_served(
    server: WebServer, way: Callable[[socket.socket], None]
) -> None:
    """Whatever it does or does not do, its place is free again, and probes go on meanwhile."""
    with connect(server) as client:
        way(client)
        wait_for("its place", lambda: bool(server._server.open))
        wait_for("a probe", lambda: answered(server))
        wait_for("its end", lambda: not server._server.open)
        client.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while way is not sips and client.recv(1 << 20):
                pass  # what was on its way comes, and then the end


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_a_crowd_of_hanging_clients_costs_nothing_for_long(server: WebServer) -> None:
    """Ten times as many as there are places: probes are answered, and all is as before after it."""
    wait_for("a page", lambda: answered(server, "/metrics"))
    threads, memory = threading.active_count(), memory_bytes()
    clients = []
    try:
        for number in range(10 * MAX_REQUESTS):
            client = connect(server)
            clients.append(client)
            with contextlib.suppress(OSError):  # it may have had to give way already
                (silent, half, reads_nothing)[number % 3](client)
            if number % 20 == 0:
                wait_for("a probe", lambda: answered(server))
        wait_for("a whole page", lambda: len(answered(server, "/metrics")) == len(PAGE))
        wait_for("free places", lambda: not server._server.open)
    finally:
        for client in clients:
            client.close()
    wait_for("as many threads as before", lambda: threading.active_count() <= threads + 1)
    assert memory_bytes() - memory < 4 * len(PAGE), "nothing is kept for each that hung"
