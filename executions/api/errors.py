"""Errors as callers see them: one shape, `{"error": {"code", "message", "field"}, "id"}`.

With a `receipt` where an execution ended. Where nothing can be recorded now, `error.ran` says
whether any code ran: true, false, or null where it is not known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseFailure
from django.http import Http404, HttpResponse
from rest_framework import exceptions

from executions.api.rendering import json_response
from executions.kernel.database import DatabaseAway, nothing_ran, problem_of
from executions.runs.record import Outcome
from providers.errors import SandboxError

logger = logging.getLogger(__name__)

_CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    415: "unsupported_media_type",
}


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    record_id: str | None = None,
    receipt: Mapping[str, Any] | None = None,
    retry_after: float | None = None,
    **known: bool | None,
) -> HttpResponse:
    """`record_id` is the execution's, where one was recorded; `retry_after` is seconds. `known` is
    what else the error says."""
    error = {"code": code, "message": message, "field": field, **known}
    body: dict[str, Any] = {"error": error, "id": record_id}
    if receipt is not None:
        body["receipt"] = receipt
    response = json_response(body, status)
    if retry_after is not None:
        response["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return response


def as_told(exc: Exception) -> Exception:
    """A failure of the database as what is told of it. Before a run, and without one, nothing ran:
    what comes after has been told apart where it happened."""
    problem = problem_of(exc)
    return nothing_ran(problem) if problem else exc


def render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """What Django REST framework calls with whatever a view raised."""
    exc = as_told(exc)
    if isinstance(exc, DatabaseAway):
        return error_response(
            exc.http_status,
            exc.code,
            exc.message,
            record_id=str(exc.record_id) if exc.record_id else None,
            retry_after=exc.retry_after,
            ran=exc.ran,
        )
    if isinstance(exc, SandboxError):
        return error_response(
            exc.http_status,
            exc.code,
            exc.message,
            field=exc.field,
            retry_after=exc.retry_after,
        )
    if isinstance(exc, Http404):
        exc = exceptions.NotFound("Not found.")
    elif isinstance(exc, PermissionDenied):
        exc = exceptions.PermissionDenied()
    if isinstance(exc, exceptions.APIException):
        code = _CODES.get(exc.status_code, "error")
        response = error_response(exc.status_code, code, _message(exc))
        if isinstance(exc, exceptions.MethodNotAllowed):
            response["Allow"] = ", ".join(context["view"].allowed_methods)
        if header := getattr(exc, "auth_header", None):
            response["WWW-Authenticate"] = header
        return response
    logger.error("a request failed inside the service", exc_info=exc)
    return error_response(500, "internal_error", "The request failed inside the service.")


@contextmanager
def known_to_run(outcome: Outcome) -> Iterator[None]:
    """Have a database that goes away while an outcome is told not hide the outcome.

    Raises DatabaseAway, also for an outcome that could not be recorded.
    """
    if isinstance(outcome.error, DatabaseAway):
        raise outcome.error
    try:
        yield
    except DatabaseFailure as failure:
        if not (problem := problem_of(failure)):
            raise
        execution = outcome.execution
        raise DatabaseAway(
            f"{problem} Ask for the execution by its id.",
            ran=None if execution.is_open or execution.status == "error" else True,
            record_id=execution.pk,
        ) from failure


def _message(exc: exceptions.APIException) -> str:
    return exc.detail if isinstance(exc.detail, str) else str(exc.default_detail)
