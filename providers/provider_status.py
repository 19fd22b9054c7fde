"""What a provider says of itself, kept, so that no request waits for it to be said.

A look is taken when a provider is loaded. Later ones are taken in the background, when what is
known is asked for and has grown old; one that hangs leaves what was known before. Providers that
answer from memory (`knows_at_once`) are asked each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from providers import waiting
from providers.base import SandboxProvider
from providers.errors import RateLimited

LANGUAGES_SECONDS = 5.0
FULL_SECONDS = 0.25
# What is older says nothing of now. To be wrong costs a caller nothing: a full one says so itself.
STALE_SECONDS = 5.0


class _Kept:
    """One answer of a provider, or what it raised in its stead."""

    def __init__(self, ask: Callable[[SandboxProvider], Any], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._answer: Any = None
        self._error: BaseException | None = None
        self._told_at = float("-inf")
        self._asking = False
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        return time.monotonic() - self._told_at

    def look(self, provider: SandboxProvider) -> None:
        try:
            answer, error = self._ask(provider), None
        except BaseException as raised:
            answer, error = None, raised
        self._answer, self._error, self._told_at = answer, error, time.monotonic()
        self._asking = False

    def get(self, provider: SandboxProvider) -> Any:
        """What is known. Raises what the provider raised."""
        if self.age > self._seconds:
            if provider.knows_at_once or self._told_at == float("-inf"):
                self.look(provider)
            else:
                self._look_later(provider)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answer

    def _look_later(self, provider: SandboxProvider) -> None:
        with self._lock:
            if self._asking:
                return
            self._asking = True
        try:
            waiting.submit(lambda: self.look(provider), may_refuse=True)
        except RateLimited:
            self._asking = False


class _Known:
    def __init__(self) -> None:
        self.languages = _Kept(
            lambda provider: list(provider.get_supported_languages()), LANGUAGES_SECONDS
        )
        self.full = _Kept(lambda provider: bool(provider.is_full()), FULL_SECONDS)


_known: WeakKeyDictionary[SandboxProvider, _Known] = WeakKeyDictionary()


def take(provider: SandboxProvider) -> None:
    """Ask it now, for those who ask here later."""
    known = _of(provider)
    known.languages.look(provider)
    if not provider.knows_at_once:
        known.full.look(provider)


def languages_of(provider: SandboxProvider) -> list[str]:
    """What it runs, as known. Raises whatever the provider did."""
    found: list[str] = _of(provider).languages.get(provider)
    return found


def is_full(provider: SandboxProvider) -> bool:
    """Whether a caller would have to wait for a sandbox, as known. Raises as `languages_of`."""
    if provider.knows_at_once:
        return provider.is_full()
    known = _of(provider).full
    full = bool(known.get(provider))
    return full and known.age < STALE_SECONDS


def _of(provider: SandboxProvider) -> _Known:
    known = _known.get(provider)
    if known is None:
        known = _known.setdefault(provider, _Known())
    return known
