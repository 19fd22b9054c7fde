"""Names that a client has used and that are not known here: each is logged once.

They come from outside. So there is a bound to their number and to their length.
"""

from __future__ import annotations

from logging import Logger

_MOST_NAMES, _MOST_CHARACTERS = 100, 64

_logged: dict[str, set[str]] = {}


def log_unknown(logger: Logger, message: str, name: str) -> None:
    """Log a name, unless it was logged under this message before. `message` has a %s for it."""
    if len(name) > _MOST_CHARACTERS or not name.isprintable():
        name = "?"
    known = _logged.setdefault(message, set())
    if name not in known and len(known) < _MOST_NAMES:
        known.add(name)
        logger.warning(message, name or "?")
