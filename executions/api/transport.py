"""What the API's description says of requests as such: bodies, and what is too long to be read.

An address and a header that are too long are refused by the web server, before there is a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TOO_LONG = {
    "query": ("414", "The URL is too long for the web server."),
    "header": ("431", "A header is too long for the web server."),
}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def describe(result: Any, generator: object, request: object, public: bool) -> Any:
    """A hook of drf-spectacular."""
    for methods in result["paths"].values():
        for operation in methods.values():
            places = {each["in"] for each in operation.get("parameters", ())}
            for place, (status, text) in _TOO_LONG.items():
                if place in places:
                    answer = {"description": text, "content": _TEXT}
                    operation["responses"].setdefault(status, answer)
            body = operation.get("requestBody")
            if body and all(_has_fields(each) for each in _schemas(body, result["components"])):
                body["required"] = True
    return result


def _schemas(body: Any, components: Any) -> Iterator[Any]:
    for content in body["content"].values():
        schema = content["schema"]
        name = schema.get("$ref", "").rpartition("/")[2]
        yield components["schemas"][name] if name else schema


def _has_fields(schema: Any) -> bool:
    """Whether it is an object, and nothing else will do."""
    return bool(schema.get("type") == "object")
