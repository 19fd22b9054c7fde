"""Schedules: each due time makes one execution, by the power of a key that is still valid."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from executions.models import Execution, LedgerEntry, Schedule, Tenant
from executions.services.keys import create_api_key, revoke
from executions.services.ledger.verification import verify
from executions.services.recurring import beginning
from executions.services.recurring.beginning import begin_due
from executions.services.recurring.cron import next_time
from executions.services.restored import RESTORED, pause_schedules
from executions.services.worker import run_queued
from executions.tasks import begin_schedules
from providers.errors import RateLimited
from tests.conftest import Caller
from tests.held import bounded
from tests.policies import in_force
from tests.test_approvals import ASKED, RULES, signed_in

pytestmark = pytest.mark.django_db

URL = "/api/v1/schedules"
CODE = "answer = ExecutionResult('it ran', '', 0, 0.0)"
PAGE = "/admin/executions/schedule/"


# Half a year away: none of it comes due while a test runs.
RARELY = f"0 3 1 {(timezone.now().month + 5) % 12 + 1} *"


def made(caller: Caller, code: str = CODE, cron: str = RARELY, **body: Any) -> Schedule:
    request = {"code": code, **body.pop("request", {})}
    sent = {"name": "nightly", "cron": cron, "request": request, **body}
    answer = caller.client.post(URL, sent)
    assert answer.status_code == 201, answer.content
    return Schedule.objects.get(pk=answer.json()["id"])


def due(schedule: Schedule, ago: timedelta = timedelta(seconds=1)) -> datetime:
    at = timezone.now() - ago
    assert Schedule.objects.filter(pk=schedule.pk).update(next_at=at)
    return at


def told(caller: Caller, schedule: Schedule) -> dict[str, Any]:
    answer: dict[str, Any] = caller.client.get(f"{URL}/{schedule.pk}").json()
    return answer


def test_each_due_time_makes_one_execution_that_names_its_schedule(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    schedule = made(alice, request={"agent": "reporter", "priority": "high"})
    assert begin_schedules() == 0
    due(schedule)
    assert begin_schedules() == 1
    assert begin_schedules() == 0
    execution = Execution.objects.get()
    assert (execution.schedule_id, execution.mode, execution.agent, execution.priority) == (
        schedule.pk, "async", "reporter", 0,
    )  # fmt: skip
    assert execution.api_key == alice.api_key
    run_queued()
    found = alice.client.get(f"/api/v1/executions?schedule={schedule.pk}").json()["results"]
    assert [(each["id"], each["status"]) for each in found] == [(str(execution.pk), "succeeded")]
    assert found[0]["schedule"] == str(schedule.pk)
    other = UUID(int=schedule.pk.int ^ 1)
    assert alice.client.get(f"/api/v1/executions?schedule={other}").json()["results"] == []
    after = told(alice, schedule)
    assert after["last_at"] == execution.created_at.isoformat()
    assert datetime.fromisoformat(after["next_at"]) > timezone.now() - timedelta(seconds=1)
    assert verify().is_intact
    Execution.objects.update(schedule_id=other)
    assert not verify().is_intact


def test_of_the_times_that_were_missed_one_is_made_up_for(scripted: object, alice: Caller) -> None:
    schedule = made(alice)
    due(schedule, timedelta(days=3))
    assert [begin_due() for _ in range(3)] == [1, 0, 0]


@pytest.mark.django_db(transaction=True)
def test_of_many_workers_on_several_hosts_one_begins_it(scripted: object, alice: Caller) -> None:
    schedules = [made(alice) for _ in range(3)]
    for schedule in schedules:
        due(schedule)
    begin = threading.Barrier(5)
    numbers: list[int] = []

    def work() -> None:
        begin.wait(30)
        numbers.append(begin_due())
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(numbers), sum(numbers)) == (5, 3)
    begun = Execution.objects.values_list("schedule_id", flat=True)
    assert sorted(begun) == sorted(each.pk for each in schedules)


def test_whoever_comes_second_with_what_it_saw_inserts_nothing(
    scripted: object, alice: Caller
) -> None:
    schedule = made(alice)
    at = due(schedule)
    schedule.refresh_from_db()
    following = at + timedelta(minutes=1)
    assert beginning._run(schedule, following)
    with pytest.raises(beginning._TakenByAnother):
        beginning._run(schedule, following)
    assert Execution.objects.count() == 1


def test_a_clock_that_was_set_back_begins_no_time_twice(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = made(alice)
    at = due(schedule)
    # The host's clock is behind that of the database, or was set back since.
    behind = timezone.now() - timedelta(hours=2)
    monkeypatch.setattr("django.utils.timezone.now", lambda: behind)
    assert begin_due() == 1
    schedule.refresh_from_db()
    assert schedule.next_at is not None
    assert schedule.next_at > at


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("revoked", "revoked"),
        ("expired", "expired"),
        ("removed", "removed"),
        ("inactive", "inactive"),
        ("without scope", "may not run code"),
        ("of another tenant", "not the one"),
    ],
)
def test_a_schedule_ends_with_the_power_of_its_key(
    how: str, because: str, scripted: object, alice: Caller, charlie: Caller
) -> None:
    key, text = create_api_key(alice.tenant, "second")
    schedule = made(Caller(key, text))
    due(schedule)
    if how == "revoked":
        revoke(key)
    elif how == "expired":
        key.expires_at = timezone.now() - timedelta(seconds=1)
        key.save()
    elif how == "removed":
        key.delete()
    elif how == "inactive":
        alice.tenant.is_active = False
        alice.tenant.save()
    elif how == "without scope":
        key.scopes = "read"
        key.save()
    else:
        Schedule.objects.update(api_key=charlie.api_key)
    assert begin_due() == 0
    assert not Execution.objects.exists()
    schedule.refresh_from_db()
    assert schedule.next_at is None
    assert because in schedule.paused_because
    entry = LedgerEntry.objects.filter(kind="schedule").order_by("sequence").last()
    assert entry is not None
    assert because in entry.stated["paused_because"]
    Tenant.objects.filter(pk=alice.tenant.pk).update(is_active=True)
    if how != "of another tenant":
        # Whoever has a key of the tenant resumes it, by the power of that one.
        answer = alice.client.patch(f"{URL}/{schedule.pk}", {"paused": False})
        assert (answer.status_code, answer.json()["api_key"]) == (200, alice.api_key.prefix)
        due(schedule)
        assert begin_due() == 1


def test_who_changes_it_lends_it_its_own_power(scripted: object, alice: Caller) -> None:
    """A key that is held to another language does not have code run by one that is not."""
    schedule = made(alice)
    bound, text = create_api_key(alice.tenant, "bound", languages="javascript")
    held = Caller(bound, text)
    assert held.client.patch(f"{URL}/{schedule.pk}", {"name": "mine"}).status_code == 200
    due(schedule)
    assert begin_due() == 0
    assert not Execution.objects.exists()
    assert "bounds" in told(alice, schedule)["last_problem"]


def test_what_is_refused_is_left_out_and_the_next_time_is_tried(
    scripted: object, alice: Caller
) -> None:
    bounded(alice, max_queued=1)
    schedules = [made(alice) for _ in range(3)]
    for schedule in schedules:
        due(schedule)
    assert begin_due() == 1
    assert begin_due() == 0
    problems = [told(alice, each)["last_problem"] for each in schedules]
    assert len([each for each in problems if each and "queued" in each]) == 2
    run_queued()
    left_out = next(each for each, why in zip(schedules, problems, strict=True) if why)
    due(left_out)
    assert begin_due() == 1
    assert told(alice, left_out)["last_problem"] is None


def test_many_schedules_of_one_tenant_hold_up_nobody_elses(
    scripted: object, alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[UUID] = []
    for number in range(5):
        due(made(alice), timedelta(minutes=10 - number))
    theirs = made(charlie)
    due(theirs)
    monkeypatch.setattr(beginning, "_begin_alone", lambda pk: bool(order.append(pk)))
    begin_due()
    assert theirs.pk in order[:2]


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


def test_one_that_cannot_be_read_holds_up_no_other(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    lost, tampered, good = made(alice), made(alice), made(charlie)
    for schedule in (lost, tampered, good):
        due(schedule)
    Schedule.objects.filter(pk=tampered.pk).update(cron="no cron")
    key = Schedule._meta.get_field("id").get_db_prep_value(lost.pk, connection)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE executions_schedule SET request = %s WHERE id = %s", [b"x", key])
    assert begin_due() == 1
    assert Execution.objects.get().schedule_id == good.pk
    assert "decrypted" in told(alice, lost)["last_problem"]
    path = f"{URL}/{lost.pk}"
    assert alice.client.patch(path, {"paused": True}).json()["error"]["field"] == "request"
    assert alice.client.patch(path, {"request": {"code": CODE}}).status_code == 200
    due(lost)
    assert begin_due() == 1


@pytest.mark.parametrize(
    "problem",
    [OperationalError("database is locked"), RateLimited("Too much is looked at.", retry_after=1)],
)
def test_what_is_busy_for_a_moment_takes_no_time_away(
    problem: Exception, scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = made(alice)
    at = due(schedule)

    def fail(*args: object, **more: object) -> None:
        raise problem

    with monkeypatch.context() as patched:
        patched.setattr(beginning, "running", fail)
        assert begin_due() == 0
    schedule.refresh_from_db()
    assert (schedule.next_at, schedule.last_problem) == (at, "")
    assert begin_due() == 1


def test_a_time_zone_that_this_host_does_not_know_pauses_it(
    scripted: object, alice: Caller
) -> None:
    schedule = made(alice)
    due(schedule)
    Schedule.objects.update(timezone="Mars/Olympus")
    assert begin_due() == 0
    schedule.refresh_from_db()
    assert "cannot be read" in schedule.paused_because


def test_another_name_takes_no_time_away_that_is_due(scripted: object, alice: Caller) -> None:
    schedule = made(alice)
    due(schedule)
    assert alice.client.patch(f"{URL}/{schedule.pk}", {"name": "another"}).status_code == 200
    assert begin_due() == 1


def test_a_host_that_is_days_ahead_leaves_no_time_out(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = made(alice, cron="0 3 * * *")
    due(schedule)
    ahead = timezone.now() + timedelta(days=3)
    monkeypatch.setattr("django.utils.timezone.now", lambda: ahead)
    assert begin_due() == 1
    monkeypatch.undo()
    schedule.refresh_from_db()
    assert schedule.next_at is not None
    assert schedule.next_at < timezone.now() + timedelta(days=1, minutes=1)


def test_what_had_come_due_before_a_restore_is_paused(scripted: object, alice: Caller) -> None:
    ran, waits = made(alice), made(alice)
    due(ran)
    assert pause_schedules() == 1
    for schedule in (ran, waits):
        schedule.refresh_from_db()
    assert (ran.next_at, ran.paused_because) == (None, RESTORED)
    assert waits.next_at is not None
    assert verify().is_intact


def test_what_it_began_runs_by_no_key_that_was_revoked(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    key, text = create_api_key(alice.tenant, "second")
    due(made(Caller(key, text)))
    assert begin_due() == 1
    revoke(key)
    run_queued()
    execution = Execution.objects.get()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert "revoked" in execution.error_message
    assert scripted() == []


@pytest.mark.usefixtures("policies_forgotten")
def test_policy_holds_for_what_it_begins(scripted: object, alice: Caller) -> None:
    in_force(alice.tenant.slug, **RULES)
    due(made(alice, ASKED))
    assert begin_due() == 1
    assert Execution.objects.get().approval.status == "waiting"
    assert run_queued() is None


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
    assert (schedule.next_at, schedule.paused_because) == (None, "ben has paused it in the admin.")
