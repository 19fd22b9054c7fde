"""Requests as an asynchronous server hands them to the bridge."""

from __future__ import annotations

from typing import Any


def scope(path: str, **values: Any) -> dict[str, Any]:
    """A GET of this path, with other values of the scope where they are given."""
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        **values,
    }
