"""SIGTERM to `manage.py up`: what runs is finished and answered, or ended, recorded and answered."""

from __future__ import annotations

import contextlib
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.support.raw_http import Answer, ask, connect, read, request
from tests.support.site import EXECUTIONS, Prepared, Site, prepare, serving, sleeper


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    require("bwrap")
    return prepare(tmp_path_factory.mktemp("stopping") / "data")


@contextmanager
def asked(site: Site, count: int, body: dict[str, Any]) -> Iterator[list[socket.socket]]:
    """So many callers, each of whom waits for a run of his own."""
    sent = request("POST", EXECUTIONS, body, key=site.alice)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(site.service, sent)) for _ in range(count)]


def rows(data_dir: Path, *columns: str) -> list[tuple[Any, ...]]:
    """These columns of what was recorded, the oldest first."""
    return select(data_dir, f"SELECT {', '.join(columns)} FROM executions_execution ORDER BY id")


def select(data_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        return database.execute(query).fetchall()


def enqueue(site: Site, seconds: float) -> str:
    body = {**sleeper(seconds), "mode": "async"}
    answer = ask(site.service, "POST", EXECUTIONS, body, key=site.alice)
    assert answer.status == 202, answer.body
    return str(answer.json["id"]).replace("-", "")


def assert_ended_by_us(answer: Answer) -> None:
    assert (answer.status, answer.json["error"]["code"]) == (503, "SB009"), answer
    assert "stopped during the run" in answer.json["error"]["message"]
    assert answer.json["id"]


def assert_all_ended_by_us(site: Site, newest: int) -> None:
    """So many of the newest runs were, and nothing is open."""
    found = rows(site.data_dir, "status", "error_code", "retryable")
    assert found[-newest:] == [("error", "SB009", 0)] * newest
    assert {status for status, *_ in found} <= {"succeeded", "error"}


def test_what_runs_is_finished_and_answered_and_ended_when_its_grace_is_over(
    prepared: Prepared, tmp_path: Path
) -> None:
    with (
        serving(prepared, tmp_path / "log", Q_WORKERS="1", Q_THREADS="1") as site,
        asked(site, 8, sleeper(6)) as callers,
    ):
        first = enqueue(site, 6)
        site.wait_for_running(9)
        second = enqueue(site, 0)
        site.service.process.send_signal(signal.SIGTERM)
        answers = [read(caller) for caller in callers]
        code, _ = site.service.wait_for_end()
    assert [answer.status for answer in answers] == [200] * 8, site.service.output
    assert {answer.json["status"] for answer in answers} == {"succeeded"}
    assert {answer.headers["connection"] for answer in answers} == {"close"}
    assert code == 0, site.service.output
    # Nobody has to find its processes dead.
    alive = "SELECT kind FROM executions_process WHERE ended_at IS NULL AND kind != 'command'"
    assert select(prepared.data_dir, alive) == []
    found = dict(rows(prepared.data_dir, "id", "status"))
    # Nothing is begun any more, and so nothing is lost: the next worker runs it.
    assert (found.pop(first), found.pop(second)) == ("succeeded", "queued")
    assert set(found.values()) <= {"succeeded", "error"}
    with serving(prepared, tmp_path / "again", SHUTDOWN_GRACE_SECONDS="1") as site:
        deadline = time.monotonic() + 60
        while dict(rows(prepared.data_dir, "id", "status"))[second] != "succeeded":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert_what_is_over_its_grace_is_ended(site)


def assert_what_is_over_its_grace_is_ended(site: Site) -> None:
    """It is recorded and answered, too."""
    with asked(site, 8, sleeper(60)) as callers, asked(site, 1, sleeper(60)) as leaving:
        enqueue(site, 60)
        site.wait_for_running(10)
        leaving[0].close()
        site.service.process.send_signal(signal.SIGTERM)
        answers = [read(caller) for caller in callers]
    code, _ = site.service.wait_for_end()
    for answer in answers:
        assert_ended_by_us(answer)
    assert code == 0, site.service.output
    assert_all_ended_by_us(site, newest=10)


def test_a_second_signal_ends_what_runs_now(prepared: Prepared, tmp_path: Path) -> None:
    with serving(prepared, tmp_path / "log") as site, asked(site, 2, sleeper(60)) as callers:
        enqueue(site, 60)
        site.wait_for_running(3)
        site.service.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while "Stopping; waiting for web and worker" not in site.service.output:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert site.running() == 3
        site.service.process.send_signal(signal.SIGINT)
        answers = [read(caller) for caller in callers]
        code, _ = site.service.wait_for_end()
    for answer in answers:
        assert_ended_by_us(answer)
    assert code == 0, site.service.output
    assert_all_ended_by_us(site, newest=3)
