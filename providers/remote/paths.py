"""Paths of a workspace, before they are told to a service."""

from __future__ import annotations

from providers.errors import InvalidConfiguration
from providers.sandbox import below_workspace

_LONGEST = 4096


def workspace_path(path: str) -> str:
    """The path without needless parts, "" for the workspace itself. Raises InvalidConfiguration for
    what is none, and for what lies outside of the workspace."""
    below = below_workspace(path)
    parts = (below or "").split("/")
    if below is None or ".." in path.split("/") or "\0" in path or len(path) > _LONGEST:
        raise InvalidConfiguration(
            "path: Must lead below the workspace with this provider, without '..' and NUL.",
            field="path",
        )
    return "/".join(part for part in parts if part not in ("", "."))
