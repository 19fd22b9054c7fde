"""SANDBOX_API_KEY: a key that was chosen elsewhere opens the door to one tenant, and to no other."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from executions.tenants.keys import (
    Unauthenticated,
    authenticate,
    create_api_key,
    ensure_key,
    revoke,
)
from executions.tenants.models import ApiKey, Tenant
from providers.errors import InvalidConfiguration
from sandbox_site import agent_sandbox
from sandbox_site.environment import StrictEnv

pytestmark = [pytest.mark.django_db, pytest.mark.database]

FIRST, SECOND = "a-first-key-of-theirs", "a-second-key-of-theirs"
NAME = "SANDBOX_API_KEY"


@pytest.fixture
def tenant() -> Tenant:
    return Tenant.objects.create(slug="theirs", name="Theirs")


def read(monkeypatch: pytest.MonkeyPatch, **environment: str) -> agent_sandbox.AgentSandbox:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return agent_sandbox.read(StrictEnv())


def test_a_given_key_is_its_tenants(tenant: Tenant) -> None:
    assert ensure_key(tenant, NAME, FIRST)
    assert not ensure_key(tenant, NAME, FIRST)
    assert authenticate(FIRST).tenant == tenant
    assert ApiKey.objects.count() == 1


def test_another_value_replaces_it(tenant: Tenant) -> None:
    ensure_key(tenant, NAME, FIRST)
    ensure_key(tenant, NAME, SECOND)

    assert authenticate(SECOND).tenant == tenant
    with pytest.raises(Unauthenticated):
        authenticate(FIRST)


def test_a_revoked_value_does_not_come_back_by_a_restart(tenant: Tenant) -> None:
    ensure_key(tenant, NAME, FIRST)
    revoke(ApiKey.objects.get())

    with pytest.raises(InvalidConfiguration, match="was revoked"):
        ensure_key(tenant, NAME, FIRST)
    with pytest.raises(Unauthenticated):
        authenticate(FIRST)


def test_the_key_of_another_tenant_is_not_taken_over(tenant: Tenant) -> None:
    other = Tenant.objects.create(slug="other", name="Other")
    _, text = create_api_key(other, "its own")

    with pytest.raises(InvalidConfiguration, match="belongs to another tenant"):
        ensure_key(tenant, NAME, text)
    assert authenticate(text).tenant == other


def test_little_of_a_given_key_is_shown(tenant: Tenant) -> None:
    ensure_key(tenant, NAME, FIRST)
    assert ApiKey.objects.get().prefix == FIRST[:4]


@pytest.mark.parametrize(
    "key", ["change-me", "your-secret-api-key", "short", "a\x00key" * 9, "é" * 20]
)
def test_a_key_that_anybody_knows_or_guesses_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(StrictEnv, "secret", lambda self, name: key)
    with pytest.raises(ImproperlyConfigured, match=NAME) as refused:
        read(monkeypatch)
    assert key not in str(refused.value)


def test_the_seeds_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    given = read(monkeypatch)
    assert (given.total_seconds, given.idle_seconds, given.execution_seconds) == (1800, 600, 10)
    assert given.upload_bytes == 52_428_800
    assert given.api_key == ""


def test_the_key_is_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FIRST not in repr(read(monkeypatch, SANDBOX_API_KEY=FIRST))
