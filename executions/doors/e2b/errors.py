"""Errors in the words that E2B's SDKs make their exceptions of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.http import Http404, HttpResponse
from rest_framework.exceptions import APIException

from executions.doors.native.frame import as_told, render_error
from executions.doors.native.rendering import json_response
from executions.sessions.requests import NoSuchSession, SessionClosed, SessionLost
from providers.errors import RateLimited, SandboxError

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
    exc = as_told(exc)
    known = render_error(exc, context)
    status = known.status_code
    if isinstance(exc, SessionClosed | SessionLost | NoSuchSession):
        status = 404
    message = _message(exc, known)
    return _with_headers(json_response({"code": status, "message": message}, status), known)


def told_of_control(exc: Exception) -> dict[str, Any]:
    """The same as a part of an answer."""
    told: dict[str, Any] = json.loads(control_error(exc, {}).content)
    return told


def file_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of a sandbox's files, asked for over plain HTTP."""
    exc = _in_sandbox(as_told(exc))
    known = render_error(exc, context)
    # There is no more room: to wait helps nobody.
    is_full = isinstance(exc, RateLimited) and exc.retry_after is None
    status = 507 if is_full else known.status_code
    body = {"code": status, "message": _message(exc, known)}
    return _with_headers(json_response(body, status), known)


def connect_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of a sandbox's calls over Connect, before there is a stream."""
    exc = _in_sandbox(as_told(exc))
    known = render_error(exc, context)
    body = {"code": word_of(exc, known.status_code), "message": _message(exc, known)}
    return _with_headers(json_response(body, known.status_code), known)


def text_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """Of the code interpreter, whose errors are plain texts."""
    exc = _in_sandbox(as_told(exc))
    known = render_error(exc, context)
    content = _message(exc, known).encode(errors="replace")
    answer = HttpResponse(content, status=known.status_code, content_type="text/plain")
    return _with_headers(answer, known)


def told(exc: Exception) -> dict[str, str]:
    """The same where the stream has begun, or is all that can be answered."""
    exc = _in_sandbox(as_told(exc))
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
