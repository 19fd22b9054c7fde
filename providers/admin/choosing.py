"""Form fields that offer what there is, in the place of a text that may be mistyped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from django import forms
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminSelectWidget

T = TypeVar("T")


def once(request: HttpRequest, name: str, load: Callable[[], T]) -> T:
    """What `load` returns, once for a request: a form is made several times for a page."""
    known: dict[str, Any] = request.__dict__.setdefault("_looked_up", {})
    if name not in known:
        known[name] = load()
    return cast("T", known[name])


def choice(
    field: Any, known: Iterable[str], empty: str = "", stored: str = ""
) -> forms.ChoiceField:
    """The form field of a text as a list of what is known; `empty` says what no choice means.

    What is stored is offered also where it is known no more: a row is not refused for a column that
    nobody changed.
    """
    choices = [(name, name) for name in sorted(known)]
    if stored and stored not in dict(choices):
        choices.append((stored, f"{stored} (no longer exists)"))
    return forms.ChoiceField(
        choices=[("", empty or "Choose"), *choices],
        required=field.required,
        label=field.label,
        help_text=field.help_text,
        widget=UnfoldAdminSelectWidget,
    )
