"""mode=async: queued with the record, run once by a worker, by the same path."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.utils import timezone
from django_q.brokers import get_broker

from executions.runs.models import Execution
from executions.runs.queue import claim
from executions.tenants.models import ApiKey
from tests.conftest import Caller
from tests.runs.execution_shape import sum_of_parts
from tests.support.processes import ROOT
from tests.support.running import run, run_queued
from tests.support.servers import url_of_the_tests_database

pytestmark = pytest.mark.database


def work() -> int:
    """Do what a worker does until it finds nothing more. How many it ran."""
    for number in itertools.count():
        if run_queued() is None:
            return number
    raise AssertionError


@pytest.mark.django_db(transaction=True)
def test_it_is_answered_at_once_and_run_by_a_worker(
    local_active: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    code = "def main(a):\n    open('artifacts/x', 'w').write('x')\n    return a + open('in').read()"
    files = [{"path": "in", "content_base64": "ISE="}]

    answer = run(alice, code, arguments={"a": "done"}, files=files, mode="async")

    assert answer.status_code == 202
    body = answer.json()
    assert (body["status"], body["exit_code"], body["has_result"]) == ("queued", None, False)
    timings = dict(body["timings"])
    assert timings.pop("received_ms") >= 0
    assert set(timings.values()) == {None}
    assert answer["Location"].endswith(f"/api/v1/executions/{body['id']}")
    assert alice.client.get(answer["Location"]).json() == body

    work()

    done = alice.client.get(answer["Location"]).json()
    assert (done["status"], done["result"], done["runtime"]) == (
        "succeeded",
        "done!!",
        "bubblewrap",
    )
    assert [artifact["name"] for artifact in done["artifacts"]] == ["x"]
    assert done["timings"]["received_ms"] == body["timings"]["received_ms"]
    assert done["timings"]["queue_ms"] > 0
    assert sum_of_parts(done) == pytest.approx(done["timings"]["total_ms"], abs=0.01)
    assert bob.client.get(answer["Location"]).status_code == 200
    assert charlie.client.get(answer["Location"]).status_code == 404


@pytest.mark.django_db(transaction=True)
def test_no_broker_is_told_of_it(scripted: object, alice: Caller) -> None:
    """So none that is away, hangs or loses what it was given can hold it up."""
    before = get_broker().queue_size()
    run(alice, "pass", mode="async")
    assert get_broker().queue_size() == before
    assert work() == 1


@pytest.mark.django_db(transaction=True)
def test_what_it_needs_to_run_is_forgotten_once_it_has_run(scripted: object, alice: Caller) -> None:
    run(alice, "pass", mode="async")
    assert Execution.objects.get().pending is not None

    work()

    record = Execution.objects.get()
    assert (record.status, record.pending) == ("succeeded", None)


@pytest.mark.django_db(transaction=True)
def test_code_that_is_not_kept_runs_all_the_same(
    scripted: object, alice: Caller, settings: Any
) -> None:
    settings.SANDBOX_STORE_CODE = "never"
    run(alice, "answer = ExecutionResult('ran', '', 0, 0.0)", mode="async")
    assert Execution.objects.get().code == ""

    work()

    assert Execution.objects.get().stdout == "ran"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"revoked_at": timezone.now()}, "revoked"),
        ({"scopes": "read"}, "may no longer run python"),
        ({"languages": "bash"}, "may no longer run python"),
    ],
)
def test_what_a_key_has_queued_is_not_run_once_the_key_may_not(
    scripted: Callable[[], list[str]], alice: Caller, changed: dict[str, Any], said: str
) -> None:
    run(alice, "pass", mode="async")
    ApiKey.objects.update(**changed)

    work()

    record = Execution.objects.get()
    assert record.status == "error"
    assert said in record.error_message
    assert scripted() == []


@pytest.mark.django_db(transaction=True)
def test_a_request_that_is_no_longer_allowed_ends_unrun(
    scripted: Callable[[], list[str]], alice: Caller, settings: Any
) -> None:
    run(alice, "pass", timeout=200, mode="async")
    settings.SANDBOX_MAX_TIMEOUT_SEC = 100

    work()

    record = Execution.objects.get()
    assert (record.status, record.error_code, record.error_field) == ("error", "SB002", "timeout")
    assert scripted() == []


@pytest.mark.django_db(transaction=True)
def test_what_was_taken_is_not_taken_again(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    run(alice, "pass", mode="async").json()

    assert run_queued() is not None
    assert run_queued() is None

    assert sum(event.startswith("execute") for event in scripted()) == 1


def test_a_worker_that_looked_before_another_claimed_gets_nothing(
    scripted: object, alice: Caller
) -> None:
    execution_id = run(alice, "pass", mode="async").json()["id"]
    rivals: list[Execution | None] = []

    def claim_first(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and not rivals:
            rivals.append(None)
            rivals[0] = claim(execution_id)
        return execute(sql, *rest)

    with connection.execute_wrapper(claim_first):
        late = claim(execution_id)

    assert rivals[0] is not None
    assert late is None


@pytest.mark.django_db(transaction=True)
def test_of_many_workers_one_runs_it(scripted: Callable[[], list[str]], alice: Caller) -> None:
    run(alice, "pass", mode="async").json()
    barrier = threading.Barrier(8)
    outcomes = []

    def compete() -> None:
        barrier.wait()
        try:
            outcomes.append(run_queued())
        finally:
            connections.close_all()

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == 8
    assert sum(outcome is not None for outcome in outcomes) == 1
    assert sum(event.startswith("execute") for event in scripted()) == 1


@pytest.mark.django_db(transaction=True)
def test_an_error_ends_the_record_and_not_the_worker(scripted: object, alice: Caller) -> None:
    unlucky = run(alice, "pass", language="unlucky", mode="async").json()
    buggy = run(alice, "raise RuntimeError('a bug')", mode="async").json()

    work()

    for body, code in ((unlucky, "SB004"), (buggy, "SB009")):
        shown = alice.client.get(f"/api/v1/executions/{body['id']}").json()
        assert (shown["status"], shown["error"]["code"]) == ("error", code)


@pytest.mark.django_db(transaction=True)
def test_an_idempotency_key_shows_what_became_of_it(scripted: object, alice: Caller) -> None:
    first = run(alice, "pass", mode="async", idempotency_key="once")
    waiting = run(alice, "pass", mode="async", idempotency_key="once")
    work()
    done = run(alice, "pass", mode="async", idempotency_key="once")

    assert [each.status_code for each in (first, waiting, done)] == [202, 202, 200]
    assert len({each.json()["id"] for each in (first, waiting, done)}) == 1
    assert done.json()["status"] == "succeeded"
    assert work() == 0


@contextmanager
def real_worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`manage.py qcluster` over the test's rows. It has ended by itself afterwards."""
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "manage.py", "qcluster"],
            cwd=ROOT,
            env=os.environ
            | {
                "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
                "DATABASE_URL": url_of_the_tests_database(),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield worker
        assert worker.poll() is None
        worker.terminate()
        worker.wait(60)
    finally:
        worker.kill()
        worker.wait()


def status_is(execution_id: str, log: Path, *wanted: str) -> Execution:
    deadline = time.monotonic() + 60
    while True:
        execution = Execution.objects.get(pk=execution_id)
        if execution.status in wanted:
            return execution
        assert time.monotonic() < deadline, (execution.status, log.read_text()[-4000:])
        time.sleep(0.05)


@pytest.mark.django_db(transaction=True)
def test_a_real_worker_runs_it_and_told_to_end_finishes_that_and_begins_nothing(
    local_active: None, alice: Caller, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    body = run(alice, "def main():\n    return 6 * 7", mode="async").json()
    code = "import time\ntime.sleep(2)\nprint('finished')"
    with real_worker(log):
        assert status_is(body["id"], log, "succeeded").result == "42"
        assert get_broker().queue_size() == 0
        first = run(alice, code, mode="async").json()["id"]
        # A busy machine may see it end before it is seen to run.
        status_is(first, log, "running", "succeeded")
    assert Execution.objects.get(pk=first).stdout == "finished\n"
    later = run(alice, code, mode="async").json()["id"]
    assert Execution.objects.get(pk=later).status == "queued"
