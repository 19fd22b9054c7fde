"""The vendor's side of an environment that `codex exec-server forward` registers: a list of
environments over HTTP, and a relay of WebSocket frames between an agent and the forwarder.

Both ends are Codex itself. They encrypt what they say, and the relay reads none of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from aiohttp import WSMsgType, web

ENVIRONMENT = "env_test"
# What the forwarder and the agent show, each of its own.
FORWARDER_KEY, AGENT_KEY = "sk-forwarder", "agent-token"
_PROFILE = "noise_hybrid_ik_v1"
# Larger than the frames of both.
_FRAME_BYTES = 4 * 1024 * 1024


class VendorSide:
    """Serves until stopped. `asked` is what came over HTTP: the last part of the path, the header
    Authorization, and the body. `heard` is what the forwarder has sent, and `connections` counts
    those of each end. `is_refusing` says no to every agent."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.heard = b""
        self.is_refusing = False
        self.url = ""
        self.has_forwarder = threading.Event()
        self.connections: Counter[str] = Counter()
        self._registration: dict[str, Any] = {}
        self._ends: dict[str, web.WebSocketResponse] = {}
        self._transports: list[asyncio.Transport] = []
        # Set while an agent finds the forwarder connected.
        self._is_reachable = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        self._do(self._listen())

    def stop(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def cut(self) -> None:
        """Break off both connections behind what was sent."""

        async def close() -> None:
            self._is_reachable.clear()
            for each in self._transports:
                each.close()

        self._do(close())

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> None:
        application = web.Application()
        environment = f"/cloud/environment/{ENVIRONMENT}"
        application.router.add_post(f"{environment}/register", self._register)
        application.router.add_post(f"{environment}/connect", self._connect)
        application.router.add_post(f"{environment}/validate", self._validate)
        application.router.add_get("/relay/{end}", self._relay)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        for each in list(self._ends.values()):
            await each.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _read(self, request: web.Request, key: str) -> dict[str, Any]:
        said = request.headers.get("Authorization", "")
        body: dict[str, Any] = await request.json()
        self.asked.append((request.path.rpartition("/")[2], said, body))
        if said != f"Bearer {key}":
            raise web.HTTPUnauthorized
        return body

    async def _register(self, request: web.Request) -> web.Response:
        body = await self._read(request, FORWARDER_KEY)
        self._registration = {
            "executor_public_key": body["executor_public_key"],
            "executor_registration_id": str(uuid4()),
        }
        return web.json_response(
            {
                "environment_id": ENVIRONMENT,
                "url": self._address("forwarder"),
                "security_profile": _PROFILE,
                "executor_registration_id": self._registration["executor_registration_id"],
            }
        )

    async def _connect(self, request: web.Request) -> web.Response:
        await self._read(request, AGENT_KEY)
        await self._is_reachable.wait()
        return web.json_response(
            {
                "environment_id": ENVIRONMENT,
                "url": self._address("agent"),
                "security_profile": _PROFILE,
                "harness_key_authorization": str(uuid4()),
                **self._registration,
            }
        )

    async def _validate(self, request: web.Request) -> web.Response:
        await self._read(request, FORWARDER_KEY)
        return web.json_response({"valid": not self.is_refusing})

    def _address(self, end: str) -> str:
        return f"{self.url.replace('http', 'ws', 1)}/relay/{end}"

    async def _relay(self, request: web.Request) -> web.WebSocketResponse:
        end = request.match_info["end"]
        other = "agent" if end == "forwarder" else "forwarder"
        mine = web.WebSocketResponse(max_msg_size=_FRAME_BYTES)
        await mine.prepare(request)
        self._ends[end] = mine
        if request.transport is not None:
            self._transports.append(request.transport)
        self.connections[end] += 1
        if end == "forwarder":
            self._is_reachable.set()
            self.has_forwarder.set()
        async for message in mine:
            if message.type != WSMsgType.BINARY:
                continue
            peer = self._ends.get(other)
            if peer is not None and not peer.closed:
                await peer.send_bytes(message.data)
            if end == "forwarder":
                self.heard += message.data
        return mine


@contextmanager
def vendor_side() -> Iterator[VendorSide]:
    made = VendorSide()
    made.start()
    try:
        yield made
    finally:
        made.stop()
