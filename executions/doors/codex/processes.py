"""The processes of one attachment: each is a command of its session, and an execution.

What a process puts out has numbers, and is kept for a while for a client that asks again. One that
a person has to approve is answered as started, and says that it waits. All of it is state of the
event loop; what needs a database is done by `call`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import UUID

from django.db import Error as DatabaseFailure

from executions.doors.codex.messages import (
    INVALID_REQUEST,
    Failure,
    Start,
    Write,
    failure_of,
)
from executions.doors.codex.process import Process
from executions.doors.codex.recovery import (
    Found,
    Moved,
    Name,
    find_again,
    follow,
    output_in,
)
from executions.kernel.coroutines import Coroutine
from executions.runs import event_log, event_stream
from executions.runs.advice import advice_text
from executions.runs.event_log import STREAMS, EventLog
from executions.runs.models import Approval, Execution
from executions.runs.requests import Conflict
from executions.runs.results import executions_of, may_have_missed
from executions.sessions import cells
from executions.sessions.background_commands import record_if_ended
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.waiting_commands import Asked, decision_on, withdraw
from providers import draining
from providers.errors import KeptSandboxLost, RateLimited, SandboxError
from providers.slices import decoded

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Of one attachment. Those that have ended lately make room.
MOST_PROCESSES = 64
# How long one that has ended can be asked for.
KEPT_SECONDS = 30.0
_PIECE_BYTES = 64 * 1024
_WRITE_BYTES = 32 * 1024
_LOOK_SECONDS = 1.0
# After so long what one puts out is written for other processes, where its client may come again.
_WRITE_AFTER_SECONDS = 1.0
# How long a client that comes again may take to say what it knows.
_RESUME_SECONDS = 5.0
_LEFT_OUT = b"\n[output truncated: there was more than is kept]\n"
# Of one that has no code of its own: as the shell has it for what was killed, and for what cannot
# be started.
_KILLED, _NOT_STARTED = 137, 126
_LEFT = "its client, which left"

Notify = Callable[[str, Mapping[str, Any]], Awaitable[None]]


class Call(Protocol):
    """Has work done on threads, and returns what it comes to."""

    async def __call__(self, work: Callable[[], Coroutine[T]], /) -> T: ...


Started = tuple[Execution, EventLog]
# Starts what was approved, with the key that it was asked for with.
Begin = Callable[[UUID], Awaitable[Started]]
OnSession = Callable[[Callable[[Session], Coroutine[Any]]], Awaitable[Any]]


class Processes:
    """Those of one attachment. `notify` tells whoever is attached."""

    def __init__(self, call: Call, notify: Notify) -> None:
        self._call = call
        self._notify = notify
        self._by_id: dict[str, Process] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self._is_muted = False

    def find(self, process_id: str) -> Process:
        """Raises Failure for one that is not there, or is only being started."""
        process = self._by_id.get(process_id)
        if process is None:
            raise Failure(INVALID_REQUEST, f"unknown process id {process_id[:256]}")
        if not process.is_known:
            raise Failure(INVALID_REQUEST, f"process id {process_id} is starting")
        return process

    async def start(
        self,
        wanted: Start,
        run: Callable[[], Awaitable[Started | Asked]],
        begin: Begin,
        on_session: OnSession,
        origin: str = "",
    ) -> dict[str, Any]:
        """Start one, or have it wait for its approval, whose page is at `origin`. Raises Failure,
        and what `run` does; it was not named then."""
        if wanted.process_id in self._by_id:
            raise Failure(INVALID_REQUEST, f"process {wanted.process_id} already exists")
        if len(self._by_id) >= MOST_PROCESSES:
            self._make_room()
        process = self._by_id[wanted.process_id] = Process(Name.of(wanted))
        process.is_resumed.set()
        try:
            begun = await run()
        except BaseException:
            del self._by_id[process.id]
            raise
        if isinstance(begun, Asked):
            process.execution_id, process.is_waiting = begun.execution.pk, True
            await self._put(process, "stderr", _waiting_line(begun, origin))
            self._carry_on(self._wait(process, begun.execution.pk, begin, on_session))
        else:
            await self._begin(process, begun, on_session)
        return {"processId": process.id, "sandboxType": "none"}

    def adopt(
        self, all_found: Sequence[Found], begin: Begin, on_session: OnSession, origin: str
    ) -> None:
        """Take in what another process has started, as its client may know it already."""
        for found in all_found:
            execution, process = found.execution, Process(found.name)
            process.execution_id = execution.pk
            self._by_id[process.id] = process
            if found.asked is not None:
                process.put("stderr", _waiting_line(found.asked, origin))
            process.skip(found.left_out)
            for entry in output_in(found.known):
                process.put(entry.type, entry.data)
            if execution.finished_at is not None:
                self._adopt_end(process, found)
            elif execution.status == Execution.Status.QUEUED:
                process.is_waiting = True
                self._carry_on(self._wait(process, execution.pk, begin, on_session))
            else:
                process.pid = execution.pid
                # Until it has a number it can only be withdrawn.
                process.is_waiting = execution.pid is None
                self._carry_on(self._find_started(process, found, begin, on_session))

    def _adopt_end(self, process: Process, found: Found) -> None:
        execution = found.execution
        if execution.pid is None and found.asked is not None:
            process.put("stderr", _refusal(execution.error_message))
            process.exit_code = _NOT_STARTED
        else:
            has_put_out = bool(found.left_out or found.known)
            for stream, data in _rest_of(
                execution, found.advice, is_tty=process.is_tty, has_put_out=has_put_out
            ):
                process.put(stream, data)
            process.exit_code = _exit_code_of(process, execution)
        process.next_seq()
        process.is_closed = True
        process.next_seq()
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, process)

    async def _find_started(
        self, process: Process, found: Found, begin: Begin, on_session: OnSession
    ) -> None:
        """Follow one that another process has started, or is just starting."""
        while found.execution.pid is None and found.execution.finished_at is None:
            await asyncio.sleep(_LOOK_SECONDS)
            found = await self._ask(partial(_again, found.execution.pk, process.name))
            if found.execution.status == Execution.Status.QUEUED:
                # The process that was starting it has ended, and nothing of it ran.
                await self._wait(process, found.execution.pk, begin, on_session)
                return
        if found.execution.pid is None:
            await self._refuse(process, found.execution.error_message or "It has ended.")
            return
        if found.execution.finished_at is not None:
            process.skip(found.left_out)
            for entry in found.known:
                await self._put(process, entry.type, entry.data)
            has_put_out = bool(found.left_out or found.known)
            await self._tell_end(process, found.execution, has_put_out=has_put_out)
            return
        # What comes before its client has said what it knows could not be numbered.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.is_resumed.wait(), _RESUME_SECONDS)
        process.resume(0)
        try:
            execution, log = await self._ask(partial(_take_output, found))
        except SandboxError as error:
            process.failure = error.message
            await self._end(process, _KILLED)
            return
        after = found.known[-1].seq if found.known else 0
        has_put_out = bool(output_in(found.known))
        async with process.writing:
            process.begin(execution)
            self._carry_on(self._follow(process, execution, log, after, has_put_out=has_put_out))
            event_log.follow(log)
            await self._write_held(process, on_session)

    def mute(self) -> None:
        """Tell nothing more, and start nothing: another process has told its client since."""
        self._is_muted = True
        # What is being started goes on to its end.
        for task in list(self._following):
            task.cancel()

    def _make_room(self) -> None:
        """Forget the one that has ended first. Raises Failure where all run."""
        ended = next((each for each in self._by_id.values() if each.is_closed), None)
        if ended is None:
            raise Failure(INVALID_REQUEST, f"There are {MOST_PROCESSES} processes. End one.")
        self._forget(ended)

    def _forget(self, process: Process) -> None:
        # Its name may be another's by now.
        if self._by_id.get(process.id) is process:
            del self._by_id[process.id]

    def _carry_on(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _begin(self, process: Process, begun: Started, on_session: OnSession) -> None:
        execution, log = begun
        process.begin(execution)
        # Most end at once: writing what they put out would take longer than they do.
        asyncio.get_running_loop().call_later(_WRITE_AFTER_SECONDS, event_log.follow, log)
        self._carry_on(self._follow(process, execution, log))
        if self._has_ended:
            # Its client left while it was being started.
            await on_session(lambda session: _kill(session, process))

    async def _wait(
        self, process: Process, execution_id: UUID, begin: Begin, on_session: OnSession
    ) -> None:
        """Wait for the approval of one, and start it then."""
        if self._has_ended:
            await self._withdraw(execution_id, _LEFT)
        try:
            if reason := await self._wait_for_decision(execution_id):
                await self._refuse(process, reason)
                return
            if self._is_muted or self._has_ended or draining.is_draining():
                # It waits on in its record, where another process finds it or it is withdrawn.
                return
            begun = await begin(execution_id)
        except Moved:
            return
        except Conflict:
            # Where its client was before, it was started in this moment, or it was withdrawn.
            found = await self._ask(partial(_again, execution_id, process.name))
            await self._find_started(process, found, begin, on_session)
            return
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                logger.exception("execution %s cannot be started", execution_id)
            because = "It could not be started." if failure is None else failure.message
            await self._withdraw(execution_id, "the service")
            await self._refuse(process, because)
            return
        async with process.writing:
            await self._begin(process, begun, on_session)
            await self._write_held(process, on_session)

    async def _ask(self, work: Callable[[], Coroutine[T]]) -> T:
        """Have done what may be done twice, until the database answers and there is a thread."""
        while True:
            try:
                return await self._call(work)
            except (DatabaseFailure, RateLimited) as error:
                if draining.is_draining():
                    raise
                logger.info("processes of Codex wait for the database: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _withdraw(self, execution_id: UUID, by: str) -> None:
        try:
            await self._ask(lambda: withdraw(execution_id, by))
        except Exception:
            # It stays in the queue until its time is over: only who asked for it starts it.
            logger.exception("execution %s cannot be withdrawn", execution_id)

    async def _wait_for_decision(self, execution_id: UUID) -> str:
        """Wait until it is decided, or the service stops. Why it does not run; "" where it may."""
        while True:
            with decision_on(execution_id) as decided:
                await asyncio.wrap_future(decided)
            if draining.is_draining():
                return ""
            is_waiting, reason = await self._ask(lambda: _standing(execution_id))
            if not is_waiting:
                return reason
            # The database was away for long.
            await asyncio.sleep(_LOOK_SECONDS)

    async def _write_held(self, process: Process, on_session: OnSession) -> None:
        data, process.held = bytes(process.held), bytearray()
        if not data:
            return
        try:
            await on_session(lambda session: _write(session, process.pid or 0, data))
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                logger.exception("input of execution %s is lost", process.execution_id)
            because = "" if failure is None else failure.message
            said = f"The input from before the approval is lost. {because}\n"
            await self._put(process, "stderr", said.encode())

    async def _refuse(self, process: Process, reason: str) -> None:
        """Tell that one that waited does not run."""
        await self._put(process, "stderr", _refusal(reason))
        await self._end(process, _NOT_STARTED)

    async def write(self, wanted: Write, on_session: OnSession) -> dict[str, Any]:
        """Write to the input of one, in the order in which it was asked for."""
        process = self._by_id.get(wanted.process_id)
        if process is None:
            return {"status": "unknownProcess"}
        if not process.is_known:
            return {"status": "starting"}
        if not process.takes_input or process.exit_code is not None:
            return {"status": "stdinClosed"}
        try:
            data = decoded(wanted.chunk)
        except ValueError as error:
            raise Failure(INVALID_REQUEST, f"chunk: {error}") from None
        async with process.writing:
            if wanted.write_id and wanted.write_id in process.writes:
                return {"status": "accepted"}
            if process.is_waiting:
                process.hold(data)
            else:
                await on_session(lambda session: _write(session, process.pid or 0, data))
            process.writes.append(wanted.write_id)
        return {"status": "accepted"}

    async def signal(self, process: Process, name: str, on_session: OnSession) -> bool:
        """Send a signal to one that runs. False where it does not."""
        if not process.is_running:
            return False
        pid = process.pid or 0
        return bool(await on_session(lambda session: cells.send_signal(session, pid, name)))

    def of(self, process_id: str) -> Process | None:
        """One that runs, or has ended lately."""
        process = self._by_id.get(process_id)
        return process if process is not None and process.is_known else None

    async def end(self, on_session: OnSession) -> None:
        """End all that run: nobody is attached any more, and nobody comes back."""
        self._has_ended = True
        for each in list(self._by_id.values()):
            if each.is_waiting and (waiting := each.execution_id):
                await self._withdraw(waiting, _LEFT)
        running = [each for each in self._by_id.values() if each.is_running]
        if running:

            async def kill(session: Session) -> None:
                for each in running:
                    await _kill(session, each)

            await on_session(kill)

    async def _follow(
        self,
        process: Process,
        execution: Execution,
        log: EventLog,
        after: int = 0,
        *,
        has_put_out: bool = False,
    ) -> None:
        """Tell what it puts out behind an event, and how it ends."""
        try:
            has_put_out = await self._tell_output(process, log, after) or has_put_out
            if execution.finished_at is None:
                # It was not this process that has closed its record.
                execution = await self._ask(lambda: _end_of(execution.pk))
            if execution.finished_at is None:
                # The service stops. It goes on, and another process tells of its end.
                return
        except Exception:
            logger.exception("the end of execution %s cannot be sent", execution.pk)
            process.failure = "The end of the command could not be read."
            await self._end(process, _KILLED)
            return
        await self._tell_end(process, execution, has_put_out=has_put_out)

    async def _tell_end(self, process: Process, execution: Execution, *, has_put_out: bool) -> None:
        try:
            advice = await self._advice_for(execution)
            for stream, data in _rest_of(
                execution, advice, is_tty=process.is_tty, has_put_out=has_put_out
            ):
                await self._put(process, stream, data)
            exit_code = _exit_code_of(process, execution)
        except Exception:
            logger.exception("the end of execution %s cannot be sent", execution.pk)
            exit_code, process.failure = _KILLED, "The end of the command could not be read."
        await self._end(process, exit_code)

    async def _end(self, process: Process, exit_code: int) -> None:
        """Tell that it has ended, and forget it after a while."""
        process.exit_code = exit_code
        process.is_waiting, process.held = False, bytearray()
        ended = {"processId": process.id, "seq": process.next_seq(), "exitCode": process.exit_code}
        await self._tell("process/exited", {**ended, "sandboxDenied": False})
        process.is_closed = True
        closing = {"processId": process.id, "seq": process.next_seq()}
        await self._tell("process/closed", closing)
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, process)

    async def _advice_for(self, execution: Execution) -> str:
        if not may_have_missed(execution):
            return ""

        async def work() -> str:
            return advice_text(execution)

        return await self._call(work)

    async def _tell_output(self, process: Process, log: EventLog, after: int) -> bool:
        """Tell what comes until nothing more does. Whether there was something."""
        has_put_out = False
        while True:
            entries, is_all = log.read(after, _PIECE_BYTES)
            for entry in entries:
                after = entry.seq
                if entry.type in STREAMS and entry.data:
                    has_put_out = True
                    await self._put(process, entry.type, entry.data)
            if is_all:
                break
            if not entries:
                await asyncio.wrap_future(log.next_change(after))
        closed: Future[None] = Future()
        log.closed.bring(closed)
        await asyncio.wrap_future(closed)
        return has_put_out

    async def _put(self, process: Process, stream: str, data: bytes) -> None:
        await self._tell("process/output", process.put(stream, data))

    async def _tell(self, method: str, params: Mapping[str, Any]) -> None:
        if not self._is_muted:
            await self._notify(method, params)


def _waiting_line(asked: Asked, origin: str) -> bytes:
    page = f": {origin}{asked.page}" if asked.page else ""
    return f"Waiting for approval {asked.approval_id} of exactly this command{page}\n".encode()


def _refusal(reason: str) -> bytes:
    return f"It did not run: {reason}\n".encode()


def _exit_code_of(process: Process, execution: Execution) -> int:
    if execution.exit_code is None:
        process.failure = execution.error_message or "The command was ended."
        return _KILLED
    return execution.exit_code


async def _again(execution_id: UUID, name: Name) -> Found:
    return find_again(execution_id, name)


async def _take_output(found: Found) -> Started:
    return follow(found)


async def _standing(execution_id: UUID) -> tuple[bool, str]:
    """Whether one still waits for a decision, and why it will not run; "" where it may."""
    execution = executions_of(None).select_related("approval").get(pk=execution_id)
    if not execution.is_open:
        return False, execution.error_message or "It has ended."
    return execution.approval.status == Approval.Status.WAITING, ""


async def _write(session: Session, pid: int, data: bytes) -> None:
    for at in range(0, len(data), _WRITE_BYTES):
        await cells.write_input(session, pid, data[at : at + _WRITE_BYTES], close=False)


async def _kill(session: Session, process: Process) -> bool:
    return await cells.send_signal(session, process.pid or 0, "SIGKILL")


async def _end_of(execution_id: UUID) -> Execution:
    """Its record once that is closed. One that nobody follows is looked after here."""
    while True:
        execution = executions_of(None).select_related("session").get(pk=execution_id)
        if execution.finished_at is not None or draining.is_ending():
            return execution
        await event_stream.wait_for_end(execution_id, _LOOK_SECONDS)
        session = execution.session
        if session is None or not session.is_living:
            continue
        try:
            await record_if_ended(session, execution)
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
        except SandboxError as error:
            # What is out of reach may run on. It ends with its session at the latest.
            logger.info("execution %s cannot be asked for: %s", execution_id, error.message)


def _rest_of(
    execution: Execution, advice: str, *, is_tty: bool, has_put_out: bool
) -> list[tuple[str, bytes]]:
    """What its client is told beside what was heard of it."""
    found: list[tuple[str, bytes]] = []
    if not has_put_out:
        found += [(name, getattr(execution, name).encode()) for name in STREAMS]
    if execution.stdout_truncated or execution.stderr_truncated:
        found.append(("stderr", _LEFT_OUT))
    if execution.exit_code is None:
        found.append(("stderr", f"{execution.error_message}\n".encode()))
    elif not is_tty:
        found.append(("stderr", advice.encode()))
    return [(name, data) for name, data in found if data.strip()]
