"""A request that is sent again with its idempotency key never runs twice."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import connections
from rest_framework.test import APIClient

from executions.models import Execution
from tests.conftest import Caller
from tests.running import run


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

    assert {answer.status_code for answer in answers} <= {200, 202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum(event.startswith("execute") for event in scripted()) == 1
