"""Executions found by their code: any part of it, and only while it is kept."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from executions.capabilities.retention import service as retention
from executions.capabilities.search import service as search
from executions.capabilities.search.models import CodeSearchProgress, CodeText
from executions.capabilities.search.service import forget_code, search_code
from executions.kernel.text import first_uuid7
from executions.runs.models import Execution
from executions.runs.record import close_record
from executions.tasks import index_new_code
from tests.capabilities.write_transactions import write_transactions
from tests.conftest import Caller
from tests.support.execution_rows import auditor, shown
from tests.support.held import opened
from tests.support.later_runs import CODE as QUIET
from tests.support.later_runs import come, later
from tests.support.running import run, run_queued

__all__ = ["auditor"]

pytestmark = [pytest.mark.django_db, pytest.mark.database]

CODE = 'import os\nos.system("Curl http://x/%20?q=1")  # Zürich_100%\n'


@pytest.fixture(autouse=True)
def a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is kept when everything has settled."""
    clock = SimpleNamespace(now=lambda: timezone.now() + timedelta(minutes=1))
    monkeypatch.setattr(search, "timezone", clock)


def record(caller: Caller, code: str) -> Execution:
    """An execution whose code is not run: the scripted provider takes it for a comment."""
    quoted = "\n".join(f"# {line}" for line in code.splitlines())
    return Execution.objects.get(pk=run(caller, quoted).json()["id"])


def found(text: str) -> set[Any]:
    return set(search_code(Execution.objects.all(), text).values_list("pk", flat=True))


@pytest.mark.parametrize(
    "text",
    ["os.system(", "URL http", 'system("curl', "import os", "%20?q", "zürich", "_100%", "Zürich_1"],
)
def test_any_part_of_the_code_finds_it(scripted: object, alice: Caller, text: str) -> None:
    wanted = record(alice, CODE)
    record(alice, "print('something else')")
    assert index_new_code() == 2
    assert found(text) == {wanted.pk}


@pytest.mark.parametrize(
    "text", ["", "os", "no such thing", "os%system", 'x" OR "import', "a\0b", "*", '"""']
)
def test_nothing_else_finds_it(scripted: object, alice: Caller, text: str) -> None:
    record(alice, CODE)
    index_new_code()
    assert found(text) == set()


def test_a_program_is_kept_once_and_finds_all_its_executions(
    scripted: object, alice: Caller
) -> None:
    wanted = {record(alice, CODE).pk for _ in range(3)}
    assert index_new_code() == 1
    wanted.add(record(alice, CODE).pk)
    assert index_new_code() == 0
    assert CodeText.objects.count() == 1
    assert found("os.system") == wanted


def test_batches_reach_everything(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_BATCH", 2)
    wanted = {record(alice, f"program {number}").pk for number in range(5)}
    assert index_new_code() == 5
    assert found("program") == wanted


def test_what_is_not_kept_is_not_found(scripted: object, alice: Caller, settings: Any) -> None:
    settings.SANDBOX_STORE_CODE = "on_error"
    queued = run(alice, f"# {CODE}", mode="async")
    assert queued.status_code == 202
    later = record(alice, "ended already")
    assert index_new_code() == 0
    assert later.code == ""
    assert not CodeText.objects.exists()


def test_what_is_to_run_in_a_month_keeps_nobody_from_being_found(
    scripted: object, alice: Caller, charlie: Caller, settings: Any
) -> None:
    settings.SANDBOX_STORE_CODE = "on_error"
    waits = later(charlie, 20 * 86400, f"# os.system\n{QUIET}")
    settings.SANDBOX_STORE_CODE = "always"
    ran = record(alice, "hidden for a month?")
    assert index_new_code() == 2
    assert found("hidden for a month?") == {ran.pk}
    # What is not kept once it has succeeded leaves the index with it.
    settings.SANDBOX_STORE_CODE = "on_error"
    assert found("os.system") == {waits.pk}
    come(waits)
    run_queued()
    assert Execution.objects.get(pk=waits.pk).status == "succeeded"
    assert CodeText.objects.count() == 1
    assert found("os.system") == set()


def test_a_process_in_the_background_keeps_nobody_from_being_found(
    scripted: object, alice: Caller, charlie: Caller, settings: Any
) -> None:
    """It may run for as long as its session, which is a year at most."""
    runs = opened(charlie)
    runs.code, runs.code_hash, runs.background = "# os.system", "b" * 64, True
    runs.save()
    ran = record(alice, "hidden for a year?")
    assert index_new_code() == 2
    assert (found("hidden for a year?"), found("os.system")) == ({ran.pk}, {runs.pk})
    # What is not kept once it has succeeded leaves the index with it.
    settings.SANDBOX_STORE_CODE = "on_error"
    assert close_record(runs, Execution.Status.SUCCEEDED, {"exit_code": 0})
    assert CodeText.objects.count() == 1
    assert found("os.system") == set()


def test_erased_code_is_not_found_and_gone_from_the_index(
    scripted: object, alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(alice, CODE)
    kept = record(charlie, CODE)
    record(alice, "only hers")
    index_new_code()
    clock = SimpleNamespace(now=lambda: timezone.now() + timedelta(days=10))
    monkeypatch.setattr(retention, "timezone", clock)
    alice.tenant.keep_code_days = 1
    alice.tenant.save()

    retention.apply_retention()

    assert found("os.system") == {kept.pk}
    assert found("only hers") == set()
    assert CodeText.objects.get().code_hash == kept.code_hash
    forget_code([kept.code_hash])
    assert CodeText.objects.count() == 1


@pytest.mark.only_on("sqlite")
@pytest.mark.django_db(transaction=True)
def test_others_can_write_after_every_few_programs(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {record(alice, f"program {number} {'x' * 3000}").pk for number in range(20)}
    whole = record(alice, f"program of its own {'y' * 50_000}").pk

    with write_transactions() as transactions:
        assert index_new_code() == 21

    written = [
        [len(params) // 2 for sql, params in each if '"executions_codetext"' in sql]
        for each in transactions
    ]
    assert [sum(rows) for rows in written if rows] == [6, 6, 6, 2, 1]
    assert found("program") == wanted | {whole}
    assert index_new_code() == 0


def test_code_that_is_erased_while_it_is_taken_in_is_not_found(
    scripted: object, alice: Caller
) -> None:
    erased = record(alice, CODE)
    kept = record(alice, "system")
    step = search._next_step(search._NIL, first_uuid7(timezone.now()))
    assert step is not None
    assert len(step.programs) == 2
    CodeSearchProgress.objects.create(pk=1, before=step.after)
    forget_code([erased.code_hash], but_of=[erased.pk])
    Execution.objects.filter(pk=erased.pk).update(code="")

    assert search._take(step) == 1
    assert found("system") == {kept.pk}
    assert search._take(step) == 0  # somebody else was faster


@pytest.mark.django_db(transaction=True)
def test_the_index_stays_in_order_as_it_grows(scripted: object, alice: Caller) -> None:
    for number in range(12):
        record(alice, f"program {number} {'z' * 25_000}")
    assert index_new_code() == 12  # in as many transactions

    assert len(found("program")) == 12
    if connection.vendor == "sqlite":
        table = "executions_codetext_fts"
        with connection.cursor() as cursor:
            # Raises where the index is not what the table says.
            cursor.execute(f"INSERT INTO {table} ({table}) VALUES ('integrity-check')")
            cursor.execute(f"SELECT COUNT(DISTINCT segid) FROM {table}_idx")
            assert cursor.fetchone()[0] < 5


def test_the_admin_searches_code(scripted: object, alice: Caller, auditor: Client) -> None:
    wanted = record(alice, CODE)
    record(alice, "print('something else')")
    index_new_code()
    assert shown(auditor, q="os.system(") == {str(wanted.pk)}
    assert shown(auditor, q=" os.System( ", status__exact="failed") == set()
