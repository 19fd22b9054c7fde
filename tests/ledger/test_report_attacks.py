"""Audit reports of a database that somebody writes to, before they are made and meanwhile."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pypdf import PdfReader

from executions.capabilities.reports import reading
from executions.capabilities.reports import service as reports
from executions.capabilities.reports.reading import Reading, Scope
from executions.capabilities.reports.service import make
from executions.capabilities.retention.service import apply_retention
from executions.kernel.text import uuid7
from executions.ledger.append import append
from executions.ledger.models import LedgerEntry, LegalHold
from executions.ledger.verification import verify
from executions.runs.models import Artifact, Execution
from executions.tenants.models import Tenant
from tests.conftest import Caller
from tests.ledger.reports import WITH_ARTIFACT, findings_of, report_of
from tests.support.execution_rows import make_rows
from tests.support.running import run

pytestmark = pytest.mark.django_db

OURS = Scope("wonderland")


@pytest.fixture
def erase_records(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have retention erase every record."""

    def erase() -> None:
        settings.SANDBOX_RECORDS_FLOOR_DAYS = 1
        Tenant.objects.update(keep_records_days=1)
        later = timezone.now() + timedelta(days=2)
        monkeypatch.setattr("executions.capabilities.retention.service.timezone.now", lambda: later)
        apply_retention()

    return erase


def test_a_run_that_was_given_to_another_tenant_is_told(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    hidden, kept = (run(alice, "pass").json() for _ in range(2))
    theirs = run(charlie, "pass").json()
    Execution.objects.filter(pk=hidden["id"]).update(tenant_slug="other")
    report = report_of(OURS)
    assert findings_of(report) == [("altered record", hidden["receipt"]["sequence"])]
    assert [(each["id"], each["record"]) for each in report["gone"]] == [(hidden["id"], "moved")]
    assert [each["id"] for each in report["runs"]] == [kept["id"]]
    assert theirs["id"] not in json.dumps(report)
    by_id = report_of(Scope("wonderland", ids=(Execution.objects.earliest("pk").pk,)))
    assert (len(by_id["gone"]), by_id["unknown"]) == (1, [])


def test_a_record_that_goes_while_it_is_read_is_told(scripted: object, alice: Caller) -> None:
    gone, kept = (run(alice, "pass").json() for _ in range(2))
    reading = Reading(OURS)
    assert list(reading.gone()) == []
    Execution.objects.filter(pk=gone["id"])._raw_delete("default")
    assert [each["id"] for each, _ in reading.runs()] == [kept["id"]]
    assert [(each["id"], each["record"]) for each, _ in reading.gone()] == [(gone["id"], "removed")]
    (finding,) = reading.verification().findings
    assert (finding.kind, finding.sequence) == ("missing record", gone["receipt"]["sequence"])


@pytest.mark.parametrize("is_entered", [True, False])
def test_what_retention_erases_while_it_is_read_is_no_finding(
    scripted: object, alice: Caller, erase_records: Callable[[], None], is_entered: bool
) -> None:
    pk = run(alice, WITH_ARTIFACT).json()["id"]
    if not is_entered:
        LedgerEntry.objects.filter(execution_id=pk)._raw_delete("default")
    read = Execution.objects.get(pk=pk)
    reading = Reading(OURS)
    erase_records()
    entry = LedgerEntry.objects.filter(execution_id=pk).first()
    # As it was read before, without what was read after it.
    read._prefetched_objects_cache = {"artifacts": Artifact.objects.none()}  # type: ignore[attr-defined]
    with pytest.raises(Execution.DoesNotExist):
        reading._run(read, entry)
    reading._went(read)
    assert [each["record"] for each, _ in reading.gone()] == ["erased"] * is_entered
    assert reading.found.is_intact


def test_bytes_that_went_before_their_record_does_are_erased(
    scripted: object,
    alice: Caller,
    erase_records: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(alice, WITH_ARTIFACT)
    monkeypatch.setattr("executions.capabilities.retention.service._erase_rows", lambda *_: None)
    erase_records()
    assert not Artifact.objects.get().file
    report = report_of(OURS)
    assert findings_of(report) == []
    assert report["runs"][0]["artifacts"][0]["bytes"] == "erased"
    # The tenant, whose days were changed here, is not as it was entered.
    assert [each.sequence for each in verify().findings if "tenant" not in each.detail] == []


def test_numbers_that_no_json_has_keep_no_report_from_being_made(
    scripted: object, alice: Caller
) -> None:
    fine = run(alice, "pass").json()
    large, strange = (run(alice, WITH_ARTIFACT).json() for _ in range(2))
    ended, still_open = make_rows(2, tenant_slug="wonderland", tenant=alice.tenant)
    Execution.objects.filter(pk=ended.pk).update(total_ms=float("inf"))
    Execution.objects.filter(pk=still_open.pk).update(
        status="queued", finished_at=None, timeout=float("inf")
    )
    Artifact.objects.filter(execution=large["id"]).update(size_bytes=2**60 + 1)
    Execution.objects.filter(pk=strange["id"]).update(meta={"policy": {"id": 10**30}})
    report = report_of(OURS)
    told = {each["id"]: each["problem"] for each in report["runs"]}
    assert len(told) == 5
    assert {pk for pk, problem in told.items() if not problem} == {fine["id"]}
    assert ("altered record", large["receipt"]["sequence"]) in findings_of(report)


def test_an_entry_of_another_kind_passes_for_no_run(scripted: object, alice: Caller) -> None:
    other = append("export", "x", {"filters": {}})
    pk = Execution(tenant_slug="wonderland").pk
    LedgerEntry.objects.filter(pk=other.pk).update(kind="execution", execution_id=pk)
    run(alice, "pass")
    report = report_of(OURS)
    assert ("altered", other.sequence) in findings_of(report)
    assert (report["gone"], report["summary"]["gone"]) == ([], 0)
    assert ("altered", other.sequence) in [(each.kind, each.sequence) for each in verify().findings]


def test_a_hold_whose_row_was_removed_is_told_by_the_ledger(
    scripted: object, alice: Caller
) -> None:
    pk = run(alice, "pass").json()["id"]
    _, lost, lifted = (
        LegalHold.objects.create(tenant_slug="wonderland", execution_id=of, reason="a matter")
        for of in (None, pk, uuid7())
    )
    other = LegalHold.objects.create(tenant_slug="other", reason="theirs")
    lifted.delete()
    LegalHold.objects.filter(pk__in=(lost.pk, other.pk))._raw_delete("default")
    report = report_of(OURS)
    assert [(each["execution"], each["reason"]) for each in report["holds"]] == [
        (pk, None),
        (None, "a matter"),
    ]
    (finding,) = report["verification"]["findings"]
    assert finding["kind"] == "missing record"
    assert pk in finding["detail"]


def test_what_is_left_out_of_lists_is_counted(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        LegalHold.objects.create(tenant_slug="wonderland", execution_id=uuid7(), reason="a matter")
    for version in range(2):
        Execution.objects.filter(pk=run(alice, "pass").json()["id"]).update(config_version=version)
    monkeypatch.setattr(reading, "MOST_HOLDS", 2)
    monkeypatch.setattr(reports, "_MOST_USED", 1)
    pieces: list[bytes] = []
    make("00", OURS, "x", list, pieces.extend)
    page = "".join(each.extract_text() for each in PdfReader(io.BytesIO(b"".join(pieces))).pages)
    report = report_of(OURS)
    assert (len(report["holds"]), report["more_holds"]) == (2, 1)
    assert len(report["used"]["configurations"]) == report["used"]["more_configurations"] == 1
    assert page.count("1 more are only in the JSON file") == 2
