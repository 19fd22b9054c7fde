from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.admin.bases import LedgerEntryModelAdmin
from executions.admin.display import once
from executions.admin.filters import BoundedPaginator
from executions.models import LedgerEntry
from executions.services.ledger.verification import verify_entry
from executions.services.presentation import visible
from providers.admin.read_only import ReadOnly

KINDS = (
    "execution",
    "configuration",
    "trial",
    "setting",
    "tenant",
    "policy",
    "approval",
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


class KindFilter(admin.SimpleListFilter):
    """The kinds that are entered here; finding those in use would read the whole index."""

    title = parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(kind, kind.replace("_", " ")) for kind in KINDS]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[LedgerEntry]
    ) -> QuerySet[LedgerEntry]:
        kind = self.value()
        return queryset if kind is None else queryset.filter(kind=kind)


@once
def _signed(entry: LedgerEntry) -> str:
    return verify_entry(entry) or "yes"


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnly, LedgerEntryModelAdmin):
    """The ledger, for reading. What is true of it is what `verify_ledger` says."""

    list_display = ("sequence", "at", "kind", "subject", "key_id")
    list_filter = (KindFilter,)
    list_per_page = 50
    paginator = BoundedPaginator
    ordering = ("-sequence",)
    sortable_by = ()
    search_fields = ("=sequence", "=digest")
    search_help_text = "A sequence number or a whole digest."
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    fields = readonly_fields = (
        "sequence",
        "kind",
        "subject",
        "at",
        "signed",
        "stated",
        "digest",
        "key_id",
        "signature",
    )

    class Media:
        css = {"all": ("executions/record.css",)}

    @admin.display(description="subject")
    def subject(self, entry: LedgerEntry) -> SafeString | str:
        subject = visible(str(entry.stated.get("subject", "")))
        if entry.execution_id is None:
            return subject
        url = reverse("admin:executions_execution_change", args=[entry.execution_id])
        return format_html('<a href="{}">{}</a>', url, subject)

    @admin.display(description="signature holds")
    def signed(self, entry: LedgerEntry) -> str:
        return _signed(entry)

    @admin.display(description="statement")
    def stated(self, entry: LedgerEntry) -> SafeString:
        text = json.dumps(entry.stated, indent=2, ensure_ascii=False)
        return format_html('<pre class="record">{}</pre>', visible(text))
