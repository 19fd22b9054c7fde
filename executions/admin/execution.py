from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from executions.admin import searching
from executions.admin.badges import status_badge
from executions.admin.bases import ExecutionModelAdmin
from executions.admin.details import Details
from executions.admin.execution_page import Record
from executions.admin.filters import (
    AgentField,
    ConversationField,
    ErrorCodeField,
    ExitCodeField,
    FromField,
    KeyField,
    LanguageField,
    ObservedField,
    ProviderField,
    ReplayField,
    ReplayOfField,
    RuntimeField,
    StatusField,
    TenantField,
    UntilField,
)
from executions.capabilities.dashboard.admin import fragment_of
from executions.capabilities.search.admin import PERMISSION as EXPORT
from executions.capabilities.search.export import FORMATS
from executions.capabilities.search.service import SHARE, filters_for
from executions.kernel.presentation import in_time
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers.admin.keyset import KeysetAdmin, KeysetList
from providers.admin.read_only import ReadOnly
from providers.admin.sifting import Condition
from providers.hidden_characters import visible
from providers.moments import shown_moment

_LARGE = (
    *("code", "arguments", "result", "outputs", "exception", "stdout", "stderr"),
    *("meta", "hops", "error_message"),
)


class ExecutionList(KeysetList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer(*_LARGE)


@admin.register(Execution)
class ExecutionAdmin(ReadOnly, KeysetAdmin, ExecutionModelAdmin):
    """The record, for reading: nobody adds to it, changes it or takes from it here."""

    list_display = (
        *("short_id", "shown_created", "shown_tenant", "shown_status", "shown_exit", "language"),
        *("where", "shown_took"),
    )
    list_filter = (
        *(FromField, UntilField, TenantField, KeyField, StatusField, ExitCodeField),
        *(ErrorCodeField, LanguageField, ProviderField, RuntimeField, AgentField),
        *(ConversationField, ReplayField, ReplayOfField, ObservedField),
    )
    ordering = ("-id",)
    search_fields = ("id",)
    search_help_text = searching.HELP
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/executions/execution/change_list.html"
    # The page is drawn by `Record`, and no form.
    fields = ("id",)

    class Media:
        css = {"all": ("executions/record.css", "executions/run.css")}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Execution]:
        return super().get_queryset(request).defer("pending")

    def search(self, text: str) -> Condition:
        return searching.searched(text)

    def search_notes(self, text: str) -> list[str]:
        return searching.notes(text)

    def get_urls(self) -> list[URLPattern]:
        return [*Details(self).urls, *super().get_urls()]

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Execution | None:
        execution = super().get_object(request, object_id, from_field)
        if execution is not None:
            execution.ledger_entry = LedgerEntry.objects.filter(execution_id=execution.pk).first()
        return execution

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetList]:
        return ExecutionList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        formats = list(FORMATS) if request.user.has_perm(EXPORT) else []
        context = {
            "export_formats": formats,
            "saved_filters": filters_for(request.user),
            "may_share": request.user.has_perm(SHARE),
        }
        page = super().changelist_view(request, {**(extra_context or {}), **context})
        return fragment_of(request, page, "admin/executions/execution/rows.html")

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if (execution := context["original"]) is not None:
            context["record"] = Record(execution, request.user)
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description="id")
    def short_id(self, execution: Execution) -> SafeString:
        return format_html('<span class="one-line">{}</span>', execution.pk)

    @admin.display(description="created")
    def shown_created(self, execution: Execution) -> SafeString | str:
        return shown_moment(execution.created_at)

    @admin.display(description="tenant")
    def shown_tenant(self, execution: Execution) -> str:
        return execution.tenant_slug

    @admin.display(description="status")
    def shown_status(self, execution: Execution) -> SafeString:
        """With what is to be said of it: the code of its error, and what was seen of it."""
        remarks = filter(None, (execution.error_code, execution.observed))
        said = format_html_join(
            "", ' <span class="remark">{}</span>', ((visible(each),) for each in remarks)
        )
        return format_html("{}{}", status_badge(execution), said)

    @admin.display(description="exit code")
    def shown_exit(self, execution: Execution) -> int | None:
        return execution.exit_code

    @admin.display(description="provider")
    def where(self, execution: Execution) -> SafeString | None:
        if not execution.provider:
            return None
        return format_html(
            '{} <span class="quiet">{}</span>', execution.provider, execution.isolation
        )

    @admin.display(description="duration")
    def shown_took(self, execution: Execution) -> str | None:
        return None if execution.total_ms is None else in_time(execution.total_ms)
