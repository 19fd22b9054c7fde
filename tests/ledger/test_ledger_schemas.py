"""A ledger grows: what was sealed by an earlier version is verified for ever."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
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


# One process for all commands: each begins as in one of its own.
COMMANDS = """
import json, sys
from django.core.management import execute_from_command_line
for arguments in json.loads(sys.argv[1]):
    code = 0
    try:
        execute_from_command_line(["manage.py", *arguments])
    except SystemExit as ended:
        code = ended.code
    print(f"ended with {code}", flush=True)
"""


class Installation:
    """The kept installation, with today's code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def migrated(cls, folder: Path) -> Installation:
        shutil.copytree(KEPT / "artifacts", folder / "artifacts")
        shutil.copytree(KEPT / "ledger", folder / "ledger")
        with gzip.open(KEPT / "database.sqlite3.gz") as packed:
            (folder / "cofferdam.sqlite3").write_bytes(packed.read())
        kept = cls(folder)
        code, said = kept.manage("migrate", "--verbosity", "0")
        assert code == 0, said
        return kept

    def manage(self, *arguments: str, keys: str = f"{NEW},{OLD}", **extra: str) -> tuple[int, str]:
        """The exit code, and what the command said."""
        [found] = self.manage_all(list(arguments), keys=keys, **extra)
        return found

    def manage_all(
        self, *commands: list[str], keys: str = f"{NEW},{OLD}", **extra: str
    ) -> list[tuple[int, str]]:
        environment = clean_environment(self.folder) | {
            "SECRET_KEY": "a key for tests that is as long as Django wants its keys to be",
            "FERNET_KEYS": "another key for tests",
            "LEDGER_KEYS": keys,
            "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
            **extra,
        }
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(commands)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        said = re.split(r"^ended with (\d+)\n", done.stdout, flags=re.MULTILINE)
        assert len(said) == 2 * len(commands) + 1, done.stdout
        return [(int(code), text) for text, code in zip(said[::2], said[1::2], strict=False)]


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its data directory, of which each test has a copy."""
    return Installation.migrated(tmp_path_factory.mktemp("migrated")).folder


@pytest.fixture
def installation(migrated: Path, tmp_path: Path) -> Installation:
    return Installation(Path(shutil.copytree(migrated, tmp_path / "data")))


def test_a_ledger_of_the_first_schema_is_intact_after_an_upgrade(
    installation: Installation,
) -> None:
    codes, texts = zip(
        *installation.manage_all(
            ["verify_ledger"],
            ["bootstrap"],
            ["verify_ledger"],
            ["bootstrap"],
            ["apply_retention"],
            ["verify_ledger"],
        ),
        strict=True,
    )
    assert codes == (0,) * 6, texts
    first, made, second, again, *_ = texts
    assert "Intact: 23 entries, 6 executions" in first
    assert "NOT PROVEN" in first
    assert "entered in it as found" in made
    # The one from before there was a ledger is in it now.
    assert " 7 executions" in second
    assert "NOT PROVEN" not in second
    assert "entered in it" not in again
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
