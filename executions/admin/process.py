from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, F, IntegerField, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.utils.safestring import SafeString

from executions.admin.bases import ProcessModelAdmin
from executions.runs.models import Execution
from executions.runs.process_models import Process
from providers.admin.read_only import ReadOnly
from providers.moments import shown_moment


@admin.register(Process)
class ProcessAdmin(ReadOnly, ProcessModelAdmin):
    """Who runs executions now, and who did until a day ago. For looking at."""

    list_display = (
        *("kind", "instance", "pid", "state", "running"),
        *("started_at", "last_sign_of_life", "ended_at"),
    )
    list_display_links = None
    list_filter = ("kind",)
    ordering = (F("ended_at").desc(nulls_first=True), "-id")
    sortable_by = ()
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Process]:
        # That it is not null is what lets the index of running ones serve.
        open_rows = Execution.objects.filter(
            process_id=OuterRef("pk"), process__isnull=False, finished_at=None
        )
        counted = open_rows.order_by().values("process_id").annotate(number=Count("pk"))
        running = Subquery(counted.values("number"), output_field=IntegerField())
        return super().get_queryset(request).annotate(running=Coalesce(running, 0))

    @admin.display(description="status")
    def state(self, process: Process) -> str:
        if process.ended_at is not None:
            return "ended"
        return "draining" if process.draining else "serving"

    @admin.display(description="last heartbeat")
    def last_sign_of_life(self, process: Process) -> SafeString | str:
        return shown_moment(process.renewed_at)

    @admin.display(description="running")
    def running(self, process: Any) -> int:
        return int(process.running)
