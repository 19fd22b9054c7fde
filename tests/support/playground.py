"""The playground's page and what it sends."""

from __future__ import annotations

from typing import Any

from django.test import Client

PAGE = "/admin/playground/"
HELLO = "answer = ExecutionResult('hello', '', 0, 0.0)"
JSON = {"accept": "application/json"}


def sent(client: Client, code: str = HELLO, to: str = "run", **fields: Any) -> Any:
    body = {"code": code, "tenant": "wonderland", "language": "python", **fields}
    return client.post(PAGE + to, body, headers=JSON)
