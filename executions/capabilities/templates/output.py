"""The output of a run, read line by line while it comes, in the thread that waits for the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

from executions.runs.event_log import STREAMS, EventLog

_AT_ONCE_BYTES = 256 * 1024
# What a line is cut to, wherever its end is.
MOST_LINE_BYTES = 4000


class Lines:
    """The lines of a run, of both streams in the order in which they come.

    `tell` is given the next ones, and nothing again a while after that, when it can write what it
    has put off.
    """

    def __init__(
        self, log: EventLog, tell: Callable[[Sequence[str]], None], pause_seconds: float
    ) -> None:
        self._log = log
        self._tell = tell
        self._pause_seconds = pause_seconds
        self._after = 0
        self._begun = dict.fromkeys(STREAMS, b"")

    def wait(self, future: Future[Any]) -> None:
        """Wait for the end of a future, and tell what comes meanwhile."""
        is_put_off, woken = False, Event()
        future.add_done_callback(lambda _: woken.set())
        while not future.done():
            change = self._log.next_change(self._after)
            change.add_done_callback(lambda _: woken.set())
            has_changed = woken.wait(self._pause_seconds if is_put_off else None)
            # First: it may be done, and is not again.
            woken.clear()
            change.cancel()
            lines = self._next()
            if lines or is_put_off:
                self._tell(lines)
            # The part of a line is no reason to forget those before it.
            is_put_off = bool(lines) or (is_put_off and has_changed)

    def rest(self) -> list[str]:
        """Return what was not told yet, once the run has ended."""
        found = self._next()
        return [*found, *(_line(each) for each in self._begun.values() if each.strip())]

    def _next(self) -> list[str]:
        found: list[str] = []
        while True:
            entries, _ = self._log.read(self._after, _AT_ONCE_BYTES)
            if not entries:
                return found
            self._after = entries[-1].seq
            for entry in entries:
                if entry.type in STREAMS:
                    found += self._whole_lines(entry.type, entry.data)

    def _whole_lines(self, stream: str, data: bytes) -> list[str]:
        *whole, begun = (self._begun[stream] + data.replace(b"\r", b"\n")).split(b"\n")
        self._begun[stream] = begun[:MOST_LINE_BYTES]
        return [_line(each) for each in whole if each.strip()]


def _line(data: bytes) -> str:
    return data[:MOST_LINE_BYTES].decode("utf-8", "replace")
