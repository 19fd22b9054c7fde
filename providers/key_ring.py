"""FERNET_KEYS as they are by now: a running process takes up what is put into their file.

Keys that came through the environment stay as they are until the process is started again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from providers.aes_gcm import Key, NotOpened
from providers.key_file import KeyFile

logger = logging.getLogger(__name__)

T = TypeVar("T")
Keys = tuple[Key, ...]

# An editor may be in the middle of writing: a key cut short would encrypt what nobody reads again.
SETTLED_SECONDS = 1.0


def fernet_keys() -> Keys:
    """The first one encrypts, all of them decrypt. Raises ImproperlyConfigured without any."""
    return ring.keys() if (ring := _ring()) else _given()


def opened(open_with: Callable[[Keys], T]) -> T:
    """What `open_with` returns for the keys. Raises NotOpened, as it does.

    Where they do not open it, those that are in their file by now may.
    """
    try:
        return open_with(fernet_keys())
    except NotOpened:
        ring = _ring()
        newer = ring.newer() if ring else ()
        if ring is None or not newer:
            raise
        found = open_with(newer)
        # They opened what somebody sealed, so they are whole.
        ring.take(newer)
        return found


def are_reread() -> bool:
    """Whether this process notices a change of the keys, or has to be started again for it."""
    return _ring() is not None


def _given() -> Keys:
    if not (keys := getattr(settings, "FERNET_KEYS", None)):
        raise ImproperlyConfigured("FERNET_KEYS is not set; nothing falls back to SECRET_KEY.")
    return tuple(keys)


def _ring() -> _Ring | None:
    file: KeyFile | None = getattr(settings, "FERNET_KEYS_FILE", None)
    return _ring_of(file, _given()) if file else None


class _Ring:
    """The keys of a file. One that was taken up stays good for reading while the process lives."""

    def __init__(self, file: KeyFile, given: Keys) -> None:
        self._file = file
        self._keys = given
        self._known: Any = ()
        self._seen: tuple[Any, float] = ((), 0.0)

    def keys(self) -> Keys:
        state = self._file.state()
        if state != self._known:
            now = time.monotonic()
            if state != self._seen[0]:
                self._seen = state, now
            elif now - self._seen[1] >= SETTLED_SECONDS:
                self._known = state
                self._settle(self._file.read())
        return self._keys

    def newer(self) -> Keys:
        """The keys in the file where one of them is new here."""
        found = self._file.read()
        return found if set(found) - set(self._keys) else ()

    def take(self, found: Keys) -> None:
        former = self._keys
        self._keys = (*found, *(key for key in former if key not in found))
        if self._keys != former:
            logger.info("%s was changed: %d keys loaded", self._file.path, len(found))

    def _settle(self, found: Keys) -> None:
        if found:
            self.take(found)
        else:
            logger.error(
                "%s contains no keys any more; the keys read before stay in use", self._file.path
            )


@lru_cache(maxsize=8)
def _ring_of(file: KeyFile, given: Keys) -> _Ring:
    return _Ring(file, given)
