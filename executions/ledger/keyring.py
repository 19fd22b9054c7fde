"""The keys the ledger is signed with: Ed25519, from LEDGER_KEYS, the first one signs.

Whoever holds a receipt needs only the public key, which is why this is no HMAC.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from django.conf import settings

from providers.errors import ProviderUnavailable


class LedgerUnavailable(ProviderUnavailable):
    """The ledger takes no entry, so what was to be entered must not happen."""


class LedgerAltered(LedgerUnavailable):
    """The newest entry is not what one of our keys signed: somebody else wrote it."""


@dataclass(frozen=True)
class SigningKey:
    """`key_id` is the start of the SHA-256 of the public key, `public_key` its base64."""

    key_id: str
    public_key: str
    _private: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> str:
        """The signature in base64. What a message begins with says what it is: see `formats`."""
        return base64.b64encode(self._private.sign(message)).decode()


def keyring() -> dict[str, SigningKey]:
    """The configured keys by id, the signing one first. Raises LedgerUnavailable."""
    return _loaded(tuple(settings.LEDGER_KEYS))


def signing_key() -> SigningKey:
    """The key that new entries are signed with. Raises LedgerUnavailable."""
    return next(iter(keyring().values()))


def public_key_id(public_key: str) -> str:
    return hashlib.sha256(base64.b64decode(public_key)).hexdigest()[:16]


def is_signed_by(public_key: str, message: bytes, signature: str) -> bool:
    """Whether `signature` is the one of this key's holder over the message."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        key.verify(base64.b64decode(signature, validate=True), message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=8)
def _loaded(seeds: tuple[str, ...]) -> dict[str, SigningKey]:
    if not seeds:
        raise LedgerUnavailable("LEDGER_KEYS is not set, so nothing can be entered in the ledger.")
    keys = [_load(number, seed) for number, seed in enumerate(seeds, 1)]
    return {key.key_id: key for key in keys}


def _load(number: int, seed: str) -> SigningKey:
    try:
        raw = base64.b64decode(seed + "=" * (-len(seed) % 4), altchars=b"-_", validate=True)
        private = Ed25519PrivateKey.from_private_bytes(raw)
    except (binascii.Error, ValueError):
        raise LedgerUnavailable(
            f"LEDGER_KEYS: Key {number} is not 32 bytes in URL-safe base64. Make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        ) from None
    public = private.public_key().public_bytes_raw()
    public_key = base64.b64encode(public).decode()
    return SigningKey(public_key_id(public_key), public_key, private)
