"""Paths of a workspace, before they are told to a service."""

from __future__ import annotations

from providers.errors import InvalidConfiguration

_LONGEST = 4096


def workspace_path(path: str) -> str:
    """The path without needless parts, "" for the workspace itself. Raises InvalidConfiguration."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path or len(path) > _LONGEST:
        raise InvalidConfiguration(
            "path: Must be relative to the workspace, without '..' and NUL.", field="path"
        )
    return "/".join(part for part in parts if part not in ("", "."))
