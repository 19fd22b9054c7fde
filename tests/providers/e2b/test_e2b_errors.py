"""How E2B alone fails; what all remote services have is in the contract's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.values import SandboxSpec
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import e2b_config, open_e2b, run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 3)
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))


def test_a_key_that_is_refused_is_named(e2b_server: E2BServer) -> None:
    health = open_e2b(e2b_server, api_key="e2b_wrong").health_check()
    assert (health.healthy, health.details["code"]) == (False, "SB003")
    assert "API key" in health.message


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


LEAVE_ONE = """
import json, os, sys
import django
django.setup()
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
