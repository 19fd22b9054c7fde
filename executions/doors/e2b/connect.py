"""The Connect protocol: envelopes, paths and messages, and errors in the words of E2B's SDKs."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import Http404, HttpResponse
from django.utils import timezone
from rest_framework.exceptions import APIException

from executions.doors.e2b import credentials
from executions.doors.native.frame import render_error, to_database_error
from executions.doors.native.rendering import json_response
from executions.kernel.text import is_name
from executions.runs import extensions
from executions.runs.network import NetworkRequest
from executions.sessions.models import Session
from executions.sessions.queries import expires_at
from executions.sessions.requests import (
    NoSuchSession,
    SessionChanges,
    SessionClosed,
    SessionLost,
    SessionRequest,
)
from executions.tenants.models import ApiKey
from providers.errors import RateLimited, SandboxError
from providers.json_reading import read_text
from providers.json_values import TooMuch
from providers.runtime.guest.names import escape, shorten, unescape
from providers.runtime.pool.template import WORKSPACE
from providers.sandbox import below_workspace
from providers.slices import json_text
from providers.values import SandboxLimits, SandboxSpec

# What a sandbox's own address answers for one that is not there, whoever asks.
NOT_FOUND = "The sandbox was not found"
# Connect's codes, by the status of HTTP that goes with them.
_CODES = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    405: "unimplemented",
    408: "deadline_exceeded",
    409: "failed_precondition",
    413: "resource_exhausted",
    415: "invalid_argument",
    429: "resource_exhausted",
    500: "internal",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
    507: "resource_exhausted",
}


class Refused(SandboxError):
    """Something that only this door refuses, with Connect's word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self._status = status
        self.word = code

    @property
    def http_status(self) -> int:
        return self._status


class NoSandbox(Refused):
    """There is none of this id, or it is somebody else's, or it has ended."""

    def __init__(self) -> None:
        super().__init__(502, "unavailable", NOT_FOUND)


def no_such_file(path: str) -> Refused:
    return Refused(404, "not_found", f"path not found: {path!r} does not exist")


def unimplemented(what: str) -> Refused:
    return Refused(501, "unimplemented", f"{what} is not implemented here: see docs/e2b.md.")


def invalid(message: str) -> Refused:
    return Refused(400, "invalid_argument", message)


def control_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of the API that makes and ends sandboxes."""
    exc = to_database_error(exc)
    known = render_error(exc, context)
    status = known.status_code
    if isinstance(exc, SessionClosed | SessionLost | NoSuchSession):
        status = 404
    message = _message(exc, known)
    return _with_headers(json_response({"code": status, "message": message}, status), known)


def control_error_body(exc: Exception) -> dict[str, Any]:
    """Return the same as a part of an answer."""
    told: dict[str, Any] = json.loads(control_error(exc, {}).content)
    return told


def file_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of a sandbox's files, asked for over plain HTTP."""
    exc = _in_sandbox(to_database_error(exc))
    known = render_error(exc, context)
    # There is no more room: to wait helps nobody.
    is_full = isinstance(exc, RateLimited) and exc.retry_after is None
    status = 507 if is_full else known.status_code
    body = {"code": status, "message": _message(exc, known)}
    return _with_headers(json_response(body, status), known)


def connect_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of a sandbox's calls over Connect, before there is a stream."""
    exc = _in_sandbox(to_database_error(exc))
    known = render_error(exc, context)
    body = {"code": word_of(exc, known.status_code), "message": _message(exc, known)}
    return _with_headers(json_response(body, known.status_code), known)


def text_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of the code interpreter, whose errors are plain texts."""
    exc = _in_sandbox(to_database_error(exc))
    known = render_error(exc, context)
    content = _message(exc, known).encode(errors="replace")
    answer = HttpResponse(content, status=known.status_code, content_type="text/plain")
    return _with_headers(answer, known)


def error_body(exc: Exception) -> dict[str, str]:
    """Return the same where the stream has begun, or is all that can be answered."""
    exc = _in_sandbox(to_database_error(exc))
    known = render_error(exc, {})
    return {"code": word_of(exc, known.status_code), "message": _message(exc, known)}


def word_of(exc: Exception, status: int) -> str:
    return exc.word if isinstance(exc, Refused) else _CODES.get(status, "unknown")


def _in_sandbox(exc: Exception) -> Exception:
    if isinstance(exc, SessionClosed | SessionLost | NoSuchSession):
        return NoSandbox()
    return exc


def _message(exc: Exception, known: HttpResponse) -> str:
    if isinstance(exc, SandboxError):
        return exc.message
    if isinstance(exc, Http404):
        return "Not found."
    if isinstance(exc, APIException):
        return str(exc.detail)
    return str(json.loads(known.content)["error"]["message"])


def _with_headers(answer: HttpResponse, known: HttpResponse) -> HttpResponse:
    for name in ("WWW-Authenticate", "Allow", "Retry-After"):
        if name in known:
            answer[name] = known[name]
    if answer.status_code in (501, 502):
        # Asked again it would be the same.
        answer["Should-Retry"] = "false"
    return answer


STREAM_TYPE = "application/connect+json"
_COMPRESSED, _END = 1, 2
_HEAD = 5
MOST_MESSAGES = 10_000


def message(body: Mapping[str, Any], flags: int = 0) -> bytes:
    content = json_text(body).encode(errors="replace")
    return bytes([flags]) + len(content).to_bytes(4, "big") + content


def end(error: Mapping[str, str] | None = None) -> bytes:
    """What a stream ends with."""
    return message({} if error is None else {"error": error}, _END)


def messages_in(body: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a whole body. Raises Refused for one that is cut off, or is no object."""
    # By where each begins: a body of empty ones is not copied for every one of them.
    at = number = 0
    while at < len(body):
        number += 1
        if number > MOST_MESSAGES:
            raise _too_much(f"Must be at most {MOST_MESSAGES} messages")
        begin = at + _HEAD
        flags, length = body[at], int.from_bytes(body[at + 1 : begin], "big")
        if len(body) < begin + length:
            raise invalid("A message is shorter than its envelope says.")
        at = begin + length
        if flags & _COMPRESSED:
            raise unimplemented("Compression of messages")
        if not flags & _END:
            yield object_in(body[begin:at])


def object_in(content: bytes) -> dict[str, Any]:
    """Raises Refused for what is no object of JSON."""
    try:
        body = read_text(content).value
    except TooMuch as error:
        raise _too_much(str(error)) from None
    except ValueError as error:
        raise invalid(f"Must be JSON: {error}.") from None
    if not isinstance(body, dict):
        raise invalid("Must be a JSON object.")
    return body


def _too_much(why: str) -> Refused:
    return Refused(413, "resource_exhausted", f"{why}.")


HOME = "/home/user"
USER = "user"


def to_place(path: object, field: str = "path") -> str:
    """The absolute path that is meant, of the workspace by that name. Raises Refused for none."""
    if not isinstance(path, str) or (path and not is_name(path)):
        raise invalid(f"{field}: Must be a path.")
    path = unescape(path)
    if path == "~" or path.startswith("~/"):
        path = HOME + path[1:]
    if path.startswith("~"):
        raise invalid(f"{field}: {shorten(escape(path))!r} is the home of an unknown user.")
    whole = posixpath.normpath(posixpath.join(HOME, path)) if path else HOME
    # Of two slashes at the beginning POSIX leaves open what they mean.
    whole = f"/{whole.lstrip('/')}"
    below = below_workspace(whole)
    return whole if below is None else f"{WORKSPACE}/{below}".rstrip("/")


def to_item(path: object, field: str = "path") -> str:
    """Return the same, and refuse the home itself and the root."""
    found = to_place(path, field)
    if found in ("/", WORKSPACE):
        raise invalid(f"{field}: Must name something in a folder.")
    return found


def to_folder(path: object, field: str = "cwd") -> str:
    """Where programs are to be: from the home on, which has a name of its own for them, or an
    absolute path elsewhere."""
    found = to_place(path, field)
    below = below_workspace(found)
    return found if below is None else below


def display_path(path: str) -> str:
    below = below_workspace(path)
    if below is None:
        return escape(path)
    return f"{HOME}/{escape(below)}" if below else HOME


def ensure_user(name: object) -> None:
    """Nobody but the sandbox's own user is to be had. Raises Refused."""
    if name not in ("", None, USER):
        raise Refused(
            401, "unauthenticated", f"There is no user {str(name)[:64]!r} here. Use {USER!r}."
        )


# Which of its calls a sandbox has: clients ask by this.
ENVD_VERSION = "0.6.4"
DEFAULT_SECONDS = 300
MOST_LISTED = 100
# Templates that every account of E2B has, and that are our usual sandbox: it is told by the first.
USUAL = "base"
_USUAL = (USUAL, "code-interpreter-v1", "code-interpreter-stateful")
_NOT_THERE = {
    "mcp": "An MCP gateway in the sandbox",
    "iam": "Workload identity tokens",
    "volumeMounts": "A volume",
}
_MIB = 1024 * 1024


def seconds_in(body: Mapping[str, Any]) -> int | None:
    """Raises Refused."""
    seconds = body.get("timeout")
    if seconds is None:
        return None
    if type(seconds) is not int or seconds < 0:
        raise invalid("timeout: Must be a whole number of seconds.")
    return max(1, seconds)


def request_of(body: Mapping[str, Any], network: NetworkRequest | None) -> SessionRequest:
    """Read a request for a sandbox, whose network is read already.

    Raises Refused and InvalidConfiguration.

    A sandbox that is to be killed at its end has one age; one that is to be paused is unused until
    then, and as old as any may be.
    """
    for name, what in _NOT_THERE.items():
        if body.get(name):
            raise unimplemented(what)
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise invalid("metadata: Must be an object whose values are strings.")
    template = body.get("templateID") or ""
    if not isinstance(template, str):
        raise invalid("templateID: Must be a string.")
    # A snapshot is a template for clients.
    snapshot = credentials.session_id_of(template.partition(":")[0])
    if snapshot is not None or template.partition(":")[0] in _USUAL:
        template = ""
    seconds = seconds_in(body) or DEFAULT_SECONDS
    pauses = body.get("autoPause") is True
    return SessionRequest(
        template=template,
        **from_snapshot(snapshot),
        idle_seconds=seconds,
        max_seconds=settings.SESSION_MAX_SECONDS if pauses else seconds,
        env=_environment(body.get("envVars") or {}),
        metadata=metadata,
        network=network,
        offline=network is not None and network.mode == "none",
    )


def _environment(given: Any) -> Any:
    """With the home for programs, unless they are to have another."""
    return {"HOME": HOME, **given} if isinstance(given, dict) else given


def from_snapshot(snapshot_id: UUID | None) -> dict[str, Any]:
    """What a request has that begins with the files of a snapshot."""
    return {"from": snapshot_id}


def template_names(name: str) -> list[str]:
    """Return the template names of the sessions whose template has this name for clients."""
    return [""] if name == USUAL else [name]


def age_of(session: Session) -> int:
    """Seconds since it was opened, rounded up."""
    return math.ceil((timezone.now() - session.created_at).total_seconds())


def clamp_seconds(session: Session, seconds: int) -> int:
    """Return so many seconds, or as many as the session may still live."""
    return max(1, min(seconds, settings.SESSION_MAX_SECONDS - age_of(session)))


def pauses_at_its_end(session: Session) -> bool:
    return session.idle_seconds < session.max_seconds


def end_after(session: Session, seconds: int, *, is_bounded: bool = False) -> SessionChanges:
    """Return the changes that end the session so many seconds from now, in the way in which it
    does. If it `is_bounded`, as old as any may be at most; else this raises InvalidConfiguration
    where it would be older."""
    age = age_of(session)
    longest = settings.SESSION_MAX_SECONDS
    if pauses_at_its_end(session):
        most = max(session.max_seconds, min(age + seconds + 1, longest))
        return SessionChanges(idle_seconds=seconds, max_seconds=most)
    total = min(age + seconds, longest) if is_bounded else age + seconds
    return SessionChanges(idle_seconds=total, max_seconds=total)


def pause_changes(session: Session) -> SessionChanges:
    """Return the changes of one that is paused: it ends when it is as old as any may be."""
    longest = settings.SESSION_MAX_SECONDS
    idle = session.idle_seconds if pauses_at_its_end(session) else longest
    return SessionChanges(idle_seconds=idle, max_seconds=longest)


def create_answer(session: Session, key: ApiKey) -> dict[str, Any]:
    """Return what a client needs to call the sandbox."""
    token = credentials.token_of(session.pk, key)
    return {
        **_identity(session),
        "envdAccessToken": token,
        # Calls of contexts have this one alone.
        "trafficAccessToken": token,
        "domain": None,
    }


def summary(session: Session) -> dict[str, Any]:
    limits = _limits_of(session)
    return {
        **_identity(session),
        "startedAt": moment(session.created_at),
        "endAt": moment(expires_at(session)),
        "cpuCount": 1,
        "memoryMB": limits.memory_bytes // _MIB,
        "diskSizeMB": limits.workspace_bytes // _MIB,
        "state": "paused" if session.state == Session.State.ASLEEP else "running",
        "metadata": {name: _text(value) for name, value in session.metadata.items()},
    }


def detail(session: Session, key: ApiKey) -> dict[str, Any]:
    lifecycle = {
        "onTimeout": "pause" if pauses_at_its_end(session) else "kill",
        "autoResume": True,
    }
    token = credentials.token_of(session.pk, key)
    return {**summary(session), "envdAccessToken": token, "domain": None, "lifecycle": lifecycle}


def moment(when: datetime) -> str:
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


def memory_total(session: Session) -> int:
    return _limits_of(session).memory_bytes


def _identity(session: Session) -> dict[str, Any]:
    return {
        "templateID": session.template or USUAL,
        "sandboxID": credentials.sandbox_id_of(session),
        "clientID": "cofferdam",
        "envdVersion": ENVD_VERSION,
        "alias": session.template or USUAL,
    }


def _limits_of(session: Session) -> SandboxLimits:
    parts = extensions.begin_session(session.tenant_slug)
    wanted = parts.specify(SandboxSpec(session.language), seconds=0)
    return wanted.limits or SandboxLimits()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
