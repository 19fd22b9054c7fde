"""Schedules for tests: made, let come due, and asked after."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from executions.capabilities.schedules.models import Schedule
from tests.conftest import Caller

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
