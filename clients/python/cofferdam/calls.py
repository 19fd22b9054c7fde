"""Requests as values, before they are sent."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

EXECUTIONS = "/api/v1/executions"
SESSIONS = "/api/v1/sessions"
NDJSON = "application/x-ndjson"


@dataclass(frozen=True)
class Call:
    """One request. `is_repeatable`: sending it twice has the same effect as sending it once."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = True


def get(path: str, /, **params: object) -> Call:
    return Call("GET", path, _params(params))


def delete(path: str, /, **params: object) -> Call:
    return Call("DELETE", path, _params(params))


def post(path: str, body: Mapping[str, Any] | None = None, *, is_repeatable: bool = False) -> Call:
    """A POST request. Fields that are None are left out; the service uses its defaults."""
    sent = {name: value for name, value in (body or {}).items() if value is not None}
    return Call("POST", path, json=sent, is_repeatable=is_repeatable)


def put(path: str, content: bytes, /, **params: object) -> Call:
    return Call("PUT", path, _params(params), content=content, headers=_BYTES)


def post_bytes(path: str, content: bytes, /, **params: object) -> Call:
    return Call("POST", path, _params(params), content=content, headers=_BYTES, is_repeatable=False)


def run(path: str, code: str, options: Mapping[str, Any], **more: object) -> Call:
    """A request to run code. However often it is sent, the code runs once."""
    body = {**options, "code": code, **more}
    key = body.pop("idempotency_key", None) or str(uuid.uuid4())
    files: Mapping[str, bytes | str] = body.pop("files", None) or {}
    if files:
        body["files"] = [{"path": name, "content_base64": _base64(files[name])} for name in files]
    return post(path, {**body, "idempotency_key": key}, is_repeatable=True)


def streamed(call: Call, *, detach: bool = False) -> Call:
    """The same request, answered as a stream of events."""
    params = {**call.params, "detach": "1"} if detach else call.params
    headers = {**call.headers, "Accept": NDJSON}
    return Call(
        call.method, call.path, params, call.json, call.content, headers, call.is_repeatable
    )


def followed(path: str, after: int) -> Call:
    """A request for the events of a run that another request started."""
    return streamed(get(path, after=after))


def next_of(path: str, url: object) -> Call | None:
    """The next page. Only the query of its URL is used, so the key goes to this service alone."""
    return Call("GET", path, dict(parse_qsl(urlsplit(url).query))) if isinstance(url, str) else None


def part(name: str) -> str:
    """Encode a name as one part of a path. Raises ValueError for an invalid name."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a valid name")
    return quote(name, safe="")


def artifact(execution_id: str, name: str) -> Call:
    """A request for an artifact. Raises ValueError for a name that leaves its folder."""
    parts = "/".join(map(part, name.split("/")))
    return get(f"{EXECUTIONS}/{part(execution_id)}/artifacts/{parts}")


_BYTES = {"Content-Type": "application/octet-stream"}


def _params(given: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in given.items() if value is not None}


def _base64(content: bytes | str) -> str:
    data = content.encode() if isinstance(content, str) else content
    return base64.b64encode(data).decode()
