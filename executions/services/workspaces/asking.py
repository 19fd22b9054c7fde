"""Asking a session's sandbox for its files, in a thread that waits, and only for so long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from executions.runs.provider_calls import guarded
from executions.services.workspaces.claims import BLIND, Claimed, claimed
from providers.errors import ProviderUnavailable
from providers.sandbox import KeptSandbox
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


def changes_of(
    provider_id: str, sandbox: KeptSandbox, mark: str, *, thorough: bool = False
) -> Claimed:
    """What has changed since a mark that `claimed` gave; all there is, where the look before could
    not see all and this one could: what went meanwhile was told to nobody. Raises SandboxError.
    """

    def look(since: str) -> Claimed:
        return claimed(
            answered(provider_id, lambda: sandbox.files.changes(since, thorough=thorough))
        )

    found = look(mark.removeprefix(BLIND))
    if mark.startswith(BLIND) and not found.unseen and not found.complete:
        return look("")
    return found


def pieces_of(provider_id: str, begin: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Bytes that a provider streams. Raises SandboxError; ProviderUnavailable for silence."""
    pieces = answered(provider_id, begin, PIECE_SECONDS)
    while True:
        piece = answered(provider_id, lambda: next(pieces, None), PIECE_SECONDS)
        if piece is None:
            return
        if not isinstance(piece, bytes):
            raise ProviderUnavailable("The provider did not return bytes.")
        yield piece
