"""Commands in a session: each is an execution, whether somebody waits for it or not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NoReturn
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from executions.ledger.entry import ensure_ledger
from executions.runs import event_stream, extensions
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, lent
from executions.runs.record import Outcome, open_record, reject
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.runs.routing import allowed_steps, ensure_isolation, required_isolation
from executions.runs.service import running
from executions.sessions.background_commands import Follower, Output, record_if_ended, result_of
from executions.sessions.cell_order import use_session
from executions.sessions.cells import PID, step_in
from executions.sessions.control import with_sandbox
from executions.sessions.ending import end_leftovers
from executions.sessions.models import Session
from executions.sessions.queries import ends_by
from executions.sessions.requests import CommandRequest, SessionAsleep, ensure_not_ended, named_as
from executions.sessions.session_sandbox import (
    MOST_PID,
    SHARING,
    checked_pid,
    checked_processes,
    lender_of,
)
from executions.sessions.shapes import ProcessShape
from providers.errors import (
    SandboxError,
)
from providers.sandbox import KeptSandbox, Process
from providers.values import Command, Emit, Event, ExecutionResult, Job
from providers.waiting import submit


async def commanding(
    session: Session, wanted: CommandRequest, caller: Caller, log: EventLog | None = None
) -> Outcome:
    """Run a command and wait for its end: a run like every other. As `running`."""
    request = _as_execution(session, wanted)
    step = step_in(session, "", {}, _Command(wanted))
    return await running(request, caller, step=step, log=log)


async def starting(
    session: Session,
    wanted: CommandRequest,
    caller: Caller,
    *,
    seconds: float | None = None,
    following: Callable[[EventLog], object] = lambda log: None,
) -> Execution:
    """Start a command in the background. It has an execution from now on, and ends with the
    session at the latest, or after so many `seconds`. `following` is given where its output is
    told. Raises SandboxError; the record then says that it was not started.
    """
    request = _as_execution(session, wanted)
    command = wanted.to_command(seconds)
    allowed_steps(caller, request.language, [step_in(session, "", {}, _Command(wanted))])
    ensure_ledger()
    execution, _ = open_record(request, caller)
    try:
        refuse = await _within_policy(session, execution, request)

        def start(kept: KeptSandbox) -> Any:
            # Only here it is known which sandbox it is: the session may have been woken for this.
            refuse()
            return _started(kept, command)

        pid = await with_sandbox(session, start, checked_pid)
    except SandboxError as error:
        reject(execution, error)
        raise
    facts = {
        "pid": pid,
        "provider": session.provider,
        "config_version": session.config_version,
        "runtime": session.runtime,
        "isolation": session.isolation,
        "sharing": SHARING,
        # From now on it is no process's of ours.
        "process_id": None,
    }
    if not _has_number(session, execution, facts):
        await _given_up(session, execution, pid)
    for name, value in facts.items():
        setattr(execution, name, value)
    following(Follower(session, execution).begin())
    return execution


def _has_number(session: Session, execution: Execution, facts: Mapping[str, Any]) -> bool:
    """Write down where a command runs. False where it was cancelled, or the sandbox that it was
    started in is not the session's any more: what has a number by then ends with that sandbox."""
    with transaction.atomic():
        is_there = use_session(session.pk, session.wakes)
        row = Execution.objects.filter(pk=execution.pk, finished_at=None)
        return is_there and bool(row.update(**facts))


async def _given_up(session: Session, execution: Execution, pid: int) -> NoReturn:
    """End what was started and has no number. Raises Conflict."""
    wakes = session.wakes
    session.refresh_from_db()
    if session.state != Session.State.OPEN or session.wakes != wakes:
        # It went with its sandbox; in the next one the number is another's.
        because = "Its session ended or went to sleep while it was being started."
        end_leftovers(session, only=[execution.pk], because=because)
        ensure_not_ended(session)
        raise SessionAsleep("The session went to sleep meanwhile. Send the request again.")
    await signalling(session, pid, "SIGKILL")
    raise Conflict("It was cancelled while it was being started, and has been ended.")


async def _within_policy(
    session: Session, execution: Execution, request: ExecutionRequest
) -> Callable[[], None]:
    """Hold it to policy and floor, as `Attempt` does what somebody waits for. What is returned
    raises where the sandbox that the session then has is not as they demand."""
    parts = extensions.begin(execution, request, None)
    await parts.admit(request, execution)
    floor = required_isolation(execution)
    with ExitStack() as lending:
        lease = await lent(Step(lender_of(session)), lending)
        parts.check_provider(lease)

    def refuse() -> None:
        ensure_isolation(lease, session.isolation, floor)
        parts.check_sandbox(lease, session.isolation)

    return refuse


async def seen(session: Session) -> list[Process]:
    """The session's processes, as its sandbox tells of them, with what has ended lately."""
    return await with_sandbox(session, lambda kept: kept.processes.list(), checked_processes)


async def listing(session: Session) -> list[ProcessShape]:
    """The session's processes, each with its execution. What has ended lately is among them."""
    found = await seen(session)
    rows = Execution.objects.filter(session=session.pk, pid__in=[each.pid for each in found])
    # Each sandbox has numbers of its own: of those with the same one the last is in this sandbox.
    executions = dict(rows.order_by("pk").values_list("pid", "pk"))
    return [
        process_detail(each.pid, executions.get(each.pid), each.exit_code)
        for each in sorted(found, key=lambda each: each.pid)
    ]


def process_detail(pid: int, execution_id: UUID | None, exit_code: int | None) -> ProcessShape:
    return {
        "pid": pid,
        "execution": str(execution_id) if execution_id else None,
        "state": "running" if exit_code is None else "exited",
        "exit_code": exit_code,
    }


def is_there(session: Session, pid: int) -> bool:
    """Whether the session has, or may have, a process of this number."""
    if not 0 < pid < MOST_PID:
        return False
    # What somebody waits for has its number in its record only when it has ended.
    waited_for = Q(finished_at=None, context="", background=False)
    return Execution.objects.filter(Q(pid=pid) | waited_for, session=session.pk).exists()


def execution_of(session: Session, pid: int) -> UUID | None:
    """The execution that a process is; None where none is recorded under this number. What somebody
    waits for has its number in its record only when it has ended."""
    if not 0 < pid < MOST_PID:
        return None
    found = Execution.objects.filter(session=session.pk, pid=pid)
    return found.values_list("pk", flat=True).first()


async def writing(session: Session, pid: int, data: bytes, *, close: bool) -> None:
    await with_sandbox(
        session, lambda kept: kept.processes.write(pid, data, close=close), lambda _: None
    )


async def signalling(session: Session, pid: int, name: str) -> bool:
    """False when it has ended."""
    return await with_sandbox(
        session, lambda kept: kept.processes.signal(pid, name), lambda found: found is True
    )


async def resizing(session: Session, pid: int, size: tuple[int, int]) -> None:
    await with_sandbox(session, lambda kept: kept.processes.resize(pid, *size), lambda _: None)


def _started(kept: KeptSandbox, command: Command) -> Any:
    with named_as({"argv": "command", "environment": "env"}):
        return kept.processes.start(command)


class _Command:
    """A command as `place` runs it, once."""

    def __init__(self, wanted: CommandRequest) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._is_given_up = False

    def submit(self, kept: KeptSandbox, job: Job, emit: Emit | None) -> Future[ExecutionResult]:
        command = self._wanted.to_command(job.timeout)
        return submit(lambda: self._run(kept, command, job, emit), may_refuse=True)

    def stop(self, kept: KeptSandbox) -> bool:
        with self._lock:
            self._is_given_up = True
        # One that is being started is ended by who starts it.
        return self._pid is not None and kept.processes.signal(self._pid, "SIGKILL")

    def _run(
        self, kept: KeptSandbox, command: Command, job: Job, emit: Emit | None
    ) -> ExecutionResult:
        output = Output()

        def take(event: Event) -> None:
            output.take(event)
            if emit is not None:
                emit(event)

        pid = checked_pid(_started(kept, command))
        with self._lock:
            self._pid = pid
            is_given_up = self._is_given_up
        if is_given_up:
            kept.processes.signal(pid, "SIGKILL")
        ended = kept.processes.follow(pid, take)
        return result_of(output, ended, **{PID: pid})


def _as_execution(session: Session, wanted: CommandRequest) -> ExecutionRequest:
    # What nobody waits for may run as long as its session is there.
    left = (ends_by(session) - timezone.now()).total_seconds()
    return ExecutionRequest(
        wanted.text,
        wanted.language,
        timeout=wanted.timeout,
        subject=session.subject,
        session=session.pk,
        background=wanted.background,
        usual_timeout=max(1.0, left) if wanted.background else None,
        agent=wanted.agent,
        model=wanted.model,
        conversation=wanted.conversation,
        on_behalf_of=wanted.on_behalf_of,
        traceparent=wanted.traceparent,
    )


logger = logging.getLogger(__name__)

# What it may take to end by itself, and what the kernel and its follower may take after that.
TERM_SECONDS = 3.0
KILL_SECONDS = 2.0
# What its follower may need to record the end of one that had ended before.
RECORD_SECONDS = 0.05


async def stop_command(execution: Execution) -> None:
    """SIGTERM to it and its group, then SIGKILL. It has a signal that says who wanted it.

    Its record is closed where it was seen to end.
    """
    session, pid = execution.session, execution.pid
    if session is None or pid is None:
        return
    try:
        for name, seconds in (("SIGTERM", TERM_SECONDS), ("SIGKILL", KILL_SECONDS)):
            ran = await with_sandbox(session, _signal(pid, name), bool, is_use=False)
            await event_stream.until_ended(execution.pk, seconds if ran else RECORD_SECONDS)
            if not Execution.objects.filter(pk=execution.pk, finished_at=None).exists():
                return
        await record_if_ended(session, execution)
    except SandboxError as error:
        logger.warning("execution %s could not be ended: %s", execution.pk, error.message)


def _signal(pid: int, name: str) -> Callable[[KeptSandbox], bool]:
    return lambda kept: kept.processes.signal(pid, name)
