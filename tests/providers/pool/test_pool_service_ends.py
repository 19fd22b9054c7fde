"""`manage.py pool` that is told to end, or is killed: its callers are told, and nothing is left of it."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.pool_service import SLEEP, PoolService, assert_error, disconnected_run, running
from tests.support.processes import free_port

pytest_plugins = ["tests.support.pool_fixtures"]


def assert_nothing_survives(pool: PoolService) -> None:
    deadline = time.monotonic() + 60
    while pool.service.survivors() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pool.service.survivors() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_what_runs_and_tells_its_caller(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path / "log") as pool, ThreadPoolExecutor(1) as executor:
        answer = executor.submit(pool.run, pool.create(), SLEEP, timeout=60)
        pool.wait_until_it_sleeps()
        pool.service.process.send_signal(number)
        wait_until_draining(pool)
        pool.service.process.send_signal(number)
        code, _ = pool.service.wait_for_end()
        assert code == 0, pool.service.output
        assert pool.service.survivors() == []
        assert_error(answer.result(), 503, "SB009", started=True)


def test_what_runs_when_its_grace_is_over_is_ended_and_its_caller_told(tmp_path: Path) -> None:
    with (
        running(tmp_path / "log", SHUTDOWN_GRACE_SECONDS="1") as pool,
        ThreadPoolExecutor(1) as executor,
    ):
        answer = executor.submit(pool.run, pool.create(), SLEEP, timeout=60)
        pool.wait_until_it_sleeps()
        code, _ = pool.terminate()
        assert code == 0, pool.service.output
        assert_error(answer.result(), 503, "SB009", started=True)


def test_what_was_lent_can_be_used_when_it_is_told_to_end_and_nothing_more_is_lent(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "log") as pool:
        lent = pool.create()
        pool.service.look()
        pool.service.process.send_signal(signal.SIGTERM)
        wait_until_draining(pool)
        assert_error(pool.ask("POST", "/v1/instances", {}), 503, "SB009", started=False)
        assert pool.ragflow("def main(): pass").body["exit_code"] == -3
        assert pool.run(lent, "print(1)").body["stdout"] == "1\n"
        code, _ = pool.service.wait_for_end()
        assert code == 0, pool.service.output
        assert pool.service.survivors() == []


def wait_until_draining(pool: PoolService) -> None:
    deadline = time.monotonic() + 60
    while pool.ask("GET", "/healthz").status != 503:
        assert time.monotonic() < deadline


def test_kill_9_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path / "log", port=port) as pool:
        with disconnected_run(pool, pool.create(), SLEEP) as connection:
            pool.wait_until_it_sleeps()
            pool.service.process.kill()
            pool.service.wait_for_end()
            assert connection.recv(1000) == b""
        assert_nothing_survives(pool)
    with running(tmp_path / "second", port=port) as again:
        assert again.run(again.create()).body["stdout"] == "ran\n"
