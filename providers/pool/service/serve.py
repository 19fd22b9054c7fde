"""The service's life: listen, warm up, serve, and on SIGTERM leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from providers.errors import InvalidConfiguration
from providers.pool.service.gate import AllowedAddresses, Gate
from providers.pool.service.http import Service
from providers.pool.service.keeper import PoolKeeper
from providers.pool.service.launchers import LauncherChoice
from providers.pool.service.settings import ServiceSettings

# Together they stay below the time in which the service must be gone.
DRAIN_SECONDS = 1.5
CLOSE_SECONDS = 2.0
EXIT_SECONDS = 4.5

# Longer than clients keep a connection that they do not use, so that it is they who close it.
KEEPALIVE_SECONDS = 600.0


@dataclass(frozen=True)
class ServiceOptions:
    """Where to listen and to whom, what to run with, and the settings to begin with."""

    host: str
    port: int
    choice: LauncherChoice
    settings: ServiceSettings
    allowed: AllowedAddresses
    token: str = field(default="", repr=False)


def check_options(options: ServiceOptions) -> None:
    """Raises InvalidConfiguration when the service would be open to others without a token."""
    if not options.token and not is_loopback(options.host):
        raise InvalidConfiguration(
            f"host: {options.host} can be reached from elsewhere. Set POOL_TOKEN, POOL_TOKEN_FILE "
            "or --token-file, and the same token in the provider's configuration.",
            field="host",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Of names, only localhost is known to be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServiceOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    `announce` is told where, once connections are taken. Raises InvalidConfiguration for an
    address that cannot be listened on.
    """
    check_options(options)
    asyncio.run(_serve(options, announce))


async def _serve(options: ServiceOptions, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    keeper = PoolKeeper(options.choice, options.settings)
    runner = web.AppRunner(
        Service(keeper, options.token).application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=DRAIN_SECONDS,
    )
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        listener = await _listen(runner, options)
        keeper.open()
        # What is loaded now stays. To walk it in a full collection would hold every run for 50 ms.
        gc.collect()
        gc.freeze()
        shown = f"[{options.host}]" if ":" in options.host else options.host
        announce(f"http://{shown}:{options.port}")
        await stop.wait()
        _exit_in_time()
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()
        async with asyncio.timeout(CLOSE_SECONDS):
            await keeper.close()


def _exit_in_time() -> None:
    """Not even a thread that waits for a container engine may keep the process alive."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


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
