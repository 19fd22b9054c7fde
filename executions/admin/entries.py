"""Entries of folders, as pages show them. Names are hostile."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from executions.services.presentation import visible
from providers.sandbox import FileEntry

_LATEST = 253_402_300_799


def shown_entry(entry: FileEntry) -> dict[str, Any]:
    is_moment = 0 <= entry.modified <= _LATEST
    return {
        "name": visible(readable(entry.path)),
        "target": visible(readable(entry.target)),
        "type": entry.type,
        "size": entry.size,
        "mode": f"{entry.mode & 0o7777:04o}",
        "modified": datetime.fromtimestamp(entry.modified, UTC) if is_moment else None,
        "link": link_to(entry.path) if entry.type == "directory" else "",
    }


def readable(name: str) -> str:
    """A name with what is no UTF-8 in it, and line feeds, told."""
    told_bytes = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return told_bytes.replace("\n", "[U+000A]").replace("\t", "[U+0009]")


def link_to(folder: str, after: str = "") -> str:
    asked = {"path": folder, **({"after": after} if after else {})}
    return "?" + urlencode(asked, errors="surrogateescape")
