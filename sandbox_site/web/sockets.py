"""WebSockets: who is let in, how many there are, and how long each is kept.

A socket has a task of the event loop and no thread; what its messages ask for is done on the
threads of the API. It ends with the right of its key, when the service stops, and when its peer
does not read.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from http import HTTPStatus
from typing import Any, TypeVar

from django.db import close_old_connections

from executions.doors.codex import credentials
from executions.doors.codex.attachments import Attachments
from executions.doors.codex.connection import Admitted, Connection, admit
from executions.kernel.coroutines import Coroutine
from executions.runs.rights import open_answers
from executions.tenants.keys import Unauthenticated
from providers import draining
from providers.errors import InvalidConfiguration, RateLimited
from sandbox_site.client_address import counted_address, read_forwarded
from sandbox_site.web.body import Receive, Refused
from sandbox_site.web.environ import make_environ
from sandbox_site.web.frames import REFUSAL
from sandbox_site.web.places import RETRY_SECONDS, Kind, Place, Places
from sandbox_site.web.threads import LaneFull

logger = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[[dict[str, Any]], Awaitable[None]]
# Has a job done on a thread of the API; the last is whose it is.
Submit = Callable[[Callable[[], None], bool, str], None]

# Of one key, of one tenant, and of all, in this process.
MOST_OF_KEY, MOST_OF_TENANT, MOST = 16, 48, 256
# How often an open socket looks whether the service stops.
LOOK_SECONDS = 1.0
# How long a peer has to answer that it closes, and to read what it was sent before.
CLOSE_SECONDS = 6.0
_POLICY, _GOING_AWAY, _NOT_TEXT = 1008, 1001, 1007


def is_door(path: str) -> bool:
    return path.startswith(credentials.PATH)


class Sockets:
    """The open WebSockets of this process. `submit` has jobs done on threads."""

    def __init__(self, places: Places, submit: Submit) -> None:
        self._places = places
        self._submit = submit
        self._attachments = Attachments()
        self._open: Counter[int | str] = Counter()
        self._lock = threading.Lock()
        self._working = 0

    @property
    def working(self) -> int:
        """Calls that are begun and not done."""
        return self._working

    async def serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one peer until it leaves, or is told to."""
        environ = make_environ({**scope, "method": "GET"}, io.BytesIO())
        address = counted_address(environ)
        read_forwarded(environ)
        try:
            place = self._places.enter(Kind.USUAL, address)
        except Refused as refusal:
            await _deny(scope, send, refusal.status)
            return
        try:
            await receive()
            admitted = await self._admit(scope, environ, place, send)
            if admitted is not None:
                with self._count(admitted) as is_one_too_many:
                    if is_one_too_many or draining.is_draining():
                        await _deny(scope, send, 429 if is_one_too_many else 503)
                        return
                    await self._talk(admitted, receive, send)
        finally:
            place.leave()

    async def _admit(
        self, scope: dict[str, Any], environ: Mapping[str, Any], place: Place, send: Send
    ) -> Admitted | None:
        async def work() -> Admitted:
            return admit(scope["path"], environ)

        try:
            admitted = await self.carry_out(work, owner=place.owner)
            place.give_to(admitted.tenant_slug)
            place.begin_stream()
        except Unauthenticated:
            await _deny(scope, send, 401)
        except InvalidConfiguration:
            await _deny(scope, send, 400)
        except (RateLimited, LaneFull):
            await _deny(scope, send, 429)
        except Exception:
            logger.exception("a WebSocket could not be opened")
            await _deny(scope, send, 503)
        else:
            return admitted
        return None

    @contextmanager
    def _count(self, admitted: Admitted) -> Iterator[bool]:
        """Whether it is one more than there may be."""
        bounds: dict[int | str, int] = {
            admitted.key_id: MOST_OF_KEY,
            admitted.tenant_slug: MOST_OF_TENANT,
            "": MOST,
        }
        is_one_too_many = any(self._open[each] >= most for each, most in bounds.items())
        self._open.update(list(bounds))
        try:
            yield is_one_too_many
        finally:
            self._open.subtract(list(bounds))
            for each in bounds:
                if not self._open[each]:
                    del self._open[each]

    async def _talk(self, admitted: Admitted, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

        async def say(text: str) -> None:
            await send({"type": "websocket.send", "text": text})

        async def call(work: Callable[[], Coroutine[T]]) -> T:
            try:
                return await self.carry_out(work, owner=admitted.tenant_slug)
            except LaneFull:
                message = "The service has more requests than it can handle."
                raise RateLimited(message, retry_after=RETRY_SECONDS) from None

        connection = Connection(admitted, self._attachments, say, call)
        try:
            with open_answers.watch(admitted.right) as lost:
                code = await _listen(connection, receive, lost)
            if code:
                await asyncio.wait_for(
                    send({"type": "websocket.close", "code": code}), CLOSE_SECONDS
                )
        except TimeoutError:
            logger.info("a WebSocket was cut off: its peer does not read")
        finally:
            connection.leave()

    async def carry_out(self, work: Callable[[], Coroutine[T]], *, owner: str) -> T:
        """Return what the work comes to, on threads, of which it holds none while it waits. It goes
        on to its end, whoever has left. Raises LaneFull, and what the work does."""
        done: Future[T] = Future()
        # What is asked for before the service takes nothing new is in time, however long it takes.
        with nullcontext() if draining.refuses_new() else draining.in_time():
            context = copy_context()
        begun: list[Coroutine[T]] = []

        def go_on() -> None:
            try:
                close_old_connections()
                if not begun:
                    begun.append(context.run(work))
                awaited = context.run(begun[0].send, None)
            except StopIteration as end:
                finish()
                done.set_result(end.value)
            except Exception as error:
                finish()
                done.set_exception(error)
            except BaseException as error:
                finish()
                done.set_exception(RuntimeError(f"{type(error).__name__} in a call"))
            else:
                awaited.add_done_callback(lambda _: self._submit(go_on, True, owner))

        def finish() -> None:
            with self._lock:
                self._working -= 1

        with self._lock:
            self._working += 1
        try:
            self._submit(go_on, False, owner)
        except BaseException:
            finish()
            raise
        return await asyncio.shield(asyncio.wrap_future(done))


async def _listen(connection: Connection, receive: Receive, lost: Future[None]) -> int:
    """Take what comes. The code to close with; 0 where the peer has left."""
    received: asyncio.Task[dict[str, Any]] | None = None
    try:
        while True:
            if lost.done():
                return _POLICY
            if draining.is_draining():
                return _GOING_AWAY
            if not connection.has_room:
                await connection.wait_for_room(LOOK_SECONDS)
                continue
            received = received or asyncio.ensure_future(receive())
            await asyncio.wait([received], timeout=LOOK_SECONDS)
            if not received.done():
                continue
            message, received = received.result(), None
            if message["type"] == "websocket.disconnect":
                return 0
            try:
                text = _text_of(message)
            except UnicodeDecodeError:
                return _NOT_TEXT
            await connection.take(text)
    finally:
        if received is not None:
            received.cancel()


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a frame. Codex's forwarder sends it as binary. Raises UnicodeDecodeError."""
    text: str | None = message.get("text")
    return message["bytes"].decode() if text is None else text


async def _deny(scope: dict[str, Any], send: Send, status: int) -> None:
    scope[REFUSAL] = (status, HTTPStatus(status).phrase)
    await send({"type": "websocket.close"})
