"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property

import pytest
from rest_framework.test import APIClient

from executions.models import ApiKey, Tenant
from executions.services.keys import create_api_key
from providers.services import probing, trial

pytest_plugins = [
    "tests.provider_fixtures",
    "tests.sandboxes",
    "tests.docker_engine",
    "tests.remote_providers",
    "tests.routing",
    "tests.lying_provider",
]


def require(component: str) -> str:
    """The path of a program the test needs, such as "bwrap" or "chromium".

    A missing one skips the test on a developer's machine and fails it under REQUIRE=all.
    """
    if path := shutil.which(component):
        return path
    reason = f"{component} is not installed"
    if os.environ.get("REQUIRE") == "all":
        pytest.fail(f"{reason}, and REQUIRE=all", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed try is told at once; that it is not otherwise has a test of its own."""
    monkeypatch.setattr(trial, "STEP_SECONDS", 0.001)


@dataclass
class Caller:
    """Somebody with an API key, and a client that sends it."""

    api_key: ApiKey
    key_text: str

    @property
    def tenant(self) -> Tenant:
        return self.api_key.tenant

    @cached_property
    def client(self) -> APIClient:
        client = APIClient()
        client.credentials(HTTP_X_API_KEY=self.key_text)
        return client


@pytest.fixture(autouse=True)
def doubted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who would be probed: in the background of a test a probe runs only where it is the subject."""
    found: list[str] = []

    def note(provider_id: str) -> None:
        found.append(provider_id)
        probing._end(provider_id)

    monkeypatch.setattr(probing, "_start", note)
    return found


@pytest.fixture
def alice(db: None) -> Caller:
    """The owner of whatever a test is about."""
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return Caller(*create_api_key(tenant, "alice"))


@pytest.fixture
def bob(alice: Caller) -> Caller:
    """Alice's colleague: the same tenant, another key."""
    return Caller(*create_api_key(alice.tenant, "bob"))


@pytest.fixture
def charlie(db: None) -> Caller:
    """A stranger: another tenant."""
    tenant = Tenant.objects.create(slug="elsewhere", name="Elsewhere")
    return Caller(*create_api_key(tenant, "charlie"))
