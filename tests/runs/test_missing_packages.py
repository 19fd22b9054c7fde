"""Who misses a package is told once, at the end of stderr: why, what there is, and who adds more."""

from __future__ import annotations

import pytest

from providers.runtime.guest import missing
from providers.values import Event, Job, SandboxSpec
from tests.conftest import require
from tests.support.environments import environment_with
from tests.support.kept_guest import KeptGuest
from tests.support.sandboxes import Local

NO_MODULE = b"Traceback (most recent call last):\nModuleNotFoundError: No module named 'polars'\n"


def advised(stderr: str) -> str:
    """The one line of advice, which comes last."""
    *before, last = stderr.splitlines()
    assert last.startswith("Advice: "), stderr
    assert not any(line.startswith("Advice: ") for line in before)
    for said in ("no network, by design", "An administrator can add packages"):
        assert said in last
    return last


def test_a_missing_module_of_python(local: Local) -> None:
    told = advised(local.run("import no_such_package.part").stderr)
    assert "There is no module 'no_such_package'" in told
    assert "There are: " in told


def test_a_missing_module_of_javascript(bubblewrap: Local) -> None:
    require("node")
    told = advised(bubblewrap.run("require('no-such-package')", "javascript").stderr)
    assert "There is no module 'no-such-package'" in told


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "pip install polars"),
        ("bash", "python3 -m pip install polars"),
        ("python", "import subprocess; subprocess.run(['pip', 'install', 'polars'])"),
        ("python", "import os; os.system('pip install polars')"),
    ],
)
def test_an_installation_that_cannot_be(bubblewrap: Local, language: str, code: str) -> None:
    result = bubblewrap.run(code, language, timeout=60)
    told = advised(result.stderr)
    assert "There are: " in told


def test_it_is_told_in_the_stream_too(bubblewrap: Local) -> None:
    seen: list[Event] = []
    sandbox = bubblewrap.provider.open(SandboxSpec("python"), "alice")
    try:
        result = sandbox.run(Job("import no_such_package", "python"), seen.append)
    finally:
        sandbox.close()
    text = b"".join(event.data for event in seen if event.type == "stderr")
    assert text.decode() == result.stderr
    advised(result.stderr)


def test_it_is_told_in_a_session(kept: KeptGuest) -> None:
    advised(kept.run("import no_such_package").stderr)
    assert "Advice: " not in kept.run("print('No module named x')").stderr


@pytest.mark.parametrize(
    ("code", "stdout", "stderr"),
    [
        (0, b"", NO_MODULE),
        (1, NO_MODULE, b"another end\n"),
        (None, b"", NO_MODULE),
        # A name that no module has can be typed wrongly in any language.
        (127, b"", b"bash: line 1: foo: command not found\n"),
        (1, b"", b"Error: Cannot find module './helper'\n"),
        # Left out of this machine's Python, and not to be installed.
        (1, b"", b"ModuleNotFoundError: No module named 'tkinter'\n"),
        (1, b"", b"ModuleNotFoundError: No module named 'a\x1b[2Jb'\n"),
    ],
)
def test_nobody_is_told_who_missed_nothing(code: int | None, stdout: bytes, stderr: bytes) -> None:
    assert missing.advice(code, stdout, stderr) == b""


@pytest.mark.parametrize(
    "said",
    [
        b"ERROR: No matching distribution found for polars",
        b"error: externally-managed-environment",
        b"npm ERR! request to a registry failed, reason: getaddrinfo EAI_AGAIN",
        b"/bin/sh: 1: pip3: not found",
        b"/usr/bin/python3: No module named pip",
    ],
)
def test_what_installs_is_known_by_what_it_says(said: bytes) -> None:
    """Whatever the exit code: a program may go on without, and a wait for the network ends late."""
    for code in (0, 1, None):
        assert missing.advice(code, said + b"\n", b"").count(b"\n") == 1
        assert missing.advice(code, b"", said).startswith(b"\nAdvice: ")


def test_the_packages_of_the_chosen_environment_are_named(settings: object) -> None:
    files = {"many-1.0.dist-info": "", "many.py": ""}
    with environment_with(files) as (found, _):
        settings.SANDBOX_LOCAL_PYTHON = str(found / "bin" / "python")  # type: ignore[attr-defined]
        local = Local("bubblewrap", pool_size=1)
        try:
            told = advised(local.run("import no_such_package").stderr)
        finally:
            local.close()
    assert "There are: many." in told
