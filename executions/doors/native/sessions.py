"""The endpoints of sessions, of their commands, and of snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import ClassVar, TypeVar
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from executions.doors.native.deferred import answer, stream_form
from executions.doors.native.executions import (
    EVENTS,
    STREAM,
    after_of,
    ensure_listener,
    follow_stream,
    is_detached,
    outcome_response,
    run_stream,
)
from executions.doors.native.frame import (
    CLAIMS,
    KEY,
    RunningView,
    deferred,
    keep_outcome,
    read_run,
)
from executions.doors.native.rendering import (
    json_response,
    may_read,
    page_of,
    session_detail,
    session_for,
)
from executions.doors.native.schema import BYTES, EVENT_STREAM, endpoint
from executions.kernel.audit import SUCCESS, log_operation
from executions.kernel.bodies import LARGE, PageShape
from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import Query, refuse
from executions.runs.models import Execution
from executions.runs.requests import CELL
from executions.runs.routing import COMMANDS, ensure_language
from executions.runs.service import execute
from executions.runs.shapes import ExecutionShape
from executions.sessions import cells, control
from executions.sessions.control import open_session
from executions.sessions.ending import close
from executions.sessions.models import Session, Snapshot
from executions.sessions.queries import LIST, list_sessions, living_session_of, session_of
from executions.sessions.requests import (
    CHANGE,
    CREATE_CONTEXT,
    INTERRUPT,
    OPEN,
    RESET,
    RESIZE,
    SIGNAL,
    START,
    STDIN,
    CommandRequest,
    ContextShape,
    InterruptedShape,
    ProcessShape,
    SessionShape,
    SignalledShape,
    SnapshotShape,
)
from executions.sessions.storage import snapshots
from providers.sandbox import DEFAULT_CONTEXT

T = TypeVar("T")


# A sandbox always has its first one.
OTHER_CONTEXT = OpenApiParameter(
    "context_id", {"type": "string", "not": {"const": DEFAULT_CONTEXT}}, OpenApiParameter.PATH
)


class LoggedView(RunningView):
    """An endpoint of sessions."""

    # The methods whose use has a line in the log.
    operations: ClassVar[Mapping[str, str]] = {}
    of_session: Session | None = None

    async def handle_errors(self, work: Coroutine[HttpResponseBase]) -> HttpResponseBase:
        began = perf_counter()
        answer = await super().handle_errors(work)
        if operation := self.operations.get(self.asked_for):
            self._log(operation, answer, (perf_counter() - began) * 1000)
        return answer

    def _log(self, operation: str, answer: HttpResponseBase, milliseconds: float) -> None:
        session, length = self.of_session, self.request.META.get("CONTENT_LENGTH") or ""
        log_operation(
            operation,
            SUCCESS if answer.status_code < 400 else f"http_{answer.status_code}",
            tenant_id=self.api_key.tenant.slug,
            api_key=self.api_key.prefix,
            request_id=self.request_id,
            session_id=str(session.pk) if session else None,
            provider=session.provider if session else None,
            runtime=session.runtime if session else None,
            config_version=session.config_version if session else None,
            duration_ms=round(milliseconds, 3),
            received_bytes=int(length) if length.isascii() and length.isdigit() else None,
        )

    @property
    def asked_for(self) -> str:
        return str(self.request.method)

    def by(self) -> str:
        """Who acts, as the ledger and the session itself say it."""
        return f"key:{self.api_key.prefix}"


class SessionApiView(LoggedView):
    tag = "sessions"

    def session(self, session_id: UUID) -> Session:
        """The caller's session, open. Raises NoSuchSession and Conflict."""
        self.of_session = living_session_of(self.api_key.tenant, session_id)
        return self.of_session

    def of(self, request: Request, query: Query[T]) -> T:
        return query.read(request.query_params.dict())


class SessionsView(SessionApiView):
    @endpoint("open_session", request=OPEN, answers={201: SessionShape}, errors=(404, 409, 502))
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """Open a session.

        The sandbox of a session persists: it keeps variables, files and processes between calls.
        With `from`, the session starts with the files of a snapshot or of an ended session, without
        its variables.
        """
        session = await open_session(OPEN.read(request.data), self.caller())
        response = json_response(session_detail(session), 201)
        path = reverse("session", args=[session.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response

    @endpoint("list_sessions", parameters=(LIST,), answers={200: PageShape[SessionShape]})
    def get(self, request: Request) -> HttpResponse:
        """List sessions.

        The tenant's sessions, newest first.
        """
        page = list_sessions(self.api_key.tenant, self.of(request, LIST))
        results = [session_detail(session) for session in page.sessions]
        return json_response(page_of(request, results, page.next_cursor))


class SessionView(SessionApiView):
    @endpoint("get_session", answers={200: SessionShape})
    def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """Get a session."""
        return json_response(session_detail(session_of(self.api_key.tenant, session_id)))

    @endpoint("change_session", request=CHANGE, answers={200: SessionShape}, errors=(409,))
    def patch(self, request: Request, session_id: UUID) -> HttpResponse:
        """Extend a session, or change its metadata."""
        session = self.session(session_id)
        changes = CHANGE.read(request.data)
        return json_response(session_for(self.api_key, control.change(session, changes, self.by())))

    @endpoint("close_session", answers={204: None})
    @deferred
    async def delete(self, request: Request, session_id: UUID) -> HttpResponse:
        """Close a session.

        Running code ends as `cancelled`. It is no error to close a session twice.
        """
        session = session_of(self.api_key.tenant, session_id)
        if session.closed_at is None:
            await close(session, self.by())
        return HttpResponse(status=204)


class SessionExecutionsView(SessionApiView):
    bounds = LARGE

    @endpoint(
        "run_in_session",
        parameters=(STREAM, CLAIMS, KEY),
        request=CELL,
        answers={200: ExecutionShape, **EVENT_STREAM, 202: ExecutionShape},
        errors=(409, 502),
    )
    def post(self, request: Request, session_id: UUID) -> HttpResponseBase:
        """Run code in a session.

        Runs in one of its contexts, after all code that was sent there before. With `Accept:
        text/event-stream` or `application/x-ndjson`, the answer is a stream of events, as for a
        single execution.
        """
        if form := stream_form(request.headers.get("Accept", "")):
            wanted = read_run(CELL, request, session=session_id)
            if wanted.mode == Execution.Mode.SYNC:
                return run_stream(
                    self, request, form, lambda log: execute(wanted, self.caller(), log=log)
                )
        return answer(request, self.handle_errors(self._run(request, session_id)))

    async def _run(self, request: Request, session_id: UUID) -> HttpResponse:
        is_detached(request)
        wanted = ensure_listener(read_run(CELL, request, session=session_id))
        outcome = await execute(wanted, self.caller(), waits=True)
        with keep_outcome(outcome):
            return outcome_response(outcome, request)


class InterruptView(SessionApiView):
    @endpoint(
        "interrupt_session", request=INTERRUPT, answers={202: InterruptedShape}, errors=(409, 502)
    )
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Interrupt the code in a context.

        The context keeps its state.
        """
        session = self.session(session_id)
        wanted = INTERRUPT.read(request.data)
        stopped = await control.interrupt(session, wanted.context)
        return json_response(InterruptedShape(interrupted=stopped), 202)


class ResetView(SessionApiView):
    @endpoint("reset_session", request=RESET, answers={200: SessionShape}, errors=(409, 502))
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Reset a session.

        Processes and contexts end; files are kept.
        """
        session = self.session(session_id)
        RESET.read(request.data)
        return json_response(session_for(self.api_key, (await control.reset(session, self.by()))))


class ContextsView(SessionApiView):
    @endpoint(
        "create_context", request=CREATE_CONTEXT, answers={201: ContextShape}, errors=(409, 502)
    )
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Create a context (an interpreter) in a session."""
        session = self.session(session_id)
        wanted = CREATE_CONTEXT.read(request.data)
        ensure_language(self.api_key, wanted.language)
        made = await control.create_context(session, wanted)
        return json_response(made, 201)

    @endpoint("list_contexts", answers={200: PageShape[ContextShape]}, errors=(409,))
    def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """List the contexts of a session."""
        return json_response(PageShape(results=self.session(session_id).contexts, next=None))


class ContextView(SessionApiView):
    @endpoint("end_context", parameters=(OTHER_CONTEXT,), answers={204: None}, errors=(409, 502))
    @deferred
    async def delete(self, request: Request, session_id: UUID, context_id: str) -> HttpResponse:
        """End a context."""
        session = self.session(session_id)
        if not (await control.end_context(session, context_id)):
            raise Http404
        return HttpResponse(status=204)


class ContextRestartView(SessionApiView):
    @endpoint("restart_context", answers={200: ContextShape}, errors=(409, 502))
    @deferred
    async def post(self, request: Request, session_id: UUID, context_id: str) -> HttpResponse:
        """Restart a context."""
        session = self.session(session_id)
        context = await control.restart_context(session, context_id)
        if context is None:
            raise Http404
        if not may_read(self.api_key, session):
            context["cwd"] = ""
        return json_response(context)


def snapshot_detail(snapshot: Snapshot) -> SnapshotShape:
    return {
        "id": str(snapshot.pk),
        "name": snapshot.name or None,
        "session": str(snapshot.source),
        "files": snapshot.files,
        "bytes": snapshot.bytes,
        "created_at": snapshot.created_at.isoformat(),
    }


class SessionSnapshotView(SessionApiView):
    tag = "snapshots"

    @endpoint(
        "take_snapshot", request=snapshots.TAKE, answers={201: SnapshotShape}, errors=(409, 502)
    )
    @deferred
    async def post(self, request: Request, session_id: UUID) -> HttpResponse:
        """Take a snapshot of the files of a session.

        Other sessions can start with these files: `POST /api/v1/sessions` with `from`. A snapshot
        has only files, folders and links, no variables, contexts or processes. It is kept after the
        session ends, until it is deleted.
        """
        session = self.session(session_id)
        wanted = snapshots.TAKE.read(request.data)
        snapshot = await snapshots.take_snapshot(session, wanted, self.caller())
        response = json_response(snapshot_detail(snapshot), 201)
        path = reverse("snapshot", args=[snapshot.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response


class SnapshotsView(SessionApiView):
    tag = "snapshots"

    @endpoint(
        "list_snapshots", parameters=(snapshots.LIST,), answers={200: PageShape[SnapshotShape]}
    )
    def get(self, request: Request) -> HttpResponse:
        """List snapshots.

        The tenant's snapshots, newest first.
        """
        wanted = self.of(request, snapshots.LIST)
        page = snapshots.list_snapshots(self.api_key.tenant, wanted)
        results = [snapshot_detail(each) for each in page.snapshots]
        return json_response(page_of(request, results, page.next_cursor))


class SnapshotView(SessionApiView):
    tag = "snapshots"

    @endpoint("get_snapshot", answers={200: SnapshotShape})
    def get(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        """Get a snapshot."""
        return json_response(
            snapshot_detail(snapshots.snapshot_of(self.api_key.tenant, snapshot_id))
        )

    @endpoint("delete_snapshot", answers={204: None}, errors=(409,))
    def delete(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        """Delete a snapshot.

        Sessions that started with it keep their files. 409 if the tenant has a legal hold.
        """
        snapshot = snapshots.snapshot_of(self.api_key.tenant, snapshot_id)
        if not snapshots.remove(snapshot, self.by()):
            raise Http404
        return HttpResponse(status=204)


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
        form = stream_form(request.headers.get("Accept", ""))
        if form and not wanted.background:
            return run_stream(
                self,
                request,
                form,
                lambda log: cells.run_command(session, wanted, self.caller(), log),
            )
        return answer(request, self.handle_errors(self._start(request, session, wanted)))

    async def _start(
        self, request: Request, session: Session, wanted: CommandRequest
    ) -> HttpResponse:
        if wanted.background:
            started = await cells.start_command(session, wanted, self.caller())
            detail = cells.process_detail(started.pid or 0, started.pk, started.exit_code)
            return json_response(detail, 201)
        is_detached(request)
        outcome = await cells.run_command(session, wanted, self.caller())
        with keep_outcome(outcome):
            return outcome_response(outcome, request)

    @endpoint("list_processes", answers={200: PageShape[ProcessShape]}, errors=(409, 502))
    @deferred
    async def get(self, request: Request, session_id: UUID) -> HttpResponse:
        """List the commands of a session.

        Running commands, and commands that ended recently.
        """
        found = await cells.list_commands(self.session(session_id))
        return json_response(PageShape(results=found, next=None))


class _ProcessView(SessionApiView):
    def of_process(self, session_id: UUID, pid: int) -> Session:
        """The session of this process. Raises Http404 where it has none of this number."""
        session = self.session(session_id)
        if not cells.is_there(session, pid):
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
    @deferred
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
        await cells.write_input(session, pid, data, close=close)
        return HttpResponse(status=204)


class ProcessSignalView(_ProcessView):
    @endpoint("signal_process", request=SIGNAL, answers={200: SignalledShape}, errors=(409, 502))
    @deferred
    async def post(self, request: Request, session_id: UUID, pid: int) -> HttpResponse:
        """Send a signal to a command and its group."""
        session = self.of_process(session_id, pid)
        sent = await cells.send_signal(session, pid, SIGNAL.read(request.data).signal)
        return json_response(SignalledShape(signalled=sent))


class ProcessResizeView(_ProcessView):
    @endpoint("resize_process", request=RESIZE, answers={204: None}, errors=(409, 502))
    @deferred
    async def post(self, request: Request, session_id: UUID, pid: int) -> HttpResponse:
        """Resize the terminal of a command."""
        session = self.of_process(session_id, pid)
        await cells.resize_terminal(session, pid, RESIZE.read(request.data).pair)
        return HttpResponse(status=204)


class ProcessEventsView(SessionApiView):
    @endpoint("follow_process", parameters=(EVENTS,), answers=EVENT_STREAM, errors=(409,))
    def get(self, request: Request, session_id: UUID, pid: int) -> HttpResponseBase:
        """Follow a command in the background.

        Sends the events of its execution, from the first one or after `after`. A command without
        `background` is followed by the id of its execution, until it has ended.
        """
        after = after_of(request)
        execution_id = cells.execution_of(self.session(session_id), pid)
        if execution_id is None:
            raise Http404
        return follow_stream(self, request, execution_id, after)
