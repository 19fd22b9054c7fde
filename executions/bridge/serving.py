"""One warm process: a request in each line, an answer in each line, in the order of their ends.

Every line but one that cancels is answered exactly once, and none ends the process.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from django.conf import settings
from django.db import close_old_connections, connections

from executions.bridge.answers import unrun
from executions.bridge.calling import Bridge
from executions.bridge.channel import Answers, TooLong, lines_of
from executions.bridge.requests import Frame, read_frame, too_long
from executions.kernel.declarations import refuse
from executions.runs import active_runs
from executions.runs.event_log import EventLog
from executions.runs.requests import run_limits
from providers.errors import InvalidConfiguration, ProviderUnavailable

# Calls that are carried out at once. A tenant's own bound counts as well.
THREADS = 8
# What may wait for a thread, in bytes of requests, before no more is read.
_LARGEST_REQUESTS = 2
_LOOK_SECONDS = 0.5
# What answers may take after what runs has been ended.
_STOPPED_SECONDS = 5.0
_CLIENT = "its client"


@dataclass(eq=False)
class _Call:
    """A request that has not been answered."""

    frame: Frame
    size: int
    log: EventLog = field(default_factory=lambda: EventLog(run_limits()))
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        # Either this is seen there, or the run here.
        self.log.on_begin = lambda: self.cancel() if self.is_cancelled else None

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.log.execution_id is not None:
            run = active_runs.find(self.log.execution_id)
            if run is not None:
                run.cancel(_CLIENT)


class Serving:
    """Serves one client until its input ends, it stops reading, or `stop` is called."""

    def __init__(self, bridge: Bridge, requests: int, answers: int) -> None:
        self._bridge = bridge
        self._requests = requests
        self._answers = Answers(answers)
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._calls: set[_Call] = set()
        self._held = 0
        self._stopping, self._stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = select.poll()
        self._watch.register(requests, select.POLLIN)
        self._watch.register(answers, 0)
        self._watch.register(self._stopping, select.POLLIN)
        self.is_left = False
        self.is_stopped = False

    def stop(self) -> None:
        """Read nothing more. For signal handlers too."""
        self.is_stopped = True
        os.write(self._stop, b".")

    def run(self, end_all: Callable[[], object]) -> None:
        """Until every request that was read is answered. `end_all` ends what runs after `stop`."""
        threads = [
            threading.Thread(target=self._work, name=f"bridge-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for line in lines_of(self._read, settings.SANDBOX_MAX_BODY_BYTES):
            self._take(line)
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            while thread.is_alive() and not self.is_stopped:
                thread.join(_LOOK_SECONDS)
                self._leave_when_unread()
        if self.is_stopped:
            end_all()
        end = time.monotonic() + _STOPPED_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _read(self, size: int) -> bytes:
        """What comes next; nothing at the end, and where nobody would read an answer."""
        while not self.is_stopped:
            ready = {descriptor for descriptor, _ in self._watch.poll()}
            if not self._answers.is_read():
                self._leave_when_unread()
                return b""
            if self._requests in ready and not self.is_stopped:
                return os.read(self._requests, size)
        return b""

    def _take(self, line: bytes | TooLong) -> None:
        if self.is_stopped or self.is_left:
            return
        name: str | int | None = None
        try:
            if isinstance(line, TooLong):
                raise too_long()
            frame = read_frame(line)
            if "cancel" in frame.body:
                self._cancel(frame)
                return
            name = frame.id
            self._begin(_Call(frame, len(line)))
        except InvalidConfiguration as error:
            self._answer(name, unrun(error))

    def _begin(self, call: _Call) -> None:
        with self._changed:
            if self._find(call.frame.id) is not None:
                refuse("id", "Another call with this id has no answer yet.")
            self._calls.add(call)
            self._held += call.size
        self._waiting.put(call)
        most = _LARGEST_REQUESTS * settings.SANDBOX_MAX_BODY_BYTES
        while self._held > most and not self.is_stopped:
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            self._leave_when_unread()

    def _cancel(self, frame: Frame) -> None:
        """One that has ended is not to be found any more, which is what was wanted."""
        if len(frame.body) > 1 or frame.body["cancel"] is None:
            refuse("cancel", "Must be the id of a call, without other fields.")
        with self._changed:
            call = self._find(frame.body["cancel"])
        if call is not None:
            call.cancel()

    def _find(self, name: Any) -> _Call | None:
        if name is None:
            return None
        return next((call for call in self._calls if call.frame.id == name), None)

    def _work(self) -> None:
        try:
            while call := self._waiting.get():
                close_old_connections()
                answer = self._answer_to(call)
                # Before the answer, whose reader may use the id again.
                with self._changed:
                    self._calls.discard(call)
                    self._held -= call.size
                    self._changed.notify_all()
                self._answer(call.frame.id, answer)
        finally:
            connections.close_all()

    def _answer_to(self, call: _Call) -> dict[str, Any]:
        # A thread that a cancelled call leaves free begins no other one.
        if call.is_cancelled or self.is_left:
            answer = unrun(ProviderUnavailable("The call was cancelled. Nothing was run."))
            answer["metadata"]["status"] = "cancelled"
            return answer
        return self._bridge.call(call.frame.body, call.log)

    def _answer(self, name: str | int | None, answer: dict[str, Any]) -> None:
        try:
            self._answers.write({"id": name, **answer})
        except OSError:
            self.is_left = True

    def _leave_when_unread(self) -> None:
        """Nobody waits any more for what runs."""
        if self._answers.is_read():
            return
        self.is_left = True
        with self._changed:
            calls = list(self._calls)
        for call in calls:
            call.cancel()
