"""Without an isolation tool nothing runs, unless a developer opts out of isolation explicitly."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable
from providers.values import Job, SandboxSpec
from tests.support.processes import ROOT
from tests.support.sandboxes import (
    Local,
    LocalProcess,
    command,
    family,
    long_enough,
    wait_until_gone,
)
from tests.support.waiting import wait_until

UID = 60_124


def tools_only_in(folder: Path) -> dict[str, str]:
    """An environment in which isolation tools are found in `folder` alone."""
    return {"PATH": str(folder)}


def unisolated(folder: Path) -> LocalProcess:
    return LocalProcess(folder, tools_only_in(folder), unisolated=True)


@pytest.fixture
def opted_out(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Local]:
    """A provider in this process that runs code without any isolation."""
    settings.SANDBOX_LOCAL_UNISOLATED = True
    settings.MINIMUM_ISOLATION = "none"
    monkeypatch.setenv("PATH", str(tmp_path))
    local = Local("bubblewrap", pool_size=1)
    yield local
    local.close()


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
    env = tools_only_in(tmp_path) | {"PYTHONPATH": str(ROOT)}
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


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProcess]:
    """A process that runs code without any isolation, for tests that leave it as it is."""
    with unisolated(tmp_path_factory.mktemp("bare")) as process:
        yield process


def test_the_opt_out_runs_code_and_says_that_nothing_isolates_it(bare: LocalProcess) -> None:
    assert bare.greeting == {"ready": True}
    result = bare.run("import os\nprint(os.getpid())")
    assert (result["runtime"], result["exit_code"]) == ("none", 0)


def test_the_opt_out_still_kills_daemonised_children_and_nobody_else(bare: LocalProcess) -> None:
    code = (
        "import os, time\npid = os.fork()\nif pid == 0:\n    os.setsid()\n"
        "    pid = os.fork()\n    if pid: os._exit(0)\n    print(os.getpid(), flush=True)\n"
        "    time.sleep(1000)\ntime.sleep(1000)"
    )
    result = long_enough(
        lambda seconds: bare.run(code, timeout=seconds), lambda result: bool(result["stdout"]), 0.4
    )
    assert result["timed_out"] is True
    daemon = int(result["stdout"])
    wait_until(lambda: command(daemon) == [""], seconds=60)
    assert bare.run("print(1)")["stdout"] == "1\n"


def test_the_opt_out_leaves_no_files(bare: LocalProcess) -> None:
    workspace = bare.run("import os\nprint(os.getcwd())")["stdout"].strip()
    assert Path(workspace).name.startswith("cofferdam-unisolated-")
    wait_until(lambda: not Path(workspace).exists(), seconds=60)


def test_the_opt_out_is_logged(caplog: pytest.LogCaptureFixture, opted_out: Local) -> None:
    assert opted_out.runtime == "none"
    warnings = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("SANDBOX_LOCAL_UNISOLATED is set" in warning for warning in warnings)


def test_the_opt_out_watches_memory(opted_out: Local) -> None:
    result = opted_out.survive("x = []\nwhile True: x.append(bytearray(10**6))")
    assert (result.out_of_memory, result.metadata["runtime"]) == (True, "none")


def test_the_opt_out_passes_nothing_of_our_environment_on(
    monkeypatch: pytest.MonkeyPatch, opted_out: Local
) -> None:
    monkeypatch.setenv("PLANTED", "planted-secret")
    for _ in range(3):
        assert "planted-secret" not in opted_out.run("import os\nprint(os.environ)").stdout


def test_variables_of_a_run_are_in_no_other_run(opted_out: Local) -> None:
    def run(code: str, **given: str) -> str:
        sandbox = opted_out.provider.open(SandboxSpec(), "alice")
        try:
            return sandbox.run(Job(code, environment=given)).stdout
        finally:
            sandbox.close()

    look = "import os; print(sorted(os.environ), os.environ['PATH'])"
    before = run(look)
    code = "import os; print(os.environ['LD_PRELOAD'])"
    given = {"LD_PRELOAD": "/evil.so", "PATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    assert run(code, **given) == "/evil.so\n"
    assert run(look) == before


def test_a_signal_to_its_group_does_not_reach_the_service(opted_out: Local) -> None:
    survivor = subprocess.Popen(["/bin/sleep", "60"])
    result = opted_out.run("import os\nos.kill(0, 15)")
    assert (result.exit_code, result.timed_out) == (143, False)
    assert opted_out.run("print('next')").stdout == "next\n"
    assert survivor.poll() is None
    survivor.kill()
    survivor.wait()


def test_destroying_an_instance_ends_all_that_runs_in_it(opted_out: Local) -> None:
    provider = opted_out.provider
    instance = provider.create_instance("python")
    code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(provider.execute_code, instance.instance_id, code, "python", 60)
        time.sleep(0.3)
        assert provider.destroy_instance(instance.instance_id)
        with pytest.raises(ProviderUnavailable):
            running.result(60)
    opted_out.assert_nothing_is_left()


def test_the_opt_out_ends_with_its_owner(tmp_path: Path) -> None:
    owner = unisolated(tmp_path)
    owner.start("import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)", timeout=60)
    wait_until(lambda: len(family(owner.process.pid)) >= 3, seconds=60)
    running = family(owner.process.pid)
    owner.process.kill()
    owner.process.wait()
    wait_until_gone(running)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_what_else_the_user_runs_does_not_count_as_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # More than a program may have.
    command = ["/bin/sh", "-c", "for n in $(seq 70); do sleep 60 & done; echo begun; wait"]
    others = subprocess.Popen(
        command, user=UID, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert others.stdout is not None
    assert others.stdout.readline() == "begun\n"
    try:
        with tempfile.TemporaryDirectory(prefix="cofferdam-unisolated-test-") as folder:
            os.chown(folder, UID, UID)
            environment = tools_only_in(Path(folder))
            with LocalProcess(
                Path(folder), environment, launcher="bubblewrap", unisolated=True, uid=UID
            ) as process:
                result = process.run(
                    "import subprocess\nprint(subprocess.run('/bin/true').returncode)"
                )
                assert (result["stdout"], result["runtime"]) == ("0\n", "none")
    finally:
        os.killpg(others.pid, signal.SIGKILL)
        others.wait()
