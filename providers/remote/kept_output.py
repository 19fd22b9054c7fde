"""The output of a process that several may follow, some of them from its beginning."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from providers.values import Emit, Event

KEPT_BYTES = 1024 * 1024


class KeptOutput:
    """Keeps the last KEPT_BYTES of both streams, in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Each piece with the number of bytes that came before it.
        self._pieces: deque[tuple[int, Event]] = deque()
        self._taken = 0
        self._kept = 0
        self._closed = False

    def take(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        with self._changed:
            self._pieces.append((self._taken, Event(stream, data)))
            self._taken += len(data)
            self._kept += len(data)
            while self._kept > KEPT_BYTES:
                _, dropped = self._pieces.popleft()
                self._kept -= len(dropped.data)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def hand_over(self, emit: Emit, after: int) -> None:
        """All from the byte `after` on that is still kept, as it comes, until the end."""
        while True:
            with self._changed:
                while self._taken <= after and not self._closed:
                    self._changed.wait()
                ready = [(at, one) for at, one in self._pieces if at + len(one.data) > after]
                came, after = after, max(after, self._taken)
                closed = self._closed
            for at, event in ready:
                emit(Event(event.type, event.data[max(0, came - at) :]))
            if closed:
                return
