"""What changes in a session's files, told while it happens to one who listens.

Each listener has a thread for as long as he stays, none of those that calls of providers are waited
for in. What he does not read is not fetched.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import connection

from executions.kernel.background import Shares
from executions.kernel.coroutines import wait_for
from executions.kernel.declarations import MAX_PATH_BYTES
from executions.runs.event_log import Broadcast, RunEvent
from executions.runs.event_stream import EventBuffer
from executions.runs.provider_calls import guard
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.requests import SessionLost, ensure_not_ended
from executions.sessions.session_sandbox import OPERATION_SECONDS, borrow_sandbox
from providers import draining
from providers.errors import KeptSandboxLost, ProviderUnavailable, RateLimited, SandboxError
from providers.runtime.guest.names import escape
from providers.sandbox import FileChange, FileEntry
from providers.threads import NoThreadLeft, start_thread
from providers.waiting import within

logger = logging.getLogger(__name__)

# Of one tenant, and of all.
MOST_OF_ONE, MOST = 16, 128
KINDS = ("created", "modified", "deleted", "moved", "attributes")
# Who has not begun to read by then has gone without a word.
UNREAD_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 5.0

_listeners = Shares(MOST, MOST_OF_ONE)


@dataclass
class Change(RunEvent):
    """One change. Its `entry` is no part of what native clients are told."""

    entry: FileEntry | None = None

    @property
    def size(self) -> int:
        """With what is held for it: a guest may say much of a file."""
        return super().size + (_size_of(self.entry) if self.entry else 0)


def _size_of(entry: FileEntry) -> int:
    texts = (entry.path, entry.target, *entry.metadata.keys(), *entry.metadata.values())
    return sum(map(len, texts)) + (_size_of(entry.end) if entry.end else 0)


class Watch(EventBuffer):
    """The changes on their way to one listener. `ended` is done when no more come: with None, or
    with the error that ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = Broadcast()
        self._left = threading.Event()
        self._wanted_until = time.monotonic() + UNREAD_SECONDS
        self._seq = 0

    def leave(self) -> None:
        """Nobody listens any more."""
        self._left.set()

    def next_change(self, after: int) -> Future[None]:
        self._wanted_until = math.inf
        return super().next_change(after)

    def keep_for(self, seconds: float) -> None:
        """Go on for so long without a reader, who comes now and then."""
        self._wanted_until = time.monotonic() + seconds

    @property
    def is_wanted(self) -> bool:
        unread = time.monotonic() > self._wanted_until
        return not (self._left.is_set() or unread or draining.is_draining())

    def tell(self, change: Any) -> None:
        """Waits while the listener does not read. Raises ProviderUnavailable for what is none."""
        if (
            not isinstance(change, FileChange)
            or change.type not in KINDS
            or not isinstance(change.path, str)
            or not isinstance(change.former, str)
            or max(len(change.path), len(change.former)) > MAX_PATH_BYTES
        ):
            raise ProviderUnavailable("The provider did not return a file change.")
        while self.is_full and self.is_wanted:
            self._left.wait(_LOOK_SECONDS)
        self._seq += 1
        said = {"path": escape(change.path)}
        if change.former:
            said["former"] = escape(change.former)
        self.push([Change(self._seq, change.type, said=said, entry=change.entry)])


async def watch_folder(session: Session, path: str) -> Watch:
    """Begin to watch a folder. What happens from now on is told.

    Raises SandboxError, and RateLimited where too much is watched already.
    """
    watch, begun = Watch(), Future[None]()
    if not _listeners.take(session.tenant_slug):
        raise RateLimited(
            f"Too many folders are already watched; the limit of a tenant is {MOST_OF_ONE}.",
            retry_after=_RETRY_SECONDS,
        )
    try:
        start_thread("watch-files", partial(_work, session, path, watch, begun))
    except NoThreadLeft:
        _listeners.give_back(session.tenant_slug)
        raise
    awaited = within(OPERATION_SECONDS, begun)
    try:
        await wait_for(awaited)
        awaited.result()
    except BaseException:
        watch.leave()
        raise
    return watch


def _work(session: Session, path: str, watch: Watch, begun: Future[None]) -> None:
    told: SandboxError | None = None
    try:
        _follow(session, path, watch, begun)
    except SandboxError as error:
        told = _end_of(session, error)
    except Exception:
        logger.exception("the files of session %s are no longer watched", session.pk)
        told = ProviderUnavailable("The watch failed inside the service. The log has the details.")
    finally:
        _listeners.give_back(session.tenant_slug)
        connection.close()
    watch.end()
    for future in (begun, watch.ended):
        if future.done():
            continue
        if told is None:
            future.set_result(None)
        else:
            future.set_exception(told)


def _follow(session: Session, path: str, watch: Watch, begun: Future[None]) -> None:
    with borrow_sandbox(session) as sandbox:
        changes = guard(session.provider, lambda: sandbox.files.watch(path))
        # It may go on for a day, and a database has connections for few.
        connection.close()
        begun.set_result(None)
        try:
            while watch.is_wanted:
                change = guard(session.provider, lambda: next(changes, _OVER))
                if change is _OVER:
                    return
                if change is not None:
                    watch.tell(change)
        finally:
            if (close := getattr(changes, "close", None)) is not None:
                guard(session.provider, close)


_OVER = object()


def _end_of(session: Session, error: SandboxError) -> SandboxError:
    """What to tell of it: the session may have been closed meanwhile, or be lost."""
    try:
        if isinstance(error, KeptSandboxLost):
            mark_lost(session, error.message)
        session.refresh_from_db()
        ensure_not_ended(session)
    except SandboxError as ended:
        return ended
    return SessionLost(error.message) if isinstance(error, KeptSandboxLost) else error
