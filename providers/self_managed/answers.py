"""What the pool service answers, and which error it comes to where it does not."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from typing import Any

import urllib3
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, SSLError

from providers.errors import ConnectionFailed, ProviderUnavailable, SandboxError
from providers.runtime.service import messages
from providers.self_managed.absence import NotSent

logger = logging.getLogger(__name__)

_NOT_REACHED = (
    "The pool service does not answer. Start it (python manage.py pool), or correct the provider's "
    "endpoint. The log has the reason."
)


class Unauthorized(ConnectionFailed):
    """The service refuses us. Asking again changes nothing."""

    nothing_ran = True


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    error: SandboxError | None = None


class Answers:
    """Of one service. `where` it is, is for the log."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read(self, response: urllib3.BaseHTTPResponse, runs_code: bool) -> Answer:
        """What a response says. Raises Unauthorized where the token is refused."""
        status, data = response.status, response.data
        try:
            body = messages.loads(data) if data else None
        except SandboxError:
            body = None
        if 200 <= status < 300:
            return Answer(status, body)
        error = messages.error_from_json(body)
        if status == 401:
            refused = Unauthorized(
                "The pool service refuses the token. Put the service's POOL_TOKEN into the "
                "provider's configuration."
            )
            refused.answered = "proof" if error else ""
            # Where it is not the service's own, anybody on the way may have sent it, at any time.
            refused.nothing_ran = error is not None
            refused.started = runs_code and not refused.nothing_ran
            raise refused
        if error is not None:
            error.answered = "proof"
            error.nothing_ran = not error.started
        else:
            error = self.not_ours(f"HTTP {status}", started=runs_code)
        return Answer(status, body, error)

    def not_sent(self, error: NewConnectionError | ConnectTimeoutError) -> NotSent:
        """No connection came about."""
        self._note(_reason(error))
        return NotSent(_NOT_REACHED)

    def without_handshake(self, error: SSLError, runs_code: bool) -> SandboxError:
        """TLS did not come about, or broke later."""
        if not isinstance(error.args[0], ssl.SSLCertVerificationError):
            return self.broken(error, runs_code)
        # The handshake did not come to its end, and the request is sent after it.
        return Unauthorized(
            "The pool service shows a certificate that is not accepted. Correct "
            "ca_certificates or public_key_pins, or the service's certificate."
        )

    def broken(self, error: Exception, runs_code: bool) -> ProviderUnavailable:
        """The connection broke after it had come about."""
        self._note(type(error).__name__)
        # Of a request that runs no code, `started` False is certain.
        return ProviderUnavailable("The connection to the pool service broke.", started=runs_code)

    def not_ours(self, what: str, *, started: bool = False) -> ProviderUnavailable:
        """Something answers, which is no pool service."""
        self._note(what)
        return ProviderUnavailable(_NOT_REACHED, started=started)

    def _note(self, reason: str) -> None:
        """For the log alone: callers have no business with addresses inside our network."""
        logger.warning("cannot reach the pool service at %s: %s", self._where, reason)


def _reason(error: Exception) -> str:
    """The innermost cause in a few words: the rest names our own classes."""
    cause = error.__context__ or error.__cause__ or error
    return getattr(cause, "strerror", None) or type(error).__name__
