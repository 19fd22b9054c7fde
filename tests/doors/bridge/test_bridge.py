"""A call over the bridge: what is asked for, who asks, and what comes back."""

from __future__ import annotations

import base64
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from executions.capabilities.playground.service import recorded_request
from executions.doors.bridge import LARGE_BYTES, Bridge, exit_code_of, read_arguments, read_frame
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.runs.provider_calls import lender
from executions.tenants.keys import create_api_key, revoke
from providers.errors import InvalidConfiguration
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.routing import last_execution
from tests.support.running import run

pytestmark = pytest.mark.one_database

# RAGFlow's own, of which a reader knows no more.
KEYS = {"stdout": str, "stderr": str, "returned": str, "artifacts": list}
BYTES = bytes(range(256))


def call(code: str = "print(1)", **body: Any) -> dict[str, Any]:
    return Bridge().call({"code": code, **body})


def refusal(answer: dict[str, Any]) -> tuple[int, str, str | None]:
    return exit_code_of(answer), answer["error"]["code"], answer["error"]["field"]


def test_a_run_is_recorded_and_answered_as_ragflow_reads_it(local_active: None) -> None:
    code = "def main(a, b):\n    print('adding')\n    return {'sum': a + b, 'of': 'ü'}"
    answer = call(code, arguments={"a": 1, "b": 2}, language="python3", timeout=600)

    assert {name: type(answer[name]) for name in KEYS} == KEYS
    assert (answer["stdout"], answer["stderr"], answer["error"]) == ("adding\n", "", None)
    assert answer["returned"] == '{"sum":3,"of":"ü"}'
    record = last_execution()
    metadata = answer["metadata"]
    assert (metadata["id"], metadata["status"]) == (str(record.pk), "succeeded")
    assert (record.tenant_slug, record.api_key, record.timeout) == ("internal", None, 600)
    assert metadata["receipt"]["sequence"] == LedgerEntry.objects.latest("sequence").sequence
    # What RAGFlow's manager_client looks for in Metadata.
    assert metadata["result_present"] is True
    assert metadata["result_value"] == {"sum": 3, "of": "ü"}
    assert not {"result", "structured_result"} & metadata.keys()
    assert exit_code_of(answer) == 0


@pytest.mark.parametrize(
    ("value", "returned"),
    [("None", "null"), ("'x'", '"x"'), ("0", "0"), ("[1.5, True]", "[1.5,true]")],
)
def test_what_main_returns_is_json_whatever_it_is(liar: Liar, value: str, returned: str) -> None:
    liar.answers(has_result=True, result=eval(value))
    assert call()["returned"] == returned
    liar.answers(has_result=False)
    assert call()["returned"] == ""


def test_what_came_of_the_code_is_an_answer_that_four_keys_tell(liar: Liar) -> None:
    liar.answers(exit_code=3, stderr="Traceback: no\n")
    failed = call()
    assert (failed["metadata"]["status"], failed["metadata"]["exit_code"]) == ("failed", 3)
    assert (failed["stderr"], failed["error"]) == ("Traceback: no\n", None)
    liar.answers(exit_code=None, timed_out=True, stderr="half")
    ended = call()
    assert ended["metadata"]["status"] == "timed_out"
    assert ended["stderr"].startswith("half\nSB005: ")
    assert [exit_code_of(each) for each in (failed, ended)] == [0, 0]


def test_a_key_says_whose_run_it_is(
    liar: Liar, settings: Any, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    settings.CODE_EXEC_API_KEY = alice.key_text
    execution_id = call()["metadata"]["id"]

    record = last_execution()
    assert (record.tenant, record.api_key) == (alice.tenant, alice.api_key)
    seen = [
        caller.client.get(f"/api/v1/executions/{execution_id}").status_code
        for caller in (alice, bob, charlie)
    ]
    assert seen == [200, 200, 404]

    for limits in ({"scopes": "files read"}, {"languages": "nodejs"}, {"providers": "e2b"}):
        settings.CODE_EXEC_API_KEY = create_api_key(alice.tenant, "held", **limits)[1]
        code, kind, _ = refusal(call())
        assert (code, kind) == (2, "forbidden"), limits
    settings.CODE_EXEC_API_KEY = alice.key_text
    alice.tenant.max_running = 0
    alice.tenant.save()
    assert refusal(call()) == (125, "SB008", "running")
    revoke(alice.api_key)
    assert refusal(call()) == (2, "SB002", "CODE_EXEC_API_KEY")
    settings.CODE_EXEC_API_KEY = charlie.key_text
    charlie.tenant.is_active = False
    charlie.tenant.save()
    refused = call()
    assert refusal(refused) == (2, "SB002", "CODE_EXEC_API_KEY")
    assert charlie.key_text not in str(refused)
    assert Execution.objects.count() == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "code"),
        ({"code": ""}, "code"),
        ({"code": "print(1)\0"}, "code"),
        ({"code": "\ud800"}, "code"),
        ({"code": "1", "cod": "2"}, "cod"),
        ({"code": "1", "session": "x"}, "session"),
        ({"code": "1", "mode": "async"}, "mode"),
        ({"code": "1", "usual_timeout": 1e9}, "usual_timeout"),
        ({"code": "1", "timeout": -1}, "timeout"),
        ({"code": "1", "timeout": "5"}, "timeout"),
        ({"code": "1", "timeout": True}, "timeout"),
        ({"code": "1", "timeout": float("inf")}, "timeout"),
        ({"code": "1", "timeout": 601}, "timeout"),
        ({"code": "1", "language": "cobol"}, "language"),
        ({"code": "1", "arguments": [1]}, "arguments"),
        ({"code": "1", "entrypoint": "repl"}, "entrypoint"),
        ({"code": "1", "files": [{"path": "../x", "content_base64": ""}]}, "files[0].path"),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_field_and_not_recorded(
    liar: Liar, body: dict[str, Any], field: str
) -> None:
    answer = Bridge().call(body)
    assert refusal(answer) == (2, "SB002", field)
    assert {name: type(answer[name]) for name in KEYS} == KEYS
    assert Execution.objects.count() == 0


@pytest.mark.parametrize("arguments", [("1",), ("1", "python", "1"), ("--serve", "1"), ("1",) * 5])
def test_another_number_of_arguments_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match="all four of") as refused:
        call_command("code_exec", *arguments)
    assert refused.value.returncode == 2


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"", "request"),
        (b"[]", "request"),
        (b'{"code": 1', "request"),
        (b'{"code":"1"} {"code":"2"}', "request"),
        (b'{"code":"\xff"}', "request"),
        ('{"code":"1"}'.encode("utf-16"), "request"),
        (b'{"code":"1\x00"}', "request"),
        (b'{"timeout": NaN}', "request"),
        (b"[" * 100_000, "request"),
        (b'{"id": {}}', "id"),
        (b'{"id": 1.5}', "id"),
        (b'{"id": true}', "id"),
        (b'{"id": 9007199254740993}', "id"),
        (b'{"id": "' + b"x" * 201 + b'"}', "id"),
    ],
)
def test_a_text_that_is_no_request_is_refused(text: bytes, field: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        read_frame(text)
    assert refused.value.field == field


def test_four_arguments_stand_for_a_request(liar: Liar) -> None:
    wanted = {"code": "print(1)", "language": "python", "timeout": 7.0, "arguments": {"n": 1}}
    assert read_arguments("print(1)", "python", "7", '{"n": 1}') == wanted
    assert Bridge().call(read_arguments("print(1)", "python", "", ""))["error"] is None
    endless = read_arguments("print(1)", "python", "nan", "")
    assert refusal(Bridge().call(endless)) == (2, "SB002", "timeout")
    with pytest.raises(InvalidConfiguration, match="timeout"):
        read_arguments("1", "python", "soon", "")
    with pytest.raises(InvalidConfiguration, match="arguments"):
        read_arguments("1", "python", "", "{")


@pytest.mark.parametrize(
    ("longest", "wanted", "seconds"),
    [
        (None, {}, 600),
        (None, {"timeout": 0}, 600),
        (None, {"timeout": 450}, 450),
        (20, {"timeout": 600}, 20),
        (1000, {"timeout": 600}, 600),
    ],
)
def test_the_time_of_a_component_is_allowed_and_cut_to_the_providers(
    liar: Liar, settings: Any, longest: float | None, wanted: dict[str, Any], seconds: float
) -> None:
    assert settings.SANDBOX_MAX_TIMEOUT_SEC < settings.COMPONENT_EXEC_TIMEOUT == 600
    liar.does("max_timeout", lambda: longest)
    answer = call(**wanted)
    assert (liar.module.jobs[-1].timeout, answer["metadata"]["timeout"]) == (seconds, seconds)
    record = last_execution()
    assert record.started_at is not None
    assert record.deadline is not None
    assert (record.deadline - record.started_at).total_seconds() >= seconds
    again = recorded_request(record)
    assert (again.timeout or again.usual_timeout) == seconds


def test_the_api_allows_no_more_than_before(liar: Liar, alice: Caller) -> None:
    assert run(alice, "print(1)", timeout=301).status_code == 400


def test_artifacts_keep_every_byte_inline_and_by_file(local_active: None, tmp_path: Path) -> None:
    code = f"""
import os
os.makedirs("artifacts/deep", exist_ok=True)
open("artifacts/deep/small.bin", "wb").write(bytes(range(256)))
open("artifacts/x y.png", "wb").write(bytes(range(256)) * {LARGE_BYTES // 256 + 1})
"""
    inline = {each["name"]: each for each in call(code)["artifacts"]}
    assert base64.b64decode(inline["deep/small.bin"]["content_b64"]) == BYTES
    assert inline["x y.png"]["mime_type"] == "image/png"
    large = base64.b64decode(inline["x y.png"]["content_b64"])
    assert len(large) == inline["x y.png"]["size"] == LARGE_BYTES + 256

    answer = Bridge(tmp_path).call({"code": code})
    found = {each["name"]: each for each in answer["artifacts"]}
    assert base64.b64decode(found["deep/small.bin"]["content_b64"]) == BYTES
    by_file = found["x y.png"]
    assert "content_b64" not in by_file
    path = Path(by_file["path"])
    assert path.parent == tmp_path / answer["metadata"]["id"]
    assert path.read_bytes() == large
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]

    unwritable = Bridge(tmp_path / "gone").call({"code": code})
    assert all("content_b64" in each for each in unwritable["artifacts"])


def test_the_provider_may_be_named_for_the_bridge_alone(
    liar: Liar, settings: Any, alice: Caller
) -> None:
    settings.CODE_EXEC_PROVIDER_TYPE = "nobody"
    with pytest.raises(InvalidConfiguration, match="nobody"):
        Bridge().check()
    settings.CODE_EXEC_PROVIDER_TYPE = "local"
    Bridge().check()
    Bridge().warm()
    with lender("local")(wait=False):
        pass
    assert call()["metadata"]["provider"] == "local"
    assert run(alice, "print(1)").json()["provider"] == "liar"
    with pytest.raises(InvalidConfiguration, match="not a directory"):
        Bridge(Path("/nowhere")).check()


def test_what_could_not_be_run_is_an_answer(liar: Liar) -> None:
    liar.does("open", lambda: 1 / 0)
    assert refusal(call()) == (125, "SB009", None)


@pytest.mark.only_on("sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_locked_database_is_told_with_that_nothing_ran(liar: Liar) -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
    with closing(sqlite3.connect(connection.settings_dict["NAME"])) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = call()
    connection.close()
    assert refusal(answer) == (125, "SB009", None)
    assert (answer["error"]["ran"], "open" in liar.calls) == (False, False)
