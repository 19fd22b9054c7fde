"""Decode the JSON of an answer into typed objects, each of which keeps its JSON."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cofferdam.errors import UnexpectedAnswer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An object of the API. `raw` is its unchanged JSON, which may have more fields."""

    raw: Mapping[str, Any] = field(repr=False, compare=False)


@cache
def _hints(shape: Any) -> dict[str, Any]:
    return get_type_hints(shape)


def decode(shape: type[T], value: object) -> T:
    """Raises UnexpectedAnswer, which names the field that is missing or has the wrong type."""
    found: T = _decode(shape, value, shape.__name__)
    return found


def _decode(hint: Any, value: Any, place: str) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        [hint] = [each for each in get_args(hint) if each is not NoneType]
        return _decode(hint, value, place)
    if origin is Literal:
        # A value that is newer than this client is passed on unchanged.
        return _of_type(value, str, place)
    if origin is list:
        [item] = get_args(hint)
        return [_decode(item, each, place) for each in _of_type(value, list, place)]
    if origin is dict:
        return _of_type(value, dict, place)
    if isinstance(hint, type) and issubclass(hint, Shape):
        return _decode_shape(hint, _of_type(value, dict, place), place)
    if hint is datetime:
        try:
            return datetime.fromisoformat(_of_type(value, str, place))
        except ValueError:
            raise UnexpectedAnswer(f"{place} is not a time: {value!r}") from None
    if hint is float:
        return float(_of_type(value, (int, float), place))
    return _of_type(value, hint, place)


def _decode_shape(shape: type[Shape], value: dict[str, Any], place: str) -> Shape:
    hints = _hints(cast("Hashable", shape))
    found: dict[str, Any] = {"raw": value}
    for each in fields(shape):
        if each.name == "raw":
            continue
        if each.name in value:
            found[each.name] = _decode(hints[each.name], value[each.name], f"{place}.{each.name}")
        elif each.default is MISSING:
            raise UnexpectedAnswer(f"{place}.{each.name} is missing.")
    return shape(**found)


def _of_type(value: Any, kind: Any, place: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UnexpectedAnswer(f"{place} has the wrong type: {value!r:.80}")
    return value
