"""Kept sandboxes of the pool service: leases, bounds, clients that leave, and restarts."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
)
from providers.runtime.guest import wire
from providers.runtime.service import operations
from providers.runtime.service.settings import FIELDS
from providers.sandbox import KeptSandbox
from providers.schema import validate
from providers.self_managed.client import PoolClient, SandboxConnection
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Event, Job, SandboxLimits, SandboxSpec
from tests.support.pool_service import PoolService, name_of, provider_of, running
from tests.support.processes import free_port
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.pool_fixtures"]

UNTIL_TOLD = """\
import os, time
print('on', flush=True)
while not os.path.exists('go'): time.sleep(0.01)"""
MANY_FILES = """\
import os
os.mkdir('many')
for number in range(1000): open(f'many/{number:0200}', 'w').close()"""
LOOP = "print('on', flush=True)\nwhile True: pass"


@pytest.fixture
def provider(pool: PoolService) -> Iterator[SelfManagedProvider]:
    """Of its six sandboxes three may be kept."""
    with provider_of(pool.url, max_sandboxes=6) as provider:
        yield provider
        for each in described(pool):
            pool.ask("DELETE", f"/v1/sandboxes/{each['ref']}")


def keep(provider: SelfManagedProvider, owner: str = "alice", **spec: Any) -> KeptSandbox:
    sandbox = provider.open(SandboxSpec(kept=True, **spec), owner)
    assert isinstance(sandbox, KeptSandbox)
    return sandbox


def described(pool: PoolService) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.ask("GET", "/v1/sandboxes").body["sandboxes"]
    return found


def client_of(pool: PoolService) -> PoolClient:
    return PoolClient(pool.url, "", 0, validate(FIELDS, {}))


class RawRun:
    """A run whose client is here, and can leave."""

    def __init__(self, pool: PoolService, ref: str, code: str, *, detach: bool = False) -> None:
        url = urlsplit(pool.url)
        self._connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
        body = operations.run_to_frame(Job(code, timeout=30), detach=detach)
        self._connection.request("POST", f"/v1/sandboxes/{ref}/operations", body)
        self._answer = self._connection.getresponse()
        self._parser = wire.Parser(wire.REQUEST_LIMIT)

    def wait_for_output(self) -> None:
        while not any(header["event"] == "stdout" for header, _ in self._read()):
            continue

    def _read(self) -> list[Any]:
        data = self._answer.read1(1 << 16)
        assert data, "the answer has ended"
        return self._parser.feed(data)

    def leave(self) -> None:
        self._answer.close()
        self._connection.close()


def test_output_is_there_while_the_run_goes_on(provider: SelfManagedProvider) -> None:
    sandbox = keep(provider)
    heard: list[Event] = []

    def end_it(event: Event) -> None:
        heard.append(event)
        # What this run waits for is made only now.
        sandbox.files.write("go", [b""])

    result = sandbox.run(Job(UNTIL_TOLD, timeout=30), end_it)
    assert (result.exit_code, heard) == (0, [Event("stdout", b"on\n")])


def test_a_client_that_leaves_has_its_run_interrupted(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    sandbox = keep(provider)
    sandbox.run(Job("x = 42"))
    leaving = RawRun(pool, name_of(sandbox), LOOP)
    leaving.wait_for_output()
    leaving.leave()
    # It waits for the end of the other, which has no end but this.
    assert sandbox.run(Job("print(x)")).stdout == "42\n"


def test_an_interrupt_that_names_another_run_leaves_this_one(
    provider: SelfManagedProvider,
) -> None:
    sandbox = keep(provider)
    sandbox.run(Job("x = 42", run="ended"))
    answers: list[bool] = []

    def interrupt(event: Event) -> None:
        names = ("ended", "to come", "this") if not answers else ()
        answers.extend(sandbox.interrupt(run=name) for name in names)

    result = sandbox.run(Job(LOOP, timeout=30, run="this"), interrupt)
    assert (answers, result.exit_code) == ([False, False, True], 130)
    with pytest.raises(ProviderUnavailable, match="before it began") as refused:
        sandbox.run(Job("x = 0", run="to come"))
    assert refused.value.nothing_ran
    assert sandbox.run(Job("print(x)")).stdout == "42\n"


def test_a_detached_run_goes_on_without_its_client(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    sandbox = keep(provider)
    leaving = RawRun(pool, name_of(sandbox), f"{UNTIL_TOLD}\nx = 42", detach=True)
    leaving.wait_for_output()
    leaving.leave()
    sandbox.files.write("go", [b""])
    assert sandbox.run(Job("print(x)")).stdout == "42\n"


def test_a_lease_that_nobody_renews_ends_the_sandbox_and_a_busy_one_is_left(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    idle, busy, renewed = keep(provider, seconds=0.01), keep(provider), keep(provider)
    working = RawRun(pool, name_of(busy), LOOP)
    working.wait_for_output()
    busy.renew(0.01)
    wait_until(lambda: len(described(pool)) == 2, seconds=60)
    assert {each["ref"] for each in described(pool)} == {name_of(busy), name_of(renewed)}
    with pytest.raises(KeptSandboxLost):
        idle.run(Job("1"))
    working.leave()
    wait_until(lambda: len(described(pool)) == 1, seconds=60)


def test_kept_sandboxes_leave_room_for_single_runs(
    pool: PoolService, provider: SelfManagedProvider
) -> None:
    kept = [keep(provider, f"owner {number}") for number in range(3)]
    with pytest.raises(RateLimited, match="at most 3 can exist"):
        keep(provider, "another")
    with pytest.raises(RateLimited, match=name_of(kept[0])):
        keep(provider, "owner 0")
    single = provider.open(SandboxSpec(), "another")
    assert single.run(Job("print(1)")).stdout == "1\n"
    kept[0].close()
    wait_until(lambda: len(described(pool)) == 2, seconds=60)
    assert keep(provider, "another").run(Job("print(2)")).stdout == "2\n"


def test_what_is_asked_for_is_had_or_refused(provider: SelfManagedProvider) -> None:
    sandbox = keep(provider, limits=SandboxLimits(), environment={"NAME": "value"})
    assert sandbox.run(Job("import os; print(os.environ['NAME'])")).stdout == "value\n"
    with pytest.raises(InvalidConfiguration) as caught:
        keep(provider, limits=SandboxLimits(memory_bytes=1 << 20))
    assert caught.value.field == "memory_bytes"
    with pytest.raises(InvalidConfiguration) as caught:
        keep(provider, template="cobol")
    assert caught.value.field == "language"


def test_a_sandbox_is_not_anothers(pool: PoolService, provider: SelfManagedProvider) -> None:
    """Names cannot be guessed, and say whose they are to whoever may ask for all."""
    one, other = keep(provider, "alice"), keep(provider, "bob")
    one.run(Job("open('secret', 'w').write('x')"))
    assert other.files.stat("secret") is None
    owners = {each["ref"]: each["owner"] for each in described(pool)}
    assert owners == {name_of(one): "alice", name_of(other): "bob"}
    assert len(name_of(one)) > 25


def test_a_program_that_takes_all_memory_is_told_and_the_next_one_is_not_blamed(
    provider: SelfManagedProvider,
) -> None:
    sandbox = keep(provider)
    result = sandbox.run(Job("x = 'x' * (1 << 30)", timeout=60))
    assert (result.exit_code == 1 and "MemoryError" in result.stderr) or result.out_of_memory
    following = sandbox.run(Job("print(1)"))
    assert (following.stdout, following.out_of_memory) == ("1\n", False)


HOSTILE = {
    "nothing": b"",
    "no frame": b"\xff\xff\xff\xff",
    "half a frame": wire.pack({"op": "run"}, [])[:-3],
    "no operation": wire.pack({}, []),
    "an unknown operation": wire.pack({"op": "keep"}, []),
    "an operation of the protocol's own": wire.pack({"op": "close"}, []),
    "a list for a name": wire.pack({"op": ["run"]}, []),
    "an unknown field": wire.pack({"op": "file.stat", "path": "x", "id": 1}, []),
    "a run without code": wire.pack({"op": "run", "timeout": 1}, []),
    "a run without a time": wire.pack({"op": "run"}, [("code", b"1")]),
    "a run for ever": wire.pack({"op": "run", "timeout": 1e9}, [("code", b"1")]),
    "a run with too large limits": wire.pack(
        {"op": "run", "timeout": 1, "limits": {"output_bytes": 1 << 62}}, [("code", b"1")]
    ),
    "a run of what is no text": wire.pack({"op": "run", "timeout": 1}, [("code", b"\xff")]),
    "a file outside": wire.pack({"op": "run", "timeout": 1}, [("code", b"1"), ("file:../x", b"")]),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_bad_request_is_refused_and_the_sandbox_stays(
    pool: PoolService, provider: SelfManagedProvider, body: bytes
) -> None:
    sandbox = keep(provider)
    line = SandboxConnection(client_of(pool), name_of(sandbox))
    with pytest.raises(InvalidConfiguration), line.send(body) as frames:
        list(frames)
    assert sandbox.run(Job("print(1)")).stdout == "1\n"


def test_a_restart_of_the_service_is_told_as_lost_and_nothing_takes_its_place(
    tmp_path: Path,
) -> None:
    port = free_port()
    environment = {"SANDBOX_EXECUTOR_MANAGER_POOL_SIZE": "1"}
    with (
        running(tmp_path / "first", port=port, **environment) as first,
        provider_of(first.url) as provider,
    ):
        sandbox = keep(provider)
        first.terminate()
        with running(tmp_path / "second", port=port, **environment) as second:
            for call in (
                lambda: sandbox.run(Job("1")),
                lambda: sandbox.files.list(),
                lambda: provider.attach(sandbox.ref),
            ):
                with pytest.raises(KeptSandboxLost, match="was restarted"):
                    call()
            assert described(second) == []
            assert sandbox.close() is False


def test_whoever_holds_the_ref_has_the_sandbox_after_the_client_has_ended(
    pool: PoolService,
) -> None:
    with provider_of(pool.url, max_sandboxes=6) as provider:
        sandbox = keep(provider)
        sandbox.run(Job("x = 42"))
    with provider_of(pool.url, max_sandboxes=6) as another:
        attached = another.attach(sandbox.ref)
        assert attached.run(Job("print(x)")).stdout == "42\n"
        assert attached.close()


def test_a_configuration_of_before_is_attached_with_and_changes_nothing(
    provider: SelfManagedProvider, pool: PoolService
) -> None:
    sandbox = keep(provider)
    sandbox.run(Job("x = 41"))
    before = pool.stats()
    config = {"endpoint": pool.url, "pool_size": 7, "max_sandboxes": 9}
    former = SelfManagedProvider()
    former.initialize_to_attach(SelfManagedProvider.check_config(config))
    try:
        told = former.attach(sandbox.ref).run(Job("print(x + 1)"))
    finally:
        former.close()
    after = pool.stats()
    assert told.stdout == "42\n"
    assert [after[name] for name in ("size", "capacity")] == [
        before[name] for name in ("size", "capacity")
    ]


def test_a_folder_that_holds_more_than_is_listed_is_refused_and_goes_on(
    provider: SelfManagedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.self_managed.kept.LISTED_BYTES", 200_000)
    sandbox = keep(provider)
    assert sandbox.run(Job(MANY_FILES)).exit_code == 0
    with pytest.raises(InvalidConfiguration) as refused:
        sandbox.files.list("many")
    assert refused.value.field == "path"
    assert [entry.path for entry in sandbox.files.list()] == ["artifacts", "many"]
    assert sandbox.files.remove("many")
