"""Remote providers for tests, each with the server of its service on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.base import SandboxProvider
from providers.e2b.provider import E2BProvider
from providers.sandbox import KeptSandbox
from providers.services import breaker
from providers.services.settings_cache import forget_all
from providers.values import Event, ExecutionResult
from tests.support.agentrun_server import AgentRunServer
from tests.support.certificates import Authority
from tests.support.e2b_server import E2BServer


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """What one test's database said is nothing for the next one to go by."""
    breaker.forget()
    forget_all()


def run(
    provider: SandboxProvider,
    code: str,
    language: str = "python",
    *,
    timeout: float = 10,
    **options: Any,
) -> ExecutionResult:
    """Run code in an instance of its own."""
    instance = provider.create_instance(language, owner="wonderland")
    try:
        return provider.execute_code(instance.instance_id, code, language, timeout, **options)
    finally:
        provider.destroy_instance(instance.instance_id)


def open_e2b(server: E2BServer, **config: Any) -> E2BProvider:
    provider = E2BProvider()
    provider.initialize(E2BProvider.check_config({**e2b_config(server), **config}))
    return provider


def e2b_config(server: E2BServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture(scope="session")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    path.write_text(Authority().pem)
    return path


@pytest.fixture
def _few_authorities(_authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load all that a machine trusts takes each client longer than a run, and none is asked."""
    monkeypatch.setenv("SSL_CERT_FILE", str(_authority))


@pytest.fixture(scope="session")
def _sdks() -> None:
    """A busy machine needs longer to load the vendors' SDKs than a request waits for a provider."""
    import_module("providers.e2b.client")
    import_module("providers.aliyun_codeinterpreter.client")


@pytest.fixture
def e2b_server(_few_authorities: None, _sdks: None) -> Iterator[E2BServer]:
    server = E2BServer()
    yield server
    server.close()


@pytest.fixture
def e2b(e2b_server: E2BServer) -> Iterator[E2BProvider]:
    provider = open_e2b(e2b_server)
    yield provider
    provider.close()


def open_aliyun(server: AgentRunServer, **config: Any) -> AliyunCodeInterpreterProvider:
    provider = AliyunCodeInterpreterProvider()
    provider.initialize(
        AliyunCodeInterpreterProvider.check_config({**aliyun_config(server), **config})
    )
    return provider


def aliyun_config(server: AgentRunServer) -> dict[str, Any]:
    return {
        "access_key_id": server.access_key_id,
        "access_key_secret": server.access_key_secret,
        "account_id": "1234567890123456",
        "region": server.region,
        "template_name": "code",
        "data_endpoint": server.url,
        "control_endpoint": server.url,
    }


@pytest.fixture
def aliyun_server(_few_authorities: None, _sdks: None) -> Iterator[AgentRunServer]:
    server = AgentRunServer()
    yield server
    server.close()


@pytest.fixture
def aliyun(aliyun_server: AgentRunServer) -> Iterator[AliyunCodeInterpreterProvider]:
    provider = open_aliyun(aliyun_server)
    yield provider
    provider.close()


def followed(sandbox: KeptSandbox, pid: int, after: int = 0) -> bytes:
    events: list[Event] = []
    sandbox.processes.follow(pid, events.append, after)
    return b"".join(event.data for event in events)
