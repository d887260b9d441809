"""Frames and messages between the control process and a worker.

A frame is a length (4 bytes, little endian) and that many bytes of MessagePack, one tagged message
each. A page of the ring travels as a file descriptor beside the first byte of its frame.

Rules that stay true in here:

* A frame is bounded; a longer one, or one that does not decode, is `WireError`, and whoever reads
  it ends the conversation. Neither side ever guesses what the other meant.
* Failures cross by class name, message and cure, and come out as the same class of the taxonomy.
* Deadlines cross as absolute times on `CLOCK_MONOTONIC`, which both processes share.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Final

import msgspec

from alloy_agent import errors
from alloy_agent.model import (
    Capabilities,
    DeviceEvent,
    DeviceId,
    DeviceStep,
    Json,
    SignalSpec,
    Value,
)

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
HEADER_BYTES: Final = 4
CHUNK_BYTES: Final = 256 * 1024
MAX_FDS: Final = 16


class WireError(Exception):
    """The other side sent what is not a frame of this protocol."""


# --- control to worker ----------------------------------------------------------------------------


class Start(Value, frozen=True, kw_only=True, tag="start"):
    """First frame: which backend, how fast to sample it, and what is known of its devices.

    `factory` ("/path/file.py:callable") replaces `open_backend`; only code in the control process
    can set it.
    `suspects` have stalled before and are sampled apart; `quarantined` are not touched at all.
    """

    name: str
    options: dict[str, Json] = msgspec.field(default_factory=dict)
    factory: str = ""
    sample: bool = True
    rate_hz: float = 10.0
    cpu_share_max: float = 0.03
    sample_deadline_s: float = 0.05
    realtime: bool = True
    suspects: tuple[DeviceId, ...] = ()
    quarantined: tuple[DeviceId, ...] = ()
    quiesced: tuple[DeviceId, ...] = ()


class Call(Value, frozen=True, kw_only=True, tag="call"):
    """One request. It is not begun after its deadline; the caller has stopped waiting by then."""

    id: int
    method: str
    deadline_monotonic_s: float
    device: DeviceId | None = None
    step: DeviceStep | None = None


class Pace(Value, frozen=True, kw_only=True, tag="pace"):
    """Change the sampling rate: for good, or for `burst_s` seconds."""

    rate_hz: float
    burst_s: float | None = None


class Release(Value, frozen=True, kw_only=True, tag="release"):
    """Touch a quarantined device again."""

    device: DeviceId


class Stop(Value, frozen=True, kw_only=True, tag="stop"):
    """Close the backend and leave."""


ToWorker = Start | Call | Pace | Release | Stop

# --- worker to control ----------------------------------------------------------------------------


class Ready(Value, frozen=True, kw_only=True, tag="ready"):
    """The backend is open."""

    capabilities: Capabilities


class Reply(Value, frozen=True, kw_only=True, tag="reply"):
    """The result of one call, encoded as its method says (`client.RESULTS`)."""

    id: int
    result: msgspec.Raw


class Failure(Value, frozen=True, kw_only=True, tag="failure"):
    """One call failed, or with `id` 0 the backend did not open."""

    id: int
    kind: str
    message: str
    cure: str = ""


class Events(Value, frozen=True, kw_only=True, tag="events"):
    """Device events, pushed as they come; `dropped` counts those lost since the start."""

    events: tuple[DeviceEvent, ...]
    dropped: int = 0


class Page(Value, frozen=True, kw_only=True, tag="page"):
    """A new page of the ring for one device; its descriptor travels beside this frame."""

    device: DeviceId
    epoch: int
    specs: tuple[SignalSpec, ...]


ToControl = Ready | Reply | Failure | Events | Page


def _subclasses(kind: type[errors.AlloyError]) -> dict[str, type[errors.AlloyError]]:
    found = {kind.__name__: kind}
    for sub in kind.__subclasses__():
        found |= _subclasses(sub)
    return found


def failure_of(call_id: int, exc: BaseException, doing: str) -> Failure:
    """Return the frame that carries `exc`; one outside of the taxonomy names itself and `doing`."""
    if isinstance(exc, errors.AlloyError):
        return Failure(id=call_id, kind=type(exc).__name__, message=exc.message, cure=exc.cure)
    return Failure(id=call_id, kind="BackendError", message=f"{doing}: {type(exc).__name__}: {exc}")


def error_of(failure: Failure) -> errors.AlloyError:
    """Return the error that `failure` carries, as its own class, else as `BackendError`."""
    module_kinds = {
        name: kind
        for name, kind in _subclasses(errors.AlloyError).items()
        if kind.__module__ == errors.__name__
    }
    kind = module_kinds.get(failure.kind, errors.BackendError)
    return kind(failure.message, cure=failure.cure)


class Splitter:
    """Cuts a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the bodies that `chunk` completes.

        Raises:
            WireError: A frame claims more than `MAX_FRAME_BYTES`, or nothing.
        """
        self._buffer += chunk
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "little")
            if not 0 < size <= MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes")
            stop = start + HEADER_BYTES + size
            if len(self._buffer) < stop:
                break
            bodies.append(bytes(self._buffer[start + HEADER_BYTES : stop]))
            start = stop
        del self._buffer[:start]
        return bodies


class Channel:
    """One end of the socket pair: sends whole frames from any thread, receives on one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: deque[int] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._splitter = Splitter()

    def send(self, message: ToWorker | ToControl, fd: int | None = None) -> None:
        """Send one message, with a descriptor beside it if given.

        Raises:
            OSError: The other side has gone.
            WireError: The message is too long to send.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a {type(message).__name__} of {len(body)} bytes does not fit a frame")
        data = len(body).to_bytes(HEADER_BYTES, "little") + body
        with self._lock:
            if fd is not None:
                socket.send_fds(self.sock, [data[:1]], [fd])
                data = data[1:]
            self.sock.sendall(data)

    def receive(self) -> list[bytes] | None:
        """Return the bodies that the next read completes; None when the other side has gone.

        Raises:
            WireError: See `Splitter.feed`.
            OSError: The socket failed.
        """
        chunk, fds, _flags, _address = socket.recv_fds(
            self.sock, CHUNK_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )
        self.fds.extend(fds)
        if not chunk:
            return None
        return self._splitter.feed(chunk)
