"""A stored secret is sent to nobody but the receiver it was entered for.

Whoever may change an address would otherwise have it sent to one of his own, and read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.views.decorators.debug import sensitive_variables

from providers.addresses import normalized
from providers.errors import InvalidConfiguration
from providers.schema import ConfigField, Schema, mask


@sensitive_variables()
def check_receivers(
    schema: Schema,
    entered: Mapping[str, Any],
    stored: Mapping[str, Any],
    cleaned: Mapping[str, Any],
) -> None:
    """Raises InvalidConfiguration naming each secret that has to be entered again.

    `entered` is what somebody wants, `cleaned` what would be stored of it. A secret that came
    empty or masked is kept only while every address is what it was. One of the environment serves
    only with the addresses of the environment, or the provider's own.
    """
    moved = _labels(schema, cleaned, stored)
    given = _labels(schema, cleaned, {})
    errors = {}
    for key, declared in schema.items():
        if not declared.secret:
            continue
        kept = stored.get(key) and entered.get(key) in (None, "", mask(str(stored[key])))
        if kept and cleaned.get(key) and moved:
            errors[key] = f"Enter it again, because {moved} changed."
        elif not cleaned.get(key) and declared.from_environment and given:
            errors[key] = (
                f"Enter it: the environment variable is not sent to an address entered as {given}."
            )
    if errors:
        text = " ".join(f"{key}: {problem}" for key, problem in errors.items())
        raise InvalidConfiguration(text, field=next(iter(errors)), errors=errors)


def _labels(schema: Schema, config: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The fields that lead elsewhere than before, by their labels."""
    return ", ".join(
        declared.label
        for key, declared in schema.items()
        if declared.decides_receiver
        and not _same(declared, config.get(key), before.get(key, declared.default))
    )


def _same(declared: ConfigField, value: Any, before: Any) -> bool:
    """Whether both lead to one place. Nothing leads to where the environment says."""
    own = declared.from_environment or declared.default or ""
    return normalized(str(value or own)) == normalized(str(before or own))
