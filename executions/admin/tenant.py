from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from executions.admin.bases import TenantModelAdmin
from executions.models import Tenant


@admin.register(Tenant)
class TenantAdmin(TenantModelAdmin):
    list_display = ("slug", "name", "minimum_isolation", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    readonly_fields = ("created_at",)
    fieldsets = (
        (None, {"fields": ("slug", "name", "is_active", "created_at")}),
        (
            "Bounds",
            {
                "fields": ("max_running", "max_queued", "max_stored_mib"),
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
        return ("slug", "created_at") if obj else ("created_at",)
