"""What the calls of Agent Sandbox share: its words for errors, and its word for a file."""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from django.http import HttpResponse
from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.request import Request

from executions.api.base import RunningView
from executions.api.errors import as_told, render_error
from executions.api.rendering import json_response
from executions.kernel.database import DatabaseAway
from executions.services.conversations import Saved
from executions.sessions.storage.links import Wanted, links
from executions.sessions.storage.models import Blob
from executions.tenants.models import Tenant
from providers.errors import SandboxError
from providers.guest.names import escape

TAGS = ["Agent Sandbox"]


class AgentSandboxView(RunningView):
    """An endpoint of Agent Sandbox."""

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return _render_error


def failed(error: SandboxError, **fields: Any) -> HttpResponse:
    """A failure of the service is a 200 there."""
    answer = json_response({**fields, "error": f"{error.code}: {error.message}"})
    if error.retry_after is not None:
        answer["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return answer


def file_details(
    request: Request, tenant: Tenant, found: Sequence[Saved], expires_in: int
) -> list[dict[str, Any]]:
    """Saved files, each with a link to it for whoever has the link, without what is gone."""
    wanted = [_wanted(saved) for saved in found]
    urls = links(tenant, wanted, expires_in=expires_in, absolute=request.build_absolute_uri)
    return [
        {
            "path": escape(saved.path),
            "size_bytes": saved.row.size,
            "mime_type": to.mime_type,
            "download_url": url,
        }
        for saved, to, url in zip(found, wanted, urls, strict=True)
        if url is not None
    ]


def _wanted(saved: Saved) -> Wanted:
    name = saved.path.rpartition("/")[2]
    return Wanted(
        cast("Blob", saved.row.blob),
        escape(name),
        mimetypes.guess_type(name)[0] or "application/octet-stream",
    )


def _render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    response = render_error(exc, context)
    exc = as_told(exc)
    if isinstance(exc, DatabaseAway):
        return _away(exc, response)
    if isinstance(exc, (AuthenticationFailed, NotAuthenticated)):
        detail = "Invalid API key"
    elif isinstance(exc, SandboxError):
        detail = exc.message
    else:
        detail = str(exc.detail) if isinstance(exc, APIException) else "The request failed."
    answer = json_response({"detail": detail}, response.status_code)
    for name in ("WWW-Authenticate", "Allow", "Retry-After"):
        if name in response:
            answer[name] = response[name]
    return answer


def _away(away: DatabaseAway, response: HttpResponse) -> HttpResponse:
    """Not a 200 as other failures: a proxy and a client's own retries are to see it."""
    record_id = str(away.record_id) if away.record_id else None
    body = {"detail": away.message, "error": f"{away.code}: {away.message}"}
    answer = json_response({**body, "ran": away.ran, "id": record_id}, response.status_code)
    answer["Retry-After"] = response["Retry-After"]
    if record_id:
        answer["X-Execution-ID"] = record_id
    return answer
