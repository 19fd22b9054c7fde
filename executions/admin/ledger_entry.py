from __future__ import annotations

import json
import re
from uuid import UUID

from django.contrib import admin
from django.db.models import Q
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.admin.bases import LedgerEntryModelAdmin
from executions.admin.display import once
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entry
from providers.admin.keyset import KeysetAdmin
from providers.admin.list_fields import ChoiceField, ListField, MomentField
from providers.admin.read_only import ReadOnly
from providers.admin.sifting import Condition
from providers.hidden_characters import visible
from providers.moments import shown_moment

_DIGEST = re.compile("[0-9a-f]{64}")
_NUMBER = re.compile("[0-9]{1,18}")

KINDS = (
    "execution",
    "configuration",
    "trial",
    "setting",
    "tenant",
    "policy",
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
