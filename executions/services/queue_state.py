"""Whether what is queued is being worked on: how much waits, since when, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.utils.translation import ngettext

from executions.models import Approval, Execution, Process
from executions.services.queue import takeable
from executions.services.record import QUEUE_ALLOWANCE

COUNTED = 1000
_TENANTS = 50


@dataclass(frozen=True)
class QueueState:
    """`waiting` counts what a worker could take now, to COUNTED; `waited_seconds` is of the one
    that waits for longest."""

    waiting: int
    waited_seconds: float
    workers: int

    def problem(self, most_seconds: float) -> str:
        """Why nobody seems to work on it; "" while all is well."""
        if self.waiting and not self.workers:
            are = ngettext("%d execution is", "%d executions are", self.waiting) % self.waiting
            return f"{are} queued, and no worker is running."
        if self.waited_seconds > most_seconds:
            return (
                f"An execution has been queued for {self.waited_seconds:.0f} s, and {self.waiting} "
                f"wait for {self.workers} workers."
            )
        return ""


def queue_state(now: datetime) -> QueueState:
    """What is left waiting because its tenant runs as many as it may is nobody's fault, and is not
    counted."""
    workers = Process.objects.filter(kind=Process.Kind.WORKER, ended_at=None, draining=False)
    if not (tenants := takeable()[:_TENANTS]):
        return QueueState(0, 0.0, workers.count())
    held = Approval.objects.filter(status=Approval.Status.WAITING).values("execution")
    queued = Execution.objects.filter(
        Q(run_at=None) | Q(run_at__lte=now),
        status=Execution.Status.QUEUED,
        finished_at=None,
        tenant_slug__in=tenants,
    ).exclude(pk__in=held)
    rows = queued.order_by("pk").values_list("created_at", "run_at", "deadline")[:COUNTED]
    # The deadline is moved when it is approved, or goes back to the queue.
    since = [max(run_at or made, deadline - QUEUE_ALLOWANCE) for made, run_at, deadline in rows]
    waited = [(now - each).total_seconds() for each in since]
    return QueueState(len(waited), max([0.0, *waited]), workers.count())
