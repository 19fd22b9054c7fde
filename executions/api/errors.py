"""Errors as callers see them: one shape, `{"error": {"code", "message", "field"}, "id"}`.

With a `receipt` where an execution ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from rest_framework import exceptions

from executions.api.rendering import json_response
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
) -> HttpResponse:
    """`record_id` is the execution's, where one was recorded; `retry_after` is seconds."""
    error = {"code": code, "message": message, "field": field}
    body: dict[str, Any] = {"error": error, "id": record_id}
    if receipt is not None:
        body["receipt"] = receipt
    response = json_response(body, status)
    if retry_after is not None:
        response["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return response


def render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """What Django REST framework calls with whatever a view raised."""
    if isinstance(exc, SandboxError):
        return error_response(
            exc.http_status,
            exc.code,
            exc.message,
            field=exc.field,
            retry_after=exc.retry_after,
        )
    if isinstance(exc, Http404):
        exc = exceptions.NotFound("There is nothing here, or it is not yours.")
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


def _message(exc: exceptions.APIException) -> str:
    return exc.detail if isinstance(exc.detail, str) else str(exc.default_detail)
