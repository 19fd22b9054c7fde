"""The record: written before anything runs, completed once, true, and never lost."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import Model
from django.utils import timezone

from executions.kernel.text import uuid7
from executions.runs.models import Artifact, Execution, ExecutionEvent, RunSignal
from executions.runs.record import TIMINGS, close_record, open_record
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.results import ValidatedResult
from executions.runs.service import execute_sync
from tests.conftest import Caller
from tests.support.refusing_table import refusing_rows
from tests.support.running import run

pytestmark = pytest.mark.database

CODE = "answer = ExecutionResult('out', 'err', 3, 0.0, {'runtime': 'odd', 'cpu_seconds': 0.5})"


def opened(caller: Caller, **request: Any) -> Execution:
    execution, is_new = open_record(
        ExecutionRequest("print(1)", **request), By.of_key(caller.api_key)
    )
    assert is_new
    return execution


def test_the_record_says_who_what_where_and_what_came_of_it(
    scripted: object, alice: Caller
) -> None:
    answer = alice.client.post(
        "/api/v1/executions",
        {"code": CODE, "arguments": {"ü": [1, None]}, "timeout": 5, "entrypoint": "script"},
        headers={"X-Request-ID": "trace"},
        REMOTE_ADDR="192.0.2.7",
    )

    record = Execution.objects.get(pk=answer.json()["id"])
    assert (record.tenant_slug, record.api_key_name) == ("wonderland", "alice")
    assert record.api_key_prefix == alice.key_text[:10]
    assert (record.request_id, record.client_address) == ("trace", "192.0.2.7")
    assert (record.language, record.entrypoint, record.mode) == ("python", "script", "sync")
    assert (record.provider, record.runtime) == ("scripted", "odd")
    assert record.config_version is not None
    assert record.code == CODE
    assert record.code_hash == "sha256:" + hashlib.sha256(CODE.encode()).hexdigest()
    assert json.loads(record.arguments) == {"ü": [1, None]}
    assert record.timeout == 5.0
    assert (record.status, record.exit_code) == ("failed", 3)
    assert (record.stdout, record.stderr) == ("out", "err")
    assert record.meta["cpu_seconds"] == 0.5
    assert record.started_at is not None
    assert record.finished_at is not None
    assert record.created_at <= record.started_at <= record.finished_at
    for timing in [getattr(record, name) for name in TIMINGS]:
        assert timing is not None
        assert timing >= 0
    assert record.pending is None


def test_the_record_is_there_before_the_code_runs(scripted: object, alice: Caller) -> None:
    code = (
        "from executions.models import Execution\n"
        "row = Execution.objects.get()\n"
        "answer = ExecutionResult(f'{row.status} {row.finished_at}', '', 0, 0.0)"
    )

    assert run(alice, code).json()["stdout"] == "running None"


@pytest.mark.django_db(transaction=True)
def test_nothing_runs_when_the_record_cannot_be_written(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    with refusing_rows("executions_execution", "disk full"):
        answer = run(alice, CODE)

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert b"disk full" not in answer.content
    assert scripted() == []


@pytest.mark.django_db(transaction=True)
def test_an_attempt_ends_even_when_its_outcome_is_one_no_record_takes(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate lets none through, so this one is put behind it."""

    def unfit(answer: Any, limits: Any) -> ValidatedResult:
        answer.exit_code = 10**30
        return ValidatedResult(answer, "", "", "")

    monkeypatch.setattr("executions.runs.service.validate_result", unfit)
    answer = run(alice, "print(1)")

    assert answer.status_code == 503
    record = Execution.objects.get()
    assert (record.status, record.error_code, record.retryable) == ("error", "SB009", False)


def test_the_record_outlives_key_and_tenant(scripted: object, alice: Caller) -> None:
    run(alice, CODE)

    alice.api_key.delete()
    alice.tenant.delete()

    record = Execution.objects.get()
    assert (record.tenant, record.api_key) == (None, None)
    assert (record.tenant_slug, record.api_key_name) == ("wonderland", "alice")


@pytest.mark.parametrize(
    ("policy", "kept_on_success", "kept_on_failure"),
    [("always", True, True), ("on_error", False, True), ("never", False, False)],
)
def test_code_is_kept_as_the_policy_says_and_its_hash_always(
    policy: str,
    kept_on_success: bool,
    kept_on_failure: bool,
    scripted: object,
    alice: Caller,
    settings: Any,
) -> None:
    settings.SANDBOX_STORE_CODE = policy

    for code, kept in (("pass", kept_on_success), (CODE, kept_on_failure)):
        record = Execution.objects.get(pk=run(alice, code).json()["id"])
        assert record.code == (code if kept else "")
        assert record.code_hash == "sha256:" + hashlib.sha256(code.encode()).hexdigest()


def test_code_that_never_got_a_sandbox_is_kept_on_error(
    scripted: object, alice: Caller, settings: Any
) -> None:
    settings.SANDBOX_STORE_CODE = "on_error"

    run(alice, "pass", language="unlucky")

    assert Execution.objects.get().code == "pass"


def test_what_no_database_takes_is_replaced_in_answer_and_record_alike(
    scripted: object, alice: Caller
) -> None:
    code = (
        "answer = ExecutionResult('a\\0b\\ud800c', '\\udfff', 0, 0.0, {'note': 'x\\0'},"
        " has_result=True, result={'k\\0\\ud800': '\\udfff \\0'})"
    )

    answer = run(alice, code)

    body = answer.json()
    assert (body["stdout"], body["stderr"]) == ("a\ufffdb\ufffdc", "\ufffd")
    assert body["result"] == {"k\0\ufffd": "\ufffd \0"}
    record = Execution.objects.get()
    assert (record.stdout, record.stderr) == (body["stdout"], body["stderr"])
    assert json.loads(record.result) == body["result"]
    assert "\0" not in record.result
    assert record.meta["note"] == "x\ufffd"
    assert alice.client.get(f"/api/v1/executions/{record.pk}").json() == body


def test_an_errors_message_is_made_storable_too(scripted: object, alice: Caller) -> None:
    answer = run(alice, "raise errors.ConnectionFailed('no\\0line\\ud800')")

    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "no\ufffdline\ufffd"
    assert Execution.objects.get().error_message == "no\ufffdline\ufffd"


@pytest.mark.parametrize("result", ["{1, 2}", "deep", "10 ** 5000"])
def test_a_result_that_is_not_json_fails_the_code_and_keeps_its_output(
    result: str, scripted: object, alice: Caller
) -> None:
    code = (
        "deep = []\n"
        "for _ in range(5000): deep = [deep]\n"
        f"answer = ExecutionResult('kept', '', 0, 0.0, has_result=True, result={result})"
    )

    body = run(alice, code).json()

    assert (body["status"], body["exit_code"], body["stdout"]) == ("failed", 1, "kept")
    assert "not JSON" in body["stderr"]
    assert (body["result"], body["has_result"]) == (None, False)


def test_a_record_is_closed_once_and_the_first_verdict_stands(alice: Caller, db: None) -> None:
    execution = opened(alice)
    late = Execution.objects.get(pk=execution.pk)

    assert close_record(execution, Execution.Status.SUCCEEDED, {"stdout": "first"}) is True
    assert close_record(late, Execution.Status.FAILED, {"stdout": "second"}) is False

    assert (late.status, late.stdout) == ("succeeded", "first")
    record = Execution.objects.get()
    assert (record.status, record.stdout) == ("succeeded", "first")


def test_a_run_whose_record_was_closed_meanwhile_is_told_so(
    scripted: object, alice: Caller, settings: Any
) -> None:
    code = (
        "from django.utils import timezone\n"
        "from executions.models import Execution\n"
        "Execution.objects.update(status='error', error_code='SB009', error_message='given up',"
        " finished_at=timezone.now())\n"
        "answer = ExecutionResult('too late', '', 0, 0.0,"
        " artifacts=[ArtifactFile('x', 'text/plain', b'x')])"
    )

    answer = run(alice, code)

    assert answer.status_code == 503
    record = Execution.objects.get()
    assert (record.error_message, record.stdout) == ("given up", "")
    assert record.artifacts.count() == 0
    assert list((settings.DATA_DIR / "artifacts").glob(f"*/{record.pk.hex}/*")) == []


@pytest.mark.parametrize(
    "impossible",
    [
        {"status": "odd"},
        {"mode": "odd"},
        {"status": "succeeded"},
        {"finished_at": timezone.now()},
        {"status": "error", "finished_at": timezone.now()},
        {"status": "failed", "finished_at": timezone.now(), "pending": {"code": "x"}},
        {"retryable": True},
    ],
    ids=lambda values: "-".join(values),
)
def test_the_database_itself_refuses_an_impossible_record(
    impossible: dict[str, Any], alice: Caller
) -> None:
    execution = opened(alice)

    with pytest.raises(IntegrityError), transaction.atomic():
        Execution.objects.filter(pk=execution.pk).update(**impossible)


def test_the_database_itself_keeps_an_idempotency_key_from_running_twice(alice: Caller) -> None:
    opened(alice, idempotency_key="once")
    other = opened(alice, idempotency_key="other")

    with pytest.raises(IntegrityError), transaction.atomic():
        Execution.objects.filter(pk=other.pk).update(idempotency_key="once")


def test_one_line_is_logged_with_neither_code_nor_output(
    scripted: object, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "executions.audit")
    code = (
        "secret = 'in the code'\nanswer = ExecutionResult('in the output', '', 0, 0.0,"
        " {'memory_peak_bytes': 3 * 2**20, 'region': 'eu'})"
    )

    body = run(alice, code, arguments={"a": "in the arguments"}).json()

    lines = [record for record in caplog.records if record.name == "executions.audit"]
    assert len(lines) == 1
    line = vars(lines[0])
    expected = {
        "tenant_id": "wonderland",
        "provider": "scripted",
        "operation": "execute_code",
        # A run outside of sessions is one of its own.
        "instance_id": f"wonderland:{body['id']}:wonderland-1",
        "language": "python",
        "status": "success",
        "execution_status": "succeeded",
        "exit_code": 0,
        "memory_used_mb": 3.0,
        "region": "eu",
        "execution_id": body["id"],
        "code_hash": Execution.objects.get().code_hash,
    }
    assert {name: line[name] for name in expected} == expected
    assert line["duration_ms"] > 0
    assert line["timestamp"].endswith("+00:00")
    assert "in the" not in repr(line)


def test_a_failed_attempt_is_logged_too(
    scripted: object, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "executions.audit")

    run(alice, "pass", language="unlucky")

    lines = [vars(record) for record in caplog.records if record.name == "executions.audit"]
    assert [(line["status"], line["error_code"]) for line in lines] == [("error", "SB004")]


def test_ids_sort_by_the_time_they_were_made() -> None:
    made = [uuid7() for _ in range(1000)]

    assert made == sorted(made)
    assert len(set(made)) == 1000
    assert {(each.version, each.variant) for each in made} == {(7, UUID(int=0x8 << 60).variant)}
    assert abs((made[0].int >> 80) / 1000 - timezone.now().timestamp()) < 5


def test_a_kept_request_is_unreadable_in_the_database(scripted: object, alice: Caller) -> None:
    opened(alice, mode="async", arguments={"word": "confidential"})

    with connection.cursor() as cursor:
        cursor.execute("SELECT pending FROM executions_execution")
        (stored,) = cursor.fetchone()
    assert b"confidential" not in bytes(stored)
    assert b"print(1)" not in bytes(stored)
    assert Execution.objects.get().pending["arguments"] == {"word": "confidential"}


def test_a_sync_run_keeps_no_request(scripted: object, alice: Caller) -> None:
    code = (
        "from executions.models import Execution\n"
        "answer = ExecutionResult(str(Execution.objects.get().pending), '', 0, 0.0)"
    )

    assert run(alice, code).json()["stdout"] == "None"


def test_the_service_runs_code_for_a_key_without_any_http(scripted: object, alice: Caller) -> None:
    outcome = execute_sync(ExecutionRequest(CODE), By.of_key(alice.api_key))

    assert outcome.execution.status == "failed"
    assert outcome.result is not None
    assert outcome.result.stdout == "out"
    assert outcome.error is None


@pytest.mark.only_on("sqlite")
def test_the_index_of_a_filter_serves_the_newest_rows(db: None) -> None:
    for column in ("tenant_slug", "status", "provider", "language", "error_code"):
        plan = Execution.objects.filter(**{column: "x"}).order_by("-id").explain()
        assert f"USING INDEX execution_{column}" in plan, plan
        assert "TEMP B-TREE" not in plan, plan
    assert "USING INDEX" in Execution.objects.filter(code_hash="x").explain()
    assert sqlite3.sqlite_version_info >= (3, 31)


@pytest.mark.django_db
@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("model", [Artifact, ExecutionEvent, RunSignal])
def test_what_belongs_to_an_execution_is_found_by_its_constraint(model: type[Model]) -> None:
    table = model._meta.db_table
    plan = model._default_manager.filter(execution_id=uuid4()).order_by("pk").explain()
    assert f"sqlite_autoindex_{table}_1 (execution_id=?)" in plan
