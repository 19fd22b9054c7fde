"""Work that waits: in place, or with its thread given back, and never with a database connection."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse
from django.test import RequestFactory

from executions.doors.native.deferred import LATER, DeferredResponse, Placeholder, answer
from executions.kernel.coroutines import run_sync, wait_for
from providers import waiting
from providers.base import Health, SandboxProvider
from providers.errors import RateLimited
from providers.remote.deadline import DeadlinePassed
from providers.sandbox import Sandbox
from providers.services.trial import AT_ONCE, waiting_apart
from providers.values import Emit, ExecutionResult, Job, SandboxSpec
from providers.waiting import WaitingThreads, within


class SynchronousSandbox(Sandbox):
    ref = "one"

    def __init__(self, run: Callable[[], str]) -> None:
        self.metadata = {}
        self._run = run

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        return ExecutionResult(self._run(), "", 0, 0.0)

    def close(self) -> bool:
        return True


class Synchronous(SandboxProvider):
    """A client of a service as a plugin would be: it knows nothing of futures."""

    id = "synchronous"
    name = "Synchronous"

    def __init__(self, run: Callable[[], str] = lambda: "") -> None:
        self._run = run

    def initialize(self, config: Any) -> bool:
        return True

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        return SynchronousSandbox(self._run)

    def health_check(self) -> Health:
        return Health(True)

    def get_supported_languages(self) -> list[str]:
        return ["python"]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> WaitingThreads:
    threads = WaitingThreads(2)
    monkeypatch.setattr(waiting, "_threads", threads)
    return threads


def here() -> str:
    return threading.current_thread().name


async def outcome_of(future: Future[str]) -> str:
    await wait_for(future)
    return future.result()


def test_a_synchronous_provider_is_waited_for_on_another_thread(
    two_threads: WaitingThreads,
) -> None:
    future = SynchronousSandbox(here).submit_run(Job("pass"))
    assert future.result(60).stdout == "provider-wait"


def test_waiting_ends_with_the_outcome_or_at_its_deadline() -> None:
    quick: Future[str] = Future()
    slow: Future[str] = Future()
    ends = [within(3600, quick), within(0.05, slow), within(3600, slow)]
    quick.set_result("there")
    assert ends[0].result(60) == "there"
    with pytest.raises(DeadlinePassed):
        ends[1].result(60)
    slow.set_result("late")
    assert ends[2].result(60) == "late"
    with pytest.raises(DeadlinePassed):
        ends[1].result(60)


def test_beyond_the_bound_nothing_begins_but_what_has_begun_goes_on(
    two_threads: WaitingThreads,
) -> None:
    free = threading.Event()
    provider = Synchronous(lambda: str(free.wait(60)))
    sandbox = provider.open(SandboxSpec(), "")
    runs = [sandbox.submit_run(Job("pass")) for _ in range(2)]
    with pytest.raises(RateLimited) as refused:
        provider.submit_open(SandboxSpec(), "")
    ended = sandbox.submit_close()
    assert ended.result(60) is True
    free.set()
    assert [run.result(60).stdout for run in runs] == ["True", "True"]
    assert provider.submit_open(SandboxSpec(), "").result(60).ref == "one"
    assert refused.value.retry_after


def test_a_call_that_was_cancelled_meanwhile_costs_no_thread(two_threads: WaitingThreads) -> None:
    go_on = threading.Event()
    for _ in range(3):
        cancelled = two_threads.submit(lambda: go_on.wait(60), may_refuse=False)
        assert cancelled.cancel()
    go_on.set()

    for _ in range(3):
        assert two_threads.submit(here, may_refuse=False).result(60).startswith("provider-wait")


def test_a_thread_that_is_idle_holds_nothing_of_its_last_call(
    two_threads: WaitingThreads,
) -> None:
    let_go = threading.Event()

    def begin() -> Future[None]:
        held = Synchronous()
        weakref.finalize(held, let_go.set)
        return two_threads.submit(lambda: held.close(), may_refuse=False)

    begin().result(60)
    assert let_go.wait(60)


def test_what_a_provider_raises_is_raised_where_its_outcome_is_asked_for(
    two_threads: WaitingThreads,
) -> None:
    def leave() -> str:
        raise SystemExit(3)

    future = SynchronousSandbox(leave).submit_run(Job("pass"))
    with pytest.raises(SystemExit):
        future.result(60)
    assert SynchronousSandbox(here).submit_close().result(60) is True


@pytest.mark.django_db
def test_waiting_threads_hold_no_connection_to_the_database(two_threads: WaitingThreads) -> None:
    def count() -> str:
        return str(len(connections.all(initialized_only=True)))

    future = SynchronousSandbox(count).submit_run(Job("pass"))
    assert future.result(60).stdout == "0"


def test_an_interruption_is_raised_where_the_work_waits_and_lets_it_clear_up() -> None:
    done: list[str] = []

    class Interrupted(Future[str]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            raise KeyboardInterrupt

    cleared: Future[None] = Future()
    cleared.set_result(None)

    async def work() -> None:
        try:
            await outcome_of(Interrupted())
        finally:
            await wait_for(cleared)
            done.append("cleared up")

    with pytest.raises(KeyboardInterrupt):
        run_sync(work())
    assert done == ["cleared up"]


def test_a_cancelled_wait_is_the_works_own_to_tell() -> None:
    future: Future[str] = Future()
    threading.Timer(0.05, future.cancel).start()

    async def work() -> str:
        try:
            return await outcome_of(future)
        except Exception as error:
            return type(error).__name__

    assert run_sync(work()) == "CancelledError"


def later_request() -> tuple[Any, DeferredResponse]:
    request = RequestFactory().get("/")
    later = request.META[LATER] = DeferredResponse()
    return request, later


def test_an_answer_that_is_there_soon_is_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executions.doors.native.deferred.PATIENCE_SECONDS", 10)
    future: Future[str] = Future()
    request, later = later_request()

    async def work() -> HttpResponse:
        threading.Timer(0.005, future.set_result, ["soon"]).start()
        return HttpResponse(await outcome_of(future))

    response = answer(request, work())
    assert not later.has_work
    assert isinstance(response, HttpResponse)
    assert response.content == b"soon"


@pytest.mark.django_db(transaction=True)
def test_an_answer_that_comes_later_keeps_what_the_middleware_has_set() -> None:
    future: Future[str] = Future()
    request, later = later_request()

    async def work() -> HttpResponse:
        return HttpResponse((await outcome_of(future)), status=201)

    placeholder = answer(request, work())
    assert isinstance(placeholder, Placeholder)
    placeholder["X-Frame-Options"] = "DENY"
    placeholder.set_cookie("seen", "yes")
    later.go_on(lambda job: job())
    future.set_result("late")
    final = placeholder.become(later.answer.result(60))
    assert (final.status_code, final.content) == (201, b"late")
    assert (final["X-Frame-Options"], final["Content-Length"]) == ("DENY", "4")
    assert final.cookies["seen"].value == "yes"


@pytest.mark.django_db
def test_within_a_transaction_an_answer_is_waited_for() -> None:
    future: Future[str] = Future()
    request, later = later_request()
    threading.Timer(0.2, future.set_result, ["waited"]).start()

    async def work() -> HttpResponse:
        return HttpResponse(await outcome_of(future))

    response = answer(request, work())
    assert isinstance(response, HttpResponse)
    assert response.content == b"waited"
    assert not later.has_work


def test_only_so_many_administrators_wait_for_providers_of_their_own() -> None:
    held = [waiting_apart() for _ in range(AT_ONCE)]
    for place in held:
        place.__enter__()
    with pytest.raises(RateLimited), waiting_apart():
        pass
    for place in held:
        place.__exit__(None, None, None)
    with waiting_apart():
        pass
