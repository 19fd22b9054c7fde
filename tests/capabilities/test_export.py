"""Exports: everything asked for, in little memory, and nothing a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import re
import tracemalloc
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from executions.capabilities.search import export as service
from executions.capabilities.search.export import BODIES, FACTS, export
from executions.kernel.text import first_uuid7
from executions.ledger.models import LedgerEntry
from executions.management.commands.export_executions import id_bounds
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.execution_rows import make_rows
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]

URL = "/admin/executions/execution/export/"
DANGEROUS = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "\uff1d1",
    "=cmd|' /C calc'!A0",
)


def exported(file_format: str, **options: Any) -> bytes:
    return b"".join(export(Execution.objects.all(), file_format, **options))


def read_csv(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def sheets(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("xl/worksheets/"))
        return [archive.read(name).decode() for name in names]


@pytest.fixture
def auditor(db: None) -> Client:
    """Staff who may look at executions and take them away."""
    user = get_user_model().objects.create_user("auditor", password="x", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=("view_execution", "export_execution"))
    )
    client = Client()
    client.force_login(user)
    return client


def test_every_format_tells_the_same(scripted: object, alice: Caller) -> None:
    code = "answer = ExecutionResult('out, \"quoted\"\\nü', 'err', 3, 0.0)"
    first = run(alice, code, arguments={"a": 1}).json()
    run(alice, "pass")

    rows = read_csv(exported("csv", bodies=True))
    lines = [json.loads(line) for line in exported("jsonl", bodies=True).splitlines()]
    (sheet,) = sheets(exported("xlsx", bodies=True))

    assert list(rows[0]) == list(lines[0]) == [*FACTS, *BODIES]
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    assert rows[0]["id"] == first["id"]
    assert (rows[0]["stdout"], lines[0]["stdout"]) == ('out, "quoted"\nü',) * 2
    assert (rows[0]["exit_code"], lines[0]["exit_code"]) == ("3", 3)
    assert (rows[1]["error_code"], lines[1]["finished_at"][-6:]) == ("", "+00:00")
    assert lines[0]["ledger_sequence"] == first["receipt"]["sequence"]
    assert first["id"] in sheet
    assert sheet.count("<row ") == 3


def test_bodies_are_left_out_unless_asked_for(scripted: object, alice: Caller) -> None:
    run(alice, "answer = ExecutionResult('the output', '', 0, 0.0)")
    for file_format in ("csv", "jsonl"):
        assert b"the output" not in exported(file_format)
        assert b"ExecutionResult" not in exported(file_format)


@pytest.mark.parametrize("text", DANGEROUS)
def test_no_spreadsheet_finds_a_formula(text: str) -> None:
    make_rows(1, stdout=text, subject=text[:200], exit_code=-1)

    (row,) = read_csv(exported("csv", bodies=True))
    assert row["stdout"] == f"'{text}"
    assert row["subject"] == f"'{text}"
    assert row["exit_code"] == "-1"
    (sheet,) = sheets(exported("xlsx", bodies=True))
    assert "<f>" not in sheet
    (line,) = exported("jsonl", bodies=True).splitlines()
    assert json.loads(line)["stdout"] == text


def test_a_row_is_one_line_to_every_reader_of_lines() -> None:
    text = "a\u2028b\u2029c\x85d"
    make_rows(1, stdout=text)
    (line,) = exported("jsonl", bodies=True).decode().splitlines()
    assert json.loads(line)["stdout"] == text


def test_no_text_leaves_its_cell() -> None:
    """Where the list separator is a semicolon, an unquoted one would start another cell."""
    make_rows(1, stdout='a;=1+1,=1+1\n=1+1"', subject=";=1+1")
    content = exported("csv", bodies=True).decode()
    assert '";=1+1"' in content
    assert read_csv(content.encode())[0]["stdout"] == 'a;=1+1,=1+1\n=1+1"'


def test_a_sheet_that_is_full_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_SHEET_ROWS", 4)
    make_rows(7)
    assert [sheet.count("<row ") for sheet in sheets(exported("xlsx"))] == [4, 4, 2]


def test_a_text_too_long_for_a_cell_is_cut_and_says_so() -> None:
    make_rows(1, stdout="x" * 40_000)
    (sheet,) = sheets(exported("xlsx", bodies=True))
    assert "x [cut]<" in sheet
    assert len(read_csv(exported("csv", bodies=True))[0]["stdout"]) == 40_000


@pytest.mark.parametrize("file_format", ["csv", "jsonl", "xlsx"])
def test_nothing_to_export_is_a_file_all_the_same(file_format: str) -> None:
    assert exported(file_format) or file_format == "jsonl"


@pytest.mark.parametrize("file_format", ["csv", "jsonl", "xlsx"])
def test_many_rows_take_no_more_memory_than_few(
    file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ROWS", 100)

    def peak() -> int:
        tracemalloc.start()
        for _ in export(Execution.objects.all(), file_format):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    make_rows(300)
    few = peak()
    make_rows(1500)
    assert peak() < few * 1.3 + 100_000


def test_a_file_is_begun_before_the_last_row_is_read(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(service, "_ROWS", 500)
    make_rows(2000)
    pieces: Iterator[bytes] = export(Execution.objects.all(), "csv")
    with django_assert_num_queries(1):
        assert len(next(pieces)) > 65_000


def test_the_admin_exports_what_the_list_shows(auditor: Client) -> None:
    make_rows(2)
    wanted = make_rows(2, status="failed", tenant_slug="other")

    page = auditor.get("/admin/executions/execution/", {"status__exact": "failed"}).content.decode()
    link = re.search(r'href="(/admin/executions/execution/export/\?[^"]*format=csv)"', page)
    assert link is not None
    answer = auditor.get(link[1].replace("&amp;", "&"))

    assert answer.status_code == 200
    assert answer["Content-Disposition"].startswith('attachment; filename="executions-')
    assert "no-store" in answer["Cache-Control"]
    rows = read_csv(answer.getvalue())
    assert [row["id"] for row in rows] == [str(row.pk) for row in wanted]


def test_an_export_is_entered_in_the_ledger(auditor: Client) -> None:
    make_rows(1)
    auditor.get(URL, {"format": "jsonl", "bodies": "1", "status__exact": "failed"}).getvalue()
    said = LedgerEntry.objects.get(kind="export").stated
    assert (said["actor"], said["format"], said["bodies"]) == ("user:auditor", "jsonl", True)
    assert said["filters"] == {"status__exact": "failed"}


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"format": "exe"},
        {"format": "csv", "tenant__name": "x"},
        {"format": "csv", "created_at__gte": "x"},
    ],
)
def test_what_cannot_be_exported_is_refused(auditor: Client, query: dict[str, str]) -> None:
    assert auditor.get(URL, query).status_code == 400


def test_only_who_may_export_exports(db: None) -> None:
    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_execution"))
    viewer = Client()
    viewer.force_login(user)

    assert viewer.get(URL, {"format": "csv"}).status_code == 403
    assert "export/" not in viewer.get("/admin/executions/execution/").content.decode()
    assert Client().get(URL, {"format": "csv"}).status_code == 302
    assert not LedgerEntry.objects.filter(kind="export").exists()


def test_the_command_writes_a_file_for_its_owner_only(tmp_path: Path) -> None:
    make_rows(2)
    wanted = make_rows(1, tenant_slug="other", status="failed", language="bash", provider="e2b")
    target = tmp_path / "executions.jsonl"

    call_command(
        "export_executions",
        str(target),
        *("--format", "jsonl", "--tenant", "other", "--status", "failed"),
        *("--language", "bash", "--provider", "e2b", "--since", "2020-01-01"),
        *("--until", "2100-01-01T00:00:00+02:00", "--bodies"),
    )

    (line,) = target.read_text().splitlines()
    assert json.loads(line)["id"] == str(wanted[0].pk)
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="exists"):
        call_command("export_executions", str(target))
    with pytest.raises(CommandError):
        call_command("export_executions", str(target), "--since", "yesterday")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--since", "2026-03-02"), [2, 3]),
        (("--until", "2026-03-02"), [1]),
        (("--since", "2026-03-02", "--until", "2026-03-03"), [2]),
        (("--since", "0001-01-01", "--until", "9999-12-31T23:59:59"), [1, 2, 3]),
        (("--until", "0001-01-02"), []),
    ],
)
def test_the_command_exports_a_range_of_times(
    tmp_path: Path, options: tuple[str, ...], wanted: list[int]
) -> None:
    # The second begins exactly at a bound.
    for day in (1, 2, 3):
        at = datetime(2026, 3, day, tzinfo=UTC)
        make_rows(1, id=first_uuid7(at), created_at=at)
    target = tmp_path / "executions.jsonl"
    call_command("export_executions", str(target), "--format", "jsonl", *options)
    ids = [first_uuid7(datetime(2026, 3, day, tzinfo=UTC)) for day in wanted]
    found = [json.loads(line)["id"] for line in target.read_text().splitlines()]
    assert found == [str(each) for each in ids]


@pytest.mark.only_on("sqlite")
def test_a_range_of_times_is_found_by_the_ids() -> None:
    bounds = id_bounds(timezone.now(), timezone.now())
    plan = Execution.objects.filter(*bounds).order_by("pk").explain()
    assert "autoindex_executions_execution_1 (id>? AND id<?)" in plan


def test_the_command_writes_to_standard_output(capfdbinary: Any) -> None:
    make_rows(2)
    call_command("export_executions", "-", stdout=StringIO())
    assert len(read_csv(capfdbinary.readouterr().out)) == 2
