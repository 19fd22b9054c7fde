"""The pool keeps as many sandboxes as it was told, all of them alive and none of them old."""

from __future__ import annotations

import os
import signal

import pytest

from providers.errors import ProviderUnavailable
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.template import Template
from tests.conftest import require
from tests.support.sandboxes import children, family, started_by, thread_of, wait_until_gone
from tests.support.waiting import wait_until
from tests.support.warm_pools import WarmPool, languages


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require("bwrap")


def test_a_pool_grows_and_shrinks_to_its_settings() -> None:
    with WarmPool(PoolSettings(size=1, capacity=10)) as pool:
        pool.settle(idle=1, creating=0)
        pool.resize(PoolSettings(size=5, capacity=10))
        pool.settle(idle=5, creating=0)
        pool.resize(PoolSettings(size=2, capacity=10))
        pool.settle(idle=2, creating=0, ending=0)


def test_resizing_drops_nothing_that_runs_and_nobody_who_waits() -> None:
    with WarmPool(PoolSettings(size=4, capacity=4, patience=60)) as pool:
        pool.settle(idle=4)
        busy = [pool.acquire() for _ in range(4)]
        runs = [
            pool.in_background(
                lambda sandbox: pool.run_in(sandbox, "import time; time.sleep(0.4); print('done')"),
                sandbox,
            )
            for sandbox in busy
        ]
        waiting = pool.in_background(pool.run, "print('waited')")
        pool.settle(waiting=1)
        pool.resize(PoolSettings(size=1, capacity=1, patience=60))
        assert pool.stats()["busy"] == 4
        assert [run.result(60).stdout for run in runs] == ["done\n"] * 4
        for sandbox in busy:
            pool.release(sandbox)
        assert waiting.result(60).stdout == "waited\n"
        pool.settle(idle=1, busy=0, creating=0, ending=0)


def test_a_language_is_kept_warm_once_it_was_asked_for() -> None:
    with WarmPool(PoolSettings(size=2, capacity=10)) as probe:
        templates = languages(probe.launcher)
    with WarmPool(PoolSettings(size=2, capacity=10), templates) as pool:
        pool.settle(idle=2, creating=0)
        assert pool.run("echo 1", template="bash").stdout == "1\n"
        pool.settle(idle=4, creating=0)
    with WarmPool(PoolSettings(size=2, minimum=1, capacity=10), templates) as pool:
        pool.settle(idle=1 + len(templates), creating=0)


def test_more_are_kept_warm_after_somebody_had_to_wait() -> None:
    with WarmPool(PoolSettings(size=1, burst=3, capacity=10)) as pool:
        pool.settle(idle=1, creating=0)
        one, two = pool.acquire(), pool.acquire()
        pool.settle(idle=4, creating=0)
        assert pool.stats()["templates"]["python"]["target"] == 4
        pool.release(one)
        pool.release(two)


def _first_processes(pool: WarmPool) -> set[int]:
    """Find process 1 of every bubblewrap sandbox of a pool: the children of its zygotes."""
    zygotes = {pid for tool in started_by(thread_of(pool.loop)) for pid in children(tool)}
    return {pid for zygote in zygotes for pid in children(zygote)}


def test_a_sandbox_that_dies_while_idle_is_replaced() -> None:
    with WarmPool(PoolSettings(size=2, capacity=4)) as pool:
        pool.settle(idle=2, creating=0)
        first = _first_processes(pool)
        assert len(first) == 2
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pool.stats()["restarts"] == 2, seconds=60)
        assert pool.run("print('alive')").stdout == "alive\n"
        pool.settle(idle=2, creating=0, ending=0, restarts=2)


def test_what_is_warm_for_too_long_is_replaced() -> None:
    with WarmPool(PoolSettings(size=2, capacity=4, max_lifetime=0.3)) as pool:
        wait_until(lambda: pool.stats()["expired"] >= 4, seconds=60)
        # What is handed out may also be unused for no longer.
        pool.resize(PoolSettings(size=2, capacity=4, patience=60))
        assert pool.run("print('young')").stdout == "young\n"


def test_what_was_handed_out_and_never_used_is_taken_back() -> None:
    with WarmPool(PoolSettings(size=1, capacity=1, patience=60, max_lifetime=0.3)) as pool:
        forgotten = pool.acquire("forgetful")
        pool.settle(busy=0)
        pool.resize(PoolSettings(size=1, capacity=1, patience=60))
        assert pool.run("print('next')", "other").stdout == "next\n"
        with pytest.raises(ProviderUnavailable) as refusal:
            pool.run_in(forgotten, "print('too late')")
        assert not refusal.value.started
        pool.release(forgotten)
        pool.settle(busy=0)


def test_a_long_run_is_not_taken_for_a_forgotten_sandbox() -> None:
    with WarmPool(PoolSettings(size=1, capacity=1, patience=60)) as pool:
        sandbox = pool.acquire()
        run = pool.in_background(pool.run_in, sandbox, "import time; time.sleep(1); print('done')")
        wait_until(lambda: sandbox.running, seconds=60)
        pool.resize(PoolSettings(size=1, capacity=1, max_lifetime=0.1))
        assert run.result(60).stdout == "done\n"
        pool.release(sandbox)


def test_releasing_twice_changes_nothing() -> None:
    with WarmPool() as pool:
        sandbox = pool.acquire()
        pool.release(sandbox)
        pool.release(sandbox)
        pool.settle(idle=1, busy=0, ending=0)


def test_a_sandbox_takes_one_request_only() -> None:
    with WarmPool() as pool:
        sandbox = pool.acquire("somebody")
        assert pool.run_in(sandbox, "print(1)").stdout == "1\n"
        with pytest.raises(ProviderUnavailable) as refusal:
            pool.run_in(sandbox, "print(2)")
        assert not refusal.value.started
        pool.release(sandbox)


def test_the_figures_tell_how_starting_goes() -> None:
    templates = {"first": Template("python", "python"), "second": Template("bash", "bash")}
    with WarmPool(PoolSettings(size=2, capacity=4), templates) as pool:
        pool.settle(idle=2, creating=0)
        stats = pool.stats()
        assert stats["runtime"] == "bubblewrap"
        assert stats["isolation"] == "execution"
        assert 1 < stats["creation_ms"] < 60_000
        assert (stats["started"], stats["failed"], stats["failing"]) == (2, 0, [])
        assert set(stats["templates"]) == {"first", "second"}
        assert stats["templates"]["first"]["idle"] == 2
        assert stats["templates"]["second"]["creation_ms"] is None


def test_closing_ends_everything_and_refuses_who_waits() -> None:
    pool = WarmPool(PoolSettings(size=1, capacity=1, patience=60))
    pool.settle(idle=1)
    sandbox = pool.acquire()
    code = "import time; time.sleep(600)"
    run = pool.in_background(lambda: pool.run_in(sandbox, code, timeout=600))
    wait_until(lambda: sandbox.running, seconds=60)
    waiting = pool.in_background(pool.acquire)
    pool.settle(waiting=1)
    tools = started_by(thread_of(pool.loop))
    running = tools.union(*map(family, tools))
    assert running
    with pool:
        pass
    # Neither has waited for its end.
    assert isinstance(run.exception(60), ProviderUnavailable)
    assert waiting.exception(60) is not None
    wait_until_gone(running)
