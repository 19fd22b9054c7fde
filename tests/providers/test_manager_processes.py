"""Every process has a provider of its own, and takes up the changes that another one saves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connection

from providers.manager import ProviderManager
from providers.services import save_config
from tests.support.managers import GOOD, configure, eventually, leased

pytest_plugins = ["tests.support.manager_fixtures"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]


def in_a_fork(check: Callable[[], bool]) -> bool:
    """Whether `check` holds in a forked child. It ends without running this process's exit."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Closing an inherited connection could end the parent's: put it aside instead.
            inherited, connection.connection = connection.connection, None
            code = 0 if check() and inherited else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_starts_its_own_provider(manager: ProviderManager, probe: Any) -> None:
    configure()
    with manager.lease() as inherited:

        def check() -> bool:
            own = leased(manager)[1]
            manager.close()
            return own.pid == os.getpid() and not inherited.provider.closed  # type: ignore[attr-defined]

        assert in_a_fork(check)
    assert leased(manager)[1] is inherited.provider
    assert len(probe.started) == 1


def test_a_process_forked_inside_a_lease_leaves_the_parents_provider_alone(
    manager: ProviderManager, probe: Any
) -> None:
    configure()

    def check() -> bool:
        lease.__exit__(None, None, None)
        time.sleep(0.2)
        return not probe.closed and leased(manager)[1].pid == os.getpid()

    lease = manager.lease()
    lease.__enter__()
    save_config("probe", GOOD | {"size": 5})
    assert eventually(lambda: leased(manager)[0] == 2)
    assert in_a_fork(check)
    lease.__exit__(None, None, None)
    assert eventually(lambda: len(probe.closed) == 1)


def test_a_process_forked_while_a_provider_starts_is_not_stuck(
    manager: ProviderManager, probe: Any, threads: Any
) -> None:
    probe.gate.clear()
    configure(behaviour="wait")
    starting = threads(lambda: leased(manager)[0])
    assert eventually(lambda: len(probe.started) == 1)

    def check() -> bool:
        probe.gate = threading.Event()
        probe.gate.set()
        return leased(manager)[0] == 1

    assert in_a_fork(check)
    probe.gate.set()
    assert starting.result(60) == 1


# What a worker process does: it leases all the time and tells of each version it sees.
WATCHER = """
import sys, time
from django.conf import settings
settings.DATABASES["default"]["NAME"] = sys.argv[1]
sys.path[:0] = sys.argv[2:]
import django
django.setup()
from providers.manager import manager
seen = None
while True:
    with manager.lease() as lease:
        if lease.config_version != seen:
            seen = lease.config_version
            print(seen, lease.provider.config["size"], flush=True)
    time.sleep(0.01)
"""


def test_another_process_takes_up_a_change(probe: Any) -> None:
    configure(size=1)
    folder = Path(probe.__file__).parent
    database = django_settings.DATABASES["default"]["NAME"]
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(database), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": os.environ["DJANGO_SETTINGS_MODULE"]},
    )
    assert watcher.stdout is not None
    try:
        assert watcher.stdout.readline().split() == ["1", "1"]
        for version in (2, 3):
            save_config("probe", GOOD | {"size": version})
            saved = time.monotonic()
            assert watcher.stdout.readline().split() == [str(version), str(version)]
            assert time.monotonic() - saved < 60
    finally:
        watcher.kill()
        watcher.wait()
