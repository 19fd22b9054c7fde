"""Requests that are declared once: what validates a value also describes it, as JSON Schema.

A declaration is a dataclass whose annotations say what each field may be. It validates however it
is made, so that a caller in Python meets the rules which a caller over HTTP meets. What of it a
request may give is said by shapes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast, dataclass_transform, get_args, get_origin

from django.conf import settings
from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import (
    list_schema,
    no_info_after_validator_function,
    no_info_before_validator_function,
)

from providers.errors import InvalidConfiguration

T = TypeVar("T")
Says = Mapping[str, Any]

# No "1" for 1, no true for 1, no key that is not declared.
STRICT = ConfigDict(strict=True, extra="forbid")

_PROBLEMS = {
    "missing": "This field is required.",
    "missing_argument": "This field is required.",
    "extra_forbidden": "Unknown field.",
    "unexpected_keyword_argument": "Unknown field.",
    "string_unicode": "Must hold neither NUL nor lone surrogates.",
    "string_type": "Must be a string.",
    "string_too_short": "Must be at least {min_length} characters long.",
    "string_too_long": "Must be at most {max_length} characters long.",
    "int_type": "Must be a whole number.",
    "float_type": "Must be a number.",
    "finite_number": "Must be a finite number.",
    "greater_than": "Must be more than {gt}.",
    "greater_than_equal": "Must be at least {ge}.",
    "less_than_equal": "Must be at most {le}.",
    "bool_type": "Must be true or false.",
    "dict_type": "Must be an object.",
    "mapping_type": "Must be an object.",
    "model_type": "Must be an object.",
    "list_type": "Must be a list.",
    "too_long": "Must be at most {max_length}.",
    "literal_error": "Must be one of: {expected}.",
}


def refuse(name: str, problem: str) -> NoReturn:
    raise InvalidConfiguration(f"{name}: {problem}", field=name)


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule beyond types and bounds. `check` returns the value, or raises ValueError with what is
    wrong with it; `says` is what JSON Schema can say of the rule.
    """

    check: Callable[[Any], Any]
    says: Says | Callable[[], Says] = field(default_factory=dict)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        says = self.says() if callable(self.says) else self.says
        return {**handler(core), **says}


@dataclass(frozen=True)
class Members:
    """How many members a list or a mapping may have: counted before any is looked at, and of a list
    the first bad one ends the check. Every one that a request declares has it.
    """

    most: int
    least: int = 0

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if not issubclass(get_origin(source), Sequence):
            return no_info_before_validator_function(self._count, handler(source))
        member = handler.generate_schema(get_args(source)[0])
        members = list_schema(
            member, min_length=self.least, max_length=self.most, fail_fast=True, strict=True
        )
        return no_info_before_validator_function(self._count, members)

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core)
        if schema.get("type") == "array":
            return schema
        return {**schema, "maxProperties": self.most}

    def _count(self, given: Any) -> Any:
        if isinstance(given, (list, tuple, Mapping)) and len(given) > self.most:
            context = {"max_length": self.most}
            raise PydanticCustomError("too_long", "Must be at most {max_length}.", context)
        return list(given) if isinstance(given, tuple) else given


def at_most(setting: str) -> Rule:
    """A bound that the installation sets."""

    def check(value: float) -> float:
        if value > (most := getattr(settings, setting)):
            raise ValueError(f"Must be at most {most}.")
        return value

    return Rule(check, lambda: {"maximum": getattr(settings, setting)})


def one_of(values: Sequence[str]) -> Rule:
    def check(value: str) -> str:
        if value not in values:
            raise ValueError(f"Must be one of: {', '.join(values)}.")
        return value

    return Rule(check, {"enum": list(values)})


@dataclass_transform(frozen_default=True)
def declared(cls: type[T]) -> type[T]:
    """A frozen dataclass that validates its fields. To make one raises InvalidConfiguration, which
    names the field at fault; `__post_init__` has the rules between fields.
    """
    made: Any = validated(frozen=True, config=STRICT)(cls)
    make = made.__init__
    names = [each.name for each in fields(made) if each.init]

    @wraps(make)
    def validate(self: Any, *args: Any, **given: Any) -> None:
        try:
            make(self, **dict(zip(names, args, strict=False)), **given)
        except ValidationError as error:
            refuse_invalid(error)

    made.__init__ = validate
    return cast("type[T]", made)


def refuse_invalid(error: ValidationError) -> NoReturn:
    """Raises InvalidConfiguration with the first of what is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    refuse(_name(first["loc"]), _problem(first))


def _name(place: tuple[int | str, ...]) -> str:
    """The field at fault, or where in it: `files[0].path`. Keys that callers make up are not shown,
    so of an object and of a list of values it is the whole."""
    name = str(place[0])
    if len(place) > 1 and name == "files":
        name += f"[{place[1]}]" + "".join(f".{shown(str(each))}" for each in place[2:])
    return name


def _problem(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    return _PROBLEMS.get(error["type"], "Does not match the declaration.").format(**context)


def shown(key: str) -> str:
    """A key the caller made up, fit to be shown in an answer."""
    return "".join(c if c.isprintable() else "\ufffd" for c in key[:100])
