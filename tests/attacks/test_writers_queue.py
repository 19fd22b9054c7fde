"""Whoever can write to the queue's tables, or sign what lies in them, runs nothing in a worker."""

from __future__ import annotations

import base64
import os
import pickle
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django_q.models import Schedule
from django_q.signing import SignedPackage

from executions import tasks
from executions.runs.worker import ensure_schedules, recurring_tasks
from sandbox_site import cluster, keys
from sandbox_site.task_queue import queue_name
from sandbox_site.worker import TASKS, _Tasks, admitted
from tests.conftest import require
from tests.support.processes import ROOT, Service, clean_environment, free_port, started, web_server
from tests.support.site import bootstrapped, credentials

pytestmark = pytest.mark.database


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def attack(data_dir: Path, canaries: Path) -> None:
    """Every row that a hostile writer might think of, in one go."""

    def command(name: str) -> str:
        return f"touch {canaries / name}"

    schedules = [
        # func, hook, args, kwargs, name, intended_date_kwarg
        ("os.system", None, repr((command("schedule"),)), None, None, None),
        ("os.system", None, repr((command("sync"),)), "{'q_options': {'sync': True}}", "x", None),
        ("os.system", None, None, repr({"command": command("kwargs")}), "y", None),
        ("executions.tasks.index_new_code", "os.system", None, None, "z", None),
        (
            "os.system",
            None,
            repr((command("named"),)),
            None,
            next(iter(recurring_tasks())),
            "command",
        ),
        ("subprocess.getoutput", None, repr((command("getoutput"),)), None, "w", None),
        (
            "builtins.exec",
            None,
            repr((f"import os; os.system({command('exec')!r})",)),
            None,
            "v",
            None,
        ),
    ]
    result = base64.b64encode(zlib.compress(pickle.dumps(Evil(canaries / "unpickled")))).decode()
    plain = base64.b64encode(pickle.dumps(Evil(canaries / "unpickled-plain"))).decode()
    with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        database.executemany(
            "INSERT INTO django_q_schedule (func, hook, args, kwargs, name, intended_date_kwarg,"
            " schedule_type, repeats, next_run) VALUES (?, ?, ?, ?, ?, ?, 'O', -1, '2020-01-01')",
            schedules,
        )
        for number, text in enumerate((result, plain)):
            database.execute(
                "INSERT INTO django_q_task (id, name, func, hook, args, kwargs, result, started,"
                " stopped, success, attempt_count) VALUES (?, 'n', 'os.system', 'os.system', ?, ?, ?,"
                " '2020-01-01', '2020-01-01', 1, 1)",
                (f"{number:032}", text, text, text),
            )
        database.execute(
            "INSERT INTO django_q_ormq (key, payload, lock) VALUES (?, 'unsigned', '2020-01-01 00:00:00')",
            (queue_name(keys.read(data_dir)["SECRET_KEY"]),),
        )
        database.commit()


# What somebody with SECRET_KEY could sign: the names still decide nothing.
_SIGNED = """
import django; django.setup()
from django_q.tasks import async_task
import os
from tests.attacks.test_writers_queue import Evil
for options in ({}, {"sync": False, "hook": "os.system"}, {"cached": True}):
    async_task("os.system", "touch %s/signed", **options)
async_task(os.system, "touch %s/callable")
async_task("executions.tasks.index_new_code", hook="os.system", chain=[("os.system", ("touch %s/chain",), {})])
async_task("executions.ledger.append", "note", "x", {})
"""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Service, Service]]:
    """The web server and the worker."""
    require("bwrap")
    data_dir = tmp_path / "data"
    bootstrapped(data_dir)
    environment = clean_environment(data_dir, PORT=str(free_port()))
    work = [sys.executable, "-m", "tests.attacks.hurried_worker"]
    with (
        started(web_server(environment["PORT"]), environment, ROOT, tmp_path / "log") as web,
        started(work, environment, ROOT, tmp_path / "worker-log") as worker,
    ):
        web.wait_until_ready(90)
        yield web, worker


def wait_for(condition: Callable[[], bool], service: Service, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, service.output[-4000:]
        assert service.process.poll() is None, service.output[-4000:]
        time.sleep(0.2)


def test_rows_of_the_queue_run_nothing_and_the_worker_does_honest_work(
    serving: tuple[Service, Service], tmp_path: Path
) -> None:
    web, worker = serving
    canaries, data_dir = tmp_path / "canaries", tmp_path / "data"
    canaries.mkdir()
    attack(data_dir, canaries)
    signed = _SIGNED.replace("%s", str(canaries))
    environment = clean_environment(data_dir) | {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings"}
    subprocess.run([sys.executable, "-c", signed], env=environment, cwd=ROOT, check=True)

    def left(table: str, where: str) -> int:
        with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3", timeout=20)) as database:
            return int(
                database.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}").fetchone()[0]
            )

    # The scheduler has looked, and everything that was queued is done with.
    wait_for(lambda: not left("django_q_schedule", "name IN ('v', 'w', 'x', 'y', 'z')"), worker)
    wait_for(lambda: not left("django_q_ormq", "1"), worker)
    assert "does not belong to this service" in worker.output
    assert sorted(path.name for path in canaries.iterdir()) == []

    answer = run_async(web, credentials(data_dir)["API_KEY"])
    assert (answer["status"], answer["stdout"]) == ("succeeded", "honest\n"), worker.output[-4000:]
    assert sorted(path.name for path in canaries.iterdir()) == []


def run_async(service: Service, key: str) -> dict[str, Any]:
    import json
    import urllib.request

    def call(path: str, body: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            service.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-API-Key": key, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answered:
            read: dict[str, Any] = json.load(answered)
            return read

    queued = call("/api/v1/executions", {"code": "print('honest')", "mode": "async"})
    answer = queued

    def has_ended() -> bool:
        nonlocal answer
        answer = call(f"/api/v1/executions/{queued['id']}")
        return answer["status"] not in ("queued", "running")

    wait_for(has_ended, service)
    return answer


def test_only_functions_of_the_task_modules_are_tasks() -> None:
    assert set(recurring_tasks()) <= set(TASKS)
    assert "executions.tasks.check_ledger" in TASKS
    assert not any("append" in name or name.startswith("os") for name in TASKS)


@pytest.mark.parametrize(
    "task",
    [
        "STOP!",
        None,
        {},
        {"func": "os.system", "args": ("true",), "kwargs": {}},
        {"func": os.system, "args": (), "kwargs": {}},
        {"func": tasks.index_new_code, "args": (), "kwargs": {}},
        {"func": "executions.tasks.checkpoints", "args": (), "kwargs": {}},
        {"func": "executions.tasks.index_new_code", "args": (), "kwargs": {"x": 1}},
        {"func": "executions.tasks.check_ledger", "args": ([1],), "kwargs": {}},
        {"func": ["executions.tasks.index_new_code"], "args": (), "kwargs": {}},
    ],
)
def test_what_is_no_task_of_ours_is_not_admitted(task: Any) -> None:
    assert admitted(task) is None


def test_a_task_is_admitted_without_any_of_its_options() -> None:
    task = {"func": "executions.tasks.index_new_code", "args": (), "kwargs": {}, "ack_id": 7}
    options = {"hook": "os.system", "chain": [1], "cached": True, "sync": True, "timeout": 9**9}
    ours = admitted({**task, **options})
    assert ours is not None
    assert ours["func"] is tasks.index_new_code
    assert not options.keys() & ours.keys()
    assert ours["ack_id"] == 7


@pytest.mark.django_db
def test_schedules_of_others_are_removed_and_doubles_do_not_stop_the_start() -> None:
    name = next(iter(recurring_tasks()))
    for other in (name, name, "theirs", None):
        Schedule.objects.create(name=other, func="os.system", args="'x'", hook="os.system")
    ensure_schedules()
    ensure_schedules()
    assert {row.name for row in Schedule.objects.all()} == set(recurring_tasks())
    assert all(
        row.func == row.name and not row.hook and not row.args for row in Schedule.objects.all()
    )


class Broker:
    """A broker with these packages, which is away when it is told that one was dropped."""

    def __init__(self, *packages: Any) -> None:
        self.packages = list(enumerate(packages))

    def dequeue(self) -> list[tuple[int, Any]]:
        return [self.packages.pop(0)]

    def fail(self, ack_id: Any) -> None:
        raise ConnectionError


def test_what_nobody_can_read_is_dropped_and_the_next_task_is_done() -> None:
    ours = {"func": "executions.tasks.check_ledger", "args": (), "id": "1", "name": "one"}
    queue = _Tasks()
    queue.__dict__["_broker"] = Broker(b"\xff\xfe", "no signature", 7, SignedPackage.dumps(ours))
    assert queue.get()["func"] is tasks.check_ledger


class Ended:
    pid = 7

    def is_alive(self) -> bool:
        return False


def test_a_worker_that_has_ended_is_replaced_as_soon_as_that_is_possible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = cluster.Cluster(1)
    started: list[cluster._Worker] = []

    def start() -> cluster._Worker:
        if not started:
            started.append(cluster._Worker(Ended(), worker.timer))  # type: ignore[arg-type]
            raise BlockingIOError
        return started[0]

    worker = cluster._Worker(Ended(), cluster._FORK.Value("f", -2.0))  # type: ignore[arg-type]
    kept._workers = [worker]
    monkeypatch.setattr(kept, "_start_worker", start)
    kept._guard(0.5)
    assert kept._workers == [worker]
    kept._guard(0.5)
    assert kept._workers[0] is started[0]
    # It had done as many tasks as one does, which is no failure.
    assert not [each for each in caplog.records if each.levelname == "CRITICAL"]
