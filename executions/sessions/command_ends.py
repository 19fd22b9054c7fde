"""Ending a process in the background because somebody wants it, and recording how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from executions.kernel.coroutines import Coroutine
from executions.runs import polling
from executions.runs.models import Execution
from executions.sessions.background_commands import record_if_ended
from executions.sessions.control import with_sandbox
from providers.errors import SandboxError
from providers.sandbox import KeptSandbox

logger = logging.getLogger(__name__)

# What it may take to end by itself, and what the kernel and its follower may take after that.
TERM_SECONDS = 3.0
KILL_SECONDS = 2.0
# What its follower may need to record the end of one that had ended before.
RECORD_SECONDS = 0.05


def stopping(execution: Execution) -> Coroutine[None]:
    """SIGTERM to it and its group, then SIGKILL. It has a signal that says who wanted it.

    Its record is closed where it was seen to end.
    """
    session, pid = execution.session, execution.pid
    if session is None or pid is None:
        return
    try:
        for name, seconds in (("SIGTERM", TERM_SECONDS), ("SIGKILL", KILL_SECONDS)):
            ran = yield from with_sandbox(session, _signal(pid, name), bool, is_use=False)
            yield from polling.until_ended(execution.pk, seconds if ran else RECORD_SECONDS)
            if not Execution.objects.filter(pk=execution.pk, finished_at=None).exists():
                return
        yield from record_if_ended(session, execution)
    except SandboxError as error:
        logger.warning("execution %s could not be ended: %s", execution.pk, error.message)


def _signal(pid: int, name: str) -> Callable[[KeptSandbox], bool]:
    return lambda kept: kept.processes.signal(pid, name)
