"""The bridge of a program in another language: requests and answers, a line of JSON each."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, cast

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections
from pydantic import Field

from executions.doors.bridge.answers import answer_of, unrun
from executions.doors.bridge.channel import Answers, TooLong, lines_of
from executions.kernel.coroutines import run_sync
from executions.kernel.database import nothing_ran, problem_of
from executions.kernel.declarations import Body, at_most, declared, refuse, shown
from executions.kernel.text import from_json
from executions.runs.active_runs import ClientRun
from executions.runs.event_log import EventLog
from executions.runs.provider_calls import Route, lender
from executions.runs.requests import API_ENTRYPOINTS, Caller, ExecutionRequest, run_limits
from executions.runs.routing import BeyondKey
from executions.runs.service import running
from executions.tenants.keys import Unauthenticated, authenticate, note_refusal
from executions.tenants.models import Scope
from executions.tenants.service import internal_tenant
from providers import registry
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.executor_manager import provider as executor_manager
from providers.json_reading import MOST_DEPTH, MOST_VALUES
from providers.json_values import check
from providers.languages import normalize_language
from providers.manager import manager
from providers.services.route_order import planned
from providers.threads import start_thread

MOST_ID_CHARACTERS = 200
_LARGEST_ID = 2**53

CODE_EXEC = Body(
    ExecutionRequest,
    "CodeExec",
    ours=(
        *("timeout", "usual_timeout", "mode", "idempotency_key", "subject", "webhook"),
        *("priority", "run_at"),
        *("session", "context", "env", "background"),
    ),
    only={"entrypoint": API_ENTRYPOINTS},
)


@declared
class _Time:
    timeout: (
        Annotated[float, Field(ge=0, allow_inf_nan=False), at_most("COMPONENT_EXEC_TIMEOUT")] | None
    ) = None


@dataclass(frozen=True)
class Frame:
    """One request. `id` is the caller's own name for it, None where it has none."""

    id: str | int | None
    body: Mapping[str, Any]


def too_long() -> InvalidConfiguration:
    """The refusal of a request that was not read to its end."""
    most = settings.SANDBOX_MAX_BODY_BYTES
    return InvalidConfiguration(f"request: Must be at most {most} bytes long.", field="request")


def read_frame(text: bytes) -> Frame:
    """The JSON object in a text. Raises InvalidConfiguration."""
    try:
        # Of bytes a JSON reader guesses the encoding.
        check(text, MOST_VALUES, MOST_DEPTH)
        body = from_json(text.decode())
    except UnicodeDecodeError:
        refuse("request", "Must be UTF-8.")
    except ValueError as error:
        refuse("request", f"Must be one JSON object: {error}.")
    if not isinstance(body, dict):
        refuse("request", "Must be one JSON object.")
    return Frame(_id(body.pop("id", None)), body)


def read_request(body: Mapping[str, Any]) -> ExecutionRequest:
    """What is to be run. Raises InvalidConfiguration, which names the field at fault.

    The time is cut to what the provider carries out: RAGFlow sends COMPONENT_EXEC_TIMEOUT with
    every call, and means the most that it waits. 0 stands for a time left out.
    """
    fields = dict(body)
    seconds = _Time(timeout=fields.pop("timeout", None)).timeout
    for key in fields:
        if key not in CODE_EXEC.known:
            known = ", ".join((*CODE_EXEC.known, "timeout"))
            refuse(shown(key), f"Unknown field. Known are: {known}.")
    if isinstance(fields.get("language"), str):
        # RAGFlow knows some by more names than are offered.
        fields["language"] = normalize_language(fields["language"])
    usual = float(seconds or settings.COMPONENT_EXEC_TIMEOUT)
    return CODE_EXEC.read(fields, usual_timeout=usual)


def read_arguments(code: str, language: str, timeout: str, arguments: str) -> dict[str, Any]:
    """The body that four arguments of a command line stand for. Raises InvalidConfiguration."""
    try:
        seconds = float(timeout) if timeout else None
    except ValueError:
        refuse("timeout", "Must be a number of seconds.")
    try:
        values = from_json(arguments) if arguments else None
    except ValueError as error:
        refuse("arguments", f"Must be a JSON object: {error}.")
    return {"code": code, "language": language, "timeout": seconds, "arguments": values}


def _id(value: Any) -> str | int | None:
    is_text = isinstance(value, str) and len(value) <= MOST_ID_CHARACTERS
    is_number = type(value) is int and abs(value) <= _LARGEST_ID
    if not (value is None or is_text or is_number):
        refuse("id", f"Must be a whole number or at most {MOST_ID_CHARACTERS} characters.")
    return cast("str | int | None", value)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bridge:
    """Runs what is asked for, as its key's tenant. `folder` takes large artifacts, where there is
    one.
    """

    folder: Path | None = None

    def check(self) -> None:
        """Raise InvalidConfiguration for settings under which no call could be carried out."""
        if settings.CODE_EXEC_PROVIDER_TYPE:
            registry.get(settings.CODE_EXEC_PROVIDER_TYPE)
        if self.folder is not None and not self.folder.is_dir():
            raise InvalidConfiguration(f"{self.folder} is not a directory.", field="artifacts")

    def call(self, body: Mapping[str, Any], log: EventLog | None = None) -> dict[str, Any]:
        """The answer, whatever happens. `log` is told what comes of the run while it runs."""
        try:
            request = read_request(body)
            caller = _caller()
            route = _route(caller.tenant.slug, request.language)
            outcome = run_sync(running(request, caller, route=route, log=log))
            return answer_of(outcome, self.folder)
        except SandboxError as error:
            return unrun(error)
        except DatabaseFailure as failure:
            if problem := problem_of(failure):
                return unrun(nothing_ran(problem))
            return _failed()
        except Exception:
            return _failed()

    def warm(self) -> None:
        """Have the provider started before the first call comes."""
        if not settings.CODE_EXEC_PROVIDER_TYPE:
            manager.warm()
            return
        try:
            with lender(settings.CODE_EXEC_PROVIDER_TYPE)():
                pass
        except SandboxError as error:
            logger.warning("No provider is ready. %s: %s", error.code, error.message)


def _failed() -> dict[str, Any]:
    logger.exception("a call over the bridge failed inside the service")
    message = "The call failed inside the service. Its log has the details."
    return unrun(ProviderUnavailable(message, started=True))


def _caller() -> Caller:
    """Whose run it is. The key is looked at for each call: it may be revoked meanwhile."""
    if not settings.CODE_EXEC_API_KEY:
        return Caller(internal_tenant())
    try:
        key = authenticate(settings.CODE_EXEC_API_KEY)
    except Unauthenticated:
        raise InvalidConfiguration(
            "CODE_EXEC_API_KEY: Is not valid. Set a key of an active tenant that is not revoked "
            "and has not expired.",
            field="CODE_EXEC_API_KEY",
        ) from None
    if not key.has_scope(Scope.EXECUTE):
        note_refusal(key, "scope", detail="the bridge needs execute")
        raise BeyondKey(
            "CODE_EXEC_API_KEY: The API key lacks the required scope: execute.",
            field="CODE_EXEC_API_KEY",
        )
    return Caller.of_key(key)


def _route(tenant_slug: str, language: str) -> Route | None:
    """Who is asked: None for whom the admin's routes name, or the active provider.

    RAGFlow's executor is asked only where there is neither, and never because one has failed.
    """
    if settings.CODE_EXEC_PROVIDER_TYPE:
        return lender(settings.CODE_EXEC_PROVIDER_TYPE)
    if settings.SANDBOX_HOST and not manager.in_force() and not planned(tenant_slug, language):
        return executor_manager.route_to(settings.SANDBOX_HOST)
    return None


# Calls that are carried out at once. A tenant's own bound counts as well.
THREADS = 8
# What may wait for a thread, in bytes of requests, before no more is read.
_LARGEST_REQUESTS = 2
_LOOK_SECONDS = 0.5
# What answers may take after what runs has been ended.
_STOPPED_SECONDS = 5.0
_CLIENT = "its client"


@dataclass(eq=False)
class _Call:
    """A request that has not been answered."""

    frame: Frame
    size: int
    run: ClientRun = field(default_factory=lambda: ClientRun(EventLog(run_limits()), _CLIENT))


class Serving:
    """Serves one client until its input ends, it stops reading, or `stop` is called."""

    def __init__(self, bridge: Bridge, requests: int, answers: int) -> None:
        self._bridge = bridge
        self._requests = requests
        self._answers = Answers(answers)
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._calls: set[_Call] = set()
        self._held = 0
        self._stopping, self._stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = select.poll()
        self._watch.register(requests, select.POLLIN)
        self._watch.register(answers, 0)
        self._watch.register(self._stopping, select.POLLIN)
        self.is_left = False
        self.is_stopped = False

    def stop(self) -> None:
        """Read nothing more. For signal handlers too."""
        self.is_stopped = True
        os.write(self._stop, b".")

    def run(self, end_all: Callable[[], object]) -> None:
        """Until every request that was read is answered. `end_all` ends what runs after `stop`."""
        threads = [start_thread(f"bridge-{number}", self._work) for number in range(THREADS)]
        for line in lines_of(self._read, settings.SANDBOX_MAX_BODY_BYTES):
            self._take(line)
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            while thread.is_alive() and not self.is_stopped:
                thread.join(_LOOK_SECONDS)
                self._leave_when_unread()
        if self.is_stopped:
            end_all()
        end = time.monotonic() + _STOPPED_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _read(self, size: int) -> bytes:
        """What comes next; nothing at the end, and where nobody would read an answer."""
        while not self.is_stopped:
            ready = {descriptor for descriptor, _ in self._watch.poll()}
            if not self._answers.is_read():
                self._leave_when_unread()
                return b""
            if self._requests in ready and not self.is_stopped:
                return os.read(self._requests, size)
        return b""

    def _take(self, line: bytes | TooLong) -> None:
        if self.is_stopped or self.is_left:
            return
        name: str | int | None = None
        try:
            if isinstance(line, TooLong):
                raise too_long()
            frame = read_frame(line)
            if "cancel" in frame.body:
                self._cancel(frame)
                return
            name = frame.id
            self._begin(_Call(frame, len(line)))
        except InvalidConfiguration as error:
            self._answer(name, unrun(error))

    def _begin(self, call: _Call) -> None:
        with self._changed:
            if self._find(call.frame.id) is not None:
                refuse("id", "Another call with this id has no answer yet.")
            self._calls.add(call)
            self._held += call.size
        self._waiting.put(call)
        most = _LARGEST_REQUESTS * settings.SANDBOX_MAX_BODY_BYTES
        while self._held > most and not self.is_stopped:
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            self._leave_when_unread()

    def _cancel(self, frame: Frame) -> None:
        """One that has ended is not to be found any more, which is what was wanted."""
        if len(frame.body) > 1 or frame.body["cancel"] is None:
            refuse("cancel", "Must be the id of a call, without other fields.")
        with self._changed:
            call = self._find(frame.body["cancel"])
        if call is not None:
            call.run.cancel()

    def _find(self, name: Any) -> _Call | None:
        if name is None:
            return None
        return next((call for call in self._calls if call.frame.id == name), None)

    def _work(self) -> None:
        while call := self._waiting.get():
            close_old_connections()
            answer = self._answer_to(call)
            # Before the answer, whose reader may use the id again.
            with self._changed:
                self._calls.discard(call)
                self._held -= call.size
                self._changed.notify_all()
            self._answer(call.frame.id, answer)

    def _answer_to(self, call: _Call) -> dict[str, Any]:
        # A thread that a cancelled call leaves free begins no other one.
        if call.run.is_cancelled or self.is_left:
            answer = unrun(ProviderUnavailable("The call was cancelled. Nothing was run."))
            answer["metadata"]["status"] = "cancelled"
            return answer
        return self._bridge.call(call.frame.body, call.run.log)

    def _answer(self, name: str | int | None, answer: dict[str, Any]) -> None:
        try:
            self._answers.write({"id": name, **answer})
        except OSError:
            self.is_left = True

    def _leave_when_unread(self) -> None:
        """Nobody waits any more for what runs."""
        if self._answers.is_read():
            return
        self.is_left = True
        with self._changed:
            calls = list(self._calls)
        for call in calls:
            call.run.cancel()
