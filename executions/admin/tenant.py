from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from executions.admin.bases import TenantModelAdmin
from executions.models import Tenant
from providers.admin.guarded import GuardedAdmin


@admin.register(Tenant)
class TenantAdmin(GuardedAdmin, TenantModelAdmin):
    list_display = ("slug", "name", "is_active", "created_at")
    list_filter = ("is_active",)
    search_fields = ("slug", "name")
    readonly_fields = ("created_at",)

    def get_readonly_fields(
        self, request: HttpRequest, obj: Tenant | None = None
    ) -> tuple[str, ...]:
        # Records carry the slug as text: a changed one would separate a tenant from its own.
        return ("slug", "created_at") if obj else ("created_at",)
