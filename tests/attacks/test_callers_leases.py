"""A request that holds its process ends nobody's run, for as long as the process lives."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.attacks.two_tenants import Scene, at_once, two_tenants, wait_until
from tests.conftest import require
from tests.support.processes import ROOT, clean_environment

# More than is enough for another process to be found dead: ten without a beat, which is due every
# two, and a look each.
HELD_SECONDS = 14

# PyDLL calls with the interpreter's lock held: no thread of the process does anything meanwhile,
# as in a long call of a parser that is written in C.
HOLDER = """
import ctypes, os, threading, time

def hold_when_told():
    folder = os.environ["HOLD_FOLDER"]
    while not os.path.exists(folder + "/hold"):
        time.sleep(0.1)
    command = open("/proc/self/cmdline", "rb").read()
    if b"gunicorn" in command:
        open(folder + "/held", "w").close()
        ctypes.PyDLL(None).sleep(int(os.environ["HOLD_SECONDS"]))
        open(folder + "/released", "w").close()

def watch():
    threading.Thread(target=hold_when_told, daemon=True).start()

os.register_at_fork(after_in_child=watch)
"""


@contextmanager
def holdable(tmp_path: Path, seconds: int) -> Iterator[tuple[Scene, Path]]:
    folder = tmp_path / "holder"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOLDER)
    extra = {"PYTHONPATH": str(folder), "HOLD_FOLDER": str(folder), "HOLD_SECONDS": str(seconds)}
    with two_tenants(tmp_path, **extra) as scene:
        yield scene, folder


@contextmanager
def worker_of_another_host(scene: Scene, tmp_path: Path) -> Iterator[None]:
    """A second worker on the same database. In a process namespace of its own it can ask the kernel
    for none of the others."""
    environment = clean_environment(scene.data_dir, PORT=str(scene.service.port))
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (tmp_path / "other-host.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, sys.executable, "manage.py", "qcluster"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: len(hosts(scene)) == 2)
        yield
    finally:
        process.kill()
        process.wait()


def hosts(scene: Scene) -> set[str]:
    """Those of the processes that have beaten at least once and live."""
    with closing(sqlite3.connect(scene.data_dir / "cofferdam.sqlite3")) as database:
        rows = database.execute(
            "SELECT tag FROM executions_process WHERE ended_at IS NULL AND beat > 0"
        ).fetchall()
    return {tag.split("-")[0] for (tag,) in rows}


def test_a_held_process_keeps_its_lease_before_watchers_of_its_host_and_of_others(
    tmp_path: Path,
) -> None:
    require("bwrap")
    if os.getuid() != 0:
        pytest.skip("needs root, to make namespaces")
    with (
        holdable(tmp_path, HELD_SECONDS) as (scene, folder),
        worker_of_another_host(scene, tmp_path),
    ):
        code = f"import time; time.sleep({HELD_SECONDS // 2}); print('whole')"
        with at_once(scene.other, 2, code, timeout=HELD_SECONDS * 3) as runs:
            wait_until(lambda: scene.other.how_many("running") == 2)
            (folder / "hold").touch()
            wait_until((folder / "released").exists)
        answers = [run.result() for run in runs]
        told = scene.service.output + (tmp_path / "other-host.log").read_text()

    assert [answer.status for answer in answers] == [200] * 2, told
    assert [answer.body["stdout"] for answer in answers] == ["whole\n"] * 2
    assert "a process died" not in told
    assert "this process lost its lease" not in told
