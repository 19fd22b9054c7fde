"""Mark on each page what the ledger does not cover."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import FieldDoesNotExist

from executions.ledger.bindings import NOT_PROVEN


def mark_pages() -> None:
    """Give each page what its sign explains. Call it when all pages are registered."""
    for model, page in admin.site._registry.items():
        columns = NOT_PROVEN.get(model._meta.label_lower, {})
        shown = _shown(page)
        page.not_proven = [  # type: ignore[attr-defined]
            ("" if name == "*" else _label(model, name), reason)
            for name, reason in columns.items()
            if name == "*" or name in shown
        ]


def _label(model: Any, name: str) -> str:
    try:
        return str(model._meta.get_field(name).verbose_name)
    except FieldDoesNotExist:
        return name.replace("_", " ")


def _shown(page: Any) -> set[str]:
    named = {*page.list_display, *page.readonly_fields, *(page.fields or ())}
    for _, options in page.fieldsets or ():
        named.update(options["fields"])
    return {name for name in named if isinstance(name, str)}
