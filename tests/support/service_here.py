"""Pool services in threads of this process, so that a test can look into them and change them."""

from __future__ import annotations

import threading
from pathlib import Path

from aiohttp import web
from django.conf import settings

from providers.isolation import NONE, meets
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.pool import Pool
from providers.runtime.service import unix_socket
from providers.runtime.service.http import Service
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.serve import listen_at
from providers.runtime.service.settings import ServiceSettings


class _Choice(LauncherChoice):
    """Launchers by the settings that a test has when it asks for one."""

    def for_local(self, launcher: str, gvisor_platform: str) -> LauncherChoice:
        now = LauncherChoice(
            "auto",
            self.data_dir,
            self.pool_id,
            python=settings.SANDBOX_LOCAL_PYTHON,
            allow_unisolated=settings.SANDBOX_LOCAL_UNISOLATED
            and meets(NONE, settings.MINIMUM_ISOLATION),
        )
        return now.for_local(launcher, gvisor_platform)


class ServiceHere:
    """The pool service of one data directory."""

    def __init__(self, data_dir: Path, launchers_dir: Path | None = None) -> None:
        """Its launchers have their files in `launchers_dir`, where that is another one."""
        self._launchers_dir = launchers_dir or data_dir
        self.loop = BackgroundLoop("pool-service")
        self._alone = unix_socket.alone(unix_socket.socket_path(data_dir))
        self._alone.__enter__()
        self.manager = self.loop.call(self._open(data_dir))

    async def _open(self, data_dir: Path) -> PoolManager:
        choice = _Choice("auto", self._launchers_dir, "sessions")
        # A process of its own may have few settings.
        allowed = getattr(settings, "NETWORK_ALLOWED_ADDRESSES", ())
        manager = PoolManager(choice, ServiceSettings(), allowed)
        self._runner = web.AppRunner(
            Service(manager, "").application(), access_log=None, handler_cancellation=True
        )
        await self._runner.setup()
        socket = unix_socket.socket_path(data_dir)
        self._listeners = await listen_at(self._runner, manager, socket)
        manager.open(has_settings=False)
        return manager

    @property
    def pool(self) -> Pool:
        """The one pool that somebody holds."""
        (line,) = self.manager._open.values()
        return line.pool

    def close(self) -> None:
        self.loop.call(self._close())
        self.loop.stop()
        self._alone.__exit__(None, None, None)

    async def _close(self) -> None:
        await self.manager.close()
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()


services: dict[Path, ServiceHere] = {}
_lock = threading.Lock()


def start_here(path: Path) -> bool:
    """Start the service of a socket's data directory, in place of `providers.local.service.start`."""
    data_dir = path.parent.parent
    with _lock:
        if data_dir not in services or not unix_socket.answers(path):
            services[data_dir] = ServiceHere(data_dir)
    return True


def close_all() -> None:
    for service in services.values():
        service.close()
    services.clear()
