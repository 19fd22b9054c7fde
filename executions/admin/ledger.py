"""The pages of the ledger and of its verifications."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin

from executions.admin.display import once
from executions.admin.frame import LedgerEntryModelAdmin
from executions.ledger.models import LedgerCheck, LedgerEntry
from executions.ledger.verification import verify_entry
from executions.runs.ledger_checks import ask, close_abandoned, ledger_state
from providers.admin_lists import ChoiceField, Condition, KeysetAdmin, ListField, MomentField
from providers.admin_pages import ReadOnly
from providers.hidden_characters import visible
from providers.timestamps import shown_moment

_DIGEST = re.compile("[0-9a-f]{64}")
_NUMBER = re.compile("[0-9]{1,18}")

KINDS = (
    "execution",
    "configuration",
    "trial",
    "setting",
    "tenant",
    "policy",
    "network_list",
    "network_credential",
    "template",
    "template_version",
    "advisories",
    "approval",
    "tool_call",
    "legal_hold",
    "session",
    "snapshot",
    "schedule",
    "late_result",
    "webhook_secret",
    "api_key",
    "refusal",
    "user",
    "role",
    "admin_action",
    "authenticator",
    "baseline",
    "export",
    "report",
    "replay",
    "cancellation",
    "alert",
    "erasure",
    "ledger_key",
    "checkpoints_reset",
    "installation",
)


class KindField(ChoiceField):
    """The kinds that are entered here; finding those in use would read the whole index."""

    title = parameter_name = column = "kind"
    index = "ordered"
    offered = tuple((kind, kind.replace("_", " ")) for kind in KINDS)


class KeyIdField(ListField):
    title = "signed by (key id)"
    parameter_name = column = "key_id"


class FromField(MomentField):
    title = "from"
    parameter_name = "at__gte"
    column = "at"


class UntilField(FromField):
    title = "before"
    parameter_name = "at__lt"
    is_end = True


@once
def _signed(entry: LedgerEntry) -> str:
    return verify_entry(entry) or "yes"


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnly, KeysetAdmin, LedgerEntryModelAdmin):
    """The ledger, for reading. What is true of it is what `verify_ledger` says."""

    list_display = ("sequence", "shown_at", "kind", "shown_subject", "key_id")
    list_filter = (FromField, UntilField, KindField, KeyIdField)
    ordering = ("-sequence",)
    search_fields = ("sequence",)
    search_help_text = "Sequence number, full digest or full execution id."
    show_facets = admin.ShowFacets.NEVER
    fields = readonly_fields = (
        "sequence",
        "kind",
        "shown_subject",
        "at",
        "signed",
        "stated",
        "digest",
        "key_id",
        "signature",
    )

    class Media:
        css = {"all": ("executions/record.css",)}

    def search(self, text: str) -> Condition | str:
        if _DIGEST.fullmatch(text):
            return Condition(Q(digest=text))
        if _NUMBER.fullmatch(text):
            return Condition(Q(sequence=int(text)), "found")
        try:
            return Condition(Q(execution_id=UUID(text)), "found")
        except ValueError:
            return "Must be a sequence number, a full digest or a full execution id."

    @admin.display(description="time")
    def shown_at(self, entry: LedgerEntry) -> SafeString | str:
        return shown_moment(entry.at)

    @admin.display(description="subject")
    def shown_subject(self, entry: LedgerEntry) -> SafeString | str:
        subject = visible(str(entry.stated.get("subject", "")))
        if entry.execution_id is None:
            return subject
        url = reverse("admin:executions_execution_change", args=[entry.execution_id])
        return format_html('<a href="{}">{}</a>', url, subject)

    @admin.display(description="signature valid")
    def signed(self, entry: LedgerEntry) -> str:
        return _signed(entry)

    @admin.display(description="statement")
    def stated(self, entry: LedgerEntry) -> SafeString:
        text = json.dumps(entry.stated, indent=2, ensure_ascii=False)
        return format_html('<pre class="record">{}</pre>', visible(text))


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
        close_abandoned()
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
