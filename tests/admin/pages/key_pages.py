"""The pages of API keys."""

from __future__ import annotations

import re
from typing import Any

KEYS = "/admin/executions/apikey/"
SENT: dict[str, Any] = {"name": "k", "scopes": ["execute", "read"]}


def shown_key(answer: Any) -> str:
    found = re.search(r'id="new-key">([^<]+)<', answer.content.decode())
    assert found is not None, answer.content.decode()[:2000]
    return found[1]
