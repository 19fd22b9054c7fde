"""Executions whose process is gone: their records are ended, so that none stays open for ever."""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from executions.models import Execution
from executions.services import payloads
from executions.services.record import close_record, error_changes, log_execution
from providers.errors import UNAVAILABLE

GRACE = timedelta(seconds=30)

_AT_ONCE = 1000
_NEVER_RUN = "No worker took the execution in time; it was not run."
_LOST = "The process that ran it ended; the code may have run in part."


def end_stale_executions() -> int:
    """End what is open past its deadline and a grace, with SB009. How many were ended."""
    ended = 0
    stale = Execution.objects.filter(finished_at=None, deadline__lt=timezone.now() - GRACE)
    # In the order of the index of open rows: in another one every row there is would be read.
    stale = stale.order_by("tenant_slug", "status", "pk")
    for execution in stale.defer("pending", "code", "arguments")[:_AT_ONCE]:
        queued = execution.status == Execution.Status.QUEUED
        changes = error_changes(UNAVAILABLE.code, _NEVER_RUN if queued else _LOST)
        if close_record(
            execution,
            Execution.Status.ERROR,
            {**changes, "retryable": queued},
            only_if=execution.status,
        ):
            log_execution(execution)
            ended += 1
    payloads.remove_orphans()
    return ended
