"""Schedules over the native API: parse, call a service, render."""

from __future__ import annotations

from typing import Annotated, TypedDict
from uuid import UUID

from django.http import HttpResponse
from django.urls import reverse
from rest_framework.request import Request

from executions.capabilities.schedules import service as schedules
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.schedules.service import CHANGE, CREATE, LIST
from executions.doors.native.frame import ApiView
from executions.doors.native.rendering import json_response, page_of
from executions.doors.native.schema import endpoint
from executions.kernel.bodies import PageShape, Time


class ScheduleShape(TypedDict):
    """Code that runs at the times of a cron expression. Only the hash of the code is shown."""

    id: str
    name: str
    cron: str
    timezone: str
    paused: bool
    paused_because: Annotated[str | None, "Why it is paused; null if it is active."]
    language: str
    code_hash: str
    api_key: Annotated[str, "The first characters of the key that it runs with."]
    next_at: Time | None
    last_at: Time | None
    last_problem: Annotated[
        str | None, "Why a due run was skipped since the last run that started; null if none was."
    ]
    created_at: Time


def schedule_detail(schedule: Schedule) -> ScheduleShape:
    return {
        "id": str(schedule.pk),
        "name": schedule.name,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "paused": schedule.next_at is None,
        "paused_because": schedule.paused_because or None,
        "language": schedule.language,
        "code_hash": schedule.code_hash,
        "api_key": schedule.api_key_prefix,
        "next_at": schedule.next_at.isoformat() if schedule.next_at else None,
        "last_at": schedule.last_at.isoformat() if schedule.last_at else None,
        "last_problem": schedule.last_problem or None,
        "created_at": schedule.created_at.isoformat(),
    }


class SchedulesView(ApiView):
    tag = "schedules"

    @endpoint("create_schedule", request=CREATE, answers={201: ScheduleShape})
    def post(self, request: Request) -> HttpResponse:
        """Create a schedule.

        At each time of the cron expression, one execution with mode async is created. It has the
        permissions of the key that last created or changed the schedule.
        """
        schedule = schedules.create(CREATE.read(request.data), self.api_key)
        response = json_response(schedule_detail(schedule), 201)
        path = reverse("schedule", args=[schedule.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response

    @endpoint("list_schedules", parameters=(LIST,), answers={200: PageShape[ScheduleShape]})
    def get(self, request: Request) -> HttpResponse:
        """List schedules.

        The tenant's schedules, newest first.
        """
        page = schedules.list_schedules(self.api_key.tenant, LIST.read(request.query_params.dict()))
        results = [schedule_detail(each) for each in page.schedules]
        return json_response(page_of(request, results, page.next_cursor))


class ScheduleView(ApiView):
    tag = "schedules"

    @endpoint("get_schedule", answers={200: ScheduleShape})
    def get(self, request: Request, schedule_id: UUID) -> HttpResponse:
        """Get a schedule."""
        return json_response(
            schedule_detail(schedules.schedule_of(self.api_key.tenant, schedule_id))
        )

    @endpoint("change_schedule", request=CHANGE, answers={200: ScheduleShape})
    def patch(self, request: Request, schedule_id: UUID) -> HttpResponse:
        """Change, pause or resume a schedule.

        From then on it runs with the permissions of the key that changed it.
        """
        wanted = CHANGE.read(request.data)
        return json_response(schedule_detail(schedules.change(schedule_id, wanted, self.api_key)))

    @endpoint("delete_schedule", answers={204: None})
    def delete(self, request: Request, schedule_id: UUID) -> HttpResponse:
        """Delete a schedule.

        Executions that it has started are kept.
        """
        schedules.remove(self.api_key.tenant, schedule_id)
        return HttpResponse(status=204)
