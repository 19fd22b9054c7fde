"""The code interpreter of the E2B API: contexts and cells."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.doors.e2b.connect import (
    Refused,
    display_path,
    error_body,
    invalid,
    object_in,
    text_error,
    to_folder,
)
from executions.doors.e2b.frame import SandboxView
from executions.doors.e2b.processes import KeptAlive
from executions.doors.native.deferred import NDJSON, stream
from executions.doors.native.frame import deferred
from executions.doors.native.rendering import json_response
from executions.kernel.text import is_storable
from executions.runs.active_runs import LEFT_STREAM, ClientRun
from executions.runs.advice import advice_text
from executions.runs.event_log import EventLog, RunEvent
from executions.runs.models import Execution
from executions.runs.requests import Conflict, ExecutionRequest, run_limits
from executions.runs.results import exception_of, executions_of, omission_lines
from executions.runs.routing import allowed_languages, ensure_language, supported_languages
from executions.runs.service import execute
from executions.sessions import control
from executions.sessions.models import Session
from executions.sessions.queries import has_ended
from executions.sessions.requests import ContextRequest
from executions.sessions.session_sandbox import lender_of
from providers.errors import InvalidConfiguration, SandboxError
from providers.languages import normalize_language
from providers.runtime.guest.notebook import is_quiet, plain
from providers.sandbox import DEFAULT_CONTEXT

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
    # (providers/runtime/guest/display.py).
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

    def line(self, entry: RunEvent) -> bytes:
        if entry.type == "stdout":
            return _text("stdout", entry.data)
        if entry.type == "stderr":
            return self._errors(entry.data)
        if entry.type == "output":
            return self._output((entry.said or {}).get("data") or {})
        return b""

    def render_end(self, said: Mapping[str, Any]) -> bytes:
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
            told += _text("stderr", f"{left_out}{advice_text(execution)}".encode())
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


# What E2B's clients wait for where nothing else is said. They do not tell us.
_USUAL_SECONDS = 300
# The second context that a sandbox of E2B has from its start. Here it begins with its first cell.
_JAVASCRIPT = {"id": f"{DEFAULT_CONTEXT}-nodejs", "language": "nodejs", "cwd": ""}


class InterpreterView(SandboxView):
    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return text_error

    async def create_context(self, session: Session, language: str, cwd: str, name: str) -> Any:
        wanted = ContextRequest(language=language, cwd=cwd, id=name)
        ensure_language(self.api_key, wanted.language)
        try:
            return await control.create_context(session, wanted)
        except InvalidConfiguration as error:
            if wanted.language != "typescript" or error.field != "language":
                raise
        # Where it has no interpreter of its own, JavaScript's takes it.
        return await self.create_context(session, "nodejs", cwd, name)


class ExecuteView(InterpreterView):
    def post(self, request: Request) -> HttpResponseBase:
        session = self.session()
        body = object_in(self.content())
        code, language = body.get("code"), body.get("language")
        context = body.get("context_id")
        if context and language:
            raise invalid("Only one of context_id and language can be given.")
        if not isinstance(code, str):
            raise invalid("code: Must be a string.")
        name, language = _context_of(session, context, language)
        made = executions_of(self.api_key.tenant).filter(session=session.pk, context=name)
        log = EventLog(run_limits())

        run = ClientRun(log, LEFT_STREAM, lambda: events.begin(log))
        events = CellEvents(made.count() + 1, code, language, on_leave=run.cancel)

        async def work() -> HttpResponseBase:
            try:
                said = await self._run(session, body, name, language, log)
            except Exception as error:
                said = {"error": error_body(error)}
            if _has_no_end(said) and has_ended(session.pk):
                # As E2B's: clients then look whether it runs, and say that it was killed.
                events.break_off()
            else:
                events.end(said)
            return events

        if not code.strip():
            events.end({})
            return events
        return stream(request, work, events)

    async def _run(
        self,
        session: Session,
        body: Mapping[str, Any],
        context: str,
        language: str,
        log: EventLog,
    ) -> dict[str, Any]:
        if all(each["id"] != context for each in session.contexts):
            try:
                await self.create_context(session, language, "", context)
            except Conflict:
                # Somebody else was faster.
                session.refresh_from_db()
        request = ExecutionRequest(
            body["code"],
            session=session.pk,
            context=context,
            env=body.get("env_vars") or {},
            usual_timeout=min(_USUAL_SECONDS, settings.SANDBOX_MAX_TIMEOUT_SEC),
        )
        outcome = await execute(request, self.caller(), log=log)
        if outcome.error is not None and outcome.result is None:
            raise outcome.error
        return {"execution": outcome.execution}


class ContextsView(InterpreterView):
    def get(self, request: Request) -> HttpResponse:
        session = self.session()
        known = [*session.contexts[:1], *self._unstarted(session), *session.contexts[1:]]
        return json_response([_detail(each) for each in known])

    def _unstarted(self, session: Session) -> list[Mapping[str, Any]]:
        """JavaScript's context, where the sandbox can have it and nothing has run in it."""
        is_wanted = allowed_languages(self.api_key, [_JAVASCRIPT["language"]])
        if not is_wanted or _has(session, _JAVASCRIPT["id"]) or session.language == "nodejs":
            return []
        try:
            with lender_of(session)(wait=False) as lease:
                return [_JAVASCRIPT] if "nodejs" in supported_languages(lease) else []
        except SandboxError:
            # What it has cannot be known just now.
            return []

    @deferred
    async def post(self, request: Request) -> HttpResponse:
        session = self.session()
        content = self.content()
        body = object_in(content) if content else {}
        language = body.get("language") or session.language
        cwd = to_folder(body.get("cwd") or "")
        return json_response(_detail(await self.create_context(session, language, cwd, "")))


class ContextView(InterpreterView):
    @deferred
    async def delete(self, request: Request, context_id: str) -> HttpResponse:
        session = self.session()
        if not _has(session, context_id) and context_id == _JAVASCRIPT["id"]:
            return HttpResponse(status=204)
        if not (await control.end_context(session, context_id)):
            raise _no_context(context_id)
        return HttpResponse(status=204)


class ContextRestartView(InterpreterView):
    @deferred
    async def post(self, request: Request, context_id: str) -> HttpResponse:
        session = self.session()
        if not _has(session, context_id) and context_id == _JAVASCRIPT["id"]:
            # It is as new as it can be.
            return json_response(_detail(_JAVASCRIPT))
        if (context := (await control.restart_context(session, context_id))) is None:
            raise _no_context(context_id)
        return json_response(_detail(context))


def _context_of(session: Session, context: Any, language: Any) -> tuple[str, str]:
    """The id of the context that is meant, and what it runs. Raises Refused."""
    known = {each["id"]: each["language"] for each in (_JAVASCRIPT, *session.contexts)}
    if context:
        if not isinstance(context, str) or context not in known:
            raise _no_context(context if isinstance(context, str) else "")
        return context, known[context]
    if not language:
        return DEFAULT_CONTEXT, known.get(DEFAULT_CONTEXT, session.language)
    if not isinstance(language, str):
        raise invalid("language: Must be a string.")
    if not is_storable(language):
        # A context is looked for under its name, which no database can be asked for.
        raise invalid("language: Must hold neither NUL nor lone surrogates.")
    named = normalize_language(language.lower())
    is_usual = named == normalize_language(session.language)
    return (DEFAULT_CONTEXT if is_usual else f"default-{named}"), named


def _has_no_end(said: Mapping[str, Any]) -> bool:
    """Whether a cell has no end of its own: its sandbox may be gone."""
    execution = said.get("execution")
    return "error" in said or (execution is not None and execution.exit_code is None)


def _has(session: Session, context_id: str) -> bool:
    return any(each["id"] == context_id for each in session.contexts)


def _no_context(context_id: str) -> Refused:
    return Refused(404, "not_found", f"Context {context_id[:64]} not found")


def _detail(context: Mapping[str, Any]) -> dict[str, str]:
    named = normalize_language(context["language"])
    # So E2B's clients call what runs in Node.
    shown_as = "javascript" if named == "nodejs" else named
    return {"id": context["id"], "language": shown_as, "cwd": display_path(context["cwd"])}
