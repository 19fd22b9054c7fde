"""Kept sandboxes in bubblewrap, for tests of their commands and files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.kept_frames import Rooms
from tests.support.kept_guest import Guests


@pytest.fixture(scope="module")
def rooms(_bubblewrap_guests: Guests) -> Rooms:
    """A kept sandbox in bubblewrap that a module's tests share."""
    return Rooms(_bubblewrap_guests)


@pytest.fixture
def emptied(rooms: Rooms) -> None:
    """Nothing is left in `rooms` of the test before."""
    for entry in rooms.list():
        rooms.call("file.remove", path=entry["path"])


@pytest.fixture
def open_rooms(_bubblewrap_guests: Guests) -> Callable[..., Rooms]:
    """Makes sandboxes that a test may damage, or wants with limits of its own."""
    return lambda **limits: Rooms(_bubblewrap_guests, **limits)
