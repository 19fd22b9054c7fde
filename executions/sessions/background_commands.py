"""Background commands of sessions: their output, as far as it is kept, and their end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from uuid import UUID

from django.db import connection

from executions.kernel.background import Executor
from executions.kernel.coroutines import run_sync
from executions.runs import event_log
from executions.runs.active_runs import canceller_of, message_for
from executions.runs.event_log import STREAMS, EventLog, RunEvent, resolve
from executions.runs.models import Execution
from executions.runs.record import complete_externally, error_changes, log_execution
from executions.runs.requests import run_limits
from executions.runs.service import verdict_of
from executions.sessions.models import Session
from executions.sessions.session_sandbox import borrow_sandbox, call_sandbox, check_processes
from providers.errors import (
    ConnectionFailed,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)
from providers.sandbox import KeptSandbox, Process
from providers.values import Event, ExecutionResult

logger = logging.getLogger(__name__)


class Output:
    """Both streams as they came, as far as they are kept."""

    def __init__(self) -> None:
        limits = run_limits()
        self.log = EventLog(limits)
        self._most = limits.output_bytes
        self._seen = dict.fromkeys(STREAMS, 0)

    def restore(self, execution_id: UUID, entries: Sequence[RunEvent]) -> None:
        """Begin with what another process has seen of it."""
        for entry in entries:
            if entry.type in self._seen:
                self._seen[entry.type] += len(entry.data)
        self.log.restore(execution_id, entries)

    def take(self, event: Event) -> None:
        if event.type in self._seen:
            self._seen[event.type] += len(event.data)
            self.log.emit(event)

    @property
    def position(self) -> int:
        """How many bytes of both streams were seen."""
        return sum(self._seen.values())

    def facts(self) -> dict[str, Any]:
        return {
            **{name: self.log.text_of(name) for name in STREAMS},
            **{f"{name}_truncated": seen > self._most for name, seen in self._seen.items()},
            "output_order": self.log.order(),
        }


# What is left of the output of a process that has ended is there at once.
FOLLOW_SECONDS = 10.0
# How long, and how often, a process of a provider that is out of reach is asked for again.
AWAY_SECONDS, AGAIN_SECONDS = 60.0, 1.0
# A follower has let go of its connection to the database. These threads keep theirs for a while.
_recorders = Executor("command-end", threads=8, of_one=4, idle_seconds=10.0)


def record_unfollowed() -> int:
    """Record the end of what ran in the background and is followed by no process any more.

    How many had ended. Who follows one as well records the same; one of them does.
    """
    ended = 0
    left = Execution.objects.filter(
        background=True, finished_at=None, pid__isnull=False, session__closed_at=None
    )
    for execution in left.defer("pending", "code", "arguments").select_related("session"):
        session = execution.session
        if session is None or event_log.has(execution.pk):
            continue
        try:
            ended += run_sync(record_if_ended(session, execution))
        except SandboxError as error:
            logger.warning(
                "the events of execution %s could not be read: %s", execution.pk, error.message
            )
    return ended


async def record_if_ended(session: Session, execution: Execution) -> bool:
    """Record how a background process ended, where it has and nobody else did. Whether this did."""
    output = Output()
    seen = await _read_process(session, execution.pid or 0, output)
    if seen is not None and seen.exit_code is None:
        return False
    return _close(execution, output, seen)


async def _read_process(session: Session, pid: int, output: Output) -> Process | None:
    """A process as it is, None where there is none. What it put out is there once it has ended.

    That it has is the guest's claim: what it then goes on to send is not waited for to its end.
    """
    known = await call_sandbox(session, lambda kept: kept.processes.list(), check_processes)
    seen = next((each for each in known if each.pid == pid), None)
    if seen is not None and seen.exit_code is not None:
        await call_sandbox(
            session,
            lambda kept: kept.processes.follow(pid, output.take),
            lambda ended: ended,
            FOLLOW_SECONDS,
        )
    return seen


class Follower:
    """Takes the output of a background process, and records its end."""

    def __init__(self, session: Session, execution: Execution, *, is_kept: bool = True) -> None:
        """`is_kept` is whether its events are written for those who come later. Without it they
        are once somebody follows it in another process."""
        self._is_kept = is_kept
        self._session = session
        self._execution = execution
        self._output = Output()

    def begin(self, known: Sequence[RunEvent] = ()) -> EventLog:
        """Where what it puts out is told. `known` is what another process has written of it: what
        comes behind that is added."""
        log = self._output.log
        # Nobody waits for it, and whoever wants to know comes when he likes.
        log.is_kept = self._is_kept
        if known:
            self._output.restore(self._execution.pk, known)
        else:
            log.begin(self._execution.pk)
        slug = self._session.tenant_slug
        if not event_log.begin(slug, self._execution.pk, self.cancel, self._follow, log):
            # Nothing is said here of what it puts out; the schedule records it.
            self._finish()
            resolve([log.closed])
        return log

    def cancel(self) -> bool:
        """Its session has ended, and it with that."""
        self._finish()
        try:
            return _cancel(self._execution, self._output)
        finally:
            resolve([self._output.log.closed])

    def _finish(self) -> None:
        """Nothing more of its output is taken."""
        self._output.log.finish()
        event_log.write_rest(self._output.log)

    def _wait_for_end(self, kept: KeptSandbox, pid: int) -> Process:
        """Its end. A provider that is out of reach is asked again for a while: it may have been
        started anew, and the sandbox be there still. Raises SandboxError."""
        give_up = 0.0
        while True:
            seen = self._output.position
            try:
                return kept.processes.follow(pid, self._output.take, seen)
            except KeptSandboxLost:
                raise
            except (ConnectionFailed, ProviderUnavailable):
                now = time.monotonic()
                if not give_up or self._output.position > seen:
                    give_up = now + AWAY_SECONDS
                if now > give_up or not event_log.has(self._execution.pk):
                    raise
                time.sleep(AGAIN_SECONDS)

    def _follow(self) -> None:
        pid = self._execution.pid or 0
        try:
            with ExitStack() as held:
                kept = held.enter_context(borrow_sandbox(self._session))
                # It may run for a day, and a database has connections for few.
                connection.close()
                ended = self._wait_for_end(kept, pid)
            if event_log.has(self._execution.pk):
                self._finish()
                _recorders.submit(
                    self._session.tenant_slug,
                    lambda: _close(self._execution, self._output, ended),
                ).result()
        except SandboxError as error:
            # Its sandbox is gone or out of reach: the session's end, or the schedule, closes it.
            logger.info(
                "the events of execution %s are no longer read: %s",
                self._execution.pk,
                error.message,
            )
        except Exception:
            logger.exception("the events of execution %s are no longer read", self._execution.pk)
        finally:
            self._finish()
            resolve([self._output.log.closed])


def _close(execution: Execution, output: Output, ended: Process | None) -> bool:
    """Record how a background process ended; None: the sandbox knows nothing of it any more."""
    if ended is None:
        lost = error_changes("SB009", "The sandbox no longer knows this process.")
        return _record(execution, Execution.Status.ERROR, {**output.facts(), **lost})
    has_ended = Session.objects.filter(executions=execution.pk, closed_at__isnull=False)
    if ended.ended_by_us == "closed" or has_ended.exists():
        return _cancel(execution, output)
    if asked_by := canceller_of(execution.pk):
        told = {"exit_code": ended.exit_code, "error_message": message_for(asked_by)}
        return _record(execution, Execution.Status.CANCELLED, {**output.facts(), **told})
    result = result_of(output, ended)
    status, verdict = verdict_of(result, execution.timeout)
    facts = {**output.facts(), "exit_code": result.exit_code, **verdict}
    return _record(execution, status, facts)


def result_of(output: Output, ended: Process, **metadata: Any) -> ExecutionResult:
    """Return what a command that has ended has as a run."""
    is_late = ended.ended_by_us == "timeout"
    return ExecutionResult(
        **output.facts(),
        exit_code=137 if is_late else ended.exit_code,
        execution_time=0.0,
        metadata=metadata,
        timed_out=is_late,
        out_of_memory=ended.ended_by_us == "memory",
    )


def _cancel(execution: Execution, output: Output) -> bool:
    told = {"error_message": "Its session ended."}
    return _record(execution, Execution.Status.CANCELLED, {**output.facts(), **told})


def _record(execution: Execution, status: Execution.Status, facts: Mapping[str, Any]) -> bool:
    won = complete_externally(execution, status, facts)
    if won:
        log_execution(execution)
    return won
