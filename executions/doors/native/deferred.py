"""Answers that come later than the call of the view: deferred ones, and streams of events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextvars import Context, copy_context
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, Any

from django.db import close_old_connections, connection
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.doors.native.authentication import place_of
from executions.kernel.coroutines import Coroutine, run_sync
from executions.runs.event_log import Broadcast, EventSource, RunEvent, resolve
from executions.runs.rights import Right
from providers.slices import json_text

logger = logging.getLogger(__name__)

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
LOST_RIGHT = {
    "code": "unauthenticated",
    "message": "The API key or the signed-in user no longer has access.",
}
# How much is taken from a run at once. The client has to read it before more is taken.
PIECE_BYTES = 64 * 1024
# The last value of an event may be a Document: this one.
DOCUMENT = "execution"
# What is longer waits for its reader on disk.
MOST_IN_MEMORY_BYTES = 256 * 1024


class Document:
    """Bytes on their way to one client, who may read them slowly: on disk where they are many."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self._left = self.size
        is_short = self.size <= MOST_IN_MEMORY_BYTES
        self._source = BytesIO(content) if is_short else _on_disk(content)

    def read(self) -> bytes:
        """The next piece; empty when there is none."""
        if not self._left:
            return b""
        piece = self._source.read(min(PIECE_BYTES, self._left))
        self._left -= len(piece)
        if not self._left:
            self._source.close()
        return piece

    def close(self) -> None:
        self._left = 0
        self._source.close()


def _on_disk(content: bytes) -> IO[bytes]:
    """In a file that nobody else can open, and that goes with this process."""
    try:
        source: IO[bytes] = TemporaryFile()  # noqa: SIM115
        try:
            source.write(content)
            source.seek(0)
        except BaseException:
            source.close()
            raise
    except OSError as error:
        logger.warning("an answer could not be written to disk and stays in memory: %s", error)
        return BytesIO(content)
    return source


def stream_form(accept: str) -> str:
    """Return SSE, NDJSON, or "" where plain JSON is preferred or nothing is said."""
    best, form = 0.0, ""
    for each in accept.split(",")[:50]:
        media_type, *parameters = (part.strip().lower() for part in each.split(";"))
        quality = _quality(parameters)
        if quality > best and media_type in (SSE, NDJSON, "application/json", "*/*"):
            best, form = quality, media_type if media_type in (SSE, NDJSON) else ""
    return form


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return max(0.0, min(1.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0


def line_of(body: Mapping[str, Any], form: str) -> bytes:
    text = json_text(body)
    if form == SSE:
        text = f"id: {body['seq']}\nevent: {body['type']}\ndata: {text}\n"
    return f"{text}\n".encode(errors="replace")


def _around(body: Mapping[str, Any], form: str) -> tuple[bytes, bytes]:
    """What stands before and behind a document, the last value of the event."""
    before, _, behind = line_of({**body, DOCUMENT: None}, form).rpartition(b"null")
    return before, behind


class EventStream(StreamingHttpResponse):
    """Events as they come, then one that says how it ended. The server takes them piece by piece.

    It is given out as soon as it `has_begun`; the work that it tells of goes on meanwhile, and
    calls `end`. `on_leave` is called when the client goes before that, and once more when it begins
    after that: there was nothing to be ended yet.
    """

    def __init__(
        self, form: str, *, after: int = 0, on_leave: Callable[[], None] = lambda: None
    ) -> None:
        content_type = f"{form}; charset=utf-8" if form == SSE else form
        super().__init__(self._wait_for_all(), content_type=content_type)
        self["Cache-Control"] = "no-store"
        # Proxies that buffer would hold events back.
        self["X-Accel-Buffering"] = "no"
        self.left = Broadcast()
        # Done when its head may be sent, which `open` completes.
        self.begins: Future[None] = Future()
        self.begins.set_result(None)
        # Whether somebody takes the events while the work goes on, or when it is over.
        self.is_waited_for = False
        # Whether the connection is to be closed in place of an end.
        self.is_broken_off = False
        self._form = form
        self._after = after
        self._on_leave = on_leave
        self._source: EventSource | None = None
        self._last: Mapping[str, Any] | None = None
        # What is left of a document that the last event has, and what stands behind it.
        self._rest: tuple[Document, bytes] | None = None
        self._hold: Callable[[int], object] = lambda size: None
        self._is_over = False
        self._changed: Future[None] = Future()
        self._asked: Future[None] = Future()

    @property
    def has_begun(self) -> bool:
        return self._source is not None

    def open(self) -> None:
        """Right before its head is sent."""

    def begin(self, source: EventSource) -> None:
        self._source = source
        resolve([self._changed])
        # In this order: whoever leaves now finds what there is to be ended.
        if self.left.done():
            self._on_leave()

    def end(self, said: Mapping[str, Any]) -> None:
        """The last event, once nothing more comes from the source, if there ever was one."""
        self._last = said
        self._hold(self.document_bytes)
        # In this order, and the other way round where its reader leaves: one of us closes it.
        if self.left.done():
            self._close_document()
        resolve([self._changed])

    def break_off(self) -> None:
        """No last event, and the connection is closed in the middle of the answer: clients that
        take this for the end of what they talk to look whether it is still there."""
        self.is_broken_off = True
        self.end({})

    @property
    def document_bytes(self) -> int:
        """How much waits for the client with the last event."""
        document = (self._last or {}).get(DOCUMENT)
        return document.size if isinstance(document, Document) else 0

    def count(self, hold: Callable[[int], object]) -> None:
        """Say how many bytes wait for the client, now or when it is known, or both."""
        self._hold = hold
        hold(self.document_bytes)

    def take(self) -> tuple[bytes, bool]:
        """What there is to be sent now, and whether more may come."""
        if self._is_over:
            return b"", False
        if self._rest is not None:
            document, behind = self._rest
            piece = document.read()
            self._is_over = not piece
            return piece or behind, not self._is_over
        # In this order: whatever has an end by now had its source before.
        last, source = self._last, self._source
        if source is None:
            # What failed while it waited for its beginning has an end all the same.
            return self._end_with(last, b"") if last is not None else (b"", True)
        entries, is_all = source.read(self._after, PIECE_BYTES)
        if entries:
            self._after = entries[-1].seq
        body = b"".join(map(self.line, entries))
        if is_all and last is not None:
            return self._end_with(last, body)
        return body, not self._is_over

    def _end_with(self, last: Mapping[str, Any], body: bytes) -> tuple[bytes, bool]:
        if self.is_broken_off:
            self._is_over = True
            return body, False
        document = last.get(DOCUMENT)
        if not isinstance(document, Document):
            self._is_over = True
            return body + self.render_end(last), False
        before, behind = _around({"seq": self._after + 1, **last}, self._form)
        if document.size > PIECE_BYTES:
            self._rest = (document, behind)
            return body + before, True
        self._is_over = True
        return body + before + document.read() + behind, False

    def line(self, entry: RunEvent) -> bytes:
        """One event as it is sent."""
        return line_of(entry.body(), self._form)

    def render_end(self, said: Mapping[str, Any]) -> bytes:
        """What is sent last."""
        return line_of({"seq": self._after + 1, **said}, self._form)

    def cut_off(self) -> bytes:
        """What is sent last, and that nothing more is, to one who has lost the right to it.

        Nothing is put into the middle of a document.
        """
        if self._is_over or self._rest is not None:
            return b""
        return self.render_end({"type": "error", "error": LOST_RIGHT})

    def next_change(self) -> Future[None]:
        """Done when `take` may have something else to give. One reader waits at a time."""
        changed = self._changed = Future()
        # What was asked for before would be held until something happens.
        self._asked.cancel()
        if self._source is not None:
            self._asked = self._source.next_change(self._after)
            self._asked.add_done_callback(lambda _: resolve([changed]))
        # Either this is seen here, or the future where it ends.
        if self._last is not None:
            resolve([changed])
        return changed

    def leave(self) -> None:
        """The client takes nothing more."""
        self._asked.cancel()
        if not self.left.done():
            self.left.set_result(None)
            self._close_document()
            if not self._is_over:
                self._on_leave()

    def _close_document(self) -> None:
        if isinstance(document := (self._last or {}).get(DOCUMENT), Document):
            document.close()

    def _wait_for_all(self) -> Iterator[bytes]:
        """For servers that cannot do other than wait."""
        more = True
        while more:
            body, more = self.take()
            if body:
                yield body
            elif more:
                self.next_change().result()


LATER = "cofferdam.later"
# Longer than most runs take, and so short that nobody can hold the threads by it.
PATIENCE_SECONDS = 0.025

Submit = Callable[[Callable[[], None]], None]


class Placeholder(HttpResponseBase):
    """Goes through the middleware in place of an answer that is not known yet."""

    # So that nobody takes it for an answer without a body.
    streaming = True

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def become(self, answer: HttpResponseBase) -> HttpResponseBase:
        """The answer, with what the middleware has set and the answer itself has not."""
        for name, value in self.items():
            if name not in answer:
                answer[name] = value
        if isinstance(answer, HttpResponse):
            answer["Content-Length"] = str(len(answer.content))
        for name, morsel in self.cookies.items():
            answer.cookies.setdefault(name, morsel)
        return answer


class DeferredResponse:
    """One request's work, if its view has left any."""

    def __init__(self) -> None:
        self.answer: Future[HttpResponseBase] = Future()
        # With what right it is received; None where anybody may.
        self.right: Right | None = None
        self.has_work = False
        self._work: Coroutine[HttpResponseBase]
        self._awaited: Future[Any]
        self._context: Context
        self._submit: Submit

    @property
    def owner(self) -> str:
        """Who takes turns with others at the threads; "" for all who are nobody's."""
        return self.right.owner if self.right is not None else ""

    def take(self, work: Coroutine[HttpResponseBase]) -> HttpResponseBase:
        """The work's answer, or a placeholder if it has to wait for longer."""
        try:
            self._awaited = _advance(work)
        except StopIteration as end:
            answer: HttpResponseBase = end.value
            return answer
        self._leave(work)
        return Placeholder()

    def stream(self, work: Coroutine[HttpResponseBase], events: EventStream) -> HttpResponseBase:
        """The events as soon as there may be some, or the answer of work that never had any."""
        events.is_waited_for = True
        try:
            self._awaited = _advance(work, 0)
        except StopIteration as end:
            answer: HttpResponseBase = end.value
            return events if events.has_begun else answer
        self._leave(work)
        return events

    def _leave(self, work: Coroutine[HttpResponseBase]) -> None:
        # Who acts, and whatever else was set for this request, holds for the rest of it.
        self._context = copy_context()
        self._work = work
        self.has_work = True

    def go_on(self, submit: Submit) -> None:
        """Have the rest carried out by `submit`, whether its caller still waits or not."""
        self._submit = submit
        self._awaited.add_done_callback(lambda _: submit(self._resume))

    def _resume(self) -> None:
        try:
            close_old_connections()
            awaited = self._context.run(_advance, self._work)
        except StopIteration as end:
            self.answer.set_result(end.value)
        except BaseException as error:
            self.answer.set_exception(error)
        else:
            awaited.add_done_callback(lambda _: self._submit(self._resume))


def answer(request: HttpRequest | Request, work: Coroutine[HttpResponseBase]) -> HttpResponseBase:
    """What the work returns, now or later. What it raises before it has to wait is raised here."""
    later: DeferredResponse | None = request.META.get(LATER)
    if later is None or connection.in_atomic_block:
        return run_sync(work)
    return later.take(work)


def stream(
    request: HttpRequest | Request,
    work: Callable[[], Coroutine[HttpResponseBase]],
    events: EventStream,
) -> HttpResponseBase:
    """The events that the work tells of while it goes on, or its answer where there are none.

    Raises RateLimited, before the work has begun, where the caller has too many streams.
    """
    if place := place_of(request):
        place.begin_stream()
    later: DeferredResponse | None = request.META.get(LATER)
    if later is None or connection.in_atomic_block:
        answer = run_sync(work())
        return events if events.has_begun else answer
    return later.stream(work(), events)


def _advance(work: Coroutine[HttpResponseBase], patience: float = PATIENCE_SECONDS) -> Future[Any]:
    """Go on until there is something to wait for that takes its time. Raises StopIteration."""
    while True:
        awaited = work.send(None)
        try:
            awaited.exception(patience)
        except CancelledError:
            continue
        except TimeoutError:
            return awaited
