"""AES-256-GCM for what is stored: sealed under the first key of a list, opened by any of them.

A token is `A256GCM1`, a random nonce of 96 bits, the ciphertext and its tag of 128 bits (NIST SP
800-38D). The 256-bit key is made by HKDF-SHA256 (RFC 5869) from one of the operator's keys, for
one context alone; the context is authenticated as well. What was sealed for one context does not
open in another.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PREFIX = b"A256GCM1"
_NONCE_BYTES = 12

Key = str | bytes


class NotOpened(Exception):
    """No key opens the token in this context, or it is no token."""


def is_token(stored: bytes) -> bool:
    return stored.startswith(PREFIX)


def seal(keys: Sequence[Key], context: str, plain: bytes) -> bytes:
    """`plain` under the first of `keys`, for `context` alone."""
    nonce = os.urandom(_NONCE_BYTES)
    return PREFIX + nonce + _cipher(keys[0], context).encrypt(nonce, plain, _bound(context))


def unseal(keys: Sequence[Key], context: str, token: bytes) -> bytes:
    """What was sealed for `context` under one of `keys`. Raises NotOpened."""
    nonce, sealed = _parts(token)
    for key in keys:
        try:
            return _cipher(key, context).decrypt(nonce, sealed, _bound(context))
        except InvalidTag:
            continue
    raise NotOpened


def _parts(token: bytes) -> tuple[bytes, bytes]:
    rest = token.removeprefix(PREFIX)
    if not is_token(token) or len(rest) < _NONCE_BYTES + 16:
        raise NotOpened
    return rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]


def _bound(context: str) -> bytes:
    return PREFIX + context.encode()


@lru_cache(maxsize=64)
def _cipher(key: Key, context: str) -> AESGCM:
    # The prefix keeps these keys apart from those that the same text makes for Fernet.
    derived = HKDF(SHA256(), length=32, salt=None, info=b"cofferdam " + _bound(context))
    return AESGCM(derived.derive(key.encode() if isinstance(key, str) else key))
