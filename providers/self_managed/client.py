"""The client of the pool service, over TCP or the installation's socket: kept connections, retries
only where nothing can have started, and the frames of one session sandbox.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from providers.addresses import rules
from providers.credentials import Credential, changes_to_json
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.remote.checked_urllib3 import check_connections
from providers.remote.receiver import Receiver
from providers.remote.reclaim import process_tag
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import CHUNK_BYTES
from providers.runtime.pool.protocol import Frame, Parts
from providers.runtime.service import messages, operations
from providers.runtime.service.settings import settings_digest
from providers.runtime.service.unix_socket import connect
from providers.sandbox import tell_afterwards
from providers.values import Emit, ExecutionResult, Job, SandboxSpec

if TYPE_CHECKING:
    from providers.templates.store import TemplateStore

CONNECT_SECONDS = 3.0
CONNECTIONS = 256
# What the service itself adds to a wait or a run.
SLACK_SECONDS = 5.0

# The service says something of a stream more often than that.
SILENCE_SECONDS = 3 * operations.ALIVE_SECONDS
READ_BYTES = 64 * 1024

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 1.0


@dataclass(frozen=True)
class Handle:
    """An instance of a service's: its id there, what isolates it, and whom it serves.

    `host` is the key of its host, of several (see `hosts`).
    """

    instance_id: str
    runtime: str
    sharing: str = ""
    host: str = ""


@dataclass
class PoolClient:
    """One service. Used from many threads at once.

    `apart`: instances are made by `config`, and it does not come into force for others. `socket` is
    where the service of this installation listens, in place of `endpoint`. Requests for a sandbox
    are tried again `start_retries` times, as often as all others where that is None.
    """

    endpoint: str
    token: str = field(repr=False)
    max_retries: int
    config: Mapping[str, Any] = field(repr=False)
    apart: bool = False
    receiver: Receiver = field(default_factory=lambda: Receiver(rules()), repr=False)

    socket: Path | None = None
    # Where templates are brought from that the service does not have.
    store: TemplateStore | None = None
    start_retries: int | None = None

    def __post_init__(self) -> None:
        if self.socket is not None:
            self._pool: urllib3.HTTPConnectionPool = UnixPool(self.socket, CONNECTIONS)
        else:
            # urllib3 sets TCP_NODELAY itself: no request waits for a delayed acknowledgement.
            self._pool = urllib3.connection_from_url(
                self.endpoint, maxsize=CONNECTIONS, block=False
            )
            check_connections(self._pool, self.receiver)
        self._path = urlsplit(self.endpoint).path.rstrip("/")
        self._brought: set[str] = set()
        self._headers = {"Content-Type": "application/json"}
        if self.token:
            self._headers["Authorization"] = f"Bearer {self.token}"
        self._process = process_tag()
        self._absence = OutageBackoff()
        self._answers = Answers(str(self.socket or self.endpoint))
        self._digest = settings_digest(self.config)
        self._longest_wait = float(self.config["queue_timeout"]) + SLACK_SECONDS

    def push(self) -> dict[str, Any]:
        """Have the service run with our configuration; its figures. Raises SandboxError."""
        if self.apart:
            return self.stats()
        seconds = 30.0 + SLACK_SECONDS
        stats = self._retried("PUT", "/v1/settings", dict(self.config), seconds=seconds)
        if not isinstance(stats, dict):
            raise self._answers.not_ours("no figures in the answer")
        return stats

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Have the service put in other versions of credentials. Raises SandboxError."""
        body = changes_to_json(changes)
        self._retried("PATCH", "/v1/credentials", body, seconds=30.0 + SLACK_SECONDS)

    def create(self, spec: SandboxSpec, owner: str) -> Handle:
        """A fresh instance. Raises SandboxError; nothing has run then."""
        self._bring_template(spec.digest)
        body: dict[str, Any] = {"template": spec.template, "owner": owner, **_network_of(spec)}
        if spec.digest:
            body["digest"] = spec.digest
        headers = {messages.CLIENT_HEADER: self._process}
        if self.apart:
            body["settings"] = dict(self.config)
        else:
            headers[messages.SETTINGS_HEADER] = self._digest
        answer = self._started("/v1/instances", body, headers)
        try:
            return Handle(
                str(answer["instance_id"]),
                str(answer["runtime"]),
                str(answer.get("sharing", "")),
            )
        except (AttributeError, KeyError, TypeError):
            raise self._answers.not_ours("no instance in the answer") from None

    def run(self, handle: Handle, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """Run the instance's one job, and tell `emit` of it while it runs. Tried again only while
        no connection came about.

        Raises SandboxError, with `started` True unless it is certain that nothing has run: no
        connection came about, or the service itself says so.
        """
        path = f"/v1/instances/{quote(handle.instance_id, safe='')}/run"
        body = messages.dumps(messages.job_to_json(job))
        seconds = job.timeout + SLACK_SECONDS
        for attempt in range(self.max_retries + 1):
            try:
                if emit is not None:
                    return self._run_live(path, body, seconds, emit)
                answer = self._ask("POST", path, body, seconds=seconds, runs_code=True)
            except NotSent:
                if attempt == self.max_retries:
                    raise
                pause(attempt)
                continue
            if answer.error is not None:
                raise answer.error
            return messages.result_from_json(answer.body)
        raise AssertionError("unreachable")

    def _run_live(self, path: str, body: bytes, seconds: float, emit: Emit) -> ExecutionResult:
        """What is refused, and a service that tells nothing meanwhile, answer as to `run`."""
        response = self._send(
            "POST",
            path,
            body,
            seconds=max(seconds, SILENCE_SECONDS),
            headers={"Accept": operations.MEDIA_TYPE},
            runs_code=True,
            preload=False,
        )
        with self._frames_of(response) as frames:
            if response.headers.get("Content-Type") != operations.MEDIA_TYPE:
                answer = self._answers.read(response, runs_code=True)
                if answer.error is not None:
                    raise answer.error
                return tell_afterwards(messages.result_from_json(answer.body), emit)
            for frame in operations.checked(frames):
                if frame[0]["event"] == "done":
                    return messages.result_from_json(messages.loads(frame[1].get("result", b"")))
                if (event := operations.event_of_frame(frame)) is not None:
                    emit(event)
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

    def keep(self, spec: SandboxSpec, owner: str, pool: Mapping[str, Any] | None) -> Any:
        """What the service says of a new kept sandbox. Raises SandboxError; nothing has run then.

        It is of this `pool`, or of the one that has our settings.
        """
        self._bring_template(spec.digest)
        body: dict[str, Any] = {
            "template": spec.template,
            "owner": owner,
            "environment": dict(spec.environment),
            "limits": vars(spec.limits) if spec.limits else None,
            "pool": pool,
            **({"digest": spec.digest} if spec.digest else {}),
            **_network_of(spec),
        }
        if spec.seconds is not None:
            body["seconds"] = spec.seconds
        headers = {} if pool else {messages.SETTINGS_HEADER: self._digest}
        return self._started("/v1/sandboxes", body, headers)

    def _bring_template(self, digest: str) -> None:
        """Have the service hold the files of a template. Raises SandboxError."""
        if not digest or self.store is None or digest in self._brought:
            return
        path = f"/v1/templates/{digest}"
        if self._ask_anew("GET", path).status == 404:
            if self.store.folder(digest) is None:
                raise InvalidConfiguration(
                    f"template: The files of {digest[:12]} are not on this machine. Build the "
                    "template again.",
                    field="template",
                )
            response = self._send(
                "PUT", path, self.store.pack(digest), seconds=SILENCE_SECONDS, headers=None,
                runs_code=False,
            )  # fmt: skip
            answer = self._answers.read(response, runs_code=False)
            if answer.error is not None:
                raise answer.error
        self._brought.add(digest)

    def ask_of(self, method: str, ref: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the service says of a kept sandbox. Raises KeptSandboxLost and other errors."""
        path = f"/v1/sandboxes/{quote(ref, safe='')}"
        text = None if body is None else messages.dumps(body)
        answer = self._absence.wait_out(lambda: self._ask_anew(method, path, text))
        if answer.error is not None:
            raise answer.error
        return answer.body

    @contextmanager
    def operate(self, ref: str, body: bytes | Iterator[bytes]) -> Iterator[Iterator[Frame]]:
        """Send an operation of a kept sandbox, and have the frames of its answer as they come.

        Whoever leaves early has it stopped. Raises SandboxError, also while frames are taken.
        """
        response = self._absence.wait_out(
            lambda: self._send(
                "POST",
                f"/v1/sandboxes/{quote(ref, safe='')}/operations",
                body,
                seconds=SILENCE_SECONDS,
                headers={"Content-Type": operations.MEDIA_TYPE},
                runs_code=True,
                preload=False,
            )
        )
        with self._frames_of(response) as frames:
            if response.status != 200:
                error = self._answers.read(response, runs_code=True).error
                raise error or self._answers.not_ours(f"HTTP {response.status}", started=True)
            yield frames

    @contextmanager
    def _frames_of(self, response: urllib3.BaseHTTPResponse) -> Iterator[Iterator[Frame]]:
        whole = False

        def frames() -> Iterator[Frame]:
            nonlocal whole
            parser = wire.Parser(wire.REQUEST_LIMIT)
            try:
                for piece in response.stream(READ_BYTES):
                    yield from parser.feed(piece)
            except (HTTPError, wire.FrameError) as error:
                raise self._answers.broken(error, runs_code=True) from None
            whole = True

        try:
            yield frames()
        except HTTPError as error:
            raise self._answers.broken(error, runs_code=True) from None
        finally:
            if whole:
                response.release_conn()
            else:
                # Only this tells the service that nobody waits any more.
                response.close()

    def stats(self, seconds: float = SLACK_SECONDS) -> dict[str, Any]:
        """The service's figures now. Raises SandboxError, where no answer came in so many seconds
        twice."""
        answer = self._ask_anew("GET", "/v1/stats", seconds=seconds)
        if answer.error is not None:
            raise answer.error
        if not isinstance(answer.body, dict):
            raise self._answers.not_ours("no figures in the answer")
        return answer.body

    def close(self) -> None:
        self._pool.close()

    def _started(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        return self._retried(
            "POST",
            path,
            body,
            seconds=self._longest_wait,
            headers=headers,
            retries=self.start_retries,
        )

    def _retried(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        retries: int | None = None,
    ) -> Any:
        """For requests that run no code: whatever may pass is tried again."""
        text = messages.dumps(body)
        most = self.max_retries if retries is None else retries
        for attempt in range(most + 1):
            try:
                answer = self._ask(method, path, text, seconds=seconds, headers=headers)
                if answer.status == messages.SETTINGS_UNKNOWN:
                    self.push()
                    answer = self._ask(method, path, text, seconds=seconds, headers=headers)
                if answer.error is None:
                    return answer.body
                raise answer.error
            except (RateLimited, Unauthorized):
                # The service has queued us as long as it may; more of us would not help.
                raise
            except SandboxError as error:
                if attempt == most or not error.may_retry:
                    raise
            pause(attempt)
        raise AssertionError("unreachable")

    def _ask_anew(
        self, method: str, path: str, body: bytes | None = None, seconds: float = SLACK_SECONDS
    ) -> Answer:
        """A kept connection may be to a service that has ended; a second one tells the truth."""
        try:
            return self._ask(method, path, body, seconds=seconds)
        except ProviderUnavailable:
            return self._ask(method, path, body, seconds=seconds)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        runs_code: bool = False,
    ) -> Answer:
        """One request, sent once. Raises SandboxError when no answer came."""
        response = self._send(
            method, path, body, seconds=seconds, headers=headers, runs_code=runs_code
        )
        return self._answers.read(response, runs_code)

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None,
        *,
        seconds: float,
        headers: Mapping[str, str] | None,
        runs_code: bool,
        preload: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.urlopen(
                method,
                self._path + path,
                body=body,
                headers={**self._headers, **(headers or {})},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                preload_content=preload,
            )
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise self._answers.not_sent(error) from None
        except SSLError as error:
            raise self._answers.without_handshake(error, runs_code) from None
        except HTTPError as error:
            raise self._answers.broken(error, runs_code) from None


def _network_of(spec: SandboxSpec) -> dict[str, Any]:
    """What knows of no network refuses or ignores it, and then its sandboxes have none."""
    return {"network": spec.network.to_json()} if spec.network else {}


def pause(attempt: int) -> None:
    """Wait, longer each time, and not in step with others who failed at the same moment."""
    delay = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2**attempt)
    time.sleep(delay * random.uniform(0.75, 1.25))  # noqa: S311  no secret


class SandboxConnection:
    """To the sandbox of this ref. Every method raises SandboxError, KeptSandboxLost included."""

    def __init__(self, client: PoolClient, ref: str) -> None:
        self.client = client
        self.ref = ref

    def ask(self, name: str, parts: Parts = (), **fields: Any) -> Frame:
        """An operation's answer, whatever it sends before."""
        with self.follow(name, parts, **fields) as frames:
            for header, received in frames:
                if header["event"] == "done":
                    return header, received
        raise operations.unfinished()

    def follow(
        self, name: str, parts: Parts = (), *, also_alive: bool = False, **fields: Any
    ) -> AbstractContextManager[Iterator[Frame]]:
        """The frames of an operation as they come, the last of which is `done`."""
        return self.send(operations.frame({"op": name, **fields}, parts), also_alive=also_alive)

    def write(self, name: str, content: Iterable[bytes], **fields: Any) -> dict[str, object]:
        """The answer to an operation that is given bytes."""

        def body() -> Iterator[bytes]:
            yield operations.frame({"op": name, **fields})
            for piece in content:
                for start in range(0, len(piece), CHUNK_BYTES):
                    data = piece[start : start + CHUNK_BYTES]
                    yield operations.frame({"op": "data"}, [("data", data)])

        with self.send(body()) as frames:
            for header, _ in frames:
                if header["event"] == "done":
                    return header
        raise operations.unfinished()

    @contextmanager
    def send(
        self, body: bytes | Iterator[bytes], *, also_alive: bool = False
    ) -> Iterator[Iterator[Frame]]:
        """The same for what is packed already."""
        with self.client.operate(self.ref, body) as frames:
            yield operations.checked(frames, also_alive=also_alive)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._path = path

    def _new_conn(self) -> socket.socket:
        try:
            return connect(self._path, CONNECT_SECONDS)
        except OSError as error:
            raise NewConnectionError(self, str(error)) from error


class UnixPool(urllib3.HTTPConnectionPool):
    """Connections to the service at `path`, whatever host they are said to go to."""

    def __init__(self, path: Path, maxsize: int) -> None:
        super().__init__("localhost", maxsize=maxsize, block=False)
        self._path = path

    def _new_conn(self) -> HTTPConnection:
        self.num_connections += 1
        return _UnixConnection(self._path, host="localhost", timeout=self.timeout.connect_timeout)


T = TypeVar("T")

# How long after it was missed first a service is waited for, and how often it is tried.
WAIT_SECONDS = 5.0
PAUSE_SECONDS = 0.1
# Told to whoever has waited, or comes later.
RETRY_AFTER_SECONDS = 5.0


class NotSent(ConnectionFailed):
    """No connection came about, so the service cannot have seen the request."""

    nothing_ran = True


class OutageBackoff:
    """Of one service, as all threads of this process have seen it.

    Who comes when it has been missing for longer is told at once: nobody is to wait for a service
    that is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    def wait_out(self, call: Callable[[], T]) -> T:
        """What `call` returns, tried again while there is no connection. Raises NotSent."""
        while True:
            try:
                done = call()
            except NotSent as error:
                if not self._may_wait():
                    error.retry_after = RETRY_AFTER_SECONDS
                    raise
                time.sleep(PAUSE_SECONDS)
            except BaseException:
                # Somebody was there.
                self._is_over()
                raise
            else:
                self._is_over()
                return done

    def _may_wait(self) -> bool:
        now = time.monotonic()
        with self._lock:
            if self._since is None:
                self._since = now
            return now - self._since < WAIT_SECONDS

    def _is_over(self) -> None:
        with self._lock:
            self._since = None


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
