"""Cells and commands in a session: each is an execution, and runs in the session's sandbox."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import refuse
from executions.ledger.entry import ensure_ledger
from executions.runs import event_stream, extensions
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, Placement, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, borrow_lease
from executions.runs.queue import mark_dispatched
from executions.runs.record import Outcome, open_record, reject
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.runs.results import ValidatedResult
from executions.runs.routing import allowed_steps, ensure_isolation, required_isolation
from executions.runs.service import execute
from executions.sessions import cell_order, maintenance
from executions.sessions.background_commands import Follower, Output, record_if_ended, result_of
from executions.sessions.cell_order import use_session
from executions.sessions.control import with_sandbox
from executions.sessions.ending import end_leftovers, mark_lost
from executions.sessions.maintenance import maintain_in_background, save_after_run
from executions.sessions.models import Session
from executions.sessions.queries import ends_by, session_of
from executions.sessions.requests import (
    CommandRequest,
    ProcessShape,
    SessionAsleep,
    SessionClosed,
    SessionLost,
    ensure_not_ended,
    rename_fields,
)
from executions.sessions.session_sandbox import (
    MOST_PID,
    SHARING,
    SandboxRunner,
    call_sandbox,
    check_pid,
    check_processes,
    lender_of,
    route_in,
    session_metadata,
)
from executions.sessions.storage.wake import (
    RESTORED,
    ensure_awake,
    is_first_after_wake,
    mark_wake_reported,
)
from providers.errors import KeptSandboxLost, SandboxError
from providers.languages import normalize_language
from providers.sandbox import DEFAULT_CONTEXT, KeptSandbox, Process
from providers.values import SANDBOX_ENDED, Command, Emit, Event, ExecutionResult, Job
from providers.waiting import submit

logger = logging.getLogger(__name__)


# The key of a result's metadata under which it says whether its context still has its state.
CONTEXT_KEPT = "context_kept"
# The same, of the process that a command was.
PID = "pid"
OnStart = Callable[[EventLog], object]


def step_in(session: Session, context: str, runs: SandboxRunner | None = None) -> Step:
    """Return the step that lends the session's sandbox. See `route_in`."""
    return Step(route_in(session, context, runs), host=SessionHost(session))


def cell_of(session_id: UUID, request: ExecutionRequest, caller: Caller) -> Placement:
    """Return the request as it runs in its session, and where.

    Raises NoSuchSession and InvalidConfiguration. That the session has ended is said where the
    record is opened: of a request that is known there is one to be told.
    """
    session = session_of(caller.tenant, session_id)
    context = request.context or DEFAULT_CONTEXT
    language = language_of(session, context)
    if language is None:
        refuse("context", "The session has no context with this id.")
    named = normalize_language(request.language)
    if named and named != normalize_language(language):
        refuse("language", f"The context {context!r} runs {language}. Name one that runs {named}.")
    subject = request.subject or session.subject
    placed = replace(request, context=context, language=language, subject=subject)
    return Placement(placed, [step_in(session, context)])


def steps_of_queued(session_id: UUID, request: ExecutionRequest) -> Sequence[Step]:
    """Return where a queued request of a session runs. Raises Conflict for one that has ended."""
    session = Session.objects.get(pk=session_id)
    ensure_not_ended(session)
    return [step_in(session, request.context)]


def language_of(session: Session, context: str) -> str | None:
    return next((each["language"] for each in session.contexts if each["id"] == context), None)


class SessionHost:
    """A session as the owner of its sandbox (`runs.provider_calls.Host`).

    `session` is as it was when its sandbox was lent.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def provider(self) -> str:
        return self._session.provider

    def bind(self, execution: Execution) -> None:
        execution.session = self._session

    async def run(
        self, execution: Execution, run: Callable[[], Coroutine[ValidatedResult]]
    ) -> ValidatedResult:
        """Run it; a session that sleeps is woken before, also where its sandbox is just gone."""
        session = self._session
        if session.state == Session.State.ASLEEP:
            await ensure_awake(session, execution.turn)
        try:
            return await run()
        except KeptSandboxLost as error:
            if error.started:
                raise
            # Nothing ran, and nothing is lost of what was saved.
            mark_lost(session, error.message)
            if not session.is_living:
                raise
            await ensure_awake(session, execution.turn)
            return await run()

    def end_of(self, error: SandboxError) -> SandboxError:
        """Return what to tell: the session was closed meanwhile, or is lost, or has only what was
        saved of it."""
        if isinstance(error, KeptSandboxLost):
            mark_lost(self._session, error.message)
        try:
            ensure_not_ended(self._session)
        except SessionClosed:
            return SessionClosed("Its session was closed.", started=error.started)
        except SessionLost as lost:
            return SessionLost(lost.message, started=error.started)
        if isinstance(error, KeptSandboxLost):
            return SessionAsleep(
                f"{error.message} The next use of the session restores the saved files, but no "
                "variables. Changes made by this run may be lost.",
                started=error.started,
            )
        return error

    def result_values(self, execution: Execution, result: ExecutionResult) -> dict[str, Any]:
        ended = SANDBOX_ENDED in result.metadata
        if ended:
            mark_lost(self._session, "its sandbox ended during a run")
        kept = result.metadata.get(CONTEXT_KEPT)
        if execution.context:
            return {"context_kept": kept is True and not ended}
        pid = result.metadata.get(PID)
        return {"pid": pid} if type(pid) is int and 0 < pid < 2**53 else {}

    def result_metadata(self, execution: Execution) -> Mapping[str, Any]:
        restored = {RESTORED: True} if is_first_after_wake(self._session, execution) else {}
        return {**restored, **session_metadata(self._session)}

    def note_recorded(self, metadata: Mapping[str, Any]) -> None:
        if RESTORED in metadata:
            mark_wake_reported(self._session)

    def after_run(self, execution: Execution) -> Coroutine[None]:
        return save_after_run(execution, self._session)


async def run_command(
    session: Session, wanted: CommandRequest, caller: Caller, log: EventLog | None = None
) -> Outcome:
    """Run a command and wait for its end: a run like every other. As `execute`."""
    request = as_execution(session, wanted)
    step = step_in(session, "", _Command(wanted))
    return await execute(request, caller, step=step, log=log)


async def start_command(
    session: Session,
    wanted: CommandRequest,
    caller: Caller,
    *,
    seconds: float | None = None,
    key: str | None = None,
    on_start: OnStart = lambda log: None,
    is_kept: bool = True,
) -> Execution:
    """Start a command in the background. It has an execution from now on, and ends with the
    session at the latest, or after so many `seconds`. `key` is its idempotency key, and `on_start`
    is given where its output is told, which `is_kept` for who comes later. Raises SandboxError; the
    record then says that it was not started. Raises Conflict for a key that has an execution.
    """
    request = as_execution(session, wanted, key)
    ensure_may_start(session, wanted, caller)
    execution, is_new = open_record(request, caller)
    if not is_new:
        raise Conflict("The command was started before. Nothing was run.")
    command = wanted.to_command(seconds)
    return await launch(session, execution, request, command, on_start, is_kept=is_kept)


def ensure_may_start(session: Session, wanted: CommandRequest, caller: Caller) -> None:
    """Raises BeyondKey for what the caller's key is not for, and LedgerUnavailable."""
    allowed_steps(caller, wanted.language, [step_in(session, "", _Command(wanted))])
    ensure_ledger()


async def launch(
    session: Session,
    execution: Execution,
    request: ExecutionRequest,
    command: Command,
    on_start: OnStart,
    *,
    is_kept: bool = True,
) -> Execution:
    """Start the command of an execution that this process has. As `start_command`."""
    try:
        refuse, said = await _apply_policy(session, execution, request)
        if execution.pending is not None:
            mark_dispatched(execution)

        def start(kept: KeptSandbox) -> Any:
            # Only here it is known which sandbox it is: the session may have been woken for this.
            refuse()
            return _start(kept, command)

        pid = await with_sandbox(session, start, check_pid)
    except SandboxError as error:
        reject(execution, error)
        raise
    facts = {
        **said,
        "pid": pid,
        "provider": session.provider,
        "config_version": session.config_version,
        "runtime": session.runtime,
        "isolation": session.isolation,
        "sharing": SHARING,
        # From now on it is no process's of ours.
        "process_id": None,
    }
    try:
        has_number = _has_number(session, execution, facts)
    except DatabaseFailure:
        # Nobody could end what has no number, or say of it that it runs.
        with suppress(SandboxError):
            await call_sandbox(session, _signal(pid, "SIGKILL"), bool)
        raise
    if not has_number:
        await _kill_unrecorded(session, execution, pid)
    for name, value in facts.items():
        setattr(execution, name, value)
    on_start(Follower(session, execution, is_kept=is_kept).begin())
    return execution


def _has_number(session: Session, execution: Execution, facts: Mapping[str, Any]) -> bool:
    """Write down where a command runs. False where it was cancelled, or the sandbox that it was
    started in is not the session's any more: what has a number by then ends with that sandbox."""
    with transaction.atomic():
        is_there = use_session(session.pk, session.wakes)
        row = Execution.objects.filter(pk=execution.pk, finished_at=None)
        return is_there and bool(row.update(**facts))


async def _kill_unrecorded(session: Session, execution: Execution, pid: int) -> NoReturn:
    """End what was started and has no number. Raises Conflict."""
    wakes = session.wakes
    session.refresh_from_db()
    if session.state != Session.State.OPEN or session.wakes != wakes:
        # It went with its sandbox; in the next one the number is another's.
        because = "Its session ended or went to sleep while it was being started."
        end_leftovers(session, only=[execution.pk], because=because)
        ensure_not_ended(session)
        raise SessionAsleep("The session went to sleep meanwhile. Send the request again.")
    await send_signal(session, pid, "SIGKILL")
    raise Conflict("It was cancelled while it was being started, and has been ended.")


async def _apply_policy(
    session: Session, execution: Execution, request: ExecutionRequest
) -> tuple[Callable[[], None], Mapping[str, Any]]:
    """Hold it to policy and floor, as `Attempt` does what somebody waits for. What is returned
    raises where the sandbox that the session then has is not as they demand, and the columns that
    say who has approved it."""
    parts = extensions.begin(execution, request, None)
    await parts.admit(request, execution)
    floor = required_isolation(execution)
    with ExitStack() as lending:
        lease = await borrow_lease(Step(lender_of(session)), lending)
        parts.check_provider(lease)

    def refuse() -> None:
        ensure_isolation(lease, session.isolation, floor)
        parts.check_sandbox(lease, session.isolation)

    if execution.mode != Execution.Mode.ASYNC:
        return refuse, {}
    return refuse, {"meta": {**execution.meta, **parts.metadata()}}


async def list_processes(session: Session) -> list[Process]:
    """Return the session's processes, as its sandbox tells of them, with what has ended lately."""
    return await with_sandbox(session, lambda kept: kept.processes.list(), check_processes)


async def list_commands(session: Session) -> list[ProcessShape]:
    """Return the session's processes, each with its execution, with what has ended lately."""
    found = await list_processes(session)
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


async def write_input(session: Session, pid: int, data: bytes, *, close: bool) -> None:
    """Write to the standard input of a process."""
    await with_sandbox(
        session, lambda kept: kept.processes.write(pid, data, close=close), lambda _: None
    )


async def send_signal(session: Session, pid: int, name: str) -> bool:
    """Send a signal to a process. False when it has ended."""
    return await with_sandbox(
        session, lambda kept: kept.processes.signal(pid, name), lambda found: found is True
    )


async def resize_terminal(session: Session, pid: int, size: tuple[int, int]) -> None:
    """Give the terminal of a process another size."""
    await with_sandbox(session, lambda kept: kept.processes.resize(pid, *size), lambda _: None)


def _start(kept: KeptSandbox, command: Command) -> Any:
    with rename_fields({"argv": "command", "environment": "env"}):
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

        pid = check_pid(_start(kept, command))
        with self._lock:
            self._pid = pid
            is_given_up = self._is_given_up
        if is_given_up:
            kept.processes.signal(pid, "SIGKILL")
        ended = kept.processes.follow(pid, take)
        return result_of(output, ended, **{PID: pid})


def as_execution(
    session: Session, wanted: CommandRequest, key: str | None = None
) -> ExecutionRequest:
    """Return the command as a request to be recorded. `key` is its idempotency key."""
    # What nobody waits for may run as long as its session is there.
    left = (ends_by(session) - timezone.now()).total_seconds()
    return ExecutionRequest(
        wanted.text,
        wanted.language,
        timeout=wanted.timeout,
        subject=session.subject,
        session=session.pk,
        background=wanted.background,
        idempotency_key=key,
        usual_timeout=max(1.0, left) if wanted.background else None,
        agent=wanted.agent,
        model=wanted.model,
        conversation=wanted.conversation,
        on_behalf_of=wanted.on_behalf_of,
        traceparent=wanted.traceparent,
    )


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
            await event_stream.wait_for_end(execution.pk, seconds if ran else RECORD_SECONDS)
            if not Execution.objects.filter(pk=execution.pk, finished_at=None).exists():
                return
        await record_if_ended(session, execution)
    except SandboxError as error:
        logger.warning("execution %s could not be ended: %s", execution.pk, error.message)


def _signal(pid: int, name: str) -> Callable[[KeptSandbox], bool]:
    return lambda kept: kept.processes.signal(pid, name)


class _Turn(RunPart):
    """The turn of one cell in its context."""

    def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> Coroutine[None]:
        return cell_order.wait_turn(execution, waiting)


class Sessions(Extension):
    """Registered behind all capabilities: a cell waits for its turn once it may run at all."""

    metadata_keys = (RESTORED,)

    def place(self, request: ExecutionRequest, caller: Caller) -> Placement | None:
        return cell_of(request.session, request, caller) if request.session is not None else None

    def place_queued(self, request: ExecutionRequest) -> Sequence[Step] | None:
        session_id = request.session
        return steps_of_queued(session_id, request) if session_id is not None else None

    def before_insert(self, execution: Execution) -> None:
        if execution.session_id is not None:
            cell_order.enqueue(execution)

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        return _Turn() if execution.session_id is not None else None

    def stop_process(self, execution: Execution) -> Coroutine[None]:
        return stop_command(execution)

    def after_run(self, execution: Execution) -> None:
        if execution.session_id is not None:
            cell_order.finish_turn(execution)

    def start_worker(self, goes_on: Callable[[], bool]) -> None:
        maintenance.end_on_time()
        maintain_in_background(goes_on)
