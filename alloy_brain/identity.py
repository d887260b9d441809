"""How the brain listens: mutual TLS re-read for every connection, or plain text on loopback.

A client's certificate must carry a SPIFFE id when a pattern is set: `{node}` in it is whatever the
Hello says, so that a node cannot speak for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.model import Value

if TYPE_CHECKING:
    import grpc

LOOPBACK: Final = re.compile(
    r"(unix(-abstract)?:.*|(127(\.[0-9]{1,3}){3}|localhost|\[::1\]):[0-9]+)"
)

ELSEWHERE: Final = re.compile(r"(unix(-abstract)?|vsock|dns|ipv4|ipv6):.+")  # gRPC's own words
HOST_PORT: Final = re.compile(r"(?:[^\s:/]+|\[[0-9A-Za-z:.%]+\]):([0-9]{1,5})")
PORT_MAX: Final = 65535


class IdentityError(Exception):
    """The brain cannot listen as it was told to; names what, why and the cure."""


class Identity(Value, frozen=True, kw_only=True):
    """Files of the server's identity, and who may call.

    `spiffe_nodes` is the id that an agent's certificate must carry, `spiffe_clients` the one of
    whoever places; None accepts every certificate of the authority.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    spiffe_nodes: str | None = None
    spiffe_clients: str | None = None
    insecure: bool = False

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.certificate_file is not None


def require_address(address: str, option: str) -> None:
    """Refuse what is no address.

    Raises:
        IdentityError: With the cure.
    """
    named = HOST_PORT.fullmatch(address)
    if not ELSEWHERE.fullmatch(address) and (named is None or int(named[1]) > PORT_MAX):
        raise IdentityError(f"{option} {address}: no address: give HOST:PORT, like 127.0.0.1:7443")


def check(address: str, identity: Identity) -> None:
    """Refuse what would listen in plain text where nobody said so.

    Raises:
        IdentityError: With the cure.
    """
    require_address(address, "--listen")
    files = (identity.ca_file, identity.certificate_file, identity.key_file)
    if identity.insecure or (files == (None, None, None) and LOOPBACK.fullmatch(address)):
        return
    if None in files:
        raise IdentityError(
            f"{address}: it is not on loopback and mutual TLS is incomplete: "
            "give --tls-ca, --tls-certificate and --tls-key, or --insecure"
        )
    load(identity)


def load(identity: Identity) -> tuple[bytes, bytes, bytes]:
    """Return authority, certificate and key as they are on disk now.

    Raises:
        IdentityError: One cannot be read, or is not what it should be.
    """
    found = []
    for name in (identity.ca_file, identity.certificate_file, identity.key_file):
        try:
            found.append(Path(name or "").read_bytes())
        except OSError as exc:
            raise IdentityError(f"{name}: {exc.strerror}: name a readable PEM file") from exc
    for name, data in zip((identity.ca_file, identity.certificate_file), found, strict=False):
        if b"-----BEGIN CERTIFICATE-----" not in data:
            raise IdentityError(f"{name}: it holds no certificate: name a PEM file")
    if b"PRIVATE KEY-----" not in found[2]:
        raise IdentityError(f"{identity.key_file}: it holds no private key: name a PEM file")
    return found[0], found[1], found[2]


def credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return server credentials that follow the files: a renewed certificate needs no restart."""
    import grpc

    last = [load(identity)]

    def configuration() -> grpc.ServerCertificateConfiguration:
        authority, certificate, key = last[0]
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authority
        )

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        try:
            now = load(identity)
        except IdentityError:
            return None  # half way through the renewal: the old one still holds
        if now == last[0]:
            return None
        last[0] = now
        return configuration()

    fetch: Any = renewed  # None means no change, which the stubs do not know
    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=True
    )


def refusal(pattern: str | None, context: Mapping[str, Sequence[bytes]], node: str) -> str:
    """Return why a peer is not who it must be; empty when it is.

    Args:
        pattern: The SPIFFE id wanted, with `{node}`; None: any.
        context: The peer's authentication context, as gRPC gives it.
        node: The name it says it has.
    """
    if pattern is None:
        return ""
    names = [value.decode("utf-8", "replace") for value in context.get("peer_spiffe_id", ())]
    names = names or [
        value.decode("utf-8", "replace")
        for value in context.get("x509_subject_alternative_name", ())
        if value.startswith(b"spiffe://")
    ]
    wanted = pattern.replace("{node}", node)
    if names == [wanted]:
        return ""
    return f"its certificate is for {', '.join(names) or 'no SPIFFE id'}, not for {wanted}"
