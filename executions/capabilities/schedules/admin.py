from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import ngettext
from unfold.admin import ModelAdmin

from executions.admin.executions import BoundedPaginator
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.schedules.service import pause
from providers.admin_pages import ReadOnly
from providers.hidden_characters import visible

if TYPE_CHECKING:
    _ScheduleAdmin = admin.ModelAdmin[Schedule]
else:
    _ScheduleAdmin = ModelAdmin

PAUSE = "executions.pause_schedule"


@admin.register(Schedule)
class ScheduleAdmin(ReadOnly, _ScheduleAdmin):
    """Recurring runs of tenants: read-only, can be paused."""

    list_display = (
        *("shown_name", "tenant", "shown_cron", "timezone", "next_at", "last_at"),
        *("paused_because", "shown_problem"),
    )
    list_select_related = ("tenant",)
    list_filter = (("next_at", admin.EmptyFieldListFilter),)
    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    actions = ("pause_schedules",)
    fields = (
        *("id", "shown_name", "tenant", "key", "cron", "timezone", "language"),
        *("code_hash", "paused_because", "next_at", "last_at", "shown_problem", "created_at"),
        "shown_executions",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        return super().get_queryset(request).defer("request")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(PAUSE)

    @admin.display(description="schedule (cron)")
    def shown_cron(self, schedule: Schedule) -> SafeString:
        return format_html('<span class="unbroken">{}</span>', schedule.cron)

    @admin.display(description="name")
    def shown_name(self, schedule: Schedule) -> str:
        return visible(schedule.name)

    @admin.display(description="API key")
    def key(self, schedule: Schedule) -> str:
        return f"{schedule.api_key_prefix}…" if schedule.api_key_prefix else "-"

    @admin.display(description="last error")
    def shown_problem(self, schedule: Schedule) -> str:
        return visible(schedule.last_problem) or "-"

    @admin.display(description="executions")
    def shown_executions(self, schedule: Schedule) -> SafeString:
        url = reverse("admin:executions_execution_changelist")
        return format_html('<a href="{}?q=schedule:{}">Show executions</a>', url, schedule.pk)

    @admin.action(description="Pause the selected schedules", permissions=["pause"])
    def pause_schedules(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        paused = 0
        for schedule in queryset:
            if pause(schedule, f"{request.user.get_username()} paused it in the admin."):
                self.log_change(request, schedule, "Paused.")
                paused += 1
        message = ngettext("%d schedule was paused.", "%d schedules were paused.", paused) % paused
        self.message_user(request, message, messages.SUCCESS)
