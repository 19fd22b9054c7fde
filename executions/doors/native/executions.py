"""The endpoints of executions, receipts, the ledger and usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, cast, get_type_hints
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from pydantic import Field
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from executions.doors.native.authentication import (
    ApiKeyAuthentication,
    ensure_scopes,
    has_scopes,
    key_text_of,
)
from executions.doors.native.deferred import (
    DOCUMENT,
    NDJSON,
    Document,
    EventStream,
    answer,
    stream,
    stream_form,
)
from executions.doors.native.downloads import download_response
from executions.doors.native.frame import (
    CLAIMS,
    KEY,
    ApiView,
    RunningView,
    deferred,
    error_response,
    keep_outcome,
    read_run,
)
from executions.doors.native.rendering import (
    LanguagesShape,
    LedgerKeyShape,
    LedgerKeysShape,
    PackagesShape,
    QuotaShape,
    UsageShape,
    execution_for,
    execution_in_full,
    json_response,
    page_of,
)
from executions.doors.native.schema import BYTES, EVENT_STREAM, endpoint
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import END, Query, Rule, declared, refuse, shown
from executions.ledger.entry import DOMAIN, keyring
from executions.runs import extensions
from executions.runs.active_runs import LEFT_STREAM, ClientRun
from executions.runs.event_log import EventLog
from executions.runs.event_stream import Listener, follow
from executions.runs.models import Execution
from executions.runs.record import Outcome, receipt_of
from executions.runs.requests import CONFLICT, RUN, ExecutionRequest, run_limits
from executions.runs.results import (
    LIST,
    artifacts_of,
    execution_summary,
    executions_of,
    list_executions,
)
from executions.runs.routing import allowed_languages, languages_for
from executions.runs.service import HasEnded, cancel, execute
from executions.runs.shapes import ExecutionPageShape, ExecutionShape
from executions.sessions.capacity import usage_of
from executions.tenants.models import ApiKey, Scope
from providers.errors import CODES

VIEW = "executions.view_execution"
LAST_EVENT = "Last-Event-ID"
_LARGEST = 10**15 - 1


_EXECUTION_FIELDS = tuple(get_type_hints(ExecutionShape))
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


def ensure_listener(wanted: ExecutionRequest) -> ExecutionRequest:
    """The request, where somebody can hear what its code calls. Raises InvalidConfiguration."""
    if wanted.tools and wanted.mode == Execution.Mode.SYNC:
        refuse(
            "tools",
            "Tools need a stream of events (Accept: application/x-ndjson) or mode async.",
        )
    return wanted


def run_stream(
    view: ApiView, request: Request, form: str, run: Callable[[EventLog], Coroutine[Outcome]]
) -> HttpResponseBase:
    """Have `run` tell what it runs while it does. Whoever leaves the stream cancels the run, unless
    he said before that he would."""
    may_leave = is_detached(request)
    log = EventLog(run_limits())
    # A client that said it may go may also come back, and finds what it has not read.
    log.is_kept = may_leave

    client = ClientRun(log, LEFT_STREAM, lambda: events.begin(log))
    events = EventStream(form, on_leave=(lambda: None) if may_leave else client.cancel)

    async def work() -> HttpResponse:
        outcome = await run(log)
        execution = outcome.execution
        with keep_outcome(outcome):
            if not log.has_begun:
                # An idempotency key stands for it: it is followed, and not ours to end.
                listener = Listener.of_key(view.api_key)
                await follow(execution.pk, events, 0, listener)
                execution = _read_execution(execution.pk)
            absolute = request.build_absolute_uri
            return json_response(execution_in_full(execution, absolute, fields_of(request)))

    return stream(request, lambda: _send_last_event(view, events, work()), events)


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

    @endpoint("follow_execution", parameters=(EVENTS,), answers=EVENT_STREAM)
    def get(self, request: Request, execution_id: UUID) -> HttpResponseBase:
        """Follow an execution.

        Sends its events from the first one, or after the one that `after` or `Last-Event-ID` names,
        until the execution has ended. Server-sent events if `text/event-stream` is accepted, else
        lines of JSON.
        """
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
    form = stream_form(request.headers.get("Accept", "")) or NDJSON
    events = EventStream(form, after=after)
    key = request.auth
    if isinstance(key, ApiKey):
        listener = Listener.of_key(key)
    else:
        listener = Listener(f"user:{request.user.pk}")

    async def work() -> HttpResponse:
        await follow(execution_id, events, after, listener)
        execution = _read_execution(execution_id)
        absolute = request.build_absolute_uri
        return json_response(execution_in_full(execution, absolute, fields_of(request)))

    return stream(request, lambda: _send_last_event(view, events, work()), events)


async def _send_last_event(
    view: ApiView, events: EventStream, work: Coroutine[HttpResponse]
) -> HttpResponse:
    """The work, whose answer or error is the last event, where it is not all of the answer."""
    answer: HttpResponse | None = None
    try:
        answer = cast("HttpResponse", (await view.handle_errors(work)))
        return answer
    finally:
        events.end(_last_event(answer))


def _last_event(answer: HttpResponse | None) -> dict[str, Any]:
    if answer is None:
        return {"type": "error", "error": {"code": "internal_error"}}
    if answer.status_code == 200:
        return {"type": "done", DOCUMENT: Document(answer.content)}
    return {"type": "error", **json.loads(answer.content)}


def _read_execution(execution_id: UUID) -> Execution:
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


class ExecutionsView(RunningView):
    bounds = LARGE

    @endpoint(
        "run_execution",
        parameters=(STREAM, CLAIMS, KEY),
        request=RUN,
        answers={200: ExecutionShape, **EVENT_STREAM, 202: ExecutionShape},
        errors=(404, 409, 502),
    )
    def post(self, request: Request) -> HttpResponseBase:
        """Run code.

        200 if the code ran, with any result; 202 if it was queued. With `Accept: text/event-stream`
        or `application/x-ndjson`, the answer is a stream of events: `started`, then each `stdout`,
        `stderr` and `output` when it occurs, and at the end `done` with the execution. If the
        client leaves the stream, the run is cancelled, unless the request has `?detach=1`.
        """
        form = stream_form(request.headers.get("Accept", ""))
        # What is queued is answered at once; its events are followed under its id.
        if form and (wanted := _read(request)).mode == Execution.Mode.SYNC:
            return run_stream(
                self, request, form, lambda log: execute(wanted, self.caller(), log=log)
            )
        return answer(request, self.handle_errors(self._run(request)))

    async def _run(self, request: Request) -> HttpResponse:
        is_detached(request)
        wanted = ensure_listener(_read(request))
        outcome = await execute(wanted, self.caller(), waits=True)
        with keep_outcome(outcome):
            return outcome_response(outcome, request)

    @endpoint("list_executions", parameters=(LIST,), answers={200: ExecutionPageShape})
    def get(self, request: Request) -> HttpResponse:
        """List executions.

        The tenant's executions, newest first, without the fields that can be large.
        """
        page = list_executions(self.api_key.tenant, LIST.read(request.query_params.dict()))
        results = [execution_summary(execution) for execution in page.executions]
        return json_response(page_of(request, results, page.next_cursor))


def _read(request: Request) -> ExecutionRequest:
    wanted = read_run(RUN, request)
    if wanted.session is not None:
        ensure_scopes(request, [Scope.SESSIONS])
    return wanted


def outcome_response(outcome: Outcome, request: Request) -> HttpResponse:
    """What came of a run, or the error that it is recorded with."""
    execution = outcome.execution
    if execution.status == Execution.Status.ERROR:
        return _error(outcome)
    status = 202 if execution.is_open else 200
    detail = execution_in_full(execution, request.build_absolute_uri, fields_of(request))
    response = json_response(detail, status)
    if status == 202:
        response["Location"] = request.build_absolute_uri(reverse("execution", args=[execution.pk]))
    return response


def _error(outcome: Outcome) -> HttpResponse:
    execution = outcome.execution
    return error_response(
        {**CODES, CONFLICT.code: CONFLICT}[execution.error_code].http_status,
        execution.error_code,
        execution.error_message,
        field=execution.error_field or None,
        record_id=str(execution.pk),
        receipt=receipt_of(execution),
        retry_after=outcome.error.retry_after if outcome.error else None,
    )


class ExecutionView(ApiView):
    @endpoint("get_execution", parameters=(FIELDS,), answers={200: ExecutionShape})
    def get(self, request: Request, execution_id: UUID) -> HttpResponse:
        """Get an execution.

        The current record of the execution.
        """
        fields = fields_of(request)
        execution = executions_of(self.api_key.tenant).filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        absolute = request.build_absolute_uri
        return json_response(execution_in_full(execution, absolute, fields))


class CancelView(RunningView):
    @endpoint("cancel_execution", answers={200: ExecutionShape}, errors=(409,))
    @deferred
    async def post(self, request: Request, execution_id: UUID) -> HttpResponse:
        # All of it is sealed with its end.
        """Cancel an execution.

        A queued or running execution ends as `cancelled` and keeps its output until then. A key
        without the scope `read` gets the output of its own runs only.
        """
        mine = executions_of(self.api_key.tenant).defer(None).defer("pending")
        execution = mine.filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        try:
            execution = await cancel(execution, f"key:{self.api_key.prefix}")
        except HasEnded as error:
            return error_response(409, "conflict", error.message, record_id=str(execution_id))
        absolute = request.build_absolute_uri
        return json_response(execution_for(self.api_key, execution, absolute))


class ArtifactView(ApiView):
    @endpoint("get_artifact", answers={(200, "*/*"): BYTES})
    def get(self, request: Request, execution_id: UUID, name: str) -> HttpResponseBase:
        """Download an artifact.

        The bytes of the file, as a download.
        """
        mine = artifacts_of(self.api_key.tenant)
        artifact = mine.filter(execution=execution_id, name=name).first()
        if artifact is None:
            raise Http404
        return download_response(artifact)


class LanguagesView(ApiView):
    @endpoint("list_languages", answers={200: LanguagesShape})
    @deferred
    async def get(self, request: Request) -> HttpResponse:
        """List languages.

        The languages that the caller's providers can run now.
        """
        key = self.api_key
        may_use = partial(key.allows, "providers")
        languages, packages = await languages_for(key.tenant.slug, may_use)
        allowed = extensions.allowed_languages(key.tenant.slug, allowed_languages(key, languages))
        known = packages if "python" in allowed else {}
        has_node = "nodejs" in allowed
        shown: dict[str, PackagesShape] = {
            name: {
                "state": each.state,
                "reason": each.reason,
                "versions": dict(each.versions),
                "node": dict(each.node) if has_node else {},
            }
            for name, each in known.items()
        }
        return json_response(LanguagesShape(languages=list(allowed), packages=shown))


class NothingHereView(ApiView):
    """What an unknown path under `/api/v1/` answers, to anyone."""

    authentication_classes = ()
    permission_classes = ()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        raise Http404


class LedgerKeysView(ApiView):
    """Open to anybody: a receipt is there to be checked by whoever it is shown to."""

    tag = "ledger"
    errors = (400, 503)
    authentication_classes = ()
    permission_classes = ()

    @endpoint("list_ledger_keys", answers={200: LedgerKeysShape})
    def get(self, request: Request) -> HttpResponse:
        """List the public keys of the ledger.

        Store them: a receipt is verified offline, with the key that it names.
        """
        keys: list[LedgerKeyShape] = [
            {"key_id": key.key_id, "algorithm": "Ed25519", "public_key": key.public_key}
            for key in keyring().values()
        ]
        response = json_response(LedgerKeysShape(domain=DOMAIN.decode().strip(), keys=keys))
        response["Cache-Control"] = "public, max-age=300"
        return response


class UsageView(ApiView):
    tag = "usage"

    @endpoint("get_usage", answers={200: UsageShape})
    def get(self, request: Request) -> HttpResponse:
        """Get quotas and usage.

        The quotas of the tenant, with the usage of all of its keys. Each quota has the name that an
        SB008 error gives in `field`. Days are UTC days.
        """
        tenant = self.api_key.tenant
        quotas: dict[str, QuotaShape] = {
            quota.value: {
                "limit": use.limit,
                "used": use.used,
                "resets_at": use.resets_at.isoformat() if use.resets_at else None,
            }
            for quota, use in usage_of(tenant).items()
        }
        return json_response(UsageShape(tenant=tenant.slug, quotas=quotas))
