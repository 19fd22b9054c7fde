"""Without an isolation tool nothing runs, unless a developer opts out of isolation explicitly."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.sandboxes import LocalProcess, command, wait_until


def tools_only_in(folder: Path) -> dict[str, str]:
    """An environment in which isolation tools are found in `folder` alone."""
    return {"PATH": str(folder)}


def unisolated(folder: Path) -> LocalProcess:
    return LocalProcess(folder, tools_only_in(folder), unisolated=True)


def test_without_bubblewrap_it_refuses_and_says_how_to_install_it(tmp_path: Path) -> None:
    with LocalProcess(tmp_path, tools_only_in(tmp_path), launcher="auto") as process:
        assert process.greeting["error"] == "SB009"
        assert "apt-get install bubblewrap" in process.greeting["message"]


def test_a_refused_start_deletes_nothing_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("kept")
    env = tools_only_in(tmp_path) | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    monkeypatch.chdir(here)
    with LocalProcess(tmp_path / "data", env, launcher="auto") as process:
        assert process.greeting["error"] == "SB009"
    assert (here / "file").read_text() == "kept"


def test_an_old_bubblewrap_is_refused_with_the_remedy(tmp_path: Path) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.4.0\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    with LocalProcess(tmp_path, tools_only_in(tmp_path), launcher="bubblewrap") as process:
        assert process.greeting["error"] == "SB009"
        assert "0.4 is too old" in process.greeting["message"]


def test_the_opt_out_runs_code_and_says_that_nothing_isolates_it(tmp_path: Path) -> None:
    with unisolated(tmp_path) as process:
        assert process.greeting == {"ready": True}
        result = process.run("import os\nprint(os.getpid())")
        assert (result["runtime"], result["exit_code"]) == ("none", 0)


def test_the_opt_out_still_kills_daemonised_children_and_nobody_else(tmp_path: Path) -> None:
    with unisolated(tmp_path) as process:
        result = process.run(
            "import os, time\npid = os.fork()\nif pid == 0:\n    os.setsid()\n"
            "    pid = os.fork()\n    if pid: os._exit(0)\n    print(os.getpid(), flush=True)\n"
            "    time.sleep(1000)\ntime.sleep(1000)",
            timeout=0.7,
        )
        assert result["timed_out"] is True
        daemon = int(result["stdout"])
        wait_until(lambda: command(daemon) == [""], seconds=1)
        assert process.run("print(1)")["stdout"] == "1\n"


def test_the_opt_out_leaves_no_files(tmp_path: Path) -> None:
    with unisolated(tmp_path) as process:
        workspace = process.run("import os\nprint(os.getcwd())")["stdout"].strip()
        assert Path(workspace).name.startswith("cofferdam-unisolated-")
        wait_until(lambda: not Path(workspace).exists(), seconds=2)
