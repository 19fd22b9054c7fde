"""What changes in a session's files, as a stream."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from uuid import UUID

from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import answered_later
from executions.api.sessions import SESSION_ID, TAGS, SessionApiView
from executions.api.streams import NDJSON, SSE, EventStream, wanted_form
from executions.kernel.coroutines import Waits
from executions.sessions.file_events import watching
from executions.sessions.requests import FOLDER
from providers.errors import SandboxError


class FileEventsView(SessionApiView):
    @extend_schema(
        operation_id="watch_session_files",
        summary="Watch a folder of a session",
        description="Sends each change in the folder and below it when it happens: `created`, "
        "`modified`, `deleted`, `moved` or `attributes`, with the path, and for `moved` also the "
        "former path. Server-sent events if `text/event-stream` is accepted, else lines of JSON. "
        "The last event is `done`, or `error` with the reason. A watch does not count as use of "
        "the session.",
        tags=TAGS,
        parameters=[SESSION_ID, *schema.parameters(FOLDER)],
        responses={
            (200, SSE): OpenApiTypes.STR,
            (200, NDJSON): OpenApiTypes.STR,
            **schema.errors(400, 401, 404, 409, 429, 502, 503),
        },
    )
    @answered_later
    def get(self, request: Request, session_id: UUID) -> Waits[HttpResponseBase]:
        session = self.session(session_id)
        path = self.of(request, FOLDER).path
        form = wanted_form(request.headers.get("Accept", "")) or NDJSON
        watch = yield from watching(session, path)
        events = EventStream(form, on_leave=watch.leave)
        events.begin(watch)
        watch.ended.add_done_callback(lambda ended: events.end(_last_event(ended)))
        return events


def _last_event(ended: Future[None]) -> dict[str, Any]:
    error = ended.exception()
    if isinstance(error, SandboxError):
        told = {"code": error.code, "message": error.message, "field": error.field}
        return {"type": "error", "error": told}
    return {"type": "done"}
