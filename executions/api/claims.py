"""What the headers of a request say of a run: who asked for it, and its idempotency key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field
from rest_framework.request import Request

from executions.kernel.declarations import Body, Query, declared, refuse
from executions.runs.requests import (
    Agent,
    ConversationName,
    IdempotencyKey,
    Model,
    OnBehalfOf,
    Traceparent,
)

T = TypeVar("T")

AGENT, MODEL, CONVERSATION, ON_BEHALF_OF = "X-Agent", "X-Model", "X-Conversation", "X-On-Behalf-Of"
TRACEPARENT, IDEMPOTENCY_KEY = "traceparent", "Idempotency-Key"
_HEADERS = {
    "agent": AGENT,
    "model": MODEL,
    "conversation": CONVERSATION,
    "on_behalf_of": ON_BEHALF_OF,
}
# A string as structured fields have it (RFC 8941), which is how the header's draft writes a key.
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')


@declared
class ClaimHeaders:
    """Who asked, in UTF-8. What the body says as well must be the same."""

    agent: Annotated[Agent, Field(alias=AGENT)] = ""
    model: Annotated[Model, Field(alias=MODEL)] = ""
    conversation: Annotated[ConversationName, Field(alias=CONVERSATION)] = ""
    on_behalf_of: Annotated[OnBehalfOf, Field(alias=ON_BEHALF_OF)] = ""
    traceparent: Annotated[Traceparent, Field(alias=TRACEPARENT)] = ""


@declared
class KeyHeader:
    """The key under which a request runs once, however often it is sent."""

    idempotency_key: Annotated[IdempotencyKey | None, Field(alias=IDEMPOTENCY_KEY)] = None


CLAIMS = Query(ClaimHeaders, headers=(*_HEADERS.values(), TRACEPARENT))
KEY = Query(KeyHeader, headers=(IDEMPOTENCY_KEY,))


def read_run(body: Body[T], request: Request, **ours: Any) -> T:
    """What is to be run, by the request's body and headers.

    Raises InvalidConfiguration also where both name something and it is not the same.
    """
    claims = CLAIMS.read(_given(request, CLAIMS.headers))
    said = {name: getattr(claims, name) for name in _HEADERS}
    if "idempotency_key" in body.known:
        headers = _given(request, KEY.headers)
        if quoted := _QUOTED.fullmatch(headers.get(IDEMPOTENCY_KEY, "")):
            headers[IDEMPOTENCY_KEY] = re.sub(r"\\(.)", r"\1", quoted[1])
        said["idempotency_key"] = KEY.read(headers).idempotency_key
    return body.read(_together(request.data, {**said}), traceparent=claims.traceparent, **ours)


def claims_of(request: Request) -> dict[str, str]:
    """What the headers say, for a request whose body has no place for it."""
    return dict(vars(CLAIMS.read(_given(request, CLAIMS.headers))))


def _together(body: Any, said: Mapping[str, Any]) -> Any:
    if not isinstance(body, dict):
        return body
    given = {name: value for name, value in said.items() if value}
    for name, value in given.items():
        # An empty claim is none, here as in a header.
        if body.get(name) not in (None, value) and (body[name] != "" or name not in _HEADERS):
            header = _HEADERS.get(name, IDEMPOTENCY_KEY)
            refuse(name, f"The header {header} has another value. Send only one of them.")
    return {**body, **given}


def _given(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    return {name: _text(name, request.headers[name]) for name in names if name in request.headers}


def _text(name: str, value: str) -> str:
    """A header's value as the UTF-8 that it was sent as; WSGI has it as Latin-1."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        refuse(name, "Must be UTF-8.")
