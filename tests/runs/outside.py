"""Code that is seen from outside: it runs without isolation, and leaves a line in a file."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from providers.runtime.launchers.unisolated import UnisolatedLauncher
from providers.runtime.pool.launcher import Launcher
from providers.runtime.service.http import Service
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.messages import CLIENT_HEADER, SETTINGS_HEADER
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.settings import ServiceSettings
from tests.support.wire_server import Answer, Request, WireServer


class Outside:
    """Counts the runs of `code` by what the runs themselves wrote."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "runs"

    def code(self, *lines: str) -> str:
        note = f"with open({str(self._file)!r}, 'a') as file: file.write('ran\\n')"
        artifact = "import os; os.makedirs('artifacts', exist_ok=True)\n"
        artifact += "with open('artifacts/left.txt', 'w') as file: file.write('left')"
        return "\n".join([note, artifact, *lines, "print('done')"])

    def taken(self) -> int:
        """How often it ran since the last time this was asked."""
        if not self._file.exists():
            return 0
        runs = self._file.read_text().count("ran")
        self._file.unlink()
        return runs


class _Unisolated(LauncherChoice):
    def make(self, kind: str, settings: ServiceSettings) -> Launcher:
        return UnisolatedLauncher(self.data_dir)


@contextmanager
def pool_service(data_dir: Path) -> Iterator[str]:
    """The pool service over a real socket, without isolation."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, PoolManager, int]:
        choice = _Unisolated("bubblewrap", data_dir, "outside", minimum_isolation="none")
        keeper = PoolManager(choice, ServiceSettings.from_config({"pool_size": 1}))
        runner = web.AppRunner(Service(keeper, "").application(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        keeper.open()
        return runner, keeper, runner.addresses[0][1]

    async def stop(runner: web.AppRunner, keeper: PoolManager) -> None:
        await keeper.close()
        await runner.cleanup()

    runner, keeper, port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(runner, keeper), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class PoolProxy(WireServer):
    """Between the provider and a pool service; it fails on command, and `lost` after the run."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        super().__init__()

    def operation(self, request: Request) -> str:
        if request.path.endswith("/run"):
            return "run"
        names = {"POST": "create", "DELETE": "destroy", "PUT": "push", "GET": "stats"}
        return names[request.method]

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        names = ("Content-Type", SETTINGS_HEADER, CLIENT_HEADER)
        headers = {name: value for name, value in request.headers.items() if name in names}
        forwarded = urllib.request.Request(
            self._behind + request.target, request.body or None, headers, method=request.method
        )
        status, body = _carried(forwarded)
        if fault in ("lost", "dead"):
            request.cut()
            raise Answer(0)
        self.refuse_what_ran(fault)
        if fault == "truncated":
            body = body[: len(body) // 2]
        raise Answer(status, body)


def _carried(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
