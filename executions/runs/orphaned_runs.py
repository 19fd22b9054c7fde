"""Executions that nobody will run or end: their records are ended, and none stays open for ever.

Processes that died are found by those that live, and what they ran is closed. What they had only
taken from the queue goes back there.

Of this host's the kernel says whether they live, and that is a proof: no silence is waited for, and
one that lives is not dead because it is silent. Only where it is so for HELD_SECONDS it counts as
dead too: it was stopped, or hangs.

Of others no clock is compared with another. A process is dead when a watcher has seen the same
`beat` of it for DEAD_SECONDS of its own time, in which it looked without a gap and could write
itself: a watcher that was stopped, or a database that was away or locked, begins to watch anew. The
conditional UPDATE that records the death finds a beat that came meanwhile, and then there is none.

What a process runs ends with its process or by it (`runs.heartbeat`), whatever any clock says; what
it left open it closes itself (`UnattendedRuns`). What a backup had open is never run again.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from executions.kernel.database import delete_in_batches
from executions.runs import active_runs, extensions, journal, payloads
from executions.runs.heartbeat import LOOK_SECONDS, clock
from executions.runs.journal import waiting_ids
from executions.runs.models import Approval, Execution, Process
from executions.runs.queue import requeue
from executions.runs.record import close_record, error_changes, log_execution
from executions.runs.standby import HELD_SECONDS
from providers.errors import UNAVAILABLE
from providers.remote.reclaim import has_ended_here, lives_here

logger = logging.getLogger(__name__)

# A process of another host whose beat stayed the same for so long is dead, if its watcher looked
# without a gap.
# Five beats; with a look each second a death is recorded within 12 s.
DEAD_SECONDS = 10.0
GAP_SECONDS = 4.0
# After so long the next beat is due first, and the rest follows with the next look, at once.
_CLOSING_SECONDS = 1.5
_AT_ONCE = 100
# Ended processes are shown in the admin for so long.
KEPT = timedelta(days=1)
FORGET_SECONDS = 3600.0
# How long a record of this process stays open when nothing here runs it any more.
UNATTENDED_SECONDS = 60.0
UNATTENDED_LOOK_SECONDS = 10.0
# How long a command may be being started in the background, which nothing here counts as a run:
# its session may have to be woken first, with all of its files.
_STARTING = timedelta(minutes=20)

_told: set[UUID] = set()

_LOST = "The process that ran it ended; the code may have run in part."
_UNRECORDED = "The service could not record how it ended; the code may have run in part."


class Watcher:
    """What one process has seen of the others. `look` is called about once a second."""

    def __init__(
        self,
        *,
        dead_seconds: float = DEAD_SECONDS,
        gap_seconds: float = GAP_SECONDS,
        held_seconds: float = HELD_SECONDS,
        now: Callable[[], float] = clock,
    ) -> None:
        self._dead_seconds = dead_seconds
        self._gap_seconds = gap_seconds
        self._held_seconds = held_seconds
        self._now = now
        # The beat of each, and since when it is known to be the same.
        self._seen: dict[UUID, tuple[int, float]] = {}
        self._looked_at = -math.inf
        # Whether something is left to close that there was no time for.
        self.is_behind = False

    def look(self, own: UUID | None) -> int:
        """Record the deaths that are certain now, and close what ended processes left open.

        How many deaths were recorded. Raises what the database does, and has then not looked.
        """
        died = sum(self._record_death(pk, beat) for pk, beat in self._certain(own))
        self.is_behind = self._close_orphans(own)
        return died

    def _certain(self, own: UUID | None) -> list[tuple[UUID, int]]:
        """Who has ended on this host, and who has shown the same beat for long enough. Counted is
        what lies between two reads, which may be within one look.
        """
        began = self._now()
        rows = Process.objects.filter(ended_at=None).order_by().values_list("pk", "beat", "tag")
        others = [row for row in rows if row[0] != own]
        ended = self._now()
        if ended - self._looked_at > self._gap_seconds:
            self._seen = {}
        self._looked_at = ended
        self._seen = {
            pk: self._seen[pk] if self._seen.get(pk, (None,))[0] == beat else (beat, ended)
            for pk, beat, _ in others
        }
        return [
            (pk, beat)
            for pk, beat, tag in others
            if has_ended_here(tag) or self._is_silent(began - self._seen[pk][1], tag)
        ]

    def _is_silent(self, seconds: float, tag: str) -> bool:
        """Whether a process that showed the same beat for so long counts as dead."""
        if seconds < self._dead_seconds:
            return False
        return seconds >= self._held_seconds or not lives_here(tag)

    def _record_death(self, pk: UUID, beat: int) -> bool:
        dead = Process.objects.filter(pk=pk, beat=beat, ended_at=None)
        if not dead.update(ended_at=Now()):
            return False
        process = Process.objects.get(pk=pk)
        left = Execution.objects.filter(process_id=pk, finished_at=None).count()
        logger.warning(
            "a process died (%s); the %d executions it had are closed, or queued again",
            process,
            left,
            extra={
                "alert": "process_died",
                "process_id": str(pk),
                "instance": process.instance,
                "kind": process.kind,
                "pid": process.pid,
                "beat": beat,
                "seconds_without_beat": round(self._now() - self._seen[pk][1], 3),
                "executions": left,
            },
        )
        return True

    def _close_orphans(self, own: UUID | None) -> bool:
        """Close what ended processes left open. Whether there was no time for all of it, though
        some could be closed: what cannot be is tried again with the next look.

        On a busy machine that is slow: the living are watched on meanwhile, and all of them close
        what they find first in an order of their own, so that few want the same one.
        """
        until = self._now() + _CLOSING_SECONDS
        # What waits in the journal of this host is recorded from there, with its result.
        tried, closed = waiting_ids(), 0
        while batch := list(_orphans().exclude(pk__in=tried)[:_AT_ONCE]):
            random.shuffle(batch)
            for execution in batch:
                if self._now() > until:
                    return closed > 0
                tried.add(execution.pk)
                closed += requeue_or_fail(execution, _LOST)
                if self._now() - self._looked_at >= LOOK_SECONDS:
                    self._certain(own)
        return False


class UnattendedRuns:
    """The open records of this process's lease that nothing here runs, and since when."""

    def __init__(self, *, now: Callable[[], float] = clock) -> None:
        self._now = now
        self._lease: UUID | None = None
        self._since: dict[UUID, float] = {}

    def close(self, lease: UUID | None, seconds: float = UNATTENDED_SECONDS) -> int:
        """Close the records of this lease that nothing here has run for so long. How many.

        Whatever was to close them has failed; nobody else does while this process lives.
        """
        if lease != self._lease:
            self._lease, self._since = lease, {}
        if lease is None:
            return 0
        now, closed = self._now(), 0
        open_rows = Execution.objects.filter(process_id=lease, finished_at=None)
        # Not since when it was asked for: a person may have approved it long after that.
        starting = Q(background=True, started_at__gt=Now() - _STARTING)
        mine = set(open_rows.exclude(starting).values_list("pk", flat=True))
        # What waits in the journal is recorded from there, as soon as anything can be written.
        found = mine - {run.execution_id for run in active_runs.runs()} - waiting_ids()
        self._since = {pk: self._since.get(pk, now) for pk in found}
        late = [pk for pk, since in self._since.items() if now - since >= seconds]
        for execution in open_rows.filter(pk__in=late).defer("code", "arguments"):
            closed += requeue_or_fail(execution, _UNRECORDED)
        return closed


def _orphans() -> QuerySet[Execution]:
    # The first is what lets the index serve.
    left = Execution.objects.filter(
        process__isnull=False, process__ended_at__isnull=False, finished_at=None
    )
    return left.select_related("process").defer("pending", "code", "arguments").order_by()


@contextmanager
def log_once(what: str, pk: UUID) -> Iterator[None]:
    """One that cannot be closed, for whatever reason but the database's, keeps no others open."""
    try:
        yield
    except DatabaseFailure:
        raise
    except Exception:
        if pk not in _told:
            logger.exception("%s %s could not be closed; it is tried again", what, pk)
        _told.add(pk)


def requeue_or_fail(execution: Execution, message: str) -> bool:
    """Have it run by another process where none of its code was handed over, else `mark_lost`."""
    with log_once("execution", execution.pk):
        if requeue(execution):
            logger.warning("execution %s goes back to the queue; none of it ran", execution.pk)
            return True
        return mark_lost(execution, message)
    return False


def mark_lost(execution: Execution, message: str, *, retryable: bool = False) -> bool:
    """End an open row with SB009, if it is still as `execution` shows it. Whether it was.

    Which process had it is told in `meta`, to administrators: callers need no names of hosts.
    """
    changes = {**error_changes(UNAVAILABLE.code, message), "retryable": retryable}
    if execution.process is not None:
        changes["meta"] = {**execution.meta, "process": str(execution.process)}
    if not close_record(execution, Execution.Status.ERROR, changes, only_if=execution.status):
        return False
    for each in extensions.installed():
        each.on_lost(execution)
    log_execution(execution)
    return True


def has_ended(tag: str) -> bool:
    """Whether the process of this tag has ended, on whatever host. Of one that is unknown it is
    not known; one that lost its lease and lives has another."""
    ends = list(Process.objects.filter(tag=tag).values_list("ended_at", flat=True)) if tag else []
    return bool(ends) and None not in ends


def forget_ended() -> int:
    """Remove the rows of processes that ended long ago. How many."""
    left = Execution.objects.filter(process_id=OuterRef("pk"), finished_at=None)
    ended = Process.objects.filter(ended_at__lt=Now() - KEPT).exclude(Exists(left))
    return delete_in_batches(ended)


# Of a row that is no process's, whose process has no row any more, the deadline decides.
GRACE = timedelta(seconds=30)
# What is queued has an hour, and the clock it is compared with may be ahead by so much.
QUEUE_GRACE = timedelta(minutes=10)

_ENDED_AT_ONCE = 1000
_NEVER_RUN = "No worker took the execution in time; it was not run."
_NOT_APPROVED = "No one approved the execution in time; it was not run."

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
    for execution in stale.defer("pending", "code", "arguments")[:_ENDED_AT_ONCE]:
        queued = execution.status == Execution.Status.QUEUED
        why = _NEVER_RUN if queued else _LOST
        if queued and Approval.objects.filter(execution=execution.pk, status="waiting").exists():
            why = _NOT_APPROVED
        ended += mark_lost(execution, why, retryable=queued)
    payloads.remove_orphans()
    return ended


class Settled(NamedTuple):
    """How many results that waited in the journal were recorded, executions that were open were
    ended, and schedules whose time has come since were paused."""

    recorded: int = 0
    ended: int = 0
    paused: int = 0


def close_after_restore(made_at: str) -> Settled:
    """Do what is to be done before a restored database is used, so that nothing of it runs again.

    Raises LedgerUnavailable.
    """
    # What is known of what was open, before the rest is given up.
    recorded = journal.record_waiting()
    ended = end_open_executions(made_at)
    paused = sum(each.after_restore() for each in extensions.installed())
    return Settled(recorded, ended, paused)


def end_open_executions(made_at: str) -> int:
    """End every open execution with SB009, not to be retried. How many were ended.

    For a database that was just restored and that no service uses. Raises LedgerUnavailable.
    """
    message = (
        f"The database was restored from a backup of {made_at}. The code may have run after that."
    )
    ended = 0
    still_open = list(Execution.objects.filter(finished_at=None).values_list("pk", flat=True))
    for pk in still_open:
        execution = Execution.objects.defer("pending").get(pk=pk)
        changes = {**error_changes(UNAVAILABLE.code, message), "retryable": False}
        status = execution.status
        if close_record(execution, Execution.Status.ERROR, changes, only_if=status):
            log_execution(execution)
            ended += 1
    return ended
