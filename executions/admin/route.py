"""The pages of routes, with the tenants that there are: what routes are made of knows of none."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from executions.admin.choosing import tenant_choice
from providers.admin.routing import RouteAdmin
from providers.models import Route

admin.site.unregister(Route)


@admin.register(Route)
class TenantRouteAdmin(RouteAdmin):
    def get_form(
        self, request: HttpRequest, obj: Route | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("owner")) is not None:
            stored = obj.owner if obj else ""
            form.base_fields["owner"] = tenant_choice(request, field, "All tenants", stored)
        return form
