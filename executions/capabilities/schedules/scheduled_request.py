"""What a schedule has run each time: the body of a request for an execution, but how and when."""

from __future__ import annotations

from typing import Any

from executions.kernel.declarations import Body, refuse
from executions.kernel.text import to_json
from executions.runs.payloads import LARGE_BYTES
from executions.runs.requests import API_ENTRYPOINTS, TOOLS_IN_THESE, ExecutionRequest
from providers.errors import InvalidConfiguration

SCHEDULED = Body(
    ExecutionRequest,
    "ScheduledExecution",
    ours=(
        *("subject", "background", "usual_timeout", "traceparent", "mode", "run_at"),
        *("idempotency_key", "session", "context", "env", "provider"),
    ),
    only={"entrypoint": API_ENTRYPOINTS},
    says=TOOLS_IN_THESE,
)


def read_scheduled(body: Any) -> ExecutionRequest:
    """Raises InvalidConfiguration, which names the field at fault within `request`."""
    try:
        wanted = SCHEDULED.read(body, mode="async")
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"request.{error.message}", field="request") from None
    if len(to_json(body).encode()) > LARGE_BYTES:
        refuse("request", f"Must be at most {LARGE_BYTES} bytes of JSON.")
    return wanted
