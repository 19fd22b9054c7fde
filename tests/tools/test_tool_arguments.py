"""Arguments of a tool are what its schema says, and neither of both can keep the service busy."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest

from executions.capabilities.tools.arguments import MOST_STEPS, read_arguments
from executions.runs.requests import ExecutionRequest
from executions.runs.tool_schemas import Tool
from providers.errors import InvalidConfiguration
from providers.runtime.guest.protocol import CALL_BYTES

# Within its bound by itself, and not in a list of tools.
DEEP = json.loads("[" * 199 + "]" * 199)


def tool(**parameters: Any) -> Tool:
    request = ExecutionRequest(
        "1", tools=[{"name": "search", "parameters": {"type": "object", **parameters}}]
    )
    return request.tools[0]


def problem(declared: Tool, sent: bytes) -> str:
    return read_arguments(declared, sent)[1]


def test_what_fits_is_written_anew_and_what_does_not_is_named() -> None:
    query = tool(
        properties={
            "query": {"type": "string", "format": "email"},
            "near": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        required=["query"],
        **{"$defs": {"place": {"type": "object", "required": ["lat"]}}},
    )

    assert read_arguments(query, b'{ "query" : "x", "near": {"lat": 1} }') == (
        '{"query":"x","near":{"lat":1}}',
        "",
    )
    assert problem(query, b'{"query": 1}') == "['query'] 1 is not of type 'string'"
    assert "'lat' is a required property" in problem(query, b'{"query": "x", "near": {}}')
    # Of two keys that are the same nobody reads the one and somebody else the other.
    assert read_arguments(query, b'{"query": "a", "query": "b"}')[0] == '{"query":"b"}'


@pytest.mark.parametrize(
    "sent",
    [
        b"[1]",
        b"nothing",
        b"",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": "' + b"x" * CALL_BYTES + b'"}',
    ],
    ids=["list", "text", "empty", "bytes", "nan", "infinite", "surrogate", "deep", "large"],
)
def test_what_is_no_object_of_json_is_refused(sent: bytes) -> None:
    # What the collector ends in the depth of a nesting has no stack left.
    gc.collect()
    gc.disable()
    try:
        text, why = read_arguments(tool(), sent)
    finally:
        gc.enable()

    assert why
    # It is kept all the same, as far as a database can have it.
    assert text.encode()


def test_no_schema_and_no_arguments_take_long() -> None:
    # Each leads twice to the next: without a bound, 2 ** 30 checks.
    doubling = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(30)
    }
    bomb = tool(**{"$ref": "#/$defs/d0", "$defs": {**doubling, "d30": {"type": "object"}}})
    endless = tool(**{"$ref": "#/$defs/me", "$defs": {"me": {"$ref": "#/$defs/me"}}})
    nowhere = tool(**{"$ref": "#/$defs/none"})
    many = tool(properties={"a": {"items": {"anyOf": [{"type": "string"}] * 100}}})
    long = b'{"a": [' + b",".join([b"1"] * 15_000) + b"]}"
    began = time.process_time()

    assert problem(bomb, b"{}") == problem(many, long) == "they take too long to check"
    for each in (endless, nowhere):
        assert problem(each, b"{}")
    assert time.process_time() - began < 10
    assert MOST_STEPS < 100_000


def test_no_keyword_costs_more_than_it_counts_for() -> None:
    names = [f"a{n}" for n in range(1200)]
    # Each is applied to each of many values, and looks at many of its own, or says all it has seen.
    lacking = tool(properties={"a": {"items": {"required": names}}})
    other = tool(properties={"a": {"items": {"enum": [0] * 7000}}})
    unlike = tool(properties={"a": {"items": {"const": {name: [] for name in names}}}})
    text = {"anyOf": [{"type": "string"}] * 100}
    loud = tool(
        properties={"a": {"anyOf": [{"$ref": "#/$defs/text"}] * 50}}, **{"$defs": {"text": text}}
    )
    more = tool(properties={"a": {"items": {"properties": {name: {} for name in names}}}})
    objects = b'{"a": [' + b",".join([b"{}"] * 10_000) + b"]}"
    numbers = b'{"a": [' + b",".join([b"1"] * 15_000) + b"]}"
    began = time.process_time()

    for declared, sent in (
        *((lacking, objects), (other, numbers), (unlike, objects), (loud, numbers)),
        (more, objects),
    ):
        assert problem(declared, sent) == "they take too long to check"
    assert time.process_time() - began < 10


def test_a_request_full_of_schemas_is_read_at_once() -> None:
    parameters = {"type": "object", "properties": {f"a{n}": {} for n in range(1200)}}
    tools = [{"name": f"a{n}", "parameters": parameters} for n in range(32)]
    began = time.process_time()

    assert len(ExecutionRequest("1", tools=tools).tools) == 32
    assert time.process_time() - began < 5


def test_a_schema_may_say_all_that_is_understood() -> None:
    every = tool(
        title="A", description="b", format="c", default=None, examples=[1], deprecated=False,
        required=["a"], minProperties=1, maxProperties=2, additionalProperties=False,
        properties={
            "a": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 2.5,
                  "multipleOf": 1},
            "b": {"prefixItems": [{"const": 1}], "items": {"not": {"enum": [2]}}, "minItems": 1,
                  "contains": True, "minContains": 1},
        },
    )  # fmt: skip

    assert problem(every, b'{"a": 1, "b": [1, 3]}') == ""
    assert problem(every, b"{}")
    assert problem(every, b'{"a": 1, "b": [1, 2]}')


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"pattern": "(a+)+$"}}},
        {"patternProperties": {"(a+)+$": {}}},
        {"properties": {"a": {"items": {"allOf": [{"not": {"pattern": "x"}}]}}}},
        {"$defs": {"a": {"additionalProperties": {"pattern": "x"}}}},
        {"$ref": "http://127.0.0.1:1/"},
        {"$ref": "#/properties/a/default", "properties": {"a": {"default": {"pattern": "x"}}}},
        {"$dynamicRef": "#a"},
        {"$id": "http://127.0.0.1:1/"},
        {"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}},
        {"uniqueItems": True},
        {"properties": {"a": 1}},
        {"required": "a"},
        {"required": [["a"]]},
        {"properties": {"a": {"type": "text"}}},
        {"properties": {"a": {"type": []}}},
        {"properties": {"a": {"type": [["null"]]}}},
        {"properties": {"a": {"multipleOf": 0}}},
        {"properties": {"a": {"minLength": -1}}},
        {"properties": {"a": {"maxItems": True}}},
        {"properties": {"a": {"minimum": "1"}}},
        {"properties": {"a": {"enum": {}}}},
        {"allOf": []},
        {"title": "\ud800"},
        {"properties": {"\ud800": {}}},
        {"default": DEEP},
        {"$defs": []},
        {"$ref": 1},
        {"type": ["object", "null"]},
    ],
)
def test_a_schema_with_an_expression_or_another_document_is_none(
    parameters: dict[str, Any],
) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        tool(**parameters)

    assert refused.value.field == "tools"


def test_another_tool_is_another_request() -> None:
    deepest = tool(default=DEEP[0][0])
    plain, with_tool = ExecutionRequest("1"), ExecutionRequest("1", tools=[tool()])
    writes = ExecutionRequest("1", tools=[{**tool().model_dump(), "writes": True}])

    deep = ExecutionRequest("1", tools=[deepest])
    assert len({each.run_hash() for each in (plain, with_tool, writes, deep)}) == 4
    assert ExecutionRequest.from_stored(writes.to_stored()).tools[0].writes
