"""The errors of the client. Code that fails is a result, not an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CofferdamError(Exception):
    """Any of the errors below. `id` is the id of the execution, or None if none is known."""

    id: str | None = None


class Unreachable(CofferdamError):
    """The service did not answer, or its answer was lost.

    `sent` is True if the request may have reached the service.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ConnectionLost(Unreachable):
    """A stream ended too early. `after` is the number of the last event that was received."""

    def __init__(self, message: str, *, id: str | None, after: int) -> None:  # noqa: A002
        super().__init__(message, sent=True)
        self.id, self.after = id, after


class StillRunning(CofferdamError, TimeoutError):
    """The execution `id` still runs; the time to wait for it is over."""

    def __init__(self, id: str, seconds: float) -> None:  # noqa: A002
        super().__init__(f"The execution {id} has not ended within {seconds:g} s.")
        self.id = id


class UnexpectedAnswer(CofferdamError):
    """The answer is not one of Cofferdam's. `status` is the HTTP status, or None if unknown."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class InvalidSettings(CofferdamError):
    """COFFERDAM_URL or COFFERDAM_API_KEY is missing or wrong."""


class ServiceError(CofferdamError):
    """The service refused the request, or failed.

    `status` is the HTTP status. `code` is one of SB001 to SB009 or a word such as `not_found`.
    `field` is the name of the field to change. `retry_after` is seconds. `ran` says whether any
    code ran; None means unknown.
    """

    def __init__(
        self, status: int, body: Mapping[str, Any], retry_after: float | None = None
    ) -> None:
        error: Mapping[str, Any] = body["error"]
        super().__init__(f"{error['code']}: {error['message']}")
        self.status = status
        self.code: str = error["code"]
        self.message: str = error["message"]
        self.field: str | None = error.get("field")
        self.ran: bool | None = error.get("ran")
        self.id = body.get("id")
        self.receipt: Mapping[str, Any] | None = body.get("receipt")
        self.retry_after = retry_after
        self.body = body


class ProviderNotInitialized(ServiceError):
    """SB001: the operator has to configure a provider."""


class InvalidRequest(ServiceError):
    """SB002 and `bad_request`: correct the field that `field` names."""


class ConnectionFailed(ServiceError):
    """SB003: the service cannot reach its provider."""


class CreationFailed(ServiceError):
    """SB004: the provider could not create a sandbox."""


class ExecutionTimeout(ServiceError):
    """SB005, where the service reports it as an error and not as a result."""


class OutOfMemory(ServiceError):
    """SB006, where the service reports it as an error and not as a result."""


class Blocked(ServiceError):
    """SB007: the policy does not allow the code."""


class RateLimited(ServiceError):
    """SB008: the quota that `field` names is used up. Wait `retry_after` seconds."""


class ProviderUnavailable(ServiceError):
    """SB009: the provider is unavailable. Code may have run, unless `ran` is False."""


class Unauthenticated(ServiceError):
    """The API key is missing, wrong, expired or revoked."""


class Forbidden(ServiceError):
    """The API key lacks the permission for this request."""


class NotFound(ServiceError):
    """The object does not exist, or belongs to another tenant."""


class Conflict(ServiceError):
    """The session or execution has ended, or is busy."""


BY_CODE: dict[str, type[ServiceError]] = {
    "SB001": ProviderNotInitialized,
    "SB002": InvalidRequest,
    "SB003": ConnectionFailed,
    "SB004": CreationFailed,
    "SB005": ExecutionTimeout,
    "SB006": OutOfMemory,
    "SB007": Blocked,
    "SB008": RateLimited,
    "SB009": ProviderUnavailable,
    "bad_request": InvalidRequest,
    "unauthenticated": Unauthenticated,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "conflict": Conflict,
}


def service_error(status: int, body: object, retry_after: float | None = None) -> CofferdamError:
    """The error for an answer of the service."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return UnexpectedAnswer(f"HTTP {status}, and not an error of Cofferdam's.", status)
    whole = {**body, "error": {"message": "", **error}} if isinstance(body, dict) else {}
    return BY_CODE.get(error["code"], ServiceError)(status, whole, retry_after)
