"""Handing a recorded execution to a worker."""

from __future__ import annotations

import logging

from django.db import transaction
from django.utils import timezone
from django_q.tasks import async_task

from executions.models import Execution
from executions.services.record import Outcome, close_unrun, deadline_after
from providers.errors import ProviderUnavailable

logger = logging.getLogger(__name__)

TASK = "executions.tasks.run_queued_execution"


def enqueue(execution: Execution) -> Outcome:
    """Send the id to the workers once the row is committed. The request itself stays in the row."""
    try:
        transaction.on_commit(lambda: async_task(TASK, str(execution.pk)))
    except Exception:
        logger.exception("execution %s could not be queued", execution.pk)
        error = ProviderUnavailable("The queue cannot be reached. Try again or use mode sync.")
        return close_unrun(execution, error)
    return Outcome(execution)


def claim(execution_id: str) -> Execution | None:
    """The execution, now running and the caller's to run; None when it is not to be run.

    A queue may deliver a task twice. The conditional update lets one delivery win.
    """
    execution = Execution.objects.filter(pk=execution_id, status=Execution.Status.QUEUED).first()
    if execution is None:
        return None
    started_at, deadline = timezone.now(), deadline_after(execution.timeout)
    claimed = Execution.objects.filter(pk=execution_id, status=Execution.Status.QUEUED).update(
        status=Execution.Status.RUNNING, started_at=started_at, deadline=deadline
    )
    if not claimed:
        return None
    execution.status = Execution.Status.RUNNING
    execution.started_at, execution.deadline = started_at, deadline
    return execution
