"""What an audit report may be of, how far it reads, and how much of it there is."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from pypdf import PdfReader

from executions.capabilities.reports import pdf, reading
from executions.capabilities.reports.reading import Scope
from executions.capabilities.reports.service import make
from executions.capabilities.reports.signing import Signed
from executions.kernel.text import time_of
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration
from tests.conftest import Caller
from tests.ledger.reports import WITH_ARTIFACT, findings_of, report_of
from tests.support.execution_rows import make_rows
from tests.support.report_pages import LIST, Login, login
from tests.support.running import run

__all__ = ("login",)

pytestmark = pytest.mark.django_db

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("field", ["since", "until"])
@pytest.mark.parametrize("at", ["1969-12-31T23:59:59", "9999-12-31T23:59:59-12:00"])
def test_a_time_that_no_run_can_have_is_refused(
    alice: Caller, login: Login, tmp_path: Path, field: str, at: str
) -> None:
    with pytest.raises(CommandError, match=f"{field}: Must be between 1970") as refused:
        call_command("audit_report", str(tmp_path / "a.json"), f"--{field}", at)
    assert refused.value.returncode == 2
    day, time = at[:19].split("T")
    page = login("Auditor").post(f"{LIST}add/", {f"{field}_0": day, f"{field}_1": time})
    assert page.status_code == 200
    assert "Must be between 1970 and 9999." in page.content.decode()


def test_the_first_time_that_a_run_can_have_is_not_refused(alice: Caller) -> None:
    Scope(since=EPOCH).check()
    assert Scope(since=EPOCH).is_small()
    with pytest.raises(InvalidConfiguration):
        Scope(since=EPOCH - timedelta(microseconds=1)).check()


def test_what_nobody_expected_is_no_report_that_is_not_intact(
    alice: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("nobody expected it")

    monkeypatch.setattr(pdf, "write", broken)
    with pytest.raises(CommandError, match="RuntimeError") as failed:
        call_command("audit_report", str(tmp_path / "a.json"), "--tenant", "wonderland")
    assert failed.value.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_entered_after_the_end_is_within_the_span(
    scripted: object, alice: Caller
) -> None:
    early, late = (run(alice, "pass").json() for _ in range(2))
    end = time_of(UUID(run(alice, "pass").json()["id"]))
    LedgerEntry.objects.update(at=end + timedelta(hours=1))
    report = report_of(Scope("wonderland", until=end))
    assert [each["id"] for each in report["runs"]] == [early["id"], late["id"]]
    assert report["verification"]["last_entry"] == late["receipt"]["sequence"]
    # Entries were changed here, and within the span that shows.
    assert ("altered", late["receipt"]["sequence"]) in findings_of(report)


def test_a_report_of_much_text_or_of_large_files_is_none_to_wait_for(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rows(1, code="x" * 500_000, tenant_slug="wonderland")
    ours = Scope("wonderland")
    assert ours.is_small()
    monkeypatch.setattr(reading, "_SMALL_BYTES", 400_000)
    assert not ours.is_small()
    Execution.objects.all().delete()
    run(alice, WITH_ARTIFACT)
    assert ours.is_small()
    Execution.objects.get().artifacts.update(size_bytes=400_001)
    assert not ours.is_small()


def written() -> tuple[PdfReader, list[str]]:
    """The PDF of wonderland with its code, and what was said while it was made."""
    pieces: list[bytes] = []
    said: list[str] = []
    make("00", Scope("wonderland", with_code=True), "x", list, pieces.extend, said.append)
    return PdfReader(io.BytesIO(b"".join(pieces))), said


def test_lines_of_code_and_pages_are_bounded_and_the_pdf_says_so(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "\n" * 4000
    make_rows(3, code=long, error_code="E1", error_message=long, tenant_slug="wonderland")
    monkeypatch.setattr(pdf, "_SAY_EVERY", 1)
    whole, said = written()
    assert len(whole.pages) < 30
    page = "".join(each.extract_text() for each in whole.pages)
    assert page.count("3801 more characters of the code") == 3
    assert page.count("more characters of this") == 3
    assert any("pages of the PDF written" in each for each in said)

    monkeypatch.setattr(pdf, "MOST_PAGES", 2)
    cut, _ = written()
    page = cut.pages[-1].extract_text()
    assert len(cut.pages) == 3
    assert "INCOMPLETE: this PDF is limited to 2 pages" in page
    assert "2 more runs are only in the JSON file" in page


def test_a_few_hundred_runs_take_about_ten_pages_and_the_first_begins_with_the_summary(
    scripted: object, alice: Caller, tmp_path: Path
) -> None:
    run(alice, "pass")
    call_command("audit_report", str(tmp_path / "a.json"), "--tenant", "wonderland")
    told = json.loads((tmp_path / "a.json").read_bytes())["report"]
    (one,) = told["runs"]
    ids = [f"{number:08d}{one['id'][8:]}" for number in range(300)]
    file = io.BytesIO()
    pdf.write(file, told, Signed("r", "d", "s", "k"), (("runs", {**one, "id": pk}) for pk in ids))
    pages = [each.extract_text() for each in PdfReader(file).pages]
    assert len(pages) <= 12
    first = pages[0].split()
    assert first.index("Runs") < first.index("INTACT:")
    assert all(pk in "".join(pages) for pk in ids)


def test_what_a_provider_says_of_its_runtime_has_a_bar(
    alice: Caller,
) -> None:
    claimed = "gVisor, isolation: full"
    make_rows(1, tenant_slug="wonderland", runtime=claimed)
    placed: list[tuple[float, str]] = []
    for each in written()[0].pages:
        each.extract_text(
            visitor_text=lambda text, cm, tm, font, size: placed.append((tm[4], text))
        )
    # Beyond the bar; what the report says itself begins at 138.
    assert [round(x) for x, text in placed if claimed in text] == [144]


def test_the_claim_is_kept_while_entries_are_read(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    Execution.objects.all()._raw_delete("default")
    said: list[str] = []
    make("00", Scope("wonderland"), "x", list, list, said.append)
    assert "1 runs read whose record is gone" in said
