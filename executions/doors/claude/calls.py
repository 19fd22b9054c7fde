"""Tool calls of one agent's session, carried out in one session of ours.

Each call is an execution with a key of its own for the whole tenant: it runs once, whichever worker
asks for it and however often. A call that an agent's owner wants to be asked about waits for an
approval of its exact code.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from django.conf import settings
from django.db import close_old_connections

from executions.capabilities.conversations import find_or_open
from executions.capabilities.policies.approvals import ASKED, ask_for, verdict_on
from executions.doors.claude.client import AgentSession
from executions.doors.claude.tools import (
    FILES_CONTEXT,
    MOST_MEDIA_BYTES,
    Prepared,
    Result,
    media_result,
    prepare,
    result_of,
)
from executions.doors.claude.transcript import ToolCall
from executions.doors.session_options import read_options
from executions.kernel.coroutines import run_sync
from executions.kernel.database import problem_of
from executions.kernel.text import is_storable
from executions.ledger.entry import text_hash
from executions.runs import event_stream
from executions.runs.active_runs import ClientRun
from executions.runs.event_log import EventLog
from executions.runs.models import Approval, Execution
from executions.runs.requests import Caller, Conflict, ExecutionRequest, run_limits
from executions.runs.results import executions_of
from executions.runs.service import HasEnded, cancel, execute
from executions.sessions.control import create_context, restart_context
from executions.sessions.files import inspect_file
from executions.sessions.models import Session
from executions.sessions.requests import ContextRequest, SessionRequest
from executions.tenants import keys
from executions.tenants.models import ApiKey, Scope
from executions.tenants.quotas import take_request
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.pool.template import WORKSPACE

# A worker is a process of this installation.
ADDRESS = "127.0.0.1"
_SCOPES = (Scope.EXECUTE, Scope.SESSIONS, Scope.FILES)
_LOOK_SECONDS = 1.0
# Of one statement.
_KEYS_AT_ONCE = 500
_WHO = "the worker of Claude"
_REJECTED = "A person rejected this call. It did not run."


class NotPermitted(Exception):
    """The key of the worker is not valid, or lacks a scope. The text has the remedy."""


class NotCarriedOut(Exception):
    """Nothing can be said of a call now: the service has no database or is stopping."""


@dataclass(frozen=True)
class Place:
    """Whose power the calls have, and the session that they run in."""

    key_id: int
    template: str = ""
    network: str = ""
    idle_seconds: str = ""

    def request(self) -> SessionRequest:
        """Return the session to open. Raises InvalidConfiguration."""
        return read_options(
            {
                "template": self.template,
                "network": self.network,
                "idle_seconds": self.idle_seconds,
                "language": "bash",
            }
        )


def valid_key(place: Place) -> ApiKey:
    """Return the key whose power a worker has, as it is now. Raises NotPermitted."""
    key = keys.of_id(place.key_id)
    try:
        if key is None:
            raise keys.Unauthenticated
        keys.ensure_valid(key, ADDRESS)
    except keys.Unauthenticated:
        raise NotPermitted("The API key is not valid any more. Name another one.") from None
    if missing := [scope.value for scope in _SCOPES if not key.has_scope(scope)]:
        needed = " and ".join(missing)
        keys.note_refusal(key, "scope", detail=f"claude needs {needed}", address=ADDRESS)
        raise NotPermitted(f"The API key lacks the required scope: {needed}.")
    return key


class Calls:
    """Those of one agent's session. One is carried out at a time."""

    def __init__(
        self, place: Place, address: str, environment_id: str, agent: AgentSession
    ) -> None:
        self._place = place
        # What one server began is not given to another.
        self._names = (address, environment_id, agent.id)
        self._agent = agent
        self._run: tuple[str, ClientRun] | None = None

    def carry_out(
        self, call: ToolCall, is_left: Callable[[], bool], is_dropped: Callable[[], bool]
    ) -> Result | None:
        """Carry out a call, or find what came of it; None where nothing is to be answered.

        It waits no longer once it `is_left` for another worker. One that `is_dropped` is ended.
        Raises NotPermitted and NotCarriedOut.
        """
        close_old_connections()
        try:
            prepared = prepare(call.name, call.given)
            return self._carry_out(call, prepared, is_left, is_dropped)
        except (InvalidConfiguration, SandboxError) as error:
            return Result.of_text(error.message, is_error=True)
        except Exception as error:
            if problem := problem_of(error):
                raise NotCarriedOut(problem) from error
            raise

    def withdraw(self, call_ids: Sequence[str] | None = None) -> None:
        """End what waits for an approval of these calls, or of all calls of the session: nobody
        may approve what the agent does not wait for. Raises NotCarriedOut."""
        close_old_connections()
        try:
            waiting = executions_of(None).filter(api_key=self._place.key_id, finished_at=None)
            if call_ids is None:
                waiting = waiting.filter(
                    conversation=self._agent.id, idempotency_key__startswith=ASKED
                )
                found = list(waiting)
            else:
                keys = [self._keys_of(each)[0] for each in call_ids]
                found = [
                    each
                    for begin in range(0, len(keys), _KEYS_AT_ONCE)
                    for each in waiting.filter(
                        idempotency_key__in=keys[begin : begin + _KEYS_AT_ONCE]
                    )
                ]
            for each in found:
                _end(each)
        except Exception as error:
            if problem := problem_of(error):
                raise NotCarriedOut(problem) from error
            raise

    def cancel(self, call_id: str = "") -> None:
        """End what runs, from any thread; with an id only where it is this call."""
        if (running := self._run) is not None and call_id in ("", running[0]):
            running[1].cancel()

    def _carry_out(
        self,
        call: ToolCall,
        prepared: Prepared,
        is_left: Callable[[], bool],
        is_dropped: Callable[[], bool],
    ) -> Result | None:
        key = valid_key(self._place)
        caller = Caller.of_key(
            key, request_id=_claim(call.id, 128) or self._key_of(call), client_address=ADDRESS
        )
        if call.asks and not prepared.code:
            raise Conflict("A restart of the shell cannot wait for an approval. Use a command.")
        execution = _find(key, self._keys_of(call.id), prepared)
        if execution is None:
            take_request(key.tenant, only_reads=False).require()
            session = run_sync(find_or_open(caller, self._session_request(key)))
            if is_dropped() or is_left():
                return None
            if not prepared.code:
                run_sync(restart_context(session, prepared.context))
                return Result.of_text("bash session restarted")
            if prepared.context == FILES_CONTEXT:
                _ensure_files_context(session)
            execution = self._execute(call, prepared, session, caller, is_left)
        while execution.finished_at is None:
            if is_dropped():
                _end(execution)
                return None
            if is_left():
                return None
            run_sync(event_stream.wait_for_end(execution.pk, _LOOK_SECONDS))
            execution = executions_of(None).select_related("session").get(pk=execution.pk)
        verdict = verdict_on(execution)
        if verdict == Approval.Status.REJECTED:
            # Who it was is nothing for the vendor.
            return Result.of_text(_REJECTED, is_error=True)
        result = _answer(execution, prepared)
        return replace(result, is_approved=verdict == Approval.Status.APPROVED)

    def _execute(
        self,
        call: ToolCall,
        prepared: Prepared,
        session: Session,
        caller: Caller,
        is_left: Callable[[], bool],
    ) -> Execution:
        request = ExecutionRequest(
            prepared.code,
            "bash",
            mode="async" if call.asks else "sync",
            session=session.pk,
            context=prepared.context,
            usual_timeout=min(prepared.seconds, float(settings.SANDBOX_MAX_TIMEOUT_SEC)),
            idempotency_key=self._key_of(call),
            agent=_claim(self._agent.agent, 255) or "claude",
            model=_claim(self._agent.model, 255),
            conversation=self._agent.id,
        )
        if call.asks:
            _ensure_approvals()
            outcome = run_sync(
                execute(request, caller, beside=lambda made: ask_for(made, request, []))
            )
            return outcome.execution
        run = ClientRun(EventLog(run_limits(caller.tenant)), _WHO)
        self._run = (call.id, run)
        # Either this is seen here, or the run in `cancel`.
        if is_left():
            run.cancel()
        try:
            outcome = run_sync(execute(request, caller, log=run.log, waits=True))
        finally:
            self._run = None
        if outcome.error is not None and outcome.execution.finished_at is None:
            raise NotCarriedOut(outcome.error.message)
        return outcome.execution

    def _session_request(self, key: ApiKey) -> SessionRequest:
        wanted = self._place.request()
        # Of another key it is another session: what one may do is not given to the other.
        name = json.dumps(["claude", key.pk, *self._names])
        conversation = hashlib.sha256(name.encode()).hexdigest()
        return SessionRequest(
            language=wanted.language,
            template=wanted.template,
            network=wanted.network,
            offline=wanted.offline,
            idle_seconds=wanted.idle_seconds,
            max_seconds=wanted.max_seconds,
            metadata={"client": "claude", "agent_session": self._agent.id},
            conversation=conversation,
        )

    def _key_of(self, call: ToolCall) -> str:
        return self._keys_of(call.id)[0 if call.asks else 1]

    def _keys_of(self, call_id: str) -> tuple[str, str]:
        """The key of a call where it asks, and where it does not: the server may change its mind,
        and the call runs once all the same."""
        name = json.dumps([*self._names, call_id])
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f"{ASKED}{digest}", f"cofferdam-claude:{digest}"


def _find(key: ApiKey, names: Sequence[str], prepared: Prepared) -> Execution | None:
    """The execution that a call has already, whatever became of its session. Raises Conflict."""
    known = executions_of(key.tenant).select_related("session")
    execution = known.filter(idempotency_key__in=names, retryable=False).first()
    if execution is None:
        return None
    if execution.code_hash != text_hash(prepared.code):
        raise Conflict("The call came before, with other code. Nothing was run.")
    if execution.api_key_id != key.pk and not key.has_scope(Scope.READ):
        raise Conflict("The call ran with another API key. This key may not read the result.")
    return execution


def _ensure_files_context(session: Session) -> None:
    if any(each["id"] == FILES_CONTEXT for each in session.contexts):
        return
    try:
        run_sync(create_context(session, ContextRequest(language="bash", id=FILES_CONTEXT)))
    except (Conflict, InvalidConfiguration):
        session.refresh_from_db(fields=["contexts"])
        if all(each["id"] != FILES_CONTEXT for each in session.contexts):
            raise


def _ensure_approvals() -> None:
    if "executions.capabilities.policies" not in settings.INSTALLED_CAPABILITIES:
        raise Conflict("A person has to approve this call, and approvals are not installed.")


def _end(execution: Execution) -> None:
    try:
        run_sync(cancel(execution, "command:claude_worker"))
    except HasEnded:
        # So it needs no end.
        return


def _answer(execution: Execution, prepared: Prepared) -> Result:
    session = execution.session
    if not prepared.media_type or execution.exit_code != 0 or session is None:
        return result_of(execution)
    path = posixpath.normpath(posixpath.join(WORKSPACE, prepared.media_path))
    data = run_sync(inspect_file(session, path, MOST_MEDIA_BYTES))
    if data is None:
        text = f"read: {prepared.media_path}: is no file of at most {MOST_MEDIA_BYTES} bytes"
        return Result.of_text(text, is_error=True)
    return media_result(prepared.media_type, data)


def _claim(text: str, most: int) -> str:
    """A text of the vendor as it may be recorded; "" for one that may not."""
    is_recordable = len(text) <= most and is_storable(text) and text.isprintable()
    return text if is_recordable else ""
