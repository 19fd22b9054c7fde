"""What a cell puts out, line by line, as the clients of E2B's code interpreter read it."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from executions.api.e2b.process_stream import KeptAlive
from executions.api.streams import NDJSON
from executions.runs.event_log import Entry
from executions.runs.listing import exception_of, omission_lines
from executions.runs.models import Execution
from providers.guest.notebook import is_quiet, plain

_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "text/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
    # What our own interpreter makes of figures, data frames, lists and dicts
    # (providers/guest/display.py).
    "application/vnd.cofferdam.columns+json": "data",
    "application/vnd.cofferdam.chart+json": "chart",
    "application/vnd.cofferdam.listed+json": "json",
}
# How a traceback begins, also that of a group of exceptions, and of a cell that is no Python.
_TRACEBACK = re.compile(
    rb"(?:  \+ Exception Group )?Traceback \(most recent call last\):\n"
    rb"|^  File \"<cell \d+>\", line \d+\n",
    re.MULTILINE,
)
# Beyond that nobody looks whether the last line is an expression; the last value is taken for it.
_MOST_LOOKED_AT = 16 * 1024
# Lines of notebooks, each of which costs a look at the whole cell.
_MOST_REWRITTEN = 20


class CellEvents(KeptAlive):
    """The last value that is shown is held back until it is known whether it is the cell's own, and
    so is a traceback, which is told as the error where it is what ended the cell."""

    keepalive = b'{"type":"keepalive"}\n'
    content_type = NDJSON
    keepalive_seconds = 5.0

    def __init__(self, count: int, code: str, language: str, **options: Any) -> None:
        super().__init__(
            _line({"type": "number_of_executions", "execution_count": count}), **options
        )
        self._has_value = language != "python" or may_have_value(code)
        self._value: Mapping[str, Any] | None = None
        self._trace = b""

    def line(self, entry: Entry) -> bytes:
        if entry.type == "stdout":
            return _text("stdout", entry.data)
        if entry.type == "stderr":
            return self._errors(entry.data)
        if entry.type == "output":
            return self._output((entry.said or {}).get("data") or {})
        return b""

    def ending(self, said: Mapping[str, Any]) -> bytes:
        told = b"" if self._value is None else _result(self._value, is_main=True)
        if (error := said.get("error")) is not None:
            told += _text("stderr", self._trace)
            error = {"name": error["code"], "value": error["message"], "traceback": ""}
            told += _line({"type": "error", **error})
        elif (execution := said.get("execution")) is None or (
            execution.status == Execution.Status.SUCCEEDED
        ):
            told += _text("stderr", self._trace)
        else:
            error = error_of(execution)
            trace = self._trace.decode("utf-8", "replace")
            # What ended the cell is told as its error, and once.
            told += _text("stderr", trace.removesuffix(error["traceback"]).encode())
            told += _line({"type": "error", **error})
        if (execution := said.get("execution")) is not None:
            left_out = "".join(f"[{line}]\n" for line in omission_lines(execution))
            told += _text("stderr", left_out.encode())
        return told + _line({"type": "end_of_execution"})

    def _errors(self, data: bytes) -> bytes:
        if self._trace:
            self._trace += data
            return b""
        found = _TRACEBACK.search(data)
        start = len(data) if found is None else found.start()
        self._trace = data[start:]
        return _text("stderr", data[:start])

    def _output(self, bundle: Mapping[str, Any]) -> bytes:
        if not self._has_value:
            return _result(bundle, is_main=False)
        former, self._value = self._value, bundle
        return b"" if former is None else _result(former, is_main=False)


def may_have_value(code: str) -> bool:
    """Whether Python code ends with an expression that shows its value."""
    if len(code) > _MOST_LOOKED_AT:
        return True
    try:
        text = plain(code, _MOST_REWRITTEN)
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not body or not isinstance(last := body[-1], ast.Expr):
        return False
    if is_quiet(text, last.end_lineno or 1, last.end_col_offset or 0):
        return False
    if not isinstance(call := last.value, ast.Call):
        return True
    # These show something themselves, and have no value.
    name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
    return name not in ("print", "display", "show", "system", "run_cell_magic")


def error_of(execution: Execution) -> dict[str, str]:
    """Why a cell did not succeed: the verdict, or what the program says of its end."""
    if execution.error_code or execution.exit_code is None:
        name = execution.error_code or str(execution.status)
        said = execution.error_message or f"The code was ended: {execution.status}."
        return {"name": name, "value": said, "traceback": ""}
    if (told := exception_of(execution)) is None:
        said = f"exit status {execution.exit_code}"
        return {"name": "Error", "value": said, "traceback": execution.stderr}
    # Code without exceptions says what went wrong on standard error alone.
    traceback = told["traceback"] or execution.stderr
    return {"name": told["type"], "value": told["message"], "traceback": traceback}


def _result(bundle: Mapping[str, Any], *, is_main: bool) -> bytes:
    told: dict[str, Any] = {"type": "result", "is_main_result": is_main}
    extra = {}
    for mime, data in bundle.items():
        if name := _FIELDS.get(mime):
            told[name] = _without_quotes(data) if name == "text" else data
        else:
            extra[mime] = data
    return _line({**told, "extra": extra} if extra else told)


def _without_quotes(text: str) -> str:
    """A text as E2B's server tells it: the repr() without its quotes, and nothing else undone."""
    quote = text[:1]
    is_quoted = len(text) > 1 and quote in ("'", '"') and text.endswith(quote)
    return text[1:-1] if is_quoted else text


def _text(stream: str, data: bytes) -> bytes:
    if not data:
        return b""
    text = data.decode("utf-8", "replace")
    return _line({"type": stream, "text": text, "timestamp": time.time_ns()})


def _line(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
