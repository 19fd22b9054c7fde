"""Bodies in JSON: how much of a request's an endpoint takes, and the shapes of answers.

A large body of a request is read beside the requests of others: a few at once, and of one tenant
never all.

Each shape is declared once, as a TypedDict whose name ends with `Shape`. Its renderer returns it,
so that mypy compares the two, and the description of the API is made of it. The text of a field
stands beside its type: `Annotated[int, "The number of files."]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NotRequired,
    Protocol,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from executions.kernel.background import Executor
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.json_reading import (
    MOST_VALUES,
    SMALL_BYTES,
    Bounds,
    CannotRead,
    Read,
    read_file,
    read_text,
)
from providers.json_values import TooMuch

# In the environment of a request: the future of what its body says, where that has been read, and
# what the server holds of it, which may grow (`Share`).
BODY, HELD = "cofferdam.body", "cofferdam.held"
# Of a request that has code, files or arguments, and of any other.
LARGE = Bounds(1 << 40, MOST_VALUES)
SMALL = Bounds(1024 * 1024, 10_000)
# Of a call of a tool over MCP, which the SDK reads once more, and checks, in this process.
CALL = Bounds(1 << 40, 20_000)
# Of a key that only reads, and of what an MCP client says to begin with.
TINY = Bounds(SMALL_BYTES, 1000, depth=32)

AT_ONCE = 2
OF_ONE_TENANT = 100
# Whose long texts are decoded where they are read.
_ENCODED = ("content_base64",)
MIB = 1024 * 1024


class Held(Protocol):
    def hold_unpacked(self, owner: str, size: int) -> None: ...


class BodyTooLarge(InvalidConfiguration):
    @property
    def http_status(self) -> int:
        return 413


def submit_read(body: Any, size: int, owner: str) -> Future[Read]:
    """What a temporary file of so many bytes says in JSON, with its long texts of base64 decoded;
    `owner` is the tenant. It holds up nobody else.

    Raises RateLimited for a tenant that has too many of them. The future raises TooMuch, ValueError
    for what is no JSON, and CannotRead.
    """
    return _readers.submit(owner, lambda: read_file(body, size, _ENCODED))


def value_of(read: Future[Read], bounds: Bounds) -> Any:
    """What was read. Raises InvalidConfiguration for what is no JSON, BodyTooLarge for too much of
    it, and ProviderUnavailable where it could not be read."""
    try:
        found = read.result()
        if found.values > bounds.values:
            raise TooMuch(f"Must hold at most {bounds.values} values")
    except TooMuch as error:
        raise BodyTooLarge(f"body: {error}.", field="body") from None
    except CannotRead as error:
        raise ProviderUnavailable(
            f"The body could not be read now: {error}.", retry_after=5
        ) from error
    except ValueError as error:
        raise InvalidConfiguration(f"body: Must be JSON: {error}.", field="body") from None
    return found.value


def reading(text: bytes, bounds: Bounds) -> Future[Read]:
    """A small text, read in place."""
    read: Future[Read] = Future()
    try:
        read.set_result(read_text(text, bounds))
    except ValueError as error:
        read.set_exception(error)
    return read


def ensure_text_size(text: bytes, bounds: Bounds) -> None:
    """Raises BodyTooLarge."""
    if len(text) > bounds.bytes:
        raise BodyTooLarge(f"body: Must be at most {bounds.bytes} bytes.", field="body")


def requests_of(size: int) -> int:
    """As how many requests one with so large a body counts: one more for each megabyte begun, from
    the second on."""
    return max(1, -(-size // MIB))


_readers = Executor(
    "body-reader",
    threads=AT_ONCE,
    of_one=AT_ONCE - 1,
    most=OF_ONE_TENANT,
    refusal=f"{OF_ONE_TENANT} large requests of the tenant are being read. Send it again.",
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
