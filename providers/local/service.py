"""The client of the pool service of this installation: it holds a pool, and takes sandboxes of it.

`providers.runtime.service.runs` says what goes over the socket. Where no service runs, the first
process that needs one starts it; it ends when nobody has used it for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from django.conf import settings

from providers.credentials import Credential, changes_to_json
from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.languages import normalize_language
from providers.runtime.guest import wire
from providers.runtime.pool.protocol import Frame
from providers.runtime.pool.settings import LAUNCHERS
from providers.runtime.service import messages, operations
from providers.runtime.service.settings import FIELDS
from providers.runtime.service.unix_socket import address_of, runs_path, socket_path
from providers.sandbox import KeptSandbox
from providers.schema import validate
from providers.self_managed.client import PoolClient
from providers.self_managed.kept import ServiceSandbox
from providers.values import Emit, ExecutionResult, Job, SandboxSpec

logger = logging.getLogger(__name__)

# What opening a pool may take: launchers, kernels and images are tried out.
HOLD_SECONDS = 120.0
# What the service itself adds to a wait or a run.
SLACK_SECONDS = 60.0
STATS_SECONDS = 10.0
# How long a service that is started, or starts again, is waited for.
START_SECONDS = 30.0
LOOK_SECONDS = 0.02
# So many unused connections are kept.
MOST_IDLE = 32
# Of an answer, whose texts are JSON: the largest limits of a run, each byte with its escapes.
ANSWER_BYTES = 1 << 30
MOST_STARTS = 5
# Beyond so much the log of the services that were started here begins anew.
MOST_LOG_BYTES = 1024 * 1024
# The settings of the service that a process may have from elsewhere than the environment.
_HANDED_ON = (
    *("DATA_DIR", "MINIMUM_ISOLATION", "SANDBOX_LOCAL_PYTHON", "SANDBOX_LOCAL_UNISOLATED"),
    *("NETWORK_ALLOWED_ADDRESSES", "NETWORK_CA_FILE"),
)


class ServiceEnded(Exception):
    """The connection ended before the answer was whole."""


class Connection(asyncio.Protocol):
    """A connection to the service, for one request at a time."""

    def __init__(self, tell_full: Callable[[bool], None], forget: Callable[[Connection], None]):
        # How often it was kept for another use.
        self.uses = 0
        self._tell_full = tell_full
        self._forget = forget
        self._parser = wire.Parser(ANSWER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Frame] | None = None
        self._emit: Emit | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, seconds: float, emit: Emit | None = None) -> Frame:
        """Send a request; return the last frame of its answer. `emit` is told of the events before.

        Raises the service's SandboxError, ServiceEnded, and TimeoutError. Whoever does not wait for
        the answer ends the connection.
        """
        if self._transport is None or self._transport.is_closing():
            raise ServiceEnded
        self._emit = emit
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(seconds):
                return await self._answer
        except (asyncio.CancelledError, TimeoutError):
            self.abort()
            raise
        finally:
            self._answer = self._emit = None

    def abort(self) -> None:
        """End it, and with it what it has of the service."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._parser.feed(data):
                self._receive(frame)
        except Exception:
            logger.exception("the pool service's answer cannot be used")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ServiceEnded())
        self._forget(self)

    def _receive(self, frame: Frame) -> None:
        header, parts = frame
        event, answer = header.get("event"), self._answer
        if event == "full":
            self._tell_full(header.get("full") is True)
        elif answer is None or answer.done():
            return
        elif event == "done":
            answer.set_result(frame)
        elif event == "error":
            answer.set_exception(operations.error_of(parts))
        elif self._emit is not None and (told := operations.event_of_frame(frame)) is not None:
            self._emit(told)


class LocalService:
    """One pool of the service. Lives in one event loop; `is_full` may be read in any thread.

    `pool` is what PoolSpec reads. A trial changes nothing that others use.
    """

    def __init__(self, pool: Mapping[str, Any], *, is_trial: bool = False) -> None:
        self.is_full = False
        self._path = runs_path(settings.DATA_DIR)
        self._request = operations.frame(
            {"op": "hold", "trial": is_trial}, [("pool", messages.dumps(dict(pool)))]
        )
        self._longest_wait = float(pool["settings"]["queue_timeout"]) + SLACK_SECONDS
        self._opening: asyncio.Task[Mapping[str, Any]] | None = None
        self._is_closed = False
        self._holding: Connection | None = None
        self._held: Mapping[str, Any] = {}
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    @property
    def is_held(self) -> bool:
        """Whether our pool is open, as far as is known."""
        return self._holding is not None and self._holding.is_open

    async def hold(self) -> Mapping[str, Any]:
        """What the service says of our pool, which is open from now on. Raises SandboxError.

        All who wait for it at once wait for the same try.
        """
        if self.is_held:
            return self._held
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._hold())
            # Whoever waited for it may have left.
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._opening)

    async def _hold(self) -> Mapping[str, Any]:
        deadline = _now() + START_SECONDS
        while True:
            connection = await self._connect(deadline)
            try:
                self._held = (await connection.ask(self._request, HOLD_SECONDS))[0]
                self._holding = connection
                return self._held
            except ServiceEnded:
                # It was just ending, or finishes what runs in it.
                if _now() > deadline:
                    raise _is_ending() from None
                await asyncio.sleep(LOOK_SECONDS)
            except TimeoutError:
                raise _no_answer() from None
            except SandboxError:
                connection.abort()
                raise

    async def take(self, spec: SandboxSpec, owner: str) -> tuple[Connection, Mapping[str, Any]]:
        """A sandbox for this owner, which belongs to the connection. Raises SandboxError; nothing
        has run then."""
        former = self._holding
        try:
            return await self._take(spec, owner)
        except ServiceEnded:
            # Another one may have taken its place, which knows neither us nor our pool. Whoever
            # waits beside us may have found it already.
            if former is not None and former is self._holding:
                for connection in (*self._idle, former):
                    connection.abort()
                self._idle.clear()
        try:
            return await self._take(spec, owner)
        except ServiceEnded:
            raise _no_answer() from None

    async def _take(self, spec: SandboxSpec, owner: str) -> tuple[Connection, Mapping[str, Any]]:
        pool = (await self.hold())["pool"]
        connection = self._idle.pop() if self._idle else await self._connect()
        template = normalize_language(spec.template)
        request = {"op": "take", "pool": pool, "template": template, "owner": owner}
        if spec.digest:
            request["digest"] = spec.digest
        parts = [("network", messages.dumps(spec.network.to_json()))] if spec.network else []
        try:
            answer = await connection.ask(operations.frame(request, parts), self._longest_wait)
        except TimeoutError:
            raise _no_answer() from None
        except SandboxError:
            self.keep(connection)
            raise
        return connection, answer[0]

    async def run(self, connection: Connection, job: Job, emit: Emit | None) -> ExecutionResult:
        """Run the one job of the connection's sandbox, which ends with it. Raises SandboxError."""
        with before_the_code():
            is_told = emit is not None
            request = operations.run_to_frame(job, language=job.language, stream=is_told)
        try:
            _, parts = await connection.ask(request, job.timeout + SLACK_SECONDS, emit)
        except (ServiceEnded, TimeoutError):
            raise ProviderUnavailable(
                "The pool service ended during the run, or the sandbox was closed.", started=True
            ) from None
        except SandboxError as error:
            if error.started:
                self.keep(connection)
            raise
        self.keep(connection)
        text = parts.get("result", b"")
        return (
            await asyncio.to_thread(_result, text) if len(text) > messages.LARGE else _result(text)
        )

    async def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Have the service put in other versions of credentials. Raises SandboxError."""
        connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or await self._connect()
            parts = [("changes", messages.dumps(changes_to_json(changes)))]
            await connection.ask(operations.frame({"op": "credentials"}, parts), STATS_SECONDS)
        except ServiceEnded:
            # With it every sandbox has ended that had one.
            return
        except TimeoutError:
            raise _no_answer() from None
        self.keep(connection)

    async def stats(self) -> dict[str, Any]:
        """The figures of our pool. Raises SandboxError."""
        pool = (await self.hold())["pool"]
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            request = operations.frame({"op": "stats", "pool": pool})
            _, parts = await connection.ask(request, STATS_SECONDS)
        except (ServiceEnded, TimeoutError):
            raise _no_answer() from None
        self.keep(connection)
        return dict(messages.loads(parts.get("stats", b"")))

    def keep(self, connection: Connection) -> None:
        """Use it again: it has nothing of the service any more, or gives it up with the next."""
        connection.uses += 1
        if len(self._idle) >= MOST_IDLE:
            connection.abort()
        elif connection.is_open:
            self._idle.append(connection)

    async def end(self, connection: Connection, use: int) -> None:
        """End what the connection has of the service, unless it is kept for another use."""
        if connection.uses == use:
            connection.abort()

    async def close(self) -> None:
        """Give back all that we have of the service."""
        self._is_closed = True
        for connection in list(self._open):
            connection.abort()

    async def _connect(self, deadline: float | None = None) -> Connection:
        """Return a new connection. With a deadline a service is started where there is none.

        Raises ProviderUnavailable, and ServiceEnded where there is no deadline.
        """
        starts = MOST_STARTS if settings.POOL_AUTOSTART else 0
        while not self._is_closed:
            try:
                with address_of(self._path) as address:
                    _, connection = await asyncio.get_running_loop().create_unix_connection(
                        lambda: Connection(self._tell_full, self._forget), address
                    )
            except OSError as error:
                if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise ProviderUnavailable(
                        f"The pool service cannot be reached: {error.strerror or error}."
                    ) from error
                if deadline is None:
                    raise ServiceEnded from None
                if _now() > deadline:
                    raise _no_service() from None
                # One that ends at once has lost to another, which starts, or is just ending.
                if starts and start(self._path):
                    starts -= 1
                await asyncio.sleep(LOOK_SECONDS)
            else:
                self._open.add(connection)
                return connection
        raise ProviderUnavailable("The provider was closed.")

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if connection is self._holding:
            # Nothing tells of it any more.
            self.is_full = False

    def _tell_full(self, is_full: bool) -> None:
        self.is_full = is_full


_started: dict[Path, subprocess.Popen[bytes]] = {}


def start(path: Path) -> bool:
    """Start the service that listens at `path`, unless one that we have started is still there.

    It is no part of this process's group: it ends by itself, and its log is in its folder. Raises
    ProviderUnavailable.
    """
    former = _started.get(path)
    if former is not None and former.poll() is None:
        return False
    manage = Path(__file__).parents[2] / "manage.py"
    log_path = path.with_name("pool.log")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_long = log_path.exists() and log_path.stat().st_size > MOST_LOG_BYTES
        with log_path.open("wb" if is_long else "ab") as log:
            _started[path] = subprocess.Popen(
                [sys.executable, str(manage), "pool", "--no-port", "--until-unused"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {name: _as_text(getattr(settings, name)) for name in _HANDED_ON},
                start_new_session=True,
            )
    except OSError as error:
        raise ProviderUnavailable(
            f"The pool service cannot be started: {error.strerror or error}."
        ) from error
    return True


def _as_text(value: object) -> str:
    """A setting as the environment has it."""
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


def _no_service() -> ProviderUnavailable:
    if settings.POOL_AUTOSTART:
        log = runs_path(settings.DATA_DIR).with_name("pool.log")
        return ProviderUnavailable(f"The pool service does not start. {log} says why.")
    return ProviderUnavailable(
        "The pool service does not run. `manage.py up` and cofferdam-pool.service start it. Or "
        "start it alone: python manage.py pool --no-port"
    )


def _is_ending() -> ProviderUnavailable:
    return ProviderUnavailable("The pool service is shutting down.", retry_after=5)


def _no_answer() -> ProviderUnavailable:
    return ProviderUnavailable("The pool service gave no answer in time.")


def _result(text: bytes) -> ExecutionResult:
    return messages.result_from_json(messages.loads(text))


def _now() -> float:
    return asyncio.get_running_loop().time()


class LocalSessions:
    """Kept sandboxes of the pool of this spec, which runs under `runtime`."""

    def __init__(self, pool: Mapping[str, Any], runtime: str) -> None:
        self._pool = pool
        self._runtime = runtime
        self._path = socket_path(settings.DATA_DIR)

    def keep(self, spec: SandboxSpec, owner: str) -> KeptSandbox:
        """Raises SandboxError; nothing has run then."""
        if self._runtime not in LAUNCHERS:
            raise InvalidConfiguration(
                "kept: A persistent sandbox needs isolation. Install bubblewrap or gVisor.",
                field="kept",
            )
        return ServiceSandbox(self._client, self._client.keep(spec, owner, self._pool))

    def attach(self, ref: str) -> KeptSandbox:
        """Raises KeptSandboxLost and ProviderUnavailable."""
        return ServiceSandbox(self._client, self._client.ask_of("GET", ref))

    def close(self) -> None:
        client: PoolClient | None = self.__dict__.get("_client")
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> PoolClient:
        """Made for the first of them: single runs need nothing that it is."""
        given = validate(FIELDS, dict(self._pool["settings"]))
        return PoolClient("", settings.POOL_TOKEN, 0, given, socket=self._path)
