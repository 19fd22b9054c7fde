"""Variables of a single run: its program has them, and nobody reads them anywhere else."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from executions.runs import payloads
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from providers.e2b.provider import E2BProvider
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import run, run_queued

SECRET = "variable-4711-of-nobody-else"
ENV = {"TOKEN": SECRET}
# It says no more than whether it has what it should.
CODE = (
    "import hashlib, os, subprocess\n"
    "child = subprocess.check_output('printf %s \"$TOKEN\"', shell=True)\n"
    "own = os.environ.get('TOKEN', '').encode()\n"
    "print(own == child, len(own))"
)
SEEN = f"True {len(SECRET)}\n"
NONE = "True 0\n"

pytestmark = pytest.mark.django_db


def test_the_program_and_its_subprocesses_have_them(
    local_active: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    assert run(alice, CODE, env=ENV).json()["stdout"] == SEEN
    for caller in (alice, bob, charlie):
        assert run(caller, CODE).json()["stdout"] == NONE
    assert run(charlie, CODE, env={"TOKEN": "own"}).json()["stdout"] == "True 3\n"
    own = "echo $TOKEN"
    assert run(bob, own, language="bash", env={"TOKEN": "b"}).json()["stdout"] == "b\n"


def test_code_that_calls_tools_has_them_too(local_active: None, alice: Caller) -> None:
    tools = [{"name": "search", "parameters": {"type": "object"}}]
    assert run(alice, CODE, env=ENV, tools=tools, mode="async").status_code == 202
    outcome = run_queued()
    assert outcome is not None
    assert outcome.execution.stdout == SEEN, outcome.error


def everything() -> str:
    """All that the database has, as it is stored."""
    with connection.cursor() as cursor:
        found = []
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')
            found += [repr(row) for row in cursor.fetchall()]
    return "\n".join(found)


def is_in_files(text: str, folder: Path) -> bool:
    """Whether a file has the text. Another process looks: one that opens the file of its SQLite and
    closes it loses its locks on it, https://sqlite.org/howtocorrupt.html (2.2)."""
    found = subprocess.run(["grep", "-rqsaF", text, str(folder)], check=False, timeout=60)
    return found.returncode == 0


@pytest.mark.parametrize("files", [0, 200_000], ids=["in its row", "in a file"])
def test_they_wait_encrypted_and_are_in_no_record(
    local_active: None,
    alice: Caller,
    bob: Caller,
    charlie: Caller,
    auditor: Client,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    files: int,
) -> None:
    caplog.set_level(logging.DEBUG)
    sent: dict[str, Any] = {"env": ENV, "mode": "async"}
    if files:
        sent["files"] = [{"path": "data", "content_base64": "A" * files}]
    queued = run(alice, CODE, **sent)
    waiting = Execution.objects.get(pk=queued.json()["id"])
    assert payloads.read(waiting)["env"] == ENV
    assert SECRET not in everything()
    if connection.vendor == "sqlite":
        assert is_in_files("SQLite format", settings.DATA_DIR)
    assert not is_in_files(SECRET, settings.DATA_DIR)

    outcome = run_queued()

    assert outcome is not None
    assert outcome.execution.stdout == SEEN
    failed = run(alice, f"{CODE}\n1/0", env=ENV).json()
    assert (failed["status"], failed["stdout"]) == ("failed", SEEN)
    assert SECRET not in everything()
    assert not is_in_files(SECRET, settings.DATA_DIR)
    assert SECRET not in caplog.text + repr([vars(record) for record in caplog.records])
    for execution_id in (queued.json()["id"], failed["id"]):
        path = f"/api/v1/executions/{execution_id}"
        for caller, status in ((alice, 200), (bob, 200), (charlie, 404)):
            for ending in ("", "/events"):
                answer = caller.client.get(path + ending)
                text = b"".join(answer) if answer.streaming else answer.content
                assert answer.status_code == status
                assert SECRET.encode() not in text
        page = auditor.get(reverse("admin:executions_execution_change", args=[execution_id]))
        assert page.status_code == 200
        assert SECRET not in page.content.decode()


def test_an_idempotency_key_is_for_the_same_variables(local_active: None, alice: Caller) -> None:
    first = run(alice, CODE, env=ENV, idempotency_key="once")
    again = run(alice, CODE, env=ENV, idempotency_key="once")
    other = run(alice, CODE, env={"TOKEN": "other"}, idempotency_key="once")
    without = run(alice, CODE, idempotency_key="once")
    assert again.json()["id"] == first.json()["id"]
    assert [answer.status_code for answer in (other, without)] == [409, 409]
    assert SECRET not in other.content.decode() + without.content.decode()


def test_what_is_approved_and_run_later_is_the_request_with_its_variables() -> None:
    request = ExecutionRequest(CODE, env=ENV)
    stored = request.to_stored()
    assert ExecutionRequest.from_stored(stored).run_hash() == request.run_hash()
    others = (ExecutionRequest(CODE), ExecutionRequest(CODE, env={"TOKEN": "other"}))
    assert request.run_hash() not in {other.run_hash() for other in others}
    assert "env" not in ExecutionRequest(CODE).to_stored()
    assert SECRET not in repr(request)


@pytest.mark.parametrize(
    "env",
    [
        *({"1": SECRET}, {"A=B": SECRET}, {"A": f"{SECRET}\0"}, {"A": 1}, [SECRET]),
        *({f"V{number}": "" for number in range(101)}, {"A": "x" * 65_536}),
    ],
    ids=range(7),
)
def test_their_bounds_are_those_of_sessions(scripted: object, alice: Caller, env: Any) -> None:
    refused = run(alice, "pass", env=env)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "env")
    assert SECRET not in refused.content.decode()
    assert not Execution.objects.exists()


def test_a_provider_without_variables_is_passed_over(
    services: tuple[E2BServer, AgentRunServer], alice: Caller
) -> None:
    make_route("aliyun_codeinterpreter", "e2b")
    answer = run(alice, CODE, env=ENV).json()
    assert (answer["provider"], answer["stdout"]) == ("e2b", SEEN)
    assert hops(last_execution()) == ["aliyun_codeinterpreter passed over", "e2b served"]
    assert not services[1].executed
    assert run(alice, CODE).json()["provider"] == "aliyun_codeinterpreter"


@pytest.mark.parametrize("language", ["javascript", "bash"])
def test_e2b_sets_them_in_every_language(
    services: tuple[E2BServer, AgentRunServer], alice: Caller, language: str
) -> None:
    make_route("e2b")
    code = {"javascript": "console.log(process.env.TOKEN.length)", "bash": "echo ${#TOKEN}"}
    answer = run(alice, code[language], language=language, env=ENV).json()
    assert answer["stdout"] == f"{len(SECRET)}\n"


def test_where_no_provider_of_the_route_has_them_the_field_is_named(
    services: tuple[E2BServer, AgentRunServer], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = E2BProvider.capabilities - {"environment"}
    monkeypatch.setattr(E2BProvider, "capabilities", fewer)
    make_route("aliyun_codeinterpreter", "e2b")
    refused = run(alice, CODE, env=ENV)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "SB002")
    assert refused.json()["error"]["field"] == "env"
    assert "does not support environment variables" in refused.json()["error"]["message"]
    assert not services[0].executed
    assert not services[1].executed


def test_an_only_provider_without_them_is_sent_nothing(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    before = len(scripted())
    refused = run(alice, "pass", env=ENV)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "env")
    queued = run(alice, "pass", env=ENV, mode="async").json()
    run_queued()
    execution = Execution.objects.get(pk=queued["id"])
    assert (execution.status, execution.error_field) == ("error", "env")
    assert scripted()[before:] == []
