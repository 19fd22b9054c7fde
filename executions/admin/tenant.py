from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html_join
from django.utils.safestring import SafeString, mark_safe

from executions.admin.bases import TenantModelAdmin
from executions.models import Tenant
from executions.services.owned import snapshots_of
from executions.services.quotas import COLUMNS, Quota, installed_in_column
from executions.services.usage import Use, usage_of
from providers.admin.guarded import GuardedAdmin


@admin.register(Tenant)
class TenantAdmin(GuardedAdmin, TenantModelAdmin):
    list_display = ("slug", "name", "minimum_isolation", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    readonly_fields = ("created_at", "in_use", "snapshots")
    fieldsets = (
        (None, {"fields": ("slug", "name", "is_active", "minimum_isolation", "created_at")}),
        (
            "Quotas",
            {
                "fields": ("in_use", "snapshots", *COLUMNS),
                "description": "They hold over all web processes and workers together. Budgets "
                "have a page of their own.",
            },
        ),
        (
            "Retention",
            {
                "fields": (
                    *("keep_code_days", "keep_output_days", "keep_artifacts_days"),
                    "keep_records_days",
                )
            },
        ),
    )

    def get_readonly_fields(
        self, request: HttpRequest, obj: Tenant | None = None
    ) -> tuple[str, ...]:
        # Records carry the slug as text: a changed one would separate a tenant from its own.
        return ("slug", *self.readonly_fields) if obj else self.readonly_fields

    def get_form(
        self, request: HttpRequest, obj: Tenant | None = None, change: bool = False, **kwargs: Any
    ) -> type[forms.ModelForm[Tenant]]:
        """With what holds for an empty field shown in it."""
        form = super().get_form(request, obj, change, **kwargs)
        for name in COLUMNS:
            if name in form.base_fields:
                installed = str(installed_in_column(name))
                form.base_fields[name].widget.attrs["placeholder"] = installed
        return form

    @admin.display(description="in use")
    def in_use(self, tenant: Tenant) -> SafeString | str:
        if tenant.pk is None:
            return "Nothing."
        # The theme asks for it several times while it draws a page.
        if (known := vars(tenant).get("_in_use")) is None:
            found = usage_of(tenant).items()
            lines = (
                (_told(quota, use, use.limit),) for quota, use in found if use.limit is not None
            )
            known = vars(tenant)["_in_use"] = format_html_join(mark_safe("<br>"), "{}", lines)
        return known

    @admin.display(description="snapshots")
    def snapshots(self, tenant: Tenant) -> str:
        if tenant.pk is None:
            return "None."
        if (known := vars(tenant).get("_snapshots")) is None:
            known = vars(tenant)["_snapshots"] = snapshots_of(tenant).count()
        return str(known)


def _told(quota: Quota, use: Use, limit: float) -> str:
    shown = filesizeformat if "bytes" in quota else "{:,.12g}".format
    until = f", until {use.resets_at:%Y-%m-%d %H:%M} UTC" if use.resets_at else ""
    words = quota.replace("_", " ").capitalize()
    return f"{words}: {shown(use.used)} of {shown(limit)}{until}"
