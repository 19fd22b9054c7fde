"""Whose process a remote sandbox is, and the end in the background of what did not end at once."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache, partial

from providers import process_liveness
from providers.errors import SandboxError
from providers.threads import NoThreadLeft, reset_after_fork, start_thread

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


# Of another host nothing is known, unless somebody says so: `learn_of_ends`.
_has_ended_elsewhere: Callable[[str], bool] = lambda tag: False  # noqa: E731


def process_tag() -> str:
    """This process, as lower case letters, digits and dashes: HOST-PID-START.

    HOST stands for the machine since its last start and its process namespace, because a process
    id means nothing outside of them.
    """
    pid = os.getpid()
    return f"{_host()}-{pid}-{process_liveness.birth(pid)}"


def has_ended_here(tag: str) -> bool:
    """Whether the process is one of this host, whose kernel says that it has ended."""
    found = _found_here(tag)
    return found is not None and process_liveness.has_ended(*found)


def lives_here(tag: str) -> bool:
    """Whether the process is one of this host, which the kernel shows."""
    found = _found_here(tag)
    return found is not None and process_liveness.lives(*found)


def _found_here(tag: str) -> tuple[int, str] | None:
    """The number and the birth of a process of this host, None for one of another."""
    parts = tag.split("-")
    if len(parts) != 3 or not parts[1].isdecimal() or parts[0] != _host():
        return None
    return int(parts[1]), parts[2]


def learn_of_ends(has_ended: Callable[[str], bool]) -> None:
    """Have `has_ended` asked of processes of other hosts, by tag. True is for known ends alone."""
    global _has_ended_elsewhere
    _has_ended_elsewhere = has_ended


def is_known_orphan(tag: str) -> bool:
    """As `has_ended_here`, and of other hosts by what is known of them. May ask the database."""
    return has_ended_here(tag) or (not tag.startswith(f"{_host()}-") and _has_ended_elsewhere(tag))


@lru_cache(maxsize=1)
def _host() -> str:
    text = " ".join((socket.gethostname(), *process_liveness.here()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


reset_after_fork(_host.cache_clear)
