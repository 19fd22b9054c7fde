"""`get_sandbox()`: which sandbox SANDBOX_TYPE gives, and that it never quietly gives another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from executions import sandbox
from executions.runs.models import Execution
from executions.sandbox import SandboxResult, get_sandbox
from providers import leases as providers_named
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.models import ProviderConfig
from tests.conftest import require

pytestmark = pytest.mark.one_database


@pytest.fixture
def configured(db: None) -> Any:
    """A way to change the stored configuration of a provider, active or not."""

    def change(provider_id: str, config: dict[str, Any], active: bool = False) -> None:
        row = ProviderConfig.objects.filter(provider_id=provider_id).first()
        row = row or ProviderConfig(provider_id=provider_id)
        row.config, row.is_active = config, active
        row.save()

    yield change
    for named in providers_named._managers.values():
        named.close()


def test_it_needs_no_configuration(no_provider: None, configured: Any, settings: Any) -> None:
    require("bwrap")
    settings.SANDBOX_TYPE = ""

    result = get_sandbox().execute("print('zero')")

    assert isinstance(result, SandboxResult)
    assert (result.stdout, result.stderr, result.exit_code) == ("zero\n", "", 0)
    assert (result.truncated, result.timed_out) == (False, False)
    assert 0 < result.duration < 10
    assert result.meta["runtime"] in ("bubblewrap", "gvisor")
    assert result.meta["limits"]
    assert not ProviderConfig.objects.exists()


def test_every_run_is_recorded(local_active: None, configured: Any, settings: Any) -> None:
    settings.SANDBOX_TYPE = "Local"

    get_sandbox().execute("import sys\nsys.exit(4)")

    record = Execution.objects.get()
    assert (record.tenant_slug, record.provider, record.exit_code) == ("internal", "local", 4)


def test_it_is_local_even_when_another_provider_is_active(
    scripted: Any, configured: Any, settings: Any
) -> None:
    require("bwrap")
    settings.SANDBOX_TYPE = "local"
    configured("local", {"launcher": "bubblewrap", "pool_size": 1})

    result = get_sandbox().execute("print('really run')")

    assert result.stdout == "really run\n"
    assert result.meta["runtime"] == "bubblewrap"
    assert scripted() == []


def test_a_changed_configuration_is_taken_up(
    no_provider: None, configured: Any, settings: Any
) -> None:
    require("bwrap")
    settings.SANDBOX_TYPE = "local"
    configured("local", {"launcher": "bubblewrap", "pool_size": 1, "max_memory": "256m"})
    first = get_sandbox().execute("print(1)")
    for named in providers_named._managers.values():
        named.close()
    configured("local", {"launcher": "bubblewrap", "pool_size": 1, "max_memory": "128m"})

    second = get_sandbox().execute("print(1)")

    assert first.meta["limits"]["memory_bytes"] == 256 * 2**20
    assert second.meta["limits"]["memory_bytes"] == 128 * 2**20


@pytest.mark.parametrize("sandbox_type", ["docker", "e2b"])
def test_a_type_whose_provider_is_missing_is_an_error_and_never_a_local_run(
    sandbox_type: str,
    local_active: None,
    configured: Any,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.SANDBOX_TYPE = sandbox_type
    monkeypatch.setitem(sandbox._PROVIDERS, sandbox_type, f"{sandbox_type}_that_is_missing")

    with pytest.raises(ProviderUnavailable) as raised:
        get_sandbox()

    assert raised.value.code == "SB009"
    assert f"{sandbox_type}_that_is_missing" in raised.value.message
    assert "Install it" in raised.value.message
    assert Execution.objects.count() == 0


def test_an_unknown_type_is_refused_by_name(db: None, settings: Any) -> None:
    settings.SANDBOX_TYPE = "podman"

    with pytest.raises(InvalidConfiguration) as raised:
        get_sandbox()

    assert raised.value.field == "SANDBOX_TYPE"
    assert "local, docker, e2b" in raised.value.message


def test_docker_is_the_provider_of_that_id(
    scripted: Any, configured: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SANDBOX_TYPE = "docker"
    monkeypatch.setitem(sandbox._PROVIDERS, "docker", "scripted")

    get_sandbox().execute("answer = ExecutionResult('from elsewhere', '', 0, 1.5)")

    assert Execution.objects.get().provider == "scripted"


def test_the_timeout_is_the_configured_one_unless_given(
    local_active: None, configured: Any, settings: Any
) -> None:
    settings.SANDBOX_TYPE = "local"
    settings.SANDBOX_TIMEOUT_SEC = 1

    default = get_sandbox().execute("while True: pass")
    loud = get_sandbox().execute("import sys; print('a', file=sys.stderr)\nwhile True: pass")
    given = get_sandbox().execute("import time\ntime.sleep(1.2)\nprint('done')", timeout=5)

    assert (default.timed_out, default.exit_code) == (True, -1)
    assert (default.stdout, default.stderr) == ("", "Execution timed out")
    assert loud.stderr == "a\nExecution timed out"
    assert 0.9 < default.duration < 15
    assert given.stdout == "done\n"


def test_output_is_bounded(local_active: None, configured: Any, settings: Any) -> None:
    settings.SANDBOX_TYPE = "local"
    settings.SANDBOX_MAX_OUTPUT_KB = 2

    result = get_sandbox().execute("print('x' * 10_000)")

    assert (len(result.stdout), result.truncated) == (2000, True)


def test_another_language_can_be_asked_for(
    local_active: None, configured: Any, settings: Any
) -> None:
    settings.SANDBOX_TYPE = "local"

    assert get_sandbox().execute("echo shell", language="bash").stdout == "shell\n"
    with pytest.raises(InvalidConfiguration):
        get_sandbox().execute("x", language="cobol")


def test_isolation_that_does_not_work_is_an_error_and_never_a_bare_run(
    no_provider: None,
    configured: Any,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.SANDBOX_TYPE = "local"
    settings.SANDBOX_LOCAL_UNISOLATED = False
    for tool in ("bwrap", "runsc"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(ProviderUnavailable) as raised:
        get_sandbox().execute("print('must not run')")

    assert raised.value.code == "SB009"
    record = Execution.objects.get()
    assert (record.status, record.error_code, record.stdout) == ("error", "SB009", "")
