"""Checkpoints of the ledger outside of the database: when they are written, and what is no such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executions.models import LedgerEntry
from executions.services.ledger import append, checkpoints
from executions.services.ledger.canonical import canonical
from executions.services.ledger.formats import place_bytes
from executions.services.ledger.head import Head
from executions.services.ledger.keyring import signing_key
from executions.services.ledger.trust import trusted_keys
from executions.services.ledger.verification import verify
from tests.ledger_entries import entries, first, kept

pytestmark = pytest.mark.django_db(transaction=True)

__all__ = ("entries", "kept")


def test_a_forged_or_broken_checkpoint_is_found(entries: list[LedgerEntry], kept: Path) -> None:
    checkpoints.write_checkpoint()
    history = kept / "checkpoints.jsonl"
    good = history.read_text()
    assert verify().is_intact
    forged = canonical({**json.loads(good), "sequence": 2})
    history.write_text(good + forged + "\nno json\n")
    found = verify()
    assert [finding.kind for finding in found.findings] == ["altered checkpoint"] * 2
    assert "line 2" in found.findings[0].detail
    history.write_text(good)
    (kept / "head.json").write_text("{}")
    assert first() == ("altered checkpoint", 9)


def test_checkpoints_are_written_now_and_then(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 4)
    for number in range(9):
        append("note", str(number), {})
    history = checkpoints.history(trusted_keys())
    assert ([point.sequence for point in history.points], history.damaged) == ([4, 8], [])
    newest = LedgerEntry.objects.get(pk=10)
    assert checkpoints.head() == checkpoints.Point(
        10, newest.digest, newest.key_id, newest.signature
    )
    assert [path.stat().st_mode & 0o777 for path in kept.iterdir()] == [0o600, 0o600]
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_commit_noted_late_does_not_lower_the_head(db: None, kept: Path) -> None:
    key = signing_key()

    def point(sequence: int) -> checkpoints.Point:
        named = str(sequence) * 64
        signature = key.sign(place_bytes(sequence, named))
        return checkpoints.Point(sequence, named, key.key_id, signature)

    checkpoints.note(point(7), None)
    checkpoints.note(point(6), Head(5, "5" * 64, key.key_id))
    assert checkpoints.head() == point(7)


def test_a_checkpoint_that_cannot_be_written_is_told_and_stops_nothing(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "file")
    append("note", "x", {})
    assert "could not be written" in caplog.text
