"""SANDBOX_LOCAL_PYTHON: local programs run in a virtual environment of the operator's."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Tags
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from providers.checks import BEFORE_WORK, check_local_python
from providers.errors import ProviderUnavailable
from providers.runtime.launchers.guest_files import find_python
from tests.conftest import require
from tests.support.environments import environment_with
from tests.support.processes import ROOT, clean_environment
from tests.support.sandboxes import Local

LOOK = "import sys, only_here; print(sys.prefix, only_here.value)"


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    """A virtual environment with one module in it, where sandboxes have nothing of their own."""
    with environment_with({"only_here.py": "value = 42\n"}) as (found, _):
        yield found


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_programs_have_the_packages_of_the_chosen_environment(
    environment: Path, settings: Any, launcher: str
) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    settings.SANDBOX_LOCAL_PYTHON = str(environment / "bin" / "python")
    local = Local(launcher, pool_size=1)
    try:
        result = local.run(LOOK)
        assert (result.stdout, result.stderr) == (f"{environment} 42\n", "")
        # Beside it nothing of its folder is seen, and nobody writes to it.
        beside = local.run(f"import os; print(os.listdir({str(environment.parent)!r}))")
        assert beside.stdout == "['venv']\n"
        assert local.run(f"open({str(environment / 'x')!r}, 'w')").exit_code == 1
    finally:
        local.close()


COMMANDS = """
for name in python python3 /usr/bin/python3; do $name -c 'import sys; print(sys.prefix)'; done
$(command -v python) -c 'import sys; print(sys.version_info[0])'
"""


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
@pytest.mark.parametrize("is_chosen", [True, False], ids=["chosen", "system"])
def test_python_and_python3_are_the_interpreter_of_programs(
    environment: Path, settings: Any, launcher: str, is_chosen: bool
) -> None:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[launcher])
    settings.SANDBOX_LOCAL_PYTHON = str(environment / "bin" / "python") if is_chosen else ""
    local = Local(launcher, pool_size=1)
    try:
        prefix = str(environment) if is_chosen else "/usr"
        commands = local.run(COMMANDS, language="bash")
        assert (commands.stderr, commands.stdout.split()) == ("", [prefix, prefix, "/usr", "3"])
        program = "import subprocess; print(subprocess.run(['python', '-c', %r]).returncode)"
        assert local.run(program % "import sys; print(sys.prefix)").stdout == f"{prefix}\n0\n"
    finally:
        local.close()


def test_without_one_nothing_of_it_is_seen(bubblewrap: Local) -> None:
    assert "No module named 'only_here'" in bubblewrap.run(LOOK).stderr


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ("/usr/bin/python3", "is not the interpreter of a virtual environment"),
        ("/nowhere/bin/python", "is no program"),
        ("bin/python", "is no program"),
        (sysconfig.get_path("stdlib"), "is not the interpreter"),
    ],
)
def test_what_is_no_environments_interpreter_is_refused(chosen: str, problem: str) -> None:
    with pytest.raises(ProviderUnavailable, match=problem):
        find_python(chosen)


def empty_environment(folder: Path) -> str:
    for name in ("pyvenv.cfg", "bin/python"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch(0o755)
    return str(folder / "bin/python")


def test_an_environment_under_a_folder_of_the_sandboxs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="folders of their own"):
        find_python(empty_environment(tmp_path))


def test_one_whose_own_interpreter_lies_there_is_refused(environment: Path, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch(0o755)
    linked = environment.parent / "linked" / "bin"
    linked.mkdir(parents=True)
    (linked.parent / "pyvenv.cfg").touch()
    (linked / "python").symlink_to(interpreter)
    with pytest.raises(ProviderUnavailable, match="folders of their own"):
        find_python(str(linked / "python"))


def test_the_service_does_not_start_with_one_that_sandboxes_cannot_see(
    environment: Path, tmp_path: Path, settings: Any
) -> None:
    settings.SANDBOX_LOCAL_PYTHON = empty_environment(tmp_path)

    assert Tags.files in BEFORE_WORK
    started = subprocess.run(
        [sys.executable, "manage.py", "up"],
        env=clean_environment(tmp_path, SANDBOX_LOCAL_PYTHON=settings.SANDBOX_LOCAL_PYTHON),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode != 0
    assert "providers.E004" in started.stderr
    with pytest.raises(SystemCheckError) as refused:
        call_command("check", tags=[Tags.files])

    told = str(refused.value)
    for part in ("providers.E004", settings.SANDBOX_LOCAL_PYTHON, "/tmp", "/opt/venv/bin/python"):
        assert part in told
    settings.SANDBOX_LOCAL_PYTHON = str(environment / "bin" / "python")
    assert check_local_python() == []


def test_the_environment_of_the_packages_is_made_anew_and_not_refused(
    tmp_path: Path, settings: Any
) -> None:
    settings.PACKAGES_DIR = tmp_path
    settings.SANDBOX_LOCAL_PYTHON = str(tmp_path / "bin" / "python")
    assert check_local_python() == []
