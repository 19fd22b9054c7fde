"""Runs told event by event: of the request itself, and of an execution by its id."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, cast
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from pydantic import Field
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from executions.api import schema
from executions.api.authentication import ApiKeyAuthentication, key_text_of
from executions.api.base import ApiView, RunningView
from executions.api.errors import known_to_run
from executions.api.later import stream
from executions.api.rendering import execution_in_full, json_response
from executions.api.scopes import has_scopes
from executions.api.streams import DOCUMENT, NDJSON, SSE, Document, EventStream, wanted_form
from executions.kernel.coroutines import Waits
from executions.kernel.declarations import END, Query, Rule, declared, refuse, shown
from executions.runs import active_runs
from executions.runs.event_log import EventLog
from executions.runs.event_stream import Listener, following
from executions.runs.models import Execution
from executions.runs.record import Outcome
from executions.runs.requests import ExecutionRequest, run_limits
from executions.tenants.models import ApiKey
from executions.tenants.tenant_scope import executions_of

VIEW = "executions.view_execution"
LAST_EVENT = "Last-Event-ID"
_LARGEST = 10**15 - 1


_EXECUTION_FIELDS = tuple(schema.ExecutionSerializer().fields)
_ONE_FIELD = f"({'|'.join(_EXECUTION_FIELDS)})"


def _check_fields(text: str) -> str:
    for name in text.split(","):
        if name not in _EXECUTION_FIELDS:
            raise ValueError(
                f"Unknown field {shown(name)!r}. Known are: {', '.join(_EXECUTION_FIELDS)}."
            )
    return text


Fields = Annotated[
    str,
    Rule(_check_fields, {"pattern": f"^{_ONE_FIELD}(,{_ONE_FIELD})*{END}"}),
    Field(
        min_length=1,
        max_length=1000,
        description="Names of fields, separated by commas. The answer contains only these fields.",
    ),
]


@declared
class FieldsRequest:
    """Which fields of an execution the answer has; all of them without this parameter."""

    fields: Fields | None = None


@declared
class StreamRequest(FieldsRequest):
    """How a run is told of while it goes on."""

    detach: Annotated[
        bool, Field(description="For a stream: the run continues after the client leaves it.")
    ] = False


@declared
class EventsRequest(FieldsRequest):
    """Where to go on. A browser that connects again says so in the header, and asks as before."""

    after: Annotated[
        int,
        Field(
            ge=0, le=_LARGEST, description="Only events after the one with this number; 0 for all."
        ),
    ] = 0
    last: Annotated[Annotated[int, Field(ge=0, le=_LARGEST)] | None, Field(alias=LAST_EVENT)] = None


FIELDS = Query(FieldsRequest, is_open=True)
STREAM = Query(StreamRequest, is_open=True)
EVENTS = Query(EventsRequest, headers=(LAST_EVENT,), is_open=True)


def is_detached(request: Request) -> bool:
    """Whether whoever asks may leave a stream. Raises InvalidConfiguration."""
    return STREAM.read(request.query_params.dict()).detach


def fields_of(request: Request) -> frozenset[str]:
    """Return the fields that the caller selects; empty for all. Raises InvalidConfiguration."""
    return frozenset(
        filter(None, (FIELDS.read(request.query_params.dict()).fields or "").split(","))
    )


def refuse_unheard(wanted: ExecutionRequest) -> ExecutionRequest:
    """The request, where somebody can hear what its code calls. Raises InvalidConfiguration."""
    if wanted.tools and wanted.mode == Execution.Mode.SYNC:
        refuse(
            "tools",
            "Tools need a stream of events (Accept: application/x-ndjson) or mode async.",
        )
    return wanted


def run_stream(
    view: ApiView, request: Request, form: str, run: Callable[[EventLog], Waits[Outcome]]
) -> HttpResponseBase:
    """Have `run` tell what it runs while it does. Whoever leaves the stream cancels the run, unless
    he said before that he would."""
    may_leave = is_detached(request)
    log = EventLog(run_limits())
    # A client that said it may go may also come back, and finds what it has not read.
    log.is_kept = may_leave

    def leave() -> None:
        found = active_runs.find(log.execution_id) if log.execution_id else None
        if found is not None and not may_leave:
            found.cancel("its client, which left the stream")

    events = EventStream(form, on_leave=leave)
    log.on_begin = lambda: events.begin(log)

    def work() -> Waits[HttpResponse]:
        outcome = yield from run(log)
        execution = outcome.execution
        with known_to_run(outcome):
            if not log.has_begun:
                # An idempotency key stands for it: it is followed, and not ours to end.
                listener = Listener.of_key(view.api_key)
                yield from following(execution.pk, events, 0, listener)
                execution = _read(execution.pk)
            absolute = request.build_absolute_uri
            return json_response(execution_in_full(execution, absolute, fields_of(request)))

    return stream(request, _told(view, events, work()), events)


class KeyOrSession(ApiKeyAuthentication):
    """An API key, or without one the session of whoever is signed in to the admin."""

    def authenticate(self, request: Request) -> Any:
        if not key_text_of(request) and (found := SessionAuthentication().authenticate(request)):
            return found
        return super().authenticate(request)


class MayLook(BasePermission):
    def has_permission(self, request: Request, view: APIView) -> bool:
        if isinstance(request.auth, ApiKey):
            return has_scopes(request)
        user = request.user
        return bool(user and user.is_active and user.is_staff and user.has_perm(VIEW))


class EventsView(RunningView):
    """For holders of a key, and for whoever may look at executions in the admin."""

    authentication_classes = (KeyOrSession,)
    permission_classes = (MayLook,)

    @extend_schema(
        operation_id="follow_execution",
        summary="Follow an execution",
        description="Sends its events from the first one, or after the one that `after` or "
        "`Last-Event-ID` names, until the execution has ended. Server-sent events if "
        "`text/event-stream` is accepted, else lines of JSON.",
        tags=["executions"],
        parameters=[
            OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            *schema.parameters(EVENTS),
        ],
        responses={
            (200, SSE): OpenApiTypes.STR,
            (200, NDJSON): OpenApiTypes.STR,
            **schema.errors(400, 401, 404),
        },
    )
    def get(self, request: Request, execution_id: UUID) -> HttpResponseBase:
        after = after_of(request)
        key = request.auth
        tenant = key.tenant if isinstance(key, ApiKey) else None
        if not executions_of(tenant).filter(pk=execution_id).exists():
            raise Http404
        return follow_stream(self, request, execution_id, after)


def follow_stream(
    view: ApiView, request: Request, execution_id: UUID, after: int
) -> HttpResponseBase:
    """The events after this one of an execution that the caller may see."""
    form = wanted_form(request.headers.get("Accept", "")) or NDJSON
    events = EventStream(form, after=after)
    key = request.auth
    if isinstance(key, ApiKey):
        listener = Listener.of_key(key)
    else:
        listener = Listener(f"user:{request.user.pk}")

    def work() -> Waits[HttpResponse]:
        yield from following(execution_id, events, after, listener)
        execution = _read(execution_id)
        absolute = request.build_absolute_uri
        return json_response(execution_in_full(execution, absolute, fields_of(request)))

    return stream(request, _told(view, events, work()), events)


def _told(view: ApiView, events: EventStream, work: Waits[HttpResponse]) -> Waits[HttpResponse]:
    """The work, whose answer or error is the last event, where it is not all of the answer."""
    answer: HttpResponse | None = None
    try:
        answer = cast("HttpResponse", (yield from view.told(work)))
        return answer
    finally:
        events.end(_last_event(answer))


def _last_event(answer: HttpResponse | None) -> dict[str, Any]:
    if answer is None:
        return {"type": "error", "error": {"code": "internal_error"}}
    if answer.status_code == 200:
        return {"type": "done", DOCUMENT: Document(answer.content)}
    return {"type": "error", **json.loads(answer.content)}


def _read(execution_id: UUID) -> Execution:
    """What has been followed, or is the caller's by its idempotency key."""
    if (found := executions_of(None).filter(pk=execution_id).first()) is None:
        raise Http404
    return found


def after_of(request: Request) -> int:
    """The number of the event to go on behind. Raises InvalidConfiguration."""
    query = request.query_params.dict()
    if header := request.headers.get(LAST_EVENT):
        query = {LAST_EVENT: header}
    wanted = EVENTS.read(query)
    return wanted.after if wanted.last is None else wanted.last
