"""The processor time that a page has for hostile texts: colours, and lines side by side.

It is spent in a process apart (`text_work`). A text that takes longer is shown as it is. Results
are kept, so that a page that is asked for again costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections import OrderedDict
from typing import Any

import pygments

from executions.kernel import text_work
from executions.kernel.process_pool import PoolBusy, ProcessPool
from providers.languages import language_of

logger = logging.getLogger(__name__)

# Of the processor, for all texts of one page.
PAGE_SECONDS = 0.15
# What is shorter than this is not worth to ask for.
_LEAST_SECONDS = 0.005
# Beyond it, colours cost more than they tell.
MAX_COLOURED = 50_000
# For a machine that has no time. The thread of the page waits so long at most, and so long before
# that for one of the processes.
WALL_SECONDS, PATIENCE_SECONDS = 3.0, 1.0
AT_ONCE = 2
_MOST_ANSWERED = 1 << 20
_KEPT_BYTES = 8 << 20

Operation = tuple[str, int, int, int, int]


class PageTime:
    """What one page may spend, in seconds of the processor. Make one for each page."""

    def __init__(self, seconds: float = PAGE_SECONDS) -> None:
        self._whole = self._left = seconds

    def coloured(self, text: str, language: str) -> str | None:
        """The text as HTML, escaped, in the colours of a language. None where it is to be shown as
        it is: it is too long, takes too long, or nobody knows the language."""
        if len(text) > MAX_COLOURED or not (known := language_of(language)):
            return None
        found = self._ask(text_work.COLOURS, known.lexer, text)
        return found if isinstance(found, str) else None

    def aligned(self, before: list[str], after: list[str]) -> list[Operation] | None:
        """How lines become others, as difflib's operations. None where that takes too long."""
        found = self._ask(text_work.LINES, before, after)
        if not isinstance(found, list):
            return None
        return [(str(kind), *map(int, places)) for kind, *places in found]  # type: ignore[misc]

    def _ask(self, kind: str, *given: Any) -> Any:
        name = hashlib.sha256(json.dumps([kind, *given]).encode()).digest()
        is_known, answer = _kept.find(name)
        if is_known:
            return None if answer is None else json.loads(answer)[1]
        if self._left < _LEAST_SECONDS:
            return None
        seconds, self._left = self._left, 0.0
        try:
            answer = _pool.ask(
                json.dumps([kind, seconds, *given]).encode() + b"\n", PATIENCE_SECONDS
            )
        except PoolBusy:
            return None
        except OSError as error:
            logger.warning("no process can be started for a page's texts: %s", error)
            return None
        took, found = (seconds, None) if answer is None else json.loads(answer)
        self._left = max(0.0, seconds - took)
        if found is not None:
            _kept.keep(name, answer)
        elif answer is not None and seconds >= self._whole == PAGE_SECONDS:
            # It had all that there is, and would have no more the next time.
            _kept.keep(name, None)
        return found


class _Kept:
    """The last answers, in bounded memory. None for a text that takes too long."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._size = 0

    def find(self, name: bytes) -> tuple[bool, bytes | None]:
        with self._lock:
            if name not in self._answers:
                return False, None
            self._answers.move_to_end(name)
            return True, self._answers[name]

    def keep(self, name: bytes, answer: bytes | None) -> None:
        with self._lock:
            if name in self._answers:
                return
            self._answers[name] = answer
            self._size += _size_of(answer)
            while self._size > self._most:
                _, gone = self._answers.popitem(last=False)
                self._size -= _size_of(gone)


def _size_of(answer: bytes | None) -> int:
    """With what keeping it takes beside."""
    return 300 + len(answer or b"")


def _command() -> tuple[str, ...]:
    folder = os.path.dirname(os.path.dirname(pygments.__file__))
    return (sys.executable, "-I", "-S", text_work.__file__, folder)


_kept = _Kept(_KEPT_BYTES)
_pool = ProcessPool(
    _command(), at_once=AT_ONCE, wall_seconds=WALL_SECONDS, most_answered=_MOST_ANSWERED
)
