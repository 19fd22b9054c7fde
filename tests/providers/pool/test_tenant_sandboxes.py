"""Which sandboxes runs of an owner share, for how long, and what costs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings

from providers.runtime.launchers.unisolated import UnisolatedLauncher
from providers.runtime.pool.pool import PoolSettings
from tests.conftest import require
from tests.providers.pool.tenant_pools import SHARED, Pair
from tests.support.warm_pools import WarmPool, languages


@pytest.fixture
def pool() -> Iterator[WarmPool]:
    """A pool at the level `tenant` over bubblewrap, for one test alone."""
    require("bwrap")
    with WarmPool(SHARED) as pool:
        yield pool


def test_of_an_owners_sandboxes_the_one_used_last_is_taken_first(pool: WarmPool) -> None:
    held = [pool.acquire("alice") for _ in range(3)]
    for sandbox in held:
        pool.run_in(sandbox, "print(1)")
        pool.release(sandbox)
    assert pool.acquire("alice") is held[-1]


def test_a_sandbox_refuses_a_second_owner(pool: WarmPool) -> None:
    sandbox = pool.acquire("alice")
    with pytest.raises(ValueError, match="two owners"):
        sandbox.give_to("charlie", reusable=True)
    pool.release(sandbox)


def test_runs_without_an_owner_never_share(pool: WarmPool) -> None:
    pool.run("print(1)")
    pool.settle(busy=0, kept=0, idle=1, ending=0)
    assert pool.stats()["started"] == 2


def test_by_default_nothing_is_shared() -> None:
    require("bwrap")
    with WarmPool(PoolSettings(size=1, capacity=4)) as pool:
        pair = Pair(pool, "alice")
        for _ in range(3):
            pair.run("print(1)")
        assert len(set(pair.sandboxes)) == 3


def test_too_much_memory_costs_the_sandbox(pool: WarmPool) -> None:
    sandbox = pool.acquire("hungry")
    result = pool.run_in(sandbox, "kept = []\nwhile True: kept.append(b'x' * 5_000_000)")
    assert result.out_of_memory
    pool.release(sandbox)
    following = pool.acquire("hungry")
    assert following.number != sandbox.number
    assert not pool.run_in(following, "print(1)").out_of_memory
    pool.release(following)


def test_memory_and_time_are_those_of_the_run(pool: WarmPool) -> None:
    pool.run("x = bytearray(100_000_000); sum(range(3_000_000))", "alice")
    metadata = pool.run("print(1)", "alice").metadata
    assert metadata["memory_peak_bytes"] < 60_000_000
    assert metadata["cpu_seconds"] < 0.05


def test_a_kept_sandbox_makes_way_for_another_owner(pool: WarmPool) -> None:
    pool.resize(PoolSettings(size=1, capacity=1, isolation="tenant", patience=60))
    for owner in ("alice", "charlie", "alice"):
        assert pool.run(f"print('{owner}')", owner).stdout == f"{owner}\n"
    pool.settle(busy=0, ending=0)


def test_an_owner_with_many_callers_does_not_keep_the_others_waiting(pool: WarmPool) -> None:
    pool.resize(PoolSettings(size=1, capacity=1, isolation="tenant", patience=60))
    first = pool.acquire("greedy")
    served: list[str] = []

    def call(owner: str) -> None:
        sandbox = pool.acquire(owner)
        served.append(owner)
        pool.run_in(sandbox, "print(1)")
        pool.release(sandbox)

    calls = []
    for position, owner in enumerate(["greedy", "greedy", "greedy", "modest"]):
        calls.append(pool.in_background(call, owner))
        pool.settle(waiting=position + 1)
    pool.run_in(first, "print(1)")
    pool.release(first)
    for each in calls:
        each.result(60)
    assert served.index("modest") <= 1


def test_a_kept_sandbox_does_not_outlive_its_time(pool: WarmPool) -> None:
    pool.run("print(1)", "alice")
    pool.settle(kept=1)
    pool.resize(PoolSettings(size=1, capacity=4, isolation="tenant", max_lifetime=0.4))
    pool.settle(kept=0)


def test_changing_the_level_ends_what_is_kept(pool: WarmPool) -> None:
    pool.run("print(1)", "alice")
    pool.settle(kept=1)
    pool.resize(PoolSettings(size=1, capacity=4))
    pool.settle(kept=0, idle=1, ending=0)


def test_other_languages_share_as_well(pool: WarmPool) -> None:
    templates = languages(pool.launcher)
    code = {"bash": "echo $X; X=1; touch left; ls", "nodejs": "console.log(globalThis.x); x = 1"}
    with WarmPool(SHARED, templates) as both:
        for language in templates.keys() - {"python"}:
            first = both.run(code[language], "alice", language)
            assert first.exit_code == 0, first.stderr
            assert both.run(code[language], "alice", language).stdout == first.stdout
            assert both.stats()["templates"][language]["kept"] == 1


def test_without_isolation_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its guest never says that it is clean, for which each release waits.
    monkeypatch.setattr("providers.runtime.pool.sandbox.RENEWAL_SECONDS", 0.2)
    with WarmPool(SHARED, launcher=UnisolatedLauncher(settings.DATA_DIR)) as pool:
        pair = Pair(pool, "alice")
        pair.run("print(1)")
        pair.run("print(1)")
        assert not pair.shared_one
