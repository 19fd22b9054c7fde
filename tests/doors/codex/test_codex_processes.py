"""What is kept of a process has a bound, and what waits is started by one place or by none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError
from django.utils import timezone

from executions.doors.codex import processes as module
from executions.doors.codex.attachments import Attachment
from executions.doors.codex.messages import Read
from executions.doors.codex.process import KEPT_BYTES, MOST_PIECES, Process
from executions.doors.codex.processes import Processes, Started
from executions.doors.codex.recovery import Found, Name
from executions.runs.event_log import EventLog, resolve
from executions.runs.models import Execution
from executions.runs.requests import Conflict, run_limits
from executions.sessions.waiting_commands import Asked

SESSION = UUID("01a1fd3e-5869-7be3-b4ad-c3848c823008")


def of(status: str, **values: Any) -> Found:
    execution = Execution(pk=uuid4(), background=True, status=status, **values)
    return Found(Name("p", takes_input=True), execution, [], Asked(execution, 1, ""))


class Records:
    """What the records say, in the place of a database: what is not said is an outage of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.decisions: list[Future[None]] = []
        self.begun: list[UUID] = []
        self.withdrawn: list[str] = []
        self.starts: list[Started | Exception] = []
        monkeypatch.setattr(module, "_again", self._next)
        monkeypatch.setattr(module, "_standing", self._next)
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
        monkeypatch.setattr(module, "decision_on", self._decision)
        monkeypatch.setattr(module, "withdraw", self._withdraw)

    async def call(self, work: Callable[[], Any], /) -> Any:
        return await work()

    async def _next(self, *given: object) -> Any:
        found = self.said.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def _withdraw(self, execution_id: UUID, by: str) -> bool:
        if self.said and isinstance(self.said[0], Exception):
            raise self.said.pop(0)
        self.withdrawn.append(by)
        return True

    @contextmanager
    def _decision(self, execution_id: UUID) -> Iterator[Future[None]]:
        self.decisions.append(Future())
        yield self.decisions[-1]

    async def begin(self, execution_id: UUID) -> Started:
        self.begun.append(execution_id)
        started = self.starts.pop(0)
        if isinstance(started, Exception):
            raise started
        return started


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    return Records(monkeypatch)


async def notify(method: str, params: Mapping[str, Any]) -> None:
    pass


async def on_session(use: Callable[..., Awaitable[Any]]) -> None:
    raise AssertionError("nothing is asked of the session")


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


def adopted(records: Records, found: Found) -> Processes:
    made = Processes(records.call, notify)
    made.adopt([found], records.begin, on_session, "")
    return made


def test_what_goes_back_to_the_queue_is_started_from_there(records: Records) -> None:
    """The process that was starting it has ended between its claim and its start."""

    async def go() -> None:
        found = of("running")
        queued = replace(found, execution=Execution(pk=found.execution.pk, status="queued"))
        records.said = [found, OperationalError("away"), queued, (False, "")]
        execution = Execution(pk=found.execution.pk, status="running", pid=7)
        records.starts = [(execution, EventLog(run_limits()))]
        made = adopted(records, found)
        await until(lambda: bool(records.decisions))
        records.decisions[0].set_result(None)
        await until(lambda: bool(records.begun))
        await until(lambda: made.find("p").is_running)
        assert records.begun == [found.execution.pk]
        made.mute()

    asyncio.run(go())


def test_one_that_is_just_being_started_elsewhere_can_be_withdrawn(records: Records) -> None:
    async def go() -> None:
        found = of("running")
        records.said = []
        made = adopted(records, found)
        assert made.find("p").is_waiting
        await made.end(on_session)
        assert records.withdrawn == ["its client, which left"]
        made.mute()

    asyncio.run(go())


def test_nothing_starts_once_its_client_has_left(records: Records) -> None:
    """Also where the database does not answer when it is to be withdrawn."""

    async def go() -> None:
        made = adopted(records, of("queued"))
        await until(lambda: bool(records.decisions))
        records.said = [OperationalError("away"), (False, "")]
        ending = asyncio.create_task(made.end(on_session))
        await until(lambda: len(records.said) == 1)
        records.decisions[0].set_result(None)
        await until(lambda: not made._following)
        await ending
        assert (records.begun, records.withdrawn) == ([], ["its client, which left"])

    asyncio.run(go())


def test_what_could_not_be_started_ends_only_once_it_is_withdrawn(records: Records) -> None:
    async def go() -> None:
        made = adopted(records, of("queued"))
        await until(lambda: bool(records.decisions))
        records.said = [(False, ""), OperationalError("away"), OperationalError("away")]
        records.starts = [OperationalError("away")]
        records.decisions[0].set_result(None)
        await until(lambda: made.find("p").is_closed)
        assert (records.said, records.withdrawn) == ([], ["the service"])
        assert made.find("p").exit_code == 126

    asyncio.run(go())


def test_who_lost_the_race_looks_again_when_the_database_is_back(records: Records) -> None:
    async def go() -> None:
        found = of("queued")
        made = adopted(records, found)
        await until(lambda: bool(records.decisions))
        ended = Execution(pk=found.execution.pk, status="cancelled", error_message="It was me.")
        ended.finished_at = timezone.now()
        records.said = [(False, ""), OperationalError("away"), replace(found, execution=ended)]
        records.starts = [Conflict("elsewhere")]
        records.decisions[0].set_result(None)
        await until(lambda: made.find("p").is_closed)
        assert made.find("p").exit_code == 126

    asyncio.run(go())


def test_a_client_that_comes_again_and_again_leaves_nothing_behind(records: Records) -> None:
    async def go() -> None:
        attachment = Attachment(SESSION, records.call)
        former: list[Processes] = []
        for _ in range(100):
            attachment.begin_anew()
            attachment.processes.adopt([of("queued")], records.begin, on_session, "")
            former.append(attachment.processes)
            await asyncio.sleep(0)
        attachment.begin_anew()
        await until(lambda: not any(each._following for each in former))
        assert records.begun == []

    asyncio.run(go())


def test_who_cannot_ask_where_its_client_is_starts_nothing() -> None:
    async def away(work: Callable[[], Any], /) -> Any:
        raise OperationalError("away")

    async def go() -> None:
        attachment = Attachment(SESSION, away)
        attachment.mark = uuid4()
        await attachment.end()
        assert attachment.processes._is_muted

    asyncio.run(go())


def test_what_goes_on_when_the_service_stops_is_not_told_to_have_ended(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        found = of("running", pid=7)
        log = EventLog(run_limits())
        log.finish()
        resolve([log.closed])
        monkeypatch.setattr(module, "_end_of", records._next)
        records.said = [found.execution]
        made = adopted(records, replace(found, log=log))
        made.find("p").resume(0)
        await until(lambda: not made._following)
        assert records.said == []
        assert made.find("p").is_running

    asyncio.run(go())


def test_output_of_single_bytes_is_kept_in_a_bound() -> None:
    async def go() -> None:
        process = Process(Name("p"))
        for _ in range(2 * MOST_PIECES):
            process.put("stdout", b"x")
        read = process.read(Read(process_id="p"))
        assert len(read["chunks"]) == MOST_PIECES
        assert (read["chunks"][0]["seq"], read["nextSeq"]) == (MOST_PIECES + 1, 2 * MOST_PIECES + 1)
        process.put("stdout", bytes(KEPT_BYTES))
        assert len(process.read(Read(process_id="p"))["chunks"]) == 1

    asyncio.run(go())


def test_input_of_nothing_takes_no_memory_while_a_process_waits() -> None:
    async def go() -> None:
        process = Process(Name("p"))
        for _ in range(1000):
            process.hold(b"")
        process.hold(b"line\n")
        assert process.held == b"line\n"

    asyncio.run(go())
