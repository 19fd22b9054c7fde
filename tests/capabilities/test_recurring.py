"""Schedules: each due time makes one execution, by the power of a key that is still valid."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from executions.capabilities.schedules import service as schedules
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.schedules.service import RESTORED, begin_due, pause_schedules
from executions.ledger.bindings import BINDINGS
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.tasks import begin_schedules
from executions.tenants.keys import create_api_key, revoke
from executions.tenants.models import Tenant
from providers.errors import RateLimited
from tests.conftest import Caller
from tests.support.approvals import ASKED, RULES
from tests.support.held import bounded
from tests.support.policies import in_force
from tests.support.running import run_queued
from tests.support.schedules import CODE, URL, due, made, told

pytestmark = [pytest.mark.django_db, pytest.mark.database]


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
        begin.wait(60)
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
    assert schedules._run(schedule, following)
    with pytest.raises(schedules._TakenByAnother):
        schedules._run(schedule, following)
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
        ("without scope", "may no longer run code"),
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
    monkeypatch.setattr(schedules, "_begin_alone", lambda pk: bool(order.append(pk)))
    begin_due()
    assert theirs.pk in order[:2]


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
        patched.setattr(schedules, "execute", fail)
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


def test_one_that_is_held_back_in_its_row_is_found(scripted: object, alice: Caller) -> None:
    schedule = made(alice, cron="30 * * * *")
    row = Schedule.objects.filter(pk=schedule.pk)
    away = timezone.now() + timedelta(days=10)
    assert verify().is_intact
    for changed, said in (
        ({"next_at": away}, "later than its expression says"),
        ({"next_at": away, "last_at": away}, "later than its expression says"),
        ({"cron": "30 6 1 * *"}, "was changed"),
        ({"api_key_prefix": "another"}, "was changed"),
    ):
        row.update(**changed)
        [finding] = verify().findings
        assert said in str(finding)
        row.update(**{name: getattr(schedule, name) for name in changed})
    assert verify().is_intact


def test_one_that_is_paused_or_resumed_in_its_next_time_alone_is_found(alice: Caller) -> None:
    """The database refuses it, of whoever is held by constraints."""
    check = BINDINGS["executions.schedule"].check
    going, paused = made(alice), made(alice, paused=True)
    assert [check(going), check(paused)] == ["", ""]
    going.next_at, paused.next_at = paused.next_at, going.next_at
    assert check(going) == "it has no next run although it is not paused"
    assert check(paused) == "it has a next run although it is paused"


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
