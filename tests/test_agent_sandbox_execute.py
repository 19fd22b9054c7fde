"""POST /v1/execute, as clients of Agent Sandbox expect it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from executions.models import Artifact, Execution
from executions.services.artifacts import make_token
from tests.conftest import Caller

PATH = "/v1/execute"


def execute(caller: Caller, code: str, **body: Any) -> Any:
    return caller.client.post(PATH, {"user_id": "alice", "code": code, **body})


def test_the_last_expression_is_printed_after_the_output(local_active: None, alice: Caller) -> None:
    answer = execute(alice, "x = 5\nprint(x * 2)\nx")

    assert answer.status_code == 200
    assert answer.json() == {"output": "10\n5\n", "artifacts": []}


def test_output_holds_stdout_then_stderr_and_the_traceback(
    local_active: None, alice: Caller
) -> None:
    answer = execute(alice, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n1 / 0")

    output = answer.json()["output"]
    assert answer.status_code == 200
    assert output.startswith("out\nerr\n")
    assert "ZeroDivisionError" in output


def test_code_that_runs_too_long_keeps_its_output_and_says_so(
    local_active: None, alice: Caller, settings: Any
) -> None:
    settings.SANDBOX_TIMEOUT_SEC = 1

    output = execute(alice, "print('before', flush=True)\nwhile True: pass").json()["output"]

    assert output.startswith("before\nSB005: ")


def test_truncated_output_says_so(local_active: None, alice: Caller, settings: Any) -> None:
    settings.SANDBOX_MAX_OUTPUT_KB = 1

    output = execute(alice, "print('x' * 5000)").json()["output"]

    assert output == "x" * 1000 + "\n[output truncated]\n"


def test_an_artifact_has_a_link_that_needs_no_key(local_active: None, alice: Caller) -> None:
    artifacts = execute(alice, "open('artifacts/a b.txt', 'w').write('hello')\n1").json()[
        "artifacts"
    ]

    assert len(artifacts) == 1
    artifact = artifacts[0]
    assert set(artifact) == {"path", "size_bytes", "mime_type", "download_url"}
    assert (artifact["path"], artifact["size_bytes"], artifact["mime_type"]) == (
        "artifacts/a b.txt",
        5,
        "text/plain",
    )
    assert artifact["download_url"].startswith("http://testserver/")
    download = Client().get(artifact["download_url"])
    assert download.status_code == 200
    assert download.getvalue() == b"hello"


def test_the_record_says_whom_it_was_for(scripted: object, alice: Caller) -> None:
    execute(alice, "pass")

    record = Execution.objects.get()
    assert (record.subject, record.entrypoint, record.tenant_slug) == (
        "alice",
        "repl",
        "wonderland",
    )


def test_a_failure_of_the_service_is_a_200_with_an_error(scripted: object, alice: Caller) -> None:
    answer = execute(alice, "raise errors.ConnectionFailed('no line')")

    assert answer.status_code == 200
    assert answer.json() == {"error": "SB003: no line"}


def test_the_record_and_its_receipt_are_found_by_a_header(scripted: object, alice: Caller) -> None:
    for code in ("raise errors.ConnectionFailed('no line')", "print(1)"):
        execution_id = execute(alice, code)["X-Execution-ID"]
        record = alice.client.get(f"/api/v1/executions/{execution_id}").json()
        assert record["receipt"]["subject"] == execution_id


def test_no_provider_is_such_a_failure(no_provider: None, alice: Caller) -> None:
    answer = execute(alice, "1")

    assert answer.status_code == 200
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith("SB001")


@pytest.mark.parametrize("key_text", [None, "wrong"])
def test_a_wrong_key_is_401_in_that_apis_words(db: None, key_text: str | None) -> None:
    headers = {"X-API-Key": key_text} if key_text else {}
    answer = Client().post(
        PATH, {"user_id": "a", "code": "1"}, content_type="application/json", headers=headers
    )

    assert answer.status_code == 401
    assert answer.json() == {"detail": "Invalid API key"}


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": "session123"},
        {"session_id": "default"},
        {"session_id": ""},
        {"inputs": ["a.csv"]},
        {"user_id": None},
        {"user_id": ""},
        {"user_id": 5},
        {"user_id": "x" * 256},
        {"user_id": "a\0b"},
        {"code": None},
        {"code": ""},
        {"code": "a\0b"},
        {"presign_expires_in": 0},
        {"presign_expires_in": 604801},
        {"presign_expires_in": True},
        {"presign_expires_in": "300"},
        {"presign_expires_in": 1.5},
        {"sesion_id": "x"},
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_and_not_done_otherwise(
    body: dict[str, Any], scripted: Callable[[], list[str]], alice: Caller
) -> None:
    answer = alice.client.post(PATH, {"user_id": "alice", "code": "1", **body})

    assert answer.status_code == 400
    assert list(answer.json()) == ["detail"]
    assert next(iter(body)) in answer.json()["detail"] or "sesion_id" in body
    assert scripted() == []
    assert Execution.objects.count() == 0


def test_nulls_and_an_empty_list_are_nothing_to_refuse(scripted: object, alice: Caller) -> None:
    answer = execute(alice, "pass", session_id=None, inputs=[], presign_expires_in=None)

    assert answer.json() == {"output": "", "artifacts": []}


def test_malformed_json_is_refused(scripted: object, alice: Caller) -> None:
    answer = alice.client.generic("POST", PATH, "{", content_type="application/json")

    assert answer.status_code == 400
    assert list(answer.json()) == ["detail"]


def test_another_method_is_not_allowed(alice: Caller) -> None:
    answer = alice.client.get(PATH)

    assert answer.status_code == 405
    assert list(answer.json()) == ["detail"]


def test_another_tenant_sees_nothing_of_it(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    execute(alice, "pass")
    path = f"/api/v1/executions/{Execution.objects.get().pk}"

    assert [caller.client.get(path).status_code for caller in (alice, bob, charlie)] == [
        200,
        200,
        404,
    ]


@pytest.fixture
def artifact(scripted: object, alice: Caller) -> Artifact:
    execute(
        alice,
        "answer = ExecutionResult('', '', 0, 0.0,"
        " artifacts=[ArtifactFile('x.txt', 'text/plain', b'x')])",
    )
    return Artifact.objects.get()


def test_a_link_expires(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/artifacts/{make_token(artifact, 60)}"
    assert Client().get(path).status_code == 200

    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)

    assert Client().get(path).status_code == 404


def test_a_link_lives_as_long_as_was_asked(artifact: Artifact, alice: Caller) -> None:
    code = (
        "answer = ExecutionResult('', '', 0, 0.0,"
        " artifacts=[ArtifactFile('x.txt', 'text/plain', b'x')])"
    )
    url = execute(alice, code, presign_expires_in=1).json()["artifacts"][0]["download_url"]
    assert Client().get(url).status_code == 200

    time.sleep(1.1)

    assert Client().get(url).status_code == 404


def test_a_tampered_link_opens_nothing(artifact: Artifact) -> None:
    token = make_token(artifact, 60)
    middle = len(token) // 2
    flipped = token[:middle] + ("A" if token[middle] != "A" else "B") + token[middle + 1 :]

    for bad in (flipped, token[:-1], "x", token.replace(":", ";", 1)):
        answer = Client().get(f"/artifacts/{bad}")
        assert answer.status_code == 404, bad
        assert answer.json()["error"]["code"] == "not_found"
