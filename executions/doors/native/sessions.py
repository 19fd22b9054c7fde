"""The endpoints of sessions and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import ClassVar, TypeVar
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from executions.doors.native import schema
from executions.doors.native.deferred import answer, wanted_form
from executions.doors.native.executions import (
    STREAM,
    is_detached,
    outcome_response,
    refuse_unheard,
    run_stream,
)
from executions.doors.native.frame import (
    CLAIMS,
    KEY,
    RunningView,
    answered_later,
    known_to_run,
    read_run,
)
from executions.doors.native.rendering import (
    json_response,
    may_read,
    page_of,
    session_detail,
    session_for,
)
from executions.kernel.audit import SUCCESS, log_operation
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import Query
from executions.kernel.shapes import PageShape
from executions.runs.models import Execution
from executions.runs.requests import CELL
from executions.runs.routing import require_language
from executions.runs.service import running
from executions.runs.shapes import ExecutionShape
from executions.sessions import control
from executions.sessions.ending import close
from executions.sessions.lifecycle import opening
from executions.sessions.models import Session
from executions.sessions.queries import LIST, list_sessions, living_session_of, session_of
from executions.sessions.requests import CHANGE, CREATE_CONTEXT, INTERRUPT, OPEN, RESET
from executions.sessions.shapes import ContextShape, InterruptedShape, SessionShape, SnapshotShape
from executions.sessions.storage import snapshots
from executions.sessions.storage.models import Snapshot
from providers.sandbox import DEFAULT_CONTEXT

T = TypeVar("T")
SESSION_ID = OpenApiParameter("session_id", OpenApiTypes.UUID, OpenApiParameter.PATH)
CONTEXT_ID = OpenApiParameter("context_id", str, OpenApiParameter.PATH)
# A sandbox always has its first one.
OTHER_CONTEXT = OpenApiParameter(
    "context_id", {"type": "string", "not": {"const": DEFAULT_CONTEXT}}, OpenApiParameter.PATH
)
TAGS = ["sessions"]


class LoggedView(RunningView):
    """An endpoint of sessions."""

    # The methods whose use has a line in the log.
    operations: ClassVar[Mapping[str, str]] = {}
    of_session: Session | None = None

    def told(self, work: Coroutine[HttpResponseBase]) -> Coroutine[HttpResponseBase]:
        began = perf_counter()
        answer = yield from super().told(work)
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
    def session(self, session_id: UUID) -> Session:
        """The caller's session, open. Raises NoSuchSession and Conflict."""
        self.of_session = living_session_of(self.api_key.tenant, session_id)
        return self.of_session

    def of(self, request: Request, query: Query[T]) -> T:
        return query.read(request.query_params.dict())


class SessionsView(SessionApiView):
    @extend_schema(
        operation_id="open_session",
        summary="Open a session",
        description="The sandbox of a session persists: it keeps variables, files and processes "
        "between calls. With `from`, the session starts with the files of a snapshot or of an "
        "ended session, without its variables.",
        tags=TAGS,
        request=OPEN,
        responses={
            201: SessionShape,
            **schema.errors(400, 401, 404, 409, 413, 415, 429, 502, 503),
        },
    )
    @answered_later
    def post(self, request: Request) -> Coroutine[HttpResponse]:
        session = yield from opening(OPEN.read(request.data), self.caller())
        response = json_response(session_detail(session), 201)
        path = reverse("session", args=[session.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response

    @extend_schema(
        operation_id="list_sessions",
        summary="List sessions",
        description="The tenant's sessions, newest first.",
        tags=TAGS,
        parameters=schema.parameters(LIST),
        responses={200: PageShape[SessionShape], **schema.errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        page = list_sessions(self.api_key.tenant, self.of(request, LIST))
        results = [session_detail(session) for session in page.sessions]
        return json_response(page_of(request, results, page.next_cursor))


class SessionView(SessionApiView):
    @extend_schema(
        operation_id="get_session",
        summary="Get a session",
        tags=TAGS,
        parameters=[SESSION_ID],
        responses={200: SessionShape, **schema.errors(401, 404)},
    )
    def get(self, request: Request, session_id: UUID) -> HttpResponse:
        return json_response(session_detail(session_of(self.api_key.tenant, session_id)))

    @extend_schema(
        operation_id="change_session",
        summary="Extend a session, or change its metadata",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=CHANGE,
        responses={
            200: SessionShape,
            **schema.errors(400, 401, 404, 409, 413, 415),
        },
    )
    def patch(self, request: Request, session_id: UUID) -> HttpResponse:
        session = self.session(session_id)
        changes = CHANGE.read(request.data)
        return json_response(session_for(self.api_key, control.change(session, changes, self.by())))

    @extend_schema(
        operation_id="close_session",
        summary="Close a session",
        description="Running code ends as `cancelled`. It is no error to close a session twice.",
        tags=TAGS,
        parameters=[SESSION_ID],
        responses={204: None, **schema.errors(401, 404)},
    )
    @answered_later
    def delete(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = session_of(self.api_key.tenant, session_id)
        if session.closed_at is None:
            yield from close(session, self.by())
        return HttpResponse(status=204)


class SessionExecutionsView(SessionApiView):
    bounds = LARGE

    @extend_schema(
        operation_id="run_in_session",
        summary="Run code in a session",
        description="Runs in one of its contexts, after all code that was sent there before. With "
        "`Accept: text/event-stream` or `application/x-ndjson`, the answer is a stream of events, "
        "as for a single execution.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(STREAM, CLAIMS, KEY)],
        request=CELL,
        responses={
            **schema.STREAMED_EXECUTION,
            202: ExecutionShape,
            **schema.errors(400, 401, 404, 409, 413, 415, 429, 502, 503),
        },
    )
    def post(self, request: Request, session_id: UUID) -> HttpResponseBase:
        if form := wanted_form(request.headers.get("Accept", "")):
            wanted = read_run(CELL, request, session=session_id)
            if wanted.mode == Execution.Mode.SYNC:
                return run_stream(
                    self, request, form, lambda log: running(wanted, self.caller(), log=log)
                )
        return answer(request, self.told(self._run(request, session_id)))

    def _run(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        is_detached(request)
        wanted = refuse_unheard(read_run(CELL, request, session=session_id))
        outcome = yield from running(wanted, self.caller(), waits=True)
        with known_to_run(outcome):
            return outcome_response(outcome, request)


class InterruptView(SessionApiView):
    @extend_schema(
        operation_id="interrupt_session",
        summary="Interrupt the code in a context",
        description="The context keeps its state.",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=INTERRUPT,
        responses={
            202: InterruptedShape,
            **schema.errors(401, 404, 409, 413, 415, 502),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        wanted = INTERRUPT.read(request.data)
        stopped = yield from control.interrupting(session, wanted.context)
        return json_response(InterruptedShape(interrupted=stopped), 202)


class ResetView(SessionApiView):
    @extend_schema(
        operation_id="reset_session",
        summary="Reset a session",
        description="Processes and contexts end; files are kept.",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=RESET,
        responses={
            200: SessionShape,
            **schema.errors(401, 404, 409, 413, 415, 502),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        RESET.read(request.data)
        return json_response(
            session_for(self.api_key, (yield from control.resetting(session, self.by())))
        )


class ContextsView(SessionApiView):
    @extend_schema(
        operation_id="create_context",
        summary="Create a context (an interpreter) in a session",
        tags=TAGS,
        parameters=[SESSION_ID],
        request=CREATE_CONTEXT,
        responses={
            201: ContextShape,
            **schema.errors(401, 404, 409, 413, 415, 502),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        wanted = CREATE_CONTEXT.read(request.data)
        require_language(self.api_key, wanted.language)
        made = yield from control.creating_context(session, wanted)
        return json_response(made, 201)

    @extend_schema(
        operation_id="list_contexts",
        summary="List the contexts of a session",
        tags=TAGS,
        parameters=[SESSION_ID],
        responses={200: PageShape[ContextShape], **schema.errors(401, 404, 409)},
    )
    def get(self, request: Request, session_id: UUID) -> HttpResponse:
        contexts: list[ContextShape] = self.session(session_id).contexts
        return json_response(PageShape(results=contexts, next=None))


class ContextView(SessionApiView):
    @extend_schema(
        operation_id="end_context",
        summary="End a context",
        tags=TAGS,
        parameters=[SESSION_ID, OTHER_CONTEXT],
        responses={204: None, **schema.errors(401, 404, 409, 502, 503)},
    )
    @answered_later
    def delete(
        self, request: Request, session_id: UUID, context_id: str
    ) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        if not (yield from control.ending_context(session, context_id)):
            raise Http404
        return HttpResponse(status=204)


class ContextRestartView(SessionApiView):
    @extend_schema(
        operation_id="restart_context",
        summary="Restart a context",
        tags=TAGS,
        parameters=[SESSION_ID, CONTEXT_ID],
        request=None,
        responses={
            200: ContextShape,
            **schema.errors(401, 404, 409, 502, 503),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID, context_id: str) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        context = yield from control.restarting_context(session, context_id)
        if context is None:
            raise Http404
        if not may_read(self.api_key, session):
            context["cwd"] = ""
        return json_response(context)


SNAPSHOT_TAGS = ["snapshots"]
SNAPSHOT_ID = OpenApiParameter("snapshot_id", OpenApiTypes.UUID, OpenApiParameter.PATH)


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
    @extend_schema(
        operation_id="take_snapshot",
        summary="Take a snapshot of the files of a session",
        description="Other sessions can start with these files: `POST /api/v1/sessions` with "
        "`from`. A snapshot has only files, folders and links, no variables, contexts or "
        "processes. It is kept after the session ends, until it is deleted.",
        tags=SNAPSHOT_TAGS,
        parameters=[SESSION_ID],
        request=snapshots.TAKE,
        responses={
            201: SnapshotShape,
            **schema.errors(400, 401, 404, 409, 413, 415, 429, 502, 503),
        },
    )
    @answered_later
    def post(self, request: Request, session_id: UUID) -> Coroutine[HttpResponse]:
        session = self.session(session_id)
        wanted = snapshots.TAKE.read(request.data)
        snapshot = yield from snapshots.taking(session, wanted, self.caller())
        response = json_response(snapshot_detail(snapshot), 201)
        path = reverse("snapshot", args=[snapshot.pk])
        response["Location"] = request.build_absolute_uri(path)
        return response


class SnapshotsView(SessionApiView):
    @extend_schema(
        operation_id="list_snapshots",
        summary="List snapshots",
        description="The tenant's snapshots, newest first.",
        tags=SNAPSHOT_TAGS,
        parameters=schema.parameters(snapshots.LIST),
        responses={200: PageShape[SnapshotShape], **schema.errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        wanted = self.of(request, snapshots.LIST)
        page = snapshots.list_snapshots(self.api_key.tenant, wanted)
        results = [snapshot_detail(each) for each in page.snapshots]
        return json_response(page_of(request, results, page.next_cursor))


class SnapshotView(SessionApiView):
    @extend_schema(
        operation_id="get_snapshot",
        summary="Get a snapshot",
        tags=SNAPSHOT_TAGS,
        parameters=[SNAPSHOT_ID],
        responses={200: SnapshotShape, **schema.errors(401, 404)},
    )
    def get(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        return json_response(
            snapshot_detail(snapshots.snapshot_of(self.api_key.tenant, snapshot_id))
        )

    @extend_schema(
        operation_id="delete_snapshot",
        summary="Delete a snapshot",
        description="Sessions that started with it keep their files. 409 if the tenant has a "
        "legal hold.",
        tags=SNAPSHOT_TAGS,
        parameters=[SNAPSHOT_ID],
        responses={204: None, **schema.errors(401, 404, 409)},
    )
    def delete(self, request: Request, snapshot_id: UUID) -> HttpResponse:
        snapshot = snapshots.snapshot_of(self.api_key.tenant, snapshot_id)
        if not snapshots.remove(snapshot, self.by()):
            raise Http404
        return HttpResponse(status=204)
