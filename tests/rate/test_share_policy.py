"""A policy that a keeper refuses is not in force: it is asked again, logged once, and shown."""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from alloy_agent.cli.share import lines_of
from alloy_agent.conformance.keeper import client
from alloy_agent.conformance.keeper.messages import Answer, Policy, ShareView
from alloy_agent.daemon.shares import Shares, _Kept, standing
from alloy_agent.host.clock import boottime_s


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kept]:
    """Return one device of a daemon, whose keeper's status is there."""
    monkeypatch.setattr(client, "STALE_S", 1e9)  # however long the test takes
    with tempfile.TemporaryDirectory(prefix="alloy-") as name:
        folder = Path(name) / "emulated"
        folder.mkdir()
        view = ShareView(
            device="emulated",
            stage="steady",
            opening=0.0,
            loss_ratio=None,
            lent_ratio=0.0,
            answer="",
            reason="",
            mean_ratio=None,
            lower_ratio=None,
            upper_ratio=None,
            ticks=0,
            overruns=0,
            tenants=(),
            keeper="agent",
            taken_at_s=boottime_s(),
        )
        (folder / "status.json").write_bytes(msgspec.json.encode(view))
        yield _Kept("emulated", folder, emulate=True)


def shown(kept: _Kept) -> ShareView:
    """Return how the device stands for whoever looks."""
    (view,) = client.views(kept.folder.parent)
    return view


@contextlib.contextmanager
def answering(kept: _Kept, *answers: Answer) -> Iterator[None]:
    """Answer one request after the other as a keeper would."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        path = kept.folder / "keeper.sock"
        path.unlink(missing_ok=True)
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            for answer in answers:
                peer, _ = server.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(msgspec.json.encode(answer))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_refused_policy_is_not_in_force(kept: _Kept, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as untold until the keeper takes it; `share status` says so meanwhile."""
    caplog.set_level(logging.WARNING)
    policy, no = Policy(held="an operator holds it"), Answer(error="no request: too long")
    assert shown(kept).not_in_force == ""
    with answering(kept, no, no, Answer()):
        assert not Shares._tell(kept, policy)
        assert not Shares._tell(kept, policy)
        assert [record.message for record in caplog.records] == ["keeper_refuses"]
        view = shown(kept)
        assert "too long" in view.not_in_force
        assert any("NOT IN FORCE" in line and "too long" in line for line in lines_of(view))
        assert standing(view) != standing(msgspec.structs.replace(view, not_in_force=""))
        assert Shares._tell(kept, policy)
    assert shown(kept).not_in_force == ""
    assert not any("NOT IN FORCE" in line for line in lines_of(shown(kept)))


def test_a_keeper_of_a_command_has_no_policy_of_the_agent(kept: _Kept) -> None:
    """What an agent that died left there is nobody's word about another one's keeper."""
    client.tell_refused(kept.folder, "x" * 5000)
    assert shown(kept).not_in_force == "x" * client.REFUSED_BYTES
    path = kept.folder / "status.json"
    view = msgspec.json.decode(path.read_bytes(), type=ShareView)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(view, keeper="own")))
    assert shown(kept).not_in_force == ""
