"""The log of a build grows while its programs print."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from executions.capabilities.templates.output import MOST_LINE_BYTES, Lines
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from providers.values import Event, RunLimits
from tests.support.template_door import TemplateDoor, template_door
from tests.support.waiting import wait_until

VERSION = "/templates/slow/versions/1"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateDoor]:
    with template_door(tmp_path_factory.mktemp("site")) as opened:
        yield opened


def log_of(door: TemplateDoor, place: str) -> str:
    return str(door.ask("GET", f"{place}/log")["log"])


def state_of(door: TemplateDoor, place: str) -> str:
    return str(door.ask("GET", place)["state"])


def test_the_log_has_what_the_resolver_prints_before_the_index_answers(door: TemplateDoor) -> None:
    answers = door.index.held["waited"] = threading.Event()
    door.index.add("waited")
    place = "/templates/waiting/versions/1"
    try:
        door.ask("POST", "/templates", name="waiting", declaration={"python": ["waited"]})
        wait_until(lambda: "uv pip compile" in log_of(door, place), 60)
        assert state_of(door, place) == "resolving"
    finally:
        answers.set()
    wait_until(lambda: state_of(door, place) == "ready", 60)
    assert log_of(door, place).count("uv pip compile") == 1
    assert "waited 1.0" in log_of(door, place)


def test_a_command_that_prints_and_goes_on_is_seen_and_can_be_cancelled(
    door: TemplateDoor,
) -> None:
    declared = {"run": ["echo a first line; printf 'no end of'; sleep 600"]}
    door.ask("POST", "/templates", name="slow", declaration=declared)
    wait_until(lambda: "\na first line\n" in log_of(door, VERSION), 60)
    assert state_of(door, VERSION) == "building"
    execution = door.ask("GET", VERSION)["execution"]
    assert door.ask("POST", f"{VERSION}/cancel")["state"] == "cancelled"
    assert door.ask("GET", f"/executions/{execution}")["status"] == Execution.Status.CANCELLED
    assert "a first line" in log_of(door, VERSION)


class Told:
    """What is told, and a run that ends when a test says so."""

    def __init__(self) -> None:
        self.log = EventLog(RunLimits())
        self.run: Future[Any] = Future()
        self.told: list[list[str]] = []
        self.lines = Lines(self.log, self._take, 0.01)
        # What happens next, once something was told.
        self.steps: list[Any] = []

    def _take(self, lines: Any) -> None:
        self.told.append(list(lines))
        if self.steps:
            self.steps.pop(0)()

    def prints(self, data: bytes) -> None:
        self.log.emit(Event("stdout", data))

    def warns(self) -> None:
        self.prints(b"o\n\n")
        self.log.emit(Event("stderr", b"warning\n"))

    def ends(self) -> None:
        self.run.set_result(None)


def test_lines_come_whole_in_their_order_and_once() -> None:
    told = Told()
    told.prints(b"one\ntw")
    told.steps = [told.warns, told.ends]
    told.lines.wait(told.run)
    assert [line for lines in told.told for line in lines] == ["one", "two", "warning"]
    told.prints(b"three\nfour")
    told.log.finish()
    assert told.lines.rest() == ["three", "four"]


def test_what_was_put_off_is_told_a_while_later() -> None:
    told = Told()
    told.prints(b"one\n")
    # The part of a line comes meanwhile.
    told.steps = [lambda: told.prints(b"tw"), lambda: None, told.ends]
    told.lines.wait(told.run)
    assert told.told == [["one"], [], []]


@pytest.mark.parametrize("end", ["set_result", "cancel"])
def test_a_silent_run_is_waited_for_until_its_end(end: str) -> None:
    told = Told()
    ends = {"set_result": told.ends, "cancel": told.run.cancel}
    thread = threading.Thread(target=ends[end])
    thread.start()
    told.lines.wait(told.run)
    thread.join(60)
    assert told.told == []
    assert told.lines.rest() == []


def test_a_line_without_an_end_is_cut() -> None:
    told = Told()
    told.prints(b"x" * 60_000)
    told.prints(b"\xff\n" + b"y" * 9)
    told.ends()
    told.lines.wait(told.run)
    first, second = told.lines.rest()
    assert (len(first), second) == (MOST_LINE_BYTES, "y" * 9)
