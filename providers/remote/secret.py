"""A credential that no repr, log record or traceback can show."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHOWN = "••••"
_LONGEST = 300
# A caller has no business with the addresses inside our network.
_ADDRESS = re.compile(r"https?://[^\s)'\"]+")


class Secret:
    """Holds a text. Only `reveal()` gives it away, at the call that needs it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return _SHOWN


def scrub(text: str, secrets: Iterable[Secret]) -> str:
    """What a service said, short enough for a message, without our credentials and addresses."""
    for secret in secrets:
        if secret:
            text = text.replace(secret.reveal(), _SHOWN)
    text = " ".join(_ADDRESS.sub("the service", text).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
