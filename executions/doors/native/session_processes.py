"""The commands of a session over the native API: parse, call a service, render."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.doors.native.deferred import answer, wanted_form
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
from executions.doors.native.schema import BYTES, EVENT_STREAM, endpoint
from executions.doors.native.sessions import SessionApiView
from executions.kernel.bodies import LARGE, PageShape
from executions.kernel.declarations import refuse
from executions.runs.routing import COMMANDS, ensure_language
from executions.runs.shapes import ExecutionShape
from executions.sessions import commands
from executions.sessions.models import Session
from executions.sessions.requests import RESIZE, SIGNAL, START, STDIN, CommandRequest
from executions.sessions.shapes import ProcessShape, SignalledShape

MOST_STDIN_BYTES = 1024 * 1024


class ProcessesView(SessionApiView):
    bounds = LARGE

    @endpoint(
        "start_process",
        parameters=(STREAM, CLAIMS),
        request=START,
        answers={200: ExecutionShape, **EVENT_STREAM, 201: ProcessShape},
        errors=(409, 502),
    )
    def post(self, request: Request, session_id: UUID) -> HttpResponseBase:
        """Run a command in a session.

        200 with the execution when the command has ended; with `background`, 201 at once. Without
        `background`, the answer can be a stream of events, as for single executions.
        """
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

    async def _start(
        self, request: Request, session: Session, wanted: CommandRequest
    ) -> HttpResponse:
        if wanted.background:
            started = await commands.starting(session, wanted, self.caller())
            detail = commands.process_detail(started.pid or 0, started.pk, started.exit_code)
            return json_response(detail, 201)
        is_detached(request)
        outcome = await commands.commanding(session, wanted, self.caller())
        with known_to_run(outcome):
            return outcome_response(outcome, request)

    @endpoint("list_processes", answers={200: PageShape[ProcessShape]}, errors=(409, 502))
    @answered_later
    async def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """List the commands of a session.

        Running commands, and commands that ended recently.
        """
        found = await commands.listing(self.session(session_id))
        return json_response(PageShape(results=found, next=None))


class _ProcessView(SessionApiView):
    def of_process(self, session_id: UUID, pid: int) -> Session:
        """The session of this process. Raises Http404 where it has none of this number."""
        session = self.session(session_id)
        if not commands.is_there(session, pid):
            raise Http404
        return session


class ProcessStdinView(_ProcessView):
    @endpoint(
        "write_to_process",
        parameters=(STDIN,),
        request={"application/octet-stream": BYTES},
        answers={204: None},
        errors=(409, 502),
    )
    @answered_later
    async def post(self, request: Request, session_id: UUID, pid: int) -> HttpResponse:
        """Send bytes to a command's input.

        At most 1 MiB. With `close=1`, the input is closed after these bytes.
        """
        close = self.of(request, STDIN).close
        body = request.stream
        data = b"" if body is None else body.read(MOST_STDIN_BYTES + 1)
        if len(data) > MOST_STDIN_BYTES:
            refuse("body", f"Must be at most {MOST_STDIN_BYTES} bytes.")
        session = self.of_process(session_id, pid)
        # Whoever types into a shell runs commands.
        ensure_language(self.api_key, *COMMANDS)
        await commands.writing(session, pid, data, close=close)
        return HttpResponse(status=204)


class ProcessSignalView(_ProcessView):
    @endpoint("signal_process", request=SIGNAL, answers={200: SignalledShape}, errors=(409, 502))
    @answered_later
    async def post(self, request: Request, session_id: UUID, pid: int) -> HttpResponse:
        """Send a signal to a command and its group."""
        session = self.of_process(session_id, pid)
        sent = await commands.signalling(session, pid, SIGNAL.read(request.data).signal)
        return json_response(SignalledShape(signalled=sent))


class ProcessResizeView(_ProcessView):
    @endpoint("resize_process", request=RESIZE, answers={204: None}, errors=(409, 502))
    @answered_later
    async def post(self, request: Request, session_id: UUID, pid: int) -> HttpResponse:
        """Resize the terminal of a command."""
        session = self.of_process(session_id, pid)
        await commands.resizing(session, pid, RESIZE.read(request.data).pair)
        return HttpResponse(status=204)


class ProcessEventsView(SessionApiView):
    @endpoint("follow_process", parameters=(EVENTS,), answers=EVENT_STREAM, errors=(409,))
    def get(self, request: Request, session_id: UUID, pid: int) -> HttpResponseBase:
        """Follow a command in the background.

        Sends the events of its execution, from the first one or after `after`. A command without
        `background` is followed by the id of its execution, until it has ended.
        """
        after = after_of(request)
        execution_id = commands.execution_of(self.session(session_id), pid)
        if execution_id is None:
            raise Http404
        return follow_stream(self, request, execution_id, after)
