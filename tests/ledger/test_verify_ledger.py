"""`manage.py verify_ledger`: what it says and exits with, also about a receipt."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from executions.ledger.models import LedgerEntry
from executions.management.commands import verify_ledger as command
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.ledger.ledger_entries import TABLE, entries, kept, sql
from tests.support.running import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

__all__ = ("entries", "kept")


@pytest.fixture
def verify_ledger() -> Callable[..., tuple[int, str]]:
    """The command: its exit code and what it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        out = StringIO()
        try:
            call_command("verify_ledger", *arguments, stdout=out, stderr=StringIO())
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
        return 0, out.getvalue()

    return call


def test_the_command_tells_by_its_exit_code_and_names_the_first_entry(
    entries: list[LedgerEntry], verify_ledger: Callable[..., tuple[int, str]]
) -> None:
    code, printed = verify_ledger()
    assert code == 0
    assert printed.startswith("Intact: 8 entries, 5 executions, 2 other rows, 1 checkpoints.\n")
    sql(f"DELETE FROM {TABLE} WHERE sequence = 4")
    sql(f"UPDATE {TABLE} SET signature = '' WHERE sequence = 6")
    code, printed = verify_ledger()
    assert code == 1
    assert printed.startswith("NOT INTACT, first at entry 4: missing: entry 4 was removed\n")
    assert "then entry 6: altered" in printed
    code, printed = verify_ledger("--json")
    assert code == 1
    outcome = json.loads(printed)
    assert (outcome["intact"], outcome["entries"]) == (False, 7)
    assert outcome["findings"][0] == {
        "kind": "missing",
        "sequence": 4,
        "detail": "entry 4 was removed",
    }


def test_the_command_says_when_it_cannot_verify(settings: Any) -> None:
    settings.LEDGER_KEYS = []
    with pytest.raises(Exception, match="LEDGER_KEYS") as caught:
        call_command("verify_ledger")
    assert getattr(caught.value, "returncode", None) == 2


def test_a_receipt_that_was_given_out_contradicts_a_ledger_that_lost_it(
    scripted: object,
    alice: Caller,
    tmp_path: Path,
    verify_ledger: Callable[..., tuple[int, str]],
) -> None:
    """Without checkpoints, and with the record gone as well."""
    given = tmp_path / "answer.json"
    given.write_bytes(run(alice, "pass").content)
    assert verify_ledger("--receipt", str(given))[0] == 0
    entry = LedgerEntry.objects.get(kind="execution")
    sql(f"DELETE FROM {TABLE} WHERE sequence = %s", entry.sequence)
    Execution.objects.all().delete()
    assert verify_ledger()[0] == 0

    code, printed = verify_ledger("--receipt", str(given))
    assert code == 1
    assert f"entry {entry.sequence}: missing: a receipt was given out" in printed
    run(alice, "pass # another")
    code, printed = verify_ledger("--receipt", str(given))
    assert code == 1
    assert f"entry {entry.sequence}: replaced: a receipt" in printed

    forged = json.loads(given.read_text())
    forged["receipt"]["status"] = "failed"
    for text in (json.dumps(forged), "[]", "{}", "no json"):
        given.write_text(text)
        with pytest.raises(CommandError) as caught:
            verify_ledger("--receipt", str(given))
        assert caught.value.returncode == 2


def test_the_command_prints_how_far_it_is_and_takes_no_wrong_number_of_processes(
    entries: list[LedgerEntry], verify_ledger: Callable[..., tuple[int, str]]
) -> None:
    sql(f"UPDATE {TABLE} SET signature = '' WHERE sequence = 6")
    errors = StringIO()
    with pytest.raises(SystemExit):
        call_command("verify_ledger", stdout=StringIO(), stderr=errors)
    assert errors.getvalue().startswith("8 of 8 entries, 100 %, 1 findings, ")
    for number in ("0", "many"):
        with pytest.raises(CommandError, match="processes"):
            verify_ledger("--processes", number)


def test_json_names_the_mark_only_where_entries_before_it_were_not_read(
    entries: list[LedgerEntry], verify_ledger: Callable[..., tuple[int, str]]
) -> None:
    names = ["intact", "entries", "executions", "rows", "unproven", "head", "checkpoints"]
    names += ["findings", "omitted"]
    outcome = json.loads(verify_ledger("--json", "--since-verified")[1])
    assert list(outcome) == names
    outcome = json.loads(verify_ledger("--json", "--since-verified")[1])
    assert list(outcome) == [*names, "since_verified"]
    assert outcome["since_verified"]["sequence"] == 8


def test_the_command_says_when_it_read_everything_for_want_of_a_mark(
    entries: list[LedgerEntry], verify_ledger: Callable[..., tuple[int, str]]
) -> None:
    code, printed = verify_ledger("--since-verified")
    assert (code, printed.startswith("All entries were read: there is no active mark")) == (0, True)
    assert "\nIntact: 8 entries, 5 executions" in printed
    assert verify_ledger("--since-verified")[1].startswith("Intact from entry 9 on: 0 entries")


def test_a_receipt_that_contradicts_the_ledger_leaves_no_mark(
    scripted: object,
    alice: Caller,
    kept: Path,
    tmp_path: Path,
    verify_ledger: Callable[..., tuple[int, str]],
) -> None:
    given = tmp_path / "answer.json"
    given.write_bytes(run(alice, "pass").content)
    entry = LedgerEntry.objects.get(kind="execution")
    sql(f"DELETE FROM {TABLE} WHERE sequence = %s", entry.sequence)
    Execution.objects.all().delete()
    for path in kept.iterdir():
        path.unlink()
    run(alice, "pass # another")
    assert verify_ledger("--receipt", str(given))[0] == 1
    assert not (kept / "verified.json").exists()
    # Without the receipt nothing is wrong.
    assert verify_ledger()[0] == 0
    assert (kept / "verified.json").exists()


def test_a_process_that_was_killed_says_nothing_about_the_ledger(
    entries: list[LedgerEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object, **__: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(command, "verify", kill)
    with pytest.raises(CommandError, match="--processes 1") as raised:
        call_command("verify_ledger", stderr=StringIO())
    assert raised.value.returncode == command.NOT_VERIFIED
