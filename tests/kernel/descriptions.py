"""The request bodies that the API describes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import jsonschema
from drf_spectacular.generators import SchemaGenerator

from executions.capabilities.network import attempts as network_attempts
from executions.capabilities.network import sessions as session_networks
from executions.capabilities.schedules import service as recurring_requests
from executions.capabilities.templates import requests as template_requests
from executions.doors import agent_sandbox
from executions.doors.native import admin_sandbox, executions, frame
from executions.kernel.declarations import Body
from executions.runs import requests, results
from executions.runs import tool_schemas as tool_requests
from executions.sessions import queries
from executions.sessions import requests as session_requests
from executions.sessions.storage import snapshots

MODULES: tuple[ModuleType, ...] = (
    requests,
    frame,
    session_requests,
    session_networks,
    network_attempts,
    tool_requests,
    queries,
    results,
    executions,
    snapshots,
    recurring_requests,
    template_requests,
    agent_sandbox,
    admin_sandbox,
)
BODIES = {
    found.name: found
    for module in MODULES
    for found in vars(module).values()
    # A field of a schedule's body, and the body of no request.
    if isinstance(found, Body) and found is not recurring_requests.SCHEDULED
}
# Texts that a schema can only name the form of, and one of each.
FORMS = {
    "cron": "30 6 * * mon-fri",
    "network-rule": "pypi.org",
    "time-zone": "Europe/Berlin",
    "requirement": "pandas>=2",
    "npm-package": "dayjs@^1",
    "apt-package": "ffmpeg",
    "template-base": "python3.11",
}
WRONG = {
    "string": (1, True, [], {}),
    "integer": ("1", True, 1.5, []),
    "number": ("1", True, {}),
    "boolean": (1, "true", []),
    "array": ("x", {}, 1),
    "object": ("x", [], 1),
    "null": ("x", 1),
    "any": ("x", 1, ["x"]),
}


@cache
def description() -> dict[str, Any]:
    described: dict[str, Any] = SchemaGenerator().get_schema(public=True)
    return described


def component(name: str) -> dict[str, Any]:
    """A part of the description without references to others."""
    whole: dict[str, Any] = resolved(description()["components"]["schemas"][name])
    return whole


def resolved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [resolved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return component(schema["$ref"].rpartition("/")[2])
    return {key: resolved(value) for key, value in schema.items()}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for each in schema.get("oneOf", schema.get("anyOf", [{}])):
        properties = dict(schema["properties"])
        for name, narrower in each.get("properties", {}).items():
            properties[name] = {**properties[name], **narrower}
        required = [*schema.get("required", ()), *each.get("required", ())]
        found.append({"properties": properties, "required": required})
    return found


def least(schema: dict[str, Any]) -> Any:
    """One valid value."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "type" not in schema:
        return least(next(each for each in schema["anyOf"] if each != {"type": "null"}))
    kind = schema["type"]
    if kind == "object" and schema.get("minProperties"):
        return {"a": least(next(iter(schema["patternProperties"].values())))}
    if kind == "object":
        several = alternatives(schema) if "properties" in schema else [{"required": ()}]
        found = [
            {name: least(each["properties"][name]) for name in each["required"]} for each in several
        ]
        return next(filter(jsonschema.Draft202012Validator(schema).is_valid, found))
    if kind == "array":
        return [least(schema["items"])] * schema.get("minItems", 0)
    if schema.get("format") in FORMS:
        return FORMS[schema["format"]]
    return {"string": "a", "integer": schema.get("minimum", 0), "boolean": False}[kind]


def outside(schema: dict[str, Any]) -> Iterator[Any]:
    """Values of the wrong types, and those just beyond each bound."""
    validator = jsonschema.Draft202012Validator(schema)
    return (value for value in _around(schema) if not validator.is_valid(value))


def _around(schema: dict[str, Any]) -> Iterator[Any]:
    several = schema.get("anyOf", schema.get("oneOf", ()))
    schema = next((each for each in several if each.get("type", "null") != "null"), schema)
    kind = schema.get("type", "null" if schema.get("enum") == [None] else "any")
    if isinstance(kind, list):
        kind = next(each for each in kind if each != "null")
    yield from WRONG[kind]
    if "enum" in schema:
        yield "no such value"
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "maxLength" in schema:
        yield "a" * (schema["maxLength"] + 1)
    if schema.get("minLength"):
        yield "a" * (schema["minLength"] - 1)
    if "maxItems" in schema:
        yield [filled(schema["items"])] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield {f"a{number}": "a" for number in range(schema["maxProperties"] + 1)}
    if "\\u0000" in schema.get("pattern", ""):
        yield "a\0"


def filled(schema: dict[str, Any]) -> Any:
    """One value that is not refused for itself; of a file, with a path."""
    if not schema:
        return "a"
    return {"path": "a", "content_base64": ""} if schema["type"] == "object" else least(schema)
