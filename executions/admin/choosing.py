"""Fields that offer the tenants that there are, in the place of a text that may be mistyped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest

from executions.runs.models import Execution
from executions.runs.routing import MOST_NAMED, check_languages, check_providers, none_of_this_name
from executions.tenants.models import Tenant
from providers.admin.choosing import choice, once
from providers.errors import InvalidConfiguration

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


def refuse_unknown(form: Any, stored: Any = None) -> None:
    """Have a form class refuse languages and providers that there are not.

    What `stored`, the row, has already is kept: a provider may be gone by now. What there is is
    looked up only for what is sent.
    """
    for name, check in (("languages", check_languages), ("providers", check_providers)):
        if (field := form.base_fields.get(name)) is not None:
            kept = frozenset(getattr(stored, name, "").split())
            field.validators = [*field.validators, partial(_validate, check, kept)]


def check_has_run(slug: str) -> None:
    """Raises ValidationError for what is no tenant, and was none of any record that is kept."""
    known = Execution.objects.filter(tenant_slug=slug)
    if not slug or Tenant.objects.filter(slug=slug).exists() or known.exists():
        return
    there = Tenant.objects.order_by("slug").values_list("slug", flat=True)[: MOST_NAMED + 1]
    raise ValidationError(none_of_this_name(slug, there))


def _validate(
    check: Callable[[str, frozenset[str]], None], kept: frozenset[str], text: str
) -> None:
    try:
        check(text, kept)
    except InvalidConfiguration as error:
        raise ValidationError(error.message) from None
