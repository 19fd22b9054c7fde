"""Executions as a file for a spreadsheet or a script: any number of them, in little memory."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import OuterRef, QuerySet, Subquery

from executions.kernel.text import to_json
from executions.ledger.entry import moment
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers.slices import escape_line_ends

FACTS = (
    "id",
    "created_at",
    "run_at",
    "finished_at",
    "tenant_slug",
    "api_key_name",
    "api_key_prefix",
    "subject",
    "agent",
    "model",
    "conversation",
    "on_behalf_of",
    "traceparent",
    "request_id",
    "client_address",
    "language",
    "entrypoint",
    "mode",
    "priority",
    "status",
    "provider",
    "config_version",
    "runtime",
    "isolation",
    "sharing",
    "exit_code",
    "error_code",
    "error_message",
    "observed",
    "timeout",
    "received_ms",
    "queue_ms",
    "start_ms",
    "run_ms",
    "closed_ms",
    "total_ms",
    "artifact_count",
    "code_hash",
    "ledger_sequence",
)
BODIES = ("code", "arguments", "result", "outputs", "exception", "stdout", "stderr")

# Rows per query. With bodies, one row may be half a megabyte.
_ROWS = 2000
_ROWS_WITH_BODIES = 50

# What a spreadsheet takes for the start of a formula, or skips before looking for one.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# Excel's limits.
_SHEET_ROWS = 1_048_576
_CELL_CHARACTERS = 32_767
_CUT = " [cut]"

Row = tuple[Any, ...]


def export(
    executions: QuerySet[Execution], file_format: str, *, bodies: bool = False
) -> Iterator[bytes]:
    """The file, piece by piece: `csv`, `jsonl` or `xlsx`, oldest execution first.

    A CSV is read by spreadsheets that run what looks like a formula, so such text gets an
    apostrophe before it. In XLSX text is marked as text, and JSON Lines are exact.
    """
    columns = FACTS + BODIES if bodies else FACTS
    return FORMATS[file_format](columns, _rows(executions, columns, bodies))


def _rows(executions: QuerySet[Execution], columns: Iterable[str], bodies: bool) -> Iterator[Row]:
    """The rows in the order of their ids. Every chunk is a query of its own, so that a slow
    reader holds neither a transaction open nor a result in memory."""
    entry = LedgerEntry.objects.filter(execution_id=OuterRef("pk")).values("sequence")
    rows = (
        executions.defer(None)
        .order_by("pk")
        .annotate(ledger_sequence=Subquery(entry))
        .values_list(*columns)
    )
    size = _ROWS_WITH_BODIES if bodies else _ROWS
    chunk = list(rows[:size])
    while chunk:
        yield from chunk
        chunk = list(rows.filter(pk__gt=chunk[-1][0])[:size])


def _csv(columns: tuple[str, ...], rows: Iterator[Row]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC)

    def written() -> bytes:
        piece = text.getvalue().encode()
        text.seek(0)
        text.truncate()
        return piece

    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if value is None else _harmless(_value(value)) for value in row])
        if text.tell() > 65_536:
            yield written()
    yield written()


def _harmless(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


def _jsonl(columns: tuple[str, ...], rows: Iterator[Row]) -> Iterator[bytes]:
    pieces: list[str] = []
    size = 0
    for row in rows:
        line = escape_line_ends(to_json(dict(zip(columns, map(_value, row), strict=True)))) + "\n"
        pieces.append(line)
        size += len(line)
        if size > 65_536:
            yield "".join(pieces).encode()
            pieces.clear()
            size = 0
    yield "".join(pieces).encode()


def _xlsx(columns: tuple[str, ...], rows: Iterator[Row]) -> Iterator[bytes]:
    """A workbook is a ZIP file whose parts come last first, so it is written to disk before."""
    # A twentieth of what a process needs to start, and one in thousands writes a workbook.
    import xlsxwriter

    with tempfile.TemporaryDirectory(prefix="cofferdam-export-") as folder:
        path = os.path.join(folder, "export.xlsx")
        options = {"constant_memory": True, "tmpdir": folder, "nan_inf_to_errors": True}
        with xlsxwriter.Workbook(path, options) as workbook:
            yield from _write_sheets(workbook, columns, rows)
        with open(path, "rb") as file:
            while piece := file.read(65_536):
                yield piece


def _write_sheets(workbook: Any, columns: tuple[str, ...], rows: Iterator[Row]) -> Iterator[bytes]:
    """Empty pieces now and then, between which a server's thread can do something else."""
    sheet: Any = None
    line = _SHEET_ROWS
    for row in rows:
        if line == _SHEET_ROWS:
            sheet, line = _new_sheet(workbook, columns), 1
        for column, value in enumerate(map(_value, row)):
            if value is None:
                continue
            if isinstance(value, (int, float)):
                sheet.write_number(line, column, value)
            else:
                # Never `write`, which makes a formula of what looks like one.
                sheet.write_string(line, column, _cut(value))
        line += 1
        if line % _ROWS_WITH_BODIES == 0:
            yield b""
    if sheet is None:
        _new_sheet(workbook, columns)


def _new_sheet(workbook: Any, columns: tuple[str, ...]) -> Any:
    sheet = workbook.add_worksheet()
    sheet.freeze_panes(1, 1)
    for column, name in enumerate(columns):
        sheet.write_string(0, column, name)
    return sheet


def _cut(text: str) -> str:
    if len(text) <= _CELL_CHARACTERS:
        return text
    return text[: _CELL_CHARACTERS - len(_CUT)] + _CUT


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return moment(value)
    return str(value) if isinstance(value, UUID) else value


FORMATS: dict[str, Callable[[tuple[str, ...], Iterator[Row]], Iterator[bytes]]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "xlsx": _xlsx,
}
MIME_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/jsonl; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}
