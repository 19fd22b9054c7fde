"""The pages of the ledger's verifications, and the button that asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin

from executions.ledger.checks import ask, close_left, ledger_state
from executions.ledger.models import LedgerCheck
from providers.admin.read_only import ReadOnly
from providers.hidden_characters import visible

if TYPE_CHECKING:
    _LedgerCheckAdmin = admin.ModelAdmin[LedgerCheck]
else:
    _LedgerCheckAdmin = ModelAdmin

VIEW = "executions.view_ledgercheck"
REQUEST = "executions.request_ledgercheck"
_TONES = {"intact": "good", "not_intact": "bad", "failed": "warn"}


@admin.register(LedgerCheck)
class LedgerCheckAdmin(ReadOnly, _LedgerCheckAdmin):
    change_list_template = "admin/executions/ledgercheck/change_list.html"
    list_display = (
        *("asked_at", "asked_by", "shown_state", "entries", "executions", "findings"),
        "finished_at",
    )
    list_filter = ("state",)
    list_per_page = 50
    sortable_by = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    fields = readonly_fields = (
        *("shown_state", "problem", "findings", "first", "asked_at", "asked_by", "started_at"),
        *("finished_at", "entries", "total", "executions", "rows", "unproven", "checkpoints"),
    )

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("state/", wrap(self.state_view), name="executions_ledgercheck_state"),
            path("start/", wrap(self.start_view), name="executions_ledgercheck_start"),
            *super().get_urls(),
        ]

    def state_view(self, request: HttpRequest) -> HttpResponse:
        """How the ledger is, as a piece of a page that renews itself while it is verified."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        close_left()
        context: dict[str, Any] = {
            **ledger_state(),
            "may_verify": request.user.has_perm(REQUEST),
            "now": timezone.now(),
        }
        response = TemplateResponse(request, "admin/executions/ledgercheck/state.html", context)
        response["Cache-Control"] = "no-store"
        return response

    def start_view(self, request: HttpRequest) -> HttpResponse:
        if request.method != "POST" or not request.user.has_perm(REQUEST):
            raise PermissionDenied
        check = ask(request.user.get_username())
        if check is None:
            messages.warning(request, "A verification is already running.")
        else:
            self.log_change(request, check, "Started ledger verification.")
        return redirect("admin:executions_ledgercheck_changelist")

    @admin.display(description="status")
    def shown_state(self, check: LedgerCheck) -> SafeString:
        return format_html(
            '<span class="badge badge-{}">{}</span>',
            _TONES.get(check.state, "quiet"),
            check.get_state_display(),
        )

    @admin.display(description="first findings")
    def first(self, check: LedgerCheck) -> SafeString | str:
        told = ((visible(each),) for each in check.first_findings)
        lines = format_html_join("", "<li>{}</li>", told)
        return format_html("<ul>{}</ul>", lines) if lines else "None."
