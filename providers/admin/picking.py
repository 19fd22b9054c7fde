"""The page on which a provider is chosen to be configured, for the first time or once more."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest
from django.template.response import TemplateResponse

from providers import registry
from providers.errors import InvalidConfiguration


def asked_for(request: HttpRequest) -> str:
    """The id of the configuration that is to be added. Raises InvalidConfiguration for a name that
    cannot be one.
    """
    class_id, name = request.GET.get("provider", ""), request.GET.get("name", "")
    return registry.named(class_id, name) if name else class_id


def pick_page(admin: ModelAdmin[Any], request: HttpRequest) -> TemplateResponse:
    """All classes, with what is configured of each."""
    problem = ""
    try:
        asked_for(request)
    except InvalidConfiguration as error:
        problem = error.message
    rows = {row.provider_id: row for row in admin.get_queryset(request)}
    providers = [
        (
            provider,
            rows.get(class_id),
            [row for key, row in rows.items() if key.startswith(f"{class_id}@")],
        )
        for class_id, provider in registry.all_providers().items()
    ]
    context = {
        **admin.admin_site.each_context(request),
        "opts": admin.model._meta,
        "title": "Choose a provider",
        "providers": providers,
        "problem": problem,
        "broken": registry.broken(),
    }
    return TemplateResponse(request, "admin/providers/providerconfig/pick.html", context)
