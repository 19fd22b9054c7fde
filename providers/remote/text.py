"""Reading what interpreters of the notebook kind say of an error."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def without_colours(text: str) -> str:
    """A traceback without the escape sequences that colour it."""
    return _COLOURS.sub("", text)


def exit_code_of(name: str, value: str) -> int:
    """The exit code an interpreter would have ended with, which such a service does not tell.

    `name` and `value` are the uncaught exception's class and text.
    """
    if name != "SystemExit":
        return 1
    if value in ("", "None"):
        return 0
    try:
        return int(value) & 0xFF
    except ValueError:
        return 1
