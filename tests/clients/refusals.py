"""Answers that refuse a request."""

from __future__ import annotations

import json
from typing import Any


def refusal(status: int, code: str, retry_after: str = "", **known: Any) -> Any:
    body = {"error": {"code": code, "message": "Not now.", "field": None, **known}, "id": None}
    headers = {"Content-Type": "application/json"} | (
        {"Retry-After": retry_after} if retry_after else {}
    )
    return status, headers, json.dumps(body).encode()
