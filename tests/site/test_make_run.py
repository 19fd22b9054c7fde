"""The Makefile, as a newcomer uses it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes import (
    ROOT,
    STOP_SECONDS,
    Service,
    clean_environment,
    free_port,
    started,
)
from tests.support.site import migrated

# The environment that runs the tests is complete, so `make` has nothing to install into it.
VENV = Path(sys.prefix)

# However busy the machine is.
READY_SECONDS = 120


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project without anything that running it has left."""
    target = tmp_path_factory.mktemp("checkout") / "cofferdam"
    left_out = shutil.ignore_patterns(".git", ".venv", "var", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, target, ignore=left_out)
    return target


def make(
    checkout: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env=environment or clean_environment(checkout / "var"),
        capture_output=True,
        text=True,
        check=False,
    )


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def press_ctrl_c(service: Service) -> None:
    """A terminal sends the signal to the whole foreground process group."""
    os.killpg(service.process.pid, signal.SIGINT)


def test_two_starts_and_two_ends(checkout: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    migrated(data_dir)
    environment = clean_environment(data_dir, PORT=str(free_port()))
    command = ["make", "run", f"VENV={VENV}"]

    with started(command, environment, checkout, tmp_path / "first") as first:
        first.wait_until_ready()
        credentials = dict(
            line.split("=", 1) for line in (data_dir / "credentials.txt").read_text().splitlines()
        )
        assert all(value in first.output for value in credentials.values())
        request = urllib.request.Request(
            f"{first.url}/api/v1/languages", headers={"X-API-Key": credentials["API_KEY"]}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
            json.load(answer)
        with urllib.request.urlopen(f"{first.url}/static/admin/css/base.css") as answer:
            assert answer.status == 200
        first.look()
        press_ctrl_c(first)
        _, seconds = first.wait_for_end()
        assert seconds < STOP_SECONDS
        assert first.survivors() == []

    with started(command, environment, checkout, tmp_path / "second") as again:
        assert again.wait_until_ready() < READY_SECONDS
        assert "Installing" not in again.output
        assert credentials["API_KEY"] not in again.output
        again.look()
        press_ctrl_c(again)
        _, seconds = again.wait_for_end()
        assert seconds < STOP_SECONDS
        assert again.survivors() == []


def test_production_without_keys_does_not_start(checkout: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path / "data", DEBUG="false")
    refused = make(checkout, "run", f"VENV={VENV}", environment=environment)
    assert refused.returncode != 0
    assert "DEBUG=false needs keys of its own" in refused.stderr
    assert not (tmp_path / "data").exists()


@pytest.fixture
def fake_venv(tmp_path: Path) -> Path:
    """An environment whose python notes how it was called."""
    venv = tmp_path / "venv"
    script(venv / "bin" / "python", f'echo "$@" >> {tmp_path}/calls')
    return venv


def test_a_lock_is_installed_once_and_again_when_it_has_changed(
    checkout: Path, fake_venv: Path, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"

    def installs() -> int:
        assert make(checkout, "venv", f"VENV={fake_venv}").returncode == 0
        text = calls.read_text()
        calls.unlink()
        assert text.count("--require-hashes -r requirements.txt") == text.count("pip install")
        return text.count("pip install")

    assert installs() == 1
    assert installs() == 0
    (checkout / "requirements.txt").touch()
    assert installs() == 0
    (fake_venv / "requirements.txt").write_text("an older lock")
    assert installs() == 1


def test_an_interrupted_installation_is_taken_up_again(
    checkout: Path, fake_venv: Path, tmp_path: Path
) -> None:
    script(fake_venv / "bin" / "python", '[ "$1" = -c ]')
    assert make(checkout, "venv", f"VENV={fake_venv}").returncode != 0
    assert not (fake_venv / "requirements.txt").exists()


def test_an_old_python_is_refused_with_the_remedy(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path / "python3", "exit 1")
    refused = make(checkout, "venv", f"PYTHON={tmp_path}/python3", f"VENV={tmp_path}/venv")
    assert refused.returncode != 0
    assert "Python 3.11 or newer is needed" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_venv_module_is_named_with_the_remedy(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path / "python3", '[ "$1" = -c ]')
    refused = make(checkout, "venv", f"PYTHON={tmp_path}/python3", f"VENV={tmp_path}/venv")
    assert refused.returncode != 0
    assert "apt-get install python3-venv" in refused.stderr


@pytest.fixture
def bare_machine(tmp_path: Path) -> dict[str, str]:
    """A PATH without bubblewrap, where installing only leaves a note."""
    tools = tmp_path / "bin"
    script(tools / "apt-get", f'echo "$@" >> {tmp_path}/installed')
    for tool in ("sh", "make", "python3"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return clean_environment(tmp_path / "data", PATH=str(tools))


def test_root_gets_bubblewrap_installed(
    checkout: Path, tmp_path: Path, bare_machine: dict[str, str]
) -> None:
    script(tmp_path / "bin" / "id", "echo 0")
    script(tmp_path / "bin" / "true", "exit 0")
    assert make(checkout, "bubblewrap", environment=bare_machine).returncode == 0
    assert "install -qq -y bubblewrap" in (tmp_path / "installed").read_text()


def test_without_root_and_sudo_the_one_command_is_told_and_the_start_goes_on(
    checkout: Path, tmp_path: Path, bare_machine: dict[str, str]
) -> None:
    script(tmp_path / "bin" / "id", "echo 1000")
    script(tmp_path / "bin" / "sudo", "exit 1")
    told = make(checkout, "bubblewrap", environment=bare_machine)
    assert told.returncode == 0
    assert "sudo apt-get install bubblewrap" in told.stderr
    assert not (tmp_path / "installed").exists()


def test_help_names_what_can_be_made(checkout: Path) -> None:
    listed = make(checkout).stdout
    for target in ("run", "test", "lint", "bench", "adapters", "lock", "bundle", "clean"):
        assert f"make {target} " in listed


def test_the_locks_name_no_host_and_no_path() -> None:
    adapters = sorted(ROOT.glob("examples/adapters/*/requirements.txt"))
    assert adapters
    for lock in (ROOT / "requirements.txt", ROOT / "requirements-dev.txt", *adapters):
        text = lock.read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
        assert "--index-url" not in text
