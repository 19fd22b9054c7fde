"""The runs of this process that have not ended, and their end when the process has to stop.

A process that stops waits for them, then ends what is left (`end_all`), and last of all `finish`es.
Web server and worker go the same way.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from providers.errors import ProviderUnavailable, SandboxError
from providers.manager import manager
from providers.named import close_all
from sandbox_site import draining

if TYPE_CHECKING:
    from executions.services.live import EventLog

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
def counted(run: Run) -> Iterator[None]:
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
def given_up_at_the_end(awaited: Future[Any]) -> Iterator[None]:
    """Have a run's waiting for `awaited` be cancelled when the process ends its runs."""
    _waits.add(awaited)
    try:
        # Either this is seen here, or the future there.
        if draining.is_ending():
            awaited.cancel()
        yield
    finally:
        _waits.discard(awaited)


def expect(end: Future[Any]) -> None:
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


def refuse_when_stopping() -> None:
    """Raises ProviderUnavailable where nothing new is begun any more."""
    if draining.refuses_new():
        raise stopped(started=False)


def refuse_when_ending() -> None:
    """Raises ProviderUnavailable where what has begun goes no further."""
    if draining.is_ending():
        raise stopped(started=False)


def stopped(*, started: bool) -> ProviderUnavailable:
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
            run.end_with_error(stopped(started=run.handed_over))
        except Exception:
            logger.exception("a run could not be recorded at the end")


def register_shutdown_step(step: Callable[[], object]) -> None:
    """Have `finish` call this when the sandboxes have ended, after what was registered before."""
    _shutdown_steps.append(step)


def finish() -> None:
    """The last thing a process does in order: its records are closed, and its sandboxes end."""
    draining.begin_ending()
    wait_for_ends()
    manager.close()
    close_all()
    for step in _shutdown_steps:
        step()


# Registered after the managers, so that it comes before they close the providers.
atexit.register(wait_for_ends)
os.register_at_fork(after_in_child=_ends.clear)
