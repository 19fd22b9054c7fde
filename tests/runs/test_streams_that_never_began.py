"""A stream whose work fails while it waits for its beginning ends, and says why."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
from django.http import HttpResponse

from executions.doors.native.deferred import NDJSON, DeferredResponse, EventStream
from executions.doors.native.executions import _send_last_event
from executions.doors.native.frame import ApiView
from executions.kernel.coroutines import wait_for
from providers.errors import RateLimited


# What goes on later closes its thread's old connection, if there is one, which asks the database.
@pytest.mark.django_db(transaction=True)
def test_what_fails_after_a_wait_is_the_last_event() -> None:
    waited: Future[None] = Future()

    async def work() -> HttpResponse:
        await wait_for(waited)
        raise RateLimited("No place came free.")

    events, later = EventStream(NDJSON), DeferredResponse()
    assert later.stream(_send_last_event(ApiView(), events, work()), events) is events
    assert events.take() == (b"", True)
    changed = events.next_change()

    later.go_on(lambda job: job())
    waited.set_result(None)

    assert later.answer.result(0).status_code == 429
    assert changed.done()
    body, more = events.take()
    assert not more
    last = json.loads(body)
    assert (last["seq"], last["type"], last["error"]["code"]) == (1, "error", "SB008")
    assert events.take() == (b"", False)


def test_what_fails_at_once_is_an_answer_and_no_stream() -> None:
    async def work() -> HttpResponse:
        raise RateLimited("No place came free.")

    events = EventStream(NDJSON)
    answer = DeferredResponse().stream(_send_last_event(ApiView(), events, work()), events)
    assert answer.status_code == 429
