"""A ledger grows: what an earlier version has sealed is verified for ever."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from typing import Any

import pytest

from executions.ledger import entry
from executions.ledger.entry import CURRENT, SCHEMAS, LedgerUnavailable, signing_key
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import record
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.running import run

pytestmark = pytest.mark.database


@pytest.mark.django_db
def test_a_former_key_that_nothing_vouches_for_has_to_be_named(
    scripted: object, alice: Caller, settings: Any
) -> None:
    run(alice, "pass")
    former = signing_key().public_key
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32)]
    first = verify().findings[0]
    assert (first.kind, first.sequence) == ("untrusted key", 1)
    assert "LEDGER_TRUSTED_KEYS" in first.detail
    settings.LEDGER_TRUSTED_KEYS = [former]
    assert verify().is_intact
    settings.LEDGER_TRUSTED_KEYS = ["no key"]
    with pytest.raises(LedgerUnavailable, match="LEDGER_TRUSTED_KEYS: 'no key'"):
        verify()


def test_a_schema_of_a_release_does_not_change() -> None:
    """Whoever binds one more column adds a schema."""
    schema = SCHEMAS[1]
    text = repr((schema.record, schema.stated))
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "375ba987235541caea20a81a260966777d6f2a29fefa2ff0a706d1fda7cb2d22"
    )


@pytest.mark.django_db
def test_one_more_sealed_column_is_one_more_schema_and_breaks_no_older_entry(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(alice, "pass")
    latest = SCHEMAS[CURRENT]
    wider = replace(latest, record=(*latest.record, "replay_of_id"))
    grown = {**SCHEMAS, CURRENT + 1: replace(wider, stated=(*wider.stated, "mode"))}
    for module in (entry, record):
        monkeypatch.setattr(module, "SCHEMAS", grown)
        monkeypatch.setattr(module, "CURRENT", CURRENT + 1)
    receipt = run(alice, "pass # again").json()["receipt"]

    assert (receipt["schema"], receipt["mode"]) == (CURRENT + 1, "sync")
    entries = LedgerEntry.objects.filter(kind="execution").order_by("sequence")
    assert [entry.stated["schema"] for entry in entries] == [CURRENT, CURRENT + 1]
    assert verify().is_intact

    # The version before cannot check what it does not know, and says so.
    monkeypatch.setattr(entry, "SCHEMAS", SCHEMAS)
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
