"""Processes that start and end together, and those among them that are started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

# A process of its own, whose signals and children the group takes.
_GROUP = """
import os, sys
from executions.kernel import processes
processes.RESTART_SECONDS = 0.1
file = sys.argv[1]
told = []
with processes.ProcessGroup() as group:
    group.start("again", ["sh", "-c", f"echo x >> {file}; exit 3"], os.environ, restarts=True)
    script = f"until [ $(wc -l < {file}) -ge 3 ]; do sleep 0.05; done; exit 5"
    group.start("once", ["sh", "-c", script], os.environ)
    print(group.wait(lambda name, code: told.append((name, code))), told[0])
"""


def test_a_process_that_restarts_ends_no_other(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    done = subprocess.run(
        [sys.executable, "-c", _GROUP, str(tmp_path / "runs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "('once', 5) ('again', 3)\n"


_FORKS = """
import os, sys, time
from pathlib import Path
from executions.kernel import processes
from executions.kernel.own_process import show_as
folder = Path(sys.argv[1])

def first():
    show_as("first of all")
    Path(folder / "line").write_bytes(Path("/proc/self/cmdline").read_bytes())
    Path(folder / "pid").write_text(f"{os.getsid(0)} {os.getpid()} {os.getppid()}")
    sys.exit(7)

def second():
    while True:
        time.sleep(3600)

def main():
    try:
        with processes.ProcessGroup() as group:
            group.fork("second", second)
            group.fork("first", first)
            print(os.getpid(), group.wait())
    except processes.ForkedProcess as forked:
        run = forked.run
    else:
        return
    run()

main()
"""


def test_a_fork_ends_as_a_program_of_its_own_and_the_group_with_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    parent, _, ended = done.stdout.strip().partition(" ")
    assert (ended, done.stderr) == ("('first', 7)", "")
    session, pid, its_parent = (tmp_path / "pid").read_text().split()
    assert session == pid
    assert its_parent == parent
    # The words of its parent are longer, and none of them is left.
    words = (tmp_path / "line").read_bytes().rstrip(b"\0").split(b"\0")
    assert words == [sys.executable.encode(), b"first of all"]
