"""AES-256-GCM for what is stored: sealed under the first key of a list, opened by any of them.

A token is `A256GCM1`, a random nonce of 96 bits, the ciphertext and its tag of 128 bits (NIST SP
800-38D). The 256-bit key is made by HKDF-SHA256 (RFC 5869) from one of the operator's keys, for
one context alone; the context is authenticated as well. What was sealed for one context does not
open in another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from providers.slices import SLICE_BYTES

PREFIX = b"A256GCM1"
_NONCE_BYTES = 12
_TAG_BYTES = 16

Key = str | bytes


class NotOpened(Exception):
    """No key opens the token in this context, or it is no token."""


def seal(keys: Sequence[Key], context: str, plain: bytes) -> bytes:
    """`plain` under the first of `keys`, for `context` alone."""
    nonce = os.urandom(_NONCE_BYTES)
    return PREFIX + nonce + _cipher(keys[0], context).encrypt(nonce, plain, _bound(context))


def seal_in_slices(keys: Sequence[Key], context: str, plain: Iterable[bytes]) -> Iterator[bytes]:
    """The same token as of `seal`, in pieces, of a plain text that comes in slices."""
    nonce = os.urandom(_NONCE_BYTES)
    sealing = Cipher(AES(_derived(keys[0], context)), GCM(nonce)).encryptor()
    sealing.authenticate_additional_data(_bound(context))
    yield PREFIX + nonce
    for each in plain:
        yield sealing.update(each)
    yield sealing.finalize() + sealing.tag


def unseal(keys: Sequence[Key], context: str, token: bytes) -> bytes:
    """What was sealed for `context` under one of `keys`. Raises NotOpened."""
    nonce, sealed = _parts(token)
    for key in keys:
        try:
            if len(sealed) > SLICE_BYTES:
                return _unseal_in_slices(key, context, nonce, sealed)
            return _cipher(key, context).decrypt(nonce, sealed, _bound(context))
        except InvalidTag:
            continue
    raise NotOpened


def _unseal_in_slices(key: Key, context: str, nonce: bytes, sealed: memoryview) -> bytes:
    """All of it, once its tag is found to be right. Raises InvalidTag."""
    tag = bytes(sealed[-_TAG_BYTES:])
    opening = Cipher(AES(_derived(key, context)), GCM(nonce, tag)).decryptor()
    opening.authenticate_additional_data(_bound(context))
    end = len(sealed) - _TAG_BYTES
    starts = range(0, end, SLICE_BYTES)
    plain = [opening.update(sealed[at : min(at + SLICE_BYTES, end)]) for at in starts]
    opening.finalize()
    return b"".join(plain)


def _parts(token: bytes) -> tuple[bytes, memoryview]:
    # Of a large one no copy is made: that would be a long call as well.
    rest = memoryview(token)[len(PREFIX) :]
    if not token.startswith(PREFIX) or len(rest) < _NONCE_BYTES + _TAG_BYTES:
        raise NotOpened
    return bytes(rest[:_NONCE_BYTES]), rest[_NONCE_BYTES:]


def _bound(context: str) -> bytes:
    return PREFIX + context.encode()


@lru_cache(maxsize=64)
def _cipher(key: Key, context: str) -> AESGCM:
    return AESGCM(_derived(key, context))


def _derived(key: Key, context: str) -> bytes:
    derived = HKDF(SHA256(), length=32, salt=None, info=b"cofferdam " + _bound(context))
    return derived.derive(key.encode() if isinstance(key, str) else key)
