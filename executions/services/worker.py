"""What a worker does with an execution it is handed."""

from __future__ import annotations

import logging
from time import perf_counter

from django.utils import timezone

from executions.models import Execution
from executions.services.queue import claim
from executions.services.record import Outcome, close_unrun
from executions.services.requests import ExecutionRequest
from executions.services.routing import Route, steps_for
from executions.services.run import carry_out
from executions.services.waiting import wait_for
from providers.errors import SandboxError

logger = logging.getLogger(__name__)


def run_queued(execution_id: str, *, route: Route | None = None) -> Outcome | None:
    """Run a queued execution by the same path as a synchronous one; None when it is not queued."""
    execution = claim(execution_id)
    if execution is None:
        logger.info("execution %s is not queued any more", execution_id)
        return None
    began = perf_counter()
    try:
        request = ExecutionRequest.from_stored(execution.pending)
    except SandboxError as error:
        # The limits may have been lowered since it was queued.
        return close_unrun(execution, error)
    return wait_for(
        carry_out(
            execution,
            request,
            steps_for(request.language, execution.tenant_slug, route),
            began=began,
            waited_ms=_waited_ms(execution),
        )
    )


def _waited_ms(execution: Execution) -> float:
    waited = timezone.now() - execution.created_at
    return max(0.0, round(waited.total_seconds() * 1000, 3))
