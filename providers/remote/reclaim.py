"""Ending in the background what a service could not be made to end at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from providers.errors import SandboxError
from providers.threads import NoThreadLeft, start_thread

logger = logging.getLogger(__name__)

# The pauses before each try.
RECLAIM_SECONDS = (0.5, 10.0)


def end_later(end: Callable[[], bool], what: str) -> None:
    """Call `end` in a thread after each of RECLAIM_SECONDS, until it returns True.

    False is for nothing found, which the service may still be making. When the last try raises a
    SandboxError, that is logged: `what` then lasts, and costs, until its own time is up.
    """
    try:
        start_thread("reclaim", partial(_try, end, what))
    except NoThreadLeft as error:
        _warn(what, error.message)


def _try(end: Callable[[], bool], what: str) -> None:
    failure = None
    for delay in RECLAIM_SECONDS:
        time.sleep(delay)
        try:
            if end():
                return
            failure = None
        except SandboxError as error:
            failure = error
    if failure is not None:
        _warn(what, failure.message)


def _warn(what: str, reason: str) -> None:
    logger.warning("a remote sandbox could not be ended", extra={"sandbox": what, "reason": reason})
