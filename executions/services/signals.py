"""What is wanted of a run from outside: told to it here, or left for the process that has it."""

from __future__ import annotations

from uuid import UUID

from django.db.models import Exists, OuterRef

from executions.kernel.batches import delete_in_batches
from executions.models.execution import Execution
from executions.models.run_signal import RunSignal
from executions.services import kept_events, ongoing
from executions.services.sessions import followers


def leave(execution_id: UUID, kind: RunSignal.Kind, asked_by: str) -> bool:
    """Have whoever runs it find the signal within about a second. False when it was there."""
    return RunSignal.objects.get_or_create(
        execution_id=execution_id, kind=kind, defaults={"asked_by": asked_by[:200]}
    )[1]


def message_for(asked_by: str) -> str:
    return f"Cancelled by {asked_by}."


def canceller_of(execution_id: UUID) -> str:
    """Who wants it cancelled, "" where nobody does."""
    found = RunSignal.objects.filter(execution=execution_id, kind=RunSignal.Kind.CANCEL)
    return found.values_list("asked_by", flat=True).first() or ""


def attend(lease_id: UUID | None) -> None:
    """Pass on what others want of the runs of this process. Raises what the database does."""
    _tell_of_processes()
    if lease_id is None or not ongoing.count():
        return
    found = RunSignal.objects.filter(execution__process_id=lease_id, execution__finished_at=None)
    for execution_id, kind, asked_by in found.values_list("execution_id", "kind", "asked_by"):
        run = ongoing.find(execution_id)
        if run is None:
            continue
        if kind == RunSignal.Kind.CANCEL:
            run.cancel(asked_by)
        elif run.log is not None:
            kept_events.follow(run.log)


def _tell_of_processes() -> None:
    """Those in the background of a session belong to no process of ours; one follows them."""
    if not (followed := followers.ids()):
        return
    wanted = RunSignal.objects.filter(kind=RunSignal.Kind.FOLLOW, execution__in=followed)
    for execution_id in wanted.values_list("execution_id", flat=True):
        if (log := followers.log_of(execution_id)) is not None:
            kept_events.follow(log)


def forget_ended() -> int:
    """Remove the signals of executions that have ended. How many."""
    still_open = Execution.objects.filter(pk=OuterRef("execution_id"), finished_at=None)
    old = RunSignal.objects.exclude(Exists(still_open))
    return delete_in_batches(old)
