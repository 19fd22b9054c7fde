"""What was accepted is run, whatever becomes of the broker, the workers and their keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django_q.brokers import get_broker
from django_q.tasks import async_task

from executions.runs.models import Execution
from executions.tenants.models import Tenant
from sandbox_site.task_queue import queue_name
from tests.conftest import Caller, require
from tests.support.broker import empty_queue, payloads
from tests.support.held import bounded
from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.running import run
from tests.support.servers import Servers, url_of_the_tests_database

ANSWER_SECONDS = 60


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Client:
    """Somebody with the key that `bootstrap` made."""

    def __init__(self, service: Service, key: str) -> None:
        self._url = f"{service.url}/api/v1/executions"
        self._key = key

    def call(self, path: str = "", body: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-API-Key": self._key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answered:
            read: dict[str, Any] = json.load(answered)
            return read

    def run_async(self, word: str) -> None:
        """Raises AssertionError unless it is accepted and then run."""
        accepted = self.call(body={"code": f"print({word!r})", "mode": "async"})
        assert accepted["status"] == "queued"
        shown = accepted

        def has_ended() -> bool:
            nonlocal shown
            shown = self.call(f"/{accepted['id']}")
            return shown["status"] not in ("queued", "running")

        wait_for(has_ended)
        assert (shown["status"], shown["stdout"]) == ("succeeded", f"{word}\n"), shown


def test_a_redis_that_hangs_or_is_gone_neither_refuses_nor_delays_a_job(
    own_servers: Servers, tmp_path: Path
) -> None:
    require("bwrap")
    data_dir = tmp_path / "data"
    environment = clean_environment(
        data_dir, PORT=str(free_port()), POOL_PORT=str(free_port()), **own_servers.environment
    )
    bootstrap = [sys.executable, "manage.py", "bootstrap"]
    subprocess.run(bootstrap, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (data_dir / "credentials.txt").read_text().splitlines()
    key = dict(line.split("=", 1) for line in lines)["API_KEY"]
    redis = own_servers.pid("redis")

    def up() -> AbstractContextManager[Service]:
        command = [sys.executable, "manage.py", "up"]
        return started(command, environment, ROOT, tmp_path / "log")

    with up() as service:
        service.wait_until_ready(90)
        client = Client(service, key)
        client.run_async("there")
        os.kill(redis, signal.SIGSTOP)
        client.run_async("hangs")
        os.kill(redis, signal.SIGKILL)
        client.run_async("gone")
    with up() as service:
        service.wait_until_ready(90)
        Client(service, key).run_async("never there")
        assert service.process.poll() is None


@contextmanager
def cluster(**extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """`manage.py qcluster` over the test's rows, in a process group of its own; killed at the end."""
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
        "DATABASE_URL": url_of_the_tests_database(),
        **extra,
    }
    worker = subprocess.Popen(
        [sys.executable, "manage.py", "qcluster"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield worker
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_a_cluster_that_is_killed_loses_nothing_that_it_had_not_begun(
    local_active: None, alice: Caller, charlie: Caller
) -> None:
    bounded(alice, max_running=0)
    for _ in range(5):
        run(alice, "print('hers')", mode="async")
    left = Execution.objects.filter(finished_at=None)
    with cluster():
        run(charlie, "print('his')", mode="async")
        # It works, and it has looked at hers as often as it did before it found his.
        wait_for(lambda: left.filter(tenant=charlie.tenant).count() == 0)
    assert left.filter(status="queued").count() == 5

    Tenant.objects.filter(pk=alice.tenant.pk).update(max_running=None)
    with cluster():
        wait_for(lambda: left.count() == 0)
    assert Execution.objects.filter(status="succeeded", stdout="hers\n").count() == 5


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_a_cluster_with_another_key_deletes_nobodys_task() -> None:
    another = "a key of somebody else that is as long as Django wants it to be"
    empty_queue()
    async_task("executions.tasks.give_space_back")
    ours = payloads()
    theirs = get_broker(queue_name(another))
    theirs.enqueue("what none of their keys has signed")
    with cluster(SECRET_KEY=another):
        # Takers of tasks go by the queue, so by now it would have taken ours.
        wait_for(lambda: theirs.queue_size() == 0 and not theirs.lock_size())
    assert payloads() == ours
    empty_queue()
