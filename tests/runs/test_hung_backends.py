"""A backend that does not answer costs a request nothing, as long as there is another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from executions.kernel.coroutines import run_sync
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.service import execute
from providers.errors import ConnectionFailed
from providers.leases import close_all, lease_of
from providers.manager import StillStarting, manager
from providers.models import CircuitBreaker
from providers.services import breaker, preload
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import run
from tests.support.wire_server import eventually

Services = tuple[E2BServer, AgentRunServer]

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


class Hanging:
    """A method that does not return before the test lets it. Who waited for it, waited in vain."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.in_vain = False

    def __call__(self) -> Any:
        self.begun.set()
        if not self.let_go.wait(120):
            self.in_vain = True
        return self.answer


@pytest.fixture
def hanging() -> Iterator[Callable[[Any], Hanging]]:
    made: list[Hanging] = []

    def make(answer: Any) -> Hanging:
        made.append(Hanging(answer))
        return made[-1]

    yield make
    for one in made:
        one.let_go.set()
    close_all()
    manager.close()
    assert not any(one.in_vain for one in made)


@pytest.fixture
def started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that serves. The look itself is the test's to take: it sees the database."""
    monkeypatch.setattr(preload, "is_on", lambda: True)


@pytest.fixture
def route(liar: Liar, services: Services) -> Services:
    make_route("liar", "e2b")
    with lease_of("e2b"):
        return services


def test_one_that_hangs_while_it_starts_is_passed_over(
    liar: Liar, route: Services, alice: Caller, started_ahead: None, hanging: Any
) -> None:
    start = hanging(True)
    liar.does("initialize", start)
    for _ in range(3):
        assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert hops(last_execution()) == ["liar passed over", "e2b served"]
    assert "still starting" in last_execution().hops[0]["reason"]
    assert start.begun.wait(60)
    assert liar.calls.count("initialize") == 1
    assert not CircuitBreaker.objects.filter(failures__gt=0).exists()
    start.let_go.set()
    assert eventually(lambda: run(alice, "print(1)").json()["provider"] == "liar")


def test_all_of_a_route_are_started_before_they_are_needed(liar: Liar, route: Services) -> None:
    close_all()
    manager.close()
    preload.start_all()
    assert eventually(lambda: all(map(_is_there, ("liar", "e2b"))))
    assert liar.calls.count("initialize") == 1


def _is_there(provider_id: str) -> bool:
    try:
        with lease_of(provider_id, wait=False):
            return True
    except StillStarting:
        return False


def test_a_command_waits_for_what_nobody_else_starts(
    liar: Liar, route: Services, alice: Caller
) -> None:
    close_all()
    manager.close()
    assert run(alice, "print(1)").json()["provider"] == "liar"


@pytest.mark.parametrize("method", ["initialize", "is_full", "get_supported_languages"])
def test_an_open_breaker_is_asked_before_anything_that_hangs(
    liar: Liar, route: Services, alice: Caller, hanging: Any, method: str
) -> None:
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("liar", ConnectionFailed("x"))
    liar.does(method, hanging(True))
    assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert "out of service" in last_execution().hops[0]["reason"]


def test_one_that_hangs_when_it_is_looked_at_serves_by_what_was_known(
    liar: Liar, route: Services, alice: Caller, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(alice, "print(1)").json()["provider"] == "liar"
    full, languages = hanging(True), hanging(["bash"])
    liar.does("is_full", full)
    liar.does("get_supported_languages", languages)
    assert eventually(lambda: run(alice, "print(1)").json() and full.begun.is_set())
    assert run(alice, "print(1)").json()["provider"] == "liar"
    full.let_go.set()
    assert eventually(lambda: run(alice, "print(1)").json()["provider"] == "e2b")
    assert last_execution().hops[0]["reason"] == "liar is full."


def test_nobody_waits_on_a_thread_for_the_only_provider(
    liar: Liar, alice: Caller, hanging: Any
) -> None:
    """The work yields what it waits for, so that the web server's thread is free meanwhile."""
    start = hanging(True)
    liar.does("initialize", start)
    work = execute(ExecutionRequest("print(1)"), By.of_key(alice.api_key))
    awaited = work.send(None)
    assert not awaited.done()
    assert start.begun.wait(60)
    assert last_execution().status == "running"
    start.let_go.set()
    awaited.result(60)
    try:
        while True:
            work.send(None).exception(60)
    except StopIteration as end:
        outcome = end.value
    assert outcome.execution.status == "succeeded"


def test_a_process_gets_to_serve_though_its_provider_hangs(
    liar: Liar, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.manager.WARM_SECONDS", 0.1)
    start = hanging(True)
    liar.does("initialize", start)
    assert not manager.warm()
    start.let_go.set()
    assert eventually(manager.warm)


def test_the_languages_of_those_that_are_there_are_told(
    liar: Liar, route: Services, alice: Caller, started_ahead: None, hanging: Any
) -> None:
    liar.does("initialize", hanging(True))
    told = alice.client.get("/api/v1/languages").json()["languages"]
    assert "python" in told


def test_an_answer_does_not_wait_for_the_end_of_its_sandbox(
    liar: Liar, alice: Caller, hanging: Any
) -> None:
    destroy = hanging(True)
    liar.does("close", destroy)
    request = ExecutionRequest("print(1)")
    outcome = run_sync(execute(request, By.of_key(alice.api_key)))
    assert Execution.objects.get(pk=outcome.execution.pk).status == "succeeded"
    assert destroy.begun.wait(60)
    assert not active_runs.wait_for_ends(0.01)
    # Whoever ends the process waits, and the provider is kept open for it.
    [slot] = manager._slots
    assert slot.users == 1
    destroy.let_go.set()
    assert active_runs.wait_for_ends(60)
    assert slot.users == 0


def test_what_somebody_went_away_from_is_destroyed(liar: Liar, alice: Caller, hanging: Any) -> None:
    with lease_of("liar"):
        pass
    create = hanging(liar.module.LiarsSandbox())
    liar.does("open", create)
    work = execute(ExecutionRequest("print(1)"), By.of_key(alice.api_key))
    work.send(None)
    assert create.begun.wait(60)
    with pytest.raises(KeyboardInterrupt):
        work.throw(KeyboardInterrupt())
    create.let_go.set()
    assert eventually(lambda: "close" in liar.calls)
    assert "run" not in liar.calls


@pytest.mark.parametrize("language", ["python", "cobol"])
def test_a_configuration_that_cannot_be_read_is_that_providers_failure(
    services: Services, alice: Caller, language: str
) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    with connection.cursor() as cursor:
        unread = "UPDATE providers_providerconfig SET config = %s WHERE provider_id = 'e2b'"
        cursor.execute(unread, [b"nothing that a key opens"])
    response = run(alice, "print(1)", language=language)
    execution = last_execution()
    assert hops(execution)[0] == "e2b failed SB001"
    if language == "python":
        assert response.json()["provider"] == "aliyun_codeinterpreter"
    else:
        assert (response.status_code, execution.status) == (503, "error")


def test_a_lone_configuration_that_cannot_be_read_is_told_and_recorded(
    services: Services, alice: Caller
) -> None:
    make_route("e2b")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE providers_providerconfig SET config = %s", [b"x"])
    response = run(alice, "print(1)")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SB001")
    assert (last_execution().error_code, last_execution().retryable) == ("SB001", True)
