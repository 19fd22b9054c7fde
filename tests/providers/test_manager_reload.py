"""The active provider: taken up by itself, in every thread and process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connection

from providers.errors import ConnectionFailed, NotInitialized, ProviderUnavailable
from providers.manager import ProviderManager
from providers.models import ProviderConfig
from providers.services import activate, save_config
from tests.support.managers import GOOD, TOKEN, configure, eventually, leased

pytest_plugins = ["tests.support.manager_fixtures"]

CHECK_SECONDS = 0.1
# After so long the next lease looks whether something was changed.
LOOKED_AT = CHECK_SECONDS + 0.02

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]


@pytest.fixture
def manager() -> Iterator[ProviderManager]:
    made = ProviderManager(check_seconds=CHECK_SECONDS)
    yield made
    made.close()


def test_without_an_active_provider_there_is_no_lease(manager: ProviderManager) -> None:
    save_config("local", {})
    with pytest.raises(NotInitialized, match="admin"), manager.lease():
        pass
    assert manager.warm() is False


def test_a_lease_names_what_serves(manager: ProviderManager, probe: Any) -> None:
    configure(size=7)
    with manager.lease() as lease:
        assert (lease.provider_id, lease.config_version) == ("probe", 1)
        assert lease.provider is probe.started[0]
        assert probe.started[0].config["size"] == 7
        assert TOKEN not in repr(lease)


def test_leases_share_one_instance_and_ask_the_database_rarely(
    probe: Any, django_assert_num_queries: Any
) -> None:
    manager = ProviderManager(check_seconds=60)
    configure()
    assert manager.warm() is True
    with django_assert_num_queries(0), manager.lease(), manager.lease():
        pass
    # As if the time were over.
    manager._next_check = 0.0
    with django_assert_num_queries(1), manager.lease():
        pass
    assert len(probe.started) == 1
    manager.close()


def test_a_saved_change_is_taken_up(manager: ProviderManager, probe: Any) -> None:
    configure()
    leased(manager)
    save_config("probe", GOOD | {"size": 5})
    assert eventually(lambda: leased(manager)[0] == 2, 60)
    assert probe.started[-1].config["size"] == 5


def test_another_active_provider_is_taken_up(manager: ProviderManager, probe: Any) -> None:
    configure()
    leased(manager)
    ProviderConfig.objects.filter(provider_id="probe").update(is_active=False)

    def is_refused() -> bool:
        try:
            leased(manager)
        except NotInitialized:
            return True
        return False

    assert eventually(is_refused, 60)
    assert eventually(lambda: probe.closed == probe.started)
    activate("probe")
    assert eventually(lambda: not is_refused(), 60)


def test_what_runs_finishes_on_the_old_provider_which_is_then_closed(
    manager: ProviderManager, probe: Any
) -> None:
    configure()
    with manager.lease() as old:
        save_config("probe", GOOD | {"size": 5})
        assert eventually(lambda: leased(manager)[0] == 2)
        time.sleep(0.1)
        assert not old.provider.closed  # type: ignore[attr-defined]
    assert eventually(lambda: probe.closed == [old.provider])
    assert leased(manager)[1] is not old.provider


def test_nothing_new_runs_on_the_old_provider_while_the_new_one_starts(
    manager: ProviderManager, probe: Any, threads: Any
) -> None:
    configure()
    leased(manager)
    probe.gate.clear()
    save_config("probe", GOOD | {"behaviour": "wait"})
    time.sleep(LOOKED_AT)
    first = threads(lambda: leased(manager)[0])
    assert eventually(lambda: len(probe.started) == 2)
    others = [threads(lambda: leased(manager)[0]) for _ in range(6)]
    time.sleep(0.1)
    assert not any(future.done() for future in [first, *others])
    probe.gate.set()
    assert {future.result(60) for future in [first, *others]} == {2}
    assert len(probe.started) == 2


def test_closing_the_old_provider_blocks_nobody(
    manager: ProviderManager, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure()
    held = threading.Event()
    monkeypatch.setattr(probe.Probe, "close", lambda self: held.wait(60))
    with manager.lease():
        save_config("probe", GOOD | {"size": 5})
        assert eventually(lambda: leased(manager)[0] == 2)
    # While it is held.
    assert leased(manager)[0] == 2
    assert not held.is_set()
    held.set()


def test_a_provider_that_does_not_start_serves_nobody_and_the_old_one_neither(
    manager: ProviderManager, probe: Any
) -> None:
    configure()
    old = leased(manager)[1]
    save_config("probe", GOOD | {"behaviour": "refuse"})
    time.sleep(LOOKED_AT)
    caught = []
    for _ in range(3):
        with pytest.raises(ConnectionFailed, match="cannot be reached") as refusal:
            leased(manager)
        caught.append(refusal.value)
    assert (caught[0].code, caught[0].field) == ("SB003", "endpoint")
    assert caught[0] is not caught[1]
    assert len(probe.started) == 2
    assert eventually(lambda: probe.closed == [old])


def test_a_failed_start_is_tried_again_after_a_while(probe: Any) -> None:
    manager = ProviderManager(check_seconds=0.05, retry_seconds=0.4)
    configure(behaviour="refuse")
    began = time.monotonic()
    while len(probe.started) < 3 and time.monotonic() - began < 30:
        with pytest.raises(ConnectionFailed):
            leased(manager)
        time.sleep(0.01)
    assert len(probe.started) == 3
    assert time.monotonic() - began >= 2 * 0.4


def test_a_corrected_configuration_is_taken_up_without_waiting_for_the_retry(
    manager: ProviderManager, probe: Any
) -> None:
    configure(behaviour="refuse")
    with pytest.raises(ConnectionFailed):
        leased(manager)
    save_config("probe", GOOD)
    time.sleep(LOOKED_AT)
    assert leased(manager)[0] == 2


def test_a_change_is_taken_up_while_a_former_one_still_starts(
    manager: ProviderManager, probe: Any, threads: Any
) -> None:
    probe.gate.clear()
    configure(behaviour="wait")
    stuck = threads(lambda: leased(manager)[0])
    assert eventually(lambda: len(probe.started) == 1)
    waiting = threads(lambda: leased(manager)[0])
    save_config("probe", GOOD)
    time.sleep(LOOKED_AT)
    assert leased(manager)[0] == 2
    assert waiting.result(60) == 2
    probe.gate.set()
    assert stuck.result(60) == 2
    assert eventually(lambda: probe.closed == [probe.started[0]])


def test_whoever_waits_for_a_start_does_not_wait_for_ever(probe: Any, threads: Any) -> None:
    manager = ProviderManager(load_seconds=0.3)
    probe.gate.clear()
    configure(behaviour="wait")
    starting = threads(lambda: leased(manager)[0])
    assert eventually(lambda: len(probe.started) == 1)
    with pytest.raises(ProviderUnavailable, match="still starting"):
        leased(manager)
    probe.gate.set()
    assert starting.result(60) == 1
    manager.close()


def test_a_stored_configuration_that_no_longer_fits_is_not_the_callers_mistake(
    manager: ProviderManager, probe: Any
) -> None:
    ProviderConfig.objects.create(provider_id="probe", config=GOOD | {"dropped": 1}, is_active=True)
    with pytest.raises(NotInitialized, match="dropped: Unknown field") as caught:
        leased(manager)
    assert (caught.value.http_status, caught.value.may_fall_back) == (503, True)
    assert probe.started == []


def test_a_provider_that_is_not_installed_cannot_serve(manager: ProviderManager) -> None:
    ProviderConfig.objects.create(provider_id="gone", config={}, is_active=True)
    with pytest.raises(NotInitialized, match="no provider 'gone'"):
        leased(manager)


def test_a_provider_that_returns_false_did_not_start(manager: ProviderManager, probe: Any) -> None:
    configure(behaviour="no")
    with pytest.raises(NotInitialized, match="did not start"):
        leased(manager)


def test_a_crash_at_the_start_is_reported_without_the_secret(
    manager: ProviderManager, probe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    configure(behaviour="crash")
    with pytest.raises(NotInitialized, match="RuntimeError") as caught:
        leased(manager)
    assert "no luck with ••••" in caplog.text
    assert TOKEN not in caplog.text + str(caught.value)
    assert caught.value.__cause__ is None


def test_a_lost_key_is_named(manager: ProviderManager, probe: Any, settings: Any) -> None:
    configure()
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(NotInitialized, match="FERNET_KEYS"):
        leased(manager)


def refuse_database(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    raise OperationalError("the server is gone")


def test_without_a_database_what_is_loaded_goes_on(
    manager: ProviderManager, probe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    configure()
    leased(manager)
    with connection.execute_wrapper(refuse_database), caplog.at_level(logging.ERROR):
        for _ in range(2):
            time.sleep(LOOKED_AT)
            assert leased(manager)[0] == 1
    assert caplog.text.count("the server is gone") == 1
    save_config("probe", GOOD | {"size": 5})
    assert eventually(lambda: leased(manager)[0] == 2, 60)


def test_without_a_database_and_nothing_loaded_there_is_no_lease(
    manager: ProviderManager, probe: Any
) -> None:
    configure()
    with (
        connection.execute_wrapper(refuse_database),
        pytest.raises(ProviderUnavailable, match="database"),
    ):
        leased(manager)
    assert leased(manager)[0] == 1


def test_close_ends_what_serves_and_what_is_leased(manager: ProviderManager, probe: Any) -> None:
    configure()
    with manager.lease() as lease:
        manager.close()
        assert probe.closed == [lease.provider]
    manager.close()
    assert probe.closed == [lease.provider]
    assert leased(manager)[1] is probe.started[1]


def test_close_waits_for_those_that_are_being_closed(
    manager: ProviderManager, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure()
    leased(manager)
    ended = []

    def close(self: Any) -> None:
        time.sleep(0.2)
        ended.append(self)

    monkeypatch.setattr(probe.Probe, "close", close)
    save_config("probe", GOOD | {"size": 5})
    assert eventually(lambda: leased(manager)[0] == 2)
    manager.close()
    assert set(ended) == set(probe.started)


def test_a_provider_that_fails_to_close_disturbs_nobody(
    manager: ProviderManager, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure()
    leased(manager)
    monkeypatch.setattr(probe.Probe, "close", lambda self: 1 / 0)
    save_config("probe", GOOD | {"size": 5})
    assert eventually(lambda: leased(manager)[0] == 2)
    manager.close()


def test_under_load_nobody_holds_a_closed_provider(probe: Any, threads: Any) -> None:
    manager = ProviderManager(check_seconds=0.02)
    configure()
    stop = threading.Event()

    at = [0] * 8

    def use(number: int) -> int:
        seen: set[int] = set()
        last = 0
        while not stop.is_set():
            with manager.lease() as lease:
                time.sleep(0.002)
                assert not lease.provider.closed  # type: ignore[attr-defined]
                assert lease.provider.config["size"] == lease.config_version  # type: ignore[attr-defined]
                assert lease.config_version >= last
                at[number] = last = lease.config_version
                seen.add(last)
        return len(seen)

    save_config("probe", GOOD | {"size": 2})
    users = [threads(partial(use, number)) for number in range(8)]

    def all_have_seen(size: int) -> bool:
        return set(at) == {size} or any(user.done() for user in users)

    try:
        for size in range(3, 8):
            assert eventually(partial(all_have_seen, size - 1), 60)
            save_config("probe", GOOD | {"size": size})
        assert eventually(partial(all_have_seen, 7), 60)
    finally:
        stop.set()
    assert [user.result(60) for user in users] == [6] * 8
    manager.close()
    assert set(probe.closed) == set(probe.started)
