"""Mutual TLS to the brain, under our own eyes.

Theory of operation. gRPC for Python shows a client neither the certificate of its server, nor lets
it replace its own while a channel lives. So TLS is done here: gRPC dials an abstract unix socket of
this very process, and each such connection is carried to the brain inside a TLS session whose
context is read from the files anew. One channel lives for ever; a renewed certificate is used by
the next session, and the brain's identity is checked on the very connection that is used.

Rules that stay true in here:

* Only this process may use the tunnel: the kernel says who connects.
* No byte flows before the chain, the host name or SPIFFE id, and HTTP/2 were agreed.
* A session ends when either side's certificate does; none begins with a certificate of ours that
  has ended.
* With TLS 1.3 a brain refuses our certificate after our half of the handshake is done, with an
  alert or with a bare end. So a brain counts as reached when its first byte comes, and whoever
  ends a connection before that has refused it.
* Each failure is told at once, before gRPC can see the local connection end: gRPC would dial again
  on its own and say nothing to the call that waits.
* Buffers are bounded both ways: a brain that does not read slows gRPC down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from alloy_agent.config import BrainSettings
from alloy_agent.errors import BrainUnavailableError
from alloy_agent.model import Value

LOG = logging.getLogger(__name__)

DIAL_TIMEOUT_S: Final = 10.0
UNANSWERED_MS: Final = 30_000  # sent bytes that no acknowledgement came for: the peer is gone
BUFFER_BYTES: Final = 256 * 1024
CHUNK_BYTES: Final = 64 * 1024
CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid. Source: unix(7), struct ucred


class Stamp(Value, frozen=True, kw_only=True):
    """What tells one version of a file from the next."""

    inode: int
    size: int
    changed_ns: int


def stamps(settings: BrainSettings) -> tuple[Stamp | None, ...]:
    """Return what the files of the identity look like; None for one that is not there."""
    found: list[Stamp | None] = []
    for name in (settings.ca_file, settings.certificate_file, settings.key_file):
        try:
            status = Path(name or "").stat()
        except OSError:
            found.append(None)
        else:
            found.append(
                Stamp(inode=status.st_ino, size=status.st_size, changed_ns=status.st_mtime_ns)
            )
    return tuple(found)


def context(settings: BrainSettings) -> ssl.SSLContext:
    """Return a TLS context from the files as they are now.

    Raises:
        BrainUnavailableError: A file cannot be read, or key and certificate do not fit.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["h2"])
    # A SPIFFE identity has no host name; the id is checked instead, right after the handshake.
    made.check_hostname = settings.spiffe_id is None or settings.server_name is not None
    try:
        made.load_verify_locations(settings.ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise BrainUnavailableError(
            f"{settings.ca_file}: {_cause(exc)}", cure="name a PEM file of authorities"
        ) from exc
    try:
        made.load_cert_chain(settings.certificate_file or "", settings.key_file)
    except (OSError, ssl.SSLError) as exc:
        raise BrainUnavailableError(
            f"{settings.certificate_file} with {settings.key_file}: {_cause(exc)}",
            cure="put a PEM certificate and its own key there",
        ) from exc
    return made


def own_end_wall_s(settings: BrainSettings) -> float:
    """Return when the agent's own certificate ends, in seconds since the epoch."""
    from cryptography import x509

    data = Path(settings.certificate_file or "").read_bytes()
    return x509.load_pem_x509_certificate(data).not_valid_after_utc.timestamp()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Tunnel:
    """A local address for gRPC behind which the brain is, once per process.

    Args:
        settings: Address and identity.
        on_failure: Told at once, on a thread of the tunnel, why the brain could not be reached or
            the session to it had to end.
    """

    def __init__(
        self,
        settings: BrainSettings,
        on_failure: Callable[[BrainUnavailableError], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_failure = on_failure
        self._name = f"alloy-uplink-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stopping = threading.Event()
        self._mutex = threading.Lock()
        self._open: set[socket.socket] = set()
        self._newest: socket.socket | None = None
        self._failure: BrainUnavailableError | None = None
        self._thread = threading.Thread(target=self._accept, name="uplink-tunnel", daemon=True)

    @property
    def target(self) -> str:
        """Return what gRPC dials."""
        return f"unix-abstract:{self._name}"

    @property
    def failure(self) -> BrainUnavailableError | None:
        """Return why the last connection failed; None once the brain has said something."""
        return self._failure

    def start(self) -> None:
        """Listen for gRPC."""
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(8)
        self._thread.start()

    def stop(self) -> None:
        """End everything."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        """End the sessions of the moment; gRPC dials anew."""
        with self._mutex:
            sessions = tuple(self._open)
        for session in sessions:
            with contextlib.suppress(OSError):
                session.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                local, _ = self._listener.accept()
            except OSError as exc:
                if self._stopping.is_set():
                    return
                LOG.warning("tunnel_accept_failed", extra={"cause": str(exc)})
                time.sleep(0.1)
                continue
            if _is_ours(local):
                threading.Thread(
                    target=self._carry, args=(local,), name="uplink-tls", daemon=True
                ).start()
            else:
                local.close()

    def _carry(self, local: socket.socket) -> None:
        """Carry one connection to the brain until either side ends."""
        with self._mutex:
            self._open.add(local)
            self._newest = local
        try:
            with local:
                failure = self._carried(local)
                if failure is not None:
                    self._fail(local, failure)
        finally:
            with self._mutex:
                self._open.discard(local)

    def _carried(self, local: socket.socket) -> BrainUnavailableError | None:
        """Carry one connection to its end; return what went wrong, None for an end as usual."""
        try:
            with self._dial() as remote:
                end_wall_s = self._check(remote)
                if not self._stopping.is_set():
                    relay(local, remote, end_wall_s, self._reached)
        except BrainUnavailableError as failure:
            return failure
        except (OSError, ValueError) as exc:
            return self._unreachable(exc)
        return None

    def _reached(self) -> None:
        self._failure = None

    def _fail(self, local: socket.socket, failure: BrainUnavailableError) -> None:
        """Note a failure and tell it, unless another connection has taken over meanwhile."""
        with self._mutex:
            if self._newest is not local:
                return
        self._failure = failure
        if self._on_failure is not None and not self._stopping.is_set():
            self._on_failure(failure)

    def _dial(self) -> ssl.SSLSocket:
        """Return a TLS connection to the brain, its chain and host name verified."""
        settings = self._settings
        secure = context(settings)
        ours_wall_s = own_end_wall_s(settings)
        if time.time() >= ours_wall_s:
            ended = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ours_wall_s))
            raise BrainUnavailableError(
                f"{settings.certificate_file}: the agent's own certificate has run out on {ended}",
                cure="renew it, or set the clock",
            )
        host, port = split_address(settings.address or "")
        plain = socket.create_connection((host, port), timeout=DIAL_TIMEOUT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
            return secure.wrap_socket(plain, server_hostname=settings.server_name or host)
        except BaseException:
            plain.close()
            raise

    def _check(self, remote: ssl.SSLSocket) -> float:
        """Return when the session must end, after the brain's identity was found right."""
        settings = self._settings
        certificate = remote.getpeercert() or {}
        names = [
            str(entry[1])
            for entry in certificate.get("subjectAltName", ())
            if len(entry) == 2 and entry[0] == "URI"
        ]
        if settings.spiffe_id is not None and names != [settings.spiffe_id]:
            raise BrainUnavailableError(
                f"brain {settings.address}: its certificate is for {', '.join(names) or 'no id'}",
                cure=f"let it present {settings.spiffe_id} or change brain.spiffe_id",
            )
        if remote.selected_alpn_protocol() != "h2":
            raise BrainUnavailableError(
                f"brain {settings.address}: it does not speak HTTP/2", cure="check brain.address"
            )
        theirs = ssl.cert_time_to_seconds(str(certificate.get("notAfter", "")))
        return min(float(theirs), own_end_wall_s(settings))

    def _unreachable(self, exc: OSError | ValueError) -> BrainUnavailableError:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return BrainUnavailableError(
                f"brain {self._settings.address}: its certificate is refused: {exc.verify_message}",
                cure="check brain.ca_file, brain.server_name and the brain's certificate",
            )
        if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
            return BrainUnavailableError(
                f"brain {self._settings.address}: it refuses the agent: {_cause(exc)}",
                cure="see that it accepts the agent's certificate, and read its log",
            )
        return BrainUnavailableError(f"brain {self._settings.address}: {_cause(exc)}")


def _cause(exc: OSError | ValueError) -> str:
    """Return the cause of a failure in words."""
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return exc.reason.lower().replace("_", " ")
    words = exc.strerror if isinstance(exc, OSError) else None
    return words or str(exc) or type(exc).__name__


def _is_ours(local: socket.socket) -> bool:
    """Whether the peer is this process."""
    raw = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _gid = CREDENTIALS.unpack(raw)
    if pid == os.getpid() and uid == os.geteuid():
        return True
    LOG.warning("tunnel_peer_refused", extra={"pid": pid, "uid": uid})
    return False


def relay(
    local: socket.socket,
    remote: ssl.SSLSocket,
    end_wall_s: float,
    reached: Callable[[], None],
) -> None:
    """Move bytes both ways on this thread until either side ends or the certificates do.

    One thread, because an OpenSSL session must not be read and written at once. `reached` is
    called when the first byte comes from the brain.

    Raises:
        BrainUnavailableError: A certificate has run out, or the brain ended the connection before
            it said anything.
        OSError: The brain said in an alert why it ends the connection.
    """
    local.setblocking(False)
    remote.setblocking(False)
    up, down = bytearray(), bytearray()
    heard = False
    with selectors.DefaultSelector() as selector:
        while True:
            ours, theirs = _take(local, up), _take(remote, down)
            if down and not heard:
                heard = True
                reached()
            if not _give(remote, up):
                theirs = False
                _take(remote, down)  # an alert may have come before the end that broke the write
            ours = _give(local, down) and ours
            if not theirs and not heard:
                raise BrainUnavailableError(
                    "the brain ended the connection right after the handshake, without a word",
                    cure="see that it accepts the agent's certificate, and read its log",
                )
            if not (ours and theirs):
                return
            if time.time() >= end_wall_s:
                raise BrainUnavailableError(
                    "a certificate of the stream to the brain has run out", cure="renew it"
                )
            if remote.pending() and len(down) < BUFFER_BYTES:
                continue
            _wait(selector, (local, up, down), (remote, down, up))


def _take(source: socket.socket, into: bytearray) -> bool:
    """Read what is there, up to the bound; whether the source lives.

    Raises:
        ssl.SSLError: The other side said why it ends: an alert about our certificate.
    """
    while len(into) < BUFFER_BYTES:
        try:
            chunk = source.recv(CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return False
        except ssl.SSLError:
            raise
        except OSError:
            return False
        if not chunk:
            return False
        into += chunk
    return True


def _give(sink: socket.socket, out: bytearray) -> bool:
    """Write what fits; whether the sink lives."""
    while out:
        try:
            sent = sink.send(out)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        del out[:sent]
    return True


def _wait(
    selector: selectors.BaseSelector, *ends: tuple[socket.socket, bytearray, bytearray]
) -> None:
    """Wait up to a second until something can move; ends are (socket, read into, write from)."""
    registered = []
    for end, into, out in ends:
        events = selectors.EVENT_READ if len(into) < BUFFER_BYTES else 0
        if out:
            events |= selectors.EVENT_WRITE
        if events:
            selector.register(end, events)
            registered.append(end)
    selector.select(1.0)
    for end in registered:
        selector.unregister(end)
