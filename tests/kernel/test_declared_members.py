"""Every list and mapping that a request declares has a number, which is looked at first.

Found among all declarations there are, so that a new one cannot forget it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

import executions
from executions.kernel.declarations import Body, Members
from providers.errors import InvalidConfiguration

Place = tuple[str, Any, tuple[Any, ...]]
LEFT_OUT = ("executions.migrations", "executions.management")


class Unseen(list[Any]):
    """Members that nobody may look at."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("its members are looked at")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("its members are looked at")


@cache
def modules() -> tuple[Any, ...]:
    names = (each.name for each in pkgutil.walk_packages(executions.__path__, "executions."))
    return tuple(importlib.import_module(name) for name in names if not name.startswith(LEFT_OUT))


@cache
def declarations() -> tuple[type, ...]:
    found = {
        each
        for module in modules()
        for each in vars(module).values()
        if isinstance(each, type)
        and each.__module__.startswith("executions.")
        and "__pydantic_validator__" in vars(each)
    }
    return tuple(sorted(found, key=lambda each: f"{each.__module__}.{each.__qualname__}"))


def bodies() -> list[Body[Any]]:
    found = {
        id(each): each
        for module in modules()
        for each in vars(module).values()
        if isinstance(each, Body)
    }
    return list(found.values())


def places(name: str, kind: Any, said: tuple[Any, ...] = ()) -> Iterator[Place]:
    """Each list and mapping in an annotation, with what is said of it."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from places(name, get_args(kind)[0], (*said, *kind.__metadata__))
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from places(name, each)
    elif isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        arguments = get_args(kind)
        if not (issubclass(origin, Mapping) and arguments[1] is Any):
            # What anything may be in has a number of values, for the request as a whole.
            yield name, Annotated[(kind, *(said or (None,)))], said
        for each in arguments:
            yield from places(f"{name}[]", each)


def all_places() -> list[Place]:
    return [
        (f"{declaration.__name__}.{name}", kind, said)
        for declaration in declarations()
        for field, annotation in get_type_hints(declaration, include_extras=True).items()
        for name, kind, said in places(field, annotation)
    ]


def number_of(said: tuple[Any, ...]) -> Members | None:
    return next((each for each in said if isinstance(each, Members)), None)


def test_every_declared_list_and_mapping_has_a_number() -> None:
    found = all_places()
    assert [name for name, _, said in found if number_of(said) is None] == []
    names = {name for name, _, _ in found}
    known = ("ExecutionRequest.files", "ExecutionRequest.tools", "ExecutionRequest.env")
    also = ("CommandRequest.command", "ExecuteRequest.inputs", "FetchRequest.urls")
    assert names >= {*known, *also}


@pytest.mark.parametrize(("name", "kind", "said"), all_places(), ids=lambda each: str(each)[:40])
def test_the_number_is_looked_at_before_any_member(name: str, kind: Any, said: Any) -> None:
    number = number_of(said)
    assert number is not None
    adapter = TypeAdapter(kind)
    is_list = issubclass(get_origin(get_args(kind)[0]), Sequence)
    too_many: Any = Unseen([object()] * (number.most + 1))
    if not is_list:
        too_many = {f"name{each}": object() for each in range(number.most + 1)}
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python(too_many, strict=True)
    assert [each["type"] for each in refused.value.errors()] == ["too_long"]
    if is_list and number.most > 1:
        with pytest.raises(ValidationError) as refused:
            adapter.validate_python([object()] * number.most, strict=True)
        assert refused.value.error_count() == 1


@pytest.mark.parametrize("body", bodies(), ids=lambda each: each.name)
def test_every_body_says_that_there_are_too_many(body: Body[Any]) -> None:
    annotations = get_type_hints(body.declaration, include_extras=True)
    for field in body.known:
        for name, kind, said in places(field, annotations.get(field, Any)):
            number = number_of(said)
            if number is None or name != field:
                continue
            is_list = issubclass(get_origin(get_args(kind)[0]), Sequence)
            names = range(number.most + 1)
            given: Any = (
                Unseen([{}] * len(names)) if is_list else {f"n{each}": {} for each in names}
            )
            with pytest.raises(InvalidConfiguration) as refused:
                body.read({**required_of(body), field: given})
            assert refused.value.field == field
            assert f"Must be at most {number.most}." in refused.value.message


def required_of(body: Body[Any]) -> dict[str, Any]:
    some = {"code": "1", "user_id": "someone", "shell": "true", "name": "often"}
    return {name: some[name] for name in body.schema().get("required", ()) if name in some}
