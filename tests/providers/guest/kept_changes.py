"""What tests of changes in a kept sandbox's workspace share: a mark to begin at, and a reader's copy."""

from __future__ import annotations

import pytest

from tests.support.kept_frames import Rooms

THOROUGH = pytest.mark.parametrize("thorough", [False, True], ids=["noticed", "thorough"])


def settled(rooms: Rooms) -> str:
    """A mark after which nothing is told twice: the clock of files has ticked."""
    rooms.changes()
    rooms.shell("sleep 0.05")
    return rooms.changes(rooms.changes(thorough=True).mark).mark


def replay(
    model: dict[str, tuple[object, ...]],
    entries: dict[str, dict[str, object]],
    removed: list[str],
    *,
    complete: bool,
) -> None:
    if complete:
        model.clear()
    for path in removed:
        # It may have come and gone since this reader looked.
        model.pop(path, None)
    model |= {path: said(entry) for path, entry in entries.items()}


def said(entry: dict[str, object]) -> tuple[object, ...]:
    is_folder = entry["type"] == "directory"
    return (entry["type"], entry["mode"], entry["target"], None if is_folder else entry["size"])


def listed(rooms: Rooms) -> dict[str, tuple[object, ...]]:
    return {entry["path"]: said(entry) for entry in rooms.list(depth=64)}
