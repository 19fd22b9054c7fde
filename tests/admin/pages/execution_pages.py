"""The page of one execution."""

from __future__ import annotations

from django.test import Client


def page_of(client: Client, execution_id: str) -> str:
    page = client.get(f"/admin/executions/execution/{execution_id}/change/")
    assert page.status_code == 200
    return page.content.decode()
