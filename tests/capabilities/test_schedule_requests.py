"""Schedules as they are asked for: what is refused, who meets which, and what the admin shows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from executions.capabilities.schedules.cron import next_time
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.schedules.service import begin_due
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.held import bounded
from tests.support.schedules import PAGE, URL, due, made, told

pytestmark = pytest.mark.django_db


def test_who_changes_it_lends_it_its_own_power(scripted: object, alice: Caller) -> None:
    """A key that is held to another language does not have code run by one that is not."""
    schedule = made(alice)
    bound, text = create_api_key(alice.tenant, "bound", languages="javascript")
    held = Caller(bound, text)
    assert held.client.patch(f"{URL}/{schedule.pk}", {"name": "mine"}).status_code == 200
    due(schedule)
    assert begin_due() == 0
    assert not Execution.objects.exists()
    assert "restrictions" in told(alice, schedule)["last_problem"]


def test_a_tenant_has_as_many_as_it_may(alice: Caller, charlie: Caller, settings: Any) -> None:
    settings.SANDBOX_MAX_SCHEDULES = 2
    made(alice)
    made(alice, paused=True)
    body = {"name": "x", "cron": "* * * * *", "request": {"code": "1"}}
    answer = alice.client.post(URL, body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (429, "schedules")
    assert alice.client.get("/api/v1/usage").json()["quotas"]["schedules"]["used"] == 2
    made(charlie)
    bounded(alice, max_schedules=3)
    made(alice)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"cron": "* * * *"}, "cron"),
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "*/0 * * * *"}, "cron"),
        ({"cron": "0 0 31 feb *"}, "cron"),
        ({"cron": "0 0 * * 1"}, "cron"),
        ({"cron": "0 0 13 * fri"}, "cron"),
        ({"cron": "@daily"}, "cron"),
        ({"cron": "\u0661 * * * *"}, "cron"),
        ({"cron": "* * * * *\n"}, "cron"),
        ({"timezone": "Mars/Olympus"}, "timezone"),
        ({"timezone": "../../etc/passwd"}, "timezone"),
        ({"timezone": "/etc/localtime"}, "timezone"),
        ({"request": {"code": ""}}, "request"),
        ({"request": {"code": "1", "mode": "sync"}}, "request"),
        ({"request": {"code": "1", "run_at": "2030-01-01T00:00:00Z"}}, "request"),
        ({"request": {"code": "1", "session": str(UUID(int=1))}}, "request"),
        ({"request": {"code": "1", "idempotency_key": "x"}}, "request"),
        ({"request": {"code": "#" * 70_000}}, "request"),
        ({"name": ""}, "name"),
        ({"tenant": "elsewhere"}, "tenant"),
    ],
)
def test_what_is_not_valid_is_refused_by_name(
    changed: dict[str, Any], field: str, alice: Caller
) -> None:
    schedule = made(alice)
    body = {"name": "x", "cron": "* * * * *", "request": {"code": "1"}, **changed}
    for answer in (
        alice.client.post(URL, body),
        alice.client.patch(f"{URL}/{schedule.pk}", changed),
    ):
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    assert Schedule.objects.count() == 1


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        ("30 6 * * mon-fri", "UTC", "2026-11-20T06:30:00", "2026-11-23T06:30:00"),
        ("30 6 * * *", "Europe/Berlin", "2026-07-01T00:00:00", "2026-07-01T04:30:00"),
        ("30 6 * * *", "Europe/Berlin", "2026-12-01T00:00:00", "2026-12-01T05:30:00"),
        ("*/15 * * * *", "UTC", "2026-12-31T23:45:00", "2027-01-01T00:00:00"),
        ("0 0 29 2 *", "UTC", "2096-03-01T00:00:00", "2104-02-29T00:00:00"),
    ],
)
def test_the_next_time_is_after_the_moment_and_by_the_zone(
    cron: str, zone: str, after: str, expected: str
) -> None:
    found = next_time(cron, zone, datetime.fromisoformat(after).replace(tzinfo=UTC))
    assert found == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_a_stranger_meets_nothing_and_a_colleague_everything(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    schedule = made(alice)
    path = f"{URL}/{schedule.pk}"
    for ask in (
        charlie.client.get(path),
        charlie.client.patch(path, {"paused": True}),
        charlie.client.delete(path),
    ):
        assert ask.status_code == 404
    assert charlie.client.get(URL).json()["results"] == []
    assert charlie.client.get(f"/api/v1/executions?schedule={schedule.pk}").json()["results"] == []
    assert told(bob, schedule)["next_at"]
    assert [each["id"] for each in bob.client.get(URL).json()["results"]] == [str(schedule.pk)]
    assert "code" not in told(bob, schedule)
    paused = bob.client.patch(path, {"paused": True}).json()
    assert (paused["paused"], paused["next_at"]) == (True, None)
    assert begin_due() == 0
    assert bob.client.delete(path).status_code == 204
    assert bob.client.get(path).status_code == 404
    said = [
        (entry.stated["action"], entry.stated["tenant"])
        for entry in LedgerEntry.objects.filter(kind="schedule").order_by("sequence")
    ]
    assert said == [(each, "wonderland") for each in ("created", "changed", "deleted")]
    assert verify().is_intact


def test_another_name_takes_no_time_away_that_is_due(scripted: object, alice: Caller) -> None:
    schedule = made(alice)
    due(schedule)
    assert alice.client.patch(f"{URL}/{schedule.pk}", {"name": "another"}).status_code == 200
    assert begin_due() == 1


def test_its_code_is_not_in_the_database_in_clear(alice: Caller) -> None:
    schedule = made(alice, "print('hidden in here')")
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM executions_schedule")
        assert b"hidden in here" not in repr(cursor.fetchone()).encode()
    # Whoever changes the row is found.
    assert verify().is_intact
    Schedule.objects.filter(pk=schedule.pk).update(cron="0 0 * * *")
    assert not verify().is_intact


def test_the_admin_shows_it_and_pauses_it(scripted: object, alice: Caller) -> None:
    schedule = made(alice, name="\u202enightly")
    due(schedule)
    begin_due()
    looks = signed_in("ada", "view_schedule", "view_execution")
    shown = looks.get(PAGE).content.decode()
    assert "[U+202E]nightly" in shown
    assert looks.get(f"{PAGE}{schedule.pk}/change/").status_code == 200
    found = looks.get(f"/admin/executions/execution/?q=schedule:{schedule.pk}").content.decode()
    assert str(Execution.objects.get().pk) in found
    chosen = {"action": "pause_schedules", "_selected_action": [str(schedule.pk)]}
    looks.post(PAGE, chosen)
    schedule.refresh_from_db()
    assert schedule.next_at is not None
    signed_in("ben", "view_schedule", "pause_schedule").post(PAGE, chosen)
    schedule.refresh_from_db()
    assert (schedule.next_at, schedule.paused_because) == (None, "ben paused it in the admin.")
