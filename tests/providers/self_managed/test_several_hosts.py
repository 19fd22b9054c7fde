"""One provider over the pool services of several hosts: which is asked, and what becomes of one
that is full, dead, silent, drained or removed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from providers.errors import (
    InvalidConfiguration,
    KeptFull,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.sandbox import KeptSandbox
from providers.self_managed import hosts
from providers.self_managed.client import Handle, PoolClient
from providers.self_managed.hosts import Host, Hosts, key_of
from providers.self_managed.provider import PoolSandbox, SelfManagedProvider
from providers.services.health import figures_of
from providers.values import Job, SandboxSpec
from tests.providers.self_managed.test_self_managed_retries import PUSHED, Scripted
from tests.support.pool_service import SLEEP, PoolService, provider_of, running
from tests.support.processes import free_port
from tests.support.waiting import wait_until

SMALL = {"pool_size": 1, "max_sandboxes": 5, "queue_timeout": 1}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PoolService, PoolService]]:
    """Two services that the tests of this module share."""
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as held:
        first, second = (
            held.enter_context(running(folder / name / "log")) for name in _made(folder, "a", "b")
        )
        yield first, second


def _made(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir()
    return list(names)


@contextmanager
def over(*pools: PoolService | str, **config: Any) -> Iterator[SelfManagedProvider]:
    """The provider of these services, by their addresses in this order."""
    with provider_of(listed(*pools), **{**SMALL, **config}) as provider:
        try:
            yield provider
        finally:
            for handle in _taken.pop(id(provider), []):
                with suppress(SandboxError):  # its host may be one that has died
                    hosts_of(provider).destroy(handle)


# What `taken` has taken of each provider.
_taken: dict[int, list[Handle]] = {}


def listed(*pools: PoolService | str) -> str:
    return "\n".join(pool if isinstance(pool, str) else pool.url for pool in pools)


def hosts_of(provider: SelfManagedProvider) -> Hosts:
    backend = provider.backend()
    assert isinstance(backend, Hosts)
    return backend


def host_at(provider: SelfManagedProvider, pool: PoolService | str) -> Host:
    address = pool if isinstance(pool, str) else pool.url
    return next(host for host in hosts_of(provider).all if host.address == address)


def look(provider: SelfManagedProvider) -> None:
    for host in hosts_of(provider).all:
        host.look()


def taken(provider: SelfManagedProvider, owner: str = "alice", **spec: Any) -> Handle:
    """A single sandbox of this owner, and where it is."""
    handle = hosts_of(provider).create(SandboxSpec(**spec), owner)
    _taken.setdefault(id(provider), []).append(handle)
    return handle


def kept(provider: SelfManagedProvider, owner: str = "alice") -> KeptSandbox:
    sandbox = provider.open(SandboxSpec(kept=True), owner)
    assert isinstance(sandbox, KeptSandbox)
    return sandbox


def wait_until_unused(*pools: PoolService) -> None:
    for pool in pools:
        pool.wait_for(lambda stats: stats["busy"] == 0 and stats["idle"] > 0)


Pools = tuple[PoolService, PoolService]


def test_a_ref_of_a_release_that_had_one_host_is_of_the_only_one(pools: Pools) -> None:
    with over(pools[0]) as provider:
        sandbox = kept(provider)
        sandbox.run(Job("x = 41"))
        former = sandbox.ref.partition(".")[2]
        assert provider.standing_of(former) == "stays"
        attached = provider.attach(former)
        assert attached.ref == sandbox.ref
        assert attached.run(Job("print(x + 1)")).stdout == "42\n"
        assert attached.close()
    wait_until_unused(*pools)


def test_sandboxes_are_at_both_and_each_runs_where_it_is(pools: Pools) -> None:
    with over(*pools) as provider:
        wait_until_unused(*pools)
        look(provider)
        handles = [taken(provider, f"owner {number}") for number in range(4)]
        assert Counter(handle.host for handle in handles) == {key_of(p.url): 2 for p in pools}
        for number, handle in enumerate(handles):
            result = hosts_of(provider).run(handle, Job(f"print({number})"))
            assert result.stdout == f"{number}\n"
    wait_until_unused(*pools)


def test_the_emptier_one_is_asked(pools: Pools) -> None:
    first, second = pools
    with over(*pools) as provider, provider_of(first.url, **SMALL) as other:
        wait_until_unused(*pools)
        sandboxes = [other.open(SandboxSpec(), f"owner {number}") for number in range(3)]
        look(provider)
        handles = [taken(provider) for _ in range(2)]
        assert {handle.host for handle in handles} == {key_of(second.url)}
        for sandbox in sandboxes:
            sandbox.close()
    wait_until_unused(*pools)


def test_a_full_one_is_passed_over_and_all_are_full_when_each_is(pools: Pools) -> None:
    first, second = pools
    with over(*pools) as provider, provider_of(first.url, **SMALL) as other:
        wait_until_unused(*pools)
        sandboxes = [other.open(SandboxSpec(), f"owner {number}") for number in range(5)]
        look(provider)
        assert host_at(provider, first).is_full
        assert not provider.is_full()
        handles = [taken(provider, f"owner {number}") for number in range(5)]
        assert {handle.host for handle in handles} == {key_of(second.url)}
        look(provider)
        assert provider.is_full()
        began = time.monotonic()
        with pytest.raises(RateLimited) as refused:
            taken(provider, "another")
        # In one queue, and not in one after the other.
        assert time.monotonic() - began < 1.9
        assert (refused.value.code, refused.value.started) == ("SB008", False)
        for sandbox in sandboxes:
            sandbox.close()
    wait_until_unused(*pools)


def test_one_that_has_become_full_since_sends_its_callers_on(pools: Pools) -> None:
    """Where its queue refuses them at once; what is known of it says that it is free."""
    first, second = pools
    with (
        over(*pools, queue_size=1, queue_timeout=30) as provider,
        over(first, queue_size=1, queue_timeout=30) as other,
        ThreadPoolExecutor(1) as executor,
    ):
        wait_until_unused(*pools)
        look(provider)
        sandboxes = [other.open(SandboxSpec(), f"owner {number}") for number in range(5)]
        waits = executor.submit(other.open, SandboxSpec(), "waits")
        first.wait_for(lambda stats: stats["waiting"] == 1)
        handles = [taken(provider, f"owner {number}") for number in range(3)]
        assert {handle.host for handle in handles} == {key_of(second.url)}
        for sandbox in sandboxes:
            sandbox.close()
        waits.result(60).close()
    wait_until_unused(*pools)


def test_a_tenant_has_its_share_of_all_of_them_and_leaves_the_rest(pools: Pools) -> None:
    """Each pool bounds what a tenant has of it, and together that bounds what it has of all."""
    with over(*pools) as provider:
        wait_until_unused(*pools)
        look(provider)
        alices: list[Handle] = []
        with pytest.raises(RateLimited):
            while True:
                look(provider)
                alices.append(taken(provider, "alice"))
        assert Counter(handle.host for handle in alices) == {key_of(p.url): 4 for p in pools}
        look(provider)
        bobs = [taken(provider, "bob") for _ in range(2)]
        assert {handle.host for handle in bobs} == {key_of(p.url) for p in pools}
    wait_until_unused(*pools)


def test_kept_sandboxes_of_two_tenants_have_their_shares_of_both(pools: Pools) -> None:
    config = {"max_sandboxes": 8, "max_kept": 5}
    with over(*pools, **config) as provider:
        alices: list[KeptSandbox] = []
        with pytest.raises(KeptFull):
            while True:
                alices.append(kept(provider, "alice"))
        assert len(alices) == 8
        bobs = [kept(provider, "bob") for _ in range(2)]
        with pytest.raises(KeptFull):
            kept(provider, "bob")
        places = Counter(sandbox.ref.partition(".")[0] for sandbox in (*alices, *bobs))
        assert places == {key_of(p.url): 5 for p in pools}
        for sandbox in (*alices, *bobs):
            sandbox.close()
    wait_until_unused(*pools)


def test_a_host_that_dies_during_a_run_has_run_it_once(pools: Pools, tmp_path: Path) -> None:
    _, second = pools
    with running(tmp_path / "log") as dying, over(dying, second) as provider:
        look(provider)
        handle = next(h for h in _endless(provider) if h.host == key_of(dying.url))
        sandbox = PoolSandbox(provider, SandboxSpec(), "alice", handle)
        started = second.stats()["instances"]
        with ThreadPoolExecutor(1) as executor:
            code = executor.submit(sandbox.run, Job(SLEEP, timeout=30))
            dying.wait_until_it_sleeps()
            dying.service.process.kill()
            with pytest.raises(ProviderUnavailable) as raised:
                code.result(60)
        assert (raised.value.code, raised.value.started) == ("SB009", True)
        assert not raised.value.may_retry
        assert second.stats()["instances"] == started
        # Others go on, at the other host.
        for _ in range(3):
            assert _run(provider, "print('on')") == "on\n"
        health = provider.health_check()
        assert health.healthy
        states = {each["address"]: each["state"] for each in health.details["hosts"]}
        assert states == {dying.url: "not answering", second.url: "ready"}


def _endless(provider: SelfManagedProvider) -> Iterator[Handle]:
    """Sandboxes one after the other; the pools end those that are not used."""
    for number in range(20):
        yield taken(provider, f"owner {number}")


def _run(provider: SelfManagedProvider, code: str) -> str:
    sandbox = provider.open(SandboxSpec(), "alice")
    try:
        return sandbox.run(Job(code)).stdout
    finally:
        sandbox.close()


def test_a_run_whose_host_died_before_it_goes_to_another(pools: Pools, tmp_path: Path) -> None:
    _, second = pools
    with running(tmp_path / "log") as dying, over(dying, second) as provider:
        look(provider)
        handle = next(h for h in _endless(provider) if h.host == key_of(dying.url))
        sandbox = PoolSandbox(provider, SandboxSpec(), "alice", handle)
        dying.service.process.kill()
        dying.service.process.wait(60)
        assert sandbox.run(Job("print('once')")).stdout == "once\n"


def test_a_dead_one_does_not_keep_the_provider_from_starting_and_comes_back(
    pools: Pools, tmp_path: Path
) -> None:
    _, second = pools
    port = free_port()
    dead = f"http://127.0.0.1:{port}"
    with over(dead, second) as provider:
        assert provider.health_check().healthy
        assert not host_at(provider, dead).is_alive
        assert {taken(provider).host for _ in range(3)} == {key_of(second.url)}
        with running(tmp_path / "log", port=port) as back:
            # Nobody but a request has it looked at again, when it was left alone long enough.
            def is_back() -> bool:
                hosts_of(provider).destroy(taken(provider))
                return host_at(provider, dead).is_alive

            wait_until(is_back, seconds=60)
            back.wait_for(lambda stats: stats["idle"] > 0)
            look(provider)
            handle = next(h for h in _endless(provider) if h.host == key_of(dead))
            assert hosts_of(provider).run(handle, Job("print('back')")).stdout == "back\n"


def test_all_of_them_dead_is_said_as_of_one() -> None:
    with pytest.raises(SandboxError) as raised, over(*_dead(2), max_retries=0):
        pass
    assert (raised.value.code, raised.value.started) == ("SB003", False)


def _dead(count: int) -> list[str]:
    return [f"http://127.0.0.1:{free_port()}" for _ in range(count)]


def test_a_silent_one_is_passed_over_until_it_answers(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, and answers nothing but its settings."""
    _, second = pools
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 60.0)
    silent = Scripted(lambda _, request: PUSHED if request.startswith(b"PUT") else None)
    with silent as url, over(url, second) as provider:
        host = host_at(provider, url)
        assert host.is_alive
        stats = host.client.stats
        monkeypatch.setattr(host.client, "stats", lambda _: stats(0.2))
        look(provider)
        assert not host.is_alive
        asked = silent.count(b"POST")
        for _ in range(5):
            assert _run(provider, "print(1)") == "1\n"
        assert silent.count(b"POST") == asked


def test_nobody_waits_for_figures_that_are_looked_at(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(*pools) as provider:
        wait_until_unused(*pools)
        look(provider)
        goes_on, looks = Event(), Event()
        host = host_at(provider, pools[0])
        stats = host.client.stats

        def slow(seconds: float) -> dict[str, Any]:
            looks.set()
            assert goes_on.wait(60)
            return stats(seconds)

        monkeypatch.setattr(host.client, "stats", slow)
        monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.0)
        taken(provider)
        assert looks.wait(60)
        taken(provider, "bob")
        assert not goes_on.is_set()
        goes_on.set()
    wait_until_unused(*pools)


def test_of_many_two_are_compared_and_the_rest_is_left_to_chance() -> None:
    """Whoever always takes the emptiest of all sends every caller there at once."""
    several = Hosts([_known(f"http://10.0.0.{n}", busy=n) for n in range(1, 6)], 0)
    chosen = Counter(several._order()[0].address for _ in range(2000))
    # One that has four emptier ones is never better than the other; the emptiest one is 2 of 5.
    assert set(chosen) == {f"http://10.0.0.{n}" for n in range(1, 5)}
    assert 600 < chosen["http://10.0.0.1"] < 1000


def _known(address: str, busy: int) -> Host:
    config = SelfManagedProvider.check_config({})
    host = Host(address, PoolClient(address, "", 0, config))
    host.ask(lambda: {"healthy": True, "capacity": 10, "busy": busy, "waiting": 0})
    host._told_at += 60
    return host


def test_one_that_is_asked_and_has_not_answered_yet_is_passed_over(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(*pools) as provider:
        look(provider)
        host = host_at(provider, pools[0])
        assert host.is_alive
        monkeypatch.setattr(hosts, "LATE_SECONDS", -1.0)
        alive: list[bool] = []

        def ask() -> dict[str, Any]:
            alive.append(host.is_alive)
            return host.client.stats()

        host.ask(ask)
        assert alive == [False]
        assert host.is_alive


def test_a_drained_one_gets_nothing_new_and_keeps_what_it_has(pools: Pools) -> None:
    first, second = pools
    with over(*pools) as before:
        sandboxes = [kept(before, f"owner {number}") for number in range(3)]
        there = next(s for s in sandboxes if s.ref.startswith(key_of(first.url)))
        there.run(Job("x = 41"))
        assert before.standing_of(there.ref) == "stays"
    with over(*pools, drained=first.url) as provider:
        assert {taken(provider).host for _ in range(3)} == {key_of(second.url)}
        assert provider.standing_of(there.ref) == "moves"
        assert provider.attach(there.ref).run(Job("print(x + 1)")).stdout == "42\n"
        details = provider.health_check().details
        told = {each["address"]: each for each in details["hosts"]}
        assert told[first.url]["state"] == "drained"
        assert told[first.url]["sessions"] == first.stats()["sessions"] >= 1
        assert details["capacity"] == second.stats()["capacity"]
        for sandbox in sandboxes:
            provider.attach(sandbox.ref).close()
    wait_until_unused(*pools)


def test_a_sandbox_is_found_in_a_list_of_another_order_and_lost_in_one_without_it(
    pools: Pools,
) -> None:
    first, second = pools
    with over(first, second) as before:
        sandboxes = [kept(before, f"owner {number}") for number in range(3)]
        there = next(s for s in sandboxes if s.ref.startswith(key_of(first.url)))
        there.run(Job("x = 41"))
    with over(second, first) as turned:
        assert turned.attach(there.ref).run(Job("print(x + 1)")).stdout == "42\n"
        assert turned.standing_of(there.ref) == "stays"
    with over(second) as removed:
        assert removed.standing_of(there.ref) == "gone"
        with pytest.raises(KeptSandboxLost, match="removed") as lost:
            removed.attach(there.ref)
        assert lost.value.nothing_ran
    with over(first, second) as again:
        for sandbox in sandboxes:
            assert again.attach(sandbox.ref).close()
    wait_until_unused(*pools)


def test_a_ref_leads_to_no_address_that_is_not_configured(pools: Pools) -> None:
    stranger = Scripted(lambda _, __: PUSHED)
    with stranger as url, over(*pools) as provider:
        real = kept(provider)
        name = real.ref.partition(".")[2]
        for forged in (
            f"{key_of(url)}.{name}",
            f"{url}.{name}",
            f"{url}/v1/sandboxes/{name}",
            f".{name}",
            name,
            "",
            f"{pools[0].url}.{name}",
        ):
            assert provider.standing_of(forged) == ("gone" if "." in forged else "stays")
            with pytest.raises(KeptSandboxLost):
                provider.attach(forged)
        # What follows the host is a name at its service, whatever it looks like.
        key = key_of(pools[0].url)
        for path in ("../stats", "../../healthz", f"@{url}", f"{name}/operations"):
            with pytest.raises(SandboxError):
                provider.attach(f"{key}.{path}")
        assert stranger.requests == []
        real.close()
    wait_until_unused(*pools)


def test_credentials_that_change_are_told_to_all(pools: Pools) -> None:
    with over(*pools) as provider:
        provider.change_credentials({"one": None})
    with over(*_dead(1), pools[1], max_retries=0) as provider:
        # Who revokes one hears that somebody may still have it.
        with pytest.raises(SandboxError) as raised:
            provider.change_credentials({"one": None})
        assert raised.value.code == "SB003"


def test_the_figures_are_those_of_all_and_of_each(pools: Pools) -> None:
    with over(*pools) as provider:
        wait_until_unused(*pools)
        health = provider.health_check()
        assert health.healthy
        assert health.details["capacity"] == 10
        assert {each["state"] for each in health.details["hosts"]} == {"ready"}
        figures = figures_of(health.details)
        assert (figures["capacity"], figures["runtime"]) == (10, "bubblewrap")
        assert [each["address"] for each in figures["hosts"]] == [pool.url for pool in pools]
        assert "python" in provider.get_supported_languages()


def test_what_a_service_says_of_itself_is_reduced_to_figures() -> None:
    said = {
        "capacity": 1,
        "hosts": [
            {
                "address": "http://a.example",
                "state": "ready",
                "problem": "x" * 10_000,
                "busy": "<script>",
                "capacity": float("nan"),
                "sessions": 3,
                "runtime": "<b>",
                "more": 1,
            },
            "no host",
        ],
    }
    (host,) = figures_of(said)["hosts"]
    assert host == {
        "address": "http://a.example",
        "state": "ready",
        "problem": "x" * 300,
        "sessions": 3,
    }


A, B = "http://127.0.0.1:9385", "http://127.0.0.1:9386"


@pytest.mark.parametrize(
    ("config", "field", "problem"),
    [
        ({"endpoint": f"{A}\nnonsense"}, "endpoint", "address such as"),
        ({"endpoint": f"{A}\n{A}/"}, "endpoint", "twice"),
        ({"endpoint": f"{A}\nhttp://10.0.0.1:9385"}, "endpoint", "https"),
        ({"endpoint": f"{A}\nhttp://me:secret@127.0.0.1"}, "endpoint", "address such as"),
        ({"endpoint": A, "drained": B}, "drained", "not among"),
        ({"endpoint": f"{A}\n{B}", "drained": f"{B}\n{A}"}, "drained", "one host"),
        (
            {"endpoint": "\n".join(f"http://127.0.0.1:{n}" for n in range(1000, 1033))},
            "endpoint",
            "at most",
        ),
    ],
)
def test_a_wrong_list_names_its_field(config: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem) as raised:
        SelfManagedProvider.check_config(config)
    assert field in raised.value.message


def test_a_host_that_is_stopped_takes_nothing_more(pools: Pools, tmp_path: Path) -> None:
    """It answers while it finishes what runs, and refuses what is new."""
    _, second = pools
    with running(tmp_path / "log") as stopping, over(stopping, second) as provider:
        look(provider)
        handle = next(h for h in _endless(provider) if h.host == key_of(stopping.url))
        with ThreadPoolExecutor(1) as executor:
            code = executor.submit(hosts_of(provider).run, handle, Job(SLEEP, timeout=30))
            stopping.wait_until_it_sleeps()
            stopping.service.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "shutting down" in _problem(provider, stopping), seconds=60)
            assert {taken(provider, str(n)).host for n in range(3)} == {key_of(second.url)}
            stopping.service.process.kill()
            with pytest.raises(ProviderUnavailable):
                code.result(60)


def _problem(provider: SelfManagedProvider, pool: PoolService) -> str:
    host = host_at(provider, pool)
    host.look()
    return host.problem
