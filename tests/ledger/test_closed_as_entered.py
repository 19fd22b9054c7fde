"""A row that changes while somebody closes it: the ledger's entry says what the row does, or it is
not closed by that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from executions.ledger.verification import verify
from executions.runs import journal
from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution
from executions.runs.queue import claim, mark_dispatched, requeue
from executions.runs.record import close_record
from executions.runs.requests import ExecutionRequest
from executions.runs.service import Attempt
from executions.sessions.ending import end_leftovers
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support import sessions
from tests.support.held import opened

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]
CANCELLED = Execution.Status.CANCELLED


def claimed(row: Execution) -> None:
    assert claim(row.pk)


def put_back_again(row: Execution) -> None:
    taken = claim(row.pk)
    assert taken is not None
    assert requeue(taken)


def approved(row: Execution) -> None:
    Execution.objects.filter(pk=row.pk).update(deadline=F("deadline") + timedelta(hours=1))


def started(row: Execution) -> None:
    Execution.objects.filter(pk=row.pk).update(pid=4711)


@pytest.mark.parametrize("meanwhile", [claimed, put_back_again, approved, started])
@pytest.mark.parametrize("only_if", ["", "queued"])
def test_what_was_changed_since_it_was_read_is_read_again(
    lease: Heartbeat, alice: Caller, meanwhile: Callable[[Execution], None], only_if: str
) -> None:
    lease.take()
    row = Execution.objects.get(pk=opened(alice, "async").pk)
    meanwhile(row)

    assert not close_record(row, CANCELLED, {}, only_if=only_if)

    assert row.is_open
    assert Execution.objects.get().is_open
    assert close_record(row, CANCELLED, {})
    assert verify().is_intact


@pytest.mark.usefixtures("kept_here")
def test_a_queued_cell_that_is_claimed_while_its_session_ends_is_closed_as_it_is_then(
    lease: Heartbeat, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease.take()
    session = sessions.row(sessions.opened(alice))
    left = opened(alice, "async", session=session.pk, context="default")
    is_open = Execution.is_open.fget  # type: ignore[attr-defined]
    read: list[bool] = []

    def claims_first(row: Execution) -> bool:
        if not read:
            read.append(True)
            claimed(row)
        return bool(is_open(row))

    monkeypatch.setattr(Execution, "is_open", property(claims_first))
    assert end_leftovers(session) == 1

    assert Execution.objects.get(pk=left.pk).started_at is not None
    assert verify().is_intact


def test_a_record_that_the_journal_keeps_names_nothing_of_a_provider_that_was_left(
    lease: Heartbeat, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease.take()
    taken = claim(opened(alice, "async").pk)
    assert taken is not None
    mark_dispatched(taken, provider="first", runtime="runsc", isolation="gvisor")
    attempt = Attempt(taken, ExecutionRequest("1"), 0.0, 0.0)
    attempt.changes = {"provider": "second"}
    kept: list[dict[str, Any]] = []

    def keep(_: Execution, status: str, values: dict[str, Any], *more: object) -> bool:
        kept.append(values)
        return True

    monkeypatch.setattr(journal, "record", keep)
    attempt.end_with_error(ProviderUnavailable("away"))

    (values,) = kept
    assert (values["provider"], values["runtime"], values["isolation"]) == ("second", "", "")
