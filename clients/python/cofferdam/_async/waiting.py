"""Wait for the end of an execution."""

from __future__ import annotations

import asyncio
import time

from cofferdam._async.transport import AsyncTransport
from cofferdam.calls import EXECUTIONS, Call, get, part
from cofferdam.decoding import decode
from cofferdam.errors import StillRunning, service_error
from cofferdam.events import OPEN
from cofferdam.shapes import Execution

WAIT_SECONDS = 600.0
_SHORTEST, _LONGEST = 0.1, 5.0


async def wait_for(transport: AsyncTransport, execution_id: str, seconds: float) -> Execution:
    """Wait until an execution has ended, and return its record. Raises StillRunning."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST
    while True:
        found = await transport.json(get(f"{EXECUTIONS}/{part(execution_id)}"))
        execution = decode(Execution, found)
        if execution.status not in OPEN:
            return execution
        if time.monotonic() + pause > deadline:
            raise StillRunning(execution_id, seconds)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST)


async def ended(transport: AsyncTransport, call: Call, seconds: float) -> Execution:
    """Send a run and wait for its result. Raises ServiceError if the service could not run it."""
    execution = decode(Execution, await transport.json(call))
    if execution.status in OPEN:
        execution = await wait_for(transport, execution.id, seconds)
        if execution.status == "error" and execution.error is not None:
            raise service_error(200, {"error": execution.error.raw, "id": execution.id})
    return execution
