"""Commands that wait for a person's approval before they start: executions that no worker takes.

The whole command is what is approved: its arguments, folder, user, variables, terminal and input.
Who asked for it starts it once it is approved. The claim of its row lets one of them win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from django.urls import NoReverseMatch, reverse

from executions.runs import active_runs, event_stream, extensions, payloads
from executions.runs.heartbeat import OwnershipLost
from executions.runs.models import Approval, Execution
from executions.runs.queue import claim
from executions.runs.record import open_record, reject
from executions.runs.requests import Caller, Conflict, ExecutionRequest
from executions.runs.results import executions_of
from executions.runs.service import HasEnded, cancel
from executions.sessions.cells import OnStart, as_execution, ensure_may_start, launch
from executions.sessions.models import Session
from executions.sessions.requests import CommandRequest, TerminalSize
from providers.errors import ProviderUnavailable, SandboxError

_PAGE = "admin:executions_approval_change"


@dataclass(frozen=True)
class Asked:
    """A command that waits. `page` is the path where a person decides, "" without such a page."""

    execution: Execution
    approval_id: int
    page: str


async def ask_first(
    session: Session, wanted: CommandRequest, caller: Caller, key: str | None = None
) -> Asked | None:
    """Queue a command that a person has to approve; None for one that needs no approval.

    `key` is its idempotency key. Raises SandboxError, and Conflict for a key that has an execution.
    """
    request = replace(as_execution(session, wanted), arguments=_form(wanted), env=wanted.env)
    review = await extensions.review(request, caller)
    if review is None:
        return None
    ensure_may_start(session, wanted, caller)
    queued = replace(review.request, idempotency_key=key)
    execution, is_new = open_record(queued, caller, review.on_insert)
    if not is_new:
        raise Conflict("The command was started before. Nothing was run.")
    return asked_for(execution)


def asked_for(execution: Execution) -> Asked | None:
    """Return how an execution waits, or has waited, for an approval; None where none was asked."""
    approval = Approval.objects.filter(execution=execution.pk).values_list("pk", flat=True).first()
    if approval is None:
        return None
    try:
        page = reverse(_PAGE, args=[approval])
    except NoReverseMatch:
        page = ""
    return Asked(execution, approval, page)


async def start_approved(
    session: Session, execution_id: UUID, caller: Caller, *, on_start: OnStart
) -> Execution:
    """Start a command that was approved. As `start_command`.

    Raises Conflict where it was withdrawn, rejected, or started by another caller.
    """
    active_runs.ensure_not_stopping()
    execution = claim(execution_id, background=True)
    if execution is None:
        raise Conflict("The command was withdrawn or was started elsewhere.")
    try:
        request = ExecutionRequest.from_stored(payloads.read(execution))
        wanted = _command(request)
        ensure_may_start(session, wanted, caller)
    except SandboxError as error:
        reject(execution, error)
        raise
    try:
        return await launch(session, execution, request, wanted.to_command(None), on_start)
    except OwnershipLost:
        raise Conflict("The command was withdrawn before it started.") from None


async def withdraw(execution_id: UUID, by: str) -> bool:
    """End a command that waits, or that was just started. Whether this ended it."""
    execution = executions_of(None).select_related("session").get(pk=execution_id)
    try:
        await cancel(execution, by)
    except HasEnded:
        return False
    return True


@contextmanager
def decision_on(execution_id: UUID) -> Iterator[Future[None]]:
    """What is done when the approval is decided, the execution has ended, or the service stops. No
    thread waits for it. Raises RateLimited where no thread can be had that looks for all."""
    undecided, decided = event_stream.Undecided(execution_id), Future[None]()
    undecided.ended.bring(decided)
    with event_stream.poll.join(undecided):
        yield decided


def _form(wanted: CommandRequest) -> dict[str, Any]:
    """All that decides how it runs, but its variables, which have a place of their own."""
    return {
        "command": list(wanted.command),
        "cwd": wanted.cwd,
        "user": wanted.user,
        "stdin": wanted.stdin,
        "terminal": None if wanted.pty is None else list(wanted.pty.pair),
    }


def _command(request: ExecutionRequest) -> CommandRequest:
    """The command of a stored request. Raises ProviderUnavailable for what is none."""
    form: Mapping[str, Any] = request.arguments or {}
    try:
        terminal = form["terminal"]
        size = None if terminal is None else TerminalSize(cols=terminal[0], rows=terminal[1])
        argv = form["command"]
        return CommandRequest(
            command=argv,
            shell="" if argv else request.code,
            cwd=form["cwd"],
            env=request.env,
            user=form["user"],
            stdin=form["stdin"],
            pty=size,
            background=True,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ProviderUnavailable("The queued command cannot be read. Send it again.") from error
