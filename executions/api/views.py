"""The native API, `/api/v1`: parse, call a service, render."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import transaction
from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils.decorators import method_decorator
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import ApiView
from executions.api.errors import error_response
from executions.api.files import download_response
from executions.api.later import answer
from executions.api.rendering import execution_detail, execution_summary, json_response
from executions.models import Artifact, Execution
from executions.services.ledger import receipt_of
from executions.services.listing import ExecutionFilter, list_executions
from executions.services.record import Outcome
from executions.services.requests import request_from_json
from executions.services.routing import languages_for
from executions.services.run import running
from executions.services.waiting import Waits
from providers.errors import CODES


# The row of an attempt must be committed before anything runs.
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class ExecutionsView(ApiView):
    @extend_schema(
        operation_id="run_execution",
        summary="Run code",
        description="200 when the code ran, whatever came of it; 202 when it was queued.",
        tags=["executions"],
        request=schema.ExecutionRequestSerializer,
        responses={
            200: schema.ExecutionSerializer,
            202: schema.ExecutionSerializer,
            **schema.errors(400, 401, 409, 413, 415, 429, 502, 503),
        },
    )
    def post(self, request: Request) -> HttpResponseBase:
        return answer(request, self.told(self._run(request)))

    def _run(self, request: Request) -> Waits[HttpResponse]:
        outcome = yield from running(request_from_json(request.data), self.caller())
        return self._answer(outcome, request)

    @extend_schema(
        operation_id="list_executions",
        summary="List executions",
        description="The tenant's own, newest first, without what may be large.",
        tags=["executions"],
        parameters=[
            OpenApiParameter("status", str, enum=Execution.Status.values),
            OpenApiParameter("language", str),
            OpenApiParameter("provider", str),
            OpenApiParameter("limit", int, description="1 to 200, 50 by default."),
            OpenApiParameter("cursor", str, description="Where the previous page said to go on."),
        ],
        responses={200: schema.ExecutionPageSerializer, **schema.errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        query = request.query_params.dict()
        page = list_executions(self.api_key.tenant, ExecutionFilter.from_query(query))
        following = None
        if page.next_cursor:
            again = request.query_params.copy()
            again["cursor"] = page.next_cursor
            following = request.build_absolute_uri(f"{request.path}?{again.urlencode()}")
        results = [execution_summary(execution) for execution in page.executions]
        return json_response({"results": results, "next": following})

    def _answer(self, outcome: Outcome, request: Request) -> HttpResponse:
        execution = outcome.execution
        if execution.status == Execution.Status.ERROR:
            return self._error(outcome)
        status = 202 if execution.is_open else 200
        detail = execution_detail(execution, request.build_absolute_uri)
        response = json_response(detail, status)
        if status == 202:
            response["Location"] = request.build_absolute_uri(
                reverse("execution", args=[execution.pk])
            )
        return response

    def _error(self, outcome: Outcome) -> HttpResponse:
        """The error as it is recorded."""
        execution = outcome.execution
        return error_response(
            CODES[execution.error_code].http_status,
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
        summary="One execution",
        description="What is recorded of it by now.",
        tags=["executions"],
        parameters=[OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH)],
        responses={200: schema.ExecutionSerializer, **schema.errors(401, 404)},
    )
    def get(self, request: Request, execution_id: UUID) -> HttpResponse:
        execution = (
            Execution.objects.defer("pending", "code", "arguments")
            .filter(pk=execution_id, tenant=self.api_key.tenant_id)
            .first()
        )
        if execution is None:
            raise Http404
        return json_response(execution_detail(execution, request.build_absolute_uri))


class ArtifactView(ApiView):
    @extend_schema(
        operation_id="get_artifact",
        summary="Download an artifact",
        description="Its bytes, as a file to be saved.",
        tags=["executions"],
        parameters=[
            OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
            OpenApiParameter("name", str, OpenApiParameter.PATH),
        ],
        responses={(200, "*/*"): OpenApiTypes.BINARY, **schema.errors(401, 404)},
    )
    def get(self, request: Request, execution_id: UUID, name: str) -> HttpResponseBase:
        artifact = Artifact.objects.filter(
            execution=execution_id, execution__tenant=self.api_key.tenant_id, name=name
        ).first()
        if artifact is None:
            raise Http404
        return download_response(artifact)


class LanguagesView(ApiView):
    @extend_schema(
        operation_id="list_languages",
        summary="List languages",
        description="What the providers that would serve the caller can run now.",
        tags=["executions"],
        responses={200: schema.LanguagesSerializer, **schema.errors(401, 503)},
    )
    def get(self, request: Request) -> HttpResponse:
        return json_response({"languages": languages_for(self.api_key.tenant.slug)})


@extend_schema(exclude=True)
class NothingHereView(ApiView):
    """What an unknown path under `/api/v1/` answers, to anyone."""

    authentication_classes = ()
    permission_classes = ()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        raise Http404
