"""Network lists of tests, and attempts against them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executions.capabilities.network.credentials import put_credential
from executions.capabilities.network.models import NetworkCredential, NetworkList
from providers.network import Attempt, Attempts
from providers.services.settings_cache import forget_all


def listed(*rules: str, tenant: str = "", **columns: Any) -> NetworkList:
    """A list in force, of the installation without a tenant."""
    columns.setdefault("mode", "allowlist" if rules else "open")
    return NetworkList.objects.create(tenant_slug=tenant, rules="\n".join(rules), **columns)


VALUE = "tok-0123456789-planted"


def credential(
    name: str = "prices", *rules: str, tenant: str = "", value: str = VALUE, **columns: Any
) -> NetworkCredential:
    """A credential in force, of the installation without a tenant."""
    columns["rules"] = "\n".join(rules or ("https://api.example.com",))
    return put_credential(name, value, tenant_slug=tenant, **columns)


def attempts(*made: Attempt) -> Attempts:
    found = Attempts()
    for each in made:
        found.add(each)
    return found


ALLOWED = Attempt(
    1_790_000_000.5, "pypi.org", 443, "allowed", rule="pypi.org", sent=120, received=4096
)
REFUSED = Attempt(1_790_000_001.5, "evil.test", 443, "refused", why="not listed", layer="tenant")


@pytest.fixture
def lists_forgotten() -> Iterator[None]:
    """What a test had in force goes with its rows, and is known for a moment longer."""
    yield
    forget_all()
