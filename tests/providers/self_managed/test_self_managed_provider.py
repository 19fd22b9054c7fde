"""The self_managed provider: the pool service's client, and what it makes of its failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from providers.base import SandboxProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
)
from providers.self_managed.hosts import LOOK_SECONDS
from providers.self_managed.provider import SelfManagedProvider
from providers.values import InputFile, Job, RunLimits, SandboxSpec
from tests.support.pool_service import SLEEP, PoolService, provider_of, running
from tests.support.processes import free_port
from tests.support.sandboxes import long_enough

pytest_plugins = ["tests.support.pool_fixtures"]


@pytest.fixture
def provider(pool: PoolService) -> Iterator[SelfManagedProvider]:
    with provider_of(pool.url) as opened:
        yield opened


def run(provider: SandboxProvider, code: str, owner: str = "alice", **options: Any) -> Any:
    instance = provider.create_instance("python", owner=owner)
    try:
        return provider.execute_code(instance.instance_id, code, "python", **options)
    finally:
        provider.destroy_instance(instance.instance_id)


def test_a_run_with_all_that_goes_in_and_comes_out(provider: SelfManagedProvider) -> None:
    code = (
        "def main(n):\n"
        "    print('x' * 2000)\n"
        "    open('artifacts/copy.bin', 'wb').write(open('in.bin', 'rb').read())\n"
        "    return {'n': n}"
    )
    result = run(
        provider,
        code,
        arguments={"n": [1, None, "ü\u2028"]},
        files=[InputFile("in.bin", b"\0\xff")],
        limits=RunLimits(output_bytes=1000),
    )
    assert (result.has_result, result.result) == (True, {"n": [1, None, "ü\u2028"]})
    assert (result.stdout, result.stdout_truncated, result.exit_code) == ("x" * 1000, True, 0)
    [artifact] = result.artifacts
    assert (artifact.name, artifact.content) == ("copy.bin", b"\0\xff")
    assert result.metadata["runtime"] == "bubblewrap"


def test_verdicts_come_through(provider: SelfManagedProvider) -> None:
    code = "import time\nprint('p', flush=True)\ntime.sleep(60)"
    late = long_enough(
        lambda seconds: run(provider, code, timeout=seconds), lambda late: bool(late.stdout), 1
    )
    assert (late.timed_out, late.exit_code, late.stdout) == (True, None, "p\n")
    big = run(provider, "x = [bytearray(1 << 24) for _ in range(99)]", timeout=30)
    assert (big.out_of_memory, big.exit_code) == (True, None)
    assert run(provider, "import sys\nsys.exit(3)").exit_code == 3


def test_its_timeout_is_the_most_that_a_run_may_ask_for(pool: PoolService) -> None:
    with provider_of(pool.url, timeout=5) as short:
        assert short.max_timeout == 5.0
        assert run(short, "print(1)", timeout=5).stdout == "1\n"
        sandbox = short.open(SandboxSpec(), "alice")
        with pytest.raises(InvalidConfiguration) as raised:
            sandbox.run(Job("print(1)", timeout=5.1))
        assert (raised.value.field, raised.value.nothing_ran) == ("timeout", True)
        # It is there for another try.
        assert sandbox.run(Job("print(2)", timeout=1)).stdout == "2\n"
        sandbox.close()


def test_three_owners_at_once_each_have_their_own(provider: SelfManagedProvider) -> None:
    look = "import os\nprint(os.listdir('/tmp'))\nopen('/tmp/' + '{owner}', 'w').close()"

    def one(number: int) -> str:
        owner = ("alice", "bob", "charlie")[number % 3]
        return str(run(provider, look.replace("{owner}", owner), owner).stdout)

    with ThreadPoolExecutor(6) as executor:
        assert set(executor.map(one, range(12))) == {"[]\n"}


def test_an_instance_is_unknown_before_its_creation_and_after_its_end(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    instance = provider.create_instance("python", owner="alice")
    assert provider.destroy_instance(instance.instance_id) is True
    assert provider.destroy_instance(instance.instance_id) is False
    with pytest.raises(ProviderUnavailable) as raised:
        provider.execute_code(instance.instance_id, "print(1)", "python")
    assert raised.value.started is False
    pool.wait_for(lambda stats: stats["instances"] == 0)


def test_what_is_refused_names_the_field(provider: SelfManagedProvider) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        provider.create_instance("cobol", owner="alice")
    assert (raised.value.code, raised.value.field) == ("SB002", "language")
    with pytest.raises(InvalidConfiguration) as raised:
        run(provider, "print(1)", files=[InputFile("artifacts", b"")])
    assert raised.value.field == "files"


def test_settings_are_pushed_and_pushed_anew_to_a_service_that_was_started_again(
    tmp_path: Path,
) -> None:
    port = free_port()
    with running(tmp_path / "first", port=port) as first:
        context = provider_of(first.url, pool_size=3, max_memory="128m")
        provider = context.__enter__()
        assert first.stats()["size"] == 3
        first.wait_for(lambda stats: stats["idle"] == 3)
    try:
        with running(tmp_path / "second", port=port) as second:
            assert second.stats()["size"] == 10
            result = run(provider, "print('again')")
            assert result.stdout == "again\n"
            assert result.metadata["limits"]["memory_bytes"] == 128 << 20
            assert second.stats()["size"] == 3
    finally:
        context.__exit__(None, None, None)


def test_a_configuration_is_tried_without_coming_into_force(pool: PoolService) -> None:
    with provider_of(pool.url):
        before = pool.stats()
        tried = SelfManagedProvider()
        config = {"endpoint": pool.url, "pool_size": 7, "max_memory": "512m", "isolation": "tenant"}
        tried.initialize_apart(SelfManagedProvider.check_config(config))

        result = run(tried, "print(1)")

        assert result.stdout == "1\n"
        assert result.metadata["limits"]["memory_bytes"] == 512 << 20
        after = pool.stats()
        for name in ("size", "isolation", "capacity"):
            assert after[name] == before[name]
        assert tried.health_check()
        tried.close()
        pool.wait_for(lambda stats: stats["instances"] == 0 and stats["retired_pools"] == 0)


def test_a_configuration_that_cannot_be_had_is_told_by_the_try(pool: PoolService) -> None:
    tried = SelfManagedProvider()
    config = {"endpoint": pool.url, "require_gvisor": True, "max_retries": 0}
    tried.initialize_apart(SelfManagedProvider.check_config(config))
    with pytest.raises(ProviderUnavailable, match="gvisor"):
        run(tried, "print(1)")
    tried.close()
    pool.wait_for(lambda stats: stats["retired_pools"] == 0)
    assert pool.run(pool.create()).status == 200


def test_it_is_full_when_the_service_is_whoever_has_filled_it(pool: PoolService) -> None:
    with (
        provider_of(pool.url, max_sandboxes=2) as here,
        provider_of(pool.url, max_sandboxes=2) as there,
    ):
        assert not here.is_full()
        taken = [there.create_instance("python", owner="bob") for _ in range(2)]
        time.sleep(LOOK_SECONDS)
        assert here.is_full()
        for instance in taken:
            there.destroy_instance(instance.instance_id)
        pool.wait_for(lambda stats: stats["busy"] == 0)
        time.sleep(LOOK_SECONDS)
        assert not here.is_full()


def test_the_health_is_the_service_s(pool: PoolService, provider: SelfManagedProvider) -> None:
    pool.wait_for(lambda stats: stats["idle"] == 2)
    health = provider.health_check()
    assert health.healthy
    expected = {"size": 2, "busy": 0, "runtime": "bubblewrap", "launcher": "bubblewrap"}
    assert expected.items() <= health.details.items()
    shown = {"idle", "creating", "failing", "creation_ms", "restarts", "waiting"}
    assert shown <= set(health.details)
    assert "python" in provider.get_supported_languages()


def test_a_full_pool_is_sb008_with_when_to_come_again(pool: PoolService) -> None:
    config = {"pool_size": 1, "max_sandboxes": 1, "queue_timeout": 1}
    with provider_of(pool.url, **config) as provider:
        pool.wait_for(lambda stats: stats["idle"] == 1 and stats["creating"] == 0)
        taken = provider.create_instance("python", owner="alice")
        with pytest.raises(RateLimited) as raised:
            provider.create_instance("python", owner="bob")
        assert raised.value.code == "SB008"
        assert raised.value.retry_after is not None
        assert raised.value.started is False
        provider.destroy_instance(taken.instance_id)


def test_the_service_killed_during_a_run(tmp_path: Path) -> None:
    with running(tmp_path / "log") as pool, provider_of(pool.url) as provider:
        with ThreadPoolExecutor(1) as executor:
            running_code = executor.submit(run, provider, SLEEP, timeout=30)
            pool.wait_until_it_sleeps()
            pool.service.process.kill()
            with pytest.raises(ProviderUnavailable) as raised:
                running_code.result(60)
        assert (raised.value.code, raised.value.started) == ("SB009", True)
        assert not raised.value.may_retry
        health = provider.health_check()
        assert not health.healthy
        assert "does not answer" in health.message


def test_a_container_lost_before_its_run_is_replaced(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    instance = provider.create_instance("python", owner="alice")
    assert pool.ask("DELETE", f"/v1/instances/{instance.instance_id}").status == 204
    result = provider.execute_code(instance.instance_id, "print('once')", "python")
    assert result.stdout == "once\n"


def test_the_token_is_sent_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    with running(tmp_path / "log", POOL_TOKEN="the right one") as pool:
        with provider_of(pool.url, token="the right one") as provider:
            assert run(provider, "print(1)").stdout == "1\n"
        with pytest.raises(ConnectionFailed) as raised, provider_of(pool.url, token="a wrong one"):
            pass
        assert raised.value.code == "SB003"
        assert "token" in raised.value.message
        assert "a wrong one" not in f"{raised.value!r} {raised.value}"


def test_requests_share_kept_connections(provider: SelfManagedProvider, pool: PoolService) -> None:
    port = int(pool.url.rpartition(":")[2])

    def connections() -> set[str]:
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        remote = f"0100007F:{port:04X}"
        return {line.split()[1] for line in lines if line.split()[2:4] == [remote, "01"]}

    run(provider, "print(1)")
    before = connections()
    for _ in range(5):
        run(provider, "print(1)")
    assert connections() == before


@pytest.mark.parametrize(
    ("config", "field_name"),
    [
        ({"endpoint": "localhost:9385"}, "endpoint"),
        ({"endpoint": "ftp://localhost"}, "endpoint"),
        ({"endpoint": "http://user:secret@localhost"}, "endpoint"),
        ({"endpoint": "http://localhost:999999"}, "endpoint"),
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": 101}, "pool_size"),
        ({"timeout": 4}, "timeout"),
        ({"timeout": 301}, "timeout"),
        ({"max_memory": "3g"}, "max_memory"),
        ({"max_retries": -1}, "max_retries"),
        ({"preload": "numpy, 1x"}, "preload"),
    ],
)
def test_a_wrong_configuration_names_its_field(config: dict[str, Any], field_name: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        SelfManagedProvider.check_config(config)
    assert field_name in raised.value.message


def test_the_schema_has_the_documented_fields() -> None:
    schema = SelfManagedProvider.get_config_schema()
    assert schema["endpoint"]["required"] is True
    assert {"default": 10, "min": 1, "max": 100}.items() <= schema["pool_size"].items()
    assert schema["max_memory"]["default"] == "256m"
    assert {"128m", "256m", "512m", "1g"} <= set(schema["max_memory"]["options"])
    assert {"default": 30, "min": 5, "max": 300}.items() <= schema["timeout"].items()
    assert schema["max_retries"]["default"] == 3
    assert schema["token"]["secret"] is True
    assert SelfManagedProvider.check_config({})["endpoint"] == "http://127.0.0.1:9385"
