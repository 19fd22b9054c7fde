"""Putting and getting files of a session."""

from __future__ import annotations

from typing import Any

from tests.conftest import Caller
from tests.support.sessions import URL


def put(
    caller: Caller, session: dict[str, Any], path: str, content: bytes, what: str = "content"
) -> Any:
    url = f"{URL}/{session['id']}/files/{what}?path={path}"
    return caller.client.put(url, content, content_type="application/octet-stream")


def got(caller: Caller, session: dict[str, Any], path: str, **headers: str) -> Any:
    return caller.client.get(f"{URL}/{session['id']}/files/content?path={path}", **headers)
