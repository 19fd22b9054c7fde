"""The tools that a caller offers to its code: schemas, and the arguments of calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from executions.kernel.declarations import STORABLE, STRICT, Body, Members, Rule, declared, refuse
from executions.kernel.text import to_json, without_surrogates
from providers.runtime.guest.protocol import CALL_ANSWER_BYTES, NAME_BYTES

MOST_TOOLS = 32
SCHEMA_BYTES = 16 * 1024

_NAME = rf"^[A-Za-z][A-Za-z0-9_]{{0,{NAME_BYTES - 1}}}$"
# Not into what is no schema, such as a default, which nobody has looked at.
_REF = re.compile(r"#/\$defs/[A-Za-z0-9_.-]+")
# Of the module that code imports them from.
_TAKEN = frozenset({"ToolError"})

# Keywords whose value is a schema, a list of them, or an object of them by name.
_ONE = ("items", "additionalProperties", "not", "contains")
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "$defs")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: Any) -> bool:
    named = value if isinstance(value, list) else [value]
    return _are_texts(named) and 0 < len(named) == len(set(named)) and set(named) <= _TYPES


_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = tuple(
    f"{end}{what}"
    for end in ("min", "max")
    for what in ("Length", "Items", "Properties", "Contains")
)
# What the value of each other one must be. The last ones say something to people alone.
_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_COUNTS, _is_count),
    "type": _are_types,
    "required": _are_texts,
    "enum": _is_list,
    "const": lambda _: True,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "$ref": lambda value: _is_text(value) and bool(_REF.fullmatch(value)),
    **dict.fromkeys(("title", "description", "format", "$comment"), _is_text),
    "default": lambda _: True,
    "examples": _is_list,
    "deprecated": lambda value: isinstance(value, bool),
}
# What a schema may be made of.
KEYWORDS = frozenset((*_ONE, *_LIST, *_NAMED, *_PLAIN))
_OF_SCHEMA = {
    "properties": {"type": {"const": "object"}},
    "required": ["type"],
    "propertyNames": {"enum": sorted((*KEYWORDS, "$schema"))},
}


def _schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if parameters.get("type") != "object":
        raise ValueError("The parameters must be a schema for a tool, of type object.")
    # As deep as it is within the request's list of tools.
    text = to_json([[dict(parameters)]])[2:-2]
    if without_surrogates(text) != text:
        raise ValueError("The parameters of a tool must hold no lone surrogates.")
    if len(text.encode()) > SCHEMA_BYTES:
        raise ValueError(f"The parameters of a tool must be at most {SCHEMA_BYTES} bytes.")
    # A validator goes over to another version where a part names it; this one is ours.
    parameters = {name: value for name, value in parameters.items() if name != "$schema"}
    try:
        _require_schema(parameters)
    except RecursionError:
        raise ValueError("The parameters are not a valid schema: too deep.") from None
    return parameters


def _require_schema(schema: Any) -> None:
    """By hand: the check of a library takes half a millisecond for each part, and there are
    thousands in a request that means harm."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError("The parameters are not a valid schema: a part of it is not an object.")
    for name, value in schema.items():
        if name not in KEYWORDS:
            raise ValueError(
                f"The parameters are not a valid schema: {str(name)[:50]!r} is not a supported "
                "keyword."
            )
        parts: Iterable[Any] = ()
        if name in _ONE:
            is_one, parts = True, (value,)
        elif name in _LIST:
            is_one = isinstance(value, list) and bool(value)
            parts = value if is_one else ()
        elif name in _NAMED:
            is_one = isinstance(value, Mapping)
            parts = value.values() if is_one else ()
        else:
            is_one = _PLAIN[name](value)
        if not is_one:
            hint = " It must be #/$defs/NAME." if name == "$ref" else ""
            raise ValueError(
                f"The parameters are not a valid schema: {name} has an invalid value.{hint}"
            )
        for part in parts:
            _require_schema(part)


class Tool(BaseModel):
    """A function of the caller that the code may call."""

    model_config = STRICT

    name: Annotated[
        str,
        Field(
            pattern=_NAME, description="The name that the code imports: `from tools import NAME`."
        ),
    ]
    description: Annotated[str, Field(max_length=2000), STORABLE] = ""
    parameters: Annotated[
        Mapping[str, Any],
        Rule(_schema, _OF_SCHEMA),
        Field(description="The JSON Schema of its arguments: an object, without patterns."),
    ]
    writes: Annotated[
        bool,
        Field(
            description="The tool changes data: each call needs approval before it is "
            "sent to the caller."
        ),
    ] = False


def _apart(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    for name in names:
        if keyword.iskeyword(name) or name in _TAKEN:
            raise ValueError(f"{name} cannot be the name of a tool.")
    if len(set(names)) < len(names):
        raise ValueError("Two tools have the same name.")
    return tuple(tools)


Tools = Annotated[Sequence[Tool], Members(MOST_TOOLS), Rule(_apart)]


def to_stored(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as JSON, from which they can be declared again."""
    return [tool.model_dump() for tool in tools]


MOST_CHARACTERS = 4000


@declared
class ToolAnswer:
    """What a call came to: a result, null where it is left out, or an error for the code."""

    result: Annotated[
        Any,
        Field(description=f"At most {CALL_ANSWER_BYTES} bytes of JSON, including the envelope."),
    ] = None
    error: Annotated[
        Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS), STORABLE] | None,
        Field(description="The error that is raised in the code, as ToolError."),
    ] = None

    def __post_init__(self) -> None:
        if self.error is not None and self.result is not None:
            refuse("error", "Give a result or an error, not both.")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            refuse("result", "Must hold no lone surrogates.")
        except ValueError as error:
            refuse("result", f"Must be JSON: {error}.")
        if size > CALL_ANSWER_BYTES:
            refuse("result", f"Must be at most {CALL_ANSWER_BYTES} bytes; send data as files.")

    @property
    def text(self) -> str:
        """As it is kept, and handed to the code."""
        if self.error is not None:
            return to_json({"error": self.error})
        return to_json({"result": self.result})


TOOL_ANSWER = Body(
    ToolAnswer,
    "ToolAnswer",
    says={
        "anyOf": [
            {"properties": {"error": {"type": "null"}}},
            {"properties": {"result": {"type": "null"}}},
        ]
    },
)
