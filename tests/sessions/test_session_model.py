"""What the database itself holds true of sessions, whoever writes to it."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

from executions.ledger.models import LedgerEntry
from executions.sessions.models import Session
from tests.conftest import Caller

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def opened(caller: Caller, **values: Any) -> Session:
    return Session.objects.create(
        tenant=caller.tenant, tenant_slug=caller.tenant.slug, language="python", **values
    )


def test_a_name_is_one_sessions_of_a_tenant_while_it_is_open(
    alice: Caller, charlie: Caller
) -> None:
    first = opened(alice, name="notebook")
    opened(charlie, name="notebook")
    opened(alice)
    opened(alice)
    with pytest.raises(IntegrityError), transaction.atomic():
        opened(alice, name="notebook")
    Session.objects.filter(pk=first.pk).update(state="closed", closed_at=Now())
    assert opened(alice, name="notebook").pk != first.pk


@pytest.mark.parametrize(
    "values",
    [
        {"state": "closed"},
        {"state": "open", "closed_at": Now()},
        {"state": "gone", "closed_at": Now()},
        {"idle_seconds": 0},
        {"max_seconds": 0},
    ],
)
def test_no_row_contradicts_itself(alice: Caller, values: dict[str, Any]) -> None:
    session = opened(alice)
    with pytest.raises(IntegrityError), transaction.atomic():
        Session.objects.filter(pk=session.pk).update(**values)


def test_what_opens_it_at_the_provider_cannot_be_read_in_the_database(alice: Caller) -> None:
    session = opened(alice, ref="the-capability", env={"TOKEN": "a-secret"})
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM executions_session")
        stored = b"".join(
            bytes(v) if not isinstance(v, str) else v.encode()
            for v in cursor.fetchone()
            if isinstance(v, (str, bytes, memoryview))
        )
    assert b"the-capability" not in stored
    assert b"a-secret" not in stored
    assert Session.objects.get(pk=session.pk).ref == "the-capability"


def test_the_record_outlives_the_tenant(charlie: Caller) -> None:
    session = opened(charlie)
    charlie.tenant.delete()
    session.refresh_from_db()
    assert (session.tenant_id, session.tenant_slug) == (None, "elsewhere")
    (entry,) = LedgerEntry.objects.filter(kind="session")
    assert entry.stated["row"] == str(session.pk)
    assert "the-capability" not in entry.statement
