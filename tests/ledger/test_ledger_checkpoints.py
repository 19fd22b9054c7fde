"""Checkpoints of the ledger outside of the database: when they are written, and what is no such."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executions.ledger import checkpoints
from executions.ledger.append import append
from executions.ledger.entry import Head, canonical, place_bytes, signing_key
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify, verify_entries
from tests.ledger.ledger_entries import TABLE, entries, first, kept, sql

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

__all__ = ("entries", "kept")


def test_a_forged_or_broken_checkpoint_is_found(entries: list[LedgerEntry], kept: Path) -> None:
    checkpoints.write_checkpoint(verify_entries)
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


@pytest.fixture
def short_of(
    kept: Path, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Enters up to 99, with a line every hundred; what it returns has the hundredth miss its own."""
    for module in (checkpoints, checkpoints):
        monkeypatch.setattr(module, "EVERY", 100)
    enter(10)
    checkpoints.write_checkpoint(verify_entries)
    enter(88)
    (tmp_path / "file").touch()

    def miss() -> None:
        settings.LEDGER_CHECKPOINTS = str(tmp_path / "file")
        enter(1)
        settings.LEDGER_CHECKPOINTS = str(kept)
        enter(1)

    return miss


def enter(count: int) -> None:
    for number in range(count):
        append("note", str(number), {})


def lines() -> list[int]:
    return [point.sequence for point in checkpoints.history(trusted_keys()).points]


def test_a_line_that_a_rotation_of_keys_has_skipped_is_added_later(
    short_of: Callable[[], None], settings: Any
) -> None:
    settings.LEDGER_KEYS = [secrets.token_urlsafe(32), *settings.LEDGER_KEYS]
    enter(80)
    assert LedgerEntry.objects.get(sequence=100).kind == "ledger_key"
    assert first() == ("missing checkpoint", 100)
    checkpoints.write_checkpoint(verify_entries)
    assert verify().is_intact
    assert lines() == [11, 100, 181]


def test_a_line_that_could_not_be_written_is_added_later_and_once(
    short_of: Callable[[], None],
) -> None:
    short_of()
    enter(99)
    assert lines() == [11, 200]
    checkpoints.write_checkpoint(verify_entries)
    # The newest has the last line, which tells how far the checkpoints are.
    assert lines() == [11, 200, 100, 200]
    enter(80)
    assert verify().is_intact
    checkpoints.write_checkpoint(verify_entries)
    assert lines() == [11, 200, 100, 200, 280]
    assert checkpoints.write_checkpoint(verify_entries) is None


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE {} SET statement = '{{}}' WHERE sequence = 100",
        "UPDATE {} SET signature = 'AAAA' WHERE sequence = 120",
        "DELETE FROM {} WHERE sequence = 50",
        "DELETE FROM {} WHERE sequence > 150",
    ],
)
def test_no_line_is_added_later_for_entries_that_were_changed_meanwhile(
    short_of: Callable[[], None], change: str
) -> None:
    short_of()
    enter(79)
    sql(change.format(TABLE))
    for _ in range(2):
        checkpoints.write_checkpoint(verify_entries)
        assert 100 not in lines()
    assert not verify().is_intact
