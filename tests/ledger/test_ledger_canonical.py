"""The first canonical JSON: one text for one value, whatever wrote it and whatever returned it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executions.services.ledger.canonical import canonical_1 as canonical

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


@given(plain)
def test_what_is_read_back_is_written_the_same(value: Any) -> None:
    text = canonical(value)
    assert canonical(json.loads(text)) == text
    assert json.loads(text) == value
    assert text.isascii()


@given(st.dictionaries(st.text(), plain))
def test_the_order_of_names_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)


def _kinds(value: Any) -> Any:
    """The value such that only what JSON tells apart differs."""
    if isinstance(value, bool) or value is None:
        return (type(value).__name__, value)
    if isinstance(value, list):
        return ("list", tuple(map(_kinds, value)))
    if isinstance(value, dict):
        return ("dict", frozenset((key, _kinds(child)) for key, child in value.items()))
    return ("number" if isinstance(value, (int, float)) else "text", value)


@given(plain, plain)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == (_kinds(one) == _kinds(other))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, b"bytes", object()])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        canonical({"value": [value]})


def test_a_whole_number_is_written_one_way() -> None:
    assert canonical([2.0, 2, True, 0.5]) == "[2,2,true,0.5]"
