"""The page of auditors' reports: who may make one, how it is made, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from executions.capabilities.reports import reading
from executions.capabilities.reports import service as reports
from executions.capabilities.reports.models import Report
from executions.kernel.storage import REPORTS, file_store
from executions.ledger.models import LedgerEntry
from executions.tasks import make_reports
from tests.conftest import Caller
from tests.support.report_pages import LIST, Login
from tests.support.running import run

pytestmark = pytest.mark.django_db


def files_of(report: Report) -> list[str]:
    return [
        each.name for each in file_store(REPORTS).entries() if each.name.startswith(report.pk.hex)
    ]


def page_of(report: Report) -> str:
    return f"{LIST}{report.pk}/change/"


def test_an_auditor_makes_a_report_and_takes_it_away(
    scripted: object,
    alice: Caller,
    login: Login,
    django_capture_on_commit_callbacks: Any,
) -> None:
    made = run(alice, "pass").json()
    auditor = login("Auditor")
    assert "Add report" in auditor.get(LIST).content.decode()
    with django_capture_on_commit_callbacks(execute=True):
        answer = auditor.post(f"{LIST}add/", {"tenant_slug": "wonderland", "with_code": "on"})
    report = Report.objects.get()
    assert answer.headers["Location"] == page_of(report)
    assert (report.state, report.runs, report.findings) == ("ready", 1, 0)

    page = auditor.get(page_of(report)).content.decode()
    assert "no problems found" in page
    found = {}
    for file_format in ("json", "pdf"):
        url = f"{LIST}{report.pk}/report.{file_format}"
        assert f'href="{url}"' in page
        file = auditor.get(url)
        assert file["Content-Disposition"].startswith("attachment")
        assert "no-store" in file["Cache-Control"]
        found[file_format] = file.getvalue()
    told = json.loads(found["json"])["report"]
    assert told["made_by"] == "user:a auditor"
    assert told["runs"][0]["receipt"] == made["receipt"]
    assert found["pdf"].startswith(b"%PDF-")

    entry = LedgerEntry.objects.get(sequence=report.ledger_sequence).stated
    assert (entry["kind"], entry["actor"], entry["subject"]) == (
        "report",
        "user:a auditor",
        str(report.pk),
    )
    assert (entry["json_hash"], entry["pdf_hash"]) == (report.json_hash, report.pdf_hash)


def test_operators_see_that_there_is_one_and_neither_make_nor_take_it(
    scripted: object, alice: Caller, login: Login
) -> None:
    run(alice, "pass")
    report = Report(tenant_slug="wonderland", made_by="user:x")
    report.save()
    assert reports.make_one(report.pk)
    operator, auditor = login("Operator"), login("Auditor")
    assert operator.get(page_of(report)).status_code == 200
    assert operator.get(f"{LIST}add/").status_code == 403
    assert operator.post(f"{LIST}add/", {"tenant_slug": "wonderland"}).status_code == 403
    assert operator.get(f"{LIST}{report.pk}/report.json").status_code == 403
    assert operator.get(f"{LIST}{report.pk}/state/").json()["state"] == "ready"
    # Nobody changes or removes one.
    assert auditor.post(page_of(report), {"tenant_slug": "x"}).status_code == 403
    assert auditor.post(f"{LIST}{report.pk}/delete/", {"post": "yes"}).status_code == 403
    assert Client().get(f"{LIST}{report.pk}/report.json").status_code == 302


def test_the_form_names_the_field_that_is_wrong(alice: Caller, login: Login) -> None:
    auditor = login("Auditor")
    for values, told in (
        ({}, "Select a tenant, a time"),
        ({"tenant_slug": "nobody"}, "nobody: Unknown name. Available: wonderland"),
        ({"ids": "<b>\u202e"}, "&lt;b&gt;[U+202E] is not an execution id."),
    ):
        page = auditor.post(f"{LIST}add/", values)
        assert page.status_code == 200
        assert told in page.content.decode()
    assert not Report.objects.exists()
    Report.objects.bulk_create(Report() for _ in range(reports.MOST_WAITING))
    page = auditor.post(f"{LIST}add/", {"tenant_slug": "wonderland"})
    assert "20 reports are waiting." in page.content.decode()


def test_a_large_one_is_made_by_the_workers(
    scripted: object,
    alice: Caller,
    login: Login,
    monkeypatch: pytest.MonkeyPatch,
    django_capture_on_commit_callbacks: Any,
) -> None:
    run(alice, "pass")
    monkeypatch.setattr(reading, "_SMALL_RUNS", 0)
    auditor = login("Auditor")
    with django_capture_on_commit_callbacks(execute=True):
        auditor.post(f"{LIST}add/", {"tenant_slug": "wonderland"})
    report = Report.objects.get()
    assert report.state == "waiting"
    assert f'data-url="{LIST}{report.pk}/state/"' in auditor.get(page_of(report)).content.decode()
    assert auditor.get(f"{LIST}{report.pk}/report.json").status_code == 404
    begun: list[Callable[[], object]] = []
    monkeypatch.setattr(
        "executions.tasks.run_once_in_background", lambda name, work: begun.append(work)
    )
    make_reports()
    (work,) = begun
    assert (work(), work()) == (1, 0)
    report.refresh_from_db()
    assert report.state == "ready"
    assert LedgerEntry.objects.get(kind="report").stated["actor"] == "user:a auditor"


def test_one_whose_maker_is_gone_is_begun_anew_and_not_for_ever(
    scripted: object, alice: Caller
) -> None:
    run(alice, "pass")
    report = Report(tenant_slug="wonderland", state="making", tries=1, started_at=timezone.now())
    report.claimed_until = timezone.now() + timedelta(minutes=5)
    report.save()
    assert not reports.make_one(report.pk)
    Report.objects.update(claimed_until=timezone.now() - timedelta(seconds=1))
    assert reports.make_one(report.pk)
    Report.objects.update(
        state="making",
        tries=reports.MOST_TRIES,
        claimed_until=timezone.now() - timedelta(seconds=1),
    )
    assert not reports.make_one(report.pk)
    report.refresh_from_db()
    assert (report.state, "never completed" in report.problem) == ("failed", True)


def test_without_a_key_it_fails_and_says_so(alice: Caller, settings: Any) -> None:
    report = Report(tenant_slug="wonderland", made_by="user:x")
    report.save()
    settings.LEDGER_KEYS = []
    assert not reports.make_one(report.pk)
    report.refresh_from_db()
    assert (report.state, "LEDGER_KEYS" in report.problem) == ("failed", True)


def test_the_files_go_after_their_time_and_their_hashes_stay(
    scripted: object, alice: Caller, login: Login
) -> None:
    run(alice, "pass")
    report = Report(tenant_slug="wonderland", made_by="user:x")
    report.save()
    reports.make_one(report.pk)
    assert len(files_of(report)) == 2
    assert reports.remove_old() == 0
    Report.objects.update(created_at=timezone.now() - timedelta(days=reports.KEPT_DAYS + 1))
    assert (reports.remove_old(), reports.remove_old()) == (1, 0)
    assert files_of(report) == []
    auditor = login("Auditor")
    assert auditor.get(f"{LIST}{report.pk}/report.json").status_code == 404
    page = auditor.get(page_of(report)).content.decode()
    assert "Removed after" in page
    assert LedgerEntry.objects.get(kind="report").stated["json_hash"] in page
