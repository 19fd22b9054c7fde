"""Asking a session's sandbox for its files, in a thread that waits, and only for so long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from executions.services.asking import guarded
from providers.errors import ProviderUnavailable
from providers.waiting import submit

ANSWER_SECONDS = 120.0
PIECE_SECONDS = 30.0


def answered(provider_id: str, call: Callable[[], Any], seconds: float = ANSWER_SECONDS) -> Any:
    """What a provider answers. Raises SandboxError; ProviderUnavailable for silence."""
    awaited = submit(call)
    try:
        return guarded(provider_id, lambda: awaited.result(seconds))
    except NotYet:
        raise ProviderUnavailable(
            f"The provider {provider_id!r} did not answer within {seconds:g} s."
        ) from None


def pieces_of(provider_id: str, begin: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Bytes that a provider streams. Raises SandboxError; ProviderUnavailable for silence."""
    pieces = answered(provider_id, begin, PIECE_SECONDS)
    while True:
        piece = answered(provider_id, lambda: next(pieces, None), PIECE_SECONDS)
        if piece is None:
            return
        if not isinstance(piece, bytes):
            raise ProviderUnavailable("The provider gave something that is no bytes.")
        yield piece
