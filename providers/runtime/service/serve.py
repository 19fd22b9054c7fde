"""The service's life: listen, warm up, serve; on SIGTERM finish, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiohttp import web

from providers.addresses import is_loopback
from providers.errors import InvalidConfiguration
from providers.runtime.service import unix_socket
from providers.runtime.service.http import AllowedAddresses, Gate, Service
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.runs import RunConnection
from providers.runtime.service.settings import ServiceSettings

logger = logging.getLogger(__name__)

# What the end takes once nothing is waited for any more. Together they stay below the time in
# which the service must be gone then.
DRAIN_SECONDS = 1.5
CLOSE_SECONDS = 2.0
EXIT_SECONDS = 4.5
LOOK_SECONDS = 0.05
# A service that somebody has started for himself ends when nobody has used it for so long.
UNUSED_SECONDS = 10

# Longer than clients keep a connection that they do not use, so that it is they who close it.
KEEPALIVE_SECONDS = 600.0


@dataclass(frozen=True)
class ServiceOptions:
    """Where to listen and to whom, what to run with, and the settings to begin with.

    `socket` is where it listens for the processes of this installation, besides `port`, or alone
    where that is 0: then it is for the provider `local`. With `until_unused` it ends when nobody
    has needed it for a while. `network_allowed` and `network_ca_file` are what
    `PoolManager` takes.
    """

    host: str
    port: int
    choice: LauncherChoice
    settings: ServiceSettings
    allowed: AllowedAddresses
    token: str = field(default="", repr=False)
    # Seconds in which what was lent may be used after SIGTERM.
    grace: float = 0.0
    socket: Path | None = None
    until_unused: bool = False
    network_allowed: tuple[str, ...] = ()
    network_ca_file: str = ""


def check_options(options: ServiceOptions) -> None:
    """Raises InvalidConfiguration when the service would be open to others without a token."""
    if options.port and not options.token and not is_loopback(options.host):
        raise InvalidConfiguration(
            f"host: {options.host} can be reached from elsewhere. Set POOL_TOKEN, POOL_TOKEN_FILE "
            "or --token-file, and the same token in the provider's configuration.",
            field="host",
        )


def serve(options: ServiceOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and let what was lent be used. SIGQUIT, or another of them,
    means now.

    `announce` is told where, once connections are taken. Raises InvalidConfiguration for an
    address that cannot be listened on.
    """
    check_options(options)
    if options.socket is None:
        asyncio.run(_serve(options, announce))
        return
    with unix_socket.alone(options.socket, is_temporary=options.until_unused):
        asyncio.run(_serve(options, announce))


async def _serve(options: ServiceOptions, announce: Callable[[str], None]) -> None:
    stop, now = asyncio.Event(), asyncio.Event()

    def told(*, at_once: bool) -> None:
        if at_once or stop.is_set():
            now.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, partial(told, at_once=number == signal.SIGQUIT))
    manager = PoolManager(
        options.choice, options.settings, options.network_allowed, options.network_ca_file
    )
    runner = web.AppRunner(
        Service(manager, options.token).application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=DRAIN_SECONDS,
    )
    await runner.setup()
    listeners: list[asyncio.Server] = []
    try:
        if options.socket is not None:
            listeners += await listen_at(runner, manager, options.socket)
        if options.port:
            listeners.append(await _listen(runner, options))
        manager.open(has_settings=bool(options.port))
        # What is loaded now stays. To walk it in a full collection would hold every run for 50 ms.
        gc.collect()
        gc.freeze()
        shown = f"[{options.host}]" if ":" in options.host else options.host
        announce(f"http://{shown}:{options.port}" if options.port else str(options.socket))
        if options.until_unused:
            await _wait_until_unused(manager, stop)
        else:
            await stop.wait()
        manager.drain()
        await _let_finish(manager, now, options.grace)
        _exit_in_time()
    finally:
        try:
            # First, so that whoever waits for a run is told of its end.
            async with asyncio.timeout(CLOSE_SECONDS):
                await manager.close()
        except TimeoutError:
            logger.warning("not every sandbox was ended in time: the next pool removes the rest")
        finally:
            for listener in listeners:
                listener.close()
            await runner.cleanup()


async def _let_finish(manager: PoolManager, now: asyncio.Event, grace: float) -> None:
    """Wait until nothing that was lent is used any more, for as long as there is time."""
    end = time.monotonic() + grace
    if lent := manager.stats()["instances"]:
        logger.info("stopping: sandboxes in use: %d", lent)
    while not manager.is_idle and not now.is_set() and time.monotonic() < end:
        await asyncio.sleep(LOOK_SECONDS)


def _exit_in_time() -> None:
    """Not even a thread that waits for a container engine may keep the process alive."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


async def _wait_until_unused(manager: PoolManager, stop: asyncio.Event) -> None:
    unused = 0
    while unused < UNUSED_SECONDS and not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await stop.wait()
        unused = 0 if manager.is_used else unused + 1


async def listen_at(
    runner: web.AppRunner, manager: PoolManager, path: Path
) -> list[asyncio.Server]:
    """Listen for HTTP at `path` and for single runs beside it, as the only service there."""
    assert runner.server is not None  # noqa: S101  the runner was set up
    loop = asyncio.get_running_loop()
    http = unix_socket.listen(path)
    runs = unix_socket.listen(unix_socket.runs_path(path.parent.parent))
    return [
        await loop.create_unix_server(runner.server, sock=http),
        await loop.create_unix_server(lambda: RunConnection(manager), sock=runs),
    ]


async def _listen(runner: web.AppRunner, options: ServiceOptions) -> asyncio.Server:
    server = runner.server
    assert server is not None  # noqa: S101  the runner was set up
    try:
        return await asyncio.get_running_loop().create_server(
            lambda: Gate(options.allowed, server), options.host, options.port, backlog=1024
        )
    except OSError as error:
        hint = " Choose another with --port." if error.errno == errno.EADDRINUSE else ""
        raise InvalidConfiguration(
            f"port: Cannot listen on {options.host} port {options.port}: "
            f"{error.strerror or error}.{hint}",
            field="port",
        ) from None
