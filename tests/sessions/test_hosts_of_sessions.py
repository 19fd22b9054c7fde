"""Sessions at the pool services of several hosts: they stay where they are, move from a host that is
drained, and outlive one that is removed, with what is saved of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.ending import close
from executions.sessions.maintenance import MOVE_SECONDS, maintain
from executions.sessions.models import Session
from providers.leases import close_all
from providers.manager import manager
from providers.models import ProviderConfig
from providers.self_managed.hosts import key_of
from providers.services import activate, save_config
from tests.conftest import Caller
from tests.support.pool_service import PoolService, running
from tests.support.saved_files import actions, write
from tests.support.sessions import URL, aged, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("own_storage")]

Pools = tuple[PoolService, PoolService]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with ExitStack() as held:
        first, second = (
            held.enter_context(running(tmp_path_factory.mktemp(name) / "log"))
            for name in ("first", "second")
        )
        yield first, second


@pytest.fixture(autouse=True)
def _ended(transactional_db: None, pools: Pools) -> Iterator[None]:
    yield
    for session in Session.objects.filter(closed_at=None):
        run_sync(close(session, "a test"))
    assert background.wait_for_keyed_work()
    close_all()
    manager.close()
    for pool in pools:
        for each in pool.ask("GET", "/v1/sandboxes").body["sandboxes"]:
            pool.ask("DELETE", f"/v1/sandboxes/{each['ref']}")


def configure(*pools: PoolService | str, drained: PoolService | str = "", **settings: int) -> None:
    """The hosts of the provider, from now on."""

    def url(pool: PoolService | str) -> str:
        return pool if isinstance(pool, str) else pool.url

    config = {
        "endpoint": "\n".join(map(url, pools)),
        "drained": url(drained),
        "pool_size": 1,
        "max_sandboxes": 10,
        **settings,
    }
    save_config("self_managed", config)
    if not ProviderConfig.objects.filter(is_active=True).exists():
        activate("self_managed")
    manager.look_again()


def is_at(session: dict[str, Any], pool: PoolService | str) -> bool:
    url = pool if isinstance(pool, str) else pool.url
    return str(row(session).ref).startswith(f"{key_of(url)}.")


def opened_at(alice: Caller, pool: PoolService | str, **body: Any) -> dict[str, Any]:
    """A session at this one of the hosts. The emptier one is asked, so that it comes to be."""
    for _ in range(6):
        session = opened(alice, **body)
        if is_at(session, pool):
            return session
    raise AssertionError("no session was opened at this host")


def unused(session: dict[str, Any]) -> None:
    aged(session, used_at=MOVE_SECONDS + 10)


def state_of(session: dict[str, Any]) -> str:
    return str(row(session).state)


def test_it_moves_from_a_drained_host_when_it_is_unused(pools: Pools, alice: Caller) -> None:
    first, second = pools
    configure(first, second)
    moving, staying = opened_at(alice, first), opened_at(alice, second)
    for session in (moving, staying):
        assert cell(alice, session, write("f", "kept") + "; x = 1").status_code == 200
    configure(first, second, drained=first)

    maintain()
    # It was used just now: what its interpreter holds would be lost.
    assert state_of(moving) == "open"
    assert cell(alice, moving, "print(x)").json()["stdout"] == "1\n"

    unused(moving)
    unused(staying)
    maintain()
    assert (state_of(moving), state_of(staying)) == ("asleep", "open")
    woken = cell(alice, moving, "print(open('f').read(), 'x' in globals())").json()
    assert (woken["stdout"], woken["restored"]) == ("kept False\n", True)
    assert is_at(moving, second)
    version = ProviderConfig.objects.get(provider_id="self_managed").version
    assert row(moving).config_version == version
    assert actions(moving) == ["created", "opened", "asleep", "awake"]
    assert cell(alice, staying, "print(x)").json()["stdout"] == "1\n"
    for _ in range(2):
        assert is_at(opened(alice), second)
    assert background.wait_for_keyed_work()
    assert [str(finding) for finding in verify().findings] == []


def test_what_runs_keeps_it_there_and_so_does_a_command_in_the_background(
    pools: Pools, alice: Caller
) -> None:
    first, second = pools
    configure(first, second)
    running_one, serving = opened_at(alice, first), opened_at(alice, first)
    configure(first, second, drained=first)
    answers: list[Any] = []
    code = (
        "import os, time\nprint('on', flush=True)\nwhile not os.path.exists('go'): time.sleep(.01)"
    )
    thread = in_thread(lambda: answers.append(cell(alice, running_one, code)))
    wait_for(lambda: Execution.objects.filter(code=code, status="running").exists())
    started = alice.client.post(
        f"{URL}/{serving['id']}/processes", {"shell": "sleep 600", "background": True}
    )
    assert started.status_code == 201, started.content

    unused(running_one)
    unused(serving)
    maintain()
    assert (state_of(running_one), state_of(serving)) == ("open", "open")

    alice.client.put(
        f"{URL}/{running_one['id']}/files/content?path=go",
        b"",
        content_type="application/octet-stream",
    )
    thread.join(60)
    assert answers[0].json()["status"] == "succeeded"
    unused(running_one)
    maintain()
    assert state_of(running_one) == "asleep"


def test_the_only_host_is_replaced_by_another(pools: Pools, alice: Caller) -> None:
    """A session of the first list knows nothing of the host that it goes to."""
    first, second = pools
    configure(first)
    session = opened(alice)
    cell(alice, session, write("f", "kept"))
    configure(first, second)
    assert is_at(session, first)
    configure(first, second, drained=first)
    unused(session)
    maintain()
    assert state_of(session) == "asleep"
    configure(second)
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert is_at(session, second)


def test_it_goes_on_where_it_is_when_the_order_changes(pools: Pools, alice: Caller) -> None:
    first, second = pools
    configure(first, second)
    session = opened_at(alice, first)
    cell(alice, session, "x = 41")
    configure(second, first)
    unused(session)
    maintain()
    assert cell(alice, session, "print(x + 1)").json()["stdout"] == "42\n"
    assert is_at(session, first)


def test_a_host_that_is_removed_before_it_is_empty_is_emptied(pools: Pools, alice: Caller) -> None:
    first, second = pools
    configure(first, second)
    session = opened_at(alice, first)
    cell(alice, session, write("f", "kept") + "; x = 41")
    configure(second)
    # It is still reached by what its version of the configuration says.
    assert cell(alice, session, "print(x + 1)").json()["stdout"] == "42\n"
    unused(session)
    maintain()
    assert state_of(session) == "asleep"
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert is_at(session, second)


def test_a_dead_host_is_waited_for_until_it_is_removed(
    pools: Pools, alice: Caller, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 0.0)
    _, second = pools
    with running(tmp_path / "log") as dying:
        configure(dying, second)
        saved = opened_at(alice, dying, saves="answer")
        bare = opened_at(alice, dying, saves="never")
        closed = opened_at(alice, dying, saves="never")
        there = opened_at(alice, second)
        cell(alice, saved, write("f", "kept"))
        cell(alice, there, "x = 1")
        dying.service.process.kill()
        dying.service.process.wait(60)

    assert alice.client.delete(f"{URL}/{closed['id']}").status_code == 204
    refused = cell(alice, saved, "1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "SB003")
    maintain()
    assert (state_of(saved), state_of(bare)) == ("open", "open")
    assert row(closed).released_at is None
    # Others do not notice.
    assert cell(alice, there, "print(x)").json()["stdout"] == "1\n"
    assert is_at(opened(alice), second)

    configure(second)
    maintain()
    assert (state_of(saved), state_of(bare)) == ("asleep", "lost")
    # There is nothing left of it to be ended.
    assert row(closed).released_at is not None
    assert cell(alice, saved, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert is_at(saved, second)
    assert cell(alice, there, "print(x)").json()["stdout"] == "1\n"
    assert background.wait_for_keyed_work()
    assert [str(finding) for finding in verify().findings] == []


def test_the_only_host_of_its_list_dies_and_is_replaced(
    pools: Pools, alice: Caller, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no host of its list left, its version of the configuration cannot even be started."""
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 0.0)
    _, second = pools
    with running(tmp_path / "log") as dying:
        configure(dying)
        session = opened(alice, saves="answer")
        cell(alice, session, write("f", "kept"))
        dying.service.process.kill()
        dying.service.process.wait(60)
    maintain()
    assert state_of(session) == "open"
    configure(second)
    close_all()
    maintain()
    assert state_of(session) == "asleep"
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert is_at(session, second)


def test_two_tenants_share_two_hosts(pools: Pools, alice: Caller, charlie: Caller) -> None:
    """Beyond its own share a tenant's next session takes the place of one of its own, and of nobody
    else's."""
    configure(*pools, max_sandboxes=6, max_kept=3)
    theirs = [opened(charlie) for _ in range(2)]
    own = [opened(alice) for _ in range(6)]
    assert {state_of(session) for session in theirs} == {"open"}
    states = [state_of(session) for session in own]
    assert states.count("open") == 4
    assert states[-1] == "open"
    for session in theirs:
        assert cell(charlie, session, "print(1)").json()["stdout"] == "1\n"
