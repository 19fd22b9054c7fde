"""Whoever can write to the database, or to the checkpoints, without the ledger's key."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from executions.ledger import checkpoints
from executions.ledger.append import append
from executions.ledger.entry import (
    LedgerUnavailable,
    SigningKey,
    _load,
    digest,
    signed_bytes,
    write,
)
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entries
from executions.runs.models import Execution
from tests.attacks.conftest import RUN
from tests.conftest import Caller
from tests.ledger.ledger_entries import verify
from tests.support.running import run

pytestmark = pytest.mark.database


@pytest.mark.django_db
def test_a_forged_erasure_covers_nothing(everything: None, alice: Caller) -> None:
    """A row that says that everything was erased, signed by nobody we know."""
    forger = _load(1, secrets.token_urlsafe(32))
    head = LedgerEntry.objects.latest("sequence")
    _forge(
        forger,
        head,
        "erasure",
        "wonderland",
        {"data": "output", "created_before": "2999-01-01T00:00:00.000000+00:00"},
    )
    Execution.objects.filter(tenant=alice.tenant).update(stdout="")
    details = [finding.detail for finding in verify().findings]
    assert any("the stdout was removed" in detail for detail in details), details


def _forge(
    key: SigningKey,
    after: LedgerEntry,
    kind: str,
    subject: str,
    content: dict[str, Any],
    **claims: Any,
) -> LedgerEntry:
    """An entry written by hand, behind `after`, signed with this key."""
    stated = {
        **content,
        "ledger": 1,
        "sequence": after.sequence + 1,
        "previous": after.digest,
        "key_id": key.key_id,
        "kind": kind,
        "subject": subject,
        "at": "2026-01-01T00:00:00.000000+00:00",
    }
    statement = write(stated)
    return LedgerEntry.objects.create(
        sequence=after.sequence + 1,
        kind=kind,
        at="2026-01-01T00:00:00Z",
        statement=statement,
        digest=digest(statement),
        key_id=claims.get("key_id", key.key_id),
        signature=key.sign(signed_bytes(stated, statement)),
    )


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("claims_ours", [False, True])
def test_nothing_is_entered_on_a_head_that_our_key_did_not_sign(
    scripted: object, alice: Caller, claims_ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole attack: a key introduced by itself, entries of its own, and our id on the head."""
    assert run(alice, RUN).status_code == 200
    forger = _load(1, secrets.token_urlsafe(32))
    honest = LedgerEntry.objects.latest("sequence")
    introduced = _forge(
        forger,
        honest,
        "ledger_key",
        forger.key_id,
        {"algorithm": "Ed25519", "public_key": forger.public_key},
    )
    claims = {"key_id": honest.key_id} if claims_ours else {}
    forged = _forge(forger, introduced, "note", "forged", {}, **claims)

    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    answer = run(alice, RUN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SB009")
    assert "ledger" in answer.json()["error"]["message"].lower()
    assert LedgerEntry.objects.latest("sequence").sequence == forged.sequence
    if claims_ours:
        assert "ALERT: the ledger's newest entry" in caplog.text
        # From then on nothing is run that could not be entered.
        before = Execution.objects.count()
        assert run(alice, RUN).status_code == 503
        assert Execution.objects.count() == before
    found = verify()
    assert (found.findings[0].kind, found.findings[0].sequence) == (
        "untrusted key",
        introduced.sequence,
    )

    LedgerEntry.objects.filter(sequence__gt=honest.sequence).delete()
    assert run(alice, RUN).status_code == 200
    assert [finding for finding in verify().findings if finding.kind == "untrusted key"] == []


@pytest.mark.django_db(transaction=True)
def test_a_ledger_re_signed_from_its_first_entry_is_refused() -> None:
    """Every entry signed anew; the last one names our key, which the forger's introduces."""
    for number in range(5):
        append("note", str(number), {})
    forger = _load(1, secrets.token_urlsafe(32))
    ours = LedgerEntry.objects.get(sequence=1)
    previous = "0" * 64
    for entry in LedgerEntry.objects.order_by("sequence"):
        stated = {**entry.stated, "key_id": forger.key_id, "previous": previous}
        if entry.sequence == 1:
            stated |= {"subject": forger.key_id, "public_key": forger.public_key}
        if entry.sequence == 2:
            stated = {
                **{name: stated[name] for name in ("ledger", "sequence", "previous", "at")},
                "key_id": forger.key_id,
                "kind": "ledger_key",
                "subject": ours.stated["subject"],
                "public_key": ours.stated["public_key"],
            }
        statement = write(stated)
        previous = digest(statement)
        LedgerEntry.objects.filter(pk=entry.pk).update(
            statement=statement,
            digest=previous,
            kind=stated["kind"],
            key_id=forger.key_id,
            signature=forger.sign(signed_bytes(stated, statement)),
        )
    newest = LedgerEntry.objects.latest("sequence")
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    LedgerEntry.objects.filter(pk=newest.pk).update(key_id=ours.key_id)
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    assert verify().findings[0].kind == "untrusted key"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("column", ["statement", "digest", "signature", "key_id"])
def test_an_altered_head_is_not_continued(column: str) -> None:
    append("note", "honest", {})
    head = LedgerEntry.objects.latest("sequence")
    forged = {
        "statement": head.statement.replace('"at":"20', '"at":"19'),
        "digest": "0" * 64,
        # Not at its end, where the last byte of one signature in sixteen is zero already.
        "signature": ("B" if head.signature[0] == "A" else "A") + head.signature[1:],
        "key_id": "0" * 16,
    }[column]
    LedgerEntry.objects.filter(pk=head.pk).update(**{column: forged})
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})


@pytest.fixture
def kept(settings: Any, tmp_path: Path) -> Path:
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "ledger")
    return tmp_path / "ledger"


@pytest.fixture
def long_ledger(transactional_db: None, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three hundred entries, with a line of the checkpoints for every hundredth."""
    monkeypatch.setattr("executions.ledger.checkpoints.EVERY", 100)
    for number in range(300):
        append("note", str(number), {})
    assert verify().is_intact
    return kept


def test_checkpoints_that_are_gone_are_found(long_ledger: Path) -> None:
    (long_ledger / "checkpoints.jsonl").rename(long_ledger / "away")
    assert {finding.kind for finding in verify().findings} == {"missing checkpoint"}
    (long_ledger / "head.json").unlink()
    assert "there is no head.json" in " ".join(map(str, verify().findings))
    # Work goes on, and writes them anew. That they had been gone stays to be seen.
    append("note", "later", {})
    checkpoints.write_checkpoint(verify_entries)
    assert {finding.kind for finding in verify().findings} == {"missing checkpoint"}


def test_a_line_taken_out_of_the_checkpoints_is_found(long_ledger: Path) -> None:
    history = long_ledger / "checkpoints.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    for left in (lines[1:], [lines[0], *lines[2:]]):
        history.write_text("".join(left))
        assert "altered checkpoint" in {finding.kind for finding in verify().findings}


def test_a_forged_head_hides_no_truncation_and_holds_nothing_up(long_ledger: Path) -> None:
    head = long_ledger / "head.json"
    honest = head.read_text()
    cut = LedgerEntry.objects.get(sequence=250)
    LedgerEntry.objects.filter(sequence__gt=250).delete()
    forged = {"sequence": 250, "digest": cut.digest, "key_id": cut.key_id, "signature": "AAAA"}
    head.write_text(json.dumps(forged).ljust(319) + "\n")
    kinds = {finding.kind for finding in verify().findings}
    assert {"altered checkpoint", "truncated"} <= kinds

    # Far ahead, so that no commit would be noted any more.
    for text in (
        json.dumps({**json.loads(honest), "sequence": 10**9}),
        json.dumps({"sequence": 10**9, "digest": "0" * 64}),
    ):
        head.write_text(text.ljust(319) + "\n")
        entry = append("note", "after", {})
        noted = checkpoints.head()
        assert noted is not None
        assert (noted.sequence, noted.digest) == (entry.sequence, entry.digest)


def test_a_rotated_key_vouches_for_the_one_before_and_for_no_other(
    transactional_db: None, settings: Any
) -> None:
    append("note", "old", {})
    old = settings.LEDGER_KEYS[0]
    new = secrets.token_urlsafe(32)
    settings.LEDGER_KEYS = [new, old]
    append("note", "new", {})
    settings.LEDGER_KEYS = [new]
    assert verify().is_intact
    forger = _load(1, secrets.token_urlsafe(32))
    head = LedgerEntry.objects.latest("sequence")
    _forge(forger, head, "note", "forged", {})
    with pytest.raises(LedgerUnavailable):
        append("note", "continued", {})
    assert [finding.kind for finding in verify().findings] == ["untrusted key"]
