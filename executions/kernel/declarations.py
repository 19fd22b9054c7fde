"""Requests that are declared once: what validates a value also describes it, as JSON Schema.

The kinds of values with their bounds, the shapes of bodies and queries, and pages of lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import wraps
from typing import (
    Annotated,
    Any,
    Generic,
    NoReturn,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)
from uuid import UUID

from django.conf import settings
from django.db.models import Model, QuerySet
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.dataclasses import dataclass as validated
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import (
    list_schema,
    no_info_after_validator_function,
    no_info_before_validator_function,
)

from executions.kernel.text import MOST_FOLDERS, MOST_NAME_BYTES, from_text, is_storable
from providers.errors import InvalidConfiguration
from providers.runtime.guest.names import unescape

T = TypeVar("T")
Says = Mapping[str, Any]

MAX_CODE_BYTES = 1024 * 1024
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


_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_LONGEST_NUMBER = 15


@dataclass(eq=False)
class Body(Generic[T]):
    """The body of a request: a JSON object with the fields of a declaration, without `ours`.

    `only` has fields of which Python may give other values too. Null stands for a key left out,
    unless `has_null`. `says` is what JSON Schema says of several fields together.
    """

    declaration: type[T]
    name: str
    ours: tuple[str, ...] = ()
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_null: bool = False
    says: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """The keys that a caller may give, in their order."""
        return tuple(name for name in _keys(self.declaration) if name not in self.ours)

    def read(self, body: Any, **ours: Any) -> T:
        """Raises InvalidConfiguration, which names the key at fault, or `body`."""
        keys = _keys(self.declaration)
        if body is None and not any(keys.values()):
            body = {}
        if not isinstance(body, dict):
            refuse("body", "Must be a JSON object.")
        for key in body:
            if key not in keys or key in self.ours:
                refuse(shown(key), f"Unknown field. Known are: {', '.join(self.known)}.")
        given = body
        if not self.has_null:
            given = {key: value for key, value in body.items() if value is not None}
        for key, values in self.only.items():
            if key in given and given[key] not in values:
                refuse(key, f"Must be one of: {', '.join(values)}.")
        try:
            return self.declaration(**given, **ours)
        except ValidationError as error:
            refuse_invalid(error)

    def schema(self) -> dict[str, Any]:
        """It in JSON Schema, with the bounds that are in force now."""
        schema = _schema(self.declaration)
        required = [name for name in schema.get("required", ()) if name in self.known]
        properties = {}
        for name in self.known:
            each = schema["properties"][name]
            if name in self.only:
                each = {**each, "enum": list(self.only[name])}
            if name not in required and not self.has_null:
                each = _or_null(each)
            properties[name] = each
        described: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            described["required"] = required
        elif not self.says:
            described["type"] = ["object", "null"]
        return {**described, "additionalProperties": False, **self.says}


@dataclass(eq=False)
class Query(Generic[T]):
    """The parameters of a request, whose texts are read as what is declared.

    `headers` are those that come as headers. Where `empty_is_none`, an empty text stands for a
    parameter left out; where `is_open`, there are others that are not its own.
    """

    declaration: type[T]
    headers: tuple[str, ...] = ()
    empty_is_none: bool = False
    is_open: bool = False

    def read(self, query: Mapping[str, str]) -> T:
        """Raises InvalidConfiguration, which names the parameter at fault."""
        properties = self._properties()
        given: dict[str, Any] = {}
        for name, text in query.items():
            if name in properties:
                if text or not self.empty_is_none:
                    given[name] = _value(name, text, _type(properties[name]))
            elif not self.is_open:
                refuse(shown(name), f"Unknown parameter. Known are: {', '.join(properties)}.")
        return self.declaration(**given)

    def schema(self) -> dict[str, Any]:
        """Its parameters as an object in JSON Schema. No text is null."""
        schema = _schema(self.declaration)
        properties = {name: _not_null(each) for name, each in schema["properties"].items()}
        return {**schema, "properties": properties}

    def _properties(self) -> dict[str, Any]:
        found = _PROPERTIES.get(self.declaration)
        if found is None:
            found = _PROPERTIES[self.declaration] = self.schema()["properties"]
        return found


_PROPERTIES: dict[type, dict[str, Any]] = {}
_KEYS: dict[type, dict[str, bool]] = {}


def _keys(declaration: Any) -> dict[str, bool]:
    """What it can be made with, and whether it must be."""
    if (found := _KEYS.get(declaration)) is None:
        models = issubclass(declaration, BaseModel)
        known = declaration.model_fields if models else declaration.__pydantic_fields__
        found = _KEYS[declaration] = {
            each.alias or name: each.is_required()
            for name, each in known.items()
            if each.init is not False
        }
    return found


def _value(name: str, text: str, kind: str) -> Any:
    if kind == "boolean":
        if (flag := _FLAGS.get(text.lower())) is None:
            refuse(name, "Must be 1 or 0.")
        return flag
    if kind == "integer":
        if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
            refuse(name, "Must be a whole number.")
        return int(text)
    return text


def _type(schema: Mapping[str, Any]) -> str:
    for each in (schema, *schema.get("anyOf", ())):
        if (kind := each.get("type", "null")) != "null":
            return str(kind)
    return ""


def _schema(declaration: type) -> dict[str, Any]:
    schema = TypeAdapter(declaration).json_schema(by_alias=True)
    plain: dict[str, Any] = _plain(schema, schema.pop("$defs", {}))
    return plain


def _plain(schema: Any, parts: Mapping[str, Any]) -> Any:
    """Without references and titles."""
    if isinstance(schema, list):
        return [_plain(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        part = parts[schema["$ref"].rpartition("/")[2]]
        schema = {**part, **{key: value for key, value in schema.items() if key != "$ref"}}
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(each, parts) for name, each in value.items()}
        elif key != "title" and not (key == "default" and value is None):
            plain[key] = _plain(value, parts)
    return plain


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    several = schema.get("anyOf", ())
    rest = [each for each in several if each.get("type") != "null"]
    if len(rest) == len(several):
        return schema
    others = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**rest[0], **others} if len(rest) == 1 else {**others, "anyOf": rest}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema or schema.get("type") == "null":
        return schema
    if "enum" in schema:
        schema = {**schema, "enum": [*schema["enum"], None]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return schema


MAX_ENVIRONMENT = 100
MAX_ENVIRONMENT_BYTES = 64 * 1024
MAX_PATH_BYTES = 4096

_VARIABLE = "[A-Za-z_][A-Za-z0-9_]{0,127}"
_UUID = re.compile("[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
# RFC 3339, with its zone.
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_MOMENT = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])[Tt ]"
    rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_HOUR_MINUTE})"
)
# The end of a text in ECMAScript is `$`. To Python that is before a last line feed too.
END = r"$(?!\n)"
_NO_NUL = r"^[^\u0000]*$"
# To Python and to ECMAScript different characters are blank; here all of both are.
_BLANKS = r"\s\u001c-\u001f\u0085\ufeff"
_SOMETHING = re.compile(f"[^{_BLANKS}]")
_NOT_BLANK = rf"^[^\u0000]*[^{_BLANKS}\u0000][^\u0000]*$"
_PART = rf"[^/\u0000]{{1,{MOST_NAME_BYTES}}}"
_PLACE = (
    r"(?!([^\u0000]*/)?\.\.(/|$))/*"
    rf"({_PART}(/+{_PART}){{0,{MOST_FOLDERS - 1}}}/*)?$"
)
# One part of a path that has one way to be written.
PATH_PART = r"(?!\.{1,2}(/|$))[^/\u0000]{1,255}"


def check_storable(value: str) -> str:
    if not is_storable(value):
        raise ValueError("Must hold neither NUL nor lone surrogates.")
    return value


def program(code: str) -> str:
    # First, for what is below looks at every character.
    _require_bytes(code, MAX_CODE_BYTES)
    if not _SOMETHING.search(code):
        raise ValueError("Must not be empty.")
    return check_storable(code)


def _require_bytes(text: str, most: int) -> None:
    # A text has no fewer bytes than characters.
    if len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most:
        raise ValueError(f"Must be at most {most} bytes of UTF-8.")


def program_or_none(code: str) -> str:
    return program(code) if code else code


def _variable(name: str) -> str:
    if not re.fullmatch(_VARIABLE, name):
        raise ValueError("Names must be letters, digits and underscores, and begin with no digit.")
    return name


def _small(env: Mapping[str, str]) -> Mapping[str, str]:
    if sum(len(name) + len(value.encode()) for name, value in env.items()) > MAX_ENVIRONMENT_BYTES:
        raise ValueError(f"Must be at most {MAX_ENVIRONMENT_BYTES} bytes together.")
    return env


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _id(value: Any) -> UUID:
    if isinstance(value, UUID):
        return value
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        raise ValueError("Must be an id (UUID).")
    return UUID(value)


def _moment(value: Any) -> datetime:
    """In UTC."""
    problem = "Must be a time with its zone (RFC 3339): 2030-12-01T03:00:00Z."
    try:
        if isinstance(value, str) and re.fullmatch(_MOMENT, value):
            value = datetime.fromisoformat(value.upper())
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC)
    except (ValueError, OverflowError):
        # A day that there is not, or one beyond all calendars.
        raise ValueError(problem) from None
    raise ValueError(problem)


def _path(path: str) -> str:
    """The path that is meant, where a byte that is no text is told as `\\xNN`."""
    path = unescape(path)
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise ValueError("Must hold no lone surrogates.") from None
    if "\0" in path or size > MAX_PATH_BYTES:
        raise ValueError(f"Must hold no NUL and be at most {MAX_PATH_BYTES} bytes.")
    if ".." in path.split("/"):
        raise ValueError("Must hold no '..'.")
    parts = [part for part in path.split("/") if part]
    if len(parts) > MOST_FOLDERS:
        raise ValueError(f"Must be at most {MOST_FOLDERS} levels deep.")
    if any(len(part.encode("utf-8", "surrogateescape")) > MOST_NAME_BYTES for part in parts):
        raise ValueError(f"Each part must be at most {MOST_NAME_BYTES} bytes.")
    return path


def _named(path: str) -> str:
    if not path:
        raise ValueError("This field is required.")
    path = _path(path)
    if all(part in ("", ".") for part in path.split("/")):
        raise ValueError("Must name something in a folder.")
    return path


STORABLE = Rule(check_storable, {"pattern": _NO_NUL})


def storable_members(levels: int) -> dict[str, Any]:
    """What JSON Schema says of an object or list whose texts are storable, so many levels deep."""
    says: dict[str, Any] = {"propertyNames": {"pattern": _NO_NUL}}
    for key in ("additionalProperties", "items"):
        says[key] = {"pattern": _NO_NUL, **(storable_members(levels - 1) if levels > 1 else {})}
    return says


NAMED = {"type": "string", "minLength": 1, "pattern": _NO_NUL}
# To JSON, 2.0 is a whole number too.
WHOLE = BeforeValidator(_whole)

Code = Annotated[
    str,
    Rule(
        program,
        lambda: {
            "minLength": 1,
            "maxLength": MAX_CODE_BYTES,
            "pattern": _NOT_BLANK,
        },
    ),
]
Script = Annotated[
    str,
    Rule(
        program_or_none,
        lambda: {
            "maxLength": MAX_CODE_BYTES,
            "pattern": rf"^$|{_NOT_BLANK}",
        },
    ),
]
LanguageName = Annotated[str, Field(min_length=1, max_length=32), STORABLE]
ShortName = Annotated[str, Field(max_length=64), STORABLE]
TemplateName = Annotated[str, Field(max_length=80), STORABLE]
ContextId = ShortName
Directory = Annotated[str, Field(max_length=512), STORABLE, Rule(_path, {"pattern": f"^{_PLACE}"})]
UserName = Annotated[str, Field(max_length=32), STORABLE]
Subject = Annotated[str, Field(max_length=255), STORABLE]
Id = Annotated[
    UUID,
    BeforeValidator(_id),
    WithJsonSchema({"type": "string", "pattern": f"^{_UUID.pattern}{END}"}),
]
Moment = Annotated[
    datetime,
    BeforeValidator(_moment),
    WithJsonSchema({"type": "string", "format": "date-time", "pattern": f"^{_MOMENT}{END}"}),
]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False), at_most("SANDBOX_MAX_TIMEOUT_SEC")]
Environment = Annotated[
    Mapping[
        Annotated[str, Rule(_variable, {"pattern": f"^{_VARIABLE}{END}"})],
        Annotated[str, Field(max_length=MAX_ENVIRONMENT_BYTES), STORABLE],
    ],
    Members(MAX_ENVIRONMENT),
    Rule(_small, {"additionalProperties": False}),
]
# Of the files of a session.
Folder = Annotated[str, Rule(_path, {"maxLength": MAX_PATH_BYTES, "pattern": f"^{_PLACE}"})]
# Where a list of them goes on. Neither a URL nor JSON can hold a name that is not UTF-8.
PlaceOfPath = Annotated[str, Field(max_length=3 * MAX_PATH_BYTES), STORABLE, Rule(from_text)]
Path = Annotated[
    str,
    Rule(
        _named,
        {
            "minLength": 1,
            "maxLength": MAX_PATH_BYTES,
            "pattern": rf"^(?!/*(\.(/+\.)*/*)?$){_PLACE}",
        },
    ),
]


M = TypeVar("M", bound=Model)


def newest_first(found: QuerySet[M], cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    """At most `limit` rows before the cursor, and the cursor of the next page: "" on the last one.

    One query and no count: a tenant may have millions.
    """
    return _page(found.order_by("-pk"), "pk__lt", cursor, limit)


def oldest_first(found: QuerySet[M], cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    """As `newest_first`, in the opposite order."""
    return _page(found.order_by("pk"), "pk__gt", cursor, limit)


def _page(found: QuerySet[M], behind: str, cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    if cursor:
        found = found.filter(**{behind: cursor})
    rows = list(found[: limit + 1])
    more = len(rows) > limit
    rows = rows[:limit]
    return rows, str(rows[-1].pk) if more else ""
