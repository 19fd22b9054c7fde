"""Who is acting, for whatever is recorded on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SYSTEM = "system"

_actor: ContextVar[Callable[[], str]] = ContextVar("actor", default=lambda: SYSTEM)


def current_actor() -> str:
    """The user a request came from, a command's name, or "system"."""
    return _actor.get()()


@contextmanager
def acting_as(name: Callable[[], str]) -> Iterator[None]:
    """Within it, `name()` is who acts. It is asked only when somebody wants to know."""
    token = _actor.set(name)
    try:
        yield
    finally:
        _actor.reset(token)
