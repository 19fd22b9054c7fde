"""What is said of a report by whoever checks one, and that only what was made is given out."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from executions.capabilities.reports import reading
from executions.capabilities.reports import service as reports
from executions.capabilities.reports.models import Report
from executions.capabilities.reports.reading import Scope
from executions.capabilities.reports.service import make, name_of
from executions.capabilities.reports.signing import JSON_START, JSON_SUBJECT, json_end, sign
from executions.kernel.storage import REPORTS, file_store
from executions.ledger.entry import canonical, signing_key
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.report_pages import LIST, Login, login
from tests.support.running import run

__all__ = ("login",)

pytestmark = pytest.mark.django_db

Offline = Callable[..., tuple[int, str]]


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """The two files of a report of wonderland."""
    found = tmp_path / "a.json", tmp_path / "a.pdf"
    made = [path.open("wb") for path in found]
    with made[0], made[1]:
        scope_ = Scope("wonderland")
        make("01", scope_, "user:x", made[0].writelines, made[1].writelines)
    return found


@pytest.fixture
def offline(tmp_path: Path) -> Offline:
    def call(*paths: Path) -> tuple[int, str]:
        keys = tmp_path / "keys.json"
        keys.write_bytes(Client().get("/api/v1/ledger/keys").content)
        program = ROOT / "examples/receipts/verify_report.py"
        ended = subprocess.run(
            [sys.executable, program, *paths, "--keys", keys],
            check=False,
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stdout

    return call


@pytest.fixture
def tampered(scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose row was changed, and another one that its report has no room for."""
    monkeypatch.setattr(reading, "MOST_RUNS", 1)
    changed = run(alice, "pass").json()
    run(alice, "pass")
    Execution.objects.filter(pk=changed["id"]).update(status="failed")
    return str(changed["id"])


def checked(*paths: Path) -> str:
    out = io.StringIO()
    call_command("audit_report", "--check", *map(str, paths), stdout=out)
    return out.getvalue()


def test_a_valid_report_that_is_not_intact_is_told_as_that(
    tampered: str, paths: tuple[Path, Path], offline: Offline
) -> None:
    for said in (checked(*paths), offline(paths[0])[1]):
        assert f"{paths[0]}: valid" in said
        assert f"{paths[0]}: NOT INTACT: 1 findings" in said
        assert f"{paths[0]}: INCOMPLETE: it ends after 1 runs" in said
        assert '"wonderland"' in said
    assert f"{paths[1]}: NOT INTACT: 1 findings" in checked(*paths)
    # That the row differs from its receipt is what this report says, and no fault of it.
    assert offline(*paths)[0] == 0


def test_a_signed_report_that_was_not_entered_is_told_as_that(
    tampered: str, paths: tuple[Path, Path]
) -> None:
    LedgerEntry.objects.filter(kind="report")._raw_delete("default")
    assert f"{paths[0]}: NOT ENTERED" in checked(paths[0])


@pytest.mark.parametrize("name", ["status", "code_hash", "id"])
def test_a_run_that_is_told_otherwise_than_in_its_receipt_is_no_valid_report(
    scripted: object, alice: Caller, offline: Offline, tmp_path: Path, name: str
) -> None:
    run(alice, "pass")
    pieces: list[bytes] = []
    make("01", Scope("wonderland"), "user:x", pieces.extend, list)
    report = json.loads(b"".join(pieces))["report"]
    report["runs"][0][name] = "other"
    body = canonical(report).encode()
    digest = hashlib.sha256(body).hexdigest()
    path = tmp_path / "forged.json"
    path.write_bytes(JSON_START + body + json_end(sign(signing_key(), JSON_SUBJECT, "01", digest)))
    code, said = offline(path)
    assert code == 1
    assert "NOT VALID: the receipt of" in said


def test_only_the_file_that_was_made_is_given_out(
    scripted: object, alice: Caller, login: Login
) -> None:
    run(alice, "pass")
    first, second = (Report(tenant_slug="wonderland", made_by="user:x") for _ in range(2))
    for each in (first, second):
        each.save()
        assert reports.make_one(each.pk)
        each.refresh_from_db()
    auditor = login("Auditor")
    url = f"{LIST}{first.pk}/report.json"
    assert auditor.get(url).status_code == 200
    file_store(REPORTS).save_stream(name_of(first, "json"), reports.open_file(second, "json"))
    refused = auditor.get(url)
    assert refused.status_code == 409
    assert b"not the one that was made" in refused.content
    # Nor with the other one's hash in the row, nor with its entry.
    Report.objects.filter(pk=first.pk).update(json_hash=second.json_hash)
    assert auditor.get(url).status_code == 409
    Report.objects.filter(pk=first.pk).update(ledger_sequence=second.ledger_sequence)
    assert auditor.get(url).status_code == 409
    page = auditor.get(f"{LIST}{first.pk}/change/").content.decode()
    assert "The report cannot be downloaded." in page
    assert auditor.get(f"{LIST}{second.pk}/report.json").status_code == 200


def test_whoever_lost_the_claim_enters_nothing(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(alice, "pass")
    report = Report(tenant_slug="wonderland", made_by="user:x")
    report.save()

    def slow(*arguments: Any) -> Any:
        # Another host begins it anew, while this one writes its last bytes.
        Report.objects.update(claims=2)
        return make(*arguments)

    monkeypatch.setattr(reports, "make", slow)
    monkeypatch.setattr(reports, "_SAY_EVERY", 3600.0)
    assert not reports.make_one(report.pk)
    assert not LedgerEntry.objects.filter(kind="report").exists()
    report.refresh_from_db()
    assert (report.state, report.problem) == ("making", "")


def test_a_claim_is_by_the_clock_of_the_database(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(tenant_slug="wonderland", state="making", tries=1)
    report.claimed_until = timezone.now() + timedelta(minutes=4)
    report.save()
    ahead = timezone.now() + timedelta(hours=1)
    monkeypatch.setattr("executions.capabilities.reports.service.timezone.now", lambda: ahead)
    assert not reports.make_one(report.pk)
