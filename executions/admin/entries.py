"""Entries of folders, as pages show them. Names are hostile."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest

from executions.kernel.paths import from_text, to_text
from providers.guest.names import escape
from providers.hidden_characters import visible
from providers.sandbox import FileEntry

_LATEST = 253_402_300_799


def shown_entry(entry: FileEntry) -> dict[str, Any]:
    is_moment = 0 <= entry.modified <= _LATEST
    return {
        "name": visible(escape(entry.path)),
        "target": visible(escape(entry.target)),
        "type": entry.type,
        "size": entry.size,
        "mode": f"{entry.mode & 0o7777:04o}",
        "modified": datetime.fromtimestamp(entry.modified, UTC) if is_moment else None,
        "link": link_to(entry.path) if entry.type == "directory" else "",
    }


def link_to(path: str, after: str = "") -> str:
    """The query of a page about this path. As the database has it: no query that Django reads holds
    a name that is not UTF-8. `after` is such a text already."""
    asked = {"path": to_text(path), **({"after": after} if after else {})}
    return "?" + urlencode(asked)


def named_in(request: HttpRequest) -> str:
    """The path of such a query."""
    return from_text(request.GET.get("path", ""))
