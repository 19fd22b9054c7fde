"""Which processes of a session are found by their records, and where its client is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.utils import timezone

from executions.doors.codex import processes, recovery
from executions.doors.codex.recovery import MOST_FOUND, Name
from executions.kernel.coroutines import run_sync
from executions.kernel.text import uuid7
from executions.runs.models import Execution
from executions.sessions.models import Session
from providers.errors import KeptSandboxLost, ProviderUnavailable
from tests.conftest import Caller
from tests.support.agent_threads import session_of
from tests.support.execution_rows import make_rows

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def process(session: Session, name: str, **values: object) -> Execution:
    (made,) = make_rows(
        1,
        **{
            "id": uuid7(),
            "tenant": session.tenant,
            "tenant_slug": session.tenant_slug,
            "session": session,
            "background": True,
            "idempotency_key": Name(name).new_key(),
            "exit_code": 0,
            "pid": 7,
            **values,
        },
    )
    return made


def test_what_runs_is_found_however_much_has_ended_since(alice: Caller) -> None:
    session = session_of(alice.tenant)
    runs = process(session, "runs", status="running", finished_at=None, exit_code=None)
    for number in range(MOST_FOUND + 1):
        process(session, f"p{number}")
    found = recovery.find(session.pk)
    assert len(found) == MOST_FOUND
    assert found[0].execution.pk == runs.pk
    assert [each.execution.pk for each in found] == sorted(each.execution.pk for each in found)
    # Of those that have ended it is the latest ones.
    assert found[-1].name.process_id == f"p{MOST_FOUND}"


def test_nothing_of_another_session_or_of_long_ago_is_found(alice: Caller) -> None:
    session, other = session_of(alice.tenant), session_of(alice.tenant)
    process(other, "other")
    process(session, "old", finished_at=timezone.now() - timedelta(seconds=90))
    process(session, "native", idempotency_key=None)
    assert recovery.find(session.pk) == []


def test_of_two_places_the_second_is_told_of_the_first(alice: Caller) -> None:
    session = session_of(alice.tenant)
    mine, other, between = uuid4(), uuid4(), list[UUID]()
    recovery.take_over(session.pk, mine)

    def let_other_come(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and not between:
            between.append(other)
            assert recovery.take_over(session.pk, other) == mine
        return execute(sql, params, many, context)

    with connection.execute_wrapper(let_other_come):
        assert recovery.take_over(session.pk, mine) == other
    assert recovery.is_latest(session.pk, mine)
    assert recovery.take_over(uuid4(), mine) is None


def test_what_is_out_of_reach_is_told_to_have_ended_only_once_it_has(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(alice.tenant)
    runs = process(session, "runs", status="running", finished_at=None, exit_code=None)
    tried: list[Execution] = []

    async def ask(session: Session, execution: Execution) -> bool:
        tried.append(execution)
        if len(tried) == 1:
            raise ProviderUnavailable("The pool service does not answer.")
        if len(tried) == 2:
            raise KeptSandboxLost("The sandbox is gone.")
        raise AssertionError("it has ended")

    monkeypatch.setattr(processes, "record_if_ended", ask)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.01)
    ended = run_sync(processes._end_of(runs.pk))
    assert (ended.status, ended.error_message) == ("cancelled", "Its session ended.")
    assert len(tried) == 2
    session.refresh_from_db()
    assert session.state == Session.State.LOST
