"""Entries are found by their subject, in an index, and no statement is read to find one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.policies import approvals
from executions.capabilities.reports.reading import Scope, entry_of
from executions.capabilities.reports.service import make
from executions.capabilities.reports.signing import Signed
from executions.ledger.append import append, rows_by_subject
from executions.ledger.bindings import subject_of_user
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify
from executions.runs.models import Approval, Execution
from executions.runs.requests import ExecutionRequest
from executions.sessions.queries import key_creators
from tests.conftest import Caller
from tests.support.approvals import ASKED, RULES, decided, signed_in
from tests.support.policies import in_force
from tests.support.running import run, run_queued

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def looks_in_ledger(work: Callable[[], object]) -> list[str]:
    """The statements of SQL that look for an entry by its subject; none looks into statements."""
    with CaptureQueriesContext(connection) as taken:
        work()
    read = [
        each["sql"]
        for each in taken.captured_queries
        if each["sql"].startswith("SELECT") and '"executions_ledgerentry"' in each["sql"]
    ]
    assert not any("LIKE" in each for each in read), read
    return [each for each in read if '"subject" =' in each]


# Of a few rows PostgreSQL reads all, or chooses by what it knows of the rows of former tests.
_MANY_ENTRIES = """
INSERT INTO executions_ledgerentry
    (sequence, kind, execution_id, subject, at, statement, digest, key_id, signature, bound_row)
SELECT
    1000000 + row_number() OVER (), kind,
    CASE kind WHEN 'execution' THEN gen_random_uuid() END,
    'subject ' || number, now(), '{}', '', '', '', ''
FROM
    generate_series(1, 1000) AS number,
    unnest(ARRAY['api_key', 'approval', 'execution', 'key', 'report', 'user']) AS kind
"""


def is_by_index(sql: str) -> bool:
    with transaction.atomic(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_MANY_ENTRIES)
            cursor.execute("ANALYZE executions_ledgerentry")
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        cursor.execute(f"{explain} {sql}")
        plan = str(cursor.fetchall())
        transaction.set_rollback(True)
    return "ledger_subject" in plan


@pytest.mark.usefixtures("policies_forgotten")
def test_an_approved_run_reads_its_own_approval_alone(scripted: object, alice: Caller) -> None:
    in_force(alice.tenant.slug, **RULES)
    ada = signed_in("ada", "view_approval", "decide_approval")
    rows = [Approval.objects.get(execution=run(alice, ASKED).json()["id"]) for _ in range(3)]
    for row in rows:
        decided(ada, row, "approve")
    [looked] = looks_in_ledger(run_queued)
    assert is_by_index(looked)
    with connection.cursor() as cursor:
        cursor.execute(looked)
        assert len(cursor.fetchall()) == 1
    assert Execution.objects.filter(status="succeeded").count() == 1


def other_lookups(alice: Caller) -> dict[str, Callable[[], object]]:
    execution = Execution.objects.get()
    signed = Signed("r", "d", "k", "s")
    return {
        "who made a key": lambda: key_creators(execution.pk),
        "authenticators": lambda: rows_by_subject("otp_totp.totpdevice", subject_of_user(1)),
        "a report": lambda: entry_of(signed, trusted_keys()),
        "runs without a record": lambda: list(Scope("wonderland").entries_without_rows()),
    }


def test_every_other_lookup_is_by_the_index_as_well(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    for name, work in other_lookups(alice).items():
        looked = looks_in_ledger(work)
        assert len(looked) == 1, name
        assert is_by_index(looked[0]), (name, looked)


def test_the_column_has_the_subject_and_of_an_execution_the_tenant(
    scripted: object, alice: Caller
) -> None:
    run(alice, "pass")
    append("note", "s" * 1000, {})
    kinds = {entry.kind: entry for entry in LedgerEntry.objects.all()}
    assert kinds["execution"].subject == "wonderland"
    assert kinds["execution"].stated["subject"] == str(kinds["execution"].execution_id)
    assert kinds["api_key"].subject == kinds["api_key"].stated["subject"] == alice.api_key.prefix
    assert kinds["note"].subject == "s" * 200
    assert verify().is_intact


def test_a_report_is_found_by_what_was_signed_of_either_file(
    scripted: object, alice: Caller
) -> None:
    made = make("a report", Scope("wonderland"), "x", list, list)
    make("another", Scope("wonderland"), "x", list, list)
    keys = trusted_keys()
    for hashed in (made.json_hash, made.pdf_hash):
        signed = Signed("a report", hashed.removeprefix("sha256:"), "", "")
        found = entry_of(signed, keys)
        assert found is not None
        assert found["sequence"] == made.ledger_sequence
        assert entry_of(Signed("another", signed.digest, "", ""), keys) is None


@pytest.mark.usefixtures("policies_forgotten")
def test_an_approval_that_is_not_entered_is_none(scripted: object, alice: Caller) -> None:
    in_force(alice.tenant.slug, **RULES)
    answer = run(alice, ASKED).json()
    execution = Execution.objects.get(pk=answer["id"])
    now: Any = timezone.now() + timedelta(seconds=1)
    Approval.objects.update(status="approved", decided_by="user:ada", decided_at=now)
    request = ExecutionRequest.from_stored(execution.pending)
    assert approvals.approved(execution, request) is None
