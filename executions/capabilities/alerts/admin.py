"""The pages of alerts, which are acknowledged there, and of how far the ledger was exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin

from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.service import MAIL, WEBHOOK, acknowledge
from executions.capabilities.observability.models import AuditExport
from executions.kernel.audit import current_actor
from providers.admin_pages import ReadOnly
from providers.hidden_characters import visible

if TYPE_CHECKING:
    _AlertAdmin = admin.ModelAdmin[Alert]
    _AuditExportAdmin = admin.ModelAdmin[AuditExport]
else:
    _AlertAdmin = _AuditExportAdmin = ModelAdmin

ACKNOWLEDGE = "executions.acknowledge_alert"


@admin.register(Alert)
class AlertAdmin(ReadOnly, _AlertAdmin):
    list_display = (
        *("opened_at", "shown_state", "severity", "rule", "shown_subject", "shown_message"),
        *("resolved_at", "acknowledged_by", "acknowledged_at"),
    )
    list_filter = ("state", "severity", "rule")
    sortable_by = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ("acknowledge_alerts",)
    fields = (
        *("rule", "shown_subject", "severity", "shown_state", "shown_message", "value"),
        *("threshold", "opened_at", "seen_at", "resolved_at", "acknowledged_by"),
        *("acknowledged_at", "problem", "mail_problem"),
    )
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Alert]:
        return super().get_queryset(request).prefetch_related("deliveries")

    def has_acknowledge_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm(ACKNOWLEDGE))

    @admin.action(description="Acknowledge the selected alerts", permissions=["acknowledge"])
    def acknowledge_alerts(self, request: HttpRequest, chosen: QuerySet[Alert]) -> None:
        """Who, and when; an entry of the ledger for each. What was acknowledged before stays so."""
        done = 0
        for alert in chosen.filter(acknowledged_at=None):
            if acknowledge(alert, current_actor()):
                self.log_change(request, alert, "Acknowledged.")
                done += 1
        messages.success(request, f"{done} acknowledged.")

    @admin.display(description="status")
    def shown_state(self, alert: Alert) -> SafeString:
        kind = "quiet"
        if alert.state == Alert.State.OPEN:
            kind = "bad" if alert.severity == Alert.Severity.CRITICAL else "warn"
        return format_html('<span class="badge badge-{}">{}</span>', kind, alert.state)

    @admin.display(description="subject")
    def shown_subject(self, alert: Alert) -> str:
        return visible(alert.subject) or "-"

    @admin.display(description="message")
    def shown_message(self, alert: Alert) -> str:
        return visible(alert.message)

    @admin.display(description="webhook error")
    def problem(self, alert: Alert) -> str:
        return self._problem(alert, WEBHOOK)

    @admin.display(description="email error")
    def mail_problem(self, alert: Alert) -> str:
        return self._problem(alert, MAIL)

    def _problem(self, alert: Alert, way: str) -> str:
        problems = [each.problem for each in alert.deliveries.all() if each.way == way]
        return visible("".join(problems)) or "-"


@admin.register(AuditExport)
class AuditExportAdmin(ReadOnly, _AuditExportAdmin):
    list_display = ("destination", "sequence", "sent_at", "tries", "problem")
    list_display_links = None
    sortable_by = ()
