"""A hostile name server, at the outer edge: what the system's resolver answers for some names."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest


def resolve_as(monkeypatch: pytest.MonkeyPatch, name: str, *answers: Sequence[str]) -> list[str]:
    """Have `name` answered by one list of addresses after the other, the last of them for ever; by
    an empty one, that there is no such name.

    Returns a list that gets longer with each time the name is asked for.
    """
    asked: list[str] = []
    before = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host != name:
            return before(host, port, *rest, **options)
        asked.append(host)
        current = answers[min(len(asked), len(answers)) - 1]
        if not current:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [entry for text in current for entry in before(text, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked
