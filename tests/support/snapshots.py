"""Taking snapshots."""

from __future__ import annotations

from typing import Any

from tests.conftest import Caller
from tests.support.sessions import URL


def taken(caller: Caller, session: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = caller.client.post(f"{URL}/{session['id']}/snapshot", body)
    assert answer.status_code == 201, answer.content
    found: dict[str, Any] = answer.json()
    return found
