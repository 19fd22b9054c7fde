"""Whose a request at this door is: tokens of sandboxes, and signatures made with them.

A token stands for a session and for the key it was given to. Nothing of it is stored. It opens no
more than its key does, and nothing once that is not valid. The web server asks before it reads a
body (`look_up`), so this module is light to import.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

from django.conf import settings
from django.utils.crypto import constant_time_compare, salted_hmac

from executions.sessions.models import Session
from executions.sessions.queries import sessions_with_keys
from executions.tenants import keys
from executions.tenants.keys import UNKNOWN
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
    return sessions_with_keys(session_id, settings.SESSIONS_MAX_TOTAL)


FILES = "/files"
PATHS = (
    *("/sandboxes", "/v2/sandboxes", "/process.Process/", "/filesystem.Filesystem/"),
    *("/execute", "/contexts", FILES, "/health"),
    # What is not here: clients are told so, however they send what they ask for.
    *("/templates", "/v2/templates", "/v3/templates", "/default-templates"),
    *("/volumes", "/secrets", "/teams", "/snapshots"),
)
SANDBOX_HEADER, PORT_HEADER = "HTTP_E2B_SANDBOX_ID", "HTTP_E2B_SANDBOX_PORT"
# Where clients find its calls and the code interpreter. There is nothing else to be reached.
PORTS = ("49983", "49999")
# Of a call over Connect: a command may be as long as code may be, and input comes as base64.
MOST_MESSAGE_BYTES = 2 * 1024 * 1024
_MOST_FIELDS = 20


def are_in(environ: Mapping[str, Any]) -> bool:
    return bool(token_in(environ)) or _is_signed(environ)


def look_up(environ: Mapping[str, Any]) -> tuple[ApiKey | None, str]:
    """The key that what is sent stands for, and why that is not valid; "" for one that is."""
    key: ApiKey | None
    sandbox_id = str(environ.get(SANDBOX_HEADER, ""))
    if token := token_in(environ):
        key = key_of_token(token, sandbox_id)
    else:
        operation = "read" if environ["REQUEST_METHOD"] in ("GET", "HEAD") else "write"
        query = _query_in(environ)
        key, _ = holder_of_signature(query, operation, sandbox_id)
    if key is None:
        return None, UNKNOWN
    return key, keys.problem_of(key)


def _query_in(environ: Mapping[str, Any]) -> dict[str, str]:
    try:
        return dict(parse_qsl(environ.get("QUERY_STRING", ""), max_num_fields=_MOST_FIELDS))
    except ValueError:
        # More of them than any link has.
        return {}


def _is_signed(environ: Mapping[str, Any]) -> bool:
    return environ["PATH_INFO"] == FILES and "signature=" in environ.get("QUERY_STRING", "")
