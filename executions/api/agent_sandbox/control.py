"""Starting a conversation's interpreter anew, ending its sandbox, and whether we are there."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.agent_sandbox.base import TAGS, AgentSandboxView
from executions.api.agent_sandbox.requests import CONVERSATION
from executions.api.base import answered_later
from executions.api.rendering import json_response
from executions.kernel.coroutines import Waits
from executions.kernel.database import DatabaseAway
from executions.services import conversations
from executions.sessions.control import resetting
from executions.sessions.ending import close
from providers.errors import SandboxError


class ResetView(AgentSandboxView):
    @extend_schema(
        operation_id="agent_sandbox_reset",
        summary="Reset a conversation: delete its variables, keep its files",
        tags=TAGS,
        request=CONVERSATION,
        responses={200: schema.AgentSandboxStatusSerializer, **schema.details(401, 413, 415)},
    )
    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        conversation = CONVERSATION.read(request.data).conversation
        try:
            session = yield from conversations.held(self.caller(), conversation)
            yield from resetting(session, f"key:{self.api_key.prefix}")
        except DatabaseAway:
            raise
        except SandboxError as error:
            return json_response({"status": "error", "message": f"{error.code}: {error.message}"})
        return json_response(
            {"status": "success", "output": "Kernel reset.\n", "container_id": str(session.pk)}
        )


class StopView(AgentSandboxView):
    @extend_schema(
        operation_id="agent_sandbox_stop",
        summary="End a conversation's sandbox",
        description="Its files are deleted too, unless DELETE_S3_ON_CLEANUP=0 keeps them for the "
        "next sandbox.",
        tags=TAGS,
        request=CONVERSATION,
        responses={200: schema.AgentSandboxStatusSerializer, **schema.details(401, 413, 415)},
    )
    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        conversation = CONVERSATION.read(request.data).conversation
        session = conversations.find(self.api_key.tenant, conversation)
        if session is not None:
            yield from close(session, f"key:{self.api_key.prefix}")
        return json_response({"status": "success"})


@require_GET
def health(request: HttpRequest) -> HttpResponse:
    return json_response({"status": "ok"})
