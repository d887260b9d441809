"""The HTTP side: pages, tokens, isolation of collectors, and clients that misbehave."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.config import MetricsSettings
from alloy_agent.daemon.web import MAX_REQUESTS, Pages, WebServer
from alloy_agent.errors import ConfigError
from alloy_agent.telemetry import exposition
from alloy_agent.telemetry.metrics import MetricsPage


class Site:
    """What a daemon shows, to be changed by a test."""

    def __init__(self) -> None:
        self.sick: str | None = None
        self.unready: str | None = None
        self.page = MetricsPage()

    def pages(self) -> Pages:
        return Pages(self.page.render, lambda: self.sick, lambda: self.unready)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def server(site: Site) -> Iterator[WebServer]:
    server = WebServer(MetricsSettings(address="127.0.0.1:0"), site.pages())
    server.start()
    yield server
    server.stop()


def get(server: WebServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_health_and_readiness_say_why_not(site: Site, server: WebServer) -> None:
    """200 when well; 503 with the reason in one line when not."""
    assert get(server, "/healthz") == (200, "ok\n")
    site.sick, site.unready = "loops without progress: observe", "not seen yet"
    assert get(server, "/healthz") == (503, "loops without progress: observe\n")
    assert get(server, "/readyz") == (503, "not seen yet\n")
    assert get(server, "/nothing")[0] == 404


def _broken() -> Iterable[Any]:
    raise RuntimeError("no answer")


def _gauge(name: str, value: float) -> Iterable[Any]:
    return [exposition.single("gauge", name, "Test.", value)]


def test_a_raising_collector_costs_its_own_part_only(site: Site, server: WebServer) -> None:
    """The rest is served and `alloy_collector_up` tells which one failed."""
    site.page.add("good", lambda: _gauge("alloy_good", 4.0))
    site.page.add("bad", _broken)
    status, body = get(server, "/metrics")
    assert status == 200
    assert "alloy_good 4.0" in body
    assert 'alloy_collector_up{collector="good"} 1.0' in body
    assert 'alloy_collector_up{collector="bad"} 0.0' in body


def test_a_page_parses_as_prometheus_text(site: Site, server: WebServer) -> None:
    """The text is what a scraper reads."""
    from prometheus_client.parser import text_string_to_metric_families

    site.page.add("good", lambda: _gauge("alloy_good", 4.0))
    names = {f.name for f in text_string_to_metric_families(get(server, "/metrics")[1])}
    assert {"alloy_good", "alloy_collector_up"} <= names


def test_a_token_is_asked_for_metrics_alone(site: Site, tmp_path: Path) -> None:
    """With a token file a scrape needs the token; probes do not."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    server = WebServer(MetricsSettings(address="127.0.0.1:0", token_file=str(token)), site.pages())
    server.start()
    try:
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert get(server, "/metrics", Authorization="Bearer s3cret")[0] == 200
        assert get(server, "/healthz")[0] == 200
    finally:
        server.stop()


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: a"])
def test_more_slow_clients_than_places_do_not_stop_a_probe(server: WebServer, sent: bytes) -> None:
    """Who lasts longest gives way: a probe is answered while every place is held open."""
    host, port = server.url.removeprefix("http://").split(":")
    held = []
    try:
        for _ in range(3 * MAX_REQUESTS):
            one = socket.create_connection((host, int(port)), timeout=30)
            held.append(one)
            if sent:
                one.sendall(sent)
        for _ in range(3):
            assert get(server, "/healthz") == (200, "ok\n")
    finally:
        for one in held:
            one.close()
    assert get(server, "/healthz") == (200, "ok\n")


def test_silent_clients_do_not_stop_others(server: WebServer) -> None:
    """Connections that never send a request hold a bounded number of places and no more."""
    address = server.url.removeprefix("http://").split(":")
    silent = [
        socket.create_connection((address[0], int(address[1])), timeout=10)
        for _ in range(MAX_REQUESTS - 1)
    ]
    try:
        assert get(server, "/healthz") == (200, "ok\n")
    finally:
        for client in silent:
            client.close()


@pytest.mark.parametrize(
    "request_line", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n"]
)
def test_garbage_is_refused_and_the_server_lives(server: WebServer, request_line: bytes) -> None:
    """What is no request for a page gets an error or a closed connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(request_line)
        client.shutdown(socket.SHUT_WR)
        client.recv(65536)
    assert get(server, "/healthz") == (200, "ok\n")


def test_an_address_in_use_is_refused_with_the_cure(site: Site, server: WebServer) -> None:
    """A second listener on one address is one line that names the setting."""
    address = server.url.removeprefix("http://")
    with pytest.raises(ConfigError, match=r"metrics.address .*in use.*metrics.enabled"):
        WebServer(MetricsSettings(address=address), site.pages())


@pytest.mark.parametrize("content", [None, ""])
def test_an_unusable_token_file_is_refused(site: Site, tmp_path: Path, content: str | None) -> None:
    """A token file that is missing or empty never means `no token`."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    settings = MetricsSettings(address="127.0.0.1:0", token_file=str(path))
    with pytest.raises(ConfigError, match=r"metrics.token_file"):
        WebServer(settings, site.pages())
