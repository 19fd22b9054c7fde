"""How a web worker stops: what was asked of it is finished, and no connection is lost.

1. For SHUTDOWN_DELAY_SECONDS all goes on. /readyz says "draining", and every answer closes its
   connection.
2. The listener closes, with nobody left in its queue. Who is sending a request may end it. A
   connection without one is closed when it has been quiet for a while: closing it in the moment
   in which a proxy uses it would lose that request. Afterwards new executions are refused.
3. What runs has SHUTDOWN_GRACE_SECONDS. Then the runs that are left are ended, which closes
   their records and answers their callers.

SIGQUIT cuts the waiting of 1 to 3 short.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from django.conf import settings

from providers import draining
from sandbox_site.web.listener import turn_away

if TYPE_CHECKING:
    from sandbox_site.web.connections import Worker

logger = logging.getLogger("sandbox_site.web")

# A proxy with requests uses the connections that it keeps; one that it has left alone for so
# long, it does not use in the moment in which we close it.
QUIET_SECONDS = 1.0
# From when nobody new is let into the listener's queue until those on their way are in it.
HANDSHAKE_SECONDS = 0.1
# So many turns of the loop later an accepted connection is one of ours, and a request whose
# headers are there has reached the bridge. It takes three of either.
TURNS = 10
# What one more look at the listener's queue may take in all, should it never be empty.
ACCEPT_SECONDS = 1.0
LOOK_SECONDS = 0.02
FIRST_LINE_SECONDS = 0.5
TELL_SECONDS = 5.0


class Stopping:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._began = time.monotonic()
        self._next_line = self._began + FIRST_LINE_SECONDS
        self._grace_ends = 0.0

    async def carry_out(self) -> None:
        await self._until(lambda: False, settings.SHUTDOWN_DELAY_SECONDS)
        await self._close_listeners()
        grace = 0.0 if self._worker.is_hurried else float(settings.SHUTDOWN_GRACE_SECONDS)
        self._grace_ends = time.monotonic() + grace
        await self._until(self._have_requests_come, min(grace, settings.WEB_BODY_SECONDS))
        await _turn()
        draining.refuse_new()
        if not await self._until(self._is_all_answered, self._grace_ends - time.monotonic()):
            await self._end()

    async def _end(self) -> None:
        for connection in list(self._worker.owing):
            connection.give_up()
        end = time.monotonic() + draining.ENDING_SECONDS
        # Not one of the loop's threads, which would be waited for whatever holds it; nor one of
        # `providers.threads`, which needs Django: the master imports this module without it.
        threading.Thread(target=_end_all, name="ending", daemon=True).start()
        while not self._is_all_answered() and time.monotonic() < end:
            await self._pause()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true within the seconds, and before there was no time any more."""
        end = time.monotonic() + seconds
        while not condition():
            if self._worker.is_hurried or time.monotonic() >= end:
                return False
            await self._pause()
        return True

    async def _pause(self) -> None:
        # The master is to see that we are alive.
        self._worker.notify()
        self._tell()
        await asyncio.sleep(LOOK_SECONDS)

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + TELL_SECONDS
            left = f", {self._grace_ends - now:.0f} s are left" if self._grace_ends > now else ""
            # The master imports this module, and has no Django.
            from executions.runs import active_runs

            told = (active_runs.count(), self._worker.nr_conns, left)
            logger.info("stopping: %d runs and %d connections are still open%s", *told)

    def _is_all_answered(self) -> bool:
        return not (self._worker.nr_conns or self._worker.asgi.open)

    def _have_requests_come(self) -> bool:
        """Whether no connection owes bytes of a request any more. Closes the quiet ones."""
        oldest = time.monotonic() - QUIET_SECONDS
        for connection in list(self._worker.owing):
            since = max(connection.owing_since, self._began)
            if not connection.has_begun and since <= oldest and not is_readable(connection.fd):
                connection.give_up()
        return not self._worker.owing

    async def _close_listeners(self) -> None:
        """Take in who is in the queue, and close. Where only we stop, others go on with it."""
        listeners = [sock for server in self._worker.servers for sock in server.sockets]
        if draining.are_all_draining():
            for listener in listeners:
                turn_away(listener)
            await self._until(lambda: False, HANDSHAKE_SECONDS)
            end = time.monotonic() + ACCEPT_SECONDS
            while time.monotonic() < end and any(is_readable(each.fileno()) for each in listeners):
                await asyncio.sleep(0)
        for server in self._worker.servers:
            server.close()
        await _turn()


async def _turn() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _end_all() -> None:
    from executions.runs import active_runs

    active_runs.end_all(draining.ENDING_SECONDS / 2)


def is_readable(fd: int) -> bool:
    """Whether something has come that was not read yet."""
    if fd < 0:
        return False  # it was closed just now
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
