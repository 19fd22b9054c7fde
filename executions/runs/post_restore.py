"""What a backup had open. Nobody can say what became of it afterwards, so none of it runs again."""

from __future__ import annotations

from typing import NamedTuple

from executions.runs import extensions, journal
from executions.runs.listing import log_execution
from executions.runs.models import Execution
from executions.runs.record import close_record, error_changes
from providers.errors import UNAVAILABLE


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
