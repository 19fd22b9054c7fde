"""Which tools a request declares, and whether arguments are what one of them takes.

Both the schema and the arguments are somebody's who may mean harm, and the check is made in the
service: a schema has no regular expression and leads nowhere, and a check has so many steps.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from pydantic import BaseModel, Field
from referencing import Registry
from referencing.exceptions import Unresolvable

from executions.services.declared import STRICT, Rule
from executions.services.kinds import STORABLE
from executions.text import from_json, to_json
from providers.guest.protocol import CALL_BYTES, NAME_BYTES

MOST_TOOLS = 32
SCHEMA_BYTES = 16 * 1024
# Keywords of a schema that are applied in one check of arguments: a moment of a processor.
MOST_STEPS = 20_000

_NAME = rf"^[A-Za-z][A-Za-z0-9_]{{0,{NAME_BYTES - 1}}}$"
# Not into what is no schema, such as a default, which nobody has looked at.
_REF = re.compile(r"#/\$defs/[A-Za-z0-9_.-]+")
# Of the module that code imports them from.
_TAKEN = frozenset({"ToolError"})

# Keywords whose value is a schema, a list of them, or an object of them by name.
_ONE = ("items", "additionalProperties", "not", "contains")
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs")
_PLAIN = (
    *("type", "required", "enum", "const", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains", "$ref"),
)
# What says something to people alone.
_SAID = (
    "title",
    "description",
    "default",
    "examples",
    "format",
    "$comment",
    "deprecated",
)
_KNOWN = frozenset((*_ONE, *_LIST, *_NAMED, *_PLAIN, *_SAID))


class _TooLong(Exception):
    """The check takes more steps than it may."""


_steps: ContextVar[list[int]] = ContextVar("steps")


def _counted(keyword_of: Any) -> Any:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        left = _steps.get()
        left[0] -= 1
        if left[0] < 0:
            raise _TooLong
        yield from keyword_of(validator, value, instance, schema) or ()

    return check


_Validator: Any = extend(
    Draft202012Validator,
    {
        name: _counted(each)
        for name, each in Draft202012Validator.VALIDATORS.items()
        if name in _KNOWN
    },
)


def _schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if parameters.get("type") != "object":
        raise ValueError("The parameters must be a schema for a tool, of type object.")
    if len(to_json(dict(parameters)).encode(errors="replace")) > SCHEMA_BYTES:
        raise ValueError(f"The parameters of a tool must be at most {SCHEMA_BYTES} bytes.")
    # A validator goes over to another version where a part names it; this one is ours.
    parameters = {name: value for name, value in parameters.items() if name != "$schema"}
    try:
        _require_known(parameters)
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(
            f"The parameters are no schema for a tool: {error.message[:200]}"
        ) from None
    except RecursionError:
        raise ValueError("The parameters are no schema for a tool: too deep.") from None
    return parameters


def _require_known(schema: Any) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError("The parameters are no schema for a tool: a part of it is no object.")
    for name, value in schema.items():
        if name not in _KNOWN:
            raise ValueError(
                f"The parameters are no schema for a tool: {str(name)[:50]!r} is not among the "
                "keywords that are understood here."
            )
        if name in _ONE:
            _require_known(value)
        elif name in _LIST:
            for each in value if isinstance(value, list) else ():
                _require_known(each)
        elif name in _NAMED:
            for each in value.values() if isinstance(value, Mapping) else ():
                _require_known(each)
        elif name == "$ref" and not _REF.fullmatch(str(value)):
            raise ValueError("The parameters are no schema for a tool: $ref must be #/$defs/NAME.")


class Tool(BaseModel):
    """A function of the caller's, which code that runs may call."""

    model_config = STRICT

    name: Annotated[
        str,
        Field(pattern=_NAME, description="What code imports: `from tools import NAME`."),
    ]
    description: Annotated[str, Field(max_length=2000), STORABLE] = ""
    parameters: Annotated[
        Mapping[str, Any],
        Rule(_schema, {"type": "object"}),
        Field(description="JSON Schema of its arguments, an object; without patterns."),
    ]
    writes: Annotated[
        bool, Field(description="A call is handed out only once somebody has approved it.")
    ] = False


def _apart(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    for name in names:
        if keyword.iskeyword(name) or name in _TAKEN:
            raise ValueError(f"{name} cannot be the name of a tool.")
    if len(set(names)) < len(names):
        raise ValueError("Two have the same name, which cannot be the name of a tool twice.")
    return tuple(tools)


Tools = Annotated[Sequence[Tool], Field(max_length=MOST_TOOLS), Rule(_apart)]


def stored(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As JSON, from which they can be declared again."""
    return [tool.model_dump() for tool in tools]


def read_arguments(tool: Tool, sent: bytes) -> tuple[str, str]:
    """The arguments as JSON text, and what is wrong with them: "" where nothing is."""
    text = sent[: CALL_BYTES + 1].decode("utf-8", "replace")
    try:
        arguments = from_json(sent) if len(sent) <= CALL_BYTES else None
        # Written anew: no two readings of it by those who get it.
        written = to_json(arguments)
        written.encode()
    except (ValueError, RecursionError):
        return to_json(text[:1000]), "they are not JSON"
    if not isinstance(arguments, dict):
        return written, "they are no object"
    return written, _problem(tool, arguments)


def _problem(tool: Tool, arguments: dict[str, Any]) -> str:
    steps = _steps.set([MOST_STEPS])
    try:
        # Without a registry it would fetch what a schema names.
        validator = _Validator(tool.parameters, registry=Registry())
        error = best_match(validator.iter_errors(arguments))
    except _TooLong:
        return "they take too long to check"
    except (RecursionError, Unresolvable, OverflowError, ArithmeticError):
        return "the schema of the tool cannot be applied to them"
    finally:
        _steps.reset(steps)
    if error is None:
        return ""
    place = "".join(f"[{part!r}]" for part in list(error.absolute_path)[:10])
    return f"{place[:100]} {error.message[:300]}".strip()
