"""Whose a request at this door is, for the web server: before its body is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from executions.doors.e2b import tokens
from executions.tenants import keys
from executions.tenants.keys import UNKNOWN
from executions.tenants.models import ApiKey

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
    return bool(tokens.token_in(environ)) or _is_signed(environ)


def look_up(environ: Mapping[str, Any]) -> tuple[ApiKey | None, str]:
    """The key that what is sent stands for, and why that is not valid; "" for one that is."""
    key: ApiKey | None
    sandbox_id = str(environ.get(SANDBOX_HEADER, ""))
    if token := tokens.token_in(environ):
        key = tokens.key_of_token(token, sandbox_id)
    else:
        operation = "read" if environ["REQUEST_METHOD"] in ("GET", "HEAD") else "write"
        query = _query_in(environ)
        key, _ = tokens.holder_of_signature(query, operation, sandbox_id)
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
