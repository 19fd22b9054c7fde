"""Common packages for local programs: an environment that `manage.py packages` fills."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from providers.errors import ProviderUnavailable
from providers.local import packages
from tests.conftest import Caller
from tests.support.index_folders import put_wheel
from tests.support.required import missing
from tests.support.sandboxes import Local

PROGRAM = "import counting; print(counting.VALUE)"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for an environment, where sandboxes have nothing of their own."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    place.chmod(0o755)
    yield place / "packages"
    shutil.rmtree(place)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its registry."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def publish(registry: Path, version: str, value: int) -> Path:
    """Put a wheel of the package `counting` into the registry; return a lock that names it."""
    wheel = put_wheel(registry, version, value)
    lock = registry / f"{version}.txt"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"counting=={version} --hash=sha256:{digest}\n")
    return lock


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_a_running_provider_has_the_packages_once_they_are_installed(
    folder: Path, registry: Path, settings: Any, launcher: str
) -> None:
    settings.SANDBOX_LOCAL_PYTHON = str(packages.create(folder))
    local = Local(launcher, pool_size=1)
    try:
        assert "No module named 'counting'" in local.run(PROGRAM).stderr
        lock = publish(registry, "1.0", 42)

        packages.install(folder, lock)

        # The first may be a sandbox that was ready before.
        assert {local.run(PROGRAM).stdout for _ in range(3)} == {"42\n"}
        assert packages.look(folder).versions == {"counting": "1.0"}
    finally:
        local.close()


@pytest.mark.slow
def test_the_lock_has_what_programs_import_and_draws_a_chart(folder: Path, settings: Any) -> None:
    settings.SANDBOX_LOCAL_PYTHON = str(packages.create(folder))
    try:
        packages.install(folder)
    except packages.InstallationFailed as error:
        missing(f"the packages cannot be installed: {error}")
    local = Local("bubblewrap", pool_size=1)
    try:
        drawn = local.run(
            """
            import bs4, httpx, lxml, matplotlib, numpy, openpyxl, PIL, pyarrow, requests, scipy
            import sklearn, sympy
            import pandas
            pandas.Series([1, 3, 2]).plot().figure.savefig("artifacts/chart.png")
            import subprocess, sys
            for command in (["pip"], ["uv"], [sys.executable, "-m", "pip"]):
                subprocess.run([*command, "--version"], check=True)
            """,
            timeout=60,
        )
    finally:
        local.close()
    assert drawn.exit_code == 0, drawn.stderr
    assert [each.name for each in drawn.artifacts] == ["chart.png"]
    assert [line.split()[0] for line in drawn.stdout.splitlines()] == ["pip", "uv", "pip"]
    assert not packages.look(folder).versions.keys() & {"pip", "uv"}


def test_another_lock_is_installed_in_the_place_of_the_former(folder: Path, registry: Path) -> None:
    packages.create(folder)
    first, second = publish(registry, "1.0", 1), publish(registry, "2.0", 2)
    packages.install(folder, first)
    assert packages.is_installed(folder, first)
    assert not packages.is_installed(folder, second)
    assert packages.look(folder).digest == hashlib.sha256(first.read_bytes()).hexdigest()

    packages.install(folder, second)

    found = packages.look(folder)
    assert (found.state, found.versions) == ("ready", {"counting": "2.0"})
    assert found.digest == hashlib.sha256(second.read_bytes()).hexdigest()
    assert found.installed_at > 0
    assert [path.name for path in folder.glob("lib/python*/packages/*.py")] == ["counting.py"]


def test_without_a_registry_the_reason_is_kept_and_the_next_try_succeeds(
    folder: Path, registry: Path
) -> None:
    packages.create(folder)
    lock = publish(registry, "1.0", 1)
    (wheel,) = registry.glob("*.whl")
    content = wheel.read_bytes()
    wheel.unlink()

    with pytest.raises(packages.InstallationFailed, match="counting"):
        packages.install(folder, lock)
    failed = packages.look(folder)
    wheel.write_bytes(content)
    packages.install(folder, lock)

    assert (failed.state, dict(failed.versions)) == ("failed", {})
    assert "counting" in failed.reason
    assert packages.look(folder).state == "ready"


def test_a_registry_that_cannot_be_reached_is_the_reason(
    folder: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.create(folder)
    lock = publish(registry, "1.0", 1)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")

    with pytest.raises(packages.InstallationFailed, match="no package registry could be"):
        packages.install(folder, lock)

    assert packages.look(folder).reason.startswith("no package registry could be reached")


def test_a_wheel_that_was_exchanged_is_refused(folder: Path, registry: Path) -> None:
    packages.create(folder)
    lock = publish(registry, "1.0", 1)
    expected = lock.read_text()
    publish(registry, "1.0", 2)
    lock.write_text(expected)

    with pytest.raises(packages.InstallationFailed):
        packages.install(folder, lock)

    assert not packages.look(folder).versions


def test_while_one_installs_the_state_is_preparing(folder: Path) -> None:
    packages.create(folder)
    with packages.alone(folder):
        assert packages.look(folder).state == "preparing"
    assert packages.look(folder).state == "ready"


def test_a_program_can_neither_hold_an_installation_up_nor_feign_one(
    folder: Path, registry: Path, settings: Any
) -> None:
    settings.SANDBOX_LOCAL_PYTHON = str(packages.create(folder))
    lock = publish(registry, "1.0", 42)
    packages.install(folder, lock)
    local = Local("bubblewrap", pool_size=1)
    try:
        held = local.run(
            f"""
            import os
            for above, _, names in os.walk({str(folder.parent)!r}):
                if not above.endswith(".dist-info"):
                    print(*(name for name in names if name.endswith((".txt", ".lock"))), end="")
            """
        )
    finally:
        local.close()

    # What may be read may be locked.
    assert held.stdout == "installed.txt"


def test_a_folder_that_sandboxes_do_not_see_is_refused_and_left_empty(tmp_path: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="folders of their own"):
        packages.create(tmp_path / "packages")
    assert not (tmp_path / "packages").exists()


def test_an_environment_of_another_python_is_made_anew(folder: Path) -> None:
    packages.create(folder)
    (place,) = folder.glob("lib/python*")
    place.rename(place.with_name("python2.0"))

    packages.create(folder)

    assert place.is_dir()


def test_the_command_says_what_there_is_and_why_not(
    folder: Path, registry: Path, settings: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PACKAGES_DIR = folder
    lock = publish(registry, "1.0", 1)
    monkeypatch.setattr(packages.install, "__defaults__", (lock,))
    monkeypatch.setattr(packages.is_installed, "__defaults__", (lock,))

    call_command("packages")
    assert "Python programs can import counting" in capsys.readouterr().out
    call_command("packages")
    assert capsys.readouterr().out == ""

    lock.write_text("missing==1.0 --hash=sha256:" + "0" * 64)
    with pytest.raises(CommandError, match=r"missing.*`manage.py packages` tries again"):
        call_command("packages")


def test_the_api_names_the_packages_to_those_who_may_use_python(
    local_active: None, alice: Caller, folder: Path, registry: Path, settings: Any
) -> None:
    assert alice.client.get("/api/v1/languages").json()["packages"] == {}
    settings.SANDBOX_LOCAL_PYTHON = str(packages.create(folder))
    packages.install(folder, publish(registry, "1.0", 1))

    told = alice.client.get("/api/v1/languages").json()["packages"]

    versions = {"counting": "1.0"}
    assert told == {"local": {"state": "ready", "reason": "", "versions": versions, "node": {}}}
