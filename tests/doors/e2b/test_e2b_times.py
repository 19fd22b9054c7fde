"""How long a sandbox of E2B's SDKs lives, whatever comes in between."""

from __future__ import annotations

from itertools import count
from typing import Any
from uuid import UUID

import pytest

from executions.doors.e2b import connect, sandboxes
from executions.runs.requests import Conflict
from executions.sessions.models import Session
from executions.sessions.requests import SessionAsleep, SessionClosed, SessionLost
from executions.sessions.storage.wake import ensure_awake
from executions.tenants.models import Tenant
from tests.conftest import Caller
from tests.support.sessions import aged

pytestmark = [pytest.mark.database, pytest.mark.usefixtures("kept_here")]


def made(caller: Caller, **body: object) -> str:
    return str(caller.client.post("/v2/sandboxes", body).json()["sandboxID"])


def told(caller: Caller, sandbox: str, what: str, body: object) -> int:
    return int(caller.client.post(f"/sandboxes/{sandbox}/{what}", body).status_code)


def paused(caller: Caller, **body: object) -> str:
    sandbox = made(caller, **body)
    assert told(caller, sandbox, "pause", {}) == 204
    return sandbox


@pytest.mark.parametrize("pauses", [False, True])
def test_who_connects_for_as_long_as_may_be_is_given_that_however_long_waking_takes(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any, pauses: bool
) -> None:
    sandbox = paused(alice, autoPause=pauses)

    async def slowly(session: Session) -> None:
        aged({"id": session.pk}, created_at=600)
        await ensure_awake(session)

    monkeypatch.setattr(sandboxes, "ensure_awake", slowly)
    longest = settings.SESSION_MAX_SECONDS
    assert told(alice, sandbox, "connect", {"timeout": longest}) == 201
    session = Session.objects.get(pk=sandbox)
    assert (session.state, session.max_seconds) == (Session.State.OPEN, longest)
    assert connect.pauses_at_its_end(session) is pauses


def test_who_connects_when_a_second_passes_is_not_refused(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    sandbox, ages = made(alice), count(10)
    monkeypatch.setattr(connect, "age_of", lambda _: next(ages))
    longest = settings.SESSION_MAX_SECONDS
    assert told(alice, sandbox, "connect", {"timeout": longest}) == 200
    assert Session.objects.get(pk=sandbox).max_seconds == longest
    assert told(alice, sandbox, "timeout", {"timeout": longest}) == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Conflict("It is being opened."), 423),
        (SessionAsleep("It is gone."), 423),
        (SessionLost("It is lost."), 404),
        (SessionClosed("It was closed."), 404),
    ],
)
def test_what_could_not_be_paused_is_not_told_as_paused_already(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, error: Conflict, status: int
) -> None:
    async def refused(session: Session, because: str) -> bool:
        raise error

    sandbox = made(alice)
    monkeypatch.setattr(sandboxes, "suspend_in_thread", refused)
    assert told(alice, sandbox, "pause", {}) == status
    assert Session.objects.get(pk=sandbox).state == Session.State.OPEN


def test_one_that_is_paused_already_is_told_as_that(alice: Caller) -> None:
    assert told(alice, paused(alice), "pause", {}) == 409


@pytest.mark.parametrize("pauses", [False, True])
def test_a_late_call_to_keep_a_paused_sandbox_alive_removes_nothing_of_it(
    alice: Caller, settings: Any, pauses: bool
) -> None:
    sandbox = paused(alice, autoPause=pauses)
    assert told(alice, sandbox, "timeout", {"timeout": 60}) == 404
    session = Session.objects.get(pk=sandbox)
    assert (session.state, session.max_seconds) == (
        Session.State.ASLEEP,
        settings.SESSION_MAX_SECONDS,
    )
    assert told(alice, sandbox, "connect", {"timeout": 60}) == 201
    assert told(alice, sandbox, "timeout", {"timeout": 90}) == 204


def test_a_sandbox_that_is_paused_meanwhile_is_paused(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """The call has looked at it by then, and found that it runs."""
    sandbox = made(alice)
    found = sandboxes.living_session_of

    def and_then_paused(tenant: Tenant | None, session_id: UUID) -> Session:
        session = found(tenant, session_id)
        monkeypatch.setattr(sandboxes, "living_session_of", found)
        assert told(alice, sandbox, "pause", {}) == 204
        return session

    monkeypatch.setattr(sandboxes, "living_session_of", and_then_paused)
    assert told(alice, sandbox, "timeout", {"timeout": 60}) == 404
    assert Session.objects.get(pk=sandbox).max_seconds == settings.SESSION_MAX_SECONDS
