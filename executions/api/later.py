"""Answers that come later: a view starts work, and its thread is free while the work waits.

The web server (`sandbox_site.web`) puts a `Later` into the request's environment. A view gives its
work to `answer`, which carries it out in place as long as it need not wait for more than a few
milliseconds; most runs are done by then. Otherwise a placeholder goes through the middleware, whose
headers are kept, and the server has the work go on, on one of its threads, whenever what it
waits for is there. Where nobody can answer later, as in most tests, the work is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextvars import Context, copy_context
from typing import Any

from django.db import close_old_connections, connection
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.api.authentication import place_of
from executions.api.streams import EventStream
from executions.kernel.coroutines import Waits, wait_for
from executions.runs.rights import Right

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


class Later:
    """One request's work, if its view has left any."""

    def __init__(self) -> None:
        self.answer: Future[HttpResponseBase] = Future()
        # With what right it is received; None where anybody may.
        self.right: Right | None = None
        self.has_work = False
        self._work: Waits[HttpResponseBase]
        self._awaited: Future[Any]
        self._context: Context
        self._submit: Submit

    @property
    def owner(self) -> str:
        """Who takes turns with others at the threads; "" for all who are nobody's."""
        return self.right.owner if self.right is not None else ""

    def take(self, work: Waits[HttpResponseBase]) -> HttpResponseBase:
        """The work's answer, or a placeholder if it has to wait for longer."""
        try:
            self._awaited = _advance(work)
        except StopIteration as end:
            answer: HttpResponseBase = end.value
            return answer
        self._leave(work)
        return Placeholder()

    def stream(self, work: Waits[HttpResponseBase], events: EventStream) -> HttpResponseBase:
        """The events as soon as there may be some, or the answer of work that never had any."""
        events.is_waited_for = True
        try:
            self._awaited = _advance(work, 0)
        except StopIteration as end:
            answer: HttpResponseBase = end.value
            return events if events.has_begun else answer
        self._leave(work)
        return events

    def _leave(self, work: Waits[HttpResponseBase]) -> None:
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


def answer(request: HttpRequest | Request, work: Waits[HttpResponseBase]) -> HttpResponseBase:
    """What the work returns, now or later. What it raises before it has to wait is raised here."""
    later: Later | None = request.META.get(LATER)
    if later is None or connection.in_atomic_block:
        return wait_for(work)
    return later.take(work)


def stream(
    request: HttpRequest | Request, work: Waits[HttpResponseBase], events: EventStream
) -> HttpResponseBase:
    """The events that the work tells of while it goes on, or its answer where there are none.

    Raises RateLimited, before the work has begun, where the caller has too many streams.
    """
    if place := place_of(request):
        place.begin_stream()
    later: Later | None = request.META.get(LATER)
    if later is None or connection.in_atomic_block:
        told = wait_for(work)
        return events if events.has_begun else told
    return later.stream(work, events)


def _advance(work: Waits[HttpResponseBase], patience: float = PATIENCE_SECONDS) -> Future[Any]:
    """Go on until there is something to wait for that takes its time. Raises StopIteration."""
    while True:
        awaited = next(work)
        try:
            awaited.exception(patience)
        except CancelledError:
            continue
        except TimeoutError:
            return awaited
