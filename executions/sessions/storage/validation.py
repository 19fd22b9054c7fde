"""What a sandbox says of its files, looked at before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from executions.kernel.paths import MOST_BYTES, is_name, is_path
from executions.sessions.storage import quota
from providers.errors import ProviderUnavailable
from providers.sandbox import Changes, FileEntry

_MOST_SIZE = 2**60
_MOST_MARK = 200
# Before the mark of a look that could not see all: what had gone of that is told by none after it.
BLIND = "!"
_SAVED = ("file", "directory", "symlink")


@dataclass(frozen=True)
class Claimed:
    """Changes that are well-formed: each path once, and every entry something that is saved.

    What is neither file, folder nor link, or has a name that no restored file could have, is told
    as removed. Nothing below a folder that is unseen is removed.
    """

    mark: str
    entries: Mapping[str, FileEntry]
    removed: Sequence[str]
    complete: bool
    unseen: Sequence[str] = ()


def claimed(answer: Any) -> Claimed:
    """Raises ProviderUnavailable for what are no changes, QuotaExceeded for too many."""
    mark = mark_of(answer)
    told = (answer.entries, answer.removed, answer.unseen)
    if not all(isinstance(each, list | tuple) for each in told):
        raise _none()
    unseen = frozenset(answer.unseen)
    if not all(isinstance(path, str) and (not path or is_path(path)) for path in unseen):
        raise _none()
    if len(answer.entries) > settings.SESSION_STORAGE_FILES:
        quota.check_session("", len(answer.entries), 0)
    entries: dict[str, FileEntry] = {}
    removed = []
    for entry in answer.entries:
        if not _is_entry(entry) or entry.path in entries:
            raise _none()
        if entry.type in _SAVED and is_path(entry.path) and _is_target(entry):
            entries[entry.path] = entry
        else:
            removed.append(entry.path)
    for path in answer.removed:
        if not isinstance(path, str):
            raise _none()
        if is_path(path) and path not in entries:
            removed.append(path)
    removed = [path for path in removed if is_path(path) and unseen.isdisjoint(_above(path))]
    mark = f"{BLIND}{mark}" if unseen and mark else mark
    return Claimed(mark, entries, removed, bool(answer.complete), sorted(unseen))


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))]


def mark_of(answer: Any) -> str:
    """The mark of what are said to be changes; "" for one that cannot be kept: all is told the next
    time. Raises ProviderUnavailable.
    """
    if not isinstance(answer, Changes) or not isinstance(answer.mark, str):
        raise _none()
    mark = answer.mark
    return mark if len(mark) <= _MOST_MARK and mark.isascii() and mark.isprintable() else ""


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, FileEntry)
        and isinstance(entry.path, str)
        and isinstance(entry.target, str)
        and type(entry.size) is int
        and 0 <= entry.size <= _MOST_SIZE
        and type(entry.mode) is int
        and type(entry.modified) in (int, float)
        and math.isfinite(entry.modified)
    )


def _is_target(entry: FileEntry) -> bool:
    return entry.type != "symlink" or (len(entry.target) <= MOST_BYTES and is_name(entry.target))


def _none() -> ProviderUnavailable:
    return ProviderUnavailable("The sandbox did not return file changes.")
