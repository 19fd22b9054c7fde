from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern

from executions.admin.bases import ExecutionModelAdmin
from executions.admin.details import Details
from executions.admin.execution_page import Record
from executions.admin.exporting import PERMISSION as EXPORT
from executions.admin.filters import (
    BoundedPaginator,
    ErrorCodeFilter,
    LanguageFilter,
    ObservedFilter,
    ProviderFilter,
    TenantFilter,
)
from executions.admin.fragments import fragment_of
from executions.models import Execution, LedgerEntry
from executions.services.claims import CLAIMS
from executions.services.code_search import search_code
from executions.services.export import FORMATS
from executions.services.saved_filters import filters_for
from providers.admin.read_only import ReadOnly

_LARGE = (
    *("code", "arguments", "result", "outputs", "stdout", "stderr"),
    *("meta", "hops", "error_message"),
)
_CLAIM = re.compile(rf"({'|'.join((*CLAIMS, 'trace_id'))}):(.+)", re.DOTALL)
_SCHEDULE = "schedule:"
_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class ExecutionList(ChangeList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer(*_LARGE)


@admin.register(Execution)
class ExecutionAdmin(ReadOnly, ExecutionModelAdmin):
    """The record, for reading: nobody adds to it, changes it or takes from it here."""

    list_display = (
        "short_id",
        "created_at",
        "tenant_slug",
        "status",
        "language",
        "provider",
        "isolation",
        "exit_code",
        "error_code",
        "observed",
        "total_ms",
    )
    list_filter = (
        TenantFilter,
        "status",
        ProviderFilter,
        LanguageFilter,
        ErrorCodeFilter,
        ObservedFilter,
        "created_at",
    )
    ordering = ("-id",)
    sortable_by = ()
    search_fields = ("id",)
    search_help_text = (
        "The whole id, the whole SHA-256 of the code, or any part of the code (three characters "
        "at least; found a minute after it ended). Who asked, whole: agent:, model:, "
        "conversation:, on_behalf_of: or trace_id: before it. What a schedule has begun: schedule: "
        "before its id."
    )
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    # The page is drawn by `Record`, and no form.
    fields = ("id",)

    class Media:
        css = {"all": ("executions/record.css", "executions/run.css")}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Execution]:
        return super().get_queryset(request).defer("pending")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ExecutionList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Execution], search_term: str
    ) -> tuple[QuerySet[Execution], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        if found := _HASH.fullmatch(term.lower()):
            return queryset.filter(code_hash=f"sha256:{found[1]}"), False
        if found := _CLAIM.fullmatch(term):
            return queryset.filter(**{found[1]: found[2].strip()}), False
        try:
            if term.startswith(_SCHEDULE):
                return queryset.filter(schedule_id=UUID(term.removeprefix(_SCHEDULE))), False
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            return search_code(queryset, term), False

    def get_urls(self) -> list[URLPattern]:
        return [*Details(self).urls, *super().get_urls()]

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Execution | None:
        execution = super().get_object(request, object_id, from_field)
        if execution is not None:
            execution.ledger_entry = LedgerEntry.objects.filter(execution_id=execution.pk).first()
        return execution

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        formats = list(FORMATS) if request.user.has_perm(EXPORT) else []
        context = {"export_formats": formats, "saved_filters": filters_for(request.user)}
        page = super().changelist_view(request, {**(extra_context or {}), **context})
        return fragment_of(request, page, "admin/executions/execution/rows.html")

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if (execution := context["original"]) is not None:
            context["record"] = Record(execution, request.user)
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description="id")
    def short_id(self, execution: Execution) -> str:
        return str(execution.pk)
