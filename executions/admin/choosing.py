"""Fields that offer the tenants that there are, in the place of a text that may be mistyped."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest

from executions.models import Tenant
from providers.admin.choosing import choice, once

# A page with more choices is slow, and nobody finds anything in it.
MOST = 500


def tenant_choice(request: HttpRequest, field: Any, nobody: str, stored: str = "") -> Any:
    """A form field of a tenant's slug as a list of them. `nobody` says what empty means.

    Of very many it stays a text, which is refused where it is no tenant's slug.
    """
    rows = Tenant.objects.values_list("slug", flat=True)
    slugs = once(request, "tenants", lambda: list(rows[: MOST + 1]))
    if len(slugs) <= MOST:
        return choice(field, slugs, nobody, stored)

    def check(slug: str) -> None:
        if slug not in ("", stored) and not Tenant.objects.filter(slug=slug).exists():
            raise ValidationError("Must be the slug of a tenant, or empty.")

    field.validators = [*field.validators, check]
    return field
