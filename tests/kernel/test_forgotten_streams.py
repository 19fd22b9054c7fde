"""What a stream holds is given back when nobody reads on, whoever collects the garbage then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from executions.sessions import session_sandbox
from providers.manager import ProviderManager
from tests.support.managers import configure

pytest_plugins = ["tests.support.manager_fixtures"]


def forget(held: AbstractContextManager[Any]) -> None:
    """Begin a stream that holds it, and leave it where the collector alone finds it."""

    def stream() -> Iterator[bytes]:
        with held:
            yield b""
            ring.append(None)

    pieces = stream()
    ring: list[Any] = [pieces]
    next(pieces)


def collects_while_it_has(lock: Any) -> bool:
    def collect() -> None:
        with lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.fixture
def by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_its_tenants_share(by_hand: None) -> None:
    forget(session_sandbox.stream_slot("forgetful"))
    assert session_sandbox._streams._taken["forgetful"] == 1
    assert collects_while_it_has(session_sandbox._lock)
    assert "forgetful" not in session_sandbox._streams._taken


@pytest.mark.django_db(transaction=True)
def test_its_provider(manager: ProviderManager, probe: Any, by_hand: None) -> None:
    configure()
    forget(manager.lease())
    slot = manager._slot
    assert slot is not None
    assert slot.users == 1
    assert collects_while_it_has(manager._lock)
    assert slot.users == 0
