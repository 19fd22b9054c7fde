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
