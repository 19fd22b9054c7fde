"""Tokens of links: whoever holds one has what it stands for, until it expires."""

from __future__ import annotations

import time
from typing import Any

from django.core import signing


class BadLink(Exception):
    """A link that we did not make, or whose time is over."""


def make_token(salt: str, expires_in: int, subject: Any, *facts: Any) -> str:
    """A token for `subject`, and what else is said of it, for so many seconds."""
    return signing.dumps([subject, int(time.time()) + expires_in, *facts], salt=salt)


def read_token(salt: str, token: str, facts: int = 0) -> list[Any]:
    """The subject of a token that was made with this salt, and so many facts. Raises BadLink."""
    try:
        subject, until, *said = signing.loads(token, salt=salt)
    except (signing.BadSignature, ValueError, TypeError) as error:
        raise BadLink from error
    if time.time() >= until or len(said) != facts:
        raise BadLink
    return [subject, *said]
