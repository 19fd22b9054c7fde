"""Names that people give: shown without what moves other text, and not given with it."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError

from providers.hidden_characters import visible


def check_visible(text: str) -> None:
    """A validator: raises ValidationError for characters that are not seen or that move others."""
    if visible(text) != text:
        raise ValidationError(
            "Must not contain invisible characters or characters that reorder text."
        )


def refuse_hidden(form: Any, name: str = "name") -> None:
    """Have a form class refuse them in this field, if it has it."""
    if (field := form.base_fields.get(name)) is not None:
        field.validators = [*field.validators, check_visible]
