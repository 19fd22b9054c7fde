"""The kinds of values that requests have, each with its bounds, wherever it is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from django.conf import settings
from pydantic import BeforeValidator, Field, WithJsonSchema

from executions.services.declared import Members, Rule, at_most
from executions.services.workspaces.paths import MOST_FOLDERS, MOST_NAME_BYTES, from_text
from executions.text import is_storable
from providers.guest.names import unescape

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


def storable(value: str) -> str:
    if not is_storable(value):
        raise ValueError("Must hold neither NUL nor lone surrogates.")
    return value


def program(code: str) -> str:
    # First, for what is below looks at every character.
    _require_bytes(code, settings.SANDBOX_MAX_CODE_BYTES)
    if not _SOMETHING.search(code):
        raise ValueError("Must not be empty.")
    return storable(code)


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


STORABLE = Rule(storable, {"pattern": _NO_NUL})


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
            "maxLength": settings.SANDBOX_MAX_CODE_BYTES,
            "pattern": _NOT_BLANK,
        },
    ),
]
Script = Annotated[
    str,
    Rule(
        program_or_none,
        lambda: {
            "maxLength": settings.SANDBOX_MAX_CODE_BYTES,
            "pattern": rf"^$|{_NOT_BLANK}",
        },
    ),
]
LanguageName = Annotated[str, Field(min_length=1, max_length=32), STORABLE]
ShortName = Annotated[str, Field(max_length=64), STORABLE]
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
