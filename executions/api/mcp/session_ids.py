"""MCP's session ids: what tells one client's requests apart, and nothing is stored of.

An id is bound to the key that it was given to. With it, a later message can name a request that
another process is answering.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from django.utils.crypto import constant_time_compare, salted_hmac

from executions.tenants.models import ApiKey

_FORM = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_LONGEST_ID = 80


def new_session_id(key: ApiKey) -> str:
    nonce = secrets.token_hex(16)
    return f"{nonce}.{_mac(nonce, key)}"


def nonce_of(session_id: str, key: ApiKey) -> str:
    """What its requests have in common; empty for an id that is not this key's."""
    parts = _FORM.fullmatch(session_id)
    if parts is None or not constant_time_compare(_mac(parts[1], key), parts[2]):
        return ""
    return parts[1]


def request_id_of(nonce: str, message_id: object) -> str:
    """How the record of a run names the request that asked for it."""
    said = f"{type(message_id).__name__[0]}{message_id}"
    if len(said) > _LONGEST_ID or not said.isascii() or not said.isprintable():
        said = hashlib.sha256(said.encode("utf-8", "replace")).hexdigest()
    return f"mcp:{nonce}:{said}"


def _mac(nonce: str, key: ApiKey) -> str:
    said = f"{nonce}:{key.pk}:{key.key_hash}"
    return salted_hmac("cofferdam mcp session", said, algorithm="sha256").hexdigest()
