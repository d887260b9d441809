"""Mutual TLS: who is let in, on either side, now and after a renewal."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from alloy_agent.config import BrainSettings
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.uplink.client import Uplink
from tests.uplink.brains import Brain, serve, until
from tests.uplink.conftest import Agent, settings
from tests.uplink.identities import Authority

BRAIN_ID = "spiffe://example.test/brain"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def secured(authority: Authority, brain: Brain) -> Iterator[Callable[..., int]]:
    """Start TLS servers that ask for the agent's certificate."""
    servers: list[grpc.Server] = []

    def start(**wishes: object) -> int:
        key, certificate = authority.issue("brain", **wishes)  # type: ignore[arg-type]
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], authority.file.read_bytes(), require_client_auth=True
        )
        server, port = serve(brain, credentials=credentials)
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(0).wait(10)


def secure(authority: Authority, port: int, **other: object) -> BrainSettings:
    key, certificate = authority.folder / "agent.key", authority.folder / "agent.crt"
    files = {
        "ca_file": str(authority.file),
        "certificate_file": str(certificate),
        "key_file": str(key),
    }
    return settings(port, **{**files, **other})


def refused(uplink: Uplink, text: str) -> None:
    until(lambda: text in uplink.state().reason, f"{text!r} (is {uplink.state().reason!r})")
    assert not uplink.state().connected


def test_mutual_tls_carries_the_stream(
    agent: Agent, brain: Brain, authority: Authority, secured: Callable[..., int]
) -> None:
    """With both identities right, events, commands and replies flow, large ones too."""
    authority.install("agent")
    agent.dial(secure(authority, secured()))
    until(lambda: brain.streams, "a stream")
    text = "x" * 100_000
    for _ in range(40):
        agent.finding(text)
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    assert all(event.finding.check == text for event in brain.events.values())
    brain.stream.send(
        pb.BrainMessage(id="c", epoch=1, apply_layout=pb.ApplyLayout(layout=b"y" * 2_000_000))
    )
    until(lambda: brain.replies, "the reply")


def test_loopback_with_an_identity_is_not_plain(
    agent: Agent, brain: Brain, authority: Authority, port: int
) -> None:
    """Where an identity is configured, a server that speaks plain text is no brain."""
    authority.install("agent")
    uplink = agent.dial(secure(authority, port))
    until(lambda: uplink.state().attempts >= 2, "attempts")
    assert brain.bodies == []
    assert not uplink.state().connected


def test_brain_of_another_authority_is_refused(
    agent: Agent, authority: Authority, tmp_path: Path, secured: Callable[..., int]
) -> None:
    """A certificate that our authority did not issue is refused, and the reason told."""
    authority.install("agent")
    other = Authority(tmp_path / "other")
    uplink = agent.dial(secure(authority, secured(), ca_file=str(other.file)))
    refused(uplink, "its certificate is refused")


def test_brain_of_another_name_is_refused(
    agent: Agent, authority: Authority, secured: Callable[..., int]
) -> None:
    """A certificate for another host is refused."""
    authority.install("agent")
    uplink = agent.dial(secure(authority, secured(), server_name="brain.example.test"))
    refused(uplink, "its certificate is refused")


def test_spiffe_id_is_checked_on_the_very_connection(
    agent: Agent, brain: Brain, authority: Authority, secured: Callable[..., int]
) -> None:
    """With an id configured, it alone names the brain: no host name needed, no other id works."""
    authority.install("agent")
    port = secured(spiffe=BRAIN_ID, loopback=False)
    uplink = agent.dial(secure(authority, port, spiffe_id="spiffe://example.test/somebody"))
    refused(uplink, f"its certificate is for {BRAIN_ID}")
    assert brain.bodies == []
    uplink.stop()
    agent.dial(secure(authority, port, spiffe_id=BRAIN_ID))
    until(lambda: brain.streams, "a stream")


def test_brain_without_a_spiffe_id_is_refused(
    agent: Agent, authority: Authority, secured: Callable[..., int]
) -> None:
    """A brain of the right host but without the id is refused."""
    authority.install("agent")
    uplink = agent.dial(secure(authority, secured(), spiffe_id=BRAIN_ID))
    refused(uplink, "its certificate is for no id")


def test_agent_with_an_expired_certificate_is_told(
    agent: Agent, authority: Authority, secured: Callable[..., int]
) -> None:
    """An agent whose own certificate has ended learns why nobody lets it in."""
    authority.install("agent", ends_in_s=-60)
    uplink = agent.dial(secure(authority, secured()))
    refused(uplink, "run out")


def test_agent_that_the_brain_does_not_know_is_told(
    agent: Agent, authority: Authority, tmp_path: Path, secured: Callable[..., int]
) -> None:
    """Refused after its half of the handshake, the agent learns it at once, each time it dials."""
    other = Authority(tmp_path / "other")
    key, certificate = other.install("agent")
    files = {"key_file": str(key), "certificate_file": str(certificate)}
    uplink = agent.dial(secure(authority, secured(), **files))
    refused(uplink, "the agent")
    before = uplink.state().attempts
    until(lambda: uplink.state().attempts >= before + 3, "further attempts")
    assert "the agent" in uplink.state().reason
    assert not uplink.state().connected


def test_brain_that_hangs_up_after_the_handshake_is_named(
    agent: Agent, authority: Authority
) -> None:
    """A peer that ends each connection without a word ends each attempt, with a reason."""
    authority.install("agent")
    key, certificate = authority.issue("brain")
    terms = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    chain = authority.folder / "brain.pem"
    chain.write_bytes(key + certificate)
    terms.load_cert_chain(chain)
    terms.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    with contextlib.suppress(OSError), terms.wrap_socket(near, server_side=True):
                        pass

        threading.Thread(target=hang_up, daemon=True).start()
        uplink = agent.dial(secure(authority, int(listener.getsockname()[1])))
        until(lambda: uplink.state().attempts >= 3, "attempts")
        refused(uplink, "right after the handshake")
        listener.shutdown(socket.SHUT_RDWR)


def test_certificate_that_ends_while_connected_ends_the_stream(
    agent: Agent, brain: Brain, authority: Authority, secured: Callable[..., int]
) -> None:
    """A stream does not outlive the brain's certificate; the next attempt says what is wrong."""
    authority.install("agent")
    uplink = agent.dial(secure(authority, secured(ends_in_s=2.5)))
    until(lambda: brain.streams, "a stream")
    agent.finding("before")
    until(lambda: agent.outbox.waiting == 0, "the event")
    refused(uplink, "certificate")
    agent.finding("after")
    assert agent.outbox.waiting == 1


def test_renewed_certificate_is_used_without_restart(
    agent: Agent, brain: Brain, authority: Authority, secured: Callable[..., int]
) -> None:
    """New files begin a new stream with the new identity; half of a renewal begins none."""
    key, certificate = authority.install("agent")
    uplink = agent.dial(secure(authority, secured()))
    until(lambda: len(brain.streams) == 1, "a stream")
    until(lambda: uplink.state().connected, "it to stand")
    new_key, new_certificate = authority.issue("agent")
    time.sleep(0.6)
    key.write_bytes(new_key)
    time.sleep(0.8)
    assert len(brain.streams) == 1
    certificate.write_bytes(new_certificate)
    until(lambda: len(brain.streams) == 2, "the next stream")
    until(lambda: uplink.state().connected, "it to stand")


def test_missing_files_are_named(
    agent: Agent, authority: Authority, secured: Callable[..., int]
) -> None:
    """A file that is not there yet is named, and used as soon as it comes."""
    uplink = agent.dial(secure(authority, secured()))
    refused(uplink, "agent.crt")
    authority.install("agent")
    until(lambda: uplink.state().connected, "a stream")


def test_nobody_else_may_use_the_tunnel(
    agent: Agent, brain: Brain, authority: Authority, secured: Callable[..., int]
) -> None:
    """Another process, even of the same user, gets nothing through our authenticated connection."""
    authority.install("agent")
    uplink = agent.dial(secure(authority, secured()))
    until(lambda: brain.streams, "a stream")
    assert uplink._tunnel is not None
    name = uplink._tunnel.target.removeprefix("unix-abstract:")
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20);"
        "s.connect(chr(0) + sys.argv[1]); print(len(s.recv(1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(20)
        own.connect(f"\0{name}")
        own.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert len(own.recv(1)) == 1
