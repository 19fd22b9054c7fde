"""Executions that nobody will run or end: their records are ended, and none stays open for ever.

What a process runs is not among them, whatever any clock says: it ends with its process
(`runs.process_reaper`) or by it (`runs.heartbeat`). What a backup had open is never run again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from django.db.models import Q
from django.db.models.functions import Now

from executions.runs import extensions, journal, payloads
from executions.runs.listing import log_execution
from executions.runs.models import Approval, Execution
from executions.runs.process_reaper import mark_lost
from executions.runs.record import close_record, error_changes
from providers.errors import UNAVAILABLE

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
    recorded = journal.record_kept()
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
