from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.admin.bases import ArtifactTabularInline, ExecutionModelAdmin
from executions.admin.filters import (
    BoundedPaginator,
    ErrorCodeFilter,
    LanguageFilter,
    ProviderFilter,
    TenantFilter,
)
from executions.api.files import download_response
from executions.models import Artifact, Execution

_LARGE = ("code", "arguments", "result", "stdout", "stderr", "meta", "error_message")
_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class ExecutionList(ChangeList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer(*_LARGE)


class ArtifactInline(ArtifactTabularInline):
    model = Artifact
    extra = 0
    can_delete = False
    fields = readonly_fields = ("download", "mime_type", "size_bytes", "sha256")

    def has_add_permission(self, request: HttpRequest, obj: Execution | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("executions.view_execution")

    @admin.display(description="file")
    def download(self, artifact: Artifact) -> SafeString:
        url = reverse("admin:executions_artifact", args=[artifact.execution_id, artifact.pk])
        return format_html('<a href="{}">{}</a>', url, artifact.name)


@admin.register(Execution)
class ExecutionAdmin(ExecutionModelAdmin):
    """The record, for reading: nobody adds to it, changes it or takes from it here."""

    list_display = (
        "short_id",
        "created_at",
        "tenant_slug",
        "status",
        "language",
        "provider",
        "exit_code",
        "error_code",
        "total_ms",
    )
    list_filter = (
        TenantFilter,
        "status",
        ProviderFilter,
        LanguageFilter,
        ErrorCodeFilter,
        "created_at",
    )
    ordering = ("-id",)
    sortable_by = ()
    search_fields = ("id",)
    search_help_text = "The whole id, or the whole SHA-256 of the code."
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    inlines = (ArtifactInline,)
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "id",
                    "status",
                    "error_code",
                    "error_message",
                    "exit_code",
                    "shown_code",
                    "shown_arguments",
                    "shown_result",
                    "shown_stdout",
                    "shown_stderr",
                )
            },
        ),
        (
            "Who",
            {
                "fields": (
                    "tenant_slug",
                    "api_key_name",
                    "api_key_prefix",
                    "subject",
                    "client_address",
                    "request_id",
                    "idempotency_key",
                )
            },
        ),
        (
            "Where",
            {
                "fields": (
                    "provider",
                    "config_version",
                    "runtime",
                    "language",
                    "entrypoint",
                    "mode",
                    "timeout",
                    "code_hash",
                    "shown_meta",
                )
            },
        ),
        (
            "When",
            {
                "fields": (
                    "created_at",
                    "started_at",
                    "finished_at",
                    "queue_ms",
                    "start_ms",
                    "run_ms",
                    "total_ms",
                )
            },
        ),
    )

    class Media:
        css = {"all": ("executions/record.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Execution | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Execution | None = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Execution]:
        return super().get_queryset(request).defer("pending")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ExecutionList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Execution], search_term: str
    ) -> tuple[QuerySet[Execution], bool]:
        term = search_term.strip().lower()
        if not term:
            return queryset, False
        if found := _HASH.fullmatch(term):
            return queryset.filter(code_hash=f"sha256:{found[1]}"), False
        try:
            return queryset.filter(pk=UUID(term)), False
        except ValueError:
            return queryset.none(), False

    def get_urls(self) -> list[URLPattern]:
        download = path(
            "<uuid:execution_id>/artifacts/<int:artifact_id>",
            self.admin_site.admin_view(self.artifact_view),
            name="executions_artifact",
        )
        return [download, *super().get_urls()]

    def artifact_view(
        self, request: HttpRequest, execution_id: UUID, artifact_id: int
    ) -> HttpResponseBase:
        if not self.has_view_permission(request):
            raise PermissionDenied
        artifact = Artifact.objects.filter(pk=artifact_id, execution=execution_id).first()
        if artifact is None:
            raise Http404
        return download_response(artifact)

    @admin.display(description="id")
    def short_id(self, execution: Execution) -> str:
        return str(execution.pk)

    @admin.display(description="code")
    def shown_code(self, execution: Execution) -> SafeString | str:
        return _block(execution.code) if execution.code else "Not kept, see the code hash."

    @admin.display(description="arguments")
    def shown_arguments(self, execution: Execution) -> SafeString:
        return _block(execution.arguments)

    @admin.display(description="meta")
    def shown_meta(self, execution: Execution) -> SafeString:
        # Not the field itself, which the theme would colour with inline styles.
        return _block(json.dumps(execution.meta, indent=2) if execution.meta else "")

    @admin.display(description="result")
    def shown_result(self, execution: Execution) -> SafeString:
        return _block(execution.result)

    @admin.display(description="stdout")
    def shown_stdout(self, execution: Execution) -> SafeString:
        return _block(execution.stdout, truncated=execution.stdout_truncated)

    @admin.display(description="stderr")
    def shown_stderr(self, execution: Execution) -> SafeString:
        return _block(execution.stderr, truncated=execution.stderr_truncated)


def _block(text: str, *, truncated: bool = False) -> SafeString:
    """Text as it was, set apart; a dash where there is none."""
    if not text:
        return format_html("{}", "-")
    note = "What followed was dropped: it was more than is kept." if truncated else ""
    return format_html('<pre class="record">{}</pre><p class="record-note">{}</p>', text, note)
