"""Who leaves a stream before its run has a record stops the run all the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from rest_framework.request import Request
from rest_framework.test import APIRequestFactory

from executions.doors.e2b.interpreter import ExecuteView
from executions.doors.native.deferred import LATER, NDJSON, DeferredResponse, EventStream
from executions.doors.native.executions import run_stream
from executions.doors.native.frame import ApiView
from executions.kernel.coroutines import wait_for
from executions.kernel.text import uuid7
from executions.runs import active_runs
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.runs.record import Outcome
from providers.errors import RateLimited
from tests.conftest import Caller


@contextmanager
def one_run() -> Iterator[Mock]:
    run = Mock(execution_id=uuid7())
    with active_runs.track(run):
        yield run


@pytest.mark.parametrize("detached", [False, True])
def test_a_run_that_begins_for_nobody_is_cancelled_unless_it_is_detached(detached: bool) -> None:
    waited: Future[None] = Future()
    with one_run() as recorded:

        async def run(log: EventLog) -> Outcome:
            await wait_for(waited)
            log.begin(recorded.execution_id)
            raise RateLimited("It does not go on.")

        later = DeferredResponse()
        query = "/?detach=true" if detached else "/"
        request = Request(APIRequestFactory().post(query, **{LATER: later}))
        events = run_stream(ApiView(), request, NDJSON, run)
        assert isinstance(events, EventStream)
        events.leave()
        assert not recorded.cancel.called
        later.go_on(lambda job: job())
        waited.set_result(None)
    assert recorded.cancel.called is not detached


@pytest.mark.database
@pytest.mark.usefixtures("kept_here")
def test_a_cell_that_begins_for_nobody_runs_nothing(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: Future[None] = Future()
    run = ExecuteView._run

    async def later_on(self: ExecuteView, *given: Any) -> dict[str, Any]:
        await wait_for(waited)
        return await run(self, *given)

    monkeypatch.setattr(ExecuteView, "_run", later_on)
    made = alice.client.post("/v2/sandboxes", {}).json()
    later = DeferredResponse()
    events = alice.client.post(
        "/execute",
        {"code": "print(1)"},
        headers={"E2b-Sandbox-Id": made["sandboxID"]},
        **{LATER: later},
    )
    assert isinstance(events, EventStream)
    events.leave()
    later.go_on(lambda job: job())
    waited.set_result(None)
    later.answer.result(60)
    record = Execution.objects.get(session=made["sandboxID"])
    assert (record.status, record.exit_code) == (Execution.Status.CANCELLED, None)
    assert "left the stream" in record.error_message
