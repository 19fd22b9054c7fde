"""What pages of the admin say beside their own: what a list is for, and a row's history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django import template
from django.db.models import Model

from executions.capabilities.dashboard.service import NEW_BELOW, Step
from executions.capabilities.dashboard.service import first_steps as steps_of
from executions.kernel.presentation import EMPTY, in_time
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers.models import ConfigVersion, ProviderConfig

register = template.Library()
register.filter(in_time)

_SHOWN = 50


@register.simple_tag
def empty_list(options: Any) -> str:
    """What fills a list that is empty; "" where nothing is known of it."""
    return EMPTY.get(options.label_lower, "")


@register.filter
def has_badge(items: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an entry of the menu has a count, so that its group must be open."""
    return any(item.get("badge") and str(item.get("badge_callback", "")) for item in items)


@register.simple_tag
def versions_of(row: Model) -> list[ConfigVersion]:
    """The last versions of a row that is kept in versions, newest first."""
    named = row.provider_id if isinstance(row, ProviderConfig) else ""
    subject = named or f"{row._meta.label_lower}:{row.pk}"
    versions = ConfigVersion.objects.filter(subject=subject).defer("content")
    return list(versions.order_by("-version")[:_SHOWN])


@register.simple_tag
def ledger_entry_of(row: Model) -> LedgerEntry | None:
    if not isinstance(row, Execution):
        return None
    return LedgerEntry.objects.filter(execution_id=row.pk).defer("statement").first()


@register.simple_tag(takes_context=True)
def first_steps(context: template.Context) -> list[Step]:
    counted = context["figures"].total
    return steps_of(context["request"].user) if counted < NEW_BELOW else []
