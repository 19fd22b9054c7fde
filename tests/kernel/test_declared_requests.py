"""What the API's description says of requests is what is accepted, and nothing else is."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from executions.doors import agent_sandbox
from executions.kernel.declarations import Query
from executions.tenants.keys import create_api_key
from executions.tenants.models import Scope
from providers.errors import InvalidConfiguration
from tests.conftest import Caller
from tests.kernel.descriptions import (
    BODIES,
    FORMS,
    MODULES,
    alternatives,
    component,
    least,
    operations,
    outside,
)
from tests.support.sessions import URL, opened

pytestmark = pytest.mark.one_database

QUERIES = {
    found.declaration.__name__: found
    for module in MODULES
    for found in vars(module).values()
    # The fields of a form, which the description has as a body.
    if isinstance(found, Query) and found is not agent_sandbox.UPLOAD
}
# What JSON Schema cannot say: sizes in bytes, files that are in each other's way, good URLs.
UNSAID = (
    *("bytes", "Another file has this path", "lead to the internet"),
    *("schema for a tool", "not a valid schema"),
    *("cannot be the name of a tool", "Two tools have the same name"),
    *("Must be a time with its zone", "cron expression", "Unknown time zone"),
    *("cannot be set. Choose another name", "is too long, or has a NUL", "path in the workspace"),
    "Needs a start command",
)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ADMINISTRATION = {"set_config", "test_connection", "set_active"}


def bodies() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """By operation: method, path and schema of each body that is JSON."""
    found = {}
    for path, method, operation in operations():
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found[operation["operationId"]] = (method, path, {**component(name), "name": name})
    return found


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema says is valid."""
    several = schema.get("anyOf", schema.get("oneOf"))
    # Beside a type they are conditions on its fields, which `documents` compares.
    if several and "type" not in schema:
        return st.one_of(*map(values, several))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return st.one_of(*(values({**schema, "type": kind}) for kind in kinds))
    if kinds == "string":
        return strings(schema)
    if kinds == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if kinds == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        return st.floats(low, schema.get("maximum"), exclude_min="exclusiveMinimum" in schema)
    if kinds == "boolean":
        return st.booleans()
    if kinds == "null":
        return st.none()
    if kinds == "array":
        most = min(schema.get("maxItems", 4), 4)
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
    return objects(schema) if kinds == "object" else ANY_JSON


def strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 5000)
    if schema.get("format") == "uri":
        # Where one may lead to is more than a schema can say.
        return st.sampled_from(("https://example.com/", "https://a.example.com:8443/hook?of=us"))
    # In ECMAScript `$` is the end alone; here it is also before a last line feed.
    if (form := schema.get("format")) in FORMS:
        return st.just(FORMS[form])
    pattern = schema.get("pattern", "").replace("$", r"\Z")
    edges = st.sampled_from(["a" * most if most < 5000 else "a", "a" * max(least, 1), ""])
    found = st.from_regex(pattern) if pattern else TEXT
    return (found | edges).filter(
        lambda text: least <= len(text) <= most and re.search(pattern, text) is not None
    )


def objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    for name, inner in schema.get("patternProperties", {}).items():
        return st.dictionaries(st.from_regex(name.replace("$", r"\Z")), values(inner), max_size=3)
    if "properties" not in schema:
        return st.dictionaries(TEXT, ANY_JSON, max_size=min(schema.get("maxProperties", 3), 3))
    required = set(schema.get("required", ()))
    fields = {name: values(each) for name, each in schema["properties"].items()}
    return st.fixed_dictionaries(
        {name: each for name, each in fields.items() if name in required},
        optional={name: each for name, each in fields.items() if name not in required},
    )


def documents(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are valid by all that is said of them together."""
    validator = jsonschema.Draft202012Validator(schema)
    return st.one_of(*(objects(each) for each in alternatives(schema))).filter(validator.is_valid)


def names_of(name: str) -> tuple[str, str]:
    """Of a PATCH, the description has another name."""
    return name, f"Patched{name}"


def test_every_body_and_parameter_that_is_described_is_declared() -> None:
    named = {schema["name"].removeprefix("Patched") for _, _, schema in bodies().values()}
    assert named == set(BODIES)
    declared = {name for query in QUERIES.values() for name in query.schema()["properties"]}
    described = {
        parameter["name"]
        for _, _, operation in operations()
        for parameter in operation.get("parameters", ())
        if parameter["in"] in ("query", "header")
    }
    assert described == declared


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_valid_by_its_description_is_read(name: str) -> None:
    schema = next(schema for _, _, schema in bodies().values() if schema["name"] in names_of(name))
    given_by_python = {"session": "0" * 32} if name == "Cell" else {}

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(documents(schema))
    def reads(body: dict[str, Any]) -> None:
        # As it comes over the network.
        body = json.loads(json.dumps(body))
        try:
            BODIES[name].read(body, **given_by_python)
        except InvalidConfiguration as error:
            assume(not any(each in error.message for each in UNSAID))
            raise

    reads()


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_that_is_valid_by_its_description_is_read(name: str) -> None:
    query = QUERIES[name]
    schema = query.schema()

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(objects(schema))
    def reads(wanted: dict[str, Any]) -> None:
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in wanted.items()
            if value is not None
        }
        try:
            found = query.read(texts)
        except InvalidConfiguration as error:
            assume(not any(each in error.message for each in UNSAID))
            raise
        for key in texts:
            if not isinstance(wanted[key], str):
                assert wanted[key] in vars(found).values()

    reads()


@pytest.mark.parametrize("name", QUERIES)
def test_a_parameter_just_outside_is_refused_by_name(name: str) -> None:
    query = QUERIES[name]
    needed = query.schema().get("required", ())
    for key, schema in query.schema()["properties"].items():
        others = {other: "x" for other in needed if other != key}
        for value in outside(schema):
            text = value if isinstance(value, str) else json.dumps(value)
            if _is_text_for(schema, text):
                continue
            with pytest.raises(InvalidConfiguration) as refused:
                query.read({**others, key: text})
            assert refused.value.field == key, text


def _is_text_for(schema: dict[str, Any], text: str) -> bool:
    """Whether a value of another type is a text like any other in a query."""
    kinds = [each.get("type") for each in (schema, *schema.get("anyOf", ()))]
    if "boolean" in kinds:
        return text.lower() in ("0", "1", "true", "false")
    if "integer" in kinds:
        return text == "1"
    if "enum" in schema:
        return text in schema["enum"]
    named = {key: schema[key] for key in ("pattern", "maxLength", "minLength") if key in schema}
    for each in schema.get("anyOf", ()):
        named |= {key: each[key] for key in ("pattern", "maxLength", "minLength") if key in each}
    return bool(jsonschema.Draft202012Validator(named).is_valid(text)) or not text


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("operation", sorted(set(bodies()) - ADMINISTRATION))
def test_a_value_just_outside_is_refused_by_its_field(operation: str, alice: Caller) -> None:
    method, path, schema = bodies()[operation]
    session = opened(alice)
    if "{pid}" in path:
        wanted = {"shell": "cat", "background": True, "stdin": True}
        started = alice.client.post(f"{URL}/{session['id']}/processes", wanted).json()
        path = path.replace("{pid}", str(started["pid"]))
    if "{schedule_id}" in path:
        often = {"name": "a", "cron": FORMS["cron"], "request": {"code": "1"}}
        made = alice.client.post("/api/v1/schedules", often).json()
        path = path.replace("{schedule_id}", made["id"])
    path = path.replace("{session_id}", session["id"])
    # What is read before it is looked up.
    for unknown in ("{execution_id}", "{call_id}"):
        path = path.replace(unknown, session["id"])
    alice = Caller(*create_api_key(alice.tenant, "all", None, " ".join(Scope.values)))
    valid = least({**schema, "type": "object"})
    wrong: list[tuple[str, dict[str, Any]]] = [("nobody_knows_it", {"nobody_knows_it": 1})]
    for name, each in schema["properties"].items():
        wrong += [(name, {name: value}) for value in outside(each)]

    for field, change in wrong:
        assert refused(alice, method, path, {**valid, **change}) == field, change
    for field in schema.get("required", ()):
        rest = {name: value for name, value in valid.items() if name != field}
        assert refused(alice, method, path, rest) == field


def refused(caller: Caller, method: str, path: str, body: Any) -> str:
    answer = getattr(caller.client, method)(path, body)
    assert answer.status_code == 400, (body, answer.content)
    told = answer.json()
    # Agent Sandbox has a shape of its own.
    field = told["error"]["field"] if "error" in told else told["detail"].partition(":")[0]
    assert isinstance(field, str)
    return field


@pytest.mark.parametrize("name", ["AdminConfig", "AdminTest", "AdminActive"])
def test_a_value_of_administration_just_outside_is_refused_by_its_field(name: str) -> None:
    schema = next(schema for _, _, schema in bodies().values() if schema["name"] == name)
    valid = least({**schema, "type": "object"})
    for field, each in schema["properties"].items():
        for value in outside(each):
            with pytest.raises(InvalidConfiguration) as error:
                BODIES[name].read({**valid, field: value})
            assert error.value.field == field, value
