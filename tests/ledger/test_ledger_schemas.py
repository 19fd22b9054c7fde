"""A ledger grows: what was sealed by an earlier version is verified for ever."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executions.models import Execution, LedgerEntry
from executions.services.ledger import schemas, sealing
from executions.services.ledger.schemas import CURRENT, SCHEMAS
from executions.services.ledger.verification import verify
from tests.conftest import Caller
from tests.support.processes import ROOT, clean_environment
from tests.support.running import run

pytestmark = pytest.mark.database

KEPT = ROOT / "tests" / "data" / "ledger_1"
NEW = "dGhlIHNlY29uZCBrZXkgb2YgdGhlIGZpeHR1cmUsIDE"
OLD = "dGhlIGZpcnN0IGtleSBvZiB0aGUgZml4dHVyZSwgMzI"
OLD_PUBLIC = "37pPROaI0NlRfeUsxM2rURGPUO9E+Qcw9DPUUREL3bI="


class Installation:
    """The kept installation, with today's code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(KEPT / "artifacts", folder / "artifacts")
        shutil.copytree(KEPT / "ledger", folder / "ledger")
        with gzip.open(KEPT / "database.sqlite3.gz") as packed:
            (folder / "cofferdam.sqlite3").write_bytes(packed.read())

    def manage(self, *arguments: str, keys: str = f"{NEW},{OLD}", **extra: str) -> tuple[int, str]:
        environment = clean_environment(self.folder) | {
            "SECRET_KEY": "a key for tests that is as long as Django wants its keys to be",
            "FERNET_KEYS": "another key for tests",
            "LEDGER_KEYS": keys,
            **extra,
        }
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    (tmp_path / "data").mkdir()
    kept = Installation(tmp_path / "data")
    code, said = kept.manage("migrate", "--verbosity", "0")
    assert code == 0, said
    return kept


def test_a_ledger_of_the_first_schema_is_intact_after_an_upgrade(
    installation: Installation,
) -> None:
    code, said = installation.manage("verify_ledger")
    assert code == 0, said
    assert "Intact: 23 entries, 6 executions" in said
    assert "NOT PROVEN" in said

    code, said = installation.manage("bootstrap")
    assert code == 0, said
    assert "entered in it as found" in said
    code, said = installation.manage("verify_ledger")
    assert code == 0, said
    # The one from before there was a ledger is in it now.
    assert " 7 executions" in said
    assert "NOT PROVEN" not in said
    assert "entered in it" not in installation.manage("bootstrap")[1]
    assert installation.manage("apply_retention")[0] == 0
    assert installation.manage("verify_ledger")[0] == 0
    # The former key is not needed any more: the present one has vouched for it.
    code, said = installation.manage("verify_ledger", keys=NEW)
    assert code == 0, said


def test_a_former_key_that_nothing_vouches_for_has_to_be_named(
    installation: Installation,
) -> None:
    code, said = installation.manage("verify_ledger", keys=NEW)
    assert code == 1
    assert "entry 1: untrusted key" in said
    assert "LEDGER_TRUSTED_KEYS" in said
    code, said = installation.manage("verify_ledger", keys=NEW, LEDGER_TRUSTED_KEYS=OLD_PUBLIC)
    assert code == 0, said
    code, said = installation.manage("verify_ledger", keys=NEW, LEDGER_TRUSTED_KEYS="no key")
    assert code == 2
    assert "LEDGER_TRUSTED_KEYS" in said


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "86dc5101b9ea95e43271b89389efc633b3e914a05c8e4a0b4ad80ef875606a76"),
        (2, "f392467bcd41640f1af267147032fde5a8261c17ae71a19e69b4ffff757e17ee"),
    ],
)
def test_a_schema_is_what_was_shipped(number: int, expected: str) -> None:
    """It must never change. Neither must the others, once they were shipped."""
    schema = SCHEMAS[number]
    shipped = repr((schema.record, schema.stated, schema.with_artifacts))
    assert hashlib.sha256(shipped.encode()).hexdigest() == expected


@pytest.mark.django_db
def test_one_more_sealed_column_is_one_more_schema_and_breaks_no_older_entry(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(alice, "pass")
    latest = SCHEMAS[CURRENT]
    wider = replace(latest, record=(*latest.record, "replay_of_id"))
    grown = {**SCHEMAS, CURRENT + 1: replace(wider, stated=(*wider.stated, "mode"))}
    for module in (schemas, sealing):
        monkeypatch.setattr(module, "SCHEMAS", grown)
        monkeypatch.setattr(module, "CURRENT", CURRENT + 1)
    receipt = run(alice, "pass # again").json()["receipt"]

    assert (receipt["schema"], receipt["mode"]) == (CURRENT + 1, "sync")
    entries = LedgerEntry.objects.filter(kind="execution").order_by("sequence")
    assert [entry.stated["schema"] for entry in entries] == [CURRENT, CURRENT + 1]
    assert verify().is_intact

    # The version before cannot check what it does not know, and says so.
    monkeypatch.setattr(schemas, "SCHEMAS", SCHEMAS)
    (finding,) = verify().findings
    assert f"does not know the schema {CURRENT + 1}" in finding.detail


@pytest.mark.django_db
def test_what_no_double_holds_is_sealed_as_text(scripted: object, alice: Caller) -> None:
    run(alice, "answer = ExecutionResult('', '', 0, 0.0, {'big': 2**70, 'odd': 2**70 + 1})")
    run(alice, "answer = ExecutionResult('', '', 0, 0.0, {'high': 1e300, '\\ud800': '\\udfff'})")
    assert Execution.objects.filter(status="succeeded").count() == 2
    assert verify().is_intact


def test_every_stated_and_sealed_column_exists() -> None:
    columns: set[Any] = {column.attname for column in Execution._meta.concrete_fields}
    for schema in SCHEMAS.values():
        assert columns.issuperset(schema.record)
        assert set(schema.stated) <= set(schema.record)
