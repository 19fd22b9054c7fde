"""Whoever keeps sandboxes keeps the same promises of them: over every launcher, and at services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from django.test import override_settings

from providers.base import SandboxProvider
from providers.conformance import Check
from providers.contract import Probe, is_offered
from providers.local.provider import LocalProvider
from providers.session_conformance import KEPT_CHECKS
from tests.conftest import require
from tests.providers.contract.verdicts import is_told_as_not_offered
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.kept_service import sessions_service
from tests.support.pool_service import PoolService, over_docker, provider_of, running
from tests.support.processes import free_port
from tests.support.remote_providers import open_aliyun, open_e2b

pytest_plugins = ["tests.support.pool_fixtures"]

OURS = ("over_bubblewrap", "over_two_hosts", "over_the_engine", "in_place", "in_place_gvisor")
# The services that stand in for these keep the state of Python alone.
SERVICES = ("e2b", "aliyun")

# The same guest by the same means as over_bubblewrap, but for the way to the service.
SAME_GUEST = ("in_place", "over_two_hosts")
WAITS = ("that does not stop", "a deadline ends", "within their time")


def marks(provider: str, check: Check, language: str) -> list[pytest.MarkDecorator]:
    """What is waited for, and other languages, once for each guest."""
    is_long = language != "python" or any(each in check.name for each in WAITS)
    return [pytest.mark.slow] if provider in SAME_GUEST and is_long else []


CASES = [
    pytest.param(
        provider,
        check,
        language,
        id=f"{check.name}-{language}-{provider}",
        marks=marks(provider, check, language),
    )
    for check in KEPT_CHECKS
    for language in check.codes
    for provider in (*OURS, *SERVICES)
    if provider in OURS or (language == "python" and "languages" not in check.name)
]


@pytest.fixture(scope="module")
def over_bubblewrap(pool: PoolService) -> Iterator[SandboxProvider]:
    with provider_of(pool.url) as provider:
        yield provider


@pytest.fixture(scope="module")
def over_two_hosts(
    pool: PoolService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SandboxProvider]:
    with (
        running(tmp_path_factory.mktemp("second") / "log") as second,
        provider_of(f"{pool.url}\n{second.url}") as provider,
    ):
        yield provider


@pytest.fixture(scope="module")
def over_the_engine(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SandboxProvider]:
    with (
        over_docker(free_port(), tmp_path_factory.mktemp("pool") / "log") as pool,
        provider_of(pool.url) as provider,
    ):
        yield provider


@pytest.fixture(scope="module")
def service_of_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data directory of a service that is a process of its own."""
    folder = tmp_path_factory.mktemp("sessions")
    with sessions_service(folder, folder / "log"):
        yield folder


@pytest.fixture(scope="module")
def in_place(service_of_up: Path) -> Iterator[SandboxProvider]:
    """`local`, with the service that `up` starts."""
    yield from _opened("bubblewrap", service_of_up)


@pytest.fixture(scope="module")
def in_place_gvisor(service_of_up: Path) -> Iterator[SandboxProvider]:
    require("runsc")
    yield from _opened("gvisor", service_of_up)


def _opened(launcher: str, data_dir: Path) -> Iterator[SandboxProvider]:
    config = {
        "launcher": launcher,
        "gvisor_platform": "ptrace",
        "queue_timeout": 60,
        "pool_size": 1,
    }
    provider = LocalProvider()
    with override_settings(DATA_DIR=data_dir):
        provider.initialize(LocalProvider.check_config(config))
    yield provider
    provider.close()


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
    found: SandboxProvider = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(("provider", "check", "language"), CASES, indirect=["provider"])
def test_the_provider_keeps_its_promise(
    provider: SandboxProvider, check: Check, language: str
) -> None:
    if not is_offered(provider, check, language):
        assert is_told_as_not_offered(provider, check, language)
        return
    check.verify(Probe(provider, language), check.codes[language])
