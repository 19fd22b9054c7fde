from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest

from executions.admin.bases import TenantModelAdmin
from executions.models import Tenant
from executions.services.admission import MIB, in_use
from providers.admin.guarded import GuardedAdmin


@admin.register(Tenant)
class TenantAdmin(GuardedAdmin, TenantModelAdmin):
    list_display = ("slug", "name", "minimum_isolation", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    readonly_fields = ("created_at", "in_use")
    fieldsets = (
        (None, {"fields": ("slug", "name", "is_active", "minimum_isolation", "created_at")}),
        (
            "Bounds",
            {
                "fields": ("in_use", "max_running", "max_queued", "max_stored_mib"),
                "description": "They hold over all web processes and workers together.",
            },
        ),
        (
            "Retention",
            {"fields": ("keep_code_days", "keep_output_days", "keep_artifacts_days")},
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
        for name in ("max_running", "max_queued", "max_stored_mib"):
            if name in form.base_fields:
                installed = getattr(settings, f"SANDBOX_{name.upper()}")
                form.base_fields[name].widget.attrs["placeholder"] = str(installed)
        return form

    @admin.display(description="in use")
    def in_use(self, tenant: Tenant) -> str:
        if tenant.pk is None:
            return "Nothing."
        # The theme asks for it several times while it draws a page.
        used = vars(tenant).get("_in_use") or in_use(tenant)
        vars(tenant)["_in_use"] = used
        return (
            f"{used.running} running and {used.queued} queued now, "
            f"{used.stored_bytes / MIB:.1f} MiB stored today."
        )
