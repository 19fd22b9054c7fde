"""HTTP to the pool service: kept connections, and retries only where nothing can have started."""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from providers.addresses import rules
from providers.base import ExecutionResult
from providers.errors import ConnectionFailed, ProviderUnavailable, RateLimited, SandboxError
from providers.pool.requests import Job
from providers.pool.service import messages
from providers.pool.service.settings import settings_digest
from providers.remote.checked_urllib3 import check_connections
from providers.remote.receiver import Receiver

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
# What the service itself adds to a wait or a run.
SLACK_SECONDS = 5.0

_NOT_REACHED = (
    "The pool service does not answer. Start it (python manage.py pool), or correct the provider's "
    "endpoint. The log has the reason."
)

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 1.0


@dataclass(frozen=True)
class Handle:
    """An instance of the service's: its id there, what isolates it, and whom it serves."""

    instance_id: str
    runtime: str
    sharing: str = ""


class _NotSent(ConnectionFailed):
    """No connection came about, so the service cannot have seen the request."""


class _Unwelcome(ConnectionFailed):
    """The service refuses us. Asking again changes nothing."""


@dataclass(frozen=True)
class _Answer:
    status: int
    body: Any
    error: SandboxError | None = None


@dataclass
class PoolClient:
    """One service. Used from many threads at once.

    `apart`: instances are made by `config`, and it does not come into force for others.
    """

    endpoint: str
    token: str = field(repr=False)
    max_retries: int
    config: Mapping[str, Any] = field(repr=False)
    apart: bool = False
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()), repr=False)

    def __post_init__(self) -> None:
        # urllib3 sets TCP_NODELAY itself: no request waits for a delayed acknowledgement.
        self._pool = urllib3.connection_from_url(self.endpoint, maxsize=256, block=False)
        check_connections(self._pool, self.receiver)
        self._path = urlsplit(self.endpoint).path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if self.token:
            self._headers["Authorization"] = f"Bearer {self.token}"
        self._digest = settings_digest(self.config)
        self._longest_wait = float(self.config["queue_timeout"]) + SLACK_SECONDS

    def push(self) -> dict[str, Any]:
        """Have the service run with our configuration; its figures. Raises SandboxError."""
        if self.apart:
            return self.stats()
        seconds = 30.0 + SLACK_SECONDS
        stats = self._retried("PUT", "/v1/settings", dict(self.config), seconds=seconds)
        if not isinstance(stats, dict):
            raise self._not_ours("no figures in the answer")
        return stats

    def create(self, template: str, owner: str) -> Handle:
        """A fresh instance. Raises SandboxError; nothing has run then."""
        body: dict[str, Any] = {"template": template, "owner": owner}
        headers = {}
        if self.apart:
            body["settings"] = dict(self.config)
        else:
            headers[messages.SETTINGS_HEADER] = self._digest
        answer = self._retried(
            "POST", "/v1/instances", body, seconds=self._longest_wait, headers=headers
        )
        try:
            return Handle(
                str(answer["instance_id"]),
                str(answer["runtime"]),
                str(answer.get("sharing", "")),
            )
        except (AttributeError, KeyError, TypeError):
            raise self._not_ours("no instance in the answer") from None

    def run(self, handle: Handle, job: Job) -> ExecutionResult:
        """Run the instance's one job. Tried again only while no connection came about.

        Raises SandboxError, with `started` True unless it is certain that nothing has run.
        """
        path = f"/v1/instances/{quote(handle.instance_id, safe='')}/run"
        body = messages.dumps(messages.job_to_json(job))
        seconds = job.timeout + SLACK_SECONDS
        for attempt in range(self.max_retries + 1):
            try:
                answer = self._ask("POST", path, body, seconds=seconds, runs_code=True)
            except _NotSent:
                if attempt == self.max_retries:
                    raise
                _pause(attempt)
                continue
            if answer.error is not None:
                raise answer.error
            return messages.result_from_json(answer.body)
        raise AssertionError("unreachable")

    def destroy(self, handle: Handle) -> bool:
        """False when the service had no such instance."""
        path = f"/v1/instances/{quote(handle.instance_id, safe='')}"
        answer = self._ask_anew("DELETE", path)
        if answer.status == 404:
            return False
        if answer.error is not None:
            raise answer.error
        return True

    def stats(self) -> dict[str, Any]:
        """The service's figures now. Raises SandboxError."""
        answer = self._ask_anew("GET", "/v1/stats")
        if answer.error is not None:
            raise answer.error
        if not isinstance(answer.body, dict):
            raise self._not_ours("no figures in the answer")
        return answer.body

    def close(self) -> None:
        self._pool.close()

    def _retried(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """For requests that run no code: whatever may pass is tried again."""
        text = messages.dumps(body)
        for attempt in range(self.max_retries + 1):
            try:
                answer = self._ask(method, path, text, seconds=seconds, headers=headers)
                if answer.status == messages.SETTINGS_UNKNOWN:
                    self.push()
                    answer = self._ask(method, path, text, seconds=seconds, headers=headers)
                if answer.error is None:
                    return answer.body
                raise answer.error
            except (RateLimited, _Unwelcome):
                # The service has queued us as long as it may; more of us would not help.
                raise
            except SandboxError as error:
                if attempt == self.max_retries or not error.may_retry:
                    raise
            _pause(attempt)
        raise AssertionError("unreachable")

    def _ask_anew(self, method: str, path: str) -> _Answer:
        """A kept connection may be to a service that has ended; a second one tells the truth."""
        try:
            return self._ask(method, path, None, seconds=SLACK_SECONDS)
        except ProviderUnavailable:
            return self._ask(method, path, None, seconds=SLACK_SECONDS)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        runs_code: bool = False,
    ) -> _Answer:
        """One request, sent once. Raises SandboxError when no answer came."""
        try:
            response = self._pool.urlopen(
                method,
                self._path + path,
                body=body,
                headers={**self._headers, **(headers or {})},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
            )
        except (NewConnectionError, ConnectTimeoutError) as error:
            self._note(_reason(error))
            raise _NotSent(_NOT_REACHED) from None
        except SSLError as error:
            if not isinstance(error.args[0], ssl.SSLCertVerificationError):
                raise self._broken(error, runs_code) from None
            # The handshake did not come to its end, and the request is sent after it.
            raise _Unwelcome(
                "The pool service shows a certificate that is not accepted. Correct "
                "ca_certificates or public_key_pins, or the service's certificate."
            ) from None
        except HTTPError as error:
            raise self._broken(error, runs_code) from None
        return self._read(response, runs_code)

    def _broken(self, error: HTTPError, runs_code: bool) -> ProviderUnavailable:
        self._note(type(error).__name__)
        # Of a request that runs no code, `started` False is certain.
        return ProviderUnavailable("The connection to the pool service broke.", started=runs_code)

    def _not_ours(self, what: str, *, started: bool = False) -> ProviderUnavailable:
        self._note(what)
        return ProviderUnavailable(_NOT_REACHED, started=started)

    def _note(self, reason: str) -> None:
        """For the log alone: callers have no business with addresses inside our network."""
        logger.warning("the pool service at %s is not reached: %s", self.endpoint, reason)

    def _read(self, response: urllib3.BaseHTTPResponse, runs_code: bool) -> _Answer:
        status, data = response.status, response.data
        try:
            body = messages.loads(data) if data else None
        except SandboxError:
            body = None
        if 200 <= status < 300:
            return _Answer(status, body)
        error = messages.error_from_json(body)
        if status == 401:
            refused = _Unwelcome(
                "The pool service refuses the token. Put the service's POOL_TOKEN into the "
                "provider's configuration."
            )
            refused.answered = "proof" if error else ""
            raise refused
        if error is not None:
            error.answered = "proof"
        else:
            error = self._not_ours(f"HTTP {status}", started=runs_code)
        return _Answer(status, body, error)


def _pause(attempt: int) -> None:
    """Longer each time, and not in step with others who failed at the same moment."""
    delay = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2**attempt)
    time.sleep(delay * random.uniform(0.75, 1.25))  # noqa: S311  no secret


def _reason(error: Exception) -> str:
    """The innermost cause in a few words: the rest names our own classes."""
    cause = error.__context__ or error.__cause__ or error
    return getattr(cause, "strerror", None) or type(error).__name__
