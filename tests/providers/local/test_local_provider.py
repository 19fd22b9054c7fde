"""The provider over the pool: instances, languages, health, and two of it side by side."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from providers.errors import (
    CreationFailed,
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.local.provider import LocalProvider
from providers.runtime.launchers.guest_files import find_python
from providers.runtime.launchers.oci import GvisorLauncher
from providers.values import SANDBOX_ENDED, Job, SandboxSpec
from tests.conftest import require
from tests.support.sandboxes import Local, family, wait_until_gone
from tests.support.waiting import wait_until

LAUNCHERS = {"bubblewrap": "bwrap", "gvisor": "runsc"}


def end_bubblewrap(local: Local) -> None:
    """Kill what the sandboxes run in, and wait until all of it is gone.

    Once the next one is warm: of a start that is broken off, the caller who waits would be told.
    """
    wait_until(lambda: (local.stats()["idle"], local.stats()["creating"]) == (1, 0), seconds=60)
    (tool,) = local.tools()
    inside = family(tool)
    os.kill(tool, signal.SIGKILL)
    wait_until_gone(inside)


def test_an_instance_runs_code_once_and_is_gone(bubblewrap: Local) -> None:
    provider = bubblewrap.provider
    instance = provider.create_instance("python", owner="wonderland")
    assert (instance.provider, instance.status) == ("local", "running")
    assert instance.metadata == {
        "runtime": "bubblewrap",
        "isolation": "namespaces",
        "sharing": "execution",
    }
    result = provider.execute_code(instance.instance_id, "print(1)", "python")
    assert result.stdout == "1\n"
    with pytest.raises(ProviderUnavailable, match="has had its one run") as caught:
        provider.execute_code(instance.instance_id, "print(2)", "python")
    assert not caught.value.started
    assert provider.destroy_instance(instance.instance_id) is True
    assert provider.destroy_instance(instance.instance_id) is False
    with pytest.raises(ProviderUnavailable, match="no instance"):
        provider.execute_code(instance.instance_id, "print(3)", "python")


def test_of_two_runs_at_once_in_one_instance_one_is_refused(bubblewrap: Local) -> None:
    provider = bubblewrap.provider
    instance = provider.create_instance("python")
    ready = threading.Barrier(2)

    def run(_: int) -> str:
        ready.wait()
        try:
            code = "import time\ntime.sleep(0.3)\nprint('ran')"
            return provider.execute_code(instance.instance_id, code, "python", 5).stdout
        except ProviderUnavailable:
            return "refused"

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(run, range(2))) == ["ran\n", "refused"]
    provider.destroy_instance(instance.instance_id)


def test_a_refused_request_leaves_the_instance_usable(bubblewrap: Local) -> None:
    provider = bubblewrap.provider
    instance = provider.create_instance("python")
    with pytest.raises(InvalidConfiguration):
        provider.execute_code(instance.instance_id, "x", "python", arguments={"a": {1}})
    with pytest.raises(InvalidConfiguration) as caught:
        provider.execute_code(instance.instance_id, "x", "bash")
    assert caught.value.field == "language"
    assert provider.execute_code(instance.instance_id, "print(1)", "python").stdout == "1\n"
    provider.destroy_instance(instance.instance_id)


def test_destroying_an_instance_ends_what_runs_in_it(local: Local) -> None:
    provider = local.provider
    instance = provider.create_instance("python")
    errors: list[SandboxError] = []

    def run() -> None:
        try:
            provider.execute_code(instance.instance_id, "while True: pass", "python", 60)
        except SandboxError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(local.is_running, seconds=60)
    assert provider.destroy_instance(instance.instance_id)
    thread.join(60)
    assert [type(error) for error in errors] == [ProviderUnavailable]
    assert errors[0].started
    local.assert_nothing_is_left()


def test_the_languages_are_those_whose_interpreter_is_there(bubblewrap: Local) -> None:
    languages = bubblewrap.provider.get_supported_languages()
    assert languages[0] == "python"
    assert ("bash" in languages) == (shutil.which("bash") is not None)
    assert ("nodejs" in languages) == ("javascript" in languages)
    if require("node"):
        assert "nodejs" in languages
    with pytest.raises(InvalidConfiguration) as caught:
        bubblewrap.provider.create_instance("cobol")
    assert caught.value.field == "language"


@pytest.mark.parametrize("asked", ["nodejs", "javascript"])
@pytest.mark.parametrize("run", ["nodejs", "javascript"])
def test_javascript_has_two_names(bubblewrap: Local, asked: str, run: str) -> None:
    require("node")
    instance = bubblewrap.provider.create_instance(asked)
    result = bubblewrap.provider.execute_code(instance.instance_id, "console.log(1)", run)
    bubblewrap.provider.destroy_instance(instance.instance_id)
    assert result.stdout == "1\n"


def test_every_result_tells_what_was_used(local: Local) -> None:
    code = "kept = b'x' * 50_000_000\nfor _ in range(5_000_000): pass"
    result = local.run(code)
    assert result.metadata["limits"]["memory_bytes"] == 256 * 1024 * 1024
    assert 50_000_000 < result.metadata["memory_peak_bytes"] < 350_000_000
    assert 0.02 < result.metadata["cpu_seconds"] < 5
    assert 0 < result.execution_time < 10


@pytest.mark.parametrize("own", [{"max_memory": "512m"}], indirect=True)
def test_the_memory_is_what_was_configured(own: Local) -> None:
    code = "kept = b'x' * 400_000_000\nprint('fits')"
    result = own.run(code)
    assert (result.stdout, result.metadata["limits"]["memory_bytes"]) == ("fits\n", 512 * 1024**2)


def test_health_tells_what_the_pool_holds(bubblewrap: Local) -> None:
    bubblewrap.assert_nothing_is_left()
    health = bubblewrap.provider.health_check()
    assert health
    assert health.details["runtime"] == "bubblewrap"
    assert health.details["idle"] >= 2
    assert health.details["busy"] == 0


def test_a_provider_that_is_not_open_says_so() -> None:
    provider = LocalProvider()
    assert not provider.health_check()
    assert provider.get_supported_languages() == []
    with pytest.raises(NotInitialized):
        provider.open(SandboxSpec(), "")
    assert provider.destroy_instance("x") is False
    provider.close()


def test_a_closed_provider_says_so(own: Local) -> None:
    sandbox = own.provider.open(SandboxSpec(), "")
    own.provider.close()
    with pytest.raises(NotInitialized):
        sandbox.run(Job("print(1)"))
    assert sandbox.close() is False
    assert own.provider.health_check().message == "closed"
    assert own.provider.get_supported_languages() == []
    with pytest.raises(NotInitialized):
        own.provider.create_instance("python")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_provider_may_end_while_its_successor_runs(launcher: str) -> None:
    require(LAUNCHERS[launcher])
    old = Local(launcher, pool_size=1)
    instance = old.provider.create_instance("python")
    new = Local(launcher, pool_size=1)
    try:
        result = old.provider.execute_code(instance.instance_id, "print('old')", "python")
        assert result.stdout == "old\n"
        old.provider.destroy_instance(instance.instance_id)
        assert old.run("print('old')").stdout == "old\n"
        assert new.run("print('new')").stdout == "new\n"
        old.provider.close()
        for _ in range(3):
            assert new.run("print('new')").stdout == "new\n"
        assert new.run("echo new", "bash").stdout == "new\n"
    finally:
        old.provider.close()
        new.close()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_closing_removes_what_was_put_into_the_data_directory(
    launcher: str, settings: Any, tmp_path: Path
) -> None:
    require(LAUNCHERS[launcher])
    settings.DATA_DIR = tmp_path
    local = Local(launcher, pool_size=1)
    local.run("print(1)")
    local.close()
    left = {path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()}
    assert left == {"guest"}


def test_by_default_the_strongest_isolation_there_is_is_taken() -> None:
    strongest = "gvisor" if shutil.which("runsc") else "bubblewrap"
    require(LAUNCHERS[strongest])
    provider = LocalProvider()
    provider.initialize(LocalProvider.check_config({"gvisor_platform": "ptrace", "pool_size": 1}))
    assert provider.health_check().details["runtime"] == strongest
    provider.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_size", 0), ("pool_size", 33), ("pool_size", "4"), ("pool_size", True), ("max_sandboxes", 0),
        ("max_sandboxes", 513), ("queue_timeout", 0), ("max_memory", "1t"), ("launcher", "docker"),
        ("gvisor_platform", "magic"), ("unknown", 1),
    ],
)  # fmt: skip
def test_a_wrong_configuration_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        LocalProvider.check_config({field: value})
    assert list(caught.value.errors) == [field]


@pytest.mark.parametrize("own", [{"pool_size": 1, "max_sandboxes": 2}], indirect=True)
def test_it_is_full_while_every_sandbox_is_taken(own: Local) -> None:
    provider = own.provider
    assert not provider.is_full()
    instances = [provider.create_instance("python").instance_id for _ in range(2)]
    wait_until(provider.is_full, seconds=60)
    provider.destroy_instance(instances[0])
    wait_until(lambda: not provider.is_full(), seconds=60)


@pytest.mark.parametrize("own", [{"max_sandboxes": 1, "queue_timeout": 1}], indirect=True)
def test_callers_beyond_the_capacity_are_refused_in_time(own: Local) -> None:
    # A slow machine may need longer for a sandbox than anybody waits here.
    wait_until(lambda: own.stats()["idle"] == 1, seconds=60)
    instance = own.provider.create_instance("python")
    began = time.monotonic()
    with pytest.raises(RateLimited) as caught:
        own.provider.create_instance("python")
    assert 0.9 < time.monotonic() - began < 60
    assert caught.value.code == "SB008"
    assert 1 <= caught.value.retry_after <= 60
    own.provider.destroy_instance(instance.instance_id)
    wait_until(lambda: own.stats()["idle"] == 1, seconds=60)
    assert own.run("print(1)").stdout == "1\n"


def test_it_recovers_when_what_it_runs_in_is_killed(own: Local) -> None:
    own.run("print(1)")
    for _ in range(3):
        end_bubblewrap(own)
        assert own.run("print('again')").stdout == "again\n"


def test_a_zygote_that_is_killed_during_a_run_is_told(own: Local) -> None:
    instance = own.provider.create_instance("python")

    def end_once_it_runs() -> None:
        wait_until(own.is_running, seconds=60)
        end_bubblewrap(own)

    ending = threading.Thread(target=end_once_it_runs)
    ending.start()
    result = own.provider.execute_code(instance.instance_id, "while True: pass", "python", 30)
    assert (result.exit_code, bool(result.metadata[SANDBOX_ENDED])) == (137, True)
    own.provider.destroy_instance(instance.instance_id)
    ending.join()
    assert own.run("print('again')").stdout == "again\n"


def test_it_says_so_when_sandboxes_cannot_be_started_any_more(
    settings: Any, tmp_path: Path
) -> None:
    require("bwrap")
    settings.DATA_DIR = tmp_path
    own = Local("bubblewrap", pool_size=1)
    try:
        own.run("print(1)")
        own.assert_nothing_is_left()
        shutil.rmtree(tmp_path / "run")
        end_bubblewrap(own)
        began = time.monotonic()
        with pytest.raises(CreationFailed) as caught:
            for _ in range(5):
                # A start that the end of its maker has broken off may be tried again.
                with suppress(RateLimited):
                    own.run("print(1)")
        assert time.monotonic() - began < 60
        assert caught.value.code == "SB004"
        assert not own.provider.health_check()
    finally:
        own.close()


@pytest.fixture
def folder_outside() -> Iterator[Path]:
    """A folder in no place that sandboxes have one of their own at."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_interpreter_that_lies_anywhere_is_seen_whole(
    launcher: str, monkeypatch: pytest.MonkeyPatch, folder_outside: Path
) -> None:
    require(LAUNCHERS[launcher])
    interpreter = folder_outside / "private/python/bin/python3"
    interpreter.parent.mkdir(parents=True)
    shutil.copy(find_python(), interpreter)
    for folder in (interpreter.parent, interpreter.parent.parent):
        # As an interpreter's folders are; what we make ourselves is private.
        folder.chmod(0o755)
    (folder_outside / "private").chmod(0o700)
    monkeypatch.setattr(
        "providers.runtime.launchers.host_programs.find_python", lambda _: str(interpreter)
    )
    local = Local(launcher, pool_size=1)
    try:
        code = "import subprocess, sys\nprint(sys.executable, subprocess.getoutput(sys.executable + ' -c \"print(5)\"'))"
        assert local.run(code).stdout == f"{interpreter} 5\n"
    finally:
        local.close()


def test_nothing_adds_up_over_many_runs(bubblewrap: Local) -> None:
    def held() -> tuple[int, int, int]:
        bubblewrap.assert_nothing_is_left()
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4
        threads = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), threads, memory

    for _ in range(20):
        bubblewrap.run("print(1)")
    descriptors, threads, memory = held()
    for _ in range(200):
        bubblewrap.run("print('x' * 10_000)")
    after = held()
    # One for each run would be 200. Other tests of this process have pools that come and go.
    assert after[0] - descriptors < 20
    assert after[1] - threads < 20
    assert after[2] - memory < 5_000


def test_gvisor_keeps_no_descriptor_either(gvisor: Local) -> None:
    def descriptors() -> int:
        gvisor.assert_nothing_is_left()
        return len(os.listdir("/proc/self/fd"))

    gvisor.run("print(1)")
    before = descriptors()
    for _ in range(5):
        gvisor.run("print(1)")
    # One for each run would be 5.
    assert descriptors() - before < 5


def test_one_failed_start_of_gvisor_is_no_reason_for_something_weaker(
    gvisor: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has worked in this process, so whoever keeps the machine busy may be the reason."""

    async def refuse(*_: object) -> None:
        raise CreationFailed("gVisor: no answer")

    monkeypatch.setattr(GvisorLauncher, "start", refuse)
    with pytest.raises(ProviderUnavailable, match="no answer"):
        LocalProvider().initialize(LocalProvider.check_config({"launcher": "auto"}))
