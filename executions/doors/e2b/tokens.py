"""What a sandbox's calls come with: a token that stands for a session and for the key it was given
to, and signatures made with it.

Nothing of it is stored. It opens no more than its key does, and nothing once that is not valid.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac

from executions.sessions.models import Session
from executions.sessions.queries import opened_by_keys
from executions.tenants import keys
from executions.tenants.models import ApiKey

_TOKEN = re.compile("([0-9a-f]{1,15})x([0-9a-f]{64})", re.ASCII)
_EXPIRATION = re.compile("[0-9]{1,12}", re.ASCII)
TOKEN_HEADERS = ("HTTP_X_ACCESS_TOKEN", "HTTP_E2B_TRAFFIC_ACCESS_TOKEN")


def token_of(session_id: UUID, key: ApiKey) -> str:
    return _token(session_id, key.pk, key.key_hash)


def _token(session_id: UUID, key_id: int, key_hash: str) -> str:
    said = f"{session_id}:{key_id}:{key_hash}"
    mac = salted_hmac("cofferdam e2b sandbox", said, algorithm="sha256").hexdigest()
    return f"{key_id:x}x{mac}"


def sandbox_id_of(session: Session) -> str:
    return session.pk.hex


def session_id_of(sandbox_id: str) -> UUID | None:
    """None for what can be no sandbox of ours."""
    return UUID(sandbox_id) if re.fullmatch("[0-9a-f]{32}", sandbox_id) else None


def token_in(meta: Mapping[str, Any]) -> str:
    """The token in the headers, as WSGI names them; empty without one."""
    return next((str(meta[name]) for name in TOKEN_HEADERS if meta.get(name)), "")


def key_of_token(token: str, sandbox_id: str) -> ApiKey | None:
    """The key that this token was given to, valid or not; None where it is none of this sandbox."""
    parts, session_id = _TOKEN.fullmatch(token), session_id_of(sandbox_id)
    if parts is None or session_id is None:
        return None
    key = keys.of_id(int(parts[1], 16))
    if key is None or not constant_time_compare(token_of(session_id, key), token):
        return None
    return key


def holder_of_signature(
    query: Mapping[str, str], operation: str, sandbox_id: str
) -> tuple[ApiKey | None, str]:
    """Whose signature is on a link to a file, and the sandbox that it is for; None without a valid
    one. Only sandboxes that live are looked at, and of each the key that opened it.
    """
    signature, until = query.get("signature", ""), query.get("signature_expiration", "")
    if not signature.startswith("v1_") or len(signature) > 64:
        return None, ""
    if until and (not _EXPIRATION.fullmatch(until) or has_expired(query)):
        return None, ""
    said = f"{query.get('path', '')}:{operation}:{query.get('username', '')}:"
    for session_id, key_id, key_hash in _candidates(sandbox_id):
        token = _token(session_id, key_id, key_hash)
        text = f"{said}{token}:{until}" if until else f"{said}{token}"
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        made = f"v1_{base64.b64encode(digest).rstrip(b'=').decode()}"
        if constant_time_compare(made, signature):
            return keys.of_id(key_id), session_id.hex
    return None, ""


def has_expired(query: Mapping[str, str]) -> bool:
    """Whether the time that a link names is over, whoever has signed it."""
    until = query.get("signature_expiration", "")
    return bool(_EXPIRATION.fullmatch(until)) and int(until) < time.time()


def _candidates(sandbox_id: str) -> Iterable[tuple[UUID, int, str]]:
    session_id = session_id_of(sandbox_id) if sandbox_id else None
    if sandbox_id and session_id is None:
        return ()
    return opened_by_keys(session_id, settings.SESSIONS_MAX_TOTAL)
