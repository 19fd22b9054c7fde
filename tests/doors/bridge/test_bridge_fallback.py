"""Where no provider is configured, the bridge asks RAGFlow's executor, and records it as any run."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from executions.doors.bridge import Bridge, exit_code_of
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration
from providers.executor_manager.provider import route_to
from providers.values import Job, SandboxSpec
from tests.conftest import Caller
from tests.doors.bridge.executor_server import ExecutorServer
from tests.support.lying_provider import Liar
from tests.support.routing import last_execution
from tests.support.running import run
from tests.support.wire_server import refusing

CODE = "def main(): return {'sum': 2}"


@pytest.fixture
def executor(settings: Any) -> Iterator[ExecutorServer]:
    server = ExecutorServer()
    settings.SANDBOX_HOST = server.host
    yield server
    server.close()


def call(**body: Any) -> dict[str, Any]:
    return Bridge().call({"code": CODE, **body})


def test_it_is_asked_by_its_contract_and_recorded(
    executor: ExecutorServer, no_provider: None
) -> None:
    answer = call(arguments={"n": 1}, language="javascript", timeout=600)

    sent = {"code_b64": base64.b64encode(CODE.encode()).decode(), "language": "nodejs"}
    assert executor.asked == [{**sent, "arguments": {"n": 1}}]
    assert (answer["stdout"], answer["returned"]) == ("log\n", '{"sum":2}')
    record = last_execution()
    assert (record.provider, record.runtime) == ("executor_manager", "executor_manager")
    # It does not say whom its containers served before.
    assert (record.isolation, record.sharing) == ("namespaces", "")
    assert answer["metadata"]["receipt"]["status"] == "succeeded"
    assert call(arguments=None)["error"] is None
    assert executor.asked[-1]["arguments"] == {}


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("exception", "failed", None),
        ("timeout", "timed_out", "SB005"),
        ("memory", "out_of_memory", "SB006"),
        ("unsafe", "blocked", "SB007"),
        ("busy", "error", "SB008"),
        ("internal", "error", "SB009"),
        ("no artifact", "error", "SB009"),
        ("artifacts that are none", "error", "SB009"),
        ("no shape", "failed", None),
        ("422", "error", "SB002"),
        ("500", "error", "SB009"),
        ("bad_json", "error", "SB009"),
        ("cut", "error", "SB009"),
        ("compressed", "error", "SB009"),
    ],
)
def test_what_it_answers_is_told_in_our_words(
    executor: ExecutorServer, no_provider: None, fault: str, status: str, code: str | None
) -> None:
    executor.fail("run", fault)
    answer = call()
    error = answer["error"]
    assert (answer["metadata"]["status"], error and error["code"]) == (status, code)
    assert (exit_code_of(answer) == 0) == (status != "error")
    assert Execution.objects.get().status == status
    assert len(executor.requests) == 1


def test_artifacts_of_it_keep_every_byte(executor: ExecutorServer, no_provider: None) -> None:
    executor.fail("run", "artifact")
    [artifact] = call()["artifacts"]
    assert base64.b64decode(artifact["content_b64"]) == b"\xff\x00"


def test_it_is_healthy_where_it_says_so(executor: ExecutorServer) -> None:
    with route_to(executor.host)() as lease:
        assert lease.provider.health_check()
        executor.fail("health", "500", "cut")
        assert not lease.provider.health_check()
        assert not lease.provider.health_check()


def test_what_it_cannot_do_is_refused_before_it_is_asked(
    executor: ExecutorServer, no_provider: None
) -> None:
    file = {"path": "x", "content_base64": ""}
    for body in ({"files": [file]}, {"entrypoint": "script"}, {"language": "bash"}):
        assert call(**body)["error"]["code"] == "SB002"
    assert executor.asked == []


def test_it_is_sent_no_variables(executor: ExecutorServer) -> None:
    with route_to(executor.host)() as lease:
        sandbox = lease.provider.open(SandboxSpec(), "alice")
        with pytest.raises(InvalidConfiguration) as refused:
            sandbox.run(Job(CODE, environment={"NAME": "value"}))
    assert (refused.value.field, refused.value.started) == ("environment", False)
    assert executor.asked == []


def test_one_that_is_not_there_has_run_nothing(settings: Any, no_provider: None) -> None:
    with refusing() as url:
        settings.SANDBOX_HOST = url.removeprefix("http://")
        assert call()["error"]["code"] == "SB003"
    settings.SANDBOX_HOST = ""
    assert call()["error"]["code"] == "SB001"


def test_it_is_never_asked_for_a_provider_that_fails_or_a_floor_it_is_below(
    executor: ExecutorServer, liar: Liar, alice: Caller, settings: Any
) -> None:
    liar.does("open", lambda: 1 / 0)
    assert call()["error"]["code"] == "SB009"
    settings.CODE_EXEC_PROVIDER_TYPE = "liar"
    assert call()["error"]["code"] == "SB009"
    assert executor.asked == []


def test_a_stricter_floor_and_the_api_keep_away_from_it(
    executor: ExecutorServer, no_provider: None, alice: Caller, settings: Any
) -> None:
    assert run(alice, CODE).json()["error"]["code"] == "SB001"
    settings.MINIMUM_ISOLATION = "gvisor"
    assert call()["error"]["code"] == "SB009"
    assert executor.asked == []
