"""Whose body is read at all: nobody without a valid key has more than a form's read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from django.db import Error as DatabaseFailure

from executions.doors.e2b import credentials as e2b_credentials
from executions.doors.native.authentication import key_text_in
from executions.kernel.database import RETRY_SECONDS, nothing_ran, problem_of
from executions.tenants import keys
from sandbox_site.web.body import FORM_BYTES, SMALL_BYTES, STRANGERS, Refused, Share


@dataclass(frozen=True)
class Limits:
    """Of what clients send, and of what they do not read. Bytes and seconds; connections."""

    body_bytes: int
    spool_bytes: int
    body_seconds: float
    connections: int = 2000


class OnThread(Protocol):
    def __call__(self, call: Callable[[], str | None]) -> Awaitable[str | None]: ...


async def admit_body(
    environ: Mapping[str, Any], limits: Limits, share: Share, *, is_api: bool, on_thread: OnThread
) -> int:
    """How many bytes of body to read. 0 also for a body that the view refuses unseen.

    Raises Refused.
    """
    announced = environ.get("CONTENT_LENGTH", "")
    if not announced and "HTTP_TRANSFER_ENCODING" in environ:
        return await _admit_unannounced(environ, limits, share, on_thread=on_thread)
    length = int(announced) if announced.isdigit() else 0
    if length <= SMALL_BYTES:
        return length
    if length > limits.body_bytes:
        return 0
    owner = None
    if key_text_in(environ) or e2b_credentials.are_in(environ):
        # A query, of which a small request has one as well: in its view.
        owner = await on_thread(lambda: _owner_of(environ))
    if owner is None:
        if is_api:
            return 0
        if length > FORM_BYTES:
            raise Refused(413, f"body: Must be at most {FORM_BYTES} bytes without an API key.")
    share.hold(owner or STRANGERS, length)
    return length


async def _admit_unannounced(
    environ: Mapping[str, Any], limits: Limits, share: Share, *, on_thread: OnThread
) -> int:
    """The most that is read of a body whose length nobody knows yet: clients of E2B send such, and
    nobody else's is read."""
    if not environ["PATH_INFO"].startswith(e2b_credentials.PATHS):
        return 0
    owner = None
    if key_text_in(environ) or e2b_credentials.are_in(environ):
        owner = await on_thread(lambda: _owner_of(environ))
    if owner is None:
        return SMALL_BYTES
    is_file = environ["PATH_INFO"] == e2b_credentials.FILES
    most = limits.body_bytes if is_file else e2b_credentials.MOST_MESSAGE_BYTES
    # Until it is here it may be as long.
    share.hold(owner, most)
    return most


def _owner_of(environ: Mapping[str, Any]) -> str | None:
    try:
        # Whether it may be used from there is for its view to say, which knows the client.
        if key_text := key_text_in(environ):
            api_key, problem = keys.look_up(key_text)
        else:
            api_key, problem = e2b_credentials.look_up(environ)
        return None if api_key is None or problem else api_key.tenant.slug
    except DatabaseFailure as failure:
        if not (problem := problem_of(failure)):
            raise
        away = nothing_ran(problem)
        raise Refused(away.http_status, away.message, int(RETRY_SECONDS)) from failure
