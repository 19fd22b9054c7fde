"""What the workers do by themselves: it is due again until it is done, whatever a broker loses."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from django_q.models import Schedule

from executions import tasks
from executions.runs.worker import enqueue_due, ensure_schedules, recurring_tasks
from sandbox_site.task_queue import queue_name
from sandbox_site.worker import _note_done
from tests.support.broker import empty_queue, payloads, queued_tasks

DAILY = "executions.tasks.apply_retention"

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]


@pytest.fixture(autouse=True)
def _queue(transactional_db: None) -> Iterator[None]:
    empty_queue()
    ensure_schedules()
    yield
    empty_queue()


def queued() -> list[str]:
    return sorted(task["func"] for task in queued_tasks())


def later(**by: float) -> None:
    """As if so much time had passed since."""
    for row in Schedule.objects.all():
        Schedule.objects.filter(pk=row.pk).update(next_run=row.next_run - timedelta(**by))


def test_each_is_queued_once_when_it_is_due(settings: Any) -> None:
    enqueue_due()
    enqueue_due()

    assert queued() == sorted(recurring_tasks())


def test_a_daily_one_that_was_lost_is_queued_again_within_the_hour(settings: Any) -> None:
    enqueue_due()
    empty_queue()  # as a Redis does that is started anew
    later(seconds=settings.Q_CLUSTER["retry"] + 1)

    enqueue_due()

    assert DAILY in queued()
    assert settings.Q_CLUSTER["retry"] < 3600


def test_a_daily_one_that_is_done_waits_for_its_day() -> None:
    enqueue_due()
    began = timezone.now()
    _note_done({"func": tasks.apply_retention, "success": True, "started": began})
    empty_queue()
    later(hours=23)
    enqueue_due()
    assert DAILY not in queued()

    later(hours=2)
    enqueue_due()
    assert DAILY in queued()


def test_one_that_failed_is_not_done(settings: Any) -> None:
    enqueue_due()
    _note_done({"func": tasks.apply_retention, "success": False, "started": timezone.now()})
    empty_queue()
    later(seconds=settings.Q_CLUSTER["retry"] + 1)
    enqueue_due()
    assert DAILY in queued()


def test_what_is_noted_of_something_else_changes_nothing() -> None:
    enqueue_due()
    before = list(Schedule.objects.order_by("pk").values())
    for func in (tasks.end_stale_executions, print, "refused", None):
        _note_done({"func": func, "success": True, "started": timezone.now()})
    assert list(Schedule.objects.order_by("pk").values()) == before


def test_the_schedules_of_another_version_are_left_alone() -> None:
    """A rolling upgrade runs both for a while, and each knows what the other does not."""
    theirs = "executions.tasks.what_the_next_version_does"
    Schedule.objects.create(name=theirs, func=theirs, schedule_type=Schedule.MINUTES)

    ensure_schedules()
    enqueue_due()

    assert Schedule.objects.filter(name=theirs).exists()
    assert theirs not in queued()


def test_a_broker_that_takes_nothing_leaves_them_due(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as away:
        away.setattr("executions.runs.worker.async_task", refuse)
        enqueue_due()
    assert queued() == []

    enqueue_due()

    assert queued() == sorted(recurring_tasks())


def test_another_key_has_another_queue(settings: Any) -> None:
    assert settings.Q_CLUSTER["cluster_name"] == queue_name(settings.SECRET_KEY)
    assert queue_name("one key") != queue_name("another key")
    assert "one key" not in queue_name("one key")
    enqueue_due()
    assert all(settings.SECRET_KEY not in payload for payload in payloads())
