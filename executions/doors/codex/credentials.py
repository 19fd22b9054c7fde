"""Whose a connection is: a key or a capability in a header, or a capability in the path.

Not every client sends a header with the address of an environment: then the address itself has to
be the proof. A capability is derived from a key. Nothing of it is stored. It opens no more than its
key does, and nothing once that is not valid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.utils.crypto import constant_time_compare, salted_hmac

from executions.doors.native.authentication import key_text_in
from executions.tenants import keys
from executions.tenants.keys import UNKNOWN, Unauthenticated
from executions.tenants.models import ApiKey

PATH = "/codex/"
_CAPABILITY = re.compile("([0-9a-f]{1,15})x([0-9a-f]{64})", re.ASCII)


def capability_of(key: ApiKey) -> str:
    """Return the capability that stands for the key."""
    said = f"{key.pk}:{key.key_hash}"
    mac = salted_hmac("cofferdam codex", said, algorithm="sha256").hexdigest()
    return f"{key.pk:x}x{mac}"


def authenticate(path: str, meta: Mapping[str, Any]) -> ApiKey:
    """Return the valid key by which a connection is opened: of the path, or of a header where the
    path ends before the capability. Raises Unauthenticated."""
    address = str(meta.get("REMOTE_ADDR", ""))
    text = path.removeprefix(PATH) or key_text_in(meta)
    if path == PATH and not _CAPABILITY.fullmatch(text):
        return keys.authenticate(text, address)
    key = _key_of(text)
    if key is None:
        keys.note_refusal(None, UNKNOWN, address=address)
        raise Unauthenticated
    keys.ensure_valid(key, address)
    return key


def _key_of(capability: str) -> ApiKey | None:
    parts = _CAPABILITY.fullmatch(capability)
    key = None if parts is None else keys.of_id(int(parts[1], 16))
    if key is None or not constant_time_compare(capability_of(key), capability):
        return None
    return key
