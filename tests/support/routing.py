"""Routes, and the providers on them, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executions.runs.models import Execution
from providers.leases import close_all
from providers.manager import manager
from providers.models import ProviderConfig, Route
from providers.services import save_config
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import aliyun_config, e2b_config


def make_route(*providers: str, owner: str = "", language: str = "", **options: Any) -> Route:
    """A route over configured providers, in this order. `name:weight` gives a weight."""
    route = Route.objects.create(owner=owner, language=language, **options)
    for position, provider in enumerate(providers):
        name, _, weight = provider.partition(":")
        row = ProviderConfig.objects.defer("config").get(provider_id=name)
        route.steps.create(provider=row, position=position, weight=int(weight or 1))
    return route


def last_execution() -> Execution:
    found = Execution.objects.first()
    assert found is not None
    return found


def hops(execution: Execution) -> list[str]:
    """Provider, outcome and code of each hop, in words."""
    return [
        " ".join(filter(None, (hop["provider"], hop["outcome"], hop.get("code"))))
        for hop in execution.hops
    ]


@pytest.fixture
def services(
    db: None, e2b_server: E2BServer, aliyun_server: AgentRunServer
) -> Iterator[tuple[E2BServer, AgentRunServer]]:
    """Both remote services, configured; nothing is active and there is no route yet."""
    # What another test had active may be known for a moment longer.
    close_all()
    manager.close()
    save_config("e2b", e2b_config(e2b_server))
    save_config("aliyun_codeinterpreter", aliyun_config(aliyun_server))
    yield e2b_server, aliyun_server
    close_all()
    manager.close()
