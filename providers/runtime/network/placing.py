"""Credentials are put into a request that they are bound to, in place of their placeholders."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, unquote_plus

from providers.credentials import HERE, NAME, PLACEHOLDER, Credential
from providers.runtime.network.exchange import Headers

# A header by its name in small letters, a parameter of the query, or the path.
_Place = tuple[str, str]

_AUTHORIZATION = ("header", "authorization")
_PLACEHOLDER = re.compile(PLACEHOLDER + f"({NAME.pattern})", re.IGNORECASE)


class Misplaced(Exception):
    """A placeholder stands where its credential is not put in."""

    def __init__(self, name: str, place: _Place) -> None:
        kind, where = place
        shown = f"{kind} {where}".strip()
        super().__init__(f"{PLACEHOLDER}{name} in the {shown} is not for this request.")


@dataclass(frozen=True)
class Placed:
    """A request as the server gets it, and the credentials in it. Not for records."""

    path: str
    headers: Headers
    used: tuple[Credential, ...]

    def __repr__(self) -> str:
        return f"Placed({', '.join(each.label for each in self.used)})"


def put_in(
    bound: Sequence[Credential], path: str, headers: Headers, *, always: bool = False
) -> Placed:
    """Put in those of the bound credentials that a request has a placeholder of. Where it says
    nothing at the place of one, or with `always` whatever it says, the first for that place is put
    in.

    Raises Misplaced for a placeholder of any other, or at another place.
    """
    places: dict[_Place, list[Credential]] = {}
    for each in bound:
        places.setdefault(_place_of(each), []).append(each)
    wanted = _placeholders(path, headers)
    for place, names in wanted.items():
        for name in names:
            if all(each.name != name for each in places.get(place, ())):
                raise Misplaced(name, place)
    used = []
    for place, choice in places.items():
        names = wanted.get(place, set())
        chosen = next((each for each in choice if each.name in names), None)
        if chosen is None:
            sets = (each for each in choice if always or each.template)
            chosen = next(sets, None if _has(path, headers, place) else choice[0])
        if chosen is not None:
            used.append(chosen)
            if place[0] == "query":
                path = _with_parameter(path, chosen)
            else:
                headers = _with_header(headers, place[1].encode(), chosen)
    return Placed(path, headers, tuple(used))


def _place_of(credential: Credential) -> _Place:
    if credential.placement == "query":
        return "query", credential.field
    if credential.placement == "header":
        return "header", credential.field.lower()
    return _AUTHORIZATION


def _placeholders(path: str, headers: Headers) -> dict[_Place, set[str]]:
    found: dict[_Place, set[str]] = {}

    def note(place: _Place, texts: Iterable[str]) -> None:
        for text in texts:
            for name in _PLACEHOLDER.findall(text):
                found.setdefault(place, set()).add(name.lower())

    plain, _, query = path.partition("?")
    note(("path", ""), (plain, unquote(plain)))
    for name, value in _parameters(query):
        note(("query", unquote_plus(name)), (unquote_plus(name), unquote_plus(value)))
    for raw_name, raw in headers:
        text = raw.decode("latin-1")
        note(("header", _text(raw_name)), (text, unquote(text), ":".join(_basic(text))))
    return found


def _has(path: str, headers: Headers, place: _Place) -> bool:
    kind, wanted = place
    if kind == "header":
        return any(_text(name) == wanted for name, _ in headers)
    return any(unquote_plus(name) == wanted for name, _ in _parameters(path.partition("?")[2]))


def _with_header(headers: Headers, name: bytes, credential: Credential) -> Headers:
    former = [value.decode("latin-1") for each, value in headers if each.lower() == name]
    value = credential.value.reveal()
    if credential.template:
        value = credential.template.replace(HERE, value)
    elif credential.placement == "bearer":
        value = f"Bearer {value}"
    elif credential.placement == "basic":
        user = credential.field or next((user for user, _ in map(_basic, former) if user), "")
        value = "Basic " + b64encode(f"{user}:{value}".encode()).decode()
    kept = [(each, text) for each, text in headers if each.lower() != name]
    return [*kept, (name, value.encode())]


def _with_parameter(path: str, credential: Credential) -> str:
    plain, _, query = path.partition("?")
    pairs = [
        each
        for each in query.split("&")
        if unquote_plus(each.partition("=")[0]) != credential.field
    ]
    own = f"{quote(credential.field, safe='')}={quote(credential.value.reveal(), safe='')}"
    return f"{plain}?{'&'.join([*filter(None, pairs), own])}"


def _parameters(query: str) -> list[tuple[str, str]]:
    pairs = (each.partition("=") for each in query.split("&"))
    return [(name, value) for name, _, value in pairs if name or value]


def _basic(text: str) -> tuple[str, str]:
    """User and password of a header, "" for what is none."""
    scheme, _, packed = text.strip().partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        user, _, password = b64decode(packed.strip()).decode("latin-1").partition(":")
    except (binascii.Error, ValueError):
        return "", ""
    return user, password


def _text(name: bytes) -> str:
    return name.decode("latin-1").lower()
