"""Throw-away certificates: an authority, and identities with host names, SPIFFE ids and any end."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.timedelta(0)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        ends_in_s: float = 3600,
        spiffe: str | None = None,
        loopback: bool = True,
    ) -> tuple[bytes, bytes]:
        """Return key and certificate in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names: list[x509.GeneralName] = []
        if loopback:
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        if spiffe is not None:
            names.append(x509.UniformResourceIdentifier(spiffe))
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(seconds=ends_in_s))
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return (
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            certificate.public_bytes(serialization.Encoding.PEM),
        )

    def install(self, name: str, **wishes: object) -> tuple[Path, Path]:
        """Write an identity, each file replaced at once, and return (key, certificate) paths."""
        key, certificate = self.issue(name, **wishes)  # type: ignore[arg-type]
        paths = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        for path, data in zip(paths, (key, certificate), strict=True):
            fresh = path.with_suffix(path.suffix + ".new")
            fresh.write_bytes(data)
            fresh.replace(path)
        return paths
