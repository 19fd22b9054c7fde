"""Certificates for TLS servers on loopback, from an authority that nobody else knows."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for localhost and 127.0.0.1. `pem` is what its clients are given."""

    def __init__(self, name: str = "Test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.pem = own.sign(self._key, SHA256()).public_bytes(Encoding.PEM).decode()

    def issue(self, folder: Path, *names: str, addresses: Sequence[str] = ()) -> Issued:
        """A new key with its certificate, for `names` and `addresses` too, below `folder`."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName(
            [
                *map(x509.DNSName, ("localhost", *names)),
                *(x509.IPAddress(ipaddress.ip_address(each)) for each in ("127.0.0.1", *addresses)),
            ]
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        certificate = _builder(subject, self._name, key).add_extension(alternatives, critical=False)
        return self._sign(certificate, key, folder)

    def issue_identity(self, folder: Path, user: str, groups: Sequence[str] = ()) -> Issued:
        """A new key with the certificate by which a client is `user`, of these groups."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        names += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        return self._sign(_builder(x509.Name(names), self._name, key), key, folder)

    def _sign(
        self, certificate: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, folder: Path
    ) -> Issued:
        signed = certificate.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path = folder / f"{x509.random_serial_number():x}.pem"
        path.write_bytes(private + signed)
        return Issued(path, key)


class Issued:
    """A server's certificate and key in one file, and the pin of the key."""

    def __init__(self, path: Path, key: ec.EllipticCurvePrivateKey) -> None:
        self.path = path
        spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.pin = "sha256/" + base64.b64encode(hashlib.sha256(spki).digest()).decode()

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=2))
    )
