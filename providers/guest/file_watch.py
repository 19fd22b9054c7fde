"""Tells what changes below a folder, by looking at all of it again and again.

The kernel's own watches are refused in sandboxes that share a kernel with others, whose count is
one for all (providers/pool/seccomp.py); a look works everywhere, and what came and went between
two is not seen.
"""

import os
import stat
import time

from .file_operations import Event
from .folders import walk
from .kept import Refused
from .paths import joined, parse_anywhere, reach

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any

    from .file_operations import Steps

    # Type with mode, inode, and what a write changes.
    States = dict[str, tuple[int, int, int, int]]

MOST_WATCHED = 20_000
_PAUSE_SECONDS = 0.25
# A look may take this part of the time.
_SHARE = 20


def watch(base: int, header: "dict[str, object]") -> "Steps":
    """`ready` once, then `change` for each. Raises Refused when there is too much below."""
    parts = parse_anywhere(header.get("path"))
    folder = reach(base, parts)
    prefix = joined([*parts, ""]) if parts else ""
    try:
        known = yield from _look(folder)
        yield Event("ready", {})
        took = 0.0
        while True:
            yield max(_PAUSE_SECONDS, took * _SHARE)
            if os.fstat(folder).st_nlink == 0:
                raise Refused("The folder is gone.", "path", "missing")
            began = time.monotonic()
            now = yield from _look(folder)
            took = time.monotonic() - began
            for change in _changes(known, now, prefix):
                yield change
            known = now
    finally:
        os.close(folder)


def _look(folder: int) -> "Generator[None, Any, States]":
    seen: "States" = {}
    for found in walk(folder, 64):
        if found is None:
            yield None
        elif len(seen) >= MOST_WATCHED:
            raise Refused(f"More than {MOST_WATCHED} entries cannot be watched.", code="exhausted")
        elif found.status is None:
            seen[found.path] = (0, 0, 0, 0)
        else:
            status = found.status
            # A folder's size and time change with what is in it, which is told by itself.
            is_folder = stat.S_ISDIR(status.st_mode)
            written = (0, 0) if is_folder else (status.st_mtime_ns, status.st_size)
            seen[found.path] = (status.st_mode, status.st_ino, *written)
    return seen


def _changes(before: "States", now: "States", prefix: str) -> "Iterator[Event]":
    gone = {state: path for path, state in before.items() if path not in now}
    moved = {}
    for path, state in now.items():
        if path not in before and state in gone:
            moved[path] = gone.pop(state)
    came_from = set(moved.values())
    for path in sorted(path for path in before if path not in now and path not in came_from):
        yield Event("change", {"type": "deleted", "path": prefix + path})
    for path in sorted(now):
        if path in moved:
            if not _went_along(path, moved):
                fields: "dict[str, object]" = {
                    "type": "moved",
                    "path": prefix + path,
                    "former": prefix + moved[path],
                }
                yield Event("change", fields)
        elif path not in before:
            yield Event("change", {"type": "created", "path": prefix + path})
        elif now[path] != before[path]:
            yield Event("change", {"type": "modified", "path": prefix + path})


def _went_along(path: str, moved: "dict[str, str]") -> bool:
    """Whether it was only the folder around it that was moved."""
    folder, _, name = path.rpartition("/")
    return folder in moved and moved[path] == f"{moved[folder]}/{name}"
