"""The key that signs heads: Ed25519, made at the first start, readable by root alone.

`cryptography` is imported where it is used: a command that signs nothing does not pay for it.
"""

from __future__ import annotations

import base64
import os
from hashlib import sha256
from typing import TYPE_CHECKING

from alloy_agent.conformance.evidence.record import SIGNATURE_CONTEXT
from alloy_agent.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

KEY_FILE = "evidence.pem"
PUBLIC_FILE = "evidence.pub.pem"


class PublicKey:
    """One verifying key."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self._key = key
        self.raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")
        self.id = sha256(self.raw).hexdigest()[:16]

    @classmethod
    def from_pem(cls, pem: str | bytes, origin: str = "the public key") -> PublicKey:
        """Return the key of a PEM text.

        Raises:
            ConfigError: It is no Ed25519 public key.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        data = pem.encode("utf-8", "replace") if isinstance(pem, str) else pem
        try:
            key = load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as exc:
            raise ConfigError(
                f"{origin} is no PEM public key", cure=f"give the node's keys/{PUBLIC_FILE}"
            ) from exc
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(
                f"{origin} is not an Ed25519 key", cure=f"give the node's keys/{PUBLIC_FILE}"
            )
        return cls(key)

    @classmethod
    def from_raw(cls, raw: bytes) -> PublicKey:
        """Return the key of 32 raw bytes; ValueError if they are none."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        return cls(Ed25519PublicKey.from_public_bytes(raw))

    def verifies(self, signature: str, message: bytes, context: bytes = SIGNATURE_CONTEXT) -> bool:
        """Whether the base64 signature over the message is this key's."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(base64.b64decode(signature, validate=True), context + message)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """The node's key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key that is nowhere on disk."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, directory: Path) -> SigningKey:
        """Return the key in a directory; make it there, mode 0600, if there is none.

        Raises:
            StoreError: The directory cannot be written, or the file holds no Ed25519 key.
        """
        path = directory / KEY_FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists():
                key = cls._load(path)
            else:
                key = cls.generate()
                _write_new(path, key.private_pem(), 0o600)
            if not (directory / PUBLIC_FILE).exists():
                _write_new(directory / PUBLIC_FILE, key.public.pem.encode("ascii"), 0o644)
        except OSError as exc:
            raise StoreError(
                f"signing key {path}: {exc.strerror or exc}",
                cure="make the state directory writable for root",
            ) from exc
        return key

    @classmethod
    def _load(cls, path: Path) -> SigningKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError) as exc:
            raise StoreError(
                f"signing key {path} cannot be read as a key",
                cure="move it aside; a new key is made and the change is recorded",
            ) from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise StoreError(f"signing key {path} is not Ed25519", cure="move it aside")
        return cls(key)

    def private_pem(self) -> bytes:
        """Return the key itself, unencrypted; for its file alone."""
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, message: bytes, context: bytes = SIGNATURE_CONTEXT) -> str:
        """Return the base64 signature over the message within a context."""
        return base64.b64encode(self._key.sign(context + message)).decode("ascii")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
