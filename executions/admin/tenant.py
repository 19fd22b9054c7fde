from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import escape

from executions.admin.bases import TenantModelAdmin
from executions.admin.naming import refuse_hidden
from executions.admin.tenant_overview import overview
from executions.models import Tenant
from executions.services.consequences import inactive_tenant, without_tenant
from executions.services.owned import snapshots_of
from executions.services.presentation import visible
from executions.services.quotas import COLUMNS, installed_in_column
from providers.admin.choosing import once
from providers.admin.guarded import GuardedAdmin


@admin.register(Tenant)
class TenantAdmin(GuardedAdmin, TenantModelAdmin):
    list_display = ("slug", "shown_name", "minimum_isolation", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    change_form_template = "admin/executions/tenant/change_form.html"
    readonly_fields = ("created_at", "snapshots")
    fieldsets = (
        (None, {"fields": ("slug", "name", "is_active", "minimum_isolation", "created_at")}),
        (
            "Quotas",
            {
                "fields": ("snapshots", *COLUMNS),
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
        refuse_hidden(form)
        for name in COLUMNS:
            if name in form.base_fields:
                installed = str(installed_in_column(name))
                form.base_fields[name].widget.attrs["placeholder"] = installed
        active = form.base_fields.get("is_active")
        if active is not None and obj is not None:
            told = once(request, "inactive tenant", lambda: inactive_tenant(obj))
            # The theme takes a help text for HTML.
            without = f" Without it: {' '.join(told)}" if told else ""
            active.help_text = escape(f"{active.help_text}{without}")
        return form

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if (tenant := kwargs.get("obj")) is not None:
            context["overview"] = overview(request, tenant)
        answer: HttpResponse = super().render_change_form(request, context, *args, **kwargs)
        return answer

    def consequences(self, row: Tenant) -> list[str]:
        return without_tenant(row)

    @admin.display(description="name", ordering="name")
    def shown_name(self, tenant: Tenant) -> str:
        return visible(tenant.name)

    @admin.display(description="snapshots")
    def snapshots(self, tenant: Tenant) -> str:
        if tenant.pk is None:
            return "None."
        if (known := vars(tenant).get("_snapshots")) is None:
            known = vars(tenant)["_snapshots"] = snapshots_of(tenant).count()
        return str(known)
