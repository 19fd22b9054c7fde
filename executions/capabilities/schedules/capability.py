"""Schedules as a capability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.urls import URLPattern, path

from executions.capabilities.schedules.models import Schedule
from executions.runs.extensions import Extension
from executions.tenants.models import Tenant
from executions.tenants.quotas import Quota, Use, limit_of


class Schedules(Extension):
    pages = ("executions.capabilities.schedules.admin",)
    tasks = {"executions.tasks.begin_schedules": 1}

    def urls(self) -> Sequence[URLPattern]:
        from executions.capabilities.schedules.api import SchedulesView, ScheduleView

        one = "api/v1/schedules/<uuid:schedule_id>"
        return (
            path("api/v1/schedules", SchedulesView.as_view(), name="schedules"),
            path(one, ScheduleView.as_view(), name="schedule"),
        )

    def usage(self, tenant: Tenant) -> Mapping[Quota, Use]:
        number = Schedule.objects.filter(tenant=tenant).count()
        return {Quota.SCHEDULES: Use(limit_of(tenant, Quota.SCHEDULES), number)}

    def after_restore(self) -> int:
        # Imported here: the library that reads cron expressions takes a while to load.
        from executions.capabilities.schedules.service import pause_schedules

        return pause_schedules()


CAPABILITY = Schedules()
