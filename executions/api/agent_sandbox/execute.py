"""`POST /v1/execute`: code in, its output as one text out, and links to what it has made."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request

from executions.api import schema
from executions.api.agent_sandbox.base import TAGS, AgentSandboxView, failed, file_details
from executions.api.agent_sandbox.requests import EXECUTE, ExecuteRequest, seconds_of
from executions.api.base import answered_later
from executions.api.claims import CLAIMS, claims_of
from executions.api.errors import known_to_run
from executions.api.rendering import json_response
from executions.kernel.bodies import LARGE
from executions.kernel.coroutines import Waits
from executions.kernel.database import DatabaseAway
from executions.kernel.text import storable
from executions.runs.models import Execution
from executions.runs.results import bundles_of
from executions.runs.service import running
from executions.services import conversations
from executions.services.conversations import path_of
from providers.errors import SandboxError
from providers.guest.display import TEXT_LIMIT

_FIGURE = re.compile(r"<Figure size \S+ with \d+ Axes>")


class ExecuteView(AgentSandboxView):
    bounds = LARGE

    @extend_schema(
        operation_id="agent_sandbox_execute",
        summary="Run Python code in a conversation, in the format of Agent Sandbox",
        description="Variables and files are kept for the next call. The value of the last "
        "expression is printed. If the service fails, the answer is a 200 with `error`, as Agent "
        "Sandbox answers. The header `X-Execution-ID` has the id of the execution; `GET "
        "/api/v1/executions/{id}` returns its receipt.",
        tags=TAGS,
        parameters=schema.parameters(CLAIMS),
        request=EXECUTE,
        responses={
            200: schema.AgentSandboxAnswerSerializer,
            **schema.details(401, 413, 415),
            503: OpenApiResponse(schema.AgentSandboxAwaySerializer, "Nothing can be recorded now."),
        },
    )
    @answered_later
    def post(self, request: Request) -> Waits[HttpResponse]:
        wanted: ExecuteRequest = EXECUTE.read(request.data)
        # That API's own examples name them from the root, which is their folder.
        inputs = [path_of("inputs", each.lstrip("/")) for each in wanted.inputs]
        claims = claims_of(request)
        caller = self.caller()
        try:
            session = yield from conversations.held(caller, wanted.conversation)
            if away := conversations.missing(session, inputs):
                return json_response({"error": f"inputs: There is no file {storable(away[0])!r}."})
            cell = conversations.cell(session, wanted.code, **claims)
            outcome = yield from running(cell, caller)
        except DatabaseAway:
            raise
        except SandboxError as error:
            return failed(error)
        execution = outcome.execution
        with known_to_run(outcome):
            response = json_response(self._body(request, execution, wanted))
        response["X-Execution-ID"] = str(execution.pk)
        return response

    def _body(
        self, request: Request, execution: Execution, wanted: ExecuteRequest
    ) -> dict[str, Any]:
        if execution.status == Execution.Status.ERROR:
            return {"error": f"{execution.error_code}: {execution.error_message}"}
        expires_in = seconds_of(wanted.presign_expires_in)
        return {
            "output": _output(execution),
            "artifacts": file_details(
                request, self.api_key.tenant, conversations.made_by(execution), expires_in
            ),
        }


def _output(execution: Execution) -> str:
    """What was printed, the value of the last expression, and what went wrong, in this order."""
    output = execution.stdout
    values = _values(execution)
    for value in values:
        output = _line(output, value)
    output += execution.stderr
    encoded = output.encode()
    most = settings.AGENT_SANDBOX.output_bytes
    is_cut = (
        execution.stdout_truncated
        or execution.stderr_truncated
        or len(encoded) > most
        or any(len(value) >= TEXT_LIMIT for value in values)
        or bool(execution.meta.get("outputs_skipped"))
    )
    if is_cut:
        output = _line(encoded[:most].decode("utf-8", "ignore"), "[output truncated]")
    if execution.error_code:
        output = _line(output, f"{execution.error_code}: {execution.error_message}")
    if execution.files_saved is False:
        output = _line(output, "[files not saved: the session says why]")
    return output


def _values(execution: Execution) -> list[str]:
    """What was shown, as text. A figure is none: there, drawing one prints nothing."""
    outputs = bundles_of(execution)
    texts = [each["text/plain"] for each in outputs if isinstance(each.get("text/plain"), str)]
    return [text for text in texts if not _FIGURE.fullmatch(text)]


def _line(output: str, line: str) -> str:
    separator = "" if not output or output.endswith("\n") else "\n"
    return f"{output}{separator}{line}\n"
