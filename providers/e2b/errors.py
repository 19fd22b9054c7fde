"""What the E2B SDK raises, as our errors.

Observed with e2b 2.63 and e2b-code-interpreter 2.11: no key and 401 are AuthenticationException,
503 is ServiceBusyException, and neither is a SandboxException; SandboxNotRunningException is a
TimeoutException; a refused connection, a cut answer and one that is no JSON arrive as what httpx,
the transport or the JSON parser raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import httpx
from connectrpc.errors import ConnectError
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxNotRunningException,
    SandboxUnreachableException,
    ServiceBusyException,
    TemplateException,
    TimeoutException,
)

from providers.errors import (
    ConnectionFailed,
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.remote.secret import Secret, scrub
from providers.remote.service import SandboxGone

_STATUS = re.compile(r"\s*(\d{3})\b")


def translate(
    error: BaseException,
    secrets: Sequence[Secret],
    *,
    creating: bool = False,
) -> SandboxError:
    """The SandboxError for what the SDK raised."""
    told = _translated(error, secrets, creating)
    told.answered = "status" if _has_status(error) else ""
    return told


def _translated(error: BaseException, secrets: Sequence[Secret], creating: bool) -> SandboxError:
    said = scrub(str(error) or type(error).__name__, secrets)
    status = _status(error)
    if isinstance(error, AuthenticationException) or status in (401, 403):
        return ConnectionFailed(f"E2B refuses the API key. Check api_key and its rights. {said}")
    if isinstance(error, RateLimitException) or status == 429:
        return RateLimited(f"E2B's rate limit is reached. {said}")
    if isinstance(error, ServiceBusyException) or status == 503:
        return ProviderUnavailable(f"E2B is busy. {said}")
    if isinstance(error, SandboxNotRunningException) or status == 502:
        return SandboxGone(f"The E2B sandbox is gone. {said}")
    if isinstance(error, NotFoundException) or status == 404:
        if creating:
            return CreationFailed(f"E2B does not know the template. Check template. {said}")
        return ProviderUnavailable(f"The E2B sandbox is gone. {said}")
    if isinstance(error, SandboxUnreachableException):
        return ProviderUnavailable(f"The E2B sandbox cannot be reached. {said}")
    if isinstance(error, (TimeoutException, httpx.TimeoutException, TimeoutError)):
        return ConnectionFailed(f"E2B does not answer in time. {said}")
    if isinstance(error, NotEnoughSpaceException):
        return ProviderUnavailable(f"The E2B sandbox's disk is full. {said}")
    if isinstance(error, (httpx.ConnectError, ConnectionError)):
        return ConnectionFailed(
            f"E2B cannot be reached. Check the network, domain and api_url. {said}"
        )
    if isinstance(error, (TemplateException, InvalidArgumentException)):
        return CreationFailed(f"E2B refuses the request. {said}")
    if isinstance(error, SandboxException) and status is not None:
        if creating:
            return CreationFailed(f"E2B could not create a sandbox. {said}")
        return ProviderUnavailable(f"E2B failed. {said}")
    if isinstance(error, (httpx.TransportError, OSError, json.JSONDecodeError, ConnectError)):
        return ConnectionFailed(f"E2B's answer is incomplete or not JSON. {said}")
    return ConnectionFailed(f"E2B's answer is not understood ({type(error).__name__}). {said}")


def _has_status(error: BaseException) -> bool:
    """Whether somebody answered, with a status that tells of an error."""
    known = AuthenticationException | RateLimitException | ServiceBusyException
    return isinstance(error, known) or _status(error) is not None


def _status(error: BaseException) -> int | None:
    """The HTTP status an exception stands for; the code interpreter's say it only in words."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status
    if isinstance(error, SandboxException) and (found := _STATUS.match(str(error))):
        return int(found[1])
    if isinstance(error, SandboxException) and str(error).startswith("Code.INTERNAL"):
        return 500
    if isinstance(error, TimeoutException) and "due to sandbox timeout" in str(error):
        return 502
    return None
