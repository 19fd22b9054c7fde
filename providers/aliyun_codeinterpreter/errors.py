"""What agentrun-sdk raises, as our errors.

Observed with agentrun-sdk 0.0.54: what the network did, a refused connection or a timeout, and an
answer that says it is no SUCCESS, are ClientError with status 0; an answer that is no JSON is
ClientError with the status 200; a missing sandbox is ResourceNotExistError; the wait for a
template that gets ready ends with Python's own TimeoutError.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from agentrun.utils.exception import AgentRunError, HTTPError, ResourceNotExistError

from providers.errors import (
    ConnectionFailed,
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.remote.secret import Secret, scrub


def translate(
    error: BaseException,
    secrets: Sequence[Secret],
    *,
    creating: bool = False,
) -> SandboxError:
    """The SandboxError for what the SDK raised."""
    told = _translated(error, secrets, creating)
    told.answered = "status" if getattr(error, "status_code", 0) else ""
    return told


def _translated(error: BaseException, secrets: Sequence[Secret], creating: bool) -> SandboxError:
    said = scrub(_message(error), secrets)
    status = error.status_code if isinstance(error, HTTPError) else None
    if status in (401, 403):
        return ConnectionFailed(
            "Aliyun refuses the credentials. Check the AccessKey, the account id and the RAM "
            f"policy. {said}"
        )
    if status == 429:
        return RateLimited(f"Aliyun's rate limit is reached. {said}", retry_after=_delay(error))
    if status == 404 or isinstance(error, ResourceNotExistError):
        if creating:
            return CreationFailed(f"Aliyun does not know the template. {said}")
        return ProviderUnavailable(f"The Aliyun sandbox is gone. {said}")
    if status is not None and status >= 400:
        if creating and status != 503:
            return CreationFailed(f"Aliyun could not create a sandbox. {said}")
        return ProviderUnavailable(f"Aliyun is not available. {said}")
    # Uploads and downloads raise what httpx raised, all else wraps it.
    cause = error if isinstance(error, httpx.HTTPError) else error.__cause__
    if isinstance(cause, httpx.ConnectError):
        return ConnectionFailed(
            f"Aliyun cannot be reached. Check the network, region and endpoints. {said}"
        )
    if isinstance(cause, httpx.TimeoutException) or isinstance(error, TimeoutError):
        return ConnectionFailed(f"Aliyun does not answer in time. {said}")
    if status == 0 and cause is None and creating:
        return CreationFailed(f"Aliyun could not create a sandbox. {said}")
    return ConnectionFailed(f"Aliyun's answer is incomplete or not JSON. {said}")


def _message(error: BaseException) -> str:
    said = error.message if isinstance(error, AgentRunError) else str(error)
    request_id = getattr(error, "request_id", None)
    status = getattr(error, "status_code", 0)
    parts = [f"HTTP {status}." if status else "", said or type(error).__name__]
    return " ".join([*parts, f"(request {request_id})" if request_id else ""]).strip()


def _delay(error: BaseException) -> float | None:
    headers = httpx.Headers(getattr(error, "response_headers", None) or {})
    delay = headers.get("retry-after", "")
    return float(delay) if delay.isdecimal() and len(delay) < 6 else None
