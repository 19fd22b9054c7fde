"""Saying on each page what of it the ledger does not prove."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from executions.services.ledger.bindings import NOT_PROVEN

_TEMPLATE = "admin/not_proven.html"


def mark_pages() -> None:
    """Called once, when every page is registered."""
    for model, page in admin.site._registry.items():
        columns = NOT_PROVEN.get(model._meta.label_lower, {})
        shown = _shown(page)
        page.not_proven = [  # type: ignore[attr-defined]
            ("" if name == "*" else name.replace("_", " "), reason)
            for name, reason in columns.items()
            if name == "*" or name in shown
        ]
        if page.not_proven:  # type: ignore[attr-defined]
            page.list_before_template = page.change_form_before_template = _TEMPLATE  # type: ignore[attr-defined]


def _shown(page: Any) -> set[str]:
    named = {*page.list_display, *page.readonly_fields, *(page.fields or ())}
    for _, options in page.fieldsets or ():
        named.update(options["fields"])
    return {name for name in named if isinstance(name, str)}
