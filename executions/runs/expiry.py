"""Executions that nobody will run or end: their records are ended, and none stays open for ever.

What a process runs is not among them, whatever any clock says: it ends with its process
(`runs.process_reaper`) or by it (`runs.heartbeat`).
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q
from django.db.models.functions import Now

from executions.runs import payloads
from executions.runs.models import Approval, Execution
from executions.runs.process_reaper import mark_lost

# Of a row that is no process's, whose process has no row any more, the deadline decides.
GRACE = timedelta(seconds=30)
# What is queued has an hour, and the clock it is compared with may be ahead by so much.
QUEUE_GRACE = timedelta(minutes=10)

_AT_ONCE = 1000
_NEVER_RUN = "No worker took the execution in time; it was not run."
_NOT_APPROVED = "No one approved the execution in time; it was not run."
_LOST = "The process that ran it ended; the code may have run in part."

_NOT_TAKEN = Q(status=Execution.Status.QUEUED, deadline__lt=Now() - QUEUE_GRACE)
_NOBODYS = Q(status=Execution.Status.RUNNING, process=None, deadline__lt=Now() - GRACE)


def end_stale_executions() -> int:
    """End what is open past its deadline and a grace, with SB009. How many were ended.

    The time is the database's, so that a host's clock decides nothing where there are several.
    """
    ended = 0
    stale = Execution.objects.filter(_NOT_TAKEN | _NOBODYS, finished_at=None)
    # In the order of the index of open rows: in another one every row there is would be read.
    stale = stale.order_by("tenant_slug", "status", "priority", "pk")
    for execution in stale.defer("pending", "code", "arguments")[:_AT_ONCE]:
        queued = execution.status == Execution.Status.QUEUED
        why = _NEVER_RUN if queued else _LOST
        if queued and Approval.objects.filter(execution=execution.pk, status="waiting").exists():
            why = _NOT_APPROVED
        ended += mark_lost(execution, why, retryable=queued)
    payloads.remove_orphans()
    return ended
