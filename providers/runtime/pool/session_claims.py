"""What a kept sandbox's guest says of what is in it, as values. All of it is its claim."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from providers.errors import ProviderUnavailable
from providers.runtime.guest.paths import MOST_DEPTH, PATH_BYTES
from providers.runtime.guest.protocol import CALL_BYTES, MOST_UNSEEN, NAME_BYTES
from providers.runtime.pool import claims
from providers.runtime.pool.claims import read_outputs
from providers.sandbox import Context, FileChange, FileEntry, Process, is_internal
from providers.values import RunLimits, ToolCall

T = TypeVar("T")

# The longest name, path and argument that is taken.
TEXT_LIMIT = 64 * 1024
_MOST_METADATA = 64
_ENTRY_TYPES = ("file", "directory", "symlink", "other")
_CHANGES = ("created", "modified", "deleted", "moved", "attributes")
_ENDED_BY = ("", "timeout", "memory", "closed")


def one(read: Callable[[Any], T | None], claimed: Any) -> T:
    """What was claimed. Raises ProviderUnavailable, `started`, for what is no such thing."""
    value = read(claimed)
    if value is None:
        raise ProviderUnavailable("The sandbox gave an invalid answer.", started=True)
    return value


def several(read: Callable[[Any], T | None], claimed: Any) -> list[T]:
    """Those of what was claimed that are such things."""
    found = [read(each) for each in (claimed if isinstance(claimed, list) else [])]
    return [each for each in found if each is not None]


def context(claimed: Any) -> Context | None:
    if not _has_texts(claimed, "id", "language", "cwd"):
        return None
    return Context(claimed["id"], claimed["language"], claimed["cwd"])


def process(claimed: Any) -> Process | None:
    if not _has_texts(claimed, "cwd") or _count(claimed.get("pid")) is None:
        return None
    argv = claimed.get("argv")
    if not isinstance(argv, list) or not all(map(_is_text, argv)):
        return None
    ended = claimed.get("ended_by_us")
    return Process(
        claimed["pid"],
        argv,
        claimed["cwd"],
        claims.read_exit_code(claimed.get("exit_code")),
        cast("Literal['', 'timeout', 'memory', 'closed']", ended if ended in _ENDED_BY else ""),
    )


def entry(claimed: Any) -> FileEntry | None:
    if not _has_texts(claimed, "path", "target") or claimed.get("type") not in _ENTRY_TYPES:
        return None
    modified, end = claimed.get("modified"), claimed.get("end")
    return FileEntry(
        claimed["path"],
        claimed["type"],
        _count(claimed.get("size")) or 0,
        _count(claimed.get("mode")) or 0,
        # Files may be older than 1970.
        float(modified) if type(modified) in (int, float) and abs(modified) < 2**53 else 0.0,
        claimed["target"],
        _end(claimed["path"], end) if isinstance(end, Mapping) else None,
        _metadata(claimed.get("metadata")),
    )


def _end(path: str, claimed: Mapping[str, Any]) -> FileEntry | None:
    """Where a link leads, which has an absolute path and is no link itself."""
    found = entry({"target": "", "size": 0, "modified": 0, **claimed, "end": None})
    if found is None or found.type == "symlink":
        return None
    return found if path.startswith("/") and found.path.startswith("/") else None


def _metadata(claimed: Any) -> dict[str, str]:
    """As far as each name and value is a short text."""
    if not isinstance(claimed, Mapping):
        return {}
    given = list(claimed.items())[:_MOST_METADATA]
    return {
        name: value
        for name, value in given
        if _is_text(name) and _is_text(value) and max(len(name), len(value)) <= PATH_BYTES
    }


def change(claimed: Any) -> FileChange | None:
    if not _has_texts(claimed, "path") or claimed.get("type") not in _CHANGES:
        return None
    former, found = claimed.get("former"), claimed.get("entry")
    return FileChange(
        claimed["type"],
        claimed["path"],
        former if _is_text(former) else "",
        None if found is None else entry(found),
    )


def workspace_path(claimed: Any) -> str | None:
    """A path that names something in the workspace, and nothing of ours. None for what is none."""
    if not isinstance(claimed, str) or len(claimed) > PATH_BYTES or "\0" in claimed:
        return None
    parts = claimed.split("/")
    if len(parts) > MOST_DEPTH or any(part in ("", ".", "..") for part in parts):
        return None
    try:
        is_short = len(os.fsencode(claimed)) <= PATH_BYTES
    except UnicodeEncodeError:
        # A surrogate that stands for no byte.
        return None
    return claimed if is_short and not is_internal(claimed) else None


def workspace_entry(claimed: Any) -> FileEntry | None:
    """An entry that may be one of the workspace."""
    found = entry(claimed)
    return None if found is None or workspace_path(found.path) is None else found


def unseen(claimed: Any) -> list[str] | None:
    """Folders of the workspace, "" for all of it."""
    if not isinstance(claimed, list) or len(claimed) > MOST_UNSEEN:
        return None
    are_paths = all(path == "" or workspace_path(path) is not None for path in claimed)
    return claimed if are_paths else None


def mark(claimed: Any) -> str | None:
    is_one = isinstance(claimed, str) and 0 < len(claimed) <= 100 and claimed.isprintable()
    return claimed if is_one and claimed.isascii() else None


def count(claimed: Any) -> int | None:
    return _count(claimed)


def output(parts: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """A rich value, None where nothing of it is well formed."""
    found = read_outputs({f"output:0:{mime}": part for mime, part in parts.items()}, _ANY)
    return found[0] if found else None


def call(parts: Mapping[str, bytes]) -> ToolCall | None:
    """A call of a tool, None where it is none that could be answered."""
    number, name = parts.get("call", b""), parts.get("name", b"")
    is_one = number.isdigit() and len(number) < 20 and 0 < len(name) <= NAME_BYTES
    arguments = parts.get("arguments", b"")
    if not is_one or len(arguments) > CALL_BYTES or not name.isascii():
        return None
    return ToolCall(int(number), name.decode(), arguments)


# The host has measured what it let through.
_ANY = RunLimits(rich_output_count=1, rich_output_bytes=1 << 40)


def _count(claimed: Any) -> int | None:
    return claimed if type(claimed) is int and 0 <= claimed < 2**63 else None


def _is_text(claimed: Any) -> bool:
    return isinstance(claimed, str) and len(claimed) <= TEXT_LIMIT


def _has_texts(claimed: Any, *names: str) -> bool:
    return isinstance(claimed, Mapping) and all(_is_text(claimed.get(name)) for name in names)
