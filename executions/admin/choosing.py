"""Fields that offer the tenants that there are, in the place of a text that may be mistyped."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest

from executions.models import Execution, Tenant
from executions.services.presentation import visible
from providers import registry
from providers.admin.choosing import choice, once
from providers.languages import TABLE, normalize_language
from providers.models import ProviderConfig

# A page with more choices is slow, and nobody finds anything in it.
MOST = 500
# How many of what there is a refusal names.
MOST_NAMED = 30


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
    for name, check in (("languages", _check_languages), ("providers", _check_providers)):
        if (field := form.base_fields.get(name)) is not None:
            kept = frozenset(getattr(stored, name, "").split())
            field.validators = [*field.validators, partial(check, kept)]


def check_has_run(slug: str) -> None:
    """Raises ValidationError for what is no tenant, and was none of any record that is kept."""
    known = Execution.objects.filter(tenant_slug=slug)
    if not slug or Tenant.objects.filter(slug=slug).exists() or known.exists():
        return
    there = Tenant.objects.order_by("slug").values_list("slug", flat=True)[: MOST_NAMED + 1]
    raise ValidationError(_refusal(slug, there))


def _check_languages(kept: frozenset[str], text: str) -> None:
    # Commands are what sessions run beside code.
    there = {"command", *(known.name for known in TABLE)}
    words = {normalize_language(word) for word in text.split()}
    for word in sorted(words - there - kept):
        # A template may be named as a language, and nobody but its provider knows of it.
        if not Execution.objects.filter(language=word).exists():
            raise ValidationError(_refusal(word, sorted(there)))


def _check_providers(kept: frozenset[str], text: str) -> None:
    if not (unknown := set(text.split()) - kept):
        return
    rows = ProviderConfig.objects.values_list("provider_id", flat=True)
    there = {*registry.all_providers(), *rows}
    if unknown := unknown - there:
        raise ValidationError(_refusal(min(unknown), sorted(there)))


def _refusal(word: str, there: Iterable[str]) -> str:
    names = list(there)
    more = ", …" if len(names) > MOST_NAMED else ""
    told = ", ".join(names[:MOST_NAMED]) or "none"
    return f"{visible(word[:100])}: There is none of this name. There are: {told}{more}"
