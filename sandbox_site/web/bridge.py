"""Between an asynchronous server and Django's synchronous handler.

Bodies are read, and answers sent, without a thread; in between Django runs unchanged on permanent
threads, middleware and database connections included. Work that waits gives its thread back
(`executions.doors.native.deferred`). Streams are pulled piece by piece, so that a slow reader holds
no thread.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import IO, Any, TypeVar, cast

from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.http.response import HttpResponseBase

from executions.doors.native.authentication import PLACE, key_text_in
from executions.doors.native.deferred import (
    LATER,
    LOST_RIGHT,
    MOST_IN_MEMORY_BYTES,
    DeferredResponse,
    Document,
    EventStream,
    Placeholder,
)
from executions.kernel.background import AfterAnswer
from executions.kernel.bodies import BODY, HELD, submit_read
from executions.runs.rights import open_answers
from providers import draining
from providers.errors import RateLimited
from providers.json_reading import Read
from sandbox_site import strangers
from sandbox_site.client_address import counted_address
from sandbox_site.web.admission import Limits, admit_body
from sandbox_site.web.body import (
    SMALL_BYTES,
    ClientGone,
    Receive,
    Refused,
    Share,
    Spool,
    read_body,
)
from sandbox_site.web.environ import make_environ
from sandbox_site.web.places import RETRY_SECONDS, Place, Places, kind_of
from sandbox_site.web.sockets import Sockets, is_door
from sandbox_site.web.threads import HandlerThreads, LaneFull

logger = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[[dict[str, Any]], Awaitable[None]]

HEALTH, READY, API, PAGES, STRANGERS = "health", "ready", "api", "pages", "strangers"
_LANES = {"/healthz": HEALTH, "/readyz": READY}
# Who is not signed in has these threads for pages, and none of the others.
_THREADS_OF_STRANGERS = 3
# Whose bodies are read as JSON, by views that do not read smaller ones themselves.
_JSON_PATHS = ("/api/v1", "/api/admin/", "/v1/", "/mcp", "/sandboxes", "/v2/sandboxes")
# About what a value takes in memory: a small object, or a name with what it names.
VALUE_BYTES = 100

# What is handed to the connection at once. It has to be read before the next, within a deadline.
PIECE_BYTES = 256 * 1024
# A thread that fetches a stream's next piece is given back after so long.
FETCH_SECONDS = 0.05
# A stream that has nothing is asked again after so long: the first time, and at most.
ASK_SECONDS, ASK_MOST_SECONDS = 0.005, 0.25
_NO_SOCKET = Refused(426, "This address is for WebSockets. See docs/executors.md.")


class Bridge:
    """An ASGI application over `handler`, with `count` threads for everything but /healthz and
    /readyz, which have one each, and pages that strangers ask for.

    A quarter of them is left to the API by the pages and to the pages by the API.
    """

    def __init__(
        self,
        handler: WSGIHandler,
        count: int,
        limits: Limits,
        api_handler: WSGIHandler | None = None,
    ) -> None:
        """`api_handler` is for the API's requests without a cookie."""
        most = count - max(1, count // 4)
        self._handler = handler
        self._api_handler = api_handler or handler
        self._limits = limits
        self._spool = Spool(limits.spool_bytes)
        self._places = Places(limits.connections, limits.spool_bytes)
        self._threads = HandlerThreads(count, {API: most, PAGES: most})
        apart = {HEALTH: 1, READY: 1, STRANGERS: _THREADS_OF_STRANGERS}
        self._apart = {lane: HandlerThreads(most, {lane: most}) for lane, most in apart.items()}
        self._sockets = Sockets(
            self._places,
            lambda job, has_begun, owner: self._threads.submit(
                API, job, has_begun=has_begun, owner=owner
            ),
        )
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def open(self) -> int:
        """What is begun and not done, whether clients still wait for it or not: jobs of threads,
        and requests whose work waits without one."""
        # In this order: a request is counted as waiting before its job ends.
        waiting = self._waiting + self._sockets.working
        return self._threads.open + self._apart[STRANGERS].open + waiting

    def drain(self, seconds: float) -> bool:
        """Wait until everything has been answered. Whether it has."""
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.open

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket" and is_door(scope["path"]):
                await self._sockets.serve(cast("dict[str, Any]", scope), receive, send)
            else:
                # The server makes a 403 of it.
                await send({"type": "websocket.close"})
            return
        if is_door(scope["path"]):
            # Not for Django: what stands in the path may be a key, and belongs into no page or log.
            await _send_refusal(_NO_SOCKET, send, has_body=scope["method"] != "HEAD")
            return
        environ = make_environ(scope, io.BytesIO())
        key_text = key_text_in(environ)
        try:
            place = self._places.enter(
                kind_of(scope["path"]), counted_address(environ), key_text.encode("latin-1")
            )
        except Refused as refusal:
            await _send_refusal(refusal, send, has_body=scope["method"] != "HEAD")
            return
        after = AfterAnswer()
        try:
            await self._serve(scope, environ, place, after, receive, send)
        finally:
            place.leave()
            after.begin()

    async def _serve(
        self,
        scope: Mapping[str, Any],
        environ: dict[str, Any],
        place: Place,
        after: AfterAnswer,
        receive: Receive,
        send: Send,
    ) -> None:
        # The headers are here. What comes after them, and the wait for a thread, may take a while.
        is_late = draining.refuses_new()
        lane = _lane_of(scope)
        share = Share(self._spool)
        later = DeferredResponse()
        try:
            await self._request(lane, environ, receive, share, place)
            environ[LATER], environ[PLACE] = later, place
            handle = partial(self._handle, lane, environ, later, after, share, is_late)
            handled = self._do(lane, handle, owner=place.owner)
        except ClientGone:
            share.release()
            return
        except (Refused, LaneFull, RateLimited) as refusal:
            share.release()
            response: HttpResponseBase = _refusal(refusal)
        except BaseException:
            share.release()
            raise
        else:
            response = await _answer_of(handled, later)
        has_body = scope["method"] != "HEAD"
        with open_answers.watch(later.right if response.streaming else None) as lost:
            if isinstance(response, EventStream):
                response.count(partial(place.hold_answer, is_lost_else=True))
                later.answer.add_done_callback(_empty)
                await _send_events(response, receive, send, lost)
            elif has_body and isinstance(response, HttpResponse) and _size(response) > SMALL_BYTES:
                await self._send_large(lane, scope["method"], response, place, send)
            else:
                await self._send(lane, response, send, later.owner, lost, has_body=has_body)

    async def _request(
        self, lane: str, environ: dict[str, Any], receive: Receive, share: Share, place: Place
    ) -> None:
        length = await admit_body(
            environ,
            self._limits,
            share,
            is_api=lane == API,
            on_thread=partial(self._do, lane, owner=place.owner),
        )
        if share.owner:
            place.give_to(share.owner)
        if length:
            seconds = self._limits.body_seconds
            is_announced = "CONTENT_LENGTH" in environ
            most = None if is_announced else length
            environ["wsgi.input"] = body = await read_body(receive, length, seconds, most)
            if not is_announced:
                size = body.seek(0, io.SEEK_END)
                body.seek(0)
                share.shrink(size)
                environ["CONTENT_LENGTH"] = str(size)
                environ.pop("HTTP_TRANSFER_ENCODING", None)
            size = int(environ["CONTENT_LENGTH"])
            if size > SMALL_BYTES and _is_json(environ):
                environ[BODY] = await _read_json(body, size, share)
        environ[HELD] = share

    def _handle(
        self,
        lane: str,
        environ: dict[str, Any],
        later: DeferredResponse,
        after: AfterAnswer,
        share: Share,
        is_late: bool,
    ) -> HttpResponseBase:
        """Run Django, on a thread. What it leaves to be done later goes on in any case: its caller
        may have left, and the middleware may have failed."""
        try:
            with after.collect(), nullcontext() if is_late else draining.in_time():
                is_program = lane == API and "HTTP_COOKIE" not in environ
                handler = self._api_handler if is_program else self._handler
                response = handler(environ, _start_nothing)
            if isinstance(response, Placeholder | EventStream) or not response.streaming:
                # It has all it needs of this thread, whose connection is looked after now.
                response.close()
            return response
        finally:
            environ["wsgi.input"].close()
            if later.has_work:
                with self._lock:
                    self._waiting += 1
                later.answer.add_done_callback(lambda _: self._finish(share))
                threads = self._threads_of(lane)
                later.go_on(partial(threads.submit, lane, has_begun=True, owner=later.owner))
            else:
                share.release()

    def _finish(self, share: Share) -> None:
        share.release()
        with self._lock:
            self._waiting -= 1

    def _threads_of(self, lane: str) -> HandlerThreads:
        return self._apart.get(lane, self._threads)

    def _do(
        self, lane: str, call: Callable[[], T], *, has_begun: bool = False, owner: str = ""
    ) -> asyncio.Future[T]:
        """The outcome of a call on a thread. A response that nobody waits for any more is closed.

        Raises LaneFull.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                _close_on(self._threads_of(lane), lane, result)
            elif error is not None:
                future.set_exception(_harmless(error))
            else:
                future.set_result(cast("T", result))

        def job() -> None:
            try:
                result, error = call(), None
            except BaseException as raised:
                result, error = None, raised
            _call_in(loop, tell, result, error)

        self._threads_of(lane).submit(lane, job, has_begun=has_begun, owner=owner)
        return future

    async def _send(
        self,
        lane: str,
        response: HttpResponseBase,
        send: Send,
        owner: str,
        lost: Future[None],
        *,
        has_body: bool,
    ) -> None:
        await send(_start_of(response))
        if isinstance(response, HttpResponse):
            await _send_content(response.content if has_body else b"", send)
        elif not has_body:
            _close_on(self._threads_of(lane), lane, response)
            await _send_content(b"", send)
        else:
            await self._send_stream(lane, response, send, owner, lost)

    async def _send_large(
        self, lane: str, method: str, response: HttpResponse, place: Place, send: Send
    ) -> None:
        """An answer that its client may leave unread: counted, and on disk where it is long. No
        more of it is in memory than the piece that is on its way."""
        try:
            # What was done cannot be asked for again.
            place.hold_answer(_size(response), is_lost_else=method not in ("GET", "HEAD"))
        except Refused as refusal:
            response.content = b""
            await _send_refusal(refusal, send, has_body=True)
            return
        if _size(response) > MOST_IN_MEMORY_BYTES:
            document = await self._do(lane, partial(_taken_out, response), has_begun=True)
        else:
            document = _taken_out(response)
        try:
            await send(_start_of(response))
            left = document.size
            while left and (piece := document.read()):
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
        finally:
            document.close()

    async def _send_stream(
        self, lane: str, response: HttpResponseBase, send: Send, owner: str, lost: Future[None]
    ) -> None:
        """Every kind of stream goes through here; each fetch is a thread's for a moment only.

        Whoever loses the right to it gets no more of it, and no end: he does not take it for all.
        """
        pieces = iter(response)
        try:
            more, pause, was_empty = True, ASK_SECONDS, False
            while more and not lost.done():
                body, more = b"", True
                with suppress(LaneFull):
                    # What has begun goes before what is new, but not to ask in vain once more:
                    # many streams that have nothing would let nobody else in.
                    fetch = partial(_fetch, pieces)
                    body, more = await self._do(lane, fetch, has_begun=not was_empty, owner=owner)
                was_empty = more and not body
                if was_empty:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, ASK_MOST_SECONDS)
                else:
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                    pause = ASK_SECONDS
        finally:
            _close_on(self._threads_of(lane), lane, response)


async def _send_refusal(refusal: Refused, send: Send, *, has_body: bool) -> None:
    response = _refusal(refusal)
    await send(_start_of(response))
    await _send_content(response.content if has_body else b"", send)


async def _send_events(
    events: EventStream, receive: Receive, send: Send, lost: Future[None]
) -> None:
    """Each as it comes, at the pace of the client. Nobody waits for it, and no thread is held.

    Whoever loses the right to them is told so, and is taken for one who has left.
    """
    gone = asyncio.ensure_future(_gone(receive))
    ended = {gone, _told_of(lost)}
    try:
        begins = _told_of(events.begins)
        await asyncio.wait({*ended, begins}, return_when=asyncio.FIRST_COMPLETED)
        if not begins.done():
            if lost.done():
                refused = _error(401, LOST_RIGHT["code"], LOST_RIGHT["message"])
                await send(_start_of(refused))
                await _send_content(refused.content, send)
            return
        events.open()
        await send(_start_of(events))
        more = True
        while more and not gone.done():
            if lost.done():
                await send({"type": "http.response.body", "body": events.cut_off()})
                return
            body, more = events.take()
            if body or not more:
                # Without an end the server closes the connection.
                more_body = more or events.is_broken_off
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
            else:
                changed = _told_of(events.next_change())
                await asyncio.wait({*ended, changed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        events.leave()


async def _gone(receive: Receive) -> None:
    """Done when the client has left. Its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _size(response: HttpResponse) -> int:
    return len(response.content)


def _taken_out(response: HttpResponse) -> Document:
    """The response's content. The response has it no more: responses are in cycles, which are
    collected when many objects were made, however large they are."""
    response.setdefault("Content-Length", str(_size(response)))
    document = Document(response.content)
    response.content = b""
    return document


def _empty(answered: Future[HttpResponseBase]) -> None:
    """The events have told what it says, and their reader may be slow."""
    if not answered.exception() and isinstance(answer := answered.result(), HttpResponse):
        answer.content = b""


def _is_json(environ: Mapping[str, Any]) -> bool:
    """Whether a view will want what the body says in JSON."""
    kind = str(environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower()
    return kind == "application/json" and str(environ["PATH_INFO"]).startswith(_JSON_PATHS)


async def _read_json(body: IO[bytes], size: int, share: Share) -> Future[Read]:
    """What a large body says, read where that holds up nobody. Raises Refused."""
    try:
        read = submit_read(body, size, share.owner)
    except RateLimited as error:
        body.close()
        raise Refused(429, f"body: {error.message}", math.ceil(error.retry_after or 1)) from None
    done = asyncio.get_running_loop().create_future()
    read.add_done_callback(lambda _: _call_in(done.get_loop(), _set, done))
    try:
        await done
    except BaseException:
        # The client has left. It may be about to be read.
        read.cancel()
        read.add_done_callback(lambda _: body.close())
        raise
    try:
        body.seek(0)
        if read.exception() is None:
            share.hold(share.owner, max(0, VALUE_BYTES * read.result().values - size))
    except BaseException:
        body.close()
        raise
    return read


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _start_of(response: HttpResponseBase) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": response.status_code,
        "headers": _headers(response),
    }


async def _send_content(content: bytes, send: Send) -> None:
    """In pieces, each of which the client has a time to read for."""
    for start in range(0, len(content) or 1, PIECE_BYTES):
        body = content if len(content) <= PIECE_BYTES else content[start : start + PIECE_BYTES]
        more = start + PIECE_BYTES < len(content)
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _fetch(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """What comes of the stream in a moment, and whether more may come.

    An empty piece stands for none yet.
    """
    parts: list[bytes] = []
    size = 0
    until = time.monotonic() + FETCH_SECONDS
    for part in pieces:
        parts.append(part)
        size += len(part)
        if not part or size >= PIECE_BYTES or time.monotonic() > until:
            return b"".join(parts), True
    return b"".join(parts), False


def _told_of(source: Future[T]) -> asyncio.Future[T]:
    """The outcome, in this loop. The server cancels the task of a client that has left: what it
    awaits is cancelled then, and the run is not."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell() -> None:
        if future.done():
            return
        if error := source.exception():
            future.set_exception(_harmless(error))
        else:
            future.set_result(source.result())

    source.add_done_callback(lambda _: _call_in(loop, tell))
    return future


def _harmless(error: BaseException) -> Exception:
    """What ends a program, such as SystemExit, must not end the event loop."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} in a request")
    wrapped.__cause__ = error
    return wrapped


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        logger.info("an answer came after the server had ended")


async def _answer_of(
    handled: asyncio.Future[HttpResponseBase], later: DeferredResponse
) -> HttpResponseBase:
    try:
        response = await handled
        if isinstance(response, Placeholder):
            return response.become(await _told_of(later.answer))
    except Exception:
        logger.exception("a request failed inside the service")
        return _error(500, "internal_error", "The request failed inside the service.")
    return response


def _close_on(threads: HandlerThreads, lane: str, response: object) -> None:
    if isinstance(response, HttpResponseBase | Document):
        threads.submit(lane, response.close, has_begun=True)


def _lane_of(scope: Mapping[str, Any]) -> str:
    path = scope["path"]
    if lane := _LANES.get(path):
        return lane
    if path.startswith(strangers.API_PATHS):
        return API
    if not strangers.is_page(path):
        return PAGES
    sent = b"; ".join(value for name, value in scope["headers"] if name.lower() == b"cookie")
    return PAGES if strangers.sessions.are_in(sent.decode("latin-1")) else STRANGERS


def _headers(response: HttpResponseBase) -> list[tuple[bytes, bytes]]:
    headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in response.items()]
    headers += [
        (b"Set-Cookie", morsel.output(header="").strip().encode("latin-1"))
        for morsel in response.cookies.values()
    ]
    return headers


def _refusal(refusal: Refused | LaneFull | RateLimited) -> HttpResponse:
    if isinstance(refusal, LaneFull):
        refusal = Refused(503, "The service has more requests than it can handle.", 5)
    elif isinstance(refusal, RateLimited):
        refusal = Refused(429, refusal.message, RETRY_SECONDS)
    codes = {408: "request_timeout", 413: "SB002", 426: "bad_request", 429: "SB008", 503: "SB009"}
    known = {"ran": False} if refusal.status == 503 else {}
    response = _error(refusal.status, codes[refusal.status], refusal.message, **known)
    if refusal.retry_after is not None:
        response["Retry-After"] = str(refusal.retry_after)
    return response


def _error(status: int, code: str, message: str, **known: bool) -> HttpResponse:
    """In the shape of the API's errors."""
    body = {"error": {"code": code, "message": message, "field": None, **known}, "id": None}
    text = json.dumps(body, separators=(",", ":"))
    response = HttpResponse(text, status=status, content_type="application/json")
    response["Content-Length"] = str(len(response.content))
    return response


def _start_nothing(*_: object) -> Callable[[bytes], object]:
    """The response object itself says what WSGI would be told here."""
    return lambda _: None
