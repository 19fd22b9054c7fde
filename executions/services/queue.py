"""The queue of executions that wait for a worker: the open rows themselves, served in turn.

What a broker delivers only says that there is something to run. Which row is next is decided when
one can be run: the tenant's who runs the fewest now, of these the one's whose turn is longest ago,
and of a tenant's the oldest. So it does not matter how many one tenant has sent before another.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from uuid import UUID

from django.db import transaction
from django.db.models import Count
from django.utils import timezone
from django_q.tasks import async_task

from executions.models import Execution
from executions.services.admission import bound_on_running, counted_alone, may_claim
from executions.services.disk import disk_problem
from executions.services.record import Outcome, close_unrun, deadline_after
from providers.errors import ProviderUnavailable
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

TASK = "executions.tasks.run_queued_execution"

# When this process last served each tenant. Another process has turns of its own.
_turns: dict[str, int] = {}
_next_turn = itertools.count(1)
_told = ""


def enqueue(execution: Execution) -> Outcome:
    """Tell the workers once the row is committed. The request itself stays with the row."""
    try:
        transaction.on_commit(lambda: async_task(TASK, str(execution.pk)))
    except Exception:
        logger.exception("execution %s could not be queued", execution.pk)
        error = ProviderUnavailable("The queue cannot be reached. Try again or use mode sync.")
        return close_unrun(execution, error)
    return Outcome(execution)


def claim_next(may_serve: Callable[[str], bool] = lambda tenant_slug: True) -> Execution | None:
    """The execution whose turn it is, now running and the caller's to run; None when there is none.

    Left in the queue are those of tenants that run as many as they may, or whom `may_serve` passes
    over, and all of them while the disk is nearly full.
    """
    for tenant_slug in _in_turn():
        if not may_serve(tenant_slug):
            continue
        if _is_held_up():
            return None
        with counted_alone(tenant_slug):
            execution = _claim_oldest(tenant_slug) if may_claim(tenant_slug) else None
        if execution is not None:
            _turns[tenant_slug] = next(_next_turn)
            return execution
    return None


def claim(execution_id: UUID | str) -> Execution | None:
    """This execution, now running and the caller's to run; None when it is not to be run.

    Several workers may want the same one. The conditional update lets one of them win.
    """
    waiting = Execution.objects.filter(pk=execution_id, status=Execution.Status.QUEUED)
    try:
        execution = waiting.first()
    except DecryptionError:
        # It is taken all the same, and ends when its request is asked for: nobody can run it.
        execution = waiting.defer("pending").first()
        if execution is not None:
            execution.pending = None
    if execution is None:
        return None
    started_at, deadline = timezone.now(), deadline_after(execution.timeout)
    claimed = waiting.update(
        status=Execution.Status.RUNNING, started_at=started_at, deadline=deadline, pending=None
    )
    if not claimed:
        return None
    execution.status = Execution.Status.RUNNING
    execution.started_at, execution.deadline = started_at, deadline
    return execution


def _in_turn() -> Iterator[str]:
    """The tenants with something in the queue, whose turn is next first."""
    waiting: dict[str, int] = {}
    running: dict[str, int] = {}
    counts = (
        Execution.objects.filter(finished_at=None)
        .order_by()
        .values_list("tenant_slug", "status")
        .annotate(number=Count("pk"))
    )
    for tenant_slug, status, number in counts:
        (waiting if status == Execution.Status.QUEUED else running)[tenant_slug] = number
    for known in _turns.keys() - waiting.keys():
        # Whoever comes back to the queue has not been served in it.
        _turns.pop(known, None)
    # Who is at its bound is passed over without a lock: it is looked at several times a second.
    served = (slug for slug in waiting if running.get(slug, 0) < bound_on_running(slug))
    yield from sorted(served, key=lambda slug: (running.get(slug, 0), _turns.get(slug, 0)))


def _is_held_up() -> bool:
    """Whether nothing new should be run. Said once and not with every look."""
    global _told
    problem = disk_problem()
    if problem and not _told:
        logger.warning("nothing is taken from the queue: %s", problem)
    _told = problem
    return bool(problem)


def _claim_oldest(tenant_slug: str) -> Execution | None:
    waiting = Execution.objects.filter(
        finished_at=None, tenant_slug=tenant_slug, status=Execution.Status.QUEUED
    )
    oldest = waiting.order_by("pk").values_list("pk", flat=True).first()
    return claim(oldest) if oldest else None
