"""The queue of executions that wait for a worker, served by turns of tenants, and its state."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import Exists, Max, OuterRef, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import ngettext

from executions.kernel.database import NOW
from executions.ledger.entry import LedgerUnavailable, ensure_ledger
from executions.runs import heartbeat, payloads, queue_wake
from executions.runs.admission import disk_problem, may_claim
from executions.runs.models import Approval, Execution, Process
from executions.runs.record import BACKGROUND_ALLOWANCE, QUEUE_ALLOWANCE, deadline_after
from executions.tenants.quotas import running_limit, tenant_lock
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

# So often an execution goes back to the queue because the process that took it ended.
MAX_REQUEUES = 3
_PUT_BACK = "put_back"

_EXECUTIONS = Execution._meta.db_table
_OPEN = f"SELECT tenant_slug FROM {_EXECUTIONS} WHERE finished_at IS NULL"  # noqa: S608
_RUNNING, _QUEUED = Execution.Status.RUNNING.value, Execution.Status.QUEUED.value

_APPROVALS, _WAITS = Approval._meta.db_table, Approval.Status.WAITING.value
WAITS_FOR_APPROVAL = Exists(Approval.objects.filter(execution=OuterRef("pk"), status=_WAITS))
# By the database's clock: that of a host decides nothing where there are several.
_DUE = Q(run_at=None) | Q(run_at__lte=Now())

# From one tenant to the next in the index of open rows, whatever number of rows each has: every
# worker asks this many times a second. A name of our own model, and two of our own constants.
_TAKEABLE = f"""SELECT 1 FROM {_EXECUTIONS}
    WHERE finished_at IS NULL AND tenant_slug = tenants.slug AND status = '{_QUEUED}'
    AND NOT background AND NOT EXISTS (
        SELECT 1 FROM {_APPROVALS}
        WHERE execution_id = {_EXECUTIONS}.id AND {_APPROVALS}.status = '{_WAITS}'
    )"""  # noqa: S608
# What is asked for at a later time is passed over in the index, however much of it there is.
_WAITING = f"""
WITH RECURSIVE tenants (slug) AS (
    SELECT ({_OPEN} ORDER BY tenant_slug LIMIT 1)
    UNION ALL
    SELECT ({_OPEN} AND tenant_slug > tenants.slug ORDER BY tenant_slug LIMIT 1)
    FROM tenants WHERE tenants.slug IS NOT NULL
)
SELECT tenants.slug, (
    SELECT COUNT(*) FROM {_EXECUTIONS}
    WHERE finished_at IS NULL AND tenant_slug = tenants.slug AND status = '{_RUNNING}'
) - (
    SELECT COUNT(*) FROM {_EXECUTIONS}
    WHERE background AND finished_at IS NULL AND tenant_slug = tenants.slug
    AND status = '{_RUNNING}'
)
FROM tenants WHERE tenants.slug IS NOT NULL AND (
    EXISTS ({_TAKEABLE} AND run_at IS NULL) OR EXISTS ({_TAKEABLE} AND run_at <= {{now}})
)
"""  # noqa: S608

# When this process last served each tenant. Another process has turns of its own: of P of them a
# tenant who runs the fewest waits for at most P executions of each other one, never for a backlog.
_turns: dict[str, int] = {}
_next_turn = itertools.count(1)
_told = ""


def claim_next(may_serve: Callable[[str], bool] = lambda tenant_slug: True) -> Execution | None:
    """The execution whose turn it is, now running and the caller's to run; None when there is none.

    Left in the queue are those that were asked for at a later time, those of tenants that run as
    many as they may, or whom `may_serve` passes over, and all of them while the disk is nearly
    full or the ledger takes no entry. A tenant of whom another process is just claiming or
    recording one comes after those of whom none does.
    """
    in_turn = [slug for slug in _in_turn() if may_serve(slug)]
    if not in_turn or _is_held_up():
        return None
    # Before the transaction of a claim, in which none is taken.
    heartbeat.current_process_id()
    busy: list[str] = []
    for tenant_slug in in_turn:
        with tenant_lock(tenant_slug, wait=False) as is_alone:
            execution = _claim_first(tenant_slug) if is_alone else None
        if execution is not None:
            return _note_turn(execution)
        if not is_alone:
            busy.append(tenant_slug)
    for tenant_slug in busy:
        with tenant_lock(tenant_slug):
            execution = _claim_first(tenant_slug)
        if execution is not None:
            return _note_turn(execution)
    return None


def claim(execution_id: UUID | str, *, background: bool = False) -> Execution | None:
    """This execution, now running and the caller's to run; None when it is not to be run.

    Several workers may want the same one. The conditional update lets one of them win. What runs
    in the `background` is no worker's: who asked for it claims it once it is approved.
    """
    waiting = Execution.objects.filter(
        ~WAITS_FOR_APPROVAL,
        _DUE,
        pk=execution_id,
        status=Execution.Status.QUEUED,
        background=background,
    )
    try:
        execution = waiting.first()
    except DecryptionError:
        # It is taken all the same, and ends when its request is asked for: nobody can run it.
        execution = waiting.defer("pending").first()
        if execution is not None:
            execution.pending = None
    if execution is None:
        return None
    started_at = timezone.now()
    deadline = started_at + BACKGROUND_ALLOWANCE
    if not background:
        deadline = deadline_after(execution.timeout)
    owner = heartbeat.current_process_id()
    claimed = waiting.update(
        status=Execution.Status.RUNNING,
        process_id=owner,
        started_at=started_at,
        deadline=deadline,
    )
    if not claimed:
        return None
    execution.status, execution.process_id = Execution.Status.RUNNING, owner
    execution.started_at, execution.deadline = started_at, deadline
    return execution


def mark_dispatched(execution: Execution, **place: Any) -> None:
    """Note that the code of a claimed execution is handed over now, and forget its request.

    `place` is where it runs, by columns, for whoever looks before it has ended. Before this it may
    go back to the queue, and after it never: both are an UPDATE of the row that still has its
    request, and only one of them finds it. Raises OwnershipLost where it was too late.
    """
    if not _undispatched_row(execution).update(pending=None, **place):
        raise heartbeat.OwnershipLost(
            "This process lost the execution before its code was sent to the sandbox, and another "
            "process runs it."
        )
    if payloads.may_have_file(execution):
        payloads.forget(execution.pk)
    execution.pending = None


def move(execution: Execution, **place: Any) -> None:
    """Note that one which was handed over runs elsewhere: where it was first, nothing of it ran."""
    owned = Q(process_id=execution.process_id)
    running = Execution.objects.filter(owned, pk=execution.pk, status=Execution.Status.RUNNING)
    running.update(**place)


def requeue(execution: Execution) -> bool:
    """Have an execution run by somebody else, of whose code nothing was handed over. Whether it is
    in the queue again; a few times at most, because it may be what ends whoever takes it.
    """
    tries = execution.meta.get(_PUT_BACK, 0)
    if execution.mode != Execution.Mode.ASYNC or tries >= MAX_REQUEUES:
        return False
    is_back = bool(
        _undispatched_row(execution).update(
            status=Execution.Status.QUEUED,
            process_id=None,
            started_at=None,
            # From now on: an approval may have come long after it was made.
            deadline=timezone.now() + QUEUE_ALLOWANCE,
            meta={**execution.meta, _PUT_BACK: tries + 1},
        )
    )
    if is_back:
        queue_wake.notify_on_commit()
    return is_back


def _undispatched_row(execution: Execution) -> QuerySet[Execution]:
    """The row, while it is as it was claimed, by this process and then, and has its request.

    By columns of its own alone: PostgreSQL looks at no other again after it waited for a lock.
    """
    claim = Q(process_id=execution.process_id, started_at=execution.started_at)
    return Execution.objects.filter(
        claim, pk=execution.pk, status=Execution.Status.RUNNING, pending__isnull=False
    )


def _note_turn(execution: Execution) -> Execution:
    _turns[execution.tenant_slug] = next(_next_turn)
    return execution


def is_empty_for(seconds: float) -> bool:
    """Whether nothing may be taken within the next `seconds` but what is queued from now on.

    False with a database other than SQLite: there is no notice of what other machines queue.
    """
    if connection.vendor != "sqlite":
        return False
    later = NOW["sqlite"].replace("'NOW'", f"'NOW', '+{seconds:.3f} seconds'")
    return not _running_of(later)


def takeable() -> list[str]:
    """The tenants with something in the queue that a worker may take now."""
    return [slug for slug, number in _running_of().items() if number < running_limit(slug)]


def _running_of(now: str = "") -> dict[str, int]:
    """How many runs each tenant has that has something in the queue, at `now` in SQL."""
    with connection.cursor() as cursor:
        cursor.execute(_WAITING.format(now=now or NOW[connection.vendor]), [])
        return dict(cursor.fetchall())


def _in_turn() -> list[str]:
    """The tenants with something in the queue, whose turn is next first."""
    running = _running_of()
    for known in _turns.keys() - running.keys():
        # Whoever comes back to the queue has not been served in it.
        _turns.pop(known, None)
    # Who is at its bound is passed over without a lock: it is looked at several times a second.
    served = (slug for slug, number in running.items() if number < running_limit(slug))
    return sorted(served, key=lambda slug: (running[slug], _turns.get(slug, 0)))


def _is_held_up() -> bool:
    """Whether nothing new should be run. Said once and not with every look."""
    global _told
    problem = disk_problem() or _ledger_problem()
    if problem and not _told:
        logger.warning("no execution is taken from the queue: %s", problem)
    _told = problem
    return bool(problem)


def _ledger_problem() -> str:
    try:
        ensure_ledger()
    except LedgerUnavailable as error:
        return error.message
    return ""


def _claim_first(tenant_slug: str) -> Execution | None:
    """Within `tenant_lock`."""
    if not may_claim(tenant_slug):
        return None
    waiting = Execution.objects.filter(
        ~WAITS_FOR_APPROVAL,
        finished_at=None,
        tenant_slug=tenant_slug,
        status=Execution.Status.QUEUED,
        background=False,
    ).values_list("priority", "pk")
    firsts = [
        # In the order of the index, which PostgreSQL does not see from the condition alone.
        waiting.filter(run_at=None).order_by("run_at", "priority", "pk").first(),
        waiting.filter(run_at__lte=Now()).order_by("priority", "pk").first(),
    ]
    found = [first for first in firsts if first is not None]
    return claim(min(found)[1]) if found else None


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
    busy = _tenants_of(workers, now) if number else set()
    tenants = [slug for slug in takeable() if slug not in busy][:_TENANTS]
    if not tenants:
        return QueueState(0, 0.0, number)
    queued = Execution.objects.filter(
        ~WAITS_FOR_APPROVAL,
        Q(run_at=None) | Q(run_at__lte=now),
        status=Execution.Status.QUEUED,
        background=False,
        finished_at=None,
        tenant_slug__in=tenants,
    )
    rows = queued.order_by("pk").values_list("created_at", "run_at", "deadline")[:COUNTED]
    # The deadline is moved when it is approved, or goes back to the queue.
    since = [max(run_at or made, deadline - QUEUE_ALLOWANCE) for made, run_at, deadline in rows]
    waited = [(now - each).total_seconds() for each in since]
    return QueueState(len(waited), max([0.0, *waited]), number, _idle_seconds(now))


def _tenants_of(workers: QuerySet[Process], now: datetime) -> set[str]:
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
