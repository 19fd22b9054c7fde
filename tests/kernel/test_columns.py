"""Rows that are read and written past the ORM are what the ORM makes of them."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model

from executions.kernel.database import Columns
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import ApiKey, Tenant
from tests.conftest import Caller
from tests.support.execution_rows import make_rows

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def read_back(columns: Columns[Any], row: Model) -> Any:
    table = row._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {columns.select('r')} FROM {table} r WHERE id = %s",
            [columns.write("id", row.pk)],
        )
        return columns.read(cursor.fetchone())


def values_of(row: Model) -> dict[str, Any]:
    return {each.attname: getattr(row, each.attname) for each in row._meta.concrete_fields}


def test_each_kind_of_column_is_read_as_the_orm_reads_it(alice: Caller) -> None:
    execution = make_rows(
        1,
        cost=Decimal("0.12500000"),
        meta={"memory_peak_bytes": 7, "text": "ü"},
        hops=[],
        run_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        has_result=True,
    )[0]
    session = Session.objects.create(
        tenant=alice.tenant, tenant_slug="wonderland", language="python", env={"A": "secret"}
    )
    for row in (execution, session, alice.api_key, alice.tenant):
        model = type(row)
        found = read_back(Columns(model), row)
        assert values_of(found) == values_of(model.objects.get(pk=row.pk))
        assert (found._state.adding, found._state.db) == (False, connection.alias)


def test_what_is_written_is_what_the_orm_writes(alice: Caller) -> None:
    row = make_rows(1, cost=Decimal("0.5"), meta={"a": [1]}, trace_id=None)[0]
    for model, values in ((Execution, values_of(row)), (ApiKey, values_of(alice.api_key))):
        columns: Columns[Any] = Columns(model)
        for field in model._meta.concrete_fields:
            value = values[field.attname]
            written = columns.write(field.attname, value)
            assert repr(written) == repr(field.get_db_prep_save(value, connection)), field.name


def test_what_is_left_out_is_read_when_it_is_asked_for(alice: Caller) -> None:
    session = Session.objects.create(
        tenant=alice.tenant, tenant_slug="wonderland", language="python", env={"A": "secret"}
    )
    found = read_back(Columns(Session, leave_out=("env",)), session)
    assert found.get_deferred_fields() == {"env"}
    assert found.env == {"A": "secret"}


def test_two_models_are_read_out_of_one_row(alice: Caller) -> None:
    keys, tenants = Columns(ApiKey), Columns(Tenant)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {keys.select('k')}, {tenants.select('t')} FROM {ApiKey._meta.db_table} k"
            f" JOIN {Tenant._meta.db_table} t ON t.id = k.tenant_id"
        )
        row = cursor.fetchone()
    key, tenant = keys.read(row[: len(keys.names)]), tenants.read(row[len(keys.names) :])
    assert (key, tenant) == (alice.api_key, alice.tenant)
    assert key.tenant_id == tenant.pk
