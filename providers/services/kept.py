"""Rules that every request needs and that change rarely, looked up once a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from django.db.models import Model
from django.db.models.signals import post_delete, post_save

T = TypeVar("T")

KEPT_SECONDS = 1.0


class Kept(Generic[T]):
    """What `load` returned, at most KEPT_SECONDS old; at once after a change made in this process.

    `models` are those whose rows it is made from.
    """

    def __init__(self, load: Callable[[], T], *models: type[Model]) -> None:
        self._load = load
        self._value: tuple[float, T] | None = None
        _all.add(self)
        for model in models:
            post_save.connect(self.forget, sender=model, weak=False)
            post_delete.connect(self.forget, sender=model, weak=False)

    def __call__(self) -> T:
        value, now = self._value, time.monotonic()
        if value is None or now - value[0] > KEPT_SECONDS:
            self._value = value = (now, self._load())
        return value[1]

    def forget(self, **signal: Any) -> None:
        self._value = None


_all: WeakSet[Kept[Any]] = WeakSet()


def forget_all() -> None:
    """Look everything up anew."""
    for kept in _all:
        kept.forget()
