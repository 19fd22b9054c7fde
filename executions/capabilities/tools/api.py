"""Calls that running code makes of its caller's tools: asked for, and answered."""

from __future__ import annotations

from typing import TypedDict
from uuid import UUID

from django.http import Http404, HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request

from executions.capabilities.tools.calls import ToolCallShape, answer_call, describe, described
from executions.capabilities.tools.declarations import TOOL_ANSWER
from executions.capabilities.tools.dispatcher import look_now
from executions.doors.native import schema
from executions.doors.native.frame import ApiView
from executions.doors.native.rendering import json_response
from executions.kernel.bodies import LARGE
from executions.tenants.tenant_scope import executions_of, tool_calls_of

EXECUTION = OpenApiParameter("execution_id", OpenApiTypes.UUID, OpenApiParameter.PATH)


class ToolCallsShape(TypedDict):
    results: list[ToolCallShape]


class ToolCallsView(ApiView):
    @extend_schema(
        operation_id="list_tool_calls",
        summary="List the tool calls of an execution",
        description="In the order of the calls. The arguments of a call that waits for approval "
        "are shown once it is approved.",
        tags=["executions"],
        parameters=[EXECUTION],
        responses={200: ToolCallsShape, **schema.errors(401, 404)},
    )
    def get(self, request: Request, execution_id: UUID) -> HttpResponse:
        tenant = self.api_key.tenant
        execution = executions_of(tenant).filter(pk=execution_id).only("finished_at").first()
        if execution is None:
            raise Http404
        found = tool_calls_of(tenant).filter(execution=execution_id).order_by("pk")
        return json_response(ToolCallsShape(results=described(execution, list(found))))


class ToolCallView(ApiView):
    bounds = LARGE

    @extend_schema(
        operation_id="answer_tool_call",
        summary="Answer a tool call",
        description="Only the key that runs the code can answer, and only once: sending the same "
        "answer again has no effect. 409 if the call does not wait for an answer.",
        tags=["executions"],
        parameters=[
            EXECUTION,
            OpenApiParameter("call_id", OpenApiTypes.UUID, OpenApiParameter.PATH),
        ],
        request=TOOL_ANSWER,
        responses={200: ToolCallShape, **schema.errors(400, 401, 403, 404, 409, 413, 415)},
    )
    def post(self, request: Request, execution_id: UUID, call_id: UUID) -> HttpResponse:
        key = self.api_key
        execution = executions_of(key.tenant).filter(pk=execution_id).first()
        answer = TOOL_ANSWER.read(request.data)
        call = answer_call(execution, call_id, key, answer.text) if execution else None
        if call is None:
            raise Http404
        look_now()
        return json_response(describe(call))
