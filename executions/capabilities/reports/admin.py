"""The pages of auditors' reports: asked for, watched while they are made, and taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin
from unfold.widgets import UnfoldAdminTextareaWidget

from executions.admin.executions import BoundedPaginator
from executions.admin.frame import check_has_run
from executions.capabilities.reports.models import Report
from executions.capabilities.reports.reading import MOST_IDS, MOST_RUNS
from executions.capabilities.reports.service import (
    JSON,
    KEPT_DAYS,
    PDF,
    NotAsMade,
    ask,
    check,
    open_file,
    scope_of,
)
from executions.kernel.audit import current_actor
from executions.kernel.storage import INERT
from executions.ledger.entry import LedgerUnavailable
from providers.admin_pages import ReadOnly
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Report]
    _Form = forms.ModelForm[Report]
else:
    _Admin, _Form = ModelAdmin, forms.ModelForm

MAKE = "executions.make_report"
VIEW_EXECUTION = "executions.view_execution"
_TYPES = {JSON: "application/json", PDF: "application/pdf"}
_BADGES = {Report.State.READY: "good", Report.State.FAILED: "bad"}


class ReportForm(_Form):
    ids = forms.CharField(
        label="Executions",
        required=False,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 4}),
        help_text=f"Execution ids, at most {MOST_IDS}. Empty: all executions selected above.",
    )

    class Meta:
        model = Report
        fields = ("tenant_slug", "since", "until", "ids", "with_code")

    def clean_tenant_slug(self) -> str:
        slug: str = self.cleaned_data["tenant_slug"]
        check_has_run(slug)
        return slug

    def clean_ids(self) -> list[str]:
        found = []
        for word in self.cleaned_data["ids"].replace(",", " ").split():
            try:
                found.append(str(UUID(word)))
            except ValueError:
                raise ValidationError(f"{visible(word[:50])} is not an execution id.") from None
        return sorted(set(found))

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                check(scope_of(Report(**cleaned)))
            except InvalidConfiguration as error:
                raise ValidationError({error.field or "__all__": error.message}) from None
        return cleaned


@admin.register(Report)
class ReportAdmin(ReadOnly, _Admin):
    """Whoever may make one may see every run: no account of the admin is bound to a tenant."""

    form = ReportForm
    list_display = ("created_at", "of", "made_by", "shown_state", "runs", "shown_verdict")
    list_filter = ("state",)
    sortable_by = ()
    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    readonly_fields = (
        *("shown_state", "files", "of", "with_code", "made_by", "created_at", "finished_at"),
        *("runs", "shown_verdict", "shown_entry", "json_hash", "pdf_hash"),
    )

    class Media:
        css = {"all": ("executions/record.css",)}
        js = ("executions/report.js",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perms((MAKE, VIEW_EXECUTION)))

    def get_fieldsets(self, request: HttpRequest, obj: Report | None = None) -> Any:
        if obj is not None:
            return ((None, {"fields": self.readonly_fields}),)
        told = (
            f"Lists the selected runs with their ledger receipts, as a signed JSON file and a PDF. "
            f"At most {MOST_RUNS:,} runs. Times are UTC. Large reports are generated in the "
            f"background. Files are stored for {KEPT_DAYS} days."
        )
        return ((None, {"fields": ReportForm.Meta.fields, "description": told}),)

    def get_readonly_fields(self, request: HttpRequest, obj: Report | None = None) -> Any:
        return () if obj is None else self.readonly_fields

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        # Whoever asks for one is shown how far it is.
        context |= {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Report, form: Any, change: bool) -> None:
        obj.made_by = current_actor()
        ask(obj)

    def response_add(
        self, request: HttpRequest, obj: Report, post_url_continue: str | None = None
    ) -> HttpResponse:
        messages.success(request, "Report requested. This page shows the progress.")
        url = reverse("admin:executions_report_change", args=[obj.pk])
        return HttpResponse(status=302, headers={"Location": url})

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        own = [
            path("<uuid:pk>/state/", wrap(self.state_view), name="executions_report_state"),
            *(
                path(
                    f"<uuid:pk>/report.{file_format}",
                    wrap(self.file_view),
                    {"file_format": file_format},
                    name=f"executions_report_{file_format}",
                )
                for file_format in _TYPES
            ),
        ]
        return [*own, *super().get_urls()]

    def state_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """How far it is, for the page that waits for it."""
        report = self._found(request, pk)
        answer = JsonResponse({"state": report.state, "progress": report.progress})
        answer["Cache-Control"] = "private, no-store"
        return answer

    def file_view(self, request: HttpRequest, pk: UUID, file_format: str) -> HttpResponseBase:
        report = self._found(request, pk)
        if not self.has_add_permission(request):
            raise PermissionDenied
        if report.state != Report.State.READY or report.files_removed_at:
            raise Http404
        try:
            file = open_file(report, file_format)
        except OSError:
            raise Http404 from None
        except (NotAsMade, LedgerUnavailable) as error:
            messages.error(request, f"The report cannot be downloaded. {error}")
            told = f"The report cannot be downloaded. {error}"
            return HttpResponse(told, status=409, content_type="text/plain", headers=INERT)
        response = FileResponse(file, content_type=_TYPES[file_format], headers=INERT)
        response["Content-Disposition"] = f'attachment; filename="report-{pk}.{file_format}"'
        return response

    def _found(self, request: HttpRequest, pk: UUID) -> Report:
        if not self.has_view_permission(request):
            raise PermissionDenied
        report = Report.objects.filter(pk=pk).first()
        if report is None:
            raise Http404
        return report

    @admin.display(description="scope")
    def of(self, report: Report) -> str:
        parts = [visible(report.tenant_slug) or "all tenants"]
        if report.ids:
            parts.append(f"{len(report.ids)} executions")
        if report.since:
            parts.append(f"from {report.since:%Y-%m-%d %H:%M:%S} UTC")
        if report.until:
            parts.append(f"until {report.until:%Y-%m-%d %H:%M:%S} UTC")
        return ", ".join(parts)

    @admin.display(description="status")
    def shown_state(self, report: Report) -> SafeString:
        badge = format_html(
            '<span class="badge badge-{}">{}</span>',
            _BADGES.get(Report.State(report.state), "quiet"),
            report.get_state_display(),
        )
        if report.state == Report.State.FAILED:
            return format_html("{} {}", badge, visible(report.problem))
        if report.state == Report.State.READY:
            return badge
        url = reverse("admin:executions_report_state", args=[report.pk])
        return format_html(
            '{} <span class="report-progress" role="status" data-url="{}">{}</span>',
            badge,
            url,
            report.progress,
        )

    @admin.display(description="files")
    def files(self, report: Report) -> SafeString | str:
        if report.state != Report.State.READY:
            return "-"
        if report.files_removed_at:
            return f"Removed after {KEPT_DAYS} days. Their hashes are in the ledger."
        links = (
            (reverse(f"admin:executions_report_{file_format}", args=[report.pk]), label)
            for file_format, label in ((PDF, "PDF"), (JSON, "JSON"))
        )
        return format_html_join(" ", '<a class="button" href="{}" download>{}</a>', links)

    @admin.display(description="ledger check")
    def shown_verdict(self, report: Report) -> SafeString | str:
        if report.findings is None:
            return "-"
        kind, told = (
            ("good", "no problems found") if report.findings == 0 else ("bad", "problems found")
        )
        badge = format_html('<span class="badge badge-{}">{}</span>', kind, told)
        rest = f"{report.findings} findings" if report.findings else ""
        if report.truncated:
            rest += f" Incomplete: limited to {report.runs} runs."
        return format_html("{} {}", badge, rest)

    @admin.display(description="ledger entry")
    def shown_entry(self, report: Report) -> SafeString | str:
        if report.ledger_sequence is None:
            return "-"
        url = reverse("admin:executions_ledgerentry_change", args=[report.ledger_sequence])
        return format_html('<a href="{}">{}</a>', url, report.ledger_sequence)
