"""The pages of budgets, of what was spent, and of the alerts about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from unfold.admin import ModelAdmin

from executions.admin.frame import tenant_choice
from executions.admin.tenants import without_budget
from executions.capabilities.spending.models import Budget, Spending, SpendingAlert
from executions.capabilities.spending.service import compare_providers
from providers.admin_pages import GuardedAdmin, ReadOnly

PERIODS = {24: "24 hours", 168: "7 days", 720: "30 days"}

if TYPE_CHECKING:
    _BudgetAdmin = admin.ModelAdmin[Budget]
    _SpendingAdmin = admin.ModelAdmin[Spending]
    _AlertAdmin = admin.ModelAdmin[SpendingAlert]
else:
    _BudgetAdmin = _SpendingAdmin = _AlertAdmin = ModelAdmin


@admin.register(Budget)
class BudgetAdmin(GuardedAdmin, _BudgetAdmin):
    list_display = ("__str__", "tenant_slug", "period", "limit", "warn_percent")

    def get_form(
        self, request: HttpRequest, obj: Budget | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("tenant_slug")) is not None:
            stored = obj.tenant_slug if obj else ""
            chosen = tenant_choice(request, field, "All tenants together", stored)
            form.base_fields["tenant_slug"] = chosen
        return form

    def consequences(self, row: Budget) -> list[str]:
        return without_budget(row)


@admin.register(Spending)
class SpendingAdmin(ReadOnly, _SpendingAdmin):
    list_display = ("day", "tenant_slug", "amount", "executions")
    list_filter = ("day",)

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.comparison)
        return [path("comparison/", page, name="executions_comparison"), *super().get_urls()]

    def comparison(self, request: HttpRequest) -> TemplateResponse:
        """The providers beside each other, for who may see spending."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        asked = request.GET.get("hours", "")
        hours = int(asked) if asked in map(str, PERIODS) else 24
        context = {
            **self.admin_site.each_context(request),
            "title": "Compare providers",
            "rows": compare_providers(hours),
            "hours": hours,
            "choices": PERIODS.items(),
        }
        return TemplateResponse(request, "admin/executions/comparison.html", context)


@admin.register(SpendingAlert)
class SpendingAlertAdmin(ReadOnly, _AlertAdmin):
    list_display = ("created_at", "kind", "tenant_slug", "period", "message")
    list_filter = ("kind",)
