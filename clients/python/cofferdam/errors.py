"""What goes wrong, by what to do about it. Code that fails is an answer and none of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CofferdamError(Exception):
    """Any of the errors below. `id` is of the execution, where one is known to be recorded."""

    id: str | None = None


class Unreachable(CofferdamError):
    """Nobody answered, or the answer was lost. `sent`: the request may have reached the service."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ConnectionLost(Unreachable):
    """A stream broke off before its end. `after` is the number of the last event that came."""

    def __init__(self, message: str, *, id: str | None, after: int) -> None:  # noqa: A002
        super().__init__(message, sent=True)
        self.id, self.after = id, after


class StillRunning(CofferdamError, TimeoutError):
    """The execution `id` goes on, and was not waited for any longer."""

    def __init__(self, id: str, seconds: float) -> None:  # noqa: A002
        super().__init__(f"The execution {id} has not ended within {seconds:g} s.")
        self.id = id


class UnexpectedAnswer(CofferdamError):
    """What answered is no Cofferdam, or one of another version. `status` is HTTP's, where known."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class InvalidSettings(CofferdamError):
    """COFFERDAM_URL or COFFERDAM_API_KEY is missing or wrong."""


class ServiceError(CofferdamError):
    """The service refused, or could not do it.

    `status` is HTTP's, `code` one of SB001 to SB009 or a word such as `not_found`. `field` names
    what to change. `retry_after` is seconds. `ran` says whether any code ran, where the service
    says so, None where it is not known.
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
    """SB001: whoever runs the service has to configure a provider."""


class InvalidRequest(ServiceError):
    """SB002 and `bad_request`: change `field`."""


class ConnectionFailed(ServiceError):
    """SB003: the service cannot reach its provider."""


class CreationFailed(ServiceError):
    """SB004: no sandbox could be made."""


class ExecutionTimeout(ServiceError):
    """SB005, where it is no answer but an error."""


class OutOfMemory(ServiceError):
    """SB006, where it is no answer but an error."""


class Blocked(ServiceError):
    """SB007: the policy does not allow it."""


class RateLimited(ServiceError):
    """SB008: a quota is used up, which `field` names. Wait `retry_after` seconds."""


class ProviderUnavailable(ServiceError):
    """SB009: code may have run, unless `ran` is false."""


class Unauthenticated(ServiceError):
    """The API key is missing, wrong, expired or revoked."""


class Forbidden(ServiceError):
    """The API key may not do this."""


class NotFound(ServiceError):
    """It is not there, or not yours."""


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
    """The error that an answer stands for."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return UnexpectedAnswer(f"HTTP {status}, and no error as Cofferdam answers it.", status)
    whole = {**body, "error": {"message": "", **error}} if isinstance(body, dict) else {}
    return BY_CODE.get(error["code"], ServiceError)(status, whole, retry_after)
