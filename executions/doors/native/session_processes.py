"""The commands of a session over the native API: parse, call a service, render."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from executions.doors.native import schema
from executions.doors.native.deferred import NDJSON, SSE, answer, wanted_form
from executions.doors.native.executions import (
    EVENTS,
    STREAM,
    after_of,
    follow_stream,
    is_detached,
    outcome_response,
    run_stream,
)
from executions.doors.native.frame import CLAIMS, answered_later, known_to_run, read_run
from executions.doors.native.rendering import json_response
from executions.doors.native.sessions import SESSION_ID, TAGS, SessionApiView
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import refuse
from executions.kernel.shapes import PageShape
from executions.runs.routing import COMMANDS, require_language
from executions.sessions import commands
from executions.sessions.models import Session
from executions.sessions.requests import RESIZE, SIGNAL, START, STDIN, CommandRequest
from executions.sessions.shapes import ProcessShape, SignalledShape

PID = OpenApiParameter("pid", int, OpenApiParameter.PATH)
MOST_STDIN_BYTES = 1024 * 1024
_OF_SANDBOX = (401, 404, 409, 502)


class ProcessesView(SessionApiView):
    bounds = LARGE

    @extend_schema(
        operation_id="start_process",
        summary="Run a command in a session",
        description="200 with the execution when the command has ended; with `background`, 201 at "
        "once. Without `background`, the answer can be a stream of events, as for single "
        "executions.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(STREAM, CLAIMS)],
        request=START,
        responses={
            **schema.STREAMED_EXECUTION,
            201: ProcessShape,
            **schema.errors(*_OF_SANDBOX, 413, 415),
        },
    )
    def post(self, request: Request, session_id: UUID) -> HttpResponseBase:
        session = self.session(session_id)
        wanted = read_run(START, request)
        form = wanted_form(request.headers.get("Accept", ""))
        if form and not wanted.background:
            return run_stream(
                self,
                request,
                form,
                lambda log: commands.commanding(session, wanted, self.caller(), log),
            )
        return answer(request, self.told(self._start(request, session, wanted)))

    def _start(
        self, request: Request, session: Session, wanted: CommandRequest
    ) -> Coroutine[HttpResponse]:
        if wanted.background:
            started = yield from commands.starting(session, wanted, self.caller())
            detail = commands.process_detail(started.pid or 0, started.pk, started.exit_code)
            return json_response(detail, 201)
        is_detached(request)
        outcome = yield from commands.commanding(session, wanted, self.caller())
        with known_to_run(outcome):
            return outcome_response(outcome, request)

    @extend_schema(
        operation_id="list_processes",
        summary="List the commands of a session",
        description="Running commands, and commands that ended recently.",
        tags=TAGS,
        parameters=[SESSION_ID],
        responses={200: PageShape[ProcessShape], **schema.errors(*_OF_SANDBOX)},
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        found = yield from commands.listing(self.session(session_id))
        return json_response(PageShape(results=found, next=None))


class _ProcessView(SessionApiView):
    def of_process(self, session_id: UUID, pid: int) -> Session:
        """The session of this process. Raises Http404 where it has none of this number."""
        session = self.session(session_id)
        if not commands.is_there(session, pid):
            raise Http404
        return session


class ProcessStdinView(_ProcessView):
    @extend_schema(
        operation_id="write_to_process",
        summary="Send bytes to a command's input",
        description="At most 1 MiB. With `close=1`, the input is closed after these bytes.",
        tags=TAGS,
        parameters=[SESSION_ID, PID, *schema.parameters(STDIN)],
        request={"application/octet-stream": OpenApiTypes.BINARY},
        responses={204: None, **schema.errors(*_OF_SANDBOX, 413)},
    )
    @answered_later
    def post(self, request: Request, session_id: UUID, pid: int) -> Coroutine[HttpResponse]:
        close = self.of(request, STDIN).close
        body = request.stream
        data = b"" if body is None else body.read(MOST_STDIN_BYTES + 1)
        if len(data) > MOST_STDIN_BYTES:
            refuse("body", f"Must be at most {MOST_STDIN_BYTES} bytes.")
        session = self.of_process(session_id, pid)
        # Whoever types into a shell runs commands.
        require_language(self.api_key, *COMMANDS)
        yield from commands.writing(session, pid, data, close=close)
        return HttpResponse(status=204)


class ProcessSignalView(_ProcessView):
    @extend_schema(
        operation_id="signal_process",
        summary="Send a signal to a command and its group",
        tags=TAGS,
        parameters=[SESSION_ID, PID],
        request=SIGNAL,
        responses={
            200: SignalledShape,
            **schema.errors(*_OF_SANDBOX, 413, 415),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID, pid: int) -> Coroutine[HttpResponse]:
        session = self.of_process(session_id, pid)
        sent = yield from commands.signalling(session, pid, SIGNAL.read(request.data).signal)
        return json_response(SignalledShape(signalled=sent))


class ProcessResizeView(_ProcessView):
    @extend_schema(
        operation_id="resize_process",
        summary="Resize the terminal of a command",
        tags=TAGS,
        parameters=[SESSION_ID, PID],
        request=RESIZE,
        responses={204: None, **schema.errors(*_OF_SANDBOX, 413, 415)},
    )
    @answered_later
    def post(self, request: Request, session_id: UUID, pid: int) -> Coroutine[HttpResponse]:
        session = self.of_process(session_id, pid)
        yield from commands.resizing(session, pid, RESIZE.read(request.data).pair)
        return HttpResponse(status=204)


class ProcessEventsView(SessionApiView):
    @extend_schema(
        operation_id="follow_process",
        summary="Follow a command in the background",
        description="Sends the events of its execution, from the first one or after `after`. A "
        "command without `background` is followed by the id of its execution, until it has ended.",
        tags=TAGS,
        parameters=[
            SESSION_ID,
            PID,
            *schema.parameters(EVENTS),
        ],
        responses={
            (200, SSE): OpenApiTypes.STR,
            (200, NDJSON): OpenApiTypes.STR,
            **schema.errors(400, 401, 404, 409),
        },
    )
    def get(self, request: Request, session_id: UUID, pid: int) -> HttpResponseBase:
        after = after_of(request)
        execution_id = commands.execution_of(self.session(session_id), pid)
        if execution_id is None:
            raise Http404
        return follow_stream(self, request, execution_id, after)
