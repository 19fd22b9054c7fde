"""Every way E2B can fail, provoked over the wire, and the error it becomes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback

import pytest

from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration, NotInitialized, SandboxError
from providers.values import InputFile, SandboxSpec
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import e2b_config, open_e2b, run
from tests.support.wire_server import eventually, refusing

# How each failure shows. Once the code was sent, it may have run, whatever is answered.
CREATING = [
    ("hang", "SB003"),
    ("cut", "SB003"),
    ("401", "SB003"),
    ("403", "SB003"),
    ("404", "SB004"),
    ("429", "SB008"),
    ("500", "SB004"),
    ("503", "SB009"),
    ("truncated", "SB003"),
    ("bad_json", "SB003"),
]
RUNNING = [
    ("cut", "SB003"),
    ("401", "SB003"),
    ("403", "SB003"),
    ("404", "SB009"),
    ("429", "SB008"),
    ("500", "SB009"),
    ("503", "SB009"),
    ("truncated", "SB003"),
    ("bad_json", "SB003"),
    ("lost", "SB003"),
    ("dead", "SB009"),
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 3)
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))


@pytest.mark.parametrize(("fault", "code"), CREATING)
def test_a_sandbox_that_cannot_be_created(
    e2b: E2BProvider, e2b_server: E2BServer, fault: str, code: str
) -> None:
    e2b_server.fail("create", fault)
    with pytest.raises(SandboxError) as caught:
        run(e2b, "print(1)")
    assert (caught.value.code, caught.value.started) == (code, False)
    assert not e2b_server.executed
    assert eventually(lambda: e2b_server.sandboxes == {})
    assert run(e2b, "print('again')").stdout == "again\n"


@pytest.mark.parametrize(("fault", "code"), RUNNING)
def test_a_run_that_fails(e2b: E2BProvider, e2b_server: E2BServer, fault: str, code: str) -> None:
    e2b_server.fail("execute", fault)
    with pytest.raises(SandboxError) as caught:
        run(e2b, "print(1)")
    assert (caught.value.code, caught.value.started) == (code, True)
    assert sum(e2b_server.executed.values()) <= 1
    assert eventually(lambda: e2b_server.sandboxes == {})


SHELL = [
    ("cut", "SB003"),
    ("401", "SB003"),
    ("404", "SB009"),
    ("429", "SB008"),
    ("500", "SB009"),
    ("503", "SB009"),
    ("bad_json", "SB003"),
    ("dead", "SB009"),
]


@pytest.mark.parametrize(("fault", "code"), SHELL)
def test_shell_code_that_fails_to_run(
    e2b: E2BProvider, e2b_server: E2BServer, fault: str, code: str
) -> None:
    e2b_server.fail("Start", fault)
    with pytest.raises(SandboxError) as caught:
        run(e2b, "echo 1", "bash")
    assert (caught.value.code, caught.value.started) == (code, True)
    assert not e2b_server.executed


@pytest.mark.parametrize("fault", ["hang", "slow"])
def test_a_run_that_does_not_answer_has_timed_out(
    e2b: E2BProvider, e2b_server: E2BServer, fault: str
) -> None:
    e2b_server.fail("execute", fault)
    result = run(e2b, "print('x' * 20_000)", timeout=1)
    assert (result.timed_out, result.exit_code) == (True, None)
    assert eventually(lambda: e2b_server.sandboxes == {})


@pytest.mark.parametrize("fault", ["401", "404", "429", "500", "503", "cut"])
def test_files_that_cannot_be_written_mean_that_nothing_ran(
    e2b: E2BProvider, e2b_server: E2BServer, fault: str
) -> None:
    e2b_server.fail("write", fault)
    with pytest.raises(SandboxError) as caught:
        run(e2b, "print(1)", files=[InputFile("a", b"a")])
    assert (caught.value.started, caught.value.nothing_ran) == (False, True)
    assert not e2b_server.executed


def test_a_refused_connection_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # The SDK tries three times before it gives up.
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 10)
    with refusing() as url:
        provider = E2BProvider()
        config = {"api_key": "e2b_x", "api_url": url, "sandbox_url": url}
        provider.initialize(E2BProvider.check_config(config))
        with pytest.raises(SandboxError, match="Check the network") as caught:
            provider.create_instance()
        assert (caught.value.code, caught.value.may_fall_back) == ("SB003", True)
        assert not provider.health_check()


def test_an_unknown_template_is_told_with_its_field(e2b_server: E2BServer) -> None:
    with pytest.raises(SandboxError, match="Check template") as caught:
        open_e2b(e2b_server, template="missing-one").create_instance()
    assert caught.value.code == "SB004"


def test_destroying_fails_loudly_and_what_is_gone_is_no_error(
    e2b: E2BProvider, e2b_server: E2BServer
) -> None:
    sandbox = e2b.open(SandboxSpec(), "wonderland")
    e2b_server.fail("kill", "500")
    with pytest.raises(SandboxError):
        sandbox.close()
    assert sandbox.close() is True
    assert sandbox.close() is False


def test_what_could_not_be_destroyed_is_destroyed_later(
    e2b: E2BProvider, e2b_server: E2BServer
) -> None:
    instance = e2b.create_instance().instance_id
    e2b_server.fail("kill", "500", "503")
    with pytest.raises(SandboxError):
        e2b.destroy_instance(instance)
    assert eventually(lambda: e2b_server.sandboxes == {})


def test_health_is_what_the_service_answers_now(e2b: E2BProvider, e2b_server: E2BServer) -> None:
    assert e2b.health_check()
    e2b_server.fail("list", "401")
    health = e2b.health_check()
    assert (health.healthy, health.details["code"]) == (False, "SB003")
    assert "API key" in health.message


def test_a_closed_provider_leaves_nothing(e2b_server: E2BServer) -> None:
    provider = open_e2b(e2b_server)
    provider.create_instance()
    provider.close()
    assert e2b_server.sandboxes == {}
    with pytest.raises(NotInitialized):
        provider.create_instance()
    assert not provider.health_check()


LEAVE_ONE = """
import json, os, sys
from providers.e2b.provider import E2BProvider
provider = E2BProvider()
provider.initialize(E2BProvider.check_config(json.loads(sys.argv[1])))
print(provider.create_instance().instance_id, flush=True)
sys.stdin.read(1)
os._exit(1)
"""


def test_what_a_dead_process_left_is_swept_and_nothing_else(
    e2b: E2BProvider, e2b_server: E2BServer
) -> None:
    config = json.dumps(e2b_config(e2b_server))
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVE_ONE, config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert process.stdout is not None
    left = process.stdout.readline().strip()
    mine = e2b.create_instance().instance_id
    assert e2b.sweep() == 0
    process.communicate("x")
    e2b_server.sandboxes["somebody-elses"] = type(e2b_server.sandboxes[mine])(
        e2b_server.sandboxes[mine].notebook, "", "", {}, 60, 0
    )
    assert left in e2b_server.sandboxes
    assert e2b.sweep() == 1
    assert set(e2b_server.sandboxes) == {mine, "somebody-elses"}
    e2b.destroy_instance(mine)


@pytest.mark.parametrize(
    ("operation", "fault"),
    [("create", fault) for fault, _ in CREATING if fault != "hang"]
    + [("execute", fault) for fault, _ in RUNNING]
    + [("kill", "500")],
)
def test_no_failure_shows_the_key(
    e2b: E2BProvider,
    e2b_server: E2BServer,
    operation: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    e2b_server.fail(operation, fault)
    with pytest.raises(SandboxError) as caught:
        run(e2b, "print(1)")
    error = caught.value
    shown = "".join(
        traceback.TracebackException.from_exception(error, capture_locals=True).format()
    )
    assert error.__cause__ is None
    for text in (str(error), repr(error), shown, caplog.text, repr(vars(e2b))):
        assert e2b_server.api_key not in text


def test_a_service_that_repeats_the_key_does_not_get_it_shown(
    e2b: E2BProvider, e2b_server: E2BServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"code": 400, "message": f"bad key {e2b_server.api_key}"}
    monkeypatch.setattr(e2b_server, "error_body", lambda status: body)
    e2b_server.fail("create", "500")
    with pytest.raises(SandboxError, match="bad key ••••"):
        run(e2b, "print(1)")


def test_a_region_has_no_host_that_nobody_published(e2b_server: E2BServer) -> None:
    with pytest.raises(InvalidConfiguration, match="publishes no host"):
        E2BProvider.check_config({"api_key": "e2b_x", "region": "eu"})
    config = E2BProvider.check_config(
        {"api_key": "e2b_x", "region": "eu", "domain": "e2b.example.com"}
    )
    assert config["domain"] == "e2b.example.com"
    provider = open_e2b(e2b_server, region="eu")
    assert provider.health_check().details["region"] == "eu"


def test_the_environment_may_name_the_address(
    e2b_server: E2BServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_URL", e2b_server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", e2b_server.url)
    monkeypatch.setenv("E2B_DEBUG", "true")
    provider = open_e2b(e2b_server, api_url="", sandbox_url="")
    assert run(provider, "print('there')").stdout == "there\n"


def test_the_environment_may_hold_the_key(e2b_server: E2BServer) -> None:
    script = (
        "from providers.e2b.provider import E2BProvider as E2B\n"
        "provider = E2B()\nprovider.initialize(E2B.check_config({}))\n"
        "print(provider.health_check())"
    )
    address = {"E2B_API_URL": e2b_server.url, "E2B_API_KEY": e2b_server.api_key}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | address | {"PYTHONPATH": "."},
    )
    assert "healthy=True" in ran.stdout, ran.stderr


def test_a_missing_sdk_is_told_with_the_line_that_installs_it(
    e2b_server: E2BServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("client", "machine"):
        monkeypatch.delitem(sys.modules, f"providers.e2b.{name}")
    monkeypatch.setitem(sys.modules, "e2b_code_interpreter", None)
    with pytest.raises(SandboxError, match="pip install e2b-code-interpreter"):
        open_e2b(e2b_server)
