"""One declaration: validation, description and masking follow from it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.errors import InvalidConfiguration
from providers.schema import (
    ConfigField,
    describe,
    keep_untouched_secrets,
    mask,
    mask_secrets,
    validate,
)

SCHEMA = {
    "endpoint": ConfigField("string", "Endpoint", required=True, min=4, max=20),
    "token": ConfigField("string", "Token", secret=True),
    "size": ConfigField("integer", "Size", default=10, min=1, max=100),
    "factor": ConfigField("number", "Factor", min=-1, max=1),
    "strict": ConfigField("boolean", "Strict", default=False),
    "memory": ConfigField("string", "Memory", default="256m", options=("128m", "256m")),
}
GOOD = {"endpoint": "http://a"}

texts = st.text(st.sampled_from("ab4é•\0\ud800 "), max_size=24)
json_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.sampled_from(["http://a", "256m", 5, 0.5, {}, [], {"a": [1]}])
)


def refused(**changes: Any) -> dict[str, str]:
    with pytest.raises(InvalidConfiguration) as caught:
        validate(SCHEMA, GOOD | changes)
    return caught.value.errors


def test_defaults_are_filled_in() -> None:
    assert validate(SCHEMA, GOOD) == {
        "endpoint": "http://a",
        "token": None,
        "size": 10,
        "factor": None,
        "strict": False,
        "memory": "256m",
    }


@pytest.mark.parametrize("value", [True, False, 5.0, "5", "", [5], {"a": 5}])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    assert refused(size=value) == {"size": "Must be of type integer."}


@pytest.mark.parametrize("value", [True, "0.5", [], ""])
def test_what_is_no_number_is_refused(value: Any) -> None:
    assert refused(factor=value) == {"factor": "Must be of type number."}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_number_must_be_finite(value: Any) -> None:
    assert refused(factor=value) == {"factor": "Must be a finite number."}


@pytest.mark.parametrize("value", [0, 1, "true", "", None.__class__])
def test_what_is_no_boolean_is_refused(value: Any) -> None:
    assert refused(strict=value) == {"strict": "Must be of type boolean."}


@pytest.mark.parametrize("value", [5, True, ["http://a"], {"a": 1}])
def test_what_is_no_string_is_refused(value: Any) -> None:
    assert refused(endpoint=value) == {"endpoint": "Must be of type string."}


@pytest.mark.parametrize("value", ["http\0//", "http:\ud800"])
def test_text_no_service_could_take_is_refused(value: str) -> None:
    assert "Must be text" in refused(endpoint=value)["endpoint"]


@pytest.mark.parametrize("value", [None, "", "   "])
def test_a_required_field_must_be_there(value: Any) -> None:
    assert refused(endpoint=value) == {"endpoint": "This field is required."}


def test_ranges_bound_numbers_and_lengths() -> None:
    assert refused(size=0) == {"size": "Must be at least 1."}
    assert refused(size=101) == {"size": "Must be at most 100."}
    assert refused(factor=1.01) == {"factor": "Must be at most 1."}
    assert refused(endpoint="abc") == {"endpoint": "Must be at least 4 characters long."}
    assert refused(endpoint="a" * 21) == {"endpoint": "Must be at most 20 characters long."}
    bounds = {"size": 1, "factor": -1, "endpoint": "a" * 20}
    assert validate(SCHEMA, bounds)["size"] == 1


def test_options_are_closed() -> None:
    assert refused(memory="512m") == {"memory": "Must be one of: 128m, 256m."}
    assert refused(memory=" ") == {"memory": "Must be one of: 128m, 256m."}


def test_an_unknown_key_is_refused() -> None:
    assert refused(sise=5) == {"sise": "Unknown field."}


def test_no_more_names_are_told_than_somebody_reads() -> None:
    made_up = {f"{number}" + "x" * 200: 1 for number in range(1000)}
    told = refused(**made_up)
    assert len(told) == 10
    assert max(map(len, told)) == 100


def test_all_errors_come_at_once_each_with_its_field() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        validate(SCHEMA, {"size": True, "factor": 7, "memory": "1g", "extra": 1})
    error = caught.value
    assert set(error.errors) == {"endpoint", "size", "factor", "memory", "extra"}
    assert error.field in error.errors
    assert all(field in error.message for field in error.errors)


@pytest.mark.parametrize("config", [None, [], "endpoint", 5])
def test_a_configuration_is_an_object(config: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="JSON object"):
        validate(SCHEMA, config)


@given(
    st.dictionaries(st.sampled_from([*SCHEMA, "other"]), json_values)
    | st.fixed_dictionaries({"endpoint": st.just("http://a")}, optional={"size": json_values})
)
def test_whatever_passes_has_the_declared_types(config: dict[str, Any]) -> None:
    try:
        cleaned = validate(SCHEMA, config)
    except InvalidConfiguration as refusal:
        errors = refusal.errors
    else:
        errors = None
    if errors is not None:
        assert errors
        assert set(errors) <= {*SCHEMA, *config}
        return
    assert set(cleaned) == set(SCHEMA)
    assert type(cleaned["endpoint"]) is str
    assert type(cleaned["size"]) is int
    assert type(cleaned["strict"]) is bool
    assert cleaned["factor"] is None or -1 <= cleaned["factor"] <= 1
    assert cleaned["memory"] in SCHEMA["memory"].options
    assert validate(SCHEMA, cleaned) == cleaned
    json.dumps(cleaned, allow_nan=False)


@given(json_values)
def test_an_error_never_repeats_the_value(value: Any) -> None:
    secret = ConfigField("string", "Token", secret=True, max=3)
    problem = secret.error("hunter2-" + repr(value))
    assert problem is not None
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "integer", "default": "10"},
        {"type": "integer", "default": 5.0},
        {"type": "integer", "default": 0, "min": 1},
        {"type": "string", "default": "c", "options": ("a", "b")},
        {"type": "integer", "options": ("1", "2")},
        {"type": "boolean", "secret": True},
        {"type": "int"},
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Pool size"):
        ConfigField(label="Pool size", **wrong)


def test_the_description_is_json_and_complete() -> None:
    schema = {
        "token": ConfigField("string", "Token", required=True, secret=True, placeholder="sk-..."),
        "size": ConfigField("integer", "Size", default=0, min=0, max=9, description="How many."),
        "strict": ConfigField("boolean", "Strict", default=False),
        "memory": ConfigField("string", "Memory", options=("128m", "256m")),
    }
    assert json.loads(json.dumps(describe(schema))) == {
        "token": {
            "type": "string",
            "required": True,
            "label": "Token",
            "secret": True,
            "placeholder": "sk-...",
        },
        "size": {
            "type": "integer",
            "required": False,
            "label": "Size",
            "description": "How many.",
            "default": 0,
            "min": 0,
            "max": 9,
        },
        "strict": {"type": "boolean", "required": False, "label": "Strict", "default": False},
        "memory": {
            "type": "string",
            "required": False,
            "label": "Memory",
            "options": ["128m", "256m"],
        },
    }


def test_a_mask_shows_the_last_four_of_a_long_secret_only() -> None:
    assert mask("sk-0123456789abcd") == "••••abcd"
    assert mask("short") == "••••"
    assert mask("") == ""


@given(st.text(st.sampled_from("abc"), min_size=1, max_size=60))
def test_a_mask_never_shows_more_than_a_third(secret: str) -> None:
    assert len(mask(secret)) - 4 <= len(secret) / 3


def test_only_secrets_and_unknown_values_are_masked() -> None:
    config = {"endpoint": "http://a", "token": "sk-0123456789abcd", "former": "0123456789wxyz"}
    assert mask_secrets(SCHEMA, config) == {
        "endpoint": "http://a",
        "token": "••••abcd",
        "former": "••••wxyz",
    }


@pytest.mark.parametrize("posted", [{}, {"token": ""}, {"token": None}, {"token": "••••abcd"}])
def test_an_untouched_secret_is_kept(posted: dict[str, Any]) -> None:
    stored = {"endpoint": "http://a", "token": "sk-0123456789abcd"}
    assert keep_untouched_secrets(SCHEMA, posted, stored)["token"] == stored["token"]


def test_a_new_secret_replaces_the_stored_one() -> None:
    assert keep_untouched_secrets(SCHEMA, {"token": "new"}, {"token": "old"}) == {"token": "new"}


def test_a_value_that_is_no_secret_is_never_kept() -> None:
    assert keep_untouched_secrets(SCHEMA, {}, {"endpoint": "http://a"}) == {}


def test_a_mask_is_never_stored_as_the_secret() -> None:
    merged = keep_untouched_secrets(SCHEMA, GOOD | {"token": "••••abcd"}, {"token": "changed-9999"})
    with pytest.raises(InvalidConfiguration) as caught:
        validate(SCHEMA, merged)
    assert caught.value.errors == {"token": "Is masked: enter the whole value."}
