"""Ending an execution because somebody wants it: wherever it is queued or runs.

A queued row is closed here. A run is ended by the process that has it, which records what had come
of it by then; one that does not do so in time has its record closed without. A process in the
background of a session is ended in its sandbox. Whatever ends first stands: a conditional UPDATE
decides.
"""

from __future__ import annotations

from django.db import transaction

from executions.kernel.coroutines import Waits
from executions.ledger.append import append
from executions.models.execution import Execution
from executions.models.run_signal import RunSignal
from executions.services import ongoing, polling, signals
from executions.services.charging import end_by_others
from executions.services.execution_log import log_execution
from executions.services.sessions.stopping import stopping
from executions.services.signals import message_for
from providers.errors import InvalidConfiguration

# How long the process that runs it, which looks once a second, may take until its record is closed.
PATIENCE_SECONDS = 5.0


class HasEnded(InvalidConfiguration):
    """There is nothing left to be cancelled."""

    @property
    def http_status(self) -> int:
        return 409


def cancelling(execution: Execution, asked_by: str) -> Waits[Execution]:
    """The execution, ended as `cancelled`. `asked_by` is who wants it, as in `key:PREFIX`.

    One that is cancelled already is returned as it is. Raises HasEnded for one that ended in
    another way, also where it did so meanwhile.
    """
    if execution.status == Execution.Status.QUEUED and _close(
        execution, asked_by, only_if=Execution.Status.QUEUED
    ):
        return execution
    if execution.is_open:
        _ask(execution, asked_by)
        if execution.background:
            yield from stopping(execution)
            execution.refresh_from_db()
        else:
            yield from polling.until_ended(execution.pk, PATIENCE_SECONDS)
            execution.refresh_from_db()
        # It may have gone back to the queue, or be another process's by now.
        while execution.is_open:
            _close(execution, asked_by)
    if execution.status != Execution.Status.CANCELLED:
        raise HasEnded(f"The execution has ended: {execution.status}.")
    return execution


def _ask(execution: Execution, asked_by: str) -> None:
    with transaction.atomic():
        if signals.leave(execution.pk, RunSignal.Kind.CANCEL, asked_by):
            _enter(execution, asked_by)
    if run := ongoing.find(execution.pk):
        run.cancel(asked_by)


def _close(execution: Execution, asked_by: str, *, only_if: str = "") -> bool:
    with transaction.atomic():
        message = message_for(asked_by)
        if execution.background:
            message += " Whether its process has ended is not known."
        changes = {"error_message": message}
        won = end_by_others(execution, Execution.Status.CANCELLED, changes, only_if=only_if)
        if won and only_if:
            _enter(execution, asked_by)
    if won:
        log_execution(execution)
    return won


def _enter(execution: Execution, asked_by: str) -> None:
    append("cancellation", str(execution.pk), {"actor": asked_by})
