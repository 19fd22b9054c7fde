"""Every provider keeps the same promises; which ones follows from its capabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO

import docker
import pytest
from django.core.management import CommandError, call_command

from providers.base import SandboxProvider
from providers.contract import CHECKS, Check, Probe, is_offered
from providers.self_managed.provider import SelfManagedProvider
from providers.services import save_config
from providers.session_conformance import KEPT_CHECKS
from tests.providers.contract.verdicts import is_told_as_not_offered
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.pool_service import over_docker, provider_of, running
from tests.support.processes import free_port
from tests.support.remote_providers import e2b_config, open_aliyun, open_e2b

PROVIDERS = ("local", "self_managed", "self_managed_hosts", "e2b", "aliyun_codeinterpreter")


@pytest.fixture(scope="module")
def self_managed(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SelfManagedProvider]:
    """Containers of the real engine, through a service."""
    with over_docker(free_port(), tmp_path_factory.mktemp("pool") / "log") as pool:
        provider = SelfManagedProvider()
        config = {"endpoint": pool.url, "pool_size": 2}
        provider.initialize(SelfManagedProvider.check_config(config))
        yield provider
        provider.close()


@pytest.fixture(scope="module")
def self_managed_hosts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SelfManagedProvider]:
    """Two services."""
    first, second = (tmp_path_factory.mktemp(name) / "log" for name in ("first", "second"))
    with (
        running(first) as one,
        running(second) as other,
        provider_of(f"{one.url}\n{other.url}") as provider,
    ):
        yield provider


@pytest.fixture(scope="module")
def e2b() -> Iterator[SandboxProvider]:
    server = E2BServer()
    opened = open_e2b(server)
    yield opened
    opened.close()
    server.close()


@pytest.fixture(scope="module")
def aliyun() -> Iterator[SandboxProvider]:
    server = AgentRunServer()
    opened = open_aliyun(server)
    yield opened
    opened.close()
    server.close()


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> SandboxProvider:
    name = {"local": "bubblewrap", "aliyun_codeinterpreter": "aliyun"}.get(request.param)
    found = request.getfixturevalue(name or request.param)
    chosen: SandboxProvider = getattr(found, "provider", found)
    return chosen


# What a language other than Python differs in is the guest's, which `local` has from the same files
# as the containers of a service.
SAME_GUEST = ("self_managed", "self_managed_hosts")

CASES = [
    pytest.param(
        provider,
        check,
        language,
        id=f"{check.name}-{language}-{provider}",
        marks=[pytest.mark.slow] if provider in SAME_GUEST and language != "python" else [],
    )
    for check in CHECKS
    if check not in KEPT_CHECKS  # test_kept_promises.py
    for language in check.codes
    for provider in PROVIDERS
]


@pytest.mark.parametrize(("provider", "check", "language"), CASES, indirect=["provider"])
def test_the_provider_keeps_its_promise(
    provider: SandboxProvider, check: Check, language: str
) -> None:
    if not is_offered(provider, check, language):
        assert is_told_as_not_offered(provider, check, language)
        return
    check.verify(Probe(provider, language), check.codes[language])


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of them find is told above; here it is about the command."""
    monkeypatch.setattr("providers.contract.CHECKS", CHECKS[:3])


def test_the_command_prints_the_matrix(db: None, e2b_server: E2BServer, few_checks: None) -> None:
    save_config("e2b", e2b_config(e2b_server))
    out = StringIO()
    call_command("check_provider", "e2b", stdout=out)
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["python", "javascript", "bash"]
    assert lines[1].split()[-3:] == ["ok", "ok", "ok"]
    assert "FAILED" not in out.getvalue()
    assert e2b_server.sandboxes == {}


def test_the_command_fails_where_a_promise_is_broken(
    db: None, e2b_server: E2BServer, few_checks: None
) -> None:
    save_config("e2b", e2b_config(e2b_server))
    e2b_server.fail("execute", "500")
    out = StringIO()
    with pytest.raises(CommandError, match="fails 1 of"):
        call_command("check_provider", "e2b", "--json", stdout=out)
    first, second = map(json.loads, out.getvalue().splitlines()[:2])
    assert (first["outcome"], second["outcome"]) == ("failed", "ok")
    assert first["message"].startswith("SB009: ")


def test_the_command_names_an_unknown_or_unconfigured_provider(db: None) -> None:
    with pytest.raises(CommandError, match="SB002: There is no provider 'nope'"):
        call_command("check_provider", "nope")
    with pytest.raises(CommandError, match="api_key"):
        call_command("check_provider", "e2b")
