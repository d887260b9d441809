"""Frames: whole, bounded, and never believed when they are garbage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent import errors
from alloy_agent.model import DeviceId
from alloy_agent.worker import wire
from alloy_agent.worker.board import Board


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    cuts=st.lists(st.integers(min_value=1, max_value=64), min_size=1),
)
def test_frames_survive_any_cut(bodies: list[bytes], cuts: list[int]) -> None:
    """However the stream is cut, the same bodies come out in order."""
    stream = b"".join(len(b).to_bytes(4, "little") + b for b in bodies)
    splitter, out, at, turn = wire.Splitter(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        out += splitter.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert out == bodies


@given(st.binary(max_size=200))
def test_bytes_never_do_worse_than_a_wire_error(noise: bytes) -> None:
    """Noise is refused as such: `WireError` or a decode error, nothing else."""
    decoder = msgspec.msgpack.Decoder(wire.ToControl)
    try:
        for body in wire.Splitter().feed(noise):
            decoder.decode(body)
    except (wire.WireError, msgspec.DecodeError):
        pass


@pytest.mark.parametrize("size", [0, wire.MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_of_no_or_too_many_bytes_is_refused(size: int) -> None:
    """A length of nothing or beyond the bound ends the conversation before anything is kept."""
    with pytest.raises(wire.WireError):
        wire.Splitter().feed(size.to_bytes(4, "little"))


def test_a_message_that_does_not_fit_is_not_sent() -> None:
    """A message over the bound is refused at the sender, and the socket stays clean."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        big = wire.Failure(id=1, kind="BackendError", message="x" * wire.MAX_FRAME_BYTES)
        with pytest.raises(wire.WireError):
            wire.Channel(ours).send(big)
        wire.Channel(ours).send(wire.Stop())
        assert len(wire.Channel(theirs).receive() or []) == 1


TAXONOMY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.AlloyError)
]


@pytest.mark.parametrize("kind", TAXONOMY)
def test_errors_cross_as_themselves(kind: type[errors.AlloyError]) -> None:
    """Every error of the taxonomy comes out as its own class with message and cure."""
    sent = kind("gpu0: no", cure="do")
    body = msgspec.msgpack.encode(wire.failure_of(3, sent, "observe on gpu0"))
    got = wire.error_of(msgspec.msgpack.decode(body, type=wire.Failure))
    assert type(got) is kind
    assert (got.message, got.cure) == ("gpu0: no", "do")


def test_an_error_outside_of_the_taxonomy_names_itself() -> None:
    """A bug in a backend crosses as a `BackendError` that says what was being done."""
    got = wire.error_of(wire.failure_of(3, KeyError("gi"), "observe on gpu0"))
    assert type(got) is errors.BackendError
    assert "observe on gpu0" in got.message
    assert "KeyError" in got.message


def test_an_unknown_error_class_becomes_a_backend_error() -> None:
    """A class name that this side does not know is not looked up anywhere else."""
    got = wire.error_of(wire.Failure(id=1, kind="SystemExit", message="m"))
    assert type(got) is errors.BackendError


@settings(max_examples=3, deadline=None)
@given(noise=st.binary(min_size=8, max_size=64))
def test_a_worker_leaves_when_it_is_sent_garbage(noise: bytes) -> None:
    """A worker whose first bytes are garbage exits by itself, with a code that says so."""
    ours, theirs = socket.socketpair()
    board, note_fd = Board.make(), os.memfd_create("note")
    tick_fd = os.eventfd(0)
    fds = (theirs.fileno(), board.fd, note_fd, tick_fd)
    child = subprocess.Popen(
        [sys.executable, "-m", "alloy_agent.worker", *map(str, fds), str(os.getpid())],
        pass_fds=fds,
        cwd=Path(__file__).parents[2],
        stderr=subprocess.DEVNULL,
    )
    with theirs, ours:
        ours.sendall(len(noise).to_bytes(4, "little") + b"\xc1" + noise[1:])
        assert child.wait(20) == 4
    board.close()
    os.close(note_fd)
    os.close(tick_fd)


def test_a_descriptor_travels_beside_its_frame() -> None:
    """Pages arrive in order, each with its own file, however many come in one read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = wire.Channel(ours), wire.Channel(theirs)
        for n in range(5):
            fd = os.memfd_create("page")
            os.write(fd, bytes([n]))
            sender.send(wire.Page(device=DeviceId(f"d{n}"), epoch=1, specs=()), fd)
            os.close(fd)
        pages: list[wire.Page] = []
        while len(pages) < 5:
            for body in receiver.receive() or []:
                pages.append(msgspec.msgpack.decode(body, type=wire.Page))
                fd = receiver.fds.popleft()
                assert os.pread(fd, 1, 0) == bytes([len(pages) - 1])
                os.close(fd)
