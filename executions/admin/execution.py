from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from executions.admin import searching
from executions.admin.badges import status_badge
from executions.admin.bases import ArtifactTabularInline, ExecutionModelAdmin
from executions.admin.details import CANCEL, REPLAY, Details
from executions.admin.display import (
    artifact_preview,
    code_block,
    late_result_block,
    outputs_block,
    receipt,
    streams_block,
    text_block,
    timeline,
)
from executions.admin.exporting import PERMISSION as EXPORT
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
from executions.models import Artifact, Execution, LedgerEntry
from executions.services.claims import CLAIMS
from executions.services.export import FORMATS
from executions.services.observations import in_words
from executions.services.presentation import visible
from executions.services.saved_filters import SHARE, filters_for
from executions.text import to_json
from providers.admin.keyset import KeysetAdmin, KeysetList
from providers.admin.moments import shown_moment
from providers.admin.read_only import ReadOnly
from providers.admin.sifting import Condition

_LARGE = (
    *("code", "arguments", "result", "outputs", "stdout", "stderr"),
    *("meta", "hops", "error_message"),
)


class ExecutionList(KeysetList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer(*_LARGE)


class ArtifactInline(ArtifactTabularInline):
    model = Artifact
    extra = 0
    can_delete = False
    fields = readonly_fields = ("download", "preview", "mime_type", "size_bytes", "sha256")

    def has_add_permission(self, request: HttpRequest, obj: Execution | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("executions.view_execution")

    @admin.display(description="file")
    def download(self, artifact: Artifact) -> SafeString:
        url = reverse("admin:executions_artifact", args=[artifact.execution_id, artifact.pk])
        return format_html('<a href="{}">{}</a>', url, visible(artifact.name))

    @admin.display(description="preview")
    def preview(self, artifact: Artifact) -> SafeString | str:
        return artifact_preview(artifact)


@admin.register(Execution)
class ExecutionAdmin(ReadOnly, KeysetAdmin, ExecutionModelAdmin):
    """The record, for reading: nobody adds to it, changes it or takes from it here."""

    list_display = (
        *("short_id", "shown_created", "tenant_slug", "shown_status", "language", "provider"),
        *("isolation", "exit_code", "error_code", "observed", "shown_ms"),
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
    inlines = (ArtifactInline,)
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "id",
                    "status",
                    "shown_error",
                    "exit_code",
                    "shown_observations",
                    "receipt",
                    "timeline",
                    "shown_code",
                    "shown_arguments",
                    "shown_result",
                    "shown_outputs",
                    "shown_streams",
                    "shown_stdout",
                    "shown_stderr",
                )
            },
        ),
        ("Late result", {"fields": ("shown_late_result",)}),
        (
            "Who",
            {
                "fields": (
                    "tenant_slug",
                    "api_key_name",
                    "api_key_prefix",
                    "shown_subject",
                    "shown_claims",
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
                    "isolation",
                    "sharing",
                    "language",
                    "entrypoint",
                    "mode",
                    "priority",
                    "timeout",
                    "code_hash",
                    "shown_files",
                    "shown_hops",
                    "shown_session",
                    "cost",
                    "shown_meta",
                )
            },
        ),
        (
            "When",
            {
                "fields": (
                    "created_at",
                    "run_at",
                    "schedule_id",
                    "started_at",
                    "finished_at",
                    "replay_of",
                )
            },
        ),
    )

    class Media:
        css = {"all": ("executions/record.css",)}

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
        return super().changelist_view(request, {**(extra_context or {}), **context})

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        may_replay = request.user.has_perm(REPLAY)
        may_cancel = request.user.has_perm(CANCEL)
        context = {**(extra_context or {}), "may_replay": may_replay, "may_cancel": may_cancel}
        return super().change_view(request, object_id, form_url, context)

    @admin.display(description="id")
    def short_id(self, execution: Execution) -> SafeString:
        return format_html('<span class="one-line">{}</span>', execution.pk)

    @admin.display(description="created at")
    def shown_created(self, execution: Execution) -> SafeString | str:
        return shown_moment(execution.created_at)

    @admin.display(description="status")
    def shown_status(self, execution: Execution) -> SafeString:
        return status_badge(execution)

    @admin.display(description="total ms")
    def shown_ms(self, execution: Execution) -> str:
        return "-" if execution.total_ms is None else f"{execution.total_ms:,.0f}"

    @admin.display(description="code")
    def shown_code(self, execution: Execution) -> SafeString | str:
        return code_block(execution)

    @admin.display(description="arguments")
    def shown_arguments(self, execution: Execution) -> SafeString | str:
        return text_block(execution, "arguments")

    @admin.display(description="result")
    def shown_result(self, execution: Execution) -> SafeString | str:
        return text_block(execution, "result")

    @admin.display(description="rich outputs")
    def shown_outputs(self, execution: Execution) -> SafeString | str:
        return outputs_block(execution)

    @admin.display(description="both streams in their order")
    def shown_streams(self, execution: Execution) -> SafeString | str:
        return streams_block(execution)

    @admin.display(description="stdout")
    def shown_stdout(self, execution: Execution) -> SafeString | str:
        return text_block(execution, "stdout", truncated=execution.stdout_truncated)

    @admin.display(description="stderr")
    def shown_stderr(self, execution: Execution) -> SafeString | str:
        return text_block(execution, "stderr", truncated=execution.stderr_truncated)

    @admin.display(description="error")
    def shown_error(self, execution: Execution) -> str:
        message = visible(execution.error_message)
        return f"{execution.error_code}: {message}" if execution.error_code else message or "-"

    @admin.display(description="what was seen of it")
    def shown_observations(self, execution: Execution) -> SafeString | str:
        lines = ((line,) for line in in_words(execution))
        return format_html_join(mark_safe("<br>"), "{}", lines) or "-"

    @admin.display(description="subject")
    def shown_subject(self, execution: Execution) -> str:
        return visible(execution.subject) or "-"

    @admin.display(description="asked by, as the caller says")
    def shown_claims(self, execution: Execution) -> SafeString | str:
        said = [(name, getattr(execution, name)) for name in (*CLAIMS, "traceparent")]
        lines = ((name.replace("_", " "), visible(value)) for name, value in said if value)
        return format_html_join(mark_safe("<br>"), "{}: {}", lines) or "-"

    @admin.display(description="meta")
    def shown_meta(self, execution: Execution) -> str:
        # Not the field itself, which the theme would colour with inline styles.
        return visible(to_json(execution.meta))

    @admin.display(description="hops")
    def shown_hops(self, execution: Execution) -> str:
        hops = (
            f"{hop['provider']} {hop['outcome']} {hop.get('code', '')} {hop.get('reason', '')}"
            f" ({hop['ms']:.0f} ms)"
            for hop in execution.hops
        )
        return visible(" → ".join(" ".join(hop.split()) for hop in hops)) or "-"

    @admin.display(description="session")
    def shown_session(self, execution: Execution) -> SafeString | str:
        if execution.session_id is None:
            return "-"
        place = f"context {visible(execution.context)}" if execution.context else "a command"
        return format_html(
            '<a href="{}">{}</a>, turn {}, {}{}',
            reverse("admin:executions_session_change", args=[execution.session_id]),
            execution.session_id,
            execution.turn,
            place,
            "; the context lost its state" if execution.context_kept is False else "",
        )

    @admin.display(description="input files")
    def shown_files(self, execution: Execution) -> str:
        return visible(to_json(execution.input_files)) if execution.input_files else "-"

    @admin.display(description="timeline")
    def timeline(self, execution: Execution) -> SafeString | str:
        return timeline(execution)

    @admin.display(description="what came of it after its record was closed")
    def shown_late_result(self, execution: Execution) -> SafeString | str:
        return late_result_block(execution)

    @admin.display(description="receipt")
    def receipt(self, execution: Execution) -> SafeString | str:
        return receipt(execution)
