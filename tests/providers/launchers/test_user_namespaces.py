"""A bubblewrap that the kernel's settings keep from starting says so, with the remedy."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from providers.errors import ProviderUnavailable
from providers.manager import manager
from providers.runtime.launchers import bubblewrap, subordinate_users
from providers.runtime.launchers.subordinate_users import remedy_for
from providers.services.this_machine import abilities
from tests.conftest import Caller, require
from tests.support.processes import ROOT
from tests.support.running import LOCAL, activate, run

DENIED = "bwrap: setting up uid map: Permission denied"
PROFILE = ROOT / "deploy" / "apparmor" / "cofferdam-bwrap"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /proc/sys, in which user namespaces are allowed."""
    folder = tmp_path / "sys"
    put(folder, "user/max_user_namespaces", "96365")
    put(folder, "kernel/apparmor_restrict_unprivileged_userns", "0")
    monkeypatch.setattr(subordinate_users, "SETTINGS", folder)
    return folder


def put(folder: Path, name: str, value: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def fake_bwrap(folder: Path, monkeypatch: pytest.MonkeyPatch, complaint: str) -> None:
    program = folder / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit\necho "{complaint}" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "deploy/apparmor/cofferdam-bwrap"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces="),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named_with_its_remedy(
    name: str, value: str, remedy: str, kernel: Path
) -> None:
    assert remedy_for(DENIED, kernel) == DENIED
    put(kernel, name, value)
    message = remedy_for(DENIED, kernel)
    assert message.startswith(f"{DENIED}. ")
    assert f"({name.replace('/', '.')} is {value})" in message
    assert remedy in message


def test_a_complaint_about_something_else_is_left_as_it_is(kernel: Path) -> None:
    put(kernel, "kernel/apparmor_restrict_unprivileged_userns", "1")
    other = "bwrap: execvp /usr/bin/python3: No such file or directory"
    assert remedy_for(other, kernel) == other
    assert remedy_for("", kernel) == ""


def test_a_kernel_without_these_settings_explains_nothing(tmp_path: Path) -> None:
    assert remedy_for(DENIED, tmp_path) == DENIED


def test_what_this_machine_can_do_names_the_remedy(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(kernel, "kernel/apparmor_restrict_unprivileged_userns", "1")
    fake_bwrap(tmp_path, monkeypatch, DENIED)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 1000)
    (found,) = [each for each in abilities() if each.name == "bubblewrap"]
    assert found.missing.startswith(f"bubblewrap does not start: {DENIED}. ")
    assert "apparmor_parser --replace /etc/apparmor.d/cofferdam-bwrap" in found.missing


def test_the_answer_of_a_run_names_the_remedy(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alice: Caller
) -> None:
    put(kernel, "kernel/apparmor_restrict_unprivileged_userns", "1")
    fake_bwrap(tmp_path, monkeypatch, DENIED)
    monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 1000)
    # Another test may have left one that started before.
    manager.close()
    activate("local", LOCAL)
    try:
        answer = run(alice, "print(1)")
    finally:
        manager.close()
    message = answer.json()["error"]["message"]
    assert answer.status_code == 503
    assert DENIED in message
    assert "deploy/apparmor/cofferdam-bwrap" in message


def test_root_needs_no_user_namespace_and_is_told_the_complaint_alone(
    kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(kernel, "kernel/apparmor_restrict_unprivileged_userns", "1")
    fake_bwrap(tmp_path, monkeypatch, DENIED)
    monkeypatch.setattr(bubblewrap.os, "geteuid", lambda: 0)
    with pytest.raises(ProviderUnavailable) as caught:
        bubblewrap.check_start()
    assert caught.value.message == f"bubblewrap does not start: {DENIED}"


def test_a_bubblewrap_that_starts_passes(kernel: Path) -> None:
    require("bwrap")
    put(kernel, "kernel/apparmor_restrict_unprivileged_userns", "1")
    bubblewrap.check_start()


def test_the_profile_names_the_program_that_is_run() -> None:
    text = PROFILE.read_text()
    assert re.search(
        r"^profile cofferdam-bwrap /usr/bin/bwrap flags=\(unconfined\) \{$", text, re.M
    )
    assert re.search(r"^  userns,$", text, re.M)
