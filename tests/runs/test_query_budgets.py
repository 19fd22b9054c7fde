"""Every page of the admin and every endpoint keeps to its number of queries, with many rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from executions.runs.models import Execution
from executions.tenants.models import ApiKey
from tests.support.query_budgets import BUDGETS, GOOD

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.one_database,
    pytest.mark.usefixtures("no_lookup_grows_old"),
]


BODIES = {
    "POST /api/admin/sandbox/config": {"provider_type": "probe", "config": GOOD | {"size": 99}},
    "POST /api/admin/sandbox/test": {"provider_type": "probe"},
    "PUT /api/admin/sandbox/active": {"provider": "probe"},
}


def taken(call: Any) -> tuple[int, int]:
    """Status and number of queries of the second call: the first fills caches and sessions."""
    call()
    with CaptureQueriesContext(connection) as queries:
        status = call().status_code
    # Savepoints are the test's own; PostgreSQL takes a lock that SQLite's writer has anyway.
    counted = (q for q in queries if not q["sql"].startswith(("SAVEPOINT", "RELEASE")))
    return status, len([q for q in counted if "_advisory_" not in q["sql"]])


def test_pages_keep_to_their_budgets(names: dict[str, Any], admin_client: Client) -> None:
    over = {}
    for template, budget in BUDGETS["pages"].items():
        path = template.format(**names)
        status, number = taken(lambda path=path: admin_client.get(path))
        assert status in (200, 302), path
        if number > budget:
            over[template] = number
    assert not over, json.dumps(over)


def test_endpoints_keep_to_their_budgets(names: dict[str, Any]) -> None:
    client = Client(headers={"X-API-Key": names["key_text"]})
    execution = Execution.objects.filter(tenant=ApiKey.objects.get(pk=names["key"]).tenant).first()
    assert execution is not None
    over = {}
    for template, budget in BUDGETS["endpoints"].items():
        method, path = template.format(execution=execution.pk).split()
        body = json.dumps(BODIES[template]) if template in BODIES else ""
        status, number = taken(
            lambda method=method, path=path, body=body: client.generic(
                method, path, body, content_type="application/json"
            )
        )
        assert status == 200, template
        if number > budget:
            over[template] = number
    assert not over, json.dumps(over)


def test_every_registered_page_has_a_budget() -> None:
    listed = set(BUDGETS["pages"])
    for model in admin.site._registry:
        options = model._meta
        page = reverse(f"admin:{options.app_label}_{options.model_name}_changelist")
        assert page in listed, f"{page} has no budget in tests/query_budgets.toml"
