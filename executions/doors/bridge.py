"""The bridge: `manage.py code_exec`, by which a program in another language runs code here.

A thin translation, as the API is: requests of one shape in, answers of one shape out, a line of
JSON each, on two descriptors that nothing else in the process writes to. The four keys of
RAGFlow's bridge come first in an answer, with its types: `returned` is text, the JSON of what
`main` returned and "" where it returned nothing, for its `SandboxResponse.Returned` is a string.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, cast

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections
from pydantic import Field

from executions.doors.native.rendering import execution_detail
from executions.kernel.coroutines import run_sync
from executions.kernel.database import DatabaseUnavailable, nothing_ran, problem_of
from executions.kernel.declarations import Body, at_most, declared, refuse, shown
from executions.kernel.text import from_json
from executions.runs.active_runs import ClientRun
from executions.runs.event_log import EventLog
from executions.runs.models import Artifact, Execution
from executions.runs.provider_calls import Route, lender
from executions.runs.record import Outcome
from executions.runs.requests import API_ENTRYPOINTS, Caller, ExecutionRequest, run_limits
from executions.runs.routing import FORBIDDEN, BeyondKey
from executions.runs.service import execute
from executions.tenants.keys import Unauthenticated, authenticate, note_refusal
from executions.tenants.models import Scope
from executions.tenants.service import internal_tenant
from providers import registry
from providers.errors import (
    INVALID_CONFIGURATION,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.executor_manager import provider as executor_manager
from providers.json_reading import MOST_DEPTH, MOST_VALUES
from providers.json_values import check
from providers.languages import normalize_language
from providers.manager import manager
from providers.services.route_order import planned
from providers.threads import start_thread

logger = logging.getLogger(__name__)


_READ_BYTES = 256 * 1024


class TooLong(Exception):
    """More than the bound, in a line or in all."""


def take_standard_streams() -> tuple[int, int]:
    """Descriptors of standard input and output, for the protocol alone. Raises OSError.

    From now on whoever prints in this process writes to standard error, and whoever reads finds
    the end; so do the processes that it starts.
    """
    requests, answers = os.dup(0), os.dup(1)
    for descriptor in (requests, answers):
        os.set_blocking(descriptor, True)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    os.close(nothing)
    return requests, answers


class Answers:
    """One line of ASCII for each answer: whatever a program printed stands in a JSON string, where
    a line cannot end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Whole, from any thread. Raises OSError when nobody reads any more."""
        left = memoryview(json.dumps(answer, separators=(",", ":")).encode("ascii") + b"\n")
        with self._lock:
            while left:
                left = left[os.write(self._descriptor, left) :]

    def is_read(self) -> bool:
        """Whether somebody may still read them. A file always counts as read."""
        watch = select.poll()
        watch.register(self._descriptor, 0)
        return not watch.poll(0)


def whole_of(descriptor: int, most: int) -> bytes:
    """All there is to read. Raises TooLong for more than `most` bytes, of which no more is kept."""
    held = bytearray()
    while data := os.read(descriptor, _READ_BYTES):
        held += data
        if len(held) > most:
            raise TooLong
    return bytes(held)


def lines_of(read: Callable[[int], bytes], most: int) -> Iterator[bytes | TooLong]:
    """Each line that is not blank, the last one whether it was ended or not.

    Of one beyond `most` bytes nothing is kept, and TooLong stands in its place.
    """
    held, searched, is_too_long = bytearray(), 0, False
    while data := read(_READ_BYTES):
        held += data
        while (end := held.find(b"\n", searched)) >= 0:
            line, searched = bytes(held[:end]), 0
            del held[: end + 1]
            if is_too_long or len(line) > most:
                yield TooLong()
            elif line.strip():
                yield line
            is_too_long = False
        if is_too_long or len(held) > most:
            is_too_long = True
            held.clear()
        searched = len(held)
    if is_too_long:
        yield TooLong()
    elif held.strip():
        yield bytes(held)


LARGE_BYTES = 256 * 1024
# Told in keys of their own.
_TOLD = ("stdout", "stderr", "artifacts", "error", "result", "has_result")

REFUSED = 2
NOT_RUN = 125


def answer_of(outcome: Outcome, folder: Path | None = None) -> dict[str, Any]:
    """The answer about a recorded run. Files of more than LARGE_BYTES are put into `folder`."""
    execution, error = outcome.execution, outcome.error
    if isinstance(error, DatabaseUnavailable):
        # What the record says is not what happened.
        return unrun(error, record=execution)
    detail = execution_detail(execution)
    told = detail["error"]
    if told is None and error is not None:
        told = {"code": error.code, "message": error.message}
    metadata = {name: value for name, value in detail.items() if name not in _TOLD}
    metadata |= {
        "timeout": execution.timeout,
        "result_present": execution.has_result,
        "result_value": from_json(execution.result) if execution.result else None,
        "result_type": "json",
    }
    return {
        "stdout": execution.stdout,
        "stderr": _with_note(execution.stderr, told),
        "returned": execution.result if execution.has_result else "",
        "artifacts": _artifacts(outcome, folder),
        "error": None if told is None else {**told, "field": execution.error_field or None},
        "metadata": metadata,
    }


def unrun(error: SandboxError, *, record: Execution | None = None) -> dict[str, Any]:
    """The answer to a request that was refused or could not be carried out."""
    told: dict[str, Any] = {"code": error.code, "message": error.message, "field": error.field}
    if isinstance(error, DatabaseUnavailable):
        told["ran"] = error.ran
    if error.retry_after is not None:
        told["retry_after"] = error.retry_after
    return {
        "stdout": "",
        "stderr": _with_note("", told),
        "returned": "",
        "artifacts": [],
        "error": told,
        "metadata": {"id": str(record.pk) if record else None, "status": "error"},
    }


def exit_code_of(answer: Mapping[str, Any]) -> int:
    """0 where the answer says what came of the code, whatever that was."""
    if answer["metadata"]["status"] != Execution.Status.ERROR:
        return 0
    refused = (INVALID_CONFIGURATION.code, FORBIDDEN.code)
    return REFUSED if answer["error"]["code"] in refused else NOT_RUN


def _with_note(stderr: str, error: Mapping[str, Any] | None) -> str:
    """For who reads the four keys alone: a run that was ended would look to him like a success."""
    if error is None:
        return stderr
    note = f"{error['code']}: {error['message']}"
    return f"{stderr.rstrip()}\n{note}" if stderr.strip() else note


def _artifacts(outcome: Outcome, folder: Path | None) -> list[dict[str, Any]]:
    execution = outcome.execution
    if not execution.artifact_count:
        return []
    at_hand = {}
    if outcome.result is not None:
        files = outcome.result.artifacts
        at_hand = {hashlib.sha256(file.content).hexdigest(): file.content for file in files}
    return [
        _artifact(number, artifact, _content(artifact, at_hand), folder)
        for number, artifact in enumerate(execution.artifacts.all())
    ]


def _content(artifact: Artifact, at_hand: Mapping[str, bytes]) -> bytes:
    if (content := at_hand.get(artifact.sha256)) is not None:
        return content
    with artifact.file.open() as stream:
        stored: bytes = stream.read()
    return stored


def _artifact(
    number: int, artifact: Artifact, content: bytes, folder: Path | None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size": artifact.size_bytes,
        "sha256": artifact.sha256,
    }
    if folder is not None and len(content) > LARGE_BYTES:
        try:
            return {**told, "path": str(_put(folder / str(artifact.execution_id), number, content))}
        except OSError as error:
            logger.error(
                "an artifact is sent in the answer, because it cannot be written to %s: %s",
                folder,
                error.strerror,
            )
    return {**told, "content_b64": base64.b64encode(content).decode()}


def _put(folder: Path, number: int, content: bytes) -> Path:
    """A new file of this run's own folder. Its name is ours: the program has chosen the other."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / str(number)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


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
            outcome = run_sync(execute(request, caller, route=route, log=log))
            return answer_of(outcome, self.folder)
        except SandboxError as error:
            return unrun(error)
        except DatabaseFailure as failure:
            if problem := problem_of(failure):
                return unrun(nothing_ran(problem))
            return _internal_error()
        except Exception:
            return _internal_error()

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


def _internal_error() -> dict[str, Any]:
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
