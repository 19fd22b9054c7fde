"""`POST /v1/execute`, for clients of Agent Sandbox: code in, its output as one text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils.decorators import method_decorator
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.request import Request

from executions.api import schema
from executions.api.base import ApiView
from executions.api.errors import render_error
from executions.api.later import answer
from executions.api.rendering import json_response
from executions.models import Execution
from executions.services.artifacts import make_token
from executions.services.requests import ExecutionRequest, refuse
from executions.services.run import running
from executions.services.waiting import Waits
from providers.errors import InvalidConfiguration, SandboxError

DEFAULT_EXPIRY = 300
MAX_EXPIRY = 7 * 24 * 3600

_KEYS = ("user_id", "session_id", "code", "inputs", "presign_expires_in")


@method_decorator(transaction.non_atomic_requests, name="dispatch")
class AgentSandboxExecuteView(ApiView):
    @extend_schema(
        operation_id="agent_sandbox_execute",
        summary="Run Python code, in the shape of Agent Sandbox",
        description="The last expression's value is printed. A failure of the service is a 200 "
        "with `error`, as that API has it. The header `X-Execution-ID` names the record, whose "
        "receipt `GET /api/v1/executions/{id}` gives.",
        tags=["Agent Sandbox"],
        request=schema.AgentSandboxRequestSerializer,
        responses={
            200: schema.AgentSandboxAnswerSerializer,
            400: OpenApiResponse(schema.DetailSerializer, "The request is refused."),
            401: OpenApiResponse(schema.DetailSerializer, "Invalid API key"),
        },
    )
    def post(self, request: Request) -> HttpResponseBase:
        return answer(request, self.told(self._run(request)))

    def _run(self, request: Request) -> Waits[HttpResponse]:
        wanted, expires_in = _parse(request.data)
        try:
            execution = (yield from running(wanted, self.caller())).execution
        except SandboxError as error:
            refused = json_response({"error": f"{error.code}: {error.message}"})
            if error.retry_after is not None:
                refused["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
            return refused
        response = json_response(self._body(execution, request, expires_in))
        response["X-Execution-ID"] = str(execution.pk)
        return response

    def _body(self, execution: Execution, request: Request, expires_in: int) -> dict[str, Any]:
        if execution.status == Execution.Status.ERROR:
            return {"error": f"{execution.error_code}: {execution.error_message}"}
        artifacts = [
            {
                "path": f"artifacts/{artifact.name}",
                "size_bytes": artifact.size_bytes,
                "mime_type": artifact.mime_type,
                "download_url": request.build_absolute_uri(
                    reverse("signed-artifact", args=[make_token(artifact, expires_in)])
                ),
            }
            for artifact in (execution.artifacts.all() if execution.artifact_count else ())
        ]
        return {"output": _output(execution), "artifacts": artifacts}

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return _render_error


def _parse(body: Any) -> tuple[ExecutionRequest, int]:
    if not isinstance(body, dict):
        refuse("body", "Must be a JSON object.")
    for key in body:
        if key not in _KEYS:
            refuse("body", f"Unknown key. Known are: {', '.join(_KEYS)}.")
    if body.get("session_id") is not None:
        refuse("session_id", "Persistent sessions are not offered yet. Leave it out.")
    if body.get("inputs"):
        refuse("inputs", "Input files need a session, which is not offered yet. Leave it out.")
    user_id = body.get("user_id")
    if not isinstance(user_id, str) or not user_id:
        refuse("user_id", "Must be a string that is not empty.")
    expires_in = body.get("presign_expires_in")
    if expires_in is None:
        expires_in = DEFAULT_EXPIRY
    if type(expires_in) is not int or not 1 <= expires_in <= MAX_EXPIRY:
        refuse("presign_expires_in", f"Must be a whole number of seconds, 1 to {MAX_EXPIRY}.")
    try:
        wanted = ExecutionRequest(body.get("code", ""), entrypoint="repl", subject=user_id)
    except InvalidConfiguration as error:
        if error.field == "subject":
            refuse("user_id", error.message.removeprefix("subject: "))
        raise
    return wanted, expires_in


def _output(execution: Execution) -> str:
    output = execution.stdout + execution.stderr
    if execution.stdout_truncated or execution.stderr_truncated:
        output = _line(output, "[output truncated]")
    if execution.error_code:
        output = _line(output, f"{execution.error_code}: {execution.error_message}")
    return output


def _line(output: str, line: str) -> str:
    separator = "" if not output or output.endswith("\n") else "\n"
    return f"{output}{separator}{line}\n"


def _render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    response = render_error(exc, context)
    if isinstance(exc, (AuthenticationFailed, NotAuthenticated)):
        detail = "Invalid API key"
    elif isinstance(exc, SandboxError):
        detail = exc.message
    else:
        detail = str(exc.detail) if isinstance(exc, APIException) else "The request failed."
    answer = json_response({"detail": detail}, response.status_code)
    for name in ("WWW-Authenticate", "Allow"):
        if name in response:
            answer[name] = response[name]
    return answer
