"""Whether what is queued is being worked on: how much waits, since when, and for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Max, Q, QuerySet
from django.utils.translation import ngettext

from executions.models.execution import Execution
from executions.models.process import Process
from executions.services.queue import WAITS_FOR_APPROVAL, takeable
from executions.services.record import QUEUE_ALLOWANCE

COUNTED = 1000
_TENANTS = 50


@dataclass(frozen=True)
class QueueState:
    """`waiting` counts what a worker could take now, to COUNTED; `waited_seconds` is of the one
    that waits for longest, and `idle_seconds` since when nothing was taken, as far as is known."""

    waiting: int
    waited_seconds: float
    workers: int
    idle_seconds: float = math.inf

    def problem(self, most_seconds: float) -> str:
        """Why nobody seems to work on it; "" while all is well."""
        if self.waiting and not self.workers:
            are = ngettext("%d execution is", "%d executions are", self.waiting) % self.waiting
            return f"{are} queued, and no worker is running."
        if min(self.waited_seconds, self.idle_seconds) > most_seconds:
            return (
                f"An execution has been queued for {self.waited_seconds:.0f} s, and nothing was "
                f"taken for {most_seconds:.0f} s (queued: {self.waiting}, workers: {self.workers})."
            )
        return ""


def queue_state(now: datetime) -> QueueState:
    """What is left waiting because its tenant runs as many as it may is nobody's fault, and is not
    counted; nor, where workers are, that of a tenant for whom they run something: one alone has a
    part of each."""
    workers = Process.objects.filter(kind=Process.Kind.WORKER, ended_at=None, draining=False)
    number = workers.count()
    busy = _served_by(workers, now) if number else set()
    tenants = [slug for slug in takeable() if slug not in busy][:_TENANTS]
    if not tenants:
        return QueueState(0, 0.0, number)
    queued = Execution.objects.filter(
        ~WAITS_FOR_APPROVAL,
        Q(run_at=None) | Q(run_at__lte=now),
        status=Execution.Status.QUEUED,
        finished_at=None,
        tenant_slug__in=tenants,
    )
    rows = queued.order_by("pk").values_list("created_at", "run_at", "deadline")[:COUNTED]
    # The deadline is moved when it is approved, or goes back to the queue.
    since = [max(run_at or made, deadline - QUEUE_ALLOWANCE) for made, run_at, deadline in rows]
    waited = [(now - each).total_seconds() for each in since]
    return QueueState(len(waited), max([0.0, *waited]), number, _idle_seconds(now))


def _served_by(workers: QuerySet[Process], now: datetime) -> set[str]:
    """The tenants of whom they run something that may still run: a thread that hangs is no work."""
    runs = Execution.objects.filter(
        process__in=workers.values("pk"), finished_at=None, deadline__gte=now
    )
    return set(runs.order_by().values_list("tenant_slug", flat=True))


def _idle_seconds(now: datetime) -> float:
    """Since when nothing was taken from the queue, by what runs and by the newest that ended."""
    running = Execution.objects.filter(
        process__isnull=False, mode=Execution.Mode.ASYNC, finished_at=None
    )
    newest = Execution.objects.order_by("-pk")[:COUNTED]
    queued = Q(mode=Execution.Mode.ASYNC)
    times = (
        running.aggregate(at=Max("started_at"))["at"],
        newest.aggregate(at=Max("started_at", filter=queued))["at"],
    )
    return min(((now - at).total_seconds() for at in times if at), default=math.inf)
