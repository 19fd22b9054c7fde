"""The same server over standard input and output, for one client on this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from django.db import close_old_connections
from mcp.server.stdio import stdio_server

from executions.api.mcp.door import Run
from executions.api.mcp.server import make_server
from executions.kernel.coroutines import Waits, wait_for
from executions.runs.record import Caller
from executions.tenants import keys
from executions.tenants.rate_limit import take
from executions.tenants.service import require_active

T = TypeVar("T")


class StdioDoor:
    """Each call has a thread while it is carried out. With each, the key or the tenant is looked at
    anew."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def do(self, work: Callable[[], Waits[T]]) -> T:
        return await asyncio.to_thread(self._carry_out, work)

    def note(self, run: Run) -> None:
        """The call itself is cancelled, and ends its run."""

    def _carry_out(self, work: Callable[[], Waits[T]]) -> T:
        close_old_connections()
        try:
            tenant = self.caller.tenant
            if (key := self.caller.api_key) is not None:
                key.refresh_from_db()
                keys.require_valid(key, self.caller.client_address)
            else:
                tenant.refresh_from_db()
                require_active(tenant)
            take(tenant, only_reads=False).require()
            return wait_for(work())
        finally:
            close_old_connections()


async def serve(caller: Caller) -> None:
    """Answer until the client closes its end."""
    # Standard output is the client's.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    server = make_server(StdioDoor(caller))
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())
