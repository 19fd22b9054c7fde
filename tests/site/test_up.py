"""`manage.py up`: everything starts together and ends together, whatever ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.processes import (
    ROOT,
    STOP_SECONDS,
    Service,
    clean_environment,
    command_line,
    free_port,
    started,
)
from tests.support.site import MANAGE, prepare

UP = (*MANAGE, "up")
ONE_WORKER = {"Q_WORKERS": "1"}
# Of the worker with one worker process.
PROCESSES = 2
# What an idle service with its usual settings consists of, its sandboxes apart. Each process more
# costs every installation its memory (`make bench` prints it).
IDLE = {
    "up": 1,
    "gunicorn": 2,
    "qcluster": 3,
    "pool": 1,
    "executions.runs.standby_process": 3,
}
# Of whoever does not end by itself, which is waited for.
IMPATIENT = """
import os
import django
os.environ["DJANGO_SETTINGS_MODULE"] = "sandbox_site.settings"
django.setup()
from django.core.management import execute_from_command_line
from providers import draining
from sandbox_site.management.commands import up
draining.ENDING_SECONDS = up.EXIT_SECONDS = 0.5
execute_from_command_line(["manage.py", "up"])
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("up") / "data"
    prepare(path)
    return path


def up(
    data_dir: Path, tmp_path: Path, command: Sequence[str] = UP, **extra: str
) -> AbstractContextManager[Service]:
    environment = clean_environment(data_dir, PORT=str(free_port()), **ONE_WORKER, **extra)
    return started(command, environment, ROOT, tmp_path / "log")


@contextmanager
def working(data_dir: Path, tmp_path: Path, command: Sequence[str] = UP) -> Iterator[Service]:
    """A service that answers and whose worker has started all of its processes."""
    with up(data_dir, tmp_path, command) as running:
        running.wait_until_ready()
        deadline = time.monotonic() + 60
        while len(worker_processes(running)) < PROCESSES and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(worker_processes(running)) >= PROCESSES, running.output
        yield running


@pytest.fixture
def service(data_dir: Path, tmp_path: Path) -> Iterator[Service]:
    with working(data_dir, tmp_path) as running:
        yield running


def worker_processes(service: Service) -> list[int]:
    return [pid for pid in service.look() if b"qcluster" in command_line(pid)]


def processes_by_kind(service: Service) -> Counter[str]:
    """What runs the service's own interpreter, which no sandbox does."""
    found: Counter[str] = Counter()
    for pid in (service.process.pid, *service.look()):
        interpreter, *words = command_line(pid).decode().split("\0")
        if interpreter == sys.executable:
            found[next((kind for kind in IDLE if kind in words), " ".join(words))] += 1
    return found


def log_lines(service: Service) -> list[str]:
    """All it wrote but what `up` itself tells on stdout."""
    told = ("Cofferdam: ", "Stopping", "Pool: ")
    return [line for line in service.output.splitlines() if not line.startswith(told)]


def assert_nothing_survives(service: Service) -> None:
    """A moment is granted: the kernel kills the orphans, and they take time to go."""
    deadline = time.monotonic() + 60
    while service.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.survivors() == []


def test_no_request_waits_for_collections_or_for_rules_to_be_read(data_dir: Path) -> None:
    code = """
import gc, threading
import sandbox_site.wsgi
from sandbox_site.gunicorn_conf import post_worker_init
post_worker_init(None)
renewal = [thread for thread in threading.enumerate() if thread.name == "kept-renewal"]
print(gc.get_freeze_count(), len(gc.get_objects()), len(renewal))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(data_dir),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    frozen, collectable, renewing = map(int, done.stdout.split()[-3:])
    assert frozen > 50 * collectable
    assert renewing == 1


def test_an_idle_service_has_no_more_processes_than_it_needs(
    data_dir: Path, tmp_path: Path
) -> None:
    environment = clean_environment(data_dir, PORT=str(free_port()))
    with started(UP, environment, ROOT, tmp_path / "log") as running:
        running.wait_until_ready()
        deadline = time.monotonic() + 60
        while (found := processes_by_kind(running)) != IDLE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == IDLE, running.output


def end_in_order(service: Service, number: signal.Signals) -> None:
    service.process.send_signal(number)
    code, seconds = service.wait_for_end()
    assert code == 0, service.output
    assert seconds < STOP_SECONDS
    assert_nothing_survives(service)
    # Nothing ran, so that there was nothing to wait for.
    assert "\nStopping. Press Ctrl-C again to stop now.\n" in service.output
    assert "; waiting for" not in service.output


def test_ctrl_c_ends_everything_in_time_and_counts_as_success(service: Service) -> None:
    end_in_order(service, signal.SIGINT)


@pytest.mark.parametrize("name", ["gunicorn", "qcluster"])
def test_the_end_of_one_process_ends_the_other(service: Service, name: str) -> None:
    os.kill(service.find(lambda line: name in line), signal.SIGKILL)
    code, seconds = service.wait_for_end()
    assert code != 0
    assert f"The {'web' if name == 'gunicorn' else 'worker'} process ended" in service.output
    assert seconds < STOP_SECONDS
    assert_nothing_survives(service)


def test_a_web_worker_that_was_killed_is_replaced(service: Service) -> None:
    master = service.find(lambda line: "gunicorn" in line)
    children = Path(f"/proc/{master}/task/{master}/children")
    (first,) = map(int, children.read_text().split())
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while children.read_text().split() in ([], [str(first)]):
        assert time.monotonic() < deadline, service.output
        time.sleep(0.05)
    service.wait_until_ready()


def test_nothing_outlives_a_killed_supervisor(service: Service) -> None:
    service.process.kill()
    service.wait_for_end()
    assert_nothing_survives(service)


def test_a_process_that_ignores_the_request_to_end_is_killed(
    data_dir: Path, tmp_path: Path
) -> None:
    with working(data_dir, tmp_path, [sys.executable, "-c", IMPATIENT]) as service:
        for pid in worker_processes(service):
            os.kill(pid, signal.SIGSTOP)
        service.process.terminate()
        deadline = time.monotonic() + 60
        while "Stopping; waiting for worker" not in service.output:
            assert time.monotonic() < deadline, service.output
            time.sleep(0.05)
        service.process.terminate()
        code, _ = service.wait_for_end()
        assert code == 0
        assert_nothing_survives(service)


def test_a_second_signal_does_not_interrupt_the_ending_and_every_line_is_json_without_a_key(
    service: Service, data_dir: Path
) -> None:
    for _ in range(2):
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    end_in_order(service, signal.SIGTERM)
    assert f"Cofferdam: {service.url}/ (Ctrl-C to stop)" in service.output.splitlines()
    for line in log_lines(service):
        assert {"time", "level", "logger", "message"} <= set(json.loads(line))
    for kept in ("credentials.txt", "secrets.env"):
        for line in (data_dir / kept).read_text().splitlines():
            name, _, value = line.partition("=")
            assert name == "ADMIN_USER" or value not in service.output


def test_a_pool_of_the_named_launcher_listens_without_docker(
    data_dir: Path, tmp_path: Path
) -> None:
    port = free_port()
    with up(data_dir, tmp_path, POOL_LAUNCHER="bubblewrap", POOL_PORT=str(port)) as running:
        running.wait_until_ready()
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pools = [pid for pid in running.look() if b"pool" in command_line(pid).split(b"\0")]
        end_in_order(running, signal.SIGTERM)
    assert len(pools) == 1, running.output
    assert "Pool: " in running.output


def test_a_taken_port_is_named_at_once(data_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = clean_environment(data_dir, PORT=port)
        command = [sys.executable, "manage.py", "up"]
        with started(command, environment, ROOT, tmp_path / "log") as refused:
            code, _ = refused.wait_for_end()
    assert code == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use" in refused.output


def test_it_serves_even_when_no_provider_can_be_loaded(data_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data"
    shutil.copytree(data_dir, broken, ignore=shutil.ignore_patterns("run"))
    with closing(sqlite3.connect(broken / "cofferdam.sqlite3")) as database:
        database.execute("ALTER TABLE providers_providerconfig RENAME TO lost")
    with up(broken, tmp_path) as running:
        running.wait_until_ready()
        running.process.terminate()
        code, _ = running.wait_for_end()
    assert code == 0
    levels = {json.loads(line)["level"] for line in log_lines(running)}
    assert levels & {"warning", "error"}, running.output
