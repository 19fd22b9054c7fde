"""A provider manager of a test's own, over a provider that tells of its instances."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from providers import registry
from providers.manager import ProviderManager
from tests.support.provider_package import Packages, install_probe


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the provider `probe`: `started`, `closed` and `gate` tell of its instances."""
    module = f"manager_{tmp_path.name}"
    install_probe(Packages(tmp_path, monkeypatch), module)
    registry.get("probe")
    yield sys.modules[module]
    sys.modules[module].gate.set()
    registry.refresh()


@pytest.fixture
def manager() -> Iterator[ProviderManager]:
    made = ProviderManager()
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in another thread, which gives its database connection back."""

    def call(function: Callable[[], Any]) -> Any:
        try:
            return function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(16) as pool:
        yield lambda function: pool.submit(call, function)
