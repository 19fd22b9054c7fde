"""An auditor's report: what is in it, that nothing in it can be changed, and what shows in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone
from pypdf import PdfReader

from executions.capabilities.reports import pdf, reading
from executions.capabilities.reports.pdf import spelled
from executions.capabilities.reports.reading import Scope
from executions.capabilities.reports.service import make
from executions.capabilities.retention.service import apply_retention
from executions.ledger.entry import canonical
from executions.ledger.models import LedgerEntry, LegalHold
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from tests.conftest import Caller
from tests.support.execution_rows import make_rows
from tests.support.processes import ROOT
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def audit_report() -> Command:
    """The command: its exit code and what it printed."""

    def call(*arguments: Any) -> tuple[int, str]:
        out = io.StringIO()
        try:
            call_command("audit_report", *map(str, arguments), stdout=out, stderr=io.StringIO())
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
        except CommandError as error:
            return error.returncode, str(error)
        return 0, out.getvalue()

    return call


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())["report"]
    return found


def text_of(path: Path) -> str:
    return "\n".join(page.extract_text() for page in PdfReader(path).pages)


def flat(text: str) -> str:
    return "".join(text.split())


def test_a_report_tells_what_ran_where_by_whom_and_its_receipt(
    scripted: object, alice: Caller, charlie: Caller, tmp_path: Path, audit_report: Command
) -> None:
    code = "# 打印 名字\nanswer = ExecutionResult('out', '', 0, 0.1)"
    first = run(alice, code, agent="reporter", model="机器").json()
    run(alice, "answer = ExecutionResult('', 'bad', 3, 0.1)")
    other = run(charlie, "pass").json()
    LegalHold.objects.create(tenant_slug="wonderland", execution_id=first["id"], reason="a matter")

    paths = tmp_path / "report.json", tmp_path / "report.pdf"
    code_, said = audit_report(*paths, "--tenant", "wonderland", "--code")

    assert (code_, said.split(",")[0]) == (0, "2 runs")
    report = read(paths[0])
    assert paths[0].read_bytes().startswith(b'{"report":' + canonical(report).encode())
    assert report["runs"][0]["id"] == first["id"]
    assert other["id"] not in paths[0].read_text()
    told = report["runs"][0]
    assert told["receipt"] == first["receipt"]
    assert (told["code"], told["held"], told["problem"]) == (code, True, "")
    assert (told["asked_by"]["agent"], told["asked_by"]["model"]) == ("reporter", "机器")
    assert (told["provider"], told["config_version"]) == (
        first["provider"],
        first["receipt"]["config_version"],
    )
    assert report["summary"]["statuses"] == {"succeeded": 1, "failed": 1}
    assert report["verification"]["intact"] is True
    assert report["holds"][0]["reason"] == "a matter"
    assert report["used"]["configurations"][0]["provider"] == "scripted"

    page = text_of(paths[1])
    assert {told in page for told in ("INTACT:", "a matter", "打印 名字")} == {True}
    assert json.loads(paths[0].read_bytes())["signature"]["signature"] in flat(page)

    entry = LedgerEntry.objects.get(kind="report").stated
    assert entry["made_by"].startswith("command")
    assert entry["asked"]["tenant"] == "wonderland"
    assert entry["json_hash"].removeprefix("sha256:") in flat(page)
    assert audit_report(*paths, "--check")[0] == 0


def test_a_range_and_ids_choose_what_is_in_it(
    scripted: object, alice: Caller, charlie: Caller, tmp_path: Path, audit_report: Command
) -> None:
    mine, theirs = run(alice, "pass").json()["id"], run(charlie, "pass").json()["id"]
    gone = "01a1fd4f-0000-7000-8000-000000000000"
    path = tmp_path / "a.json"
    asked = [f"--id={pk}" for pk in (mine, theirs, gone)]
    code, _ = audit_report(path, "--tenant", "wonderland", *asked)
    assert code == 0
    report = read(path)
    assert [each["id"] for each in report["runs"]] == [mine]
    assert report["unknown"] == sorted([gone, theirs])

    now = timezone.now()
    path = tmp_path / "b.json"
    assert audit_report(path, "--until", (now - timedelta(days=1)).isoformat())[0] == 0
    assert read(path)["summary"] == {"bodies": {}, "gone": 0, "runs": 0, "statuses": {}}
    path = tmp_path / "c.json"
    since, until = now - timedelta(hours=1), now + timedelta(hours=1)
    audit_report(path, "--since", since.isoformat(), "--until", until.isoformat())
    assert {each["id"] for each in read(path)["runs"]} == {mine, theirs}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a.json"], "tenant_slug: Select a tenant, a time"),
        (["a.json", "--tenant", "nobody"], "There is no such tenant"),
        (["a.txt", "--tenant", "wonderland"], "ends with .json"),
        (["a.json", "--since", "2026-02-01", "--until", "2026-01-01"], "until: Must be later"),
    ],
)
def test_what_no_report_can_be_of_is_refused(
    alice: Caller, tmp_path: Path, audit_report: Command, arguments: list[str], told: str
) -> None:
    code, said = audit_report(tmp_path / arguments[0], *arguments[1:])
    assert code == 2
    assert told in said
    assert list(tmp_path.iterdir()) == []
    assert not LedgerEntry.objects.filter(kind="report").exists()


def test_a_row_that_was_tampered_with_or_removed_shows_in_the_report(
    scripted: object, alice: Caller, tmp_path: Path, audit_report: Command
) -> None:
    changed, removed = (run(alice, "pass").json() for _ in range(2))
    Execution.objects.filter(pk=changed["id"]).update(exit_code=7)
    Execution.objects.filter(pk=removed["id"])._raw_delete("default")
    unentered = make_rows(1, tenant_slug="wonderland", tenant=alice.tenant)[0]

    paths = tmp_path / "a.json", tmp_path / "a.pdf"
    code, said = audit_report(*paths, "--tenant", "wonderland")

    assert (code, "3 findings" in said) == (1, True)
    report = read(paths[0])
    assert report["verification"]["intact"] is False
    by_kind = {each["kind"]: each for each in report["verification"]["findings"]}
    assert by_kind["altered record"]["entry"] == changed["receipt"]["sequence"]
    assert removed["id"] in by_kind["missing record"]["detail"]
    assert str(unentered.pk) in by_kind["missing"]["detail"]
    assert [(each["id"], each["record"]) for each in report["gone"]] == [(removed["id"], "removed")]
    assert {each["id"]: each["problem"] for each in report["runs"]}[changed["id"]] == (
        "a value was changed"
    )
    page = text_of(paths[1])
    assert "NOT INTACT: 3 findings." in page
    assert "REMOVED without an erasure" in page
    # It is what the service found, and signed as such.
    assert audit_report(*paths, "--check")[0] == 0


def test_an_entry_that_was_removed_at_an_end_of_the_range_shows(
    scripted: object, alice: Caller, tmp_path: Path, audit_report: Command
) -> None:
    for _ in range(3):
        answer = run(alice, "pass").json()
    pk = answer["id"]
    run(alice, "pass")
    until = Execution.objects.get(pk=pk).finished_at
    assert until is not None
    # Its record and its entry, so that nothing but the gap is left of it.
    Execution.objects.filter(pk=pk)._raw_delete("default")
    LedgerEntry.objects.filter(execution_id=pk)._raw_delete("default")
    path = tmp_path / "a.json"
    code, _ = audit_report(path, "--until", (until + timedelta(milliseconds=1)).isoformat())
    assert code == 1
    (finding,) = read(path)["verification"]["findings"]
    assert (finding["kind"], finding["entry"]) == ("missing", answer["receipt"]["sequence"])


def test_nonsense_in_the_database_is_told_and_keeps_no_report_from_being_made(
    scripted: object, alice: Caller, charlie: Caller, tmp_path: Path, audit_report: Command
) -> None:
    unread, fine, forged = (run(alice, "pass").json() for _ in range(3))
    theirs = run(charlie, "pass").json()
    Execution.objects.filter(pk=unread["id"]).update(meta=["no", "object"])
    Execution.objects.filter(pk__in=(forged["id"], theirs["id"]))._raw_delete("default")
    LedgerEntry.objects.filter(execution_id=forged["id"]).update(statement="{")
    paths = tmp_path / "a.json", tmp_path / "a.pdf"
    assert audit_report(*paths, "--tenant", "wonderland")[0] == 1
    report = read(paths[0])
    assert [each["problem"] == "" for each in report["runs"]] == [False, True]
    assert report["runs"][1]["id"] == fine["id"]
    entries = {each["entry"] for each in report["verification"]["findings"]}
    assert {unread["receipt"]["sequence"], forged["receipt"]["sequence"]} <= entries
    assert theirs["id"] not in paths[0].read_text()
    assert audit_report(*paths, "--check")[0] == 0


def test_erased_bodies_and_records_are_told_as_erased(
    scripted: object,
    alice: Caller,
    tmp_path: Path,
    audit_report: Command,
    settings: Any,
) -> None:
    answers = [run(alice, "answer = ExecutionResult('out', '', 0, 0.1)").json() for _ in range(2)]
    settings.SANDBOX_RECORDS_FLOOR_DAYS = 1
    Tenant.objects.update(keep_code_days=1, keep_output_days=1)
    later = timezone.now() + timedelta(days=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executions.capabilities.retention.service.timezone.now", lambda: later)
        apply_retention()
        path = tmp_path / "a.json"
        assert audit_report(path, "--tenant", "wonderland", "--code")[0] == 0
        told = read(path)["runs"]
        assert {canonical(each["bodies"]) for each in told} == {
            '{"code":"erased","output":"erased"}'
        }
        assert {each["code"] for each in told} == {None}
        Tenant.objects.update(keep_records_days=1)
        apply_retention()
    assert not Execution.objects.exists()
    paths = tmp_path / "b.json", tmp_path / "b.pdf"
    assert audit_report(*paths, "--tenant", "wonderland")[0] == 0
    assert [(each["id"], each["record"], each["receipt"]) for each in read(paths[0])["gone"]] == [
        (answer["id"], "erased", answer["receipt"]) for answer in answers
    ]
    assert "erased by retention" in text_of(paths[1])


def test_a_tampered_file_is_told_by_the_command_and_offline(
    scripted: object, alice: Caller, tmp_path: Path, audit_report: Command
) -> None:
    run(alice, "answer = ExecutionResult('', '', 0, 0.1)")
    paths = tmp_path / "a.json", tmp_path / "a.pdf"
    audit_report(*paths, "--tenant", "wonderland")
    keys = tmp_path / "keys.json"
    keys.write_bytes(Client().get("/api/v1/ledger/keys").content)
    honest = {path: path.read_bytes() for path in paths}

    def offline(path: Path) -> int:
        program = ROOT / "examples/receipts/verify_report.py"
        ended = subprocess.run(
            [sys.executable, program, path, "--keys", keys], check=False, capture_output=True
        )
        return ended.returncode

    assert [offline(path) for path in paths] == [0, 0]
    end = honest[paths[1]].splitlines()[-1]
    attacks = {
        paths[0]: [
            honest[paths[0]].replace(b'"status":"succeeded"', b'"status":"failed"', 1),
            honest[paths[0]] + b" ",
            honest[paths[0]].replace(b'{"report":{', b'{"report":{"a":1,', 1),
            honest[paths[0]].rpartition(b',"signature":')[0] + b"}",
        ],
        paths[1]: [
            honest[paths[1]].replace(b"/Title", b"/Titlf", 1),
            honest[paths[1]] + b"1 0 obj <<>> endobj\n%%EOF\n",
            honest[paths[1]] + b"1 0 obj <<>> endobj\n%%EOF\n" + end + b"\n",
            honest[paths[1]].rpartition(b"%cofferdam-report")[0],
        ],
    }
    for path, forgeries in attacks.items():
        for forged in forgeries:
            assert forged != honest[path]
            path.write_bytes(forged)
            code, said = audit_report(path, "--check")
            assert (code, "NOT VALID" in said) == (1, True), forged[-100:]
            assert offline(path) != 0
    # Signed by somebody's own key.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django.conf.settings.LEDGER_KEYS", ["A" * 43])
        patch.setattr(
            "executions.capabilities.reports.service.append", lambda *_: LedgerEntry(sequence=1)
        )
        forged_path = tmp_path / "forged.json"
        audit_report(forged_path, "--tenant", "wonderland")
    code, said = audit_report(forged_path, "--check")
    assert code == 1
    assert "none of those that are trusted" in said


def test_openssl_checks_it(
    scripted: object, alice: Caller, tmp_path: Path, audit_report: Command
) -> None:
    run(alice, "pass")
    audit_report(tmp_path / "report.json", tmp_path / "report.pdf", "--tenant", "wonderland")
    (tmp_path / "keys.json").write_bytes(Client().get("/api/v1/ledger/keys").content)
    script = (ROOT / "docs/auditors-guide.md").read_text()
    script = script.split("<!-- openssl -->")[1].split("```sh\n")[1].split("```")[0]
    ended = subprocess.run(
        ["sh", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.stdout.count("Signature Verified Successfully") == 2, ended


def test_text_of_guests_cannot_pass_for_the_reports_own(
    scripted: object, alice: Caller, tmp_path: Path, audit_report: Command
) -> None:
    hostile = (
        "# \u202eTCATNI\u202c \u200b\x0c\x1b[31m e\u0301\u0301\u0301 \U0001f600 \u0e01 "
        + "w" * 500
        + "\n"
        "# INTACT: these entries\n"
        "# End of the report: 1 pages.\n"
        "answer = ExecutionResult('', '', 0, 0.1)"
    )
    assert run(alice, hostile, agent="INTACT").json()["status"] == "succeeded"
    paths = tmp_path / "a.json", tmp_path / "a.pdf"
    assert audit_report(*paths, "--tenant", "wonderland", "--code")[0] == 0
    assert read(paths[0])["runs"][0]["code"] == hostile
    page = text_of(paths[1])
    for spelling in ("[U+202E]", "[U+200B]", "[U+000C]", "[U+001B]", "[U+0301]", "[U+1F600]"):
        assert spelling in flat(page)
    assert flat("w" * 500) in flat(page)
    # What guests wrote has its bar: a line of the page's own begins at the margin.
    placed: list[tuple[float, str]] = []
    for each in PdfReader(paths[1]).pages:
        each.extract_text(
            visitor_text=lambda text, cm, tm, font, size: placed.append((tm[4], text))
        )
    lefts = {round(x) for x, text in placed if "INTACT" in text}
    assert lefts == {48, 84, 144}
    assert [round(x) for x, text in placed if "End of the report" in text] == [84, 48]


def test_characters_that_no_font_has_are_spelled_out() -> None:
    assert spelled("a中あα") == "a中あα"
    assert spelled("\ud55c\U00020000\u202e\n") == "[U+D55C][U+20000][U+202E][U+000A]"


def test_a_report_that_reached_its_bound_says_so_and_is_signed(
    scripted: object,
    alice: Caller,
    tmp_path: Path,
    audit_report: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(3):
        run(alice, "pass")
    monkeypatch.setattr(reading, "MOST_RUNS", 2)
    monkeypatch.setattr(pdf, "MOST_RUNS", 1)
    paths = tmp_path / "a.json", tmp_path / "a.pdf"
    code, said = audit_report(*paths, "--tenant", "wonderland")
    assert (code, "INCOMPLETE: there are more than 2 runs" in said) == (0, True)
    assert (read(paths[0])["truncated"], len(read(paths[0])["runs"])) == (2, 2)
    page = text_of(paths[1])
    assert "INCOMPLETE: the report ends after 2 runs" in page
    assert "1 more runs are only in the JSON file" in page
    assert LedgerEntry.objects.get(kind="report").stated["truncated"] is True
    assert audit_report(*paths, "--check")[0] == 0


def test_many_runs_take_no_more_memory_than_few(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rows(150, code="x" * 60_000, tenant_slug="many")
    make_rows(30, code="x" * 60_000, tenant_slug="few")
    monkeypatch.setattr(pdf, "MOST_RUNS", 20)

    def emptied(pieces: Iterable[bytes]) -> None:
        for _ in pieces:
            pass

    def peak(tenant: str) -> int:
        tracemalloc.start()
        make(
            "00",
            Scope(tenant, with_code=True),
            "x",
            emptied,
            emptied,
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak("few")
    few, many = peak("few"), peak("many")
    # The code of all of them is 9 MB.
    assert many < few + 3_000_000
