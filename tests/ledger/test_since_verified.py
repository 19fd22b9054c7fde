"""The mark of a complete verification: when it is made, who cannot make it, and what is read from
it on."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from executions.ledger import checkpoints, marks, verification
from executions.ledger.append import append
from executions.ledger.entry import FORMAT, LedgerUnavailable, _load, canonical
from executions.ledger.models import LedgerEntry, Mark
from executions.ledger.trust import trusted_keys
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey, Tenant
from tests.conftest import Caller
from tests.ledger.ledger_entries import TABLE, entries, kept, sql, verify
from tests.support.running import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

__all__ = ("entries", "kept")


def since() -> verification.Verification:
    """Verify from the mark on, with this process alone and as with others."""
    return verify(since_verified=True, keeps_mark=False)


def mark() -> Mark:
    found = marks.newest(trusted_keys())
    assert found is not None
    return found


def write_mark(changed: Mark) -> None:
    place = checkpoints.checkpoint_store()
    assert place is not None
    place.write_mark(canonical({"ledger": FORMAT, **asdict(changed)}))


@pytest.fixture
def verified(entries: list[LedgerEntry]) -> list[LedgerEntry]:
    """Eight entries that a complete verification has read."""
    assert verification.verify().is_intact
    return entries


def test_entries_are_read_from_the_mark_on(verified: list[LedgerEntry], alice: Caller) -> None:
    assert (mark().sequence, mark().digest) == (8, verified[-1].digest)
    found = since()
    assert (found.entries, found.executions, found.rows) == (0, 0, 2)
    assert (found.is_intact, found.head, found.mark) == (True, verified[-1].digest, mark())
    run(alice, "pass")
    found = since()
    assert (found.entries, found.executions, found.is_intact) == (1, 1, True)
    # It says nothing of the entries before, so the mark stays where it is.
    assert mark().sequence == 8


def test_without_a_mark_everything_is_read_and_a_mark_is_left(entries: list[LedgerEntry]) -> None:
    found = verification.verify(since_verified=True)
    assert (found.entries, found.mark) == (8, None)
    assert mark().sequence == 8


def test_the_mark_is_readable_for_the_service_alone(
    verified: list[LedgerEntry], kept: Path
) -> None:
    """Also where somebody with more rights has verified."""
    if os.geteuid() == 0:
        os.chown(kept, 10001, 10001)
    assert verification.verify().is_intact
    folder, written = kept.stat(), (kept / "verified.json").stat()
    assert (written.st_uid, written.st_gid) == (folder.st_uid, folder.st_gid)
    assert stat.S_IMODE(written.st_mode) == 0o600


@pytest.mark.parametrize(
    "options", [{"records": False}, {"artifact_bytes": False}, {"keeps_mark": False}]
)
def test_a_verification_that_is_not_complete_leaves_no_mark(
    entries: list[LedgerEntry], options: dict[str, bool]
) -> None:
    assert verification.verify(**options).is_intact
    assert marks.newest(trusted_keys()) is None


def test_a_verification_that_found_something_leaves_no_mark(entries: list[LedgerEntry]) -> None:
    Execution.objects.filter(pk=entries[5].execution_id).update(stdout="other")
    assert not verification.verify().is_intact
    assert marks.newest(trusted_keys()) is None


def test_an_entry_of_a_verification_since_the_mark_is_followed_by_its_own_checks(
    verified: list[LedgerEntry], alice: Caller
) -> None:
    run(alice, "pass")
    run(alice, "pass # again")
    Execution.objects.filter(pk=LedgerEntry.objects.get(sequence=10).execution_id).update(code="")
    sql(f"UPDATE {TABLE} SET signature = '' WHERE sequence = 9")
    found = since()
    assert [(each.kind, each.sequence) for each in found.findings] == [
        ("altered", 9),
        ("altered record", 10),
    ]


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (f"DELETE FROM {TABLE} WHERE sequence = 5", ("missing", 5)),
        (f"DELETE FROM {TABLE} WHERE sequence = 8", ("truncated", 8)),
        (f"UPDATE {TABLE} SET statement = '{{}}' WHERE sequence = 8", ("altered", 8)),
        # The entries of rows, which are read again.
        (f"UPDATE {TABLE} SET signature = '' WHERE sequence = 2", ("altered", 2)),
        (f"UPDATE {TABLE} SET bound_row = '' WHERE sequence = 3", ("altered", 3)),
        (f"UPDATE {TABLE} SET bound_row = 'auth.user 1' WHERE sequence = 3", ("altered", 3)),
        (
            f"UPDATE {TABLE} SET kind = 'execution', execution_id = '{'0' * 32}'"
            " WHERE sequence = 3",
            ("altered", 3),
        ),
    ],
)
def test_what_shows_before_the_mark_has_everything_read(
    verified: list[LedgerEntry], statement: str, finding: tuple[str, int]
) -> None:
    sql(statement)
    found = since()
    assert (found.findings[0].kind, found.findings[0].sequence) == finding
    assert (found.mark, found.executions > 0) == (None, True)


def test_rows_are_compared_with_their_entries_before_the_mark(
    verified: list[LedgerEntry], alice: Caller
) -> None:
    Tenant.objects.filter(pk=alice.tenant.pk).update(name="Another")
    assert [(each.kind, each.sequence) for each in since().findings] == [("altered record", 2)]
    key, _ = create_api_key(alice.tenant, "new")
    ApiKey.objects.filter(pk=key.pk).delete()
    ApiKey.objects.filter(pk=ApiKey.objects.earliest("pk").pk).update(name="renamed")
    found = since()
    assert [(each.kind, each.sequence) for each in found.findings] == [
        ("altered record", 2),
        ("altered record", 3),
    ]


def test_a_row_that_was_changed_honestly_since_the_mark_is_no_finding(
    verified: list[LedgerEntry], alice: Caller
) -> None:
    alice.tenant.name = "Another"
    alice.tenant.save()
    found = since()
    assert (found.entries, [str(each) for each in found.findings]) == (1, [])


def test_an_execution_that_ended_without_an_entry_is_found_wherever_it_was(
    verified: list[LedgerEntry],
) -> None:
    made_up = Execution.objects.latest("pk")
    made_up.pk = made_up.pk.__class__(int=made_up.pk.int - 1)
    made_up.idempotency_key = None
    made_up._state.adding = True
    Execution.objects.bulk_create([made_up])
    assert [each.kind for each in since().findings] == ["missing"]


def test_an_execution_does_not_get_the_entry_of_another(verified: list[LedgerEntry]) -> None:
    """Its record is removed: without the column nothing before the mark would tell of it."""
    made_up = Execution.objects.get(pk=verified[5].execution_id)
    made_up.pk = made_up.pk.__class__(int=made_up.pk.int - 1)
    made_up.idempotency_key = None
    made_up._state.adding = True
    Execution.objects.bulk_create([made_up])
    LedgerEntry.objects.filter(sequence=6).update(execution_id=made_up.pk)
    assert ("altered", 6) in [(each.kind, each.sequence) for each in since().findings]


@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE {TABLE} SET statement = '{{}}' WHERE sequence = 9",
        f"UPDATE {TABLE} SET kind = 'other' WHERE sequence = 9",
        f"DELETE FROM {TABLE} WHERE sequence = 9",
    ],
)
def test_entries_about_neither_an_execution_nor_a_row_are_read_again(
    entries: list[LedgerEntry], statement: str
) -> None:
    append("approval", "something", {})
    append("approval", "another", {})
    assert verification.verify().is_intact
    sql(statement)
    found = since()
    assert (found.mark, found.findings[0].sequence) == (None, 9)


def test_a_complete_verification_that_finds_something_makes_the_mark_inactive(
    verified: list[LedgerEntry],
) -> None:
    changed = Execution.objects.filter(pk=verified[5].execution_id)
    stdout = changed.get().stdout
    changed.update(stdout="other")
    assert since().is_intact
    assert not verification.verify().is_intact
    assert not mark().is_active
    found = since()
    assert (found.is_intact, found.mark, found.entries) == (False, None, 8)
    changed.update(stdout=stdout)
    assert since().entries == 8
    assert verification.verify().is_intact
    assert (mark().is_active, since().entries) == (True, 0)


def test_an_inactive_mark_still_tells_of_its_entry(verified: list[LedgerEntry], kept: Path) -> None:
    """Who cuts off the end and forges the head is found by each verification, not by the first."""
    LedgerEntry.objects.filter(sequence__gt=6).delete()
    (kept / "head.json").unlink()
    for _ in range(3):
        assert ("truncated", 7) in [
            (each.kind, each.sequence) for each in verification.verify().findings
        ]
    assert (mark().is_active, mark().sequence) == (False, 8)


@pytest.mark.parametrize("text", ["no json", None])
def test_a_mark_that_cannot_be_made_inactive_holds_nothing_up(
    verified: list[LedgerEntry], kept: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    (kept / "verified.json").unlink()
    if text is None:
        (kept / "verified.json").mkdir()
    else:
        (kept / "verified.json").write_text(text)
    Execution.objects.filter(pk=verified[5].execution_id).update(stdout="other")
    assert [each.kind for each in verification.verify().findings] == ["altered record"]
    assert ("stays active" in caplog.text) == (text is None)
    if text is not None:
        assert {each.kind for each in since().findings} == {"altered checkpoint", "altered record"}


def test_records_before_the_mark_are_not_checked_and_the_command_says_so(
    verified: list[LedgerEntry],
) -> None:
    Execution.objects.filter(pk=verified[5].execution_id).update(stdout="other")
    out = StringIO()
    call_command("verify_ledger", "--since-verified", stdout=out, stderr=StringIO())
    printed = out.getvalue()
    assert printed.startswith("Intact from entry 9 on: 0 entries, 0 executions, 2 other rows")
    assert f"Entries 1 to 8 were verified at {mark().at} by a complete verification." in printed
    assert "NOT CHECKED again: of those of executions the signatures" in printed
    assert not verification.verify().is_intact


def forged_elsewhere(found: Mark) -> Mark:
    forger = _load(1, secrets.token_urlsafe(32))
    unsigned = replace(found, key_id=forger.key_id)
    return replace(unsigned, signature=forger.sign(marks._signed_bytes(unsigned)))


@pytest.mark.parametrize(
    "forge",
    [
        lambda found: replace(found, sequence=9),
        lambda found: replace(found, rows="sha256:" + "0" * 64),
        lambda found: replace(found, executions="0" * 64),
        lambda found: replace(found, at="2999-01-01T00:00:00.000000+00:00"),
        lambda found: replace(found, signature=""),
        forged_elsewhere,
    ],
)
def test_a_mark_that_our_key_did_not_sign_is_found_and_everything_is_read(
    verified: list[LedgerEntry], forge: Callable[[Mark], Mark]
) -> None:
    write_mark(forge(mark()))
    found = since()
    assert [each.kind for each in found.findings] == ["altered checkpoint"]
    assert (found.entries, found.mark) == (8, None)
    # A complete verification leaves another.
    assert verification.verify().is_intact
    assert since().is_intact


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", "[" * 9999, '{"ledger":1}'])
def test_a_damaged_mark_is_found(verified: list[LedgerEntry], kept: Path, text: str) -> None:
    (kept / "verified.json").write_text(text)
    assert [each.kind for each in since().findings] == ["altered checkpoint"]


def test_what_the_key_signs_otherwise_is_no_mark(verified: list[LedgerEntry], kept: Path) -> None:
    checkpoints.write_checkpoint(verification.verify_entries)
    line = (kept / "checkpoints.jsonl").read_text().splitlines()[-1]
    for text in (line, (kept / "head.json").read_text(), json.dumps(verified[-1].receipt)):
        (kept / "verified.json").write_text(text)
        with pytest.raises(marks.MarkAltered):
            marks.newest(trusted_keys())


def test_a_mark_is_no_checkpoint(verified: list[LedgerEntry], kept: Path) -> None:
    text = (kept / "verified.json").read_text()
    with (kept / "checkpoints.jsonl").open("a") as lines:
        lines.write(text)
    assert "altered checkpoint" in {each.kind for each in verification.verify().findings}


def test_an_older_mark_that_is_put_back_has_more_read(
    verified: list[LedgerEntry], kept: Path, alice: Caller
) -> None:
    older = (kept / "verified.json").read_text()
    run(alice, "pass")
    assert verification.verify().is_intact
    assert (mark().sequence, since().entries) == (9, 0)
    (kept / "verified.json").write_text(older)
    found = since()
    assert (found.entries, found.is_intact) == (1, True)


@pytest.mark.only_on("sqlite")
def test_a_mark_shows_that_an_older_copy_of_the_database_is_in_use(
    entries: list[LedgerEntry], kept: Path, alice: Caller
) -> None:
    """Also where the attacker has put back the head of that time."""
    backup = kept / "backup.sqlite3"
    with sqlite3.connect(backup) as target:
        connection.connection.backup(target)
    head = (kept / "head.json").read_bytes()
    run(alice, "pass")
    run(alice, "pass # again")
    assert verification.verify().is_intact
    with sqlite3.connect(backup) as source:
        source.backup(connection.connection)
    (kept / "head.json").write_bytes(head)
    assert [(each.kind, each.sequence) for each in since().findings] == [("truncated", 9)]
    for number in range(3):
        run(alice, f"pass # other {number}")
    found = since()
    assert [(each.kind, each.sequence) for each in found.findings] == [("replaced", 10)]
    assert found.entries == 11

    call_command("checkpoint_ledger", "--reset", "restored after a failure", stdout=StringIO())
    assert len(list(kept.glob("verified.json.*"))) == 1
    assert verification.verify().is_intact
    assert since().entries == 0


def test_a_mark_that_a_former_key_signed_holds_while_that_is_vouched_for(
    verified: list[LedgerEntry], settings: Any
) -> None:
    old = settings.LEDGER_KEYS[0]
    new = secrets.token_urlsafe(32)
    settings.LEDGER_KEYS = [new, old]
    append("note", "new", {})
    settings.LEDGER_KEYS = [new]
    found = since()
    assert (found.is_intact, found.mark) == (True, mark())


def test_without_checkpoints_everything_is_read_every_time(
    entries: list[LedgerEntry], settings: Any
) -> None:
    settings.LEDGER_CHECKPOINTS = ""
    assert verification.verify().is_intact
    assert (since().entries, since().mark) == (8, None)


def test_a_mark_that_cannot_be_written_or_read_is_logged_and_the_outcome_stays(
    entries: list[LedgerEntry], kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (kept / "verified.json").mkdir()
    assert verification.verify().is_intact
    assert "cannot be read or written" in caplog.text
    assert "the mark of a complete verification could not be written" in caplog.text
    assert [path.name for path in kept.glob("verified.json*")] == ["verified.json"]
    with pytest.raises(LedgerUnavailable, match="cannot be read"):
        since()


def test_a_complete_verification_logs_that_the_mark_is_not_ours_and_writes_it_anew(
    verified: list[LedgerEntry], kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (kept / "verified.json").write_text("{}")
    assert verification.verify().is_intact
    assert "verified.json was not written by this service" in caplog.text
    assert mark().sequence == 8
