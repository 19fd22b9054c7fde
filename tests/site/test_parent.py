"""What the processes of `manage.py up` share: loaded once, without a thread or a connection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environment, command_line, free_port, started
from tests.support.site import MANAGE, prepare

_LOAD = """
import gc, json, os, sys, threading
os.environ["DJANGO_SETTINGS_MODULE"] = "sandbox_site.settings"
from sandbox_site import parent
server = parent.load("127.0.0.1:1")
from django.db import connections
from django.urls import get_resolver
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")),
    "connections": [each.connection is None for each in connections.all()],
    "frozen": gc.get_freeze_count(),
    "loose": len(gc.get_objects()),
    "bind": server.cfg.bind,
    "modules": [name for name, module in sys.modules.items() if module is not None],
    "arguments": sys.argv,
}))
"""
_FORK = """
import json, os
os.environ["DJANGO_SETTINGS_MODULE"] = "sandbox_site.settings"
from sandbox_site import parent
parent.load("127.0.0.1:1")
from executions.doors.e2b import filesystem
from providers import draining
reads, writes = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        parent._become("gunicorn")
        before = draining.is_draining()
        draining.begin(for_all=True)
        os.write(writes, json.dumps([filesystem._here, before, draining.is_draining()]).encode())
        os._exit(0)
    os.wait()
    print(os.read(reads, 1000).decode())
print(json.dumps([filesystem._here, draining.is_draining()]))
"""
# What few requests need, or none: a package that loads one of these costs every installation.
_UNNEEDED = {"psycopg", "qrcode", "PIL", "lxml", "rich", "reportlab", "kubernetes", "e2b", "docker"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parent") / "data"
    prepare(path)
    return path


def test_what_is_forked_has_no_thread_no_connection_and_nothing_that_few_need(
    data_dir: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, "kept"],
        env=clean_environment(data_dir),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert found["threads"] == 1
    assert found["connections"] == [True]
    assert found["frozen"] > 50 * found["loose"]
    assert found["bind"] == ["127.0.0.1:1"]
    assert found["arguments"] == ["-c", "kept"]
    modules = set(found["modules"])
    assert {"executions.doors.native.urls", "gunicorn.arbiter", "sandbox_site.wsgi"} <= modules
    assert not modules & _UNNEEDED


def test_a_fork_has_its_own_watchers_and_stops_no_other(data_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK],
        env=clean_environment(data_dir),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    forks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [steps for _, *steps in forks] == [[False, True], [False, True], [False]]
    assert len({here for here, *_ in forks}) == 3


def test_the_web_server_and_the_workers_share_most_of_their_memory(
    data_dir: Path, tmp_path: Path
) -> None:
    environment = clean_environment(data_dir, PORT=str(free_port()))
    with started((*MANAGE, "up"), environment, ROOT, tmp_path / "log") as service:
        service.wait_until_ready()
        for name in ("gunicorn", "qcluster"):
            pid = service.find(lambda line, name=name: name in line)  # type: ignore[misc]
            memory = kibibytes(pid)
            assert memory["Shared_Dirty"] > 2 * memory["Private_Dirty"], command_line(pid)


def kibibytes(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
