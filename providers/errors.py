"""The error codes SB001 to SB009 and the exceptions that carry them.

Code that runs and fails is a result, never one of these errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ErrorCode:
    """One line of the table: what a caller may do about the error.

    `retry` says that the same request may succeed later, `fallback` that another provider may
    serve it now. Both hold only for errors raised before user code can have started.
    """

    code: str
    title: str
    remedy: str
    http_status: int
    retry: bool = False
    fallback: bool = False


NOT_INITIALIZED = ErrorCode(
    "SB001", "Provider not initialized", "Configure a provider in the admin.", 503, fallback=True
)
INVALID_CONFIGURATION = ErrorCode(
    "SB002", "Invalid configuration", "Check the value of the named field.", 400
)
CONNECTION_FAILED = ErrorCode(
    "SB003", "Connection failed", "Check network and credentials.", 502, True, True
)
CREATION_FAILED = ErrorCode(
    "SB004", "Instance creation failed", "Check the provider's capacity.", 503, True, True
)
TIMEOUT = ErrorCode("SB005", "Execution timeout", "Raise the timeout or make the code faster.", 504)
OUT_OF_MEMORY = ErrorCode(
    "SB006", "Out of memory", "Use less memory or raise the memory limit.", 507
)
BLOCKED = ErrorCode(
    "SB007", "Code blocked by security policy", "Remove the blocked operations.", 403
)
RATE_LIMITED = ErrorCode(
    "SB008", "Rate limit exceeded", "Run fewer executions at once or raise the quota.", 429, True
)
UNAVAILABLE = ErrorCode(
    "SB009", "Provider unavailable", "Check the provider or use a fallback.", 503, True, True
)

CODES: dict[str, ErrorCode] = {
    entry.code: entry
    for entry in (
        NOT_INITIALIZED,
        INVALID_CONFIGURATION,
        CONNECTION_FAILED,
        CREATION_FAILED,
        TIMEOUT,
        OUT_OF_MEMORY,
        BLOCKED,
        RATE_LIMITED,
        UNAVAILABLE,
    )
}


class SandboxError(Exception):
    """An execution that could not be carried out.

    `message` is shown to the caller: it names the field or component and the remedy, and never
    holds a credential. `started` is True when user code may already have run, so that nothing
    may be tried again elsewhere. `nothing_ran` is the proof of the contrary: without it, whatever
    is raised while code is handed over, runs or has run counts as `started` (`before_the_code`).
    `answered` says that somebody was there: "proof", when the answer was one of the provider's own
    service, "status" when anybody may have sent such a status.
    """

    entry: ErrorCode = UNAVAILABLE
    answered: Literal["", "status", "proof"] = ""
    nothing_ran: bool = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        started: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.started = started
        self.retry_after = retry_after

    @property
    def code(self) -> str:
        return self.entry.code

    @property
    def http_status(self) -> int:
        return self.entry.http_status

    @property
    def may_retry(self) -> bool:
        return self.entry.retry and not self.started

    @property
    def may_fall_back(self) -> bool:
        return self.entry.fallback and not self.started


class NotInitialized(SandboxError):
    entry = NOT_INITIALIZED


class InvalidConfiguration(SandboxError):
    """A configuration or request value is refused. `errors` maps each field to its message."""

    entry = INVALID_CONFIGURATION

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        errors: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field)
        self.errors = errors or ({field: message} if field else {})


class ConnectionFailed(SandboxError):
    entry = CONNECTION_FAILED


class CreationFailed(SandboxError):
    entry = CREATION_FAILED


class BlockedByPolicy(SandboxError):
    entry = BLOCKED


class RateLimited(SandboxError):
    entry = RATE_LIMITED


class KeptFull(RateLimited):
    """As many sandboxes are kept as may be: another one has to go first."""


class ProviderUnavailable(SandboxError):
    entry = UNAVAILABLE


class KeptSandboxLost(ProviderUnavailable):
    """A kept sandbox is gone, and all that it held. No other takes its place by itself.

    Says nothing against its provider: what ran in the sandbox may have ended it.
    """

    @property
    def may_retry(self) -> bool:
        return False

    @property
    def may_fall_back(self) -> bool:
        return False


@contextmanager
def before_the_code() -> Iterator[None]:
    """What a provider does for a run before anybody has the code: its errors prove that none ran.

    Not for what a service answers to the code itself: in a sandbox the code may be who answers.
    """
    try:
        yield
    except SandboxError as error:
        error.nothing_ran = not error.started
        raise
