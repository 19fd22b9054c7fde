"""The certificate authority of one sandbox: TLS that must be read ends at certificates of its own.

The sandbox trusts its certificate; the key stays with the pool and its proxy process. No other
sandbox trusts it, and it signs nothing but names that this sandbox has asked for.
"""

from __future__ import annotations

import os
import ssl
from collections import OrderedDict
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from providers.addresses import literal

# Of a sandbox that stays for long, and of clocks that differ.
VALID_DAYS, EARLY_DAYS = 365, 1
# Hosts whose certificates are kept; one is made in half a millisecond.
MOST_HOSTS = 64


class Authority:
    """Signs a certificate for each host, and keeps the last of them."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    @classmethod
    def create(cls) -> Authority:
        """With a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Network of this sandbox")])
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def from_pem(cls, text: bytes) -> Authority:
        """From what `to_pem` returned. Raises ValueError."""
        key = serialization.load_pem_private_key(text, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("The key of an authority is of another kind.")
        return cls(key, x509.load_pem_x509_certificate(text))

    def to_pem(self) -> bytes:
        """Its key and its certificate."""
        return _key_pem(self._key) + self.certificate

    @property
    def certificate(self) -> bytes:
        """What the sandbox trusts, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def context_for(self, host: str) -> ssl.SSLContext:
        """Return what a server needs to be this host for the sandbox. Takes a millisecond."""
        context = self._contexts.pop(host, None) or self._new_context(host)
        self._contexts[host] = context
        if len(self._contexts) > MOST_HOSTS:
            self._contexts.popitem(last=False)
        return context

    def _new_context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        address = literal(host)
        name = x509.IPAddress(address) if address is not None else x509.DNSName(host)
        certificate = (
            _builder(x509.Name([]), self._certificate.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            # Critical, as the subject is empty (RFC 5280, section 4.2.1.6).
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        _load(context, _key_pem(key) + pem)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=EARLY_DAYS))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context its key without a file: it can load no other way."""
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
