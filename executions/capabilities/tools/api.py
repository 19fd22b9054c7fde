"""Calls that running code makes of its caller's tools: asked for, and answered."""

from __future__ import annotations

from typing import TypedDict
from uuid import UUID

from django.http import Http404, HttpResponse
from rest_framework.request import Request

from executions.capabilities.tools.calls import (
    ToolCallShape,
    answer_call,
    describe,
    described,
    look_now,
    tool_calls_of,
)
from executions.doors.native.frame import ApiView
from executions.doors.native.rendering import json_response
from executions.doors.native.schema import endpoint
from executions.kernel.bodies import LARGE
from executions.runs.results import executions_of
from executions.runs.tool_schemas import TOOL_ANSWER


class ToolCallsShape(TypedDict):
    results: list[ToolCallShape]


class ToolCallsView(ApiView):
    @endpoint("list_tool_calls", answers={200: ToolCallsShape})
    def get(self, request: Request, execution_id: UUID) -> HttpResponse:
        """List the tool calls of an execution.

        In the order of the calls. The arguments of a call that waits for approval are shown once it
        is approved.
        """
        tenant = self.api_key.tenant
        execution = executions_of(tenant).filter(pk=execution_id).only("finished_at").first()
        if execution is None:
            raise Http404
        found = tool_calls_of(tenant).filter(execution=execution_id).order_by("pk")
        return json_response(ToolCallsShape(results=described(execution, list(found))))


class ToolCallView(ApiView):
    bounds = LARGE

    @endpoint("answer_tool_call", request=TOOL_ANSWER, answers={200: ToolCallShape}, errors=(409,))
    def post(self, request: Request, execution_id: UUID, call_id: UUID) -> HttpResponse:
        """Answer a tool call.

        Only the key that runs the code can answer, and only once: sending the same answer again has
        no effect. 409 if the call does not wait for an answer.
        """
        key = self.api_key
        execution = executions_of(key.tenant).filter(pk=execution_id).first()
        answer = TOOL_ANSWER.read(request.data)
        call = answer_call(execution, call_id, key, answer.text) if execution else None
        if call is None:
            raise Http404
        look_now()
        return json_response(describe(call))
