"""How Aliyun's Code Interpreter alone fails; what all services have is in the contract's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.errors import InvalidConfiguration, SandboxError
from tests.support.agentrun_server import AgentRunServer
from tests.support.certificates import Authority
from tests.support.remote_providers import aliyun_config, open_aliyun

Aliyun = AliyunCodeInterpreterProvider


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.service.REQUEST_SECONDS", 3)
    monkeypatch.setattr("providers.remote.reclaim.RECLAIM_SECONDS", (0.1, 0.5))


def test_a_wrong_secret_is_found_out_by_its_signature(aliyun_server: AgentRunServer) -> None:
    provider = open_aliyun(aliyun_server, access_key_secret="another-secret")
    with pytest.raises(SandboxError, match="refuses the credentials") as caught:
        provider.create_instance()
    assert caught.value.code == "SB003"
    assert aliyun_server.unsigned == 1
    health = provider.health_check()
    assert (health.healthy, health.details["code"]) == (False, "SB003")


def test_an_error_has_the_services_request_id_and_when_to_come_back(
    aliyun: Aliyun, aliyun_server: AgentRunServer
) -> None:
    aliyun_server.fail("create", "429")
    with pytest.raises(SandboxError, match="request-4711") as caught:
        aliyun.create_instance()
    assert caught.value.retry_after == 7


def test_the_environment_stands_in_for_the_configuration(
    aliyun_server: AgentRunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "ACCESS_KEY_ID": aliyun_server.access_key_id,
        "ACCESS_KEY_SECRET": aliyun_server.access_key_secret,
        "ACCOUNT_ID": "1234567890123456",
        "REGION": aliyun_server.region,
        "DATA_ENDPOINT": aliyun_server.url,
    }.items():
        monkeypatch.setenv(f"AGENTRUN_{name}", value)
    script = """
import sys
from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider as Aliyun
provider = Aliyun()
provider.initialize(Aliyun.check_config({"template_name": "code"}))
print(provider.health_check())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "healthy=True" in ran.stdout
    assert aliyun_server.access_key_secret not in ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ["access_key_id", "access_key_secret", "account_id"])
def test_what_is_missing_is_named(aliyun_server: AgentRunServer, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"{name}: This field is required"):
        open_aliyun(aliyun_server, **{name: ""})


def test_a_missing_sdk_is_told_with_the_line_that_installs_it(
    aliyun_server: AgentRunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "providers.aliyun_codeinterpreter"
    for name in ("client", "sdk"):
        monkeypatch.delitem(sys.modules, f"{package}.{name}")
        monkeypatch.delattr(f"{package}.{name}")
    monkeypatch.setitem(sys.modules, "agentrun.sandbox", None)
    with pytest.raises(SandboxError, match=r"pip install agentrun-sdk==0\.0\.54"):
        open_aliyun(aliyun_server)


LEAVE_ONE = """
import json, os, sys
import django
django.setup()
from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider as Aliyun
provider = Aliyun()
provider.initialize(Aliyun.check_config(json.loads(sys.argv[1])))
print(provider.create_instance().instance_id, flush=True)
os._exit(1)
"""


def test_what_a_dead_process_left_is_swept_and_a_missing_template_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    server = AgentRunServer(certificate=authority.issue(tmp_path).path)
    right = {**aliyun_config(server), "template_name": ""}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", LEAVE_ONE, json.dumps(right)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": "."},
        )
        left = ran.stdout.strip()
        assert left in server.sandboxes, ran.stderr
        assert "cofferdam" in server.templates
        server.sandboxes["somebody-elses"] = server.sandboxes[left]
        stranger = open_aliyun(server, template_name="", access_key_secret="another-secret")
        with pytest.raises(SandboxError) as refused:
            stranger.sweep()
        assert refused.value.code == "SB003"
        assert (left in server.sandboxes, server.unsigned > 0) == (True, True)
        stranger.close()
        provider = open_aliyun(server, template_name="")
        assert provider.sweep() == 1
        assert set(server.sandboxes) == {"somebody-elses"}
        provider.close()
    finally:
        server.close()
