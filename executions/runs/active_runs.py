"""The runs of this process that have not ended, requests to them, and their end at shutdown."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from django.db.models import Exists, OuterRef

from executions.kernel.database import delete_in_batches
from executions.runs import event_log
from executions.runs.models import Execution, RunSignal
from providers import draining
from providers.errors import ProviderUnavailable, SandboxError
from providers.leases import close_all
from providers.manager import manager
from providers.threads import reset_after_fork

if TYPE_CHECKING:
    from executions.runs.event_log import EventLog

logger = logging.getLogger(__name__)

# How long a caller should wait who is told that nothing of his has run: another instance may be
# there at once, this one after its start.
RETRY_AFTER_SECONDS = 5.0
# Of the time for ending: what a sandbox that is asked to end may take, so that the record follows.
DESTROY_SECONDS = 3.0


class Run(Protocol):
    """What can be ended from outside."""

    @property
    def handed_over(self) -> bool: ...

    @property
    def execution_id(self) -> UUID: ...

    @property
    def log(self) -> EventLog | None: ...

    def lose(self) -> None: ...

    def cancel(self, asked_by: str) -> None: ...

    def end_with_error(self, error: SandboxError) -> object: ...


_runs: set[Run] = set()
_waits: set[Future[Any]] = set()
_ends: set[Future[Any]] = set()
_changed = threading.Condition()
_shutdown_steps: list[Callable[[], object]] = []


@contextmanager
def track(run: Run) -> Iterator[None]:
    """Have the process not end before this run, or end it."""
    with _changed:
        _runs.add(run)
    try:
        yield
    finally:
        with _changed:
            _runs.discard(run)
            _changed.notify_all()


@contextmanager
def cancel_on_shutdown(awaited: Future[Any]) -> Iterator[None]:
    """Have a run's waiting for `awaited` be cancelled when the process ends its runs."""
    _waits.add(awaited)
    try:
        # Either this is seen here, or the future there.
        if draining.is_ending():
            awaited.cancel()
        yield
    finally:
        _waits.discard(awaited)


def track_teardown(end: Future[Any]) -> None:
    """Have the process not end before this end of a sandbox, which no run waits for."""
    _ends.add(end)
    end.add_done_callback(_ends.discard)


def wait_for_ends(seconds: float = DESTROY_SECONDS) -> bool:
    """Wait until the sandboxes of runs that are over have ended. Whether all have."""
    left = wait(list(_ends), seconds).not_done
    if left:
        logger.warning("%d sandboxes were still being ended", len(left))
    return not left


def count() -> int:
    return len(_runs)


def find(execution_id: UUID) -> Run | None:
    """The run of an execution, where it is one of this process."""
    return next((run for run in runs() if run.execution_id == execution_id), None)


def runs() -> list[Run]:
    with _changed:
        return list(_runs)


# Who cancels a run whose client closed the connection.
LEFT_STREAM = "its client, which left the stream"


class ClientRun:
    """A run that is cancelled when its client leaves, also before it has begun.

    `client` is who is named then. The run writes its events to `log`.
    """

    def __init__(
        self, log: EventLog, client: str, on_begin: Callable[[], object] = lambda: None
    ) -> None:
        self.log = log
        self.is_cancelled = False
        self._client = client
        self._on_begin = on_begin
        log.on_begin = self._begin

    def cancel(self) -> None:
        """End the run, from any thread and without waiting."""
        self.is_cancelled = True
        if self.log.execution_id is not None and (run := find(self.log.execution_id)):
            run.cancel(self._client)

    def _begin(self) -> None:
        self._on_begin()
        # Either this is seen here, or the run in `cancel`.
        if self.is_cancelled:
            self.cancel()


def ensure_not_stopping() -> None:
    """Raises ProviderUnavailable where nothing new is begun any more."""
    if draining.refuses_new():
        raise stop_error(started=False)


def ensure_not_ending() -> None:
    """Raises ProviderUnavailable where what has begun goes no further."""
    if draining.is_ending():
        raise stop_error(started=False)


def stop_error(*, started: bool) -> ProviderUnavailable:
    if started:
        return ProviderUnavailable(
            "The service was stopped during the run and ended its sandbox; the code may have run "
            "in part.",
            started=True,
        )
    return ProviderUnavailable(
        "The service is being stopped. Nothing was run; try again.",
        retry_after=RETRY_AFTER_SECONDS,
    )


def end_all(seconds: float) -> None:
    """End every run: its sandbox, then its record, and so its answer. Blocks for `seconds` at most.

    A run that hangs elsewhere, such as in a provider's start, has its record closed from here.
    """
    draining.begin_ending()
    if count():
        logger.warning("%d runs did not end in time and are ended", count())
    for awaited in list(_waits):
        awaited.cancel()
    with _changed:
        if _changed.wait_for(lambda: not _runs, seconds):
            return
        left = list(_runs)
    for run in left:
        try:
            run.end_with_error(stop_error(started=run.handed_over))
        except Exception:
            logger.exception("a run could not be recorded at the end")


def register_shutdown_step(step: Callable[[], object]) -> None:
    """Have `shutdown` call this when the sandboxes have ended, after what was registered before."""
    _shutdown_steps.append(step)


def shutdown() -> None:
    """The last thing a process does in order: its records are closed, and its sandboxes end."""
    draining.begin_ending()
    wait_for_ends()
    manager.close()
    close_all()
    for step in _shutdown_steps:
        step()


# Registered after the managers, so that it comes before they close the providers.
atexit.register(wait_for_ends)
reset_after_fork(_ends.clear)


def post_request(execution_id: UUID, kind: RunSignal.Kind, asked_by: str) -> bool:
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


def deliver_requests(lease_id: UUID | None) -> None:
    """Pass on what others want of the runs of this process. Raises what the database does."""
    _tell_of_processes()
    if lease_id is None or not count():
        return
    found = RunSignal.objects.filter(execution__process_id=lease_id, execution__finished_at=None)
    for execution_id, kind, asked_by in found.values_list("execution_id", "kind", "asked_by"):
        run = find(execution_id)
        if run is None:
            continue
        if kind == RunSignal.Kind.CANCEL:
            run.cancel(asked_by)
        elif run.log is not None:
            event_log.follow(run.log)


def _tell_of_processes() -> None:
    """Those in the background of a session belong to no process of ours; one follows them."""
    if not (followed := event_log.ids()):
        return
    wanted = RunSignal.objects.filter(kind=RunSignal.Kind.FOLLOW, execution__in=followed)
    for execution_id in wanted.values_list("execution_id", flat=True):
        if (log := event_log.log_of(execution_id)) is not None:
            event_log.follow(log)


def forget_ended() -> int:
    """Remove the signals of executions that have ended. How many."""
    still_open = Execution.objects.filter(pk=OuterRef("execution_id"), finished_at=None)
    old = RunSignal.objects.exclude(Exists(still_open))
    return delete_in_batches(old)
