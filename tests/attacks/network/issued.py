"""Certificates of servers: right ones, and those that no client may believe."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from providers.addresses import literal


class ServerAuthority:
    """Signs certificates of servers. `trusted` is the context of a client that believes it."""

    def __init__(self, name: str = "Authority of servers") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = _builder(self._name, self._name, self._key, 1).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.pem = own.sign(self._key, SHA256()).public_bytes(Encoding.PEM).decode()
        self.trusted = ssl.create_default_context(cadata=self.pem)

    def context(
        self, *hosts: str, days: float = 1, common_name: str = "", own_signature: bool = False
    ) -> ssl.SSLContext:
        """What a server for these hosts needs; with fewer than 0 days it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name or "server")])
        issuer = subject if own_signature else self._name
        built = _builder(subject, issuer, key, days)
        if hosts:
            names = x509.SubjectAlternativeName(_names(hosts))
            built = built.add_extension(names, critical=False)
        signed = built.sign(key if own_signature else self._key, SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return server_context(private + signed.public_bytes(Encoding.PEM))


def server_context(pem: bytes) -> ssl.SSLContext:
    """From a key and its certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in hosts:
        address = literal(host)
        found.append(x509.IPAddress(address) if address is not None else x509.DNSName(host))
    return found


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
    )
