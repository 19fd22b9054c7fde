"""One declaration per configuration field: validation, admin form and API description follow.

Types are exact. JSON's `true` is no integer, "5" is no number, and a key that no field declares
is refused, so that a misspelt option can never be ignored in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from providers.errors import InvalidConfiguration

FieldType = Literal["string", "integer", "number", "boolean"]

_PYTHON_TYPES: dict[FieldType, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}

# Of names that callers make up: how many are told, and how many characters of each.
MOST_UNKNOWN, MOST_SHOWN = 10, 100

_MASK = "••••"


@dataclass(frozen=True)
class ConfigField:
    """One configuration value. `min` and `max` bound numbers, and the length of strings.

    `address` says whether the value decides where the provider's secrets are sent, or by what the
    receiver is known: when it changes, they are asked for anew. None leaves that open, and a text
    that may hold anything then counts as one. `environment` are the variables that stand in for an
    empty value, the first one that is set. `group` is the heading of the form that it stands under.
    A text with `several` holds any number of values, one in each line (`lines_of`).

    A declaration that contradicts itself (a default outside its own options) raises ValueError
    when its module is imported, not when an admin saves.
    """

    type: FieldType
    label: str
    required: bool = False
    secret: bool = False
    placeholder: str = ""
    description: str = ""
    default: Any = None
    options: tuple[str, ...] = ()
    min: int | float | None = None
    max: int | float | None = None
    multiline: bool = False
    several: bool = False
    address: bool | None = None
    environment: tuple[str, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        if self.type not in _PYTHON_TYPES:
            raise ValueError(f"{self.label}: unknown type {self.type!r}.")
        if self.options and self.type != "string":
            raise ValueError(f"{self.label}: only a string can have options.")
        if self.secret and self.type != "string":
            raise ValueError(f"{self.label}: only a string can be secret.")
        if self.address and self.type != "string":
            raise ValueError(f"{self.label}: only a string can be an address.")
        if self.default is not None and (problem := self.error(self.default)):
            raise ValueError(f"{self.label}: its default is not valid. {problem}")

    @property
    def decides_receiver(self) -> bool:
        """Whether a change of it may send the provider's secrets to somebody else."""
        if self.address is not None:
            return self.address
        return self.type == "string" and not self.secret and not self.options

    @property
    def from_environment(self) -> str:
        """What the environment has for an empty value, empty where it has nothing."""
        return next((found for name in self.environment if (found := os.environ.get(name))), "")

    def error(self, value: Any) -> str | None:
        """Why `value` is refused, or None."""
        if value is None or (value == "" and self.type == "string"):
            return "This field is required." if self.required else None
        if not _is_of(self.type, value):
            return f"Must be of type {self.type}."
        if self.type == "number" and not _is_finite(value):
            return "Must be a finite number."
        if isinstance(value, str) and not value.strip() and self.required:
            return "This field is required."
        if isinstance(value, str) and not _is_text(value):
            return "Must be text without NUL and lone surrogates."
        if self.secret and value.startswith(_MASK):
            return "Is masked: enter the whole value."
        if self.options and value not in self.options:
            return f"Must be one of: {', '.join(self.options)}."
        return self._range_error(value)

    def _range_error(self, value: Any) -> str | None:
        if self.type == "boolean":
            return None
        measured = len(value) if self.type == "string" else value
        unit = " characters long" if self.type == "string" else ""
        if self.min is not None and measured < self.min:
            return f"Must be at least {self.min}{unit}."
        if self.max is not None and measured > self.max:
            return f"Must be at most {self.max}{unit}."
        return None


Schema = Mapping[str, ConfigField]


def lines_of(text: object) -> list[str]:
    """Return the values of a field with `several`, each once, in their order."""
    lines = (line.strip() for line in str(text or "").splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def _is_of(wanted: FieldType, value: Any) -> bool:
    return isinstance(value, _PYTHON_TYPES[wanted]) and (
        wanted == "boolean" or not isinstance(value, bool)
    )


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def validate(schema: Schema, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with defaults filled in. Raises InvalidConfiguration naming every refused field
    that there is, and the first ten that there are not."""
    if not isinstance(config, Mapping):
        raise InvalidConfiguration("The configuration must be a JSON object.")
    unknown = islice((str(key) for key in config if key not in schema), MOST_UNKNOWN)
    errors = {key[:MOST_SHOWN]: "Unknown field." for key in unknown}
    cleaned: dict[str, Any] = {}
    for key, declared in schema.items():
        value = config.get(key)
        if value is None or (value == "" and declared.type == "string"):
            value = declared.default
        if problem := declared.error(value):
            errors[key] = problem
        cleaned[key] = value
    if errors:
        first = next(iter(errors))
        text = " ".join(f"{key}: {problem}" for key, problem in errors.items())
        raise InvalidConfiguration(text, field=first, errors=errors)
    return cleaned


def describe(schema: Schema) -> dict[str, dict[str, Any]]:
    """The schema as JSON: type, required and label always, the rest where declared."""
    described: dict[str, dict[str, Any]] = {}
    for key, declared in schema.items():
        entry: dict[str, Any] = {
            "type": declared.type,
            "required": declared.required,
            "label": declared.label,
        }
        optional = {
            "secret": declared.secret or None,
            "placeholder": declared.placeholder or None,
            "description": declared.description or None,
            "default": declared.default,
            "options": list(declared.options) or None,
            "multiline": declared.multiline or declared.several or None,
            "min": declared.min,
            "max": declared.max,
        }
        described[key] = entry | {k: v for k, v in optional.items() if v is not None}
    return described


def mask(value: str) -> str:
    """How a secret is shown: dots and its last 4 characters, dots alone when it is short."""
    if not value:
        return ""
    return _MASK + (value[-4:] if len(value) >= 12 else "")


def mask_secrets(schema: Schema, config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` that is safe to show.

    A key the schema does not know is masked too: it may be a secret of an older version.
    """
    return {
        key: mask(str(value)) if value and (key not in schema or schema[key].secret) else value
        for key, value in config.items()
    }


def keep_untouched_secrets(
    schema: Schema, new: Mapping[str, Any], stored: Mapping[str, Any]
) -> dict[str, Any]:
    """`new`, with every secret that came back masked or empty replaced by the stored one."""
    merged = dict(new)
    for key, declared in schema.items():
        if not declared.secret or not stored.get(key):
            continue
        if merged.get(key) in (None, "", mask(str(stored[key]))):
            merged[key] = stored[key]
    return merged
