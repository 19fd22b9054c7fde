"""What is left to be done begins when the answer has been sent, and never waits for it in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse

from executions.doors.native.deferred import answer
from executions.kernel.background import AfterAnswer, after_answer
from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from tests.support.asgi import scope

Handler = Callable[[Any, Any], HttpResponse]


def serve(handler: Handler, send: Callable[[dict[str, Any]], None]) -> None:
    """Have the bridge answer a request; `send` is what takes its messages."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def take(message: dict[str, Any]) -> None:
        send(message)

    bridge = Bridge(cast("WSGIHandler", handler), 4, Limits(1000, 1000, 10))
    asyncio.run(bridge(scope("/api/v1/other"), receive, take))


def test_work_begins_when_the_last_byte_has_been_sent() -> None:
    order: list[str] = []

    def handler(environ: Any, start: Any) -> HttpResponse:
        after_answer(lambda: order.append("work"))
        order.append("handled")
        return HttpResponse("answer")

    serve(handler, lambda message: order.append(message["type"]))
    assert order == ["handled", "http.response.start", "http.response.body", "work"]


def test_work_begins_also_where_the_client_has_left() -> None:
    done: list[str] = []

    def handler(environ: Any, start: Any) -> HttpResponse:
        after_answer(lambda: done.append("work"))
        return HttpResponse("answer")

    def send(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        serve(handler, send)
    assert done == ["work"]


def test_work_of_an_answer_that_comes_later_begins_after_it() -> None:
    order: list[str] = []

    async def work() -> HttpResponse:
        after_answer(lambda: order.append("work"))
        return HttpResponse("answer")

    def handler(environ: Any, start: Any) -> HttpResponse:
        request = cast("Any", type("Request", (), {"META": environ}))
        return cast("HttpResponse", answer(request, work()))

    serve(handler, lambda message: order.append(message["type"]))
    assert order == ["http.response.start", "http.response.body", "work"]


def test_what_comes_after_the_answer_begins_at_once() -> None:
    done: list[str] = []
    request = AfterAnswer()
    request.begin()
    with request.collect():
        after_answer(lambda: done.append("late"))
    assert done == ["late"]


def test_without_a_request_it_begins_at_once() -> None:
    done: list[str] = []
    after_answer(lambda: done.append("work"))
    assert done == ["work"]


def test_work_that_fails_keeps_no_other_from_beginning(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []
    request = AfterAnswer()
    request.add(lambda: 1 / 0)
    request.add(lambda: done.append("work"))
    request.begin()
    assert done == ["work"]
    assert "work after an answer could not begin" in caplog.text
