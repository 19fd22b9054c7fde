"""Rules that every request needs and that change rarely, looked up about once a second.

The web process does so ahead of its requests: after a rest, what they touch is no longer in
the processor's caches, and the three queries were 2 of 17 ms of a call (docs/performance.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from django.db import Error as DatabaseFailure
from django.db.models import Model
from django.db.models.signals import post_delete, post_save

from providers.threads import Loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_SECONDS = 1.0
RENEWED_SECONDS = 0.75
ASKED_SECONDS = 60.0


class CachedQuery(Generic[T]):
    """What `load` returned, at most KEPT_SECONDS old, or `seconds` where those are more.

    `models` are those whose rows it is made from: this process forgets it when it changes one.
    What is kept for longer is not looked up ahead.
    """

    def __init__(self, load: Callable[[], T], *models: type[Model], seconds: float = 0.0) -> None:
        self._load = load
        self._seconds = seconds
        self._value: tuple[float, T] | None = None
        self._asked_at = float("-inf")
        _all.add(self)
        for model in models:
            post_save.connect(self.forget, sender=model, weak=False)
            post_delete.connect(self.forget, sender=model, weak=False)

    def __call__(self) -> T:
        value, now = self._value, time.monotonic()
        self._asked_at = now
        if value is None or now - value[0] > max(KEPT_SECONDS, self._seconds):
            self._value = value = (now, self._load())
        return value[1]

    def forget(self, **signal: Any) -> None:
        self._value = None

    def renew(self) -> None:
        """Look it up anew if it was asked for in the last ASKED_SECONDS."""
        value, now = self._value, time.monotonic()
        if value is None or self._seconds or now - self._asked_at > ASKED_SECONDS:
            return
        renewed = now, self._load()
        # Forgotten meanwhile, it is left to the next request: what was read may be the former.
        if self._value is value:
            self._value = renewed


_all: WeakSet[CachedQuery[Any]] = WeakSet()


def forget_all() -> None:
    """Look everything up anew."""
    for kept in _all:
        kept.forget()


def renew_in_background() -> None:
    """Start the thread that looks up ahead of the requests, which then need not wait for it."""

    def renew() -> float:
        renew_all()
        return RENEWED_SECONDS

    Loop("kept-renewal", renew).start()


def renew_all() -> None:
    """Look up anew what is asked for these days. What fails is left to the next request to tell."""
    for kept in list(_all):
        try:
            kept.renew()
        except DatabaseFailure as error:
            logger.info("Rules could not be renewed: %s", error)
