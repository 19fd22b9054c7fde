"""Whatever is asked is answered as the API's description says: with no failure of the service, no
status and no media type that it does not name, and no body of another shape.

`make soak` asks at random for much longer (tests/chaos/described.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import jsonschema
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from executions.tenants.keys import create_api_key
from executions.tenants.models import Scope, Tenant
from tests.conftest import Caller
from tests.kernel.descriptions import least, operations, outside, resolved
from tests.support.sessions import URL, cell, opened
from tests.support.templates import built

pytestmark = pytest.mark.one_database

# Streams do not end, so they have tests of their own (test_streamed_runs.py).
STREAMS, ADMINISTRATION = "/events", "/api/admin"
JSON = "application/json"
BODIES = (b"", b"null", b"[]", b"{", b"{}", b'{"nobody_knows_it": 1}', b"\xff")
FILE = SimpleUploadedFile("a.txt", b"a")
EMPTY_TAR = bytes(1024)
GIVEN = {
    "run_execution": {"code": "print(1)"},
    "run_in_session": {"code": "print(1)"},
    "start_process": {"command": ["true"]},
    "signal_process": {"signal": "SIGCONT"},
    "set_config": {"provider_type": "kept_here", "config": {}, "set_active": False},
    "set_active": {"provider": "kept_here"},
    "test_connection": {"provider": "kept_here"},
}
NIGHTLY = {"name": "nightly", "cron": "0 3 * * *", "request": {"code": "print(1)"}}
# They end what the others need, as does what administration changes.
LAST = (
    "remove_session_file",
    "end_context",
    "delete_snapshot",
    "close_session",
    "delete_schedule",
    "delete_template",
)

Operation = tuple[str, str, dict[str, Any]]


def described() -> list[Operation]:
    found = [each for each in operations() if not each[0].endswith(STREAMS)]
    return sorted(found, key=lambda each: (_is_last(*each), each[0], each[1]))


def _is_last(path: str, method: str, operation: dict[str, Any]) -> bool:
    return operation["operationId"] in LAST or path.startswith(ADMINISTRATION)


def assert_described(operation: dict[str, Any], answer: Any) -> None:
    asked = (operation["operationId"], answer.status_code)
    assert answer.status_code < 500, (asked, answer.content)
    assert str(answer.status_code) in operation["responses"], (asked, answer.content)
    content = operation["responses"][str(answer.status_code)].get("content", {})
    media_type = answer.headers.get("Content-Type", "").partition(";")[0]
    if not content:
        assert not answer.content, asked
    elif "*/*" not in content:
        assert media_type in content, (asked, media_type)
    if media_type == JSON and JSON in content:
        body = json.loads(answer.content)
        jsonschema.Draft202012Validator(resolved(content[JSON]["schema"])).validate(body)


def query_of(operation: dict[str, Any]) -> dict[str, Any]:
    """What has to be given, and nothing else."""
    return {
        each["name"]: least(each["schema"])
        for each in operation.get("parameters", ())
        if each["in"] == "query" and each.get("required")
    }


def queries(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    valid = query_of(operation)
    yield valid
    if valid:
        yield {}
    for each in operation.get("parameters", ()):
        if each["in"] == "query":
            wrong = next(outside(each["schema"]), "no such value")
            for value in ("", wrong, "\0"):
                yield {**valid, each["name"]: value}


def body_of(operation: dict[str, Any]) -> tuple[str, Any]:
    """Its media type, and one that is valid."""
    content = operation.get("requestBody", {}).get("content", {})
    for media_type, described_body in content.items():
        if media_type == "multipart/form-data":
            return MULTIPART_CONTENT, encode_multipart(BOUNDARY, {"user_id": "a", "file": FILE})
        if media_type != JSON:
            return media_type, EMPTY_TAR
        schema = {**resolved(described_body["schema"]), "type": "object"}
        return JSON, GIVEN.get(operation["operationId"]) or least(schema)
    return JSON, None


def send(caller: Caller, each: Operation, ids: dict[str, Any], **asked: Any) -> Any:
    path, method, operation = each
    media_type, body = body_of(operation)
    query = asked.pop("query", query_of(operation))
    body = asked.pop("body", body)
    if not isinstance(body, bytes):
        body = b"" if body is None else json.dumps(body).encode()
    return caller.client.generic(
        method.upper(),
        path.format(**ids),
        body,
        **{"content_type": media_type, "query_params": query, **asked},
    )


@pytest.fixture
def ids(kept_here: None, alice: Caller) -> dict[str, Any]:
    """One of each thing that an address names."""
    session = opened(alice)
    path = f"{URL}/{session['id']}"
    started = alice.client.post(
        f"{path}/processes", {"shell": "cat", "background": True, "stdin": True}
    )
    alice.client.generic("PUT", f"{path}/files/content?path=a", b"a")
    snapshot = alice.client.post(f"{path}/snapshot", {})
    return {
        "session_id": session["id"],
        "execution_id": cell(alice, session, "print(1)").json()["id"],
        # None is there: a run that calls tools is one that is followed.
        "call_id": uuid4(),
        "snapshot_id": snapshot.json()["id"],
        "schedule_id": alice.client.post("/api/v1/schedules", NIGHTLY).json()["id"],
        "pid": started.json()["pid"],
        "context_id": "default",
        "name": "a",
        "template": build_at(alice.tenant),
        "number": 1,
    }


def build_at(tenant: Tenant) -> str:
    return built(tenant).template.name


@pytest.fixture(
    params=[
        "execute files read sessions templates",
        "execute files read sessions templates admin",
    ]
)
def caller(request: pytest.FixtureRequest, alice: Caller) -> Caller:
    return Caller(*create_api_key(alice.tenant, "any", None, request.param))


def test_what_is_asked_rightly_is_answered_as_described(
    caller: Caller, ids: dict[str, Any]
) -> None:
    is_administrator = caller.api_key.has_scope(Scope.ADMIN)
    nothing = {name: uuid4() for name in ids} | {
        "pid": 2**31,
        "name": "\n",
        "number": 2**31,
    }
    for each in described():
        for query in queries(each[2]):
            assert_described(each[2], send(caller, each, ids, query=query))
        assert_described(each[2], send(caller, each, nothing))
        if each[0].startswith(ADMINISTRATION):
            answer = send(caller, each, ids)
            assert answer.status_code == (200 if is_administrator else 403), answer.content


def test_what_is_asked_wrongly_is_answered_as_described(alice: Caller, ids: dict[str, Any]) -> None:
    everything = Caller(*create_api_key(alice.tenant, "any", None, " ".join(Scope.values)))
    nobody = Caller(alice.api_key, "cfd_nobody")
    for each in described():
        for caller in (nobody, Caller(alice.api_key, "")):
            assert_described(each[2], send(caller, each, ids))
        if "requestBody" in each[2]:
            for body in BODIES:
                assert_described(each[2], send(everything, each, ids, body=body))
            assert_described(each[2], send(everything, each, ids, content_type="text/plain"))
            answer = send(everything, each, ids, headers={"Content-Length": "9" * 12})
            assert_described(each[2], answer)
        chunked = {"Transfer-Encoding": "chunked"}
        assert_described(each[2], send(everything, each, ids, body=b"", headers=chunked))
