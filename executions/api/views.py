"""The native API, `/api/v1`: parse, call a service, render."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import ApiView, RunningView, answered_later
from executions.api.claims import CLAIMS, KEY, read_run
from executions.api.errors import error_response, known_to_run
from executions.api.files import download_response
from executions.api.later import answer
from executions.api.rendering import execution_for, execution_in_full, json_response, next_page
from executions.api.running import (
    FIELDS,
    STREAM,
    fields_of,
    is_detached,
    refuse_unheard,
    run_stream,
)
from executions.api.scopes import require_scopes
from executions.api.streams import wanted_form
from executions.capabilities.policies.enforcement import languages_of
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Waits
from executions.ledger.sealing import receipt_of
from executions.runs.listing import LIST, execution_summary, list_executions
from executions.runs.models import Execution
from executions.runs.record import Outcome
from executions.runs.requests import RUN, ExecutionRequest
from executions.runs.routing import allowed_languages, languages_for
from executions.runs.service import HasEnded, cancelling, running
from executions.sessions.requests import CONFLICT
from executions.tenants.models import Scope
from executions.tenants.tenant_scope import artifacts_of, executions_of
from providers.errors import CODES


class ExecutionsView(RunningView):
    bounds = LARGE

    @extend_schema(
        operation_id="run_execution",
        summary="Run code",
        description="200 if the code ran, with any result; 202 if it was queued. With `Accept: "
        "text/event-stream` or `application/x-ndjson`, the answer is a stream of events: "
        "`started`, then each `stdout`, `stderr` and `output` when it occurs, and at the end "
        "`done` with the execution. If the client leaves the stream, the run is cancelled, unless "
        "the request has `?detach=1`.",
        tags=["executions"],
        parameters=schema.parameters(STREAM, CLAIMS, KEY),
        request=RUN,
        responses={
            **schema.STREAMED_EXECUTION,
            202: schema.ExecutionSerializer,
            **schema.errors(400, 401, 404, 409, 413, 415, 429, 502, 503),
        },
    )
    def post(self, request: Request) -> HttpResponseBase:
        form = wanted_form(request.headers.get("Accept", ""))
        # What is queued is answered at once; its events are followed under its id.
        if form and (wanted := _read(request)).mode == Execution.Mode.SYNC:
            return run_stream(
                self, request, form, lambda log: running(wanted, self.caller(), log=log)
            )
        return answer(request, self.told(self._run(request)))

    def _run(self, request: Request) -> Waits[HttpResponse]:
        is_detached(request)
        wanted = refuse_unheard(_read(request))
        outcome = yield from running(wanted, self.caller(), waits=True)
        with known_to_run(outcome):
            return outcome_response(outcome, request)

    @extend_schema(
        operation_id="list_executions",
        summary="List executions",
        description="The tenant's executions, newest first, without the fields that can be large.",
        tags=["executions"],
        parameters=schema.parameters(LIST),
        responses={200: schema.ExecutionPageSerializer, **schema.errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        page = list_executions(self.api_key.tenant, LIST.read(request.query_params.dict()))
        results = [execution_summary(execution) for execution in page.executions]
        return json_response(
            {"results": results, "next": next_page(request, cursor=page.next_cursor)}
        )


def _read(request: Request) -> ExecutionRequest:
    wanted = read_run(RUN, request)
    if wanted.session is not None:
        require_scopes(request, [Scope.SESSIONS])
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
    @extend_schema(
        operation_id="get_execution",
        summary="Get an execution",
        description="The current record of the execution.",
        tags=["executions"],
        parameters=[
            OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            *schema.parameters(FIELDS),
        ],
        responses={200: schema.ExecutionSerializer, **schema.errors(401, 404)},
    )
    def get(self, request: Request, execution_id: UUID) -> HttpResponse:
        fields = fields_of(request)
        execution = executions_of(self.api_key.tenant).filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        absolute = request.build_absolute_uri
        return json_response(execution_in_full(execution, absolute, fields))


class CancelView(RunningView):
    @extend_schema(
        operation_id="cancel_execution",
        summary="Cancel an execution",
        description="A queued or running execution ends as `cancelled` and keeps its output until "
        "then. A key without the scope `read` gets the output of its own runs only.",
        tags=["executions"],
        parameters=[OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH)],
        request=None,
        responses={200: schema.ExecutionSerializer, **schema.errors(401, 404, 409, 503)},
    )
    @answered_later
    def post(self, request: Request, execution_id: UUID) -> Waits[HttpResponse]:
        # All of it is sealed with its end.
        mine = executions_of(self.api_key.tenant).defer(None).defer("pending")
        execution = mine.filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        try:
            execution = yield from cancelling(execution, f"key:{self.api_key.prefix}")
        except HasEnded as error:
            return error_response(409, "conflict", error.message, record_id=str(execution_id))
        absolute = request.build_absolute_uri
        return json_response(execution_for(self.api_key, execution, absolute))


class ArtifactView(ApiView):
    @extend_schema(
        operation_id="get_artifact",
        summary="Download an artifact",
        description="The bytes of the file, as a download.",
        tags=["executions"],
        parameters=[
            OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            OpenApiParameter("name", str, OpenApiParameter.PATH),
        ],
        responses={(200, "*/*"): OpenApiTypes.BINARY, **schema.errors(401, 404)},
    )
    def get(self, request: Request, execution_id: UUID, name: str) -> HttpResponseBase:
        mine = artifacts_of(self.api_key.tenant)
        artifact = mine.filter(execution=execution_id, name=name).first()
        if artifact is None:
            raise Http404
        return download_response(artifact)


class LanguagesView(ApiView):
    @extend_schema(
        operation_id="list_languages",
        summary="List languages",
        description="The languages that the caller's providers can run now.",
        tags=["executions"],
        responses={200: schema.LanguagesSerializer, **schema.errors(401, 503)},
    )
    @answered_later
    def get(self, request: Request) -> Waits[HttpResponse]:
        key = self.api_key
        may_use = partial(key.allows, "providers")
        languages, packages = yield from languages_for(key.tenant.slug, may_use)
        allowed = languages_of(key.tenant.slug, allowed_languages(key, languages))
        known = packages if "python" in allowed else {}
        return json_response(
            {"languages": allowed, "packages": {name: asdict(each) for name, each in known.items()}}
        )


@extend_schema(exclude=True)
class NothingHereView(ApiView):
    """What an unknown path under `/api/v1/` answers, to anyone."""

    authentication_classes = ()
    permission_classes = ()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        raise Http404
