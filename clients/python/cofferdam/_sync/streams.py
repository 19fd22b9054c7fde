# Generated from cofferdam/_async by make_sync.py: do not edit.
"""Streams of a run's events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import httpx

from cofferdam._sync.transport import Transport, json_of, reaching
from cofferdam.calls import EXECUTIONS, Call, followed
from cofferdam.decoding import decode
from cofferdam.errors import ConnectionLost, UnexpectedAnswer, Unreachable, service_error
from cofferdam.events import OPEN, Event, Lines, event_of
from cofferdam.shapes import Execution

# How often a stream is taken up again without an event in between.
MOST_RESUMED = 5


class RunStream:
    """The events of one run, read in an `async with` block.

    `execution` is set by the `done` event, `id` by the first event. Leaving the block earlier
    cancels the run, unless the stream is `detached` or comes from `follow`. Such a stream resumes
    after the last event when its connection breaks.
    """

    def __init__(
        self,
        transport: Transport,
        call: Call,
        *,
        detached: bool,
        id: str | None = None,  # noqa: A002
        after: int = 0,
    ) -> None:
        self._transport = transport
        self._call = call
        self._detached = detached
        self._answer: httpx.Response | None = None
        self._pieces: Iterator[bytes] | None = None
        self._lines = Lines()
        self._resumed = 0
        self.id = id
        self.after = after
        self.execution: Execution | None = None

    def __enter__(self) -> Self:
        self._open(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while self.execution is None:
            line = self._line()
            if line is None:
                self._resume()
            elif (event := self._taken(event_of(line))) is not None:
                return event
        raise StopIteration

    def until_done(self) -> Execution:
        """Read to the end, skip the events, and return the execution."""
        for _ in self:
            pass
        if self.execution is None:
            raise UnexpectedAnswer("The stream ended without its execution.")
        return self.execution

    def _taken(self, event: Event) -> Event | None:
        """The event to return; None if the service ends the stream before the run has ended."""
        if event.type == "error":
            raise service_error(200, event.raw)
        if event.execution is not None:
            self.id = event.execution.id
            if event.execution.status in OPEN:
                return None
            self.execution = event.execution
        elif event.type == "started":
            self.id = str(event.raw.get("id"))
        self.after = event.seq
        self._resumed = 0
        return event

    def _open(self, call: Call) -> None:
        self._answer = self._transport.open(call)
        self._pieces = self._answer.iter_bytes()
        self._lines = Lines()
        if self._answer.headers.get("Content-Type", "").startswith("application/json"):
            # It is queued or needs approval: its events are found under its id.
            with reaching("The service"):
                self._answer.read()
            self.id = decode(Execution, json_of(self._answer)).id
            self._detached = True
            self._close()
            self._open(self._following())

    def _following(self) -> Call:
        return followed(f"{EXECUTIONS}/{self.id}/events", self.after)

    def _line(self) -> bytes | None:
        """The next line; None if the connection has ended."""
        while (line := self._lines.take()) is None:
            if self._pieces is None:
                raise ConnectionLost("The stream is closed.", id=self.id, after=self.after)
            try:
                with reaching("The service"):
                    piece = next(self._pieces, None)
            except Unreachable as problem:
                # Silence is no failure: a command in the background may say nothing for hours.
                self._resumed -= isinstance(problem.__cause__, httpx.ReadTimeout)
                return None
            if piece is None:
                return None
            self._lines.feed(piece)
        return line

    def _resume(self) -> None:
        self._close()
        if not self._detached or self.id is None or self._resumed >= MOST_RESUMED:
            reason = "The stream ended before the run had ended."
            raise ConnectionLost(reason, id=self.id, after=self.after)
        self._resumed += 1
        time.sleep(0.1 * 2**self._resumed)
        self._open(self._following())

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = self._pieces = None
