"""The event loop that the SDK's server runs in: one thread of each web process that is asked."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future

from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from executions.api.mcp.exchange import App

_START_SECONDS = 30.0
Served = tuple[App, asyncio.AbstractEventLoop]


class McpLoop:
    """The SDK's application, without any state of its own: whichever process is asked can answer.

    Host, Origin, keys and bodies are checked before it is asked.
    """

    def __init__(self, server: Server, most_bytes: int) -> None:
        self._server = server
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._served: Served | None = None
        os.register_at_fork(after_in_child=self._forget)

    def served(self) -> Served:
        """Start it, unless it has been."""
        with self._lock:
            if self._served is None:
                ready: Future[Served] = Future()
                threading.Thread(
                    target=lambda: asyncio.run(self._run(ready)), name="mcp", daemon=True
                ).start()
                self._served = ready.result(_START_SECONDS)
            return self._served

    async def _run(self, ready: Future[Served]) -> None:
        manager = StreamableHTTPSessionManager(
            self._server,
            stateless=True,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=self._most_bytes,
        )
        async with manager.run():
            ready.set_result((manager.handle_request, asyncio.get_running_loop()))
            await asyncio.Event().wait()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._served = None
