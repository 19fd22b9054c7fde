# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Wait for the end of an execution."""

from __future__ import annotations

import time

from cofferdam._sync.transport import Transport
from cofferdam.calls import EXECUTIONS, Call, get, part
from cofferdam.decoding import decode
from cofferdam.errors import StillRunning, service_error
from cofferdam.events import OPEN
from cofferdam.shapes import Execution

WAIT_SECONDS = 600.0
_SHORTEST, _LONGEST = 0.1, 5.0


def wait_for(transport: Transport, execution_id: str, seconds: float) -> Execution:
    """Wait until an execution has ended, and return its record. Raises StillRunning."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST
    while True:
        found = transport.json(get(f"{EXECUTIONS}/{part(execution_id)}"))
        execution = decode(Execution, found)
        if execution.status not in OPEN:
            return execution
        if time.monotonic() + pause > deadline:
            raise StillRunning(execution_id, seconds)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def ended(transport: Transport, call: Call, seconds: float) -> Execution:
    """Send a run and wait for its result. Raises ServiceError if the service could not run it."""
    execution = decode(Execution, transport.json(call))
    if execution.status in OPEN:
        execution = wait_for(transport, execution.id, seconds)
        if execution.status == "error" and execution.error is not None:
            raise service_error(200, {"error": execution.error.raw, "id": execution.id})
    return execution
