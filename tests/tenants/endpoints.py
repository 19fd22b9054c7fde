"""Every endpoint of the API, from its URL table, and a request to each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.urls import URLPattern, get_resolver, reverse
from rest_framework.test import APIClient

from executions.doors.native.authentication import NEEDS

MISSING = UUID("01a1fd3e-5869-7be3-b4ad-c3848c823008")
# A value for each parameter that an address may have. A new parameter needs one here.
SOME: dict[str, Any] = {
    **dict.fromkeys(
        ("execution_id", "session_id", "snapshot_id", "schedule_id", "call_id", "build_id"), MISSING
    ),
    "context_id": "default",
    "pid": 1,
    "name": "plot.txt",
    "sandbox_id": MISSING.hex,
    "method": "Update",
    "secret": "secret_1",
    "template": "nothing",
    "alias": "nothing",
    "digest": "a1",
    "number": 1,
}
ENDPOINTS = [(name, method) for name, methods in NEEDS.items() for method in methods]
# One, whose making costs more than a request.
CLIENT = APIClient()


def patterns() -> Iterator[URLPattern]:
    yield from get_resolver("executions.doors.native.urls").url_patterns


def parameters_of(name: str) -> set[str]:
    """Return the parameters of an endpoint's address."""
    (found,) = (each for each in patterns() if each.name == name)
    return set(found.pattern.converters)


def ask(key_text: str, name: str, method: str, **ids: Any) -> Any:
    """Send a request without content; `ids` replace the values of `SOME`."""
    values = {each: {**SOME, **ids}[each] for each in parameters_of(name)}
    body = None if method == "GET" else {}
    CLIENT.credentials(HTTP_X_API_KEY=key_text)
    return getattr(CLIENT, method.lower())(reverse(name, kwargs=values), body)
