"""A request that is sent again with its idempotency key never runs twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, connection, connections
from rest_framework.test import APIClient

from executions.runs.models import Execution
from executions.runs.record import reject
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support.held import opened
from tests.support.running import run

pytestmark = pytest.mark.database


def test_an_idempotency_key_repeats_the_recorded_answer(scripted: object, alice: Caller) -> None:
    code = "import uuid\nanswer = ExecutionResult(uuid.uuid4().hex, '', 0, 0.0)"

    first = run(alice, code, idempotency_key="once")
    again = run(alice, code, idempotency_key="once")
    other = run(alice, code, idempotency_key="twice")

    assert again.status_code == 200
    assert again.json() == first.json()
    assert other.json()["stdout"] != first.json()["stdout"]
    assert Execution.objects.count() == 2


def test_an_idempotency_key_with_another_request_conflicts(scripted: object, alice: Caller) -> None:
    run(alice, "pass", idempotency_key="once")

    answer = run(alice, "pass", idempotency_key="once", arguments={"other": 1})

    assert answer.status_code == 409
    assert answer.json()["error"]["field"] == "idempotency_key"
    assert Execution.objects.count() == 1


def test_an_attempt_that_never_ran_leaves_its_idempotency_key_free(
    scripted: object, alice: Caller
) -> None:
    failed = run(alice, "pass", language="unlucky", idempotency_key="once")
    again = run(alice, "pass", language="unlucky", idempotency_key="once")

    assert (failed.status_code, again.status_code) == (503, 503)
    assert failed.json()["id"] != again.json()["id"]


def test_an_attempt_that_may_have_run_is_never_run_again(scripted: object, alice: Caller) -> None:
    code = "raise errors.ConnectionFailed('lost', started=True)"

    failed = run(alice, code, idempotency_key="once")
    again = run(alice, code, idempotency_key="once")

    assert (failed.status_code, again.status_code) == (502, 502)
    assert failed.json() == again.json()
    assert sum(event.startswith("execute") for event in scripted()) == 1


@pytest.mark.django_db(transaction=True)
def test_of_many_at_once_with_one_idempotency_key_one_runs(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    barrier = threading.Barrier(8)
    answers = []

    def post() -> None:
        client = APIClient(headers={"X-API-Key": alice.key_text})
        barrier.wait()
        try:
            body = {"code": "pass", "idempotency_key": "once"}
            answers.append(client.post("/api/v1/executions", body))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {answer.status_code for answer in answers} <= {200, 202}, [
        answer.content for answer in answers
    ]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum(event.startswith("execute") for event in scripted()) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.django_db(transaction=True)
def test_who_loses_its_key_to_an_attempt_that_then_did_not_run_takes_it(
    mode: str, scripted: Callable[[], list[str]], alice: Caller
) -> None:
    """The other one ends right between the refused insert and the look at what was recorded."""
    other = opened(alice, "sync", code="pass", idempotency_key="once")

    def end_the_other() -> None:
        try:
            reject(other, ProviderUnavailable("no sandbox"))
        finally:
            connections.close_all()

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if refused and not other_thread.ident:
            other_thread.start()
            other_thread.join()
        try:
            return execute(sql, params, many, context)
        except IntegrityError:
            refused.append(sql)
            raise

    refused: list[str] = []
    other_thread = threading.Thread(target=end_the_other)
    with connection.execute_wrapper(watch):
        answer = run(alice, "pass", idempotency_key="once", mode=mode)

    assert refused, "the key was free before"
    assert answer.status_code == (200 if mode == "sync" else 202)
    assert answer.json()["id"] != str(other.pk)
    assert Execution.objects.filter(idempotency_key="once", retryable=False).count() == 1


def test_the_header_is_the_same_as_the_key_in_the_body(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller
) -> None:
    def post(caller: Caller, header: str, **body: Any) -> Any:
        headers = {"HTTP_IDEMPOTENCY_KEY": header}
        return caller.client.post("/api/v1/executions", {"code": "pass", **body}, **headers)

    first = post(alice, "once")
    assert run(alice, "pass", idempotency_key="once").json() == first.json()
    assert post(alice, "once", idempotency_key="once").json() == first.json()
    # As the header's draft writes it.
    assert post(alice, '"once"').json() == first.json()
    assert post(alice, '"o\\"nce"').json()["id"] != first.json()["id"]
    assert Execution.objects.filter(idempotency_key='o"nce').count() == 1
    assert post(charlie, "once").json()["id"] != first.json()["id"]
    assert post(alice, "once", arguments={}).status_code == 409

    for header, body in (("once", {"idempotency_key": "twice"}), ("a" * 256, {}), ("", {})):
        answer = post(alice, header, **body)
        assert answer.status_code == 400, header
        field = "idempotency_key" if body else "Idempotency-Key"
        assert answer.json()["error"]["field"] == field
    assert Execution.objects.count() == 3
