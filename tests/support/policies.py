"""Policies of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executions.capabilities.policies.models import Policy
from providers.services.settings_cache import forget_all


def in_force(tenant_slug: str = "", **rules: Any) -> Policy:
    return Policy.objects.create(tenant_slug=tenant_slug, **rules)


@pytest.fixture
def policies_forgotten() -> Iterator[None]:
    """What a test had in force goes with its rows, and is known for a moment longer."""
    yield
    forget_all()
