"""Paths as E2B's clients write them: absolute ones below the home, which is the workspace."""

from __future__ import annotations

import posixpath

from executions.api.e2b.errors import Refused, invalid
from executions.services.workspaces.paths import is_name
from providers.guest.names import escape, shorten, unescape
from providers.pool.template import WORKSPACE

HOME = "/home/user"
# Both are the same folder: what a program is told by `pwd` is the second.
_ROOTS = (HOME, WORKSPACE)
USER = "user"


def to_workspace(path: object, field: str = "path") -> str:
    """Relative to the workspace; "" for the home itself. Raises Refused for what lies outside."""
    if not isinstance(path, str) or (path and not is_name(path)):
        raise invalid(f"{field}: Must be a path.")
    path = unescape(path)
    if path == "~" or path.startswith("~/"):
        path = HOME + path[1:]
    if path.startswith("~"):
        raise outside(path, field)
    whole = posixpath.normpath(posixpath.join(HOME, path)) if path else HOME
    # Of two slashes at the beginning POSIX leaves open what they mean.
    whole = f"/{whole.lstrip('/')}"
    for root in _ROOTS:
        if whole == root:
            return ""
        if whole.startswith(f"{root}/"):
            return whole.removeprefix(f"{root}/")
    raise outside(path, field)


def to_named(path: object, field: str = "path") -> str:
    """The same, and not the home itself."""
    if found := to_workspace(path, field):
        return found
    raise invalid(f"{field}: Must name something below {HOME}.")


def outside(path: str, field: str) -> Refused:
    return invalid(
        f"{field}: {shorten(escape(path))!r} lies outside {HOME}, and cannot be reached."
    )


def shown(path: str) -> str:
    return f"{HOME}/{escape(path)}" if path else HOME


def require_user(name: object) -> None:
    """Nobody but the sandbox's own user is to be had. Raises Refused."""
    if name not in ("", None, USER):
        raise Refused(
            401, "unauthenticated", f"There is no user {str(name)[:64]!r} here but {USER!r}."
        )
