"""Keeping rows for a time, and a later time."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from executions.capabilities.retention import service as retention
from tests.conftest import Caller


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention runs ten days after everything else."""
    clock = SimpleNamespace(now=lambda: timezone.now() + timedelta(days=10))
    monkeypatch.setattr(retention, "timezone", clock)


def keep(caller: Caller, **days: int) -> None:
    for data, value in days.items():
        setattr(caller.tenant, f"keep_{data}_days", value)
    caller.tenant.save()
