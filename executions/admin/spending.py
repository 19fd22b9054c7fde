"""Budgets, what was spent, and the alerts about it, in plain pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest

from executions.models import Budget, Spending, SpendingAlert

if TYPE_CHECKING:
    _BudgetAdmin = admin.ModelAdmin[Budget]
    _SpendingAdmin = admin.ModelAdmin[Spending]
    _AlertAdmin = admin.ModelAdmin[SpendingAlert]
else:
    _BudgetAdmin = _SpendingAdmin = _AlertAdmin = admin.ModelAdmin


class _ReadOnly:
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


@admin.register(Budget)
class BudgetAdmin(_BudgetAdmin):
    list_display = ("__str__", "tenant_slug", "period", "limit", "warn_percent")


@admin.register(Spending)
class SpendingAdmin(_ReadOnly, _SpendingAdmin):
    list_display = ("day", "tenant_slug", "amount", "executions")
    list_filter = ("day",)


@admin.register(SpendingAlert)
class SpendingAlertAdmin(_ReadOnly, _AlertAdmin):
    list_display = ("created_at", "kind", "tenant_slug", "message")
    list_filter = ("kind",)
