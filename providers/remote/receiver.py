"""Who a client of ours talks to, made sure of at each connection before a byte of a secret is sent.

A name is resolved here and its addresses are checked, and what was checked is what is connected
to: an answer that changes in between changes nothing. Then the certificate: by the authorities of
the system or the provider's own, and by the keys it names, if it names any. No proxy of the
environment is used and no redirect is followed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from providers.addresses import Rules, rules
from providers.errors import InvalidConfiguration
from providers.schema import ConfigField, Schema

logger = logging.getLogger(__name__)

CA_FIELD, PIN_FIELD = "ca_certificates", "public_key_pins"

# Neither says whether it decides who receives the secrets, so that both are taken to.
FIELDS: Schema = {
    CA_FIELD: ConfigField(
        "string",
        "Certificate authority",
        max=100_000,
        multiline=True,
        placeholder="-----BEGIN CERTIFICATE-----",
        description="PEM text. Empty: the certificate authorities of the system.",
        group="Connection",
    ),
    PIN_FIELD: ConfigField(
        "string",
        "Public key pins",
        max=1000,
        placeholder="sha256/...",
        description="Accepted public keys of the server: SHA-256 of the SPKI in base64, separated "
        "by spaces. Empty: any trusted certificate.",
        group="Connection",
    ),
}

_PIN = re.compile(r"(?:sha256/)?([A-Za-z0-9+/]{43}=)")


class WrongKey(ssl.SSLCertVerificationError):
    """The server's certificate is in order, but its key is none of those that were named."""


@dataclass(frozen=True, eq=False)
class Receiver:
    """What is asked of whoever a provider connects to. `ca` is PEM text, `pins` SHA-256 digests."""

    rules: Rules
    ca: str = ""
    pins: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any], trusted: Iterable[str] = ()) -> Receiver:
        """By a configuration with our `FIELDS`; `trusted` are addresses of the environment."""
        pins = parse_pins(config.get(PIN_FIELD) or "")
        return cls(rules(trusted), config.get(CA_FIELD) or "", pins)

    def addresses(self, host: str, port: int) -> list[str]:
        """Where to connect to. Raises OSError, and notes why it is refused in the log."""
        try:
            return self.rules.resolve(host, port)
        except OSError as error:
            logger.warning("no connection: %s", error)
            raise

    @cached_property
    def tls(self) -> ssl.SSLContext:
        if self.ca:
            return ssl.create_default_context(cadata=self.ca)
        import httpx

        # The authorities that come with it: not every machine has some of its own.
        context = httpx.create_ssl_context()
        context.load_default_certs()
        return context

    def check_key(self, peer: ssl.SSLSocket | ssl.SSLObject) -> None:
        """To be called after the handshake. Raises WrongKey."""
        if not self.pins:
            return
        certificate = peer.getpeercert(True)
        if certificate is None or key_digest(certificate) not in self.pins:
            raise WrongKey("The server's key is not one of public_key_pins.")


def key_digest(certificate: bytes) -> bytes:
    """SHA-256 of the SubjectPublicKeyInfo of a certificate in DER (RFC 7469, section 2.4)."""
    key = x509.load_der_x509_certificate(certificate).public_key()
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def check_trust(config: Mapping[str, Any], addresses: Iterable[str]) -> None:
    """Raises InvalidConfiguration for a CA or pins that cannot be read, or that nothing checks."""
    for name in (CA_FIELD, PIN_FIELD):
        if config[name] and any(text.lower().startswith("http://") for text in addresses):
            raise InvalidConfiguration(
                f"{name}: Plain http has no certificates. Use https.", field=name
            )
    parse_pins(config[PIN_FIELD] or "")
    if config[CA_FIELD]:
        try:
            ssl.create_default_context(cadata=config[CA_FIELD])
            x509.load_pem_x509_certificates(config[CA_FIELD].encode())
        except (ssl.SSLError, ValueError):
            raise InvalidConfiguration(
                f"{CA_FIELD}: Must be certificates as PEM text.", field=CA_FIELD
            ) from None


def parse_pins(text: str) -> frozenset[bytes]:
    """The digests that pins stand for. Raises InvalidConfiguration."""
    pins = set()
    for word in re.findall(r"[^\s,]+", text):
        found = _PIN.fullmatch(word)
        try:
            pins.add(base64.b64decode(found[1] if found else "?", validate=True))
        except binascii.Error:
            raise InvalidConfiguration(
                f"{PIN_FIELD}: {word!r} is not a SHA-256 in base64, such as sha256/47DEQpj8...=.",
                field=PIN_FIELD,
            ) from None
    return frozenset(pins)
