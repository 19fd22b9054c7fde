"""The shapes of answers: each is declared once, as a TypedDict whose name ends with `Shape`.

Its renderer returns it, so that mypy compares the two, and the description of the API is made of
it. The text of a field stands beside its type: `Annotated[int, "The number of files."]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NotRequired,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """The format of a text, by its name in JSON Schema."""

    name: str


@dataclass(frozen=True)
class Choices:
    """The values that a text can have, each with its label."""

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, values: Sequence[str]) -> Choices:
        return cls(tuple((value, value) for value in values))


Time = Annotated[str, Format("date-time")]
Uri = Annotated[str, Format("uri")]
UuidText = Annotated[str, Format("uuid")]
JsonObject = dict[str, Any]


class PageShape(TypedDict, Generic[T]):
    results: list[T]
    next: Uri | None


Reference = Callable[[Any], dict[str, Any]]
_TYPES: Mapping[Any, Mapping[str, Any]] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number", "format": "double"},
}


def is_shape(value: Any) -> bool:
    return is_typeddict(get_origin(value) or value)


def name_of(shape: Any) -> str:
    """Return its name in the description of the API. A page has that of its rows before its own."""
    rows = "".join(name_of(each) for each in get_args(shape))
    return rows + str((get_origin(shape) or shape).__name__).removesuffix("Shape")


def schema_of(shape: Any, reference: Reference) -> dict[str, Any]:
    """Return the shape as JSON Schema. `reference` makes a shape within it into a `$ref`."""
    declaration = get_origin(shape) or shape
    hints = get_type_hints(declaration, include_extras=True)
    rows = dict(zip(getattr(declaration, "__parameters__", ()), get_args(shape), strict=True))
    required = [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]
    text = declaration.__doc__
    return {
        "type": "object",
        **({"description": text} if text else {}),
        "properties": {name: _schema(hint, reference, rows) for name, hint in hints.items()},
        **({"required": sorted(required)} if required else {}),
    }


def _schema(hint: Any, reference: Reference, rows: Mapping[Any, Any]) -> dict[str, Any]:
    hint = rows.get(hint, hint)
    origin, parts = get_origin(hint), get_args(hint)
    if is_shape(hint):
        return reference(hint)
    if origin is NotRequired:
        return _schema(parts[0], reference, rows)
    if origin is Annotated:
        schema = _schema(parts[0], reference, rows)
        for note in parts[1:]:
            schema = _with(schema, note)
        return schema
    if origin in (Union, UnionType):
        (value,) = (each for each in parts if each is not NoneType)
        return _or_null(_schema(value, reference, rows))
    if origin is list:
        return {"type": "array", "items": _schema(parts[0], reference, rows)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(parts[1], reference, rows)}
    return dict(_TYPES[hint])


def _with(schema: dict[str, Any], note: Any) -> dict[str, Any]:
    if isinstance(note, Format):
        return {**schema, "format": note.name}
    if isinstance(note, Choices):
        lines = [f"* `{value}` - {label}" for value, label in note.labels]
        values = [value for value, _ in note.labels]
        return {"enum": values, **schema, "description": "\n".join(lines)}
    if isinstance(note, str):
        # The text comes before the list of the values.
        texts = [note, schema.get("description")]
        whole = {"allOf": [schema]} if "$ref" in schema else schema
        return {**whole, "description": "\n\n".join(filter(None, texts))}
    raise TypeError(f"{note!r} says nothing of a value.")


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {"oneOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}
