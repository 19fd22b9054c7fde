"""Retention: bodies go when their time is over, the proof of them stays."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from executions.capabilities.retention import service as retention
from executions.capabilities.retention.service import apply_retention
from executions.capabilities.tools.models import ToolCall
from executions.kernel.text import first_uuid7, uuid7
from executions.ledger.append import append
from executions.ledger.erasures import ERASURE
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.record import record_late
from executions.tasks import apply_retention as scheduled
from tests.capabilities.write_transactions import write_transactions
from tests.conftest import Caller
from tests.support.retention import keep
from tests.support.retention import later as later
from tests.support.running import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

CODE = (
    "answer = ExecutionResult('out', 'err', 0, 0.0, has_result=True, result=[1],"
    " outputs=[{'text/plain': 'rich'}],"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'content')])"
)


def bodies(execution_id: str) -> tuple[bool, bool, bool]:
    """Whether code, output and artifacts are there."""
    record = Execution.objects.get(pk=execution_id)
    artifact = record.artifacts.get()
    return (
        bool(record.code and record.arguments),
        bool(record.stdout and record.stderr and record.result and record.outputs),
        bool(artifact.file) and artifact.file.storage.exists(artifact.file.name),
    )


@pytest.fixture
def execution_id(scripted: object, alice: Caller) -> str:
    answer = run(alice, CODE, arguments={"a": 1})
    return str(answer.json()["id"])


@pytest.mark.parametrize(
    ("data", "left"),
    [
        ("code", (False, True, True)),
        ("output", (True, False, True)),
        ("artifacts", (True, True, False)),
    ],
)
def test_a_kind_of_data_is_erased_and_the_ledger_still_verifies(
    execution_id: str, alice: Caller, later: None, data: str, left: tuple[bool, bool, bool]
) -> None:
    keep(alice, **{data: 9})
    receipt = alice.client.get(f"/api/v1/executions/{execution_id}").json()["receipt"]

    (erased,) = apply_retention()

    assert (erased.tenant, erased.data, erased.executions) == ("wonderland", data, 1)
    assert erased.bytes > 0
    assert bodies(execution_id) == left
    found = verify()
    assert found.is_intact, found.findings
    answer = alice.client.get(f"/api/v1/executions/{execution_id}").json()
    assert answer["receipt"] == receipt
    assert answer["status"] == "succeeded"
    assert Execution.objects.get().code_hash == receipt["code_hash"]
    said = LedgerEntry.objects.get(kind=ERASURE).stated
    assert (said["subject"], said["data"], said["executions"]) == ("wonderland", data, 1)
    assert apply_retention() == []


def test_what_tools_were_asked_and_answered_is_erased_where_nothing_else_was_put_out(
    scripted: object, alice: Caller, later: None
) -> None:
    keep(alice, output=9)
    silent = run(alice, "answer = ExecutionResult('', '', 0, 0.0)").json()["id"]
    now = timezone.now()
    ToolCall.objects.create(
        execution_id=silent, name="search", arguments='{"q":"x"}', writes=False, state="answered",
        answer='{"result":1}', answered_by="key:x", answered_at=now,
    )  # fmt: skip

    assert [erased.executions for erased in apply_retention()] == [1]
    call = ToolCall.objects.get()
    assert (call.arguments, call.answer, call.answered_by) == ("", "", "key:x")
    assert apply_retention() == []


def test_an_erased_artifact_cannot_be_downloaded_and_is_still_listed(
    execution_id: str, alice: Caller, later: None
) -> None:
    keep(alice, artifacts=1)
    path = Artifact.objects.get().file.path

    apply_retention()

    (listed,) = alice.client.get(f"/api/v1/executions/{execution_id}").json()["artifacts"]
    assert listed["size_bytes"] == len("content")
    assert alice.client.get(listed["url"]).status_code == 404
    assert not Path(path).exists()


def test_what_is_young_belongs_to_others_or_is_open_stays(
    execution_id: str, alice: Caller, charlie: Caller, later: None
) -> None:
    other_id = run(charlie, CODE, arguments={"a": 1}).json()["id"]
    queued_id = run(alice, CODE, arguments={"a": 1}, mode="async").json()["id"]
    keep(alice, code=11, output=0)
    assert apply_retention() == []
    keep(alice, code=9)
    assert [erased.executions for erased in apply_retention()] == [1]

    assert bodies(other_id) == (True, True, True)
    assert Execution.objects.get(pk=queued_id).code == CODE


def test_what_was_asked_for_at_a_later_time_is_kept_from_then_on(
    scripted: object, alice: Caller, later: None
) -> None:
    at = (timezone.now() + timedelta(days=5)).isoformat()
    body = {"arguments": {"a": 1}, "mode": "async", "run_at": at}
    execution_id = run(alice, CODE, **body).json()["id"]
    assert alice.client.post(f"/api/v1/executions/{execution_id}/cancel").status_code == 200
    keep(alice, code=6)
    assert apply_retention() == []
    keep(alice, code=4)
    assert [erased.executions for erased in apply_retention()] == [1]
    assert verify().is_intact


def test_what_came_late_of_a_later_time_is_kept_from_then_on(
    scripted: object, alice: Caller, later: None
) -> None:
    at = (timezone.now() + timedelta(days=5)).isoformat()
    execution_id = run(alice, CODE, mode="async", run_at=at).json()["id"]
    assert alice.client.post(f"/api/v1/executions/{execution_id}/cancel").status_code == 200
    cancelled = Execution.objects.get(pk=execution_id)
    late = {"stdout": "late", "finished_at": timezone.now()}
    assert record_late(cancelled, Execution.Status.SUCCEEDED, late)
    for days, left in ((6, "late"), (4, "")):
        keep(alice, output=days)
        apply_retention()
        assert LateResult.objects.get().stdout == left
    assert verify().is_intact


def test_the_installation_decides_where_the_tenant_does_not(
    execution_id: str, alice: Caller, charlie: Caller, later: None, settings: Any
) -> None:
    run(charlie, CODE)
    settings.SANDBOX_KEEP_DAYS = {"code": 3, "output": 0, "artifacts": 0, "records": 0}
    keep(alice, code=0)

    assert [(erased.tenant, erased.data) for erased in apply_retention()] == [("elsewhere", "code")]


def test_a_tenant_that_is_gone_is_erased_by_the_installations_rule(
    execution_id: str, alice: Caller, later: None, settings: Any
) -> None:
    alice.tenant.delete()
    settings.SANDBOX_KEEP_DAYS = {"code": 0, "output": 3, "artifacts": 0, "records": 0}

    assert scheduled() == 1
    assert bodies(execution_id) == (True, False, True)


def test_a_dry_run_counts_and_erases_nothing(execution_id: str, alice: Caller, later: None) -> None:
    keep(alice, code=1, output=1, artifacts=1)
    entries = LedgerEntry.objects.count()
    out, progress = StringIO(), StringIO()

    call_command("apply_retention", "--dry-run", "--json", stdout=out, stderr=progress)

    summary = json.loads(out.getvalue())
    assert summary["dry_run"] is True
    assert {each["data"]: each["executions"] for each in summary["erasures"]} == {
        "code": 1,
        "output": 1,
        "artifacts": 1,
    }
    assert "wonderland" in progress.getvalue()
    assert bodies(execution_id) == (True, True, True)
    assert LedgerEntry.objects.count() == entries


def test_the_command_says_what_it_erased(execution_id: str, alice: Caller, later: None) -> None:
    out = StringIO()
    call_command("apply_retention", stdout=out, stderr=StringIO())
    assert out.getvalue() == "Nothing had to be erased.\n"
    keep(alice, output=1)
    call_command("apply_retention", stdout=out, stderr=StringIO())
    assert "wonderland: output of 1 executions before" in out.getvalue()


def test_batches_reach_everything(
    scripted: object, alice: Caller, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    for _ in range(5):
        run(alice, CODE)
    keep(alice, code=1)

    assert [erased.executions for erased in apply_retention()] == [5]
    assert LedgerEntry.objects.get(kind=ERASURE).stated["executions"] == 5
    assert not Execution.objects.exclude(code="").exists()
    assert verify().is_intact


def test_an_erasure_that_was_broken_off_is_continued(
    scripted: object, alice: Caller, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    for _ in range(3):
        run(alice, CODE)
    keep(alice, code=1)

    def end_the_process(erasure: retention.Erasure) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_retention(report=end_the_process)
    assert Execution.objects.filter(code="").count() == 2
    assert verify().is_intact
    assert [erased.executions for erased in apply_retention()] == [1]
    assert verify().is_intact


def test_bytes_that_cannot_be_deleted_keep_their_name_and_go_the_next_time(
    scripted: object, alice: Caller, later: None
) -> None:
    for _ in range(2):
        run(alice, CODE)
    keep(alice, artifacts=1)
    stuck = Path(Artifact.objects.first().file.path)
    content = stuck.read_bytes()
    stuck.unlink()
    (stuck / "in the way").mkdir(parents=True)

    assert [erased.executions for erased in apply_retention()] == [1]

    assert [bool(artifact.file) for artifact in Artifact.objects.all()] == [True, False]
    (stuck / "in the way").rmdir()
    stuck.rmdir()
    stuck.write_bytes(content)
    assert verify().is_intact
    assert [erased.executions for erased in apply_retention()] == [1]
    assert not stuck.exists()
    assert not Artifact.objects.exclude(file="").exists()
    assert verify().is_intact


def test_an_erasure_of_bytes_that_was_broken_off_is_continued(
    execution_id: str, alice: Caller, later: None
) -> None:
    """The process ends between the bytes and their name."""
    keep(alice, artifacts=1)
    path = Path(Artifact.objects.get().file.path)

    def end_the_process(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and "executions_artifact" in sql:
            raise KeyboardInterrupt
        return execute(sql, *args)

    with pytest.raises(KeyboardInterrupt), connection.execute_wrapper(end_the_process):
        apply_retention()

    assert not path.exists()
    assert Artifact.objects.get().file
    assert verify().is_intact, "the ledger speaks of it already"
    url = alice.client.get(f"/api/v1/executions/{execution_id}").json()["artifacts"][0]["url"]
    assert alice.client.get(url).status_code == 404
    assert [erased.executions for erased in apply_retention()] == [1]
    assert not Artifact.objects.get().file


def test_bytes_that_are_gone_before_their_time_are_found(execution_id: str, alice: Caller) -> None:
    Path(Artifact.objects.get().file.path).unlink()
    assert [finding.kind for finding in verify().findings] == ["altered record"]


@pytest.mark.only_on("sqlite")
@pytest.mark.parametrize("data", ["code", "output"])
def test_others_can_write_after_every_few_erased(
    scripted: object, alice: Caller, later: None, data: str
) -> None:
    for number in range(6):
        run(
            alice,
            f"{CODE.replace(chr(39) + 'out' + chr(39), repr('o' * 15_000))} # {number}{'x' * 15_000}",
        )
    keep(alice, **{data: 1})

    with write_transactions() as transactions:
        assert [erased.executions for erased in apply_retention()] == [6]

    erased = [
        sum(isinstance(each, str) and len(each) == 32 for each in params)
        for statements in transactions
        for sql, params in statements
        if sql.startswith('UPDATE "executions_execution"')
    ]
    assert sum(erased) == 6
    assert max(erased) <= 2


def test_nothing_is_erased_when_it_cannot_be_entered(
    execution_id: str, alice: Caller, later: None, settings: Any
) -> None:
    keep(alice, code=1, artifacts=1)
    settings.LEDGER_KEYS = []
    with pytest.raises(Exception, match="LEDGER_KEYS"):
        apply_retention()
    assert bodies(execution_id) == (True, True, True)


def test_an_erasure_excuses_nothing_that_was_not_due(
    execution_id: str, alice: Caller, scripted: object
) -> None:
    content = {"data": "code", "created_before": "2020-01-01T00:00:00.000000+00:00"}
    append(ERASURE, "wonderland", content)
    Execution.objects.update(code="")
    assert [finding.kind for finding in verify().findings] == ["altered record"]


def test_a_body_that_comes_back_changed_is_found(
    execution_id: str, alice: Caller, later: None
) -> None:
    keep(alice, output=1)
    apply_retention()
    Execution.objects.update(stdout="something else")
    assert [finding.kind for finding in verify().findings] == ["altered record"]


def test_ids_are_told_apart_by_the_time_they_were_made() -> None:
    before = timezone.now() - timedelta(milliseconds=1)
    made = uuid7()
    assert first_uuid7(before) < made < first_uuid7(timezone.now() + timedelta(milliseconds=1))


@pytest.mark.only_on("sqlite")
def test_due_executions_are_found_by_an_index(db: None) -> None:
    due = retention._due(retention.Erasure("x", "code", timezone.now()))
    assert "USING INDEX execution_tenant_slug" in due.order_by("pk").explain()
