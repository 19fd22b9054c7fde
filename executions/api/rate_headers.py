"""What the quota of requests adds to the description of every answer to a key: headers, and 429."""

from __future__ import annotations

from typing import Any

_WHAT = {
    "X-RateLimit-Limit": "Requests that the tenant may send per minute.",
    "X-RateLimit-Remaining": "Requests that are left in this minute.",
    "X-RateLimit-Reset": "When the full number is available again, in seconds since 1970.",
}
_RETRY = {
    "description": "Seconds to wait before the next try.",
    "schema": {"type": "integer"},
}
_REFUSED = {
    "description": "The tenant has used up its requests for this minute.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def describe(result: Any, generator: object, request: object, public: bool) -> Any:
    """A hook of drf-spectacular. Without a key, by whose 401 it is told, there are none."""
    headers = result["components"].setdefault("headers", {})
    for name, text in _WHAT.items():
        headers[name] = {"description": text, "schema": {"type": "integer"}}
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in _WHAT}
    for methods in result["paths"].values():
        for operation in methods.values():
            answers = operation.get("responses", {})
            if {"apiKey": []} not in operation.get("security", ()):
                continue
            answers.setdefault("429", {**_REFUSED})
            for status, answer in answers.items():
                if status != "401":
                    answer.setdefault("headers", {}).update(references)
                if status == "429":
                    answer["headers"]["Retry-After"] = _RETRY
    return result
