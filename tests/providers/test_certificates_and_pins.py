"""A provider's secret goes to nobody whose certificate is not the one that was asked for.

Each client is the real one, with its SDK, against a TLS server on loopback that keeps what it gets.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.base import SandboxProvider
from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.self_managed.provider import SelfManagedProvider
from providers.values import InputFile
from tests.support.agentrun_server import AgentRunServer
from tests.support.certificates import Authority
from tests.support.e2b_server import E2BServer
from tests.support.listener import Listener
from tests.support.remote_providers import aliyun_config, e2b_config, open_aliyun, open_e2b, run

SECRET = "the-secret-0123456789"
OTHER = "sha256/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="

Try = Callable[[str, dict[str, Any]], None]


def _self_managed(url: str, trust: dict[str, Any]) -> None:
    provider = SelfManagedProvider()
    config = {"endpoint": url, "token": SECRET, "max_retries": 0, **trust}
    provider.initialize(SelfManagedProvider.check_config(config))


def _e2b(url: str, trust: dict[str, Any]) -> None:
    provider = E2BProvider()
    config = {"api_key": SECRET, "api_url": url, "sandbox_url": url, **trust}
    provider.initialize(E2BProvider.check_config(config))
    provider.create_instance()


def _aliyun(url: str, trust: dict[str, Any]) -> SandboxProvider:
    provider = AliyunCodeInterpreterProvider()
    config = {
        "access_key_id": SECRET,
        "access_key_secret": "another-secret-0123456789",
        "account_id": "1234567890123456",
        "data_endpoint": url,
        "control_endpoint": url,
        "template_name": "code",
        **trust,
    }
    provider.initialize(AliyunCodeInterpreterProvider.check_config(config))
    return provider


def _aliyun_data(url: str, trust: dict[str, Any]) -> None:
    _aliyun(url, trust).create_instance()


def _aliyun_control(url: str, trust: dict[str, Any]) -> None:
    _aliyun(url, trust).sweep()


CLIENTS: dict[str, Try] = {
    "self_managed": _self_managed,
    "e2b": _e2b,
    "aliyun": _aliyun_data,
    "aliyun_control": _aliyun_control,
}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.mark.parametrize("client", CLIENTS)
def test_the_right_authority_and_key_get_the_secret(
    client: str, authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue(tmp_path)
    trust = {"ca_certificates": authority.pem, "public_key_pins": f"{OTHER}, {issued.pin}"}
    with Listener(issued.server_context()) as server:
        with pytest.raises(SandboxError):
            CLIENTS[client](server.url, trust)
        server.settle()
        assert server.handshakes
        assert SECRET.encode() in server.received


@pytest.mark.parametrize("client", CLIENTS)
def test_another_key_gets_no_byte_after_the_handshake(
    client: str, authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue(tmp_path)
    trust = {"ca_certificates": authority.pem, "public_key_pins": OTHER}
    with Listener(issued.server_context()) as server:
        with pytest.raises(SandboxError) as raised:
            CLIENTS[client](server.url, trust)
        server.settle()
        assert (server.handshakes > 0, server.received) == (True, b"")
    assert not raised.value.started
    assert SECRET not in raised.value.message


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("known", [True, False])
def test_an_unknown_authority_gets_nothing(
    client: str, known: bool, authority: Authority, tmp_path: Path
) -> None:
    """Neither where the system's authorities count nor where another one is named."""
    issued = Authority("Somebody else").issue(tmp_path)
    trust = {"ca_certificates": authority.pem} if known else {}
    with Listener(issued.server_context()) as server:
        with pytest.raises(SandboxError):
            CLIENTS[client](server.url, trust)
        server.settle()
        assert server.received == b""


def test_a_named_authority_takes_the_place_of_the_systems(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = Authority("The system's")
    (tmp_path / "ca.pem").write_text(systems.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for trust, reached in (({}, True), ({"ca_certificates": authority.pem}, False)):
        for client, call in CLIENTS.items():
            with Listener(systems.issue(tmp_path).server_context()) as server:
                with pytest.raises(SandboxError):
                    call(server.url, trust)
                server.settle()
                assert (SECRET.encode() in server.received) is reached, (client, trust)


def test_everything_e2b_does_works_with_an_authority_and_a_pin(
    authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue(tmp_path)
    server = E2BServer()
    server.serve_tls(issued.server_context())
    trust = {"ca_certificates": authority.pem, "public_key_pins": issued.pin}
    provider = open_e2b(server, **trust)
    try:
        code = "print(open('in.txt').read()); open('artifacts/a.txt', 'w').write('kept')"
        result = run(provider, code, files=[InputFile("in.txt", b"given")])
        assert (result.stdout, result.artifacts[0].content) == ("given\n", b"kept")
        assert run(provider, "echo shell", "bash").stdout == "shell\n"
        assert provider.health_check()
    finally:
        provider.close()
        server.close()
    assert e2b_config(server)["api_url"].startswith("https://")


def test_everything_aliyun_does_works_with_an_authority_and_a_pin(
    authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue(tmp_path)
    server = AgentRunServer(certificate=issued.path)
    trust = {"ca_certificates": authority.pem, "public_key_pins": issued.pin}
    provider = open_aliyun(server, **trust)
    try:
        assert run(provider, "print('ran')").stdout == "ran\n"
        assert provider.health_check()
        assert provider.sweep() == 0
    finally:
        provider.close()
        server.close()
    assert aliyun_config(server)["control_endpoint"].startswith("https://")


@pytest.mark.parametrize("client", CLIENTS)
def test_no_redirect_is_followed_and_no_proxy_of_the_environment_is_used(
    client: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = authority.issue(tmp_path)
    with Listener(issued.server_context()) as elsewhere, Listener() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        head = f"HTTP/1.1 307 Elsewhere\r\nLocation: {elsewhere.url}/\r\n"
        answer = f"{head}Content-Length: 0\r\n\r\n".encode()
        with Listener(issued.server_context(), answer) as service:
            with pytest.raises(SandboxError):
                CLIENTS[client](service.url, {"ca_certificates": authority.pem})
            service.settle()
            assert SECRET.encode() in service.received
        assert (elsewhere.connections, proxy.connections) == (0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ca_certificates", "no certificate"),
        ("ca_certificates", "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----"),
        ("public_key_pins", "sha256/short="),
        ("public_key_pins", "sha1/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="),
        ("public_key_pins", f"{OTHER} and more"),
    ],
)
def test_what_is_no_certificate_and_no_pin_is_refused(field: str, value: str) -> None:
    config = {"endpoint": "https://pool.example", field: value}
    with pytest.raises(InvalidConfiguration) as caught:
        SelfManagedProvider.check_config(config)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), [("ca_certificates", "x"), ("public_key_pins", OTHER)])
def test_over_plain_http_neither_is_taken(field: str, value: str) -> None:
    with pytest.raises(InvalidConfiguration, match="Use https") as caught:
        SelfManagedProvider.check_config({"endpoint": "http://127.0.0.1:9385", field: value})
    assert caught.value.field == field


def test_old_protocol_versions_are_not_spoken(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(tmp_path)
    context = issued.server_context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with Listener(context) as server:
        for call in CLIENTS.values():
            with pytest.raises(SandboxError):
                call(server.url, {"ca_certificates": authority.pem})
        server.settle()
        assert server.received == b""
