"""Paths as E2B's clients write them: absolute ones anywhere in the sandbox, others from the home
on, which is the workspace by another name."""

from __future__ import annotations

import posixpath

from executions.api.e2b.errors import Refused, invalid
from executions.kernel.paths import is_name
from providers.guest.names import escape, shorten, unescape
from providers.pool.template import WORKSPACE
from providers.sandbox import below_workspace

HOME = "/home/user"
USER = "user"


def to_place(path: object, field: str = "path") -> str:
    """The absolute path that is meant, of the workspace by that name. Raises Refused for none."""
    if not isinstance(path, str) or (path and not is_name(path)):
        raise invalid(f"{field}: Must be a path.")
    path = unescape(path)
    if path == "~" or path.startswith("~/"):
        path = HOME + path[1:]
    if path.startswith("~"):
        raise invalid(f"{field}: {shorten(escape(path))!r} is the home of an unknown user.")
    whole = posixpath.normpath(posixpath.join(HOME, path)) if path else HOME
    # Of two slashes at the beginning POSIX leaves open what they mean.
    whole = f"/{whole.lstrip('/')}"
    below = below_workspace(whole)
    return whole if below is None else f"{WORKSPACE}/{below}".rstrip("/")


def to_named(path: object, field: str = "path") -> str:
    """The same, and neither the home itself nor the root."""
    found = to_place(path, field)
    if found in ("/", WORKSPACE):
        raise invalid(f"{field}: Must name something in a folder.")
    return found


def to_folder(path: object, field: str = "cwd") -> str:
    """Where programs are to be: from the home on, which has a name of its own for them, or an
    absolute path elsewhere."""
    found = to_place(path, field)
    below = below_workspace(found)
    return found if below is None else below


def shown(path: str) -> str:
    below = below_workspace(path)
    if below is None:
        return escape(path)
    return f"{HOME}/{escape(below)}" if below else HOME


def require_user(name: object) -> None:
    """Nobody but the sandbox's own user is to be had. Raises Refused."""
    if name not in ("", None, USER):
        raise Refused(
            401, "unauthenticated", f"There is no user {str(name)[:64]!r} here. Use {USER!r}."
        )
