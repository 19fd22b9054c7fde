"""Whatever is done to the ledger's rows behind its back, the verifier names the entry."""

from __future__ import annotations

import base64
import secrets
import sqlite3
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from executions.ledger import verification
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable, _load, digest, signed_bytes, write
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey
from tests.conftest import Caller
from tests.ledger.ledger_entries import TABLE, entries, first, kept, sql, verify
from tests.support.running import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

__all__ = ("entries", "kept")


def test_an_untouched_ledger_is_intact(entries: list[LedgerEntry]) -> None:
    found = verify()
    assert found.is_intact
    assert (found.entries, found.executions, found.checkpoints) == (8, 5, 1)
    assert (found.rows, found.head) == (2, entries[-1].digest)


def test_an_empty_ledger_is_intact(db: None) -> None:
    assert verify().is_intact


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("kind", "note"),
        ("subject", "another"),
        ("at", "2020-01-01 00:00:00"),
        ("digest", "0" * 64),
        ("key_id", "0" * 16),
        ("signature", base64.b64encode(b"\0" * 64).decode()),
        ("signature", "no base64"),
        ("statement", "{}"),
        ("statement", "no json"),
        ("statement", "[" * 9999),
    ],
)
def test_an_altered_column_is_found(entries: list[LedgerEntry], column: str, value: str) -> None:
    sql(f"UPDATE {TABLE} SET {column} = %s WHERE sequence = 3", value)
    assert first() == ("altered", 3)


def test_an_altered_statement_is_found_even_with_fitting_columns(
    entries: list[LedgerEntry],
) -> None:
    statement = write({**entries[4].stated, "status": "failed"})
    sql(
        f"UPDATE {TABLE} SET statement = %s, digest = %s WHERE sequence = 5",
        statement,
        digest(statement),
    )
    assert first() == ("altered", 5)
    assert len([finding for finding in verify().findings if finding.kind == "altered"]) == 1


def test_an_entry_with_another_execution_is_found(entries: list[LedgerEntry]) -> None:
    sql(f"UPDATE {TABLE} SET execution_id = %s WHERE sequence = 5", "0" * 32)
    assert first() == ("altered", 5)


@pytest.mark.parametrize("sequence", [1, 2, 5])
def test_a_deleted_entry_is_found(entries: list[LedgerEntry], sequence: int) -> None:
    sql(f"DELETE FROM {TABLE} WHERE sequence = %s", sequence)
    kind, at = first()
    assert (kind, at) == ("missing", sequence)


def test_deleted_entries_are_found_when_the_gap_is_closed(entries: list[LedgerEntry]) -> None:
    sql(f"DELETE FROM {TABLE} WHERE sequence = 5")
    for sequence in (6, 7, 8):
        sql(f"UPDATE {TABLE} SET sequence = %s WHERE sequence = %s", sequence - 1, sequence)
    assert first() == ("reordered", 5)


def test_exchanged_entries_are_found(entries: list[LedgerEntry]) -> None:
    for old, new in ((5, 99), (7, 5), (99, 7)):
        sql(f"UPDATE {TABLE} SET sequence = %s WHERE sequence = %s", new, old)
    found = verify()
    assert [(finding.kind, finding.sequence) for finding in found.findings] == [
        ("reordered", 5),
        ("reordered", 7),
    ]
    assert "entry 7" in found.findings[0].detail


def test_a_cut_tail_is_found(entries: list[LedgerEntry]) -> None:
    sql(f"DELETE FROM {TABLE} WHERE sequence >= 7")
    assert first() == ("truncated", 7)


def test_a_cut_tail_is_found_even_with_its_records(entries: list[LedgerEntry]) -> None:
    sql(f"DELETE FROM {TABLE} WHERE sequence >= 7")
    for entry in entries[6:]:
        Execution.objects.filter(pk=entry.execution_id).delete()
    assert first() == ("truncated", 7)


def test_a_cut_tail_is_found_by_its_records_without_checkpoints(
    entries: list[LedgerEntry], settings: Any
) -> None:
    settings.LEDGER_CHECKPOINTS = ""
    sql(f"DELETE FROM {TABLE} WHERE sequence >= 7")
    assert first() == ("missing", 7)


def test_an_emptied_ledger_is_found(entries: list[LedgerEntry]) -> None:
    sql(f"DELETE FROM {TABLE}")
    assert first() == ("truncated", 1)


@pytest.mark.only_on("sqlite")
def test_a_restored_backup_is_found(
    entries: list[LedgerEntry], kept: Path, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole database as it was two executions ago, then used again."""
    backup = kept / "backup.sqlite3"
    with sqlite3.connect(backup) as target:
        connection.connection.backup(target)
    run(alice, "pass")
    run(alice, "pass # again")
    assert LedgerEntry.objects.count() == 10
    with sqlite3.connect(backup) as source:
        source.backup(connection.connection)
    assert LedgerEntry.objects.count() == 8

    assert first() == ("truncated", 9)
    for _ in range(3):
        run(alice, "pass # something else")
    found = verify()
    assert [(finding.kind, finding.sequence) for finding in found.findings] == [("replaced", 10)]
    assert "an older copy of the database is in use" in caplog.text

    call_command("checkpoint_ledger", "--reset", "restored after a disk failure", stdout=StringIO())
    assert verify().is_intact
    assert LedgerEntry.objects.get(kind="checkpoints_reset").stated["was_at"] == 11


def test_a_ledger_of_somebody_elses_making_is_found(entries: list[LedgerEntry]) -> None:
    """Every statement signed anew, by a key that introduces itself."""
    key = _load(1, secrets.token_urlsafe(32))
    previous = "0" * 64
    for entry in entries:
        stated = {**entry.stated, "key_id": key.key_id, "previous": previous}
        if entry.kind == "ledger_key":
            stated |= {"subject": key.key_id, "public_key": key.public_key}
        statement = write(stated)
        previous = digest(statement)
        sql(
            f"UPDATE {TABLE} SET statement=%s, digest=%s, signature=%s, key_id=%s WHERE sequence=%s",
            statement,
            previous,
            key.sign(signed_bytes(stated, statement)),
            key.key_id,
            entry.sequence,
        )
    assert first() == ("untrusted key", 1)
    with pytest.raises(LedgerUnavailable, match="LEDGER_KEYS does not hold"):
        append("note", "x", {})


def test_an_entry_slipped_in_behind_the_end_is_found(
    entries: list[LedgerEntry], alice: Caller, settings: Any, tmp_path: Path
) -> None:
    """It names our key, so that the service continues after it, but this service's key did not "
    "sign it."""
    # Where what ran waits.
    settings.DATA_DIR = tmp_path
    key = _load(1, secrets.token_urlsafe(32))
    stated = {**entries[-1].stated, "sequence": 9, "previous": entries[-1].digest}
    statement = write(stated)
    sql(
        f"INSERT INTO {TABLE} (sequence, kind, subject, at, statement, digest, key_id, signature)"
        " VALUES (9, 'note', '', '2026-01-01', %s, %s, %s, %s)",
        statement,
        digest(statement),
        entries[-1].key_id,
        key.sign(signed_bytes(stated, statement)),
    )
    refused = run(alice, "pass")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "SB009")
    assert first() == ("altered", 9)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("code", "answer = None"),
        ("code", ""),
        ("arguments", "{}"),
        ("stdout", ""),
        ("stderr", "other"),
        ("result", "2"),
        ("outputs", "[]"),
        ("hops", '[{"provider": "other"}]'),
        ("cost", "1"),
        ("status", "failed"),
        ("exit_code", 1),
        ("tenant_slug", "elsewhere"),
        ("provider", "other"),
        ("config_version", 1),
        ("runtime", "other"),
        ("meta", '{"memory_peak_bytes": 1}'),
        ("created_at", "2020-01-01 00:00:00"),
        ("total_ms", 0.5),
    ],
)
def test_an_altered_record_is_found(entries: list[LedgerEntry], column: str, value: object) -> None:
    execution_id = entries[5].execution_id
    assert execution_id is not None
    name = execution_id.hex if connection.vendor == "sqlite" else str(execution_id)
    sql(f"UPDATE executions_execution SET {column} = %s WHERE id = %s", value, name)
    found = verify()
    assert [(finding.kind, finding.sequence) for finding in found.findings] == [
        ("altered record", 6)
    ]
    assert str(execution_id) in found.findings[0].detail
    assert verify(records=False).is_intact


def test_a_removed_record_is_found(entries: list[LedgerEntry]) -> None:
    Execution.objects.filter(pk=entries[5].execution_id).delete()
    assert first() == ("missing record", 6)


def test_a_removed_artifact_is_found(scripted: object, alice: Caller) -> None:
    run(
        alice,
        "answer = ExecutionResult('', '', 0, 0.0,"
        " artifacts=[ArtifactFile('a.txt', 'text/plain', b'x')])",
    )
    assert verify().is_intact
    execution = Execution.objects.get()
    assert LedgerEntry.objects.get(kind="execution").stated["artifacts"][0]["name"] == "a.txt"
    execution.artifacts.all().delete()
    assert first()[0] == "altered record"


def test_what_changes_honestly_while_it_is_read_is_no_finding(
    entries: list[LedgerEntry], alice: Caller
) -> None:
    worked: list[object] = []

    def work(found: object) -> None:
        if worked:
            return
        worked.append(found)
        tenant = alice.tenant
        tenant.name = "Another name"
        tenant.save()
        gone, _ = create_api_key(tenant, "gone")
        gone.delete()
        create_api_key(tenant, "new")
        assert run(alice, "pass # meanwhile").status_code == 200

    found = verification.verify(report=work)
    assert [str(finding) for finding in found.findings] == []
    # What was changed without an entry is still found, by the second look.
    ApiKey.objects.filter(name="new").update(scopes="admin")
    assert [finding.kind for finding in verify().findings] == ["altered record"]
